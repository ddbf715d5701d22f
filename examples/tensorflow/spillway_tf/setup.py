# SPDX-License-Identifier: Apache-2.0
"""Builds the extension against the TensorFlow that is installed: pip install . --no-build-isolation"""
import os
import pathlib

from setuptools import Extension, setup

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
try:
    import tensorflow as tf
except ImportError as error:
    raise SystemExit(f"TensorFlow cannot be imported ({error}): install it, and build with --no-build-isolation")

here = pathlib.Path(__file__).resolve().parent
include = pathlib.Path(os.environ.get("SPILLWAY_INCLUDE", here.parents[2] / "include"))
if not (include / "spillway" / "interop" / "tensorflow.hpp").exists():
    raise SystemExit(f"spillway's headers are not in {include}: set SPILLWAY_INCLUDE to their folder")
tf_include = pathlib.Path(tf.sysconfig.get_include())
pybind11 = next(tf_include.glob("**/pybind11/pybind11.h"), None)
if pybind11 is None:
    raise SystemExit("this TensorFlow has no headers of pybind11")

# One module for each minor version of TensorFlow, which the name tells: what it calls has no stable interface.
name = "_spillway_tf_{}_{}".format(*tf.__version__.split(".")[:2])
flags = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith(("-I", "--std", "-std"))]
for folder in (tf_include, pybind11.parents[1]):
    flags += ["-isystem", str(folder)]  # no warnings about TensorFlow's own headers
flags += ["-std=c++20", "-O2", "-g0", "-DNDEBUG", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
flags += [f"-DSPILLWAY_TF_MODULE={name}"]
flags += os.environ.get("SPILLWAY_MODULE_FLAGS", "").split()
setup(
    ext_modules=[
        Extension(
            f"spillway_tf.{name}",
            ["csrc/module.cpp"],
            include_dirs=[str(include)],
            language="c++",
            extra_compile_args=flags,
            extra_link_args=tf.sysconfig.get_link_flags(),
        )
    ],
)
