# SPDX-License-Identifier: Apache-2.0
"""Trains models of many kinds, with several training loops, with half of the memory that they need, and checks that the
results are bitwise the same.

    python model_zoo.py [NAME ...] [--part 0.5] [--steps 6] [--rounds 1] [--threads 1]

Each NAME is a key of ZOO, by default every one, and runs in a process of its own. In each round the process trains without
a limit, which gives the peak and the expected results, and then with the given part of the peak. Several rounds help if the
machine is slower for a while. The table shows whether losses and weights of all trainings are bitwise the same; the swapped
bytes; and the cost of the shortest step from the third one on, without and with the limit. step_cost.py explains how the
costs are separated. --threads sets the number of inter-op and of intra-op threads of TensorFlow. Exit status 1 if a bit
differs or a run fails.
"""
import argparse
import gc
import os
import subprocess
import sys

from progress import progress, say
from step_cost import MIB, Steps, compare, seconds_per_byte


def noise(*shape, seed=0):
    import numpy as np
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def fit(steps, model, inputs, outputs, loss, optimizer="adam", **compile_options):
    """Trains a Keras model with `train_on_batch`, on the same batch in each step."""
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False, **compile_options)
    steps.run(lambda i: float(model.train_on_batch(inputs, outputs)))
    return model.weights


def classify(steps, name, pixels, batch):
    import tensorflow as tf
    model = getattr(tf.keras.applications, name)(weights=None, classes=10, input_shape=(pixels, pixels, 3))
    labels = [i % 10 for i in range(batch)]
    return fit(steps, model, noise(batch, pixels, pixels, 3), tf.constant(labels), "sparse_categorical_crossentropy")


def transformer(steps):
    import tensorflow as tf
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((128, 128))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32, dropout=0.1)(y, y)])
        y = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return fit(steps, tf.keras.Model(inputs, x), noise(16, 128, 128), noise(16, 128, 128, seed=1), "mse")


def lstm(steps):
    import tensorflow as tf
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((64, 128)),
                                 layers.Bidirectional(layers.LSTM(128, return_sequences=True)),
                                 layers.Bidirectional(layers.LSTM(128)), layers.Dense(10)])
    return fit(steps, model, noise(32, 64, 128), noise(32, 10, seed=1), "mse")


def unet(steps):
    import tensorflow as tf
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((96, 96, 3))
    passed = []
    for filters in (16, 32, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        passed.append(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(passed[-1])
    for filters in (64, 32, 16):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(layers.Concatenate()([x, passed.pop()]))
    model = tf.keras.Model(inputs, layers.Conv2D(1, 1)(x))
    return fit(steps, model, noise(8, 96, 96, 3), noise(8, 96, 96, 1, seed=1), "mse")


def gan(steps):
    """A WGAN with gradient penalty: gradients of gradients, and two optimizers."""
    import tensorflow as tf
    layers = tf.keras.layers
    critic = tf.keras.Sequential([tf.keras.Input((32, 32, 3))] + [
        layers.Conv2D(32, 3, strides=s, padding="same", activation="leaky_relu") for s in (1, 2, 1, 2)] + [
        layers.Flatten(), layers.Dense(1)])
    maker = tf.keras.Sequential([tf.keras.Input((64,)), layers.Dense(8 * 8 * 32), layers.Reshape((8, 8, 32))] + [
        layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu") for _ in range(2)] + [
        layers.Conv2D(3, 3, padding="same", activation="tanh")])
    optimizers = tf.keras.optimizers.Adam(1e-4), tf.keras.optimizers.Adam(1e-4)
    real, latent = tf.constant(noise(16, 32, 32, 3)), tf.constant(noise(16, 64, seed=1))

    @tf.function
    def step(mix):
        with tf.GradientTape() as tape:
            made = maker(latent, training=True)
            between = real * mix + made * (1 - mix)
            with tf.GradientTape() as inner:
                inner.watch(between)
                score = critic(between, training=True)
            slope = tf.sqrt(tf.reduce_sum(inner.gradient(score, between) ** 2, axis=[1, 2, 3]) + 1e-9)
            loss = tf.reduce_mean(critic(made)) - tf.reduce_mean(critic(real)) + 10 * tf.reduce_mean((slope - 1) ** 2)
        optimizers[0].apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        with tf.GradientTape() as tape:
            maker_loss = -tf.reduce_mean(critic(maker(latent, training=True)))
        optimizers[1].apply(tape.gradient(maker_loss, maker.trainable_variables), maker.trainable_variables)
        return loss, maker_loss
    steps.run(lambda i: [float(loss) for loss in step(tf.constant(0.1 * (i + 1)))])
    return critic.weights + maker.weights


def eager(steps):
    import tensorflow as tf
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((48, 48, 3))] + [
        layer for _ in range(6) for layer in (layers.Conv2D(24, 3, padding="same"), layers.BatchNormalization(),
                                              layers.ReLU())] + [layers.GlobalAveragePooling2D(), layers.Dense(10)])
    optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
    images, targets = tf.constant(noise(8, 48, 48, 3)), tf.constant(noise(8, 10, seed=1))

    def step(i):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(images, training=True) - targets) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return float(loss)
    steps.run(step)
    return model.weights


