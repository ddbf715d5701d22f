#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs Keras' own tests with and without support for large models and compares what became of each.

    build/tensorflow-2.21.0/bin/python scripts/test-keras.py [--quick] [--every-ms 2] [PART ...]

With support everything that no operation uses is made to leave every two milliseconds, by a thread beside the tests.
A PART is a folder or file of Keras' sources, such as layers/rnn; by default those of PARTS, each in two processes of its
own. With --quick it is the files of QUICK, all of them in the same two processes, which takes a few minutes. The tests
are those that the installed Keras comes with. scripts/test-tensorflow.sh makes the environment and builds the module;
`scripts/test-tensorflow.sh --keras` does both and runs the quick part. Where a process ends early, all tests that were
left count as different. Files that import what is not installed (JAX, PyTorch, grain) are not collected, with
support and without. Exit status 1 if there is a difference.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

PARTS = ["layers/convolutional", "layers/rnn", "layers/attention", "layers/normalization", "trainers", "optimizers",
         "models", "saving", "callbacks"]
QUICK = ["layers/convolutional/separable_conv_test.py", "layers/rnn/gru_test.py", "layers/attention/attention_test.py",
         "layers/normalization/batch_normalization_test.py", "optimizers/adam_test.py", "saving/serialization_lib_test.py"]
LIMIT = 4 << 30
LEAST_BYTES = 512
SWAPPED = "bytes swapped out"
NOT_COLLECTED = "not collected"


class Outcomes:
    """A plugin of pytest that writes what became of each test, as soon as it is known."""

    def __init__(self, path):
        self.file = open(path, "w")

    def write(self, name, outcome):
        print(json.dumps([name, outcome]), file=self.file, flush=True)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report):
        if report.outcome == "failed":  # it needs what Keras' package lacks
            self.write(report.nodeid, NOT_COLLECTED)


def work(parts, every_ms, path):
    """Runs the tests of some parts in this process."""
    import threading

    import keras
    import pytest
    if every_ms:
        import spillway_tf
        spillway_tf.install(limit=LIMIT, least_bytes=LEAST_BYTES)
        spillway_tf.set_lms_enabled(True)

        def reclaim():
            while True:
                spillway_tf.reclaim_inactive()
                time.sleep(every_ms / 1000)
        threading.Thread(target=reclaim, daemon=True).start()
    sources = pathlib.Path(keras.__file__).parent / "src"
    outcomes = Outcomes(path)
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", "--continue-on-collection-errors",
                          "--rootdir", str(sources), *(str(sources / part) for part in parts)], plugins=[outcomes])
    if every_ms:
        outcomes.write(SWAPPED, spillway_tf.get_bytes_reclaimed())
    os._exit(int(status))  # the thread and TensorFlow's end when the process does


def run(parts, every_ms, log):
    """What became of each test of some parts, and the seconds that took."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "outcomes"
        begin = time.monotonic()
        subprocess.run([sys.executable, __file__, "--worker", str(path), "--every-ms", str(every_ms), *parts],
                       check=False, stdout=log, stderr=subprocess.STDOUT,
                       env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **os.environ,
                            "KERAS_BACKEND": "tensorflow"})
        seconds = time.monotonic() - begin
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(json.loads(line) for line in lines), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every-ms", type=float, default=2)
    parser.add_argument("--log", help="where the tests' own output goes", default=os.devnull)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.parts, options.every_ms, options.worker)
    for name in ("keras", "pytest", "spillway_tf"):
        if importlib.util.find_spec(name) is None:
            print(f"** Keras' tests were NOT run: this Python has no {name}; scripts/test-tensorflow.sh makes an "
                  "environment that has", file=sys.stderr)
            sys.exit(77)
    groups = [("quick", QUICK)] if options.quick else [(part, [part]) for part in options.parts or PARTS]
    differences = []
    print("| part | tests | passed | skipped | failed | not collected | different with support | swapped out, MiB | "
          "s without | s with |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    with open(options.log, "a") as log:
        for name, parts in groups:
            expected, seconds = run(parts, 0, log)
            seen, seconds_with = run(parts, options.every_ms, log)
            swapped = seen.pop(SWAPPED, None)
            wrong = [] if swapped is not None else [f"{name}: the run with support ended early"]
            wrong += [f"{test}: {outcome}, with support {seen.get(test, 'not reached')}"
                     for test, outcome in expected.items() if seen.get(test) != outcome]
            wrong += [f"{test}: with support only" for test in seen if test not in expected]
            outcomes = list(expected.values())
            left_out = outcomes.count(NOT_COLLECTED)
            print(f"| {name} | {len(outcomes) - left_out} | {outcomes.count('passed')} | {outcomes.count('skipped')} | "
                  f"{outcomes.count('failed')} | {left_out} | {len(wrong)} | {(swapped or 0) / (1 << 20):.1f} | "
                  f"{seconds:.0f} | {seconds_with:.0f} |", flush=True)
            differences += wrong if outcomes else [f"{name}: no tests"]
    print("\n".join(differences))
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
