# SPDX-License-Identifier: Apache-2.0
"""Tests of tensors on a GPU. Without one they are skipped with a message; SPILLWAY_REQUIRE_GPU=1 makes that an error."""
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import spillway_tf

pytest.register_assert_rewrite("training")  # so that its failed assertions show values
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
import training

CAPACITY = 1 << 30
IS_THERE = tf.test.is_built_with_cuda() and bool(tf.config.list_physical_devices("GPU"))

if os.environ.get("SPILLWAY_REQUIRE_GPU") == "1" and not IS_THERE:
    raise pytest.UsageError("SPILLWAY_REQUIRE_GPU=1, and TensorFlow finds no GPU")

if IS_THERE:
    tf.config.experimental.enable_op_determinism()
    spillway_tf.install(device="GPU:0", limit=CAPACITY, host_limit=2 << 30)
    spillway_tf.set_lms_enabled(True)


def pytest_collection_modifyitems(items):
    for item in items:
        if not IS_THERE:
            item.add_marker(pytest.mark.skip(reason="TensorFlow finds no GPU"))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_sep("*", f"{len(skipped)} TESTS OF TENSORS ON A GPU WERE SKIPPED")


@pytest.fixture(autouse=True)
def clean():
    yield from training.clean_slate(CAPACITY)
