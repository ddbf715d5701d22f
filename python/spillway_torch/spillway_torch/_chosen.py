# SPDX-License-Identifier: Apache-2.0
"""Stands for the compiled part for the device that `install` was given; before that, for the CPU's."""
import importlib
import importlib.util

import torch

try:
    from ._built_for import TORCH
except ModuleNotFoundError:  # not built by setup.py, which writes this module
    TORCH = ".".join(torch.__version__.split(".")[:2])

if not torch.__version__.startswith(f"{TORCH}."):
    raise ImportError(
        f"this spillway_torch was built for torch {TORCH}, and torch {torch.__version__} is running. Build it for this one, "
        "which needs a C++20 compiler and takes some minutes:\n"
        "  pip install 'setuptools>=77' wheel ninja\n"
        "  pip install --no-build-isolation --no-deps --force-reinstall SOURCE\n"
        "where SOURCE is spillway_torch-*.tar.gz, or python/spillway_torch in a checkout of spillway")

from . import _spillway_torch as _host

_module = _host


def module_for(kind):
    """Returns the compiled part for a kind of device, "cpu" or "cuda"."""
    if kind == "cuda":
        try:
            return importlib.import_module("._spillway_torch_cuda", __package__)
        except ModuleNotFoundError:
            raise NotImplementedError(
                "spillway_torch was built without its CUDA part: PyTorch's CUDA libraries or the CUDA headers "
                "(cuda_runtime_api.h) were not found then") from None
    if kind != "cpu":
        raise NotImplementedError(f"spillway_torch knows the devices cpu and cuda, not {kind}")
    return _host


def choose(module):
    """Makes this module stand for the given one."""
    global _module
    _module = module


def has_cuda():
    """Whether the part for CUDA was built."""
    return importlib.util.find_spec("._spillway_torch_cuda", __package__) is not None


def __getattr__(name):
    return getattr(_module, name)