def mirrored(steps):
    import tensorflow as tf
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    layers = tf.keras.layers
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((48, 48, 3))] + [
            layers.Conv2D(24, 3, padding="same", activation="relu") for _ in range(6)] + [
            layers.GlobalAveragePooling2D(), layers.Dense(10)])
        optimizer = tf.keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    images, targets = tf.constant(noise(8, 48, 48, 3)), tf.constant(noise(8, 10, seed=1))

    @tf.function
    def step():
        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(images, training=True) - targets) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss
        return strategy.reduce("MEAN", strategy.run(replica), axis=None)
    steps.run(lambda i: float(step()))
    return [w for w in model.weights]


def mixed_precision(steps):
    import tensorflow as tf
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((512,))] + [layers.Dense(512, activation="tanh") for _ in range(8)] + [
        layers.Dense(10, dtype="float32")])
    return fit(steps, model, noise(512, 512), noise(512, 10, seed=1), "mse")


ZOO = {
    "EfficientNetB0": lambda steps: classify(steps, "EfficientNetB0", 96, 4),
    "DenseNet121": lambda steps: classify(steps, "DenseNet121", 64, 4),
    "MobileNetV3Small": lambda steps: classify(steps, "MobileNetV3Small", 128, 8),
    "transformer": transformer, "lstm": lstm, "unet": unet, "gan": gan, "eager": eager, "mirrored": mirrored,
    "mixed_precision": mixed_precision,
}


def work(name, options):
    """Trains one model twice in each round and prints its line of the table."""
    import numpy as np
    import tensorflow as tf

    import spillway_tf
    if name == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if options.threads:
        tf.config.threading.set_inter_op_parallelism_threads(options.threads)
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.experimental.enable_op_determinism()
    unlimited = 4 << 30
    spillway_tf.install(limit=unlimited)
    spillway_tf.set_lms_enabled(True)

    def train(limit):
        spillway_tf.set_lms_limit(limit)
        tf.keras.utils.set_random_seed(7)
        steps = Steps(options.steps, spillway_tf.get_lms_stats)
        weights = [np.array(w) for w in ZOO[name](steps)]
        tf.keras.backend.clear_session()
        gc.collect()
        return steps, weights
    trained = [train(unlimited)]
    peak = spillway_tf.get_peak_bytes_in_use()
    limit = int(options.part * peak)
    trained.append(train(limit))
    for _ in range(1, options.rounds):
        trained += [train(unlimited), train(limit)]
    (first, weights), *others = trained
    is_same = all(first.losses == steps.losses and all(map(np.array_equal, weights, again)) for steps, again in others)
    free, tight = (min((steps for steps, _ in trained[i::2]), key=lambda steps: steps.least()["seconds"]) for i in (0, 1))
    cost = compare(free.least(), tight.least(), seconds_per_byte())
    print(f"| {name} | {peak / MIB:.0f} | {'yes' if is_same else 'NO'} | {tight.mean('swap_out_bytes') / MIB:.0f} | "
          f"{tight.mean('swap_in_bytes') / MIB:.0f} | {cost['free_ms']:.0f} | {cost['capped_ms']:.0f} | "
          f"{cost['copies_ms']:.0f} | {100 * cost['rest']:.0f} % | {100 * cost['system']:.0f} % |", flush=True)
    sys.exit(not is_same)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ZOO), metavar="NAME")
    parser.add_argument("--part", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.names[0], options)
    print("| model | peak, MiB | bitwise | out, MiB/step | in | ms/step | with the limit | of these copies | the rest | more in "
          "the system |\n|---|---:|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    failed = []
    for name in progress(options.names):
        done = subprocess.run([sys.executable, __file__, name, "--worker", "--part", str(options.part), "--steps",
                               str(options.steps), "--rounds", str(options.rounds), "--threads", str(options.threads)],
                              check=False, capture_output=True, text=True,
                              env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **os.environ})
        for line in done.stdout.splitlines():
            say(line)
        if done.returncode != 0:
            failed.append(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    print("\n".join(failed), file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
