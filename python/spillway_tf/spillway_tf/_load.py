# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled module that was built for the running version of TensorFlow, or reports that there is none."""
import importlib
import pathlib
import re

import tensorflow as tf


def built_for(kind="cpu"):
    """Returns the versions of TensorFlow, such as "2.21", for which there is a module of this kind."""
    name = "_spillway_tf_gpu_" if kind == "gpu" else "_spillway_tf_"
    found = {re.match(name + r"(\d+)_(\d+)\.", path.name)
             for path in pathlib.Path(__file__).parent.glob("_spillway_tf_*")}
    return sorted(f"{match[1]}.{match[2]}" for match in found if match)


def load(version=None, kind="cpu"):
    version = ".".join((version or tf.__version__).split(".")[:2])
    if version not in built_for(kind):
        have = ", ".join(built_for(kind)) or "none"
        part = "spillway_tf" if kind == "cpu" else "spillway_tf's part for GPUs"
        raise ImportError(
            f"{part} was not built for TensorFlow {version}, which is running; built for: {have}. Build it for this one, "
            "which needs a C++20 compiler and takes some minutes:\n"
            "  pip install 'setuptools>=77' wheel\n"
            "  pip install --no-build-isolation --no-deps --force-reinstall SOURCE\n"
            "where SOURCE is spillway_tf-*.tar.gz, or python/spillway_tf in a checkout of spillway")
    name = "_spillway_tf_gpu" if kind == "gpu" else "_spillway_tf"
    return importlib.import_module(f"{__package__}.{name}_{version.replace('.', '_')}")


class _Chosen:
    """Stands for the compiled module of the kind of device that `install` was given; before that, for the CPU's."""

    def __init__(self):
        self.kind, self._module = "cpu", load()

    def choose(self, kind):
        self.kind, self._module = kind, load(kind=kind)

    def __getattr__(self, name):
        return getattr(self._module, name)


C = _Chosen()
