# SPDX-License-Identifier: Apache-2.0
"""Builds the extension against the PyTorch that is installed: pip install . --no-build-isolation"""
import os
import pathlib

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

here = pathlib.Path(__file__).resolve().parent
include = pathlib.Path(os.environ.get("SPILLWAY_INCLUDE", here.parents[2] / "include"))
if not (include / "spillway" / "interop" / "torch.hpp").exists():
    raise SystemExit(f"spillway's headers are not in {include}: set SPILLWAY_INCLUDE to their folder")

flags = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
for folder in include_paths():
    flags += ["-isystem", folder]  # no warnings about PyTorch's own headers
flags += os.environ.get("SPILLWAY_TORCH_FLAGS", "").split()
setup(
    ext_modules=[
        CppExtension(
            "spillway_torch._spillway_torch",
            ["csrc/module.cpp"],
            include_dirs=[str(include)],
            extra_compile_args=flags,
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
