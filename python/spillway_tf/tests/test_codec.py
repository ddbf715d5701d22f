# SPDX-License-Identifier: Apache-2.0
"""Codecs: tensors that take fewer bytes while they are away."""
import numpy as np
import pytest
import tensorflow as tf

import spillway_tf
from conftest import random


@pytest.fixture(autouse=True)
def no_codec():
    yield
    spillway_tf.set_codec(None)


class Counted:
    """Growth of the statistics of codecs since this object was made."""

    def __init__(self):
        self.before = spillway_tf.get_lms_stats()

    def __call__(self, key):
        return spillway_tf.get_lms_stats()[key] - self.before[key]


def rounded(array):
    return array.astype(tf.bfloat16.as_numpy_dtype).astype(np.float32)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.complex64, tf.int64, tf.int8])
def test_lossless_is_bitwise(lms, dtype):
    spillway_tf.set_codec("lossless")
    counted = Counted()
    x = tf.cast(tf.nn.relu(random(256, 517) * 100), dtype)
    expected = x.numpy().tobytes()
    for _ in range(2):
        lms.evict()
        assert lms.is_away(x)
        assert tf.identity(x).numpy().tobytes() == expected
    assert counted("encoded_raw_bytes") >= len(expected)


def test_what_relu_makes_takes_fewer_bytes(lms):
    y = tf.nn.relu(random(500, 1000))
    spillway_tf.set_codec("lossless", for_=y)
    counted = Counted()
    lms.evict()
    assert lms.is_away(y)
    assert counted("encoded_raw_bytes") == 2_000_000
    assert counted("encoded_stored_bytes") < 0.6 * 2_000_000
    assert "written by a codec so far" in spillway_tf.memory_summary()


def test_bfloat16_rounds_what_was_named_and_nothing_else(lms):
    x, y, v = random(256, 300), random(256, 300, seed=2), tf.Variable(random(256, 300, seed=3))
    named, other, variable = rounded(x.numpy()), y.numpy(), rounded(v.numpy())
    spillway_tf.set_codec("bfloat16", for_=[x, v])
    lms.evict()
    assert lms.is_away(x) and lms.is_away(y)
    np.testing.assert_array_equal(tf.identity(x).numpy(), named)
    np.testing.assert_array_equal(tf.identity(y).numpy(), other)
    np.testing.assert_array_equal(tf.identity(v).numpy(), variable)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="loses bits.*by tensor"):
        spillway_tf.set_codec("bfloat16")
    for tensors in (None, random(64, 64)):
        with pytest.raises(ValueError, match='"lossless", "bfloat16" or None'):
            spillway_tf.set_codec("zstd", for_=tensors)
    for dtype in (tf.float64, tf.float16, tf.int32):
        with pytest.raises(ValueError, match=f"float32.*{dtype.name}"):
            spillway_tf.set_codec("bfloat16", for_=[random(64, 64), tf.zeros([64, 64], dtype)])


def test_training_under_a_limit_is_bitwise_the_same_with_lossless():
    def losses(limit, codec):
        spillway_tf.set_codec(codec)
        spillway_tf.set_lms_limit(limit)
        weights = [tf.Variable(random(256, 256, seed=i) * 0.1) for i in range(8)]
        out = []
        for step in range(3):
            with tf.GradientTape() as tape:
                h = random(2048, 256, seed=100 + step)
                for w in weights:
                    h = tf.nn.relu(h @ w)
                loss = tf.reduce_mean(h * h)
            for w, g in zip(weights, tape.gradient(loss, weights)):
                w.assign_sub(0.1 * g)
            out.append(loss.numpy().tobytes())
        return out
    free = losses(512 << 20, None)
    counted = Counted()
    assert losses(24 << 20, "lossless") == free
    assert 0 < counted("encoded_stored_bytes") < counted("encoded_raw_bytes")
