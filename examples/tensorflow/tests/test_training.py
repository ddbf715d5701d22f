# SPDX-License-Identifier: Apache-2.0
"""Training under half of the memory it takes gives the same bits."""
import csv
import gc
import types

import numpy as np
import pytest
import tensorflow as tf

import spillway_tf
from conftest import CAPACITY

_random = np.random.default_rng(0)
IMAGES = _random.standard_normal((32, 48, 48, 3)).astype(np.float32)
LABELS = _random.integers(0, 10, 32)


def make_model():
    tf.keras.utils.set_random_seed(7)
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((48, 48, 3))
    for _ in range(4):
        y = layers.Conv2D(16, 3, padding="same")(x)
        y = layers.BatchNormalization()(y)
        y = layers.Activation("relu")(y)
        x = layers.Concatenate()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, layers.Dense(10)(x))


def make_loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_by_hand(is_graph):
    model, loss_of, optimizer = make_model(), make_loss(), tf.keras.optimizers.Adam()

    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    if is_graph:
        step = tf.function(step)
    losses = [float(step(tf.constant(IMAGES[i:i + 8]), tf.constant(LABELS[i:i + 8]))) for i in (0, 8, 16, 24, 0)]
    return losses, [w.numpy() for w in model.weights]


def train_by_fit(callbacks=()):
    model = make_model()
    model.compile(optimizer="adam", loss=make_loss(), jit_compile=False)
    history = model.fit(IMAGES, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return history.history["loss"], [w.numpy() for w in model.weights]


WAYS = {"eager": lambda: train_by_hand(False), "graph": lambda: train_by_hand(True), "fit": train_by_fit}


@pytest.mark.parametrize("way", WAYS)
def test_half_of_the_memory_gives_the_same_bits(way):
    train = WAYS[way]
    spillway_tf.set_lms_enabled(False)
    spillway_tf.reset_peak_stats()
    losses, weights = train()
    gc.collect()
    limit = spillway_tf.get_peak_bytes_in_use() // 2

    spillway_tf.set_lms_limit(limit)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor"):
        train()
    gc.collect()

    spillway_tf.set_lms_limit(CAPACITY)
    spillway_tf.set_lms_enabled(True)
    spillway_tf.set_lms_limit(limit)
    before = spillway_tf.get_lms_stats()
    losses_under_limit, weights_under_limit = train()
    after = spillway_tf.get_lms_stats()
    assert losses_under_limit == losses
    assert all(np.array_equal(a, b) for a, b in zip(weights, weights_under_limit))
    assert spillway_tf.get_peak_bytes_in_use() <= spillway_tf.get_lms_limit() < limit + (1 << 20)
    assert after["swap_out_bytes"] > before["swap_out_bytes"]
    assert after["swap_in_bytes"] > before["swap_in_bytes"]
    assert after["steps"] > before["steps"]


def test_running_out_of_memory_in_onednn_is_an_error_and_not_a_crash():
    x, kernel = tf.random.stateless_normal((2, 160, 160, 16), (1, 2)), tf.random.stateless_normal((3, 3, 16, 16), (3, 4))
    spillway_tf.set_lms_limit(5 << 20)
    for function in (lambda: tf.nn.conv2d(x, kernel, 1, "SAME"), tf.function(lambda: tf.nn.conv2d(x, kernel, 1, "SAME"))):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor.*out of device memory"):
            function()


def test_statistics_of_each_step_go_to_a_file(tmp_path):
    spillway_tf.set_lms_limit(16 << 20)
    path = tmp_path / "lms.csv"
    losses, _ = train_by_fit([spillway_tf.LMSStatsLogger(path)])
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 8
    assert [int(row["step"]) for row in rows] == list(range(8))
    assert [int(row["epoch"]) for row in rows] == [0] * 4 + [1] * 4
    assert float(rows[3]["loss"]) == pytest.approx(losses[0])
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert all(0 < int(row["peak_bytes_in_use"]) <= 16 << 20 for row in rows)
    assert int(rows[-1]["swap_out_bytes"]) > int(rows[0]["swap_out_bytes"]) > 0
    assert int(rows[0]["bytes_limit"]) == 16 << 20
    some = tmp_path / "some.csv"
    train_by_fit([spillway_tf.LMSStatsLogger(some, start=2, stop=4)])
    assert [row["step"] for row in csv.DictReader(some.open())] == ["2", "3"]


def test_a_training_step_that_is_one_operation_is_warned_of(tmp_path):
    logger = spillway_tf.LMSStatsLogger(tmp_path / "x.csv")
    logger.set_model(types.SimpleNamespace(jit_compile=True, run_eagerly=False))  # not with op determinism
    with pytest.warns(UserWarning, match="jit_compile=False"):
        logger.on_train_begin()
    logger.on_train_end()
