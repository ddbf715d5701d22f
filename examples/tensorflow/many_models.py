# SPDX-License-Identifier: Apache-2.0
"""Finds the largest image that trains under a memory limit, with and without support, for models of Keras.

    python many_models.py [MODEL ...] [--limit-mib 512] [--batch 2] [--steps 2] [--least 64] [--most 512] [--csv FILE]

MODEL is a name in `tf.keras.applications` (MobileNetV2, ResNet50, DenseNet121, ...), or `residual`, a small network.
Models have random weights and train on images of noise. Each attempt is a process of its own. Statistics of each step
go to the CSV file; a table ends the run.
"""
import argparse
import csv
import json
import os
import subprocess
import sys
import time

from progress import progress, say

COLUMNS = ["model", "support", "image", "batch", "ok", "step", "seconds", "peak_mib", "swapped_out_mib",
           "swapped_in_mib"]
IMAGE_STEP = 32


def make(name, image):
    import tensorflow as tf
    if name != "residual":
        return getattr(tf.keras.applications, name)(weights=None, classes=1000, input_shape=(image, image, 3))
    layers = tf.keras.layers
    inputs = tf.keras.Input((image, image, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(6):
        y = layers.Conv2D(16, 3, padding="same")(x)
        x = layers.Add()([x, layers.ReLU()(layers.BatchNormalization()(y))])
    x = layers.GlobalAveragePooling2D()(x)
    return tf.keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))


def work(options):
    """Trains a few steps and prints a line of JSON for each. Exits with status 3 if memory runs out."""
    import numpy as np
    import tensorflow as tf

    import spillway_tf
    mib = 1 << 20
    spillway_tf.install(limit=int(options.limit_mib * mib))
    spillway_tf.set_lms_enabled(options.support)
    tf.keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    lines = []

    class Report(spillway_tf.LMSStatsLogger):
        def __init__(self):
            super().__init__(os.devnull)

        def on_train_batch_begin(self, batch, logs=None):
            super().on_train_batch_begin(batch, logs)
            self.before = spillway_tf.get_lms_stats()

        def on_train_batch_end(self, batch, logs=None):
            now = spillway_tf.get_lms_stats()
            lines.append({"step": batch, "seconds": round(time.perf_counter() - self._began, 3),
                          "peak_mib": round(now["peak_bytes_in_use"] / mib, 1),
                          "swapped_out_mib": round((now["swap_out_bytes"] - self.before["swap_out_bytes"]) / mib, 1),
                          "swapped_in_mib": round((now["swap_in_bytes"] - self.before["swap_in_bytes"]) / mib, 1)})
            super().on_train_batch_end(batch, logs)

    try:
        model = make(options.models[0], options.image)
        model.compile(optimizer=tf.keras.optimizers.SGD(1e-3, momentum=0.9), loss="sparse_categorical_crossentropy",
                      jit_compile=False)
        count = options.batch * options.steps
        model.fit(random.standard_normal((count, options.image, options.image, 3), dtype=np.float32),
                  random.integers(0, 1000, count), batch_size=options.batch, verbose=0, callbacks=[Report()])
    except tf.errors.ResourceExhaustedError as error:
        print(str(error).splitlines()[0], spillway_tf.why_out_of_memory(), file=sys.stderr)
        sys.exit(3)
    for line in lines:
        print(json.dumps(line))


class Sweep:
    def __init__(self, options):
        self.options = options
        self.file = open(options.csv, "w", newline="") if options.csv else None
        self.csv = csv.DictWriter(self.file, COLUMNS) if self.file else None
        if self.csv:
            self.csv.writeheader()

    def trains(self, model, support, image):
        o = self.options
        command = [sys.executable, os.path.abspath(__file__), model, "--worker", "--limit-mib", str(o.limit_mib),
                   "--steps", str(o.steps), "--image", str(image), "--batch", str(o.batch)] + ["--support"] * support
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ})
        if done.returncode not in (0, 3):
            raise SystemExit(f"\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if self.csv:
            for row in rows or [{"step": 0}]:
                self.csv.writerow({"model": model, "support": support, "image": image, "batch": o.batch,
                                   "ok": done.returncode == 0, **row})
            self.file.flush()
        return rows[-1] if done.returncode == 0 else None

    def largest(self, model, support):
        """Returns the size of the largest image that trains, and the statistics of its last step."""
        o = self.options
        count = (o.most - o.least) // IMAGE_STEP + 1
        low, high, stride, best = -1, count, 1, None  # low trains, high does not
        while high - low > 1:
            at = min(low + stride, count - 1) if high == count else (low + high) // 2
            seen = self.trains(model, support, o.least + at * IMAGE_STEP)
            if seen:
                low, stride, best = at, 2 * stride, seen
            else:
                high = at
        return (None, None) if low < 0 else (o.least + low * IMAGE_STEP, best)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["residual"])
    parser.add_argument("--limit-mib", type=float, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--least", type=int, default=64)
    parser.add_argument("--most", type=int, default=512)
    parser.add_argument("--csv")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--support", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--image", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    sweep = Sweep(options)
    print(f"limit {options.limit_mib:g} MiB, batches of {options.batch}\n")
    print("| model | support | largest image | s/step | swapped out, MiB/step |\n|---|---|---:|---:|---:|", flush=True)
    for model, support in progress([(model, support) for model in options.models for support in (False, True)]):
        image, seen = sweep.largest(model, support)
        say(f"| {model} | {'on' if support else 'off'} | {image or 'none'} | {seen['seconds'] if seen else '-'} | "
            f"{seen['swapped_out_mib'] if seen else '-'} |")
    if sweep.file:
        sweep.file.close()


if __name__ == "__main__":
    main()
