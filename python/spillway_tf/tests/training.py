# SPDX-License-Identifier: Apache-2.0
"""Code that the tests on the CPU and on a GPU share: how each test begins and ends, and a network that they train."""
import contextlib
import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

import spillway_tf


def clean_slate(capacity):
    """A fixture: before each test it enables support and sets the limit to `capacity`. Afterwards no tensor may be in use."""
    spillway_tf.set_lms_limit(capacity)
    spillway_tf.set_lms_enabled(True)
    tf.keras.utils.set_random_seed(7)
    yield
    gc.collect()
    assert spillway_tf.get_bytes_active() == 0


@contextlib.contextmanager
def evicting():
    """While the context is open, another thread evicts, again and again, all tensors that no operation uses."""
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: [spillway_tf.reclaim_inactive() for _ in iter(is_over.is_set, True)])
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run_in_threads(*works):
    """Runs each function in a thread, and waits for all."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_while_everything_leaves(*works):
    """Does the same, while tensors leave again and again."""
    with evicting():
        run_in_threads(*works)


class Training:
    """Trains a network of `blocks` convolutions on four batches of noise, `size` pixels wide."""

    WAYS = ("eager", "graph", "fit")

    def __init__(self, size, blocks, filters, batch):
        self.size, self.blocks, self.filters, self.batch = size, blocks, filters, batch
        draw = np.random.default_rng(0)
        self.images = draw.standard_normal((4 * batch, size, size, 3)).astype(np.float32)
        self.labels = draw.integers(0, 10, 4 * batch)

    def make_model(self):
        tf.keras.utils.set_random_seed(7)
        layers = tf.keras.layers
        x = inputs = tf.keras.Input((self.size, self.size, 3))
        for _ in range(self.blocks):
            y = layers.Conv2D(self.filters, 3, padding="same")(x)
            y = layers.BatchNormalization()(y)
            y = layers.Activation("relu")(y)
            x = layers.Concatenate()([x, y])
        x = layers.GlobalAveragePooling2D()(x)
        return tf.keras.Model(inputs, layers.Dense(10)(x))

    @staticmethod
    def make_loss():
        return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def by(self, way):
        """Trains in one of the WAYS. Returns the losses, and the weights at the end."""
        return self.by_fit() if way == "fit" else self.by_hand(way == "graph")

    def by_hand(self, is_graph):
        model, loss_of, optimizer = self.make_model(), self.make_loss(), tf.keras.optimizers.Adam()

        def step(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss
        if is_graph:
            step = tf.function(step)
        batches = [slice(i * self.batch, (i + 1) * self.batch) for i in (0, 1, 2, 3, 0)]
        losses = [float(step(tf.constant(self.images[b]), tf.constant(self.labels[b]))) for b in batches]
        return losses, [w.numpy() for w in model.weights]

    def by_fit(self, callbacks=(), steps_at_once=1):
        model = self.make_model()
        model.compile(optimizer="adam", loss=self.make_loss(), jit_compile=False, steps_per_execution=steps_at_once)
        history = model.fit(self.images, self.labels, batch_size=self.batch, epochs=2, shuffle=False, verbose=0,
                            callbacks=list(callbacks))
        return history.history["loss"], [w.numpy() for w in model.weights]


def check_half_of_the_memory(train, capacity, error=None):
    """Calls `train` without a limit, and then twice with half of the memory that this took: without support it has to fail
    with an error that matches `error`; with support the results have to be bitwise the same. Returns the limit, and the
    statistics before and after the last call."""
    spillway_tf.set_lms_enabled(False)
    spillway_tf.reset_peak_stats()
    losses, weights = train()
    gc.collect()
    limit = spillway_tf.get_peak_bytes_in_use() // 2

    spillway_tf.set_lms_limit(limit)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=error):
        train()
    gc.collect()

    spillway_tf.set_lms_limit(capacity)
    spillway_tf.set_lms_enabled(True)
    spillway_tf.set_lms_limit(limit)
    before = spillway_tf.get_lms_stats()
    losses_under_limit, weights_under_limit = train()
    after = spillway_tf.get_lms_stats()
    assert losses_under_limit == losses
    assert all(np.array_equal(a, b) for a, b in zip(weights, weights_under_limit))
    assert after["swap_out_bytes"] > before["swap_out_bytes"]
    assert after["swap_in_bytes"] > before["swap_in_bytes"]
    return limit, before, after
