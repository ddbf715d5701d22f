# SPDX-License-Identifier: Apache-2.0
"""Loads the module that was built for the TensorFlow that is running, or says that there is none."""
import importlib
import pathlib
import re

import tensorflow as tf


def built_for():
    """The versions of TensorFlow that there is a module for, such as "2.21"."""
    found = {re.match(r"_spillway_tf_(\d+)_(\d+)\.", path.name)
             for path in pathlib.Path(__file__).parent.glob("_spillway_tf_*")}
    return sorted(f"{match[1]}.{match[2]}" for match in found if match)


def load(version=None):
    version = ".".join((version or tf.__version__).split(".")[:2])
    if version not in built_for():
        have = ", ".join(built_for()) or "none"
        raise ImportError(
            f"spillway_tf was not built for TensorFlow {version}, which is running; built for: {have}. Build it again "
            "with this TensorFlow installed: pip install --no-build-isolation --force-reinstall "
            "examples/tensorflow/spillway_tf")
    return importlib.import_module(f"{__package__}._spillway_tf_{version.replace('.', '_')}")


C = load()
