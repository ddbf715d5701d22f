# SPDX-License-Identifier: Apache-2.0
"""Measures what training under caps costs: step time, swapped bytes, and whether the training is bitwise the same.

    python bench_lms.py [--caps 0.6 0.4 0.3] [--rounds 2] [--steps 6] [--eager]

Caps are parts of the peak P that the network takes. Every line is a process of its own; lines are taken in turn, and
the least time of all steps after the second counts.
"""
import argparse
import hashlib
import json
import os
import subprocess
import sys
import time

from progress import progress

MIB = 1 << 20
BATCH, SIDE, CHANNELS, BLOCKS = 16, 64, 64, 7


def work(options):
    import numpy as np
    import tensorflow as tf
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    lms = None
    if options.limit != "stock":
        import spillway_tf as lms
        limit = int(options.limit)
        lms.install(limit=limit or 2048 * MIB)
        lms.set_lms_enabled(options.support)
    tf.keras.utils.set_random_seed(7)
    tf.config.experimental.enable_op_determinism()
    layers = tf.keras.layers
    x = inputs = tf.keras.Input((SIDE, SIDE, 3))
    x = layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False)(x)
    for _ in range(BLOCKS):
        y = x
        for _ in range(2):
            y = layers.Conv2D(CHANNELS, 3, padding="same", use_bias=False)(y)
            y = layers.BatchNormalization()(y)
            y = layers.ReLU()(y)
        x = layers.Add()([x, y])
    model = tf.keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam()
    random = np.random.default_rng(0)
    images = tf.constant(random.standard_normal((BATCH, SIDE, SIDE, 3), dtype=np.float32))
    labels = tf.constant(random.integers(0, 10, BATCH))

    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    if not options.eager:
        step = tf.function(step)
    times, losses, out = [], [], {}
    for i in range(options.steps):
        if i == 2 and lms:
            before = lms.get_lms_stats()
        start = time.perf_counter()
        losses.append(float(step()))
        times.append(time.perf_counter() - start)
    digest = hashlib.sha256(repr(losses).encode() + b"".join(w.numpy().tobytes() for w in model.weights)).hexdigest()
    if lms:
        after = lms.get_lms_stats()
        measured = options.steps - 2
        out = {"peak_mib": after["peak_bytes_in_use"] / MIB,
               "out_mib": (after["swap_out_bytes"] - before["swap_out_bytes"]) / MIB / measured,
               "in_mib": (after["swap_in_bytes"] - before["swap_in_bytes"]) / MIB / measured,
               "hits": after["prefetch_hits"], "late": after["prefetch_late"], "wasted": after["prefetch_wasted"]}
    print(json.dumps({"ms": min(times[2:]) * 1e3, "digest": digest, **out}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", type=float, nargs="*", default=[0.6, 0.4, 0.3])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--limit", help=argparse.SUPPRESS)
    parser.add_argument("--support", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 3:
        parser.error("--steps is 3 or more: times count after the second")
    if options.limit is not None:
        work(options)
        return

    def run(limit, support=False):
        command = [sys.executable, os.path.abspath(__file__), "--limit", str(limit), "--steps", str(options.steps)]
        command += ["--support"] * support + ["--eager"] * options.eager
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ})
        if done.returncode != 0:
            return "OOM" if "ResourceExhaustedError" in done.stderr else sys.exit(done.stderr[-2000:])
        return json.loads(done.stdout.splitlines()[-1])

    peak = run(0)["peak_mib"]
    lines = {"TensorFlow as it is": ("stock", False), "support on, no cap": (0, True)}
    lines |= {f"cap {cap:g} P": (int(peak * cap * MIB), True) for cap in options.caps}
    best, same = {}, {}
    for name in progress([*lines] * options.rounds):
        seen = run(*lines[name])
        if seen == "OOM":
            best[name] = None
            continue
        same.setdefault(name, set()).add(seen["digest"])
        if best.get(name) is None or seen["ms"] < best[name]["ms"]:
            best[name] = seen
    stock, free = best["TensorFlow as it is"]["ms"], best["support on, no cap"]["ms"]
    print(f"P = {peak:.1f} MiB; without support the smallest cap is: {run(int(peak * 0.9 * MIB))} at 0.9 P\n")
    print("| | ms/step | over TensorFlow | over no cap | bitwise | device MiB | out, MiB/step | in | prefetched in time / "
          "late / wasted |\n|---|---:|---:|---:|---|---:|---:|---:|---:|")
    for name, seen in best.items():
        if seen is None:
            print(f"| {name} | out of memory |")
            continue
        is_same = "yes" if same[name] == same["TensorFlow as it is"] else "no"
        more = "| | | | " if "peak_mib" not in seen else (
            f"| {seen['peak_mib']:.0f} | {seen['out_mib']:.0f} | {seen['in_mib']:.0f} | "
            f"{seen['hits']} / {seen['late']} / {seen['wasted']} ")
        print(f"| {name} | {seen['ms']:.0f} | {seen['ms'] / stock:.3f} | {seen['ms'] / free:.3f} | {is_same} {more}|")


if __name__ == "__main__":
    main()
