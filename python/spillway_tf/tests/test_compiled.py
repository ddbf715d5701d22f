# SPDX-License-Identifier: Apache-2.0
"""Functions compiled by XLA. Each is a single operation, wherever it is called. Each test runs in a process of its own, since
the process ends if the operands of such an operation are not leased."""
import pytest

BEGIN = """
import numpy as np, tensorflow as tf, spillway_tf
spillway_tf.install(limit=256 << 20, least_bytes=4096)
spillway_tf.set_lms_enabled(True)
stats = spillway_tf.get_lms_stats
"""


@pytest.fixture
def passes(script):
    def run(code):
        done = script(BEGIN + code + "\nprint('reached the end')")
        assert done.returncode == 0 and done.stdout.endswith("reached the end\n"), done.stdout + done.stderr[-3000:]
    return run


@pytest.mark.parametrize("call", ["inner(x)",
                                  "inner(inner(x))",
                                  "tf.cond(tf.reduce_sum(x) > -1e9, lambda: inner(x), lambda: x)",
                                  "tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, inner(y)), (0, x))[1]",
                                  "tf.map_fn(inner, tf.stack([x, x]))[1]"])
def test_a_compiled_function_inside_of_another_function_leases_its_operands(passes, call):
    passes(f"""
v = tf.Variable(tf.random.stateless_normal((512, 512), (3, 4)) * 0.02)

@tf.function(jit_compile=True)
def inner(t):
    return tf.tanh(t @ v + t)

@tf.function
def outer(x):
    return {call}
x = tf.random.stateless_normal((512, 512), (1, 2))
expected = outer(x).numpy()
for _ in range(3):
    assert spillway_tf.reclaim_inactive() >= 2 << 20
    assert np.array_equal(outer(x).numpy(), expected)
""")


def test_a_compiled_function_changes_variables_from_inside_of_another_function(passes):
    passes("""
v = tf.Variable(tf.random.stateless_normal((512, 512), (3, 4)))

@tf.function(jit_compile=True)
def add(t):
    v.assign_add(t)

@tf.function
def twice(t):
    add(t)
    add(t)
x = tf.random.stateless_normal((512, 512), (1, 2))
expected = v.numpy() + x.numpy() + x.numpy()
spillway_tf.reclaim_inactive()
twice(x)
spillway_tf.reclaim_inactive()
assert np.array_equal(v.numpy(), expected)
""")


def test_a_compiled_function_leases_the_memory_that_another_thread_gives_its_variable(passes):
    passes("""
import threading
v = tf.Variable(tf.zeros((64, 64)))
values = [tf.random.stateless_normal((64, 64), (i, 2)) for i in range(8)]

@tf.function(jit_compile=True)
def inner(t):
    return tf.reduce_sum(t * v)

@tf.function
def outer(t):
    return tf.add_n([inner(t) for _ in range(16)])
x = tf.ones((64, 64))
outer(x)
is_over = threading.Event()
def repeat(work):
    while not is_over.is_set():
        work()
works = [lambda: [v.assign(value) for value in values], spillway_tf.reclaim_inactive]
threads = [threading.Thread(target=repeat, args=[work]) for work in works]
for thread in threads:
    thread.start()
for _ in range(400):
    outer(x)
is_over.set()
for thread in threads:
    thread.join()
""")


def test_compiled_functions_in_one_graph_run_one_after_another_if_they_do_not_fit_together(passes):
    passes("""
tf.config.threading.set_inter_op_parallelism_threads(4)

@tf.function(jit_compile=True)
def inner(t):
    made = []
    for _ in range(6):
        t = tf.tanh(t @ t + t)
        made.append(t)
    return made

@tf.function
def outer(t):
    calls = [inner(t * float(i)) for i in range(4)]
    return [tf.reduce_sum(made) for call in calls for made in call]
x = tf.random.stateless_normal((512, 512), (1, 2)) * 0.04
expected = [made.numpy() for made in outer(x)]
spillway_tf.set_lms_limit(12 << 20)  # one call needs up to 8 MiB
for _ in range(30):
    assert [made.numpy() for made in outer(x)] == expected
""")


def test_what_a_compiled_function_makes_inside_of_another_one_counts(passes):
    passes("""
@tf.function(jit_compile=True)
def spread(t):
    return tf.tanh(t[None] * tf.reshape(tf.range(8.0), (8, 1, 1)))

@tf.function
def outer(t):
    return tf.reduce_sum(tf.sort(spread(t), axis=0))
x = tf.random.stateless_normal((512, 512), (1, 2))
outer(x)
spillway_tf.reset_peak_stats()
outer(x)
assert stats()["peak_bytes_in_use"] >= 9 << 20, stats()["peak_bytes_in_use"]
""")


def test_two_models_compiled_by_keras_train_where_one_has_room(passes):
    passes("""
import gc
def train():
    tf.keras.utils.set_random_seed(3)
    models = []
    for _ in range(4):
        layers = [tf.keras.Input((512,))] + [tf.keras.layers.Dense(512, activation="tanh") for _ in range(4)]
        models.append(tf.keras.Sequential(layers))
        models[-1].compile(optimizer="adam", loss="mse", jit_compile=True)
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((64, 512), dtype=np.float32) for _ in range(2))
    losses = []
    for _ in range(2):
        for model in models:
            losses += model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
            losses.append(model.evaluate(x, y, verbose=0))
    return losses, [w.numpy() for model in models for w in model.weights]
spillway_tf.reset_peak_stats()
losses, weights = train()
gc.collect()
peak = spillway_tf.get_peak_bytes_in_use()
spillway_tf.set_lms_limit(peak // 2)
before = stats()
again, weights_again = train()
assert again == losses
assert all(np.array_equal(a, b) for a, b in zip(weights, weights_again))
assert stats()["swap_in_bytes"] > before["swap_in_bytes"]
assert stats()["peak_bytes_in_use"] <= spillway_tf.get_lms_limit()
""")


def test_grouped_convolutions_train_under_half_of_the_memory(passes):
    passes("""
import gc
def train():
    tf.keras.utils.set_random_seed(3)
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((32, 32, 16))
    for _ in range(4):
        x = layers.Conv2D(16, 3, padding="same", groups=4, activation="relu")(x)
    model = tf.keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))
    model.compile(optimizer="adam", loss="mse", jit_compile=False)
    images = np.random.default_rng(0).standard_normal((8, 32, 32, 16), dtype=np.float32)
    losses = [model.train_on_batch(images, np.zeros((8, 4))) for _ in range(2)]
    return losses, [w.numpy() for w in model.weights]
spillway_tf.reset_peak_stats()
losses, weights = train()
gc.collect()
peak = spillway_tf.get_peak_bytes_in_use()
assert peak > 2 << 20, peak  # the results of four layers have half a MiB each, before and after the activation
spillway_tf.set_lms_limit(peak // 2)
before = stats()
again, weights_again = train()
assert again == losses
assert all(np.array_equal(a, b) for a, b in zip(weights, weights_again))
assert stats()["swap_in_bytes"] > before["swap_in_bytes"]
""")
