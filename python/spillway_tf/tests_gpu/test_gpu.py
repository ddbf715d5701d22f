# SPDX-License-Identifier: Apache-2.0
"""Tensors are evicted from the GPU and come back; training with half of the memory gives bitwise the same results."""
import numpy as np
import pytest
import tensorflow as tf

import spillway_tf
from conftest import CAPACITY
from spillway_tf import _shims
from spillway_tf._load import C
from training import Training, check_half_of_the_memory

MIB = 1 << 20


def random(seed, mib=4):
    """Returns a tensor that is the result of an operation on the GPU."""
    x = tf.random.stateless_normal((mib, 512, 512), (seed, 2))
    assert x.device.endswith("GPU:0")
    return x


def is_away(tensor):
    seen = C.view(_shims.address_of(_shims.values_of(tensor)[0]))
    return seen["ours"] and not seen["resident"]


def test_a_tensor_leaves_and_comes_back_in_its_place():
    x = random(1)
    address, values = _shims.address_of(x), x.numpy()
    assert spillway_tf.reclaim_inactive() >= 4 * MIB
    assert is_away(x)
    assert np.array_equal((x * 2).numpy(), values * 2)
    assert np.array_equal(x.numpy(), values)
    assert _shims.address_of(x) == address


def test_what_is_copied_from_the_device_is_brought_in_first():
    x = random(2)
    values = x.numpy()
    spillway_tf.reclaim_inactive()
    assert is_away(x)
    assert np.array_equal(x.numpy(), values)
    spillway_tf.reclaim_inactive()
    with tf.device("CPU:0"):
        assert np.array_equal(tf.identity(x).numpy(), values)


def test_what_is_copied_to_the_device_may_leave():
    values = np.random.default_rng(0).standard_normal((4, 512, 512), dtype=np.float32)
    with tf.device("GPU:0"):
        x = tf.identity(tf.constant(values))
    spillway_tf.reclaim_inactive()
    assert is_away(x)
    assert np.array_equal((x + 1).numpy(), values + 1)


def test_kernels_that_are_still_to_run_are_finished_before_their_operands_leave():
    spillway_tf.set_lms_limit(64 * MIB)
    square = tf.random.stateless_normal((2048, 2048), (3, 4)) / 45.0  # 16 MiB
    chains = []
    for i in range(6):
        x = square + float(i) / 1000
        for _ in range(8):
            x = tf.linalg.matmul(x, square)  # only enqueued: the host does not wait for it
        chains.append(x)
    sums = [x.numpy() for x in chains]
    spillway_tf.set_lms_limit(CAPACITY)
    for i, expected in enumerate(sums):
        x = square + float(i) / 1000
        for _ in range(8):
            x = tf.linalg.matmul(x, square)
        assert np.array_equal(x.numpy(), expected)
    assert spillway_tf.get_lms_stats()["swap_out_bytes"] > 0


def test_variables_leave_and_are_changed_in_place():
    v = tf.Variable(random(5))
    values = v.numpy()
    spillway_tf.reclaim_inactive()
    assert is_away(v)
    v.assign_add(v * 2)
    spillway_tf.reclaim_inactive()
    assert np.array_equal(v.numpy(), values + values * 2)


def test_tensorflow_reads_the_statistics():
    x = random(6)
    info = tf.config.experimental.get_memory_info("GPU:0")
    assert info["current"] == spillway_tf.get_bytes_in_use() >= 4 * MIB
    tf.config.experimental.reset_memory_stats("GPU:0")
    assert tf.config.experimental.get_memory_info("GPU:0")["peak"] == spillway_tf.get_bytes_in_use()
    assert spillway_tf.get_bytes_limit() == CAPACITY
    assert is_away(x) is False


def test_switched_off_the_error_is_tensorflows():
    spillway_tf.set_lms_limit(64 * MIB)
    spillway_tf.set_lms_enabled(False)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor"):
        _ = [random(i, 16) for i in range(8)]


def test_dlpack_keeps_the_tensor():
    x = random(7)
    y = tf.experimental.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(x))
    spillway_tf.reclaim_inactive()
    assert not is_away(x)
    assert np.array_equal(x.numpy(), y.numpy())


@pytest.mark.parametrize("way", Training.WAYS)
def test_half_of_the_memory_gives_the_same_bits(way):
    program = Training(size=64, blocks=6, filters=32, batch=16)
    check_half_of_the_memory(lambda: program.by(way), CAPACITY)
