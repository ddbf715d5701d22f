#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of Keras, of PyTorch, or of a package that uses TensorFlow or PyTorch, with and without large-model support,
and compares the result of each test.

    build/tensorflow-2.21.0/bin/python scripts/framework-tests.py keras [--quick] [--every-ms 2] [PART ...]
    build/tensorflow-2.21.0/bin/python scripts/framework-tests.py tensorflow-package --sources FOLDER [--every-ms 2] PART ...
    build/pytorch-2.15.0/bin/python scripts/framework-tests.py torch --sources FOLDER [--every-ms 2] [PART ...]
    build/pytorch-2.15.0/bin/python scripts/framework-tests.py torch-package --sources FOLDER [--every-ms 2] PART ...

With support, a thread evicts every tensor that no operation uses, every two milliseconds by default, while the tests run.
A PART is a folder or file of Keras' sources, such as layers/rnn, of the folder test/ of PyTorch's sources, such as
test_autograd.py, or of a package's sources. The default is the list `parts` of this file. Each part runs in two processes,
one with support and one without. With --quick the files in the list `quick` run instead, all in the same two processes, which
takes a few minutes. Keras' tests come with the installed Keras. PyTorch's wheels have none, so FOLDER is a checkout of
PyTorch's sources, if possible of the installed version. A package is imported from its checkout if it lies at the top of that,
otherwise the installed one is used; its dependencies have to be installed.
scripts/test-tensorflow.sh and scripts/test-pytorch.sh make the environments and build the modules;
`scripts/test-tensorflow.sh --keras` does both and runs Keras' quick part. If a process ends early, the tests that it has not
reached count as different. Files that fail to import are not collected, with support and without. Exit status 1 if there is
a difference.
"""
import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

SWAPPED = "bytes swapped out"
NOT_COLLECTED = "not collected"


class Keras:
    packages = ["keras", "pytest", "spillway_tf"]
    maker = "scripts/test-tensorflow.sh"
    parts = ["layers/convolutional", "layers/rnn", "layers/attention", "layers/normalization", "trainers", "optimizers",
             "models", "saving", "callbacks"]
    quick = ["layers/convolutional/separable_conv_test.py", "layers/rnn/gru_test.py", "layers/attention/attention_test.py",
             "layers/normalization/batch_normalization_test.py", "optimizers/adam_test.py",
             "saving/serialization_lib_test.py"]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
    options = []

    @staticmethod
    def folder(_):
        import keras
        return pathlib.Path(keras.__file__).parent / "src"

    @staticmethod
    def install():
        import spillway_tf
        spillway_tf.install(limit=4 << 30, least_bytes=512)
        spillway_tf.set_lms_enabled(True)
        return spillway_tf.reclaim_inactive, spillway_tf.get_bytes_reclaimed


class Torch:
    packages = ["torch", "pytest", "spillway_torch"]
    maker = "scripts/test-pytorch.sh"
    parts = ["test_autograd.py", "test_view_ops.py", "test_indexing.py", "test_serialization.py", "test_dataloader.py",
             "test_multiprocessing.py", "test_package.py", "test_subclass.py", "test_optim.py", "test_nn.py", "test_jit.py"]
    quick = ["test_view_ops.py", "test_subclass.py", "test_dlpack.py", "test_package.py", "test_futures.py"]
    environment = {"OMP_NUM_THREADS": "1"}
    options = ["--noconftest"]  # PyTorch's conftest.py needs further plugins

    @staticmethod
    def folder(sources):
        folder = sources / "test"
        os.chdir(folder)  # the tests read files and import modules from here
        return folder

    @staticmethod
    def install():
        import spillway_torch
        spillway_torch.install(device="cpu", limit=12 << 30, least_bytes=1)
        spillway_torch.set_enabled_lms(True)
        return spillway_torch.reclaim_inactive, lambda: spillway_torch.memory_stats()["swap_out_bytes"]


class TorchPackage(Torch):
    parts = quick = options = []

    @staticmethod
    def folder(sources):
        os.chdir(sources)
        sys.path.insert(0, str(sources))
        return sources


class TensorFlowPackage(Keras):
    parts = quick = []

    @staticmethod
    def folder(sources):
        from absl import flags
        flags.FLAGS([sys.argv[0]])  # TensorFlow's test cases read flags, which otherwise only their own main function parses
        os.chdir(sources)
        sys.path.insert(0, str(sources))
        return sources


FRAMEWORKS = {"keras": Keras, "tensorflow-package": TensorFlowPackage, "torch": Torch, "torch-package": TorchPackage}


class Outcomes:
    """A pytest plugin that writes the outcome of each test as soon as it is known."""

    def __init__(self, path):
        self.file = open(path, "w")

    def write(self, name, outcome):
        print(json.dumps([name, outcome]), file=self.file, flush=True)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            # If a test's parameter is a function, the test's name may contain its address, which differs between processes.
            name = report.nodeid
            if report.outcome == "failed" and hasattr(report, "context"):  # a subtest: its test may still pass
                name += f" {report.context}"
            self.write(re.sub("0x[0-9a-f]+", "0x", name), report.outcome)

    def pytest_collectreport(self, report):
        if report.outcome == "failed":  # such as for a missing import
            self.write(report.nodeid, NOT_COLLECTED)


def work(framework, options):
    """Runs the tests of some parts in this process."""
    import threading

    import pytest
    random.seed(0)  # some packages draw the parameters of their tests, which are in the names
    outcomes = Outcomes(options.worker)
    folder = framework.folder(options.sources)
    if options.every_ms:
        reclaim, swapped = framework.install()

        def reclaim_all():
            while True:
                reclaim()
                time.sleep(options.every_ms / 1000)
        threading.Thread(target=reclaim_all, daemon=True).start()
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", "--continue-on-collection-errors",
                          *framework.options, "--rootdir", str(folder), *(str(folder / part) for part in options.parts)],
                         plugins=[outcomes])
    if options.every_ms:
        outcomes.write(SWAPPED, swapped())
    os._exit(int(status))  # without waiting for the evicting thread or the framework's threads


def run(framework, options, parts, every_ms, log):
    """Runs the tests of some parts in a process. Returns the outcome of each test, and the seconds that they took."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "outcomes"
        sources = ["--sources", str(options.sources)] if options.sources else []
        begin = time.monotonic()
        worker = subprocess.Popen([sys.executable, __file__, options.framework, *sources, "--worker", str(path), "--every-ms",
                                   str(every_ms), *parts], stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                  env={**os.environ, "PYTHONHASHSEED": "0", **framework.environment})
        try:
            worker.wait(options.patience_s)
        except subprocess.TimeoutExpired:
            pass  # tests that were not reached are missing in the result
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # also processes that the tests have left behind
            worker.wait()
        seconds = time.monotonic() - begin
        lines = path.read_text().splitlines() if path.exists() else []
        return dict(json.loads(line) for line in lines), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--sources", type=lambda path: pathlib.Path(path).resolve(), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--every-ms", type=float, default=2)
    parser.add_argument("--patience-s", type=float, default=3600, help="a process that takes longer is stopped")
    parser.add_argument("--log", help="where the tests' own output goes", default=os.devnull)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()  # options may stand between the framework and the parts
    framework = FRAMEWORKS[options.framework]
    if framework is Torch and not (options.sources and (options.sources / "test").is_dir()):
        parser.error("PyTorch's tests are not in its wheel: --sources FOLDER, with test/ in it, says where they are")
    if framework in (TorchPackage, TensorFlowPackage) and (options.quick or not (options.sources and options.parts)):
        parser.error("a package's tests need --sources FOLDER, its checkout, and at least one PART of that; none is quick")
    if options.worker:
        work(framework, options)
    for name in framework.packages:
        if importlib.util.find_spec(name) is None:
            print(f"** The tests of {options.framework} were NOT run: this Python has no {name}; {framework.maker} makes "
                  "an environment that has", file=sys.stderr)
            sys.exit(77)
    groups = [("quick", framework.quick)] if options.quick else [(part, [part]) for part in options.parts or framework.parts]
    differences = []
    print("| part | tests | passed | skipped | failed | not collected | different with support | swapped out, MiB | "
          "s without | s with |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    with open(options.log, "a") as log:
        for name, parts in groups:
            expected, seconds = run(framework, options, parts, 0, log)
            seen, seconds_with = run(framework, options, parts, options.every_ms, log)
            swapped = seen.pop(SWAPPED, None)
            lost = [test for test in expected if test not in seen]
            wrong = [f"{name}: the run with support ended early"] if swapped is None else []
            wrong += [f"{test}: {expected[test]}, with support {outcome}"
                      for test, outcome in seen.items() if outcome != expected.get(test, outcome)]
            wrong += [f"{test}: with support only" for test in seen if test not in expected]
            outcomes = list(expected.values())
            left_out = outcomes.count(NOT_COLLECTED)
            print(f"| {name} | {len(outcomes) - left_out} | {outcomes.count('passed')} | {outcomes.count('skipped')} | "
                  f"{outcomes.count('failed')} | {left_out} | {len(wrong) + len(lost)} | {(swapped or 0) / (1 << 20):.1f} | "
                  f"{seconds:.0f} | {seconds_with:.0f} |", flush=True)
            wrong += [f"{name}: with support {len(lost)} tests were not reached, {lost[0]} the first"] if lost else []
            differences += wrong if outcomes else [f"{name}: no tests"]
    print("\n".join(differences))
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
