# SPDX-License-Identifier: Apache-2.0
"""Builds the extension against the TensorFlow that is installed: pip install . --no-build-isolation

The part for GPUs is built if that TensorFlow was built with CUDA. With SPILLWAY_TF_GPU=1 it is an error if the part cannot
be built; with SPILLWAY_TF_GPU=0 it is left out.

A wheel works with one minor version of TensorFlow, which the wheel's version names. A source distribution works with all
versions, and contains the library's headers. Neither requires the package tensorflow, since TensorFlow is also distributed
under other names.
"""
import os
import pathlib
import shutil
import sys

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
try:
    import tensorflow as tf
except ImportError as error:
    raise SystemExit(f"TensorFlow cannot be imported ({error}): install it, and build with --no-build-isolation")

VERSION = "0.1.0"

here = pathlib.Path(__file__).resolve().parent
root = here if (here / "include").exists() else here.parents[1]  # the root of a source distribution, or of the project
include = pathlib.Path(os.environ.get("SPILLWAY_INCLUDE", root / "include"))
if not (include / "spillway" / "interop" / "tensorflow.hpp").exists():
    raise SystemExit(f"spillway's headers are not in {include}: set SPILLWAY_INCLUDE to their folder")
tf_include = pathlib.Path(tf.sysconfig.get_include())
pybind11 = next(tf_include.glob("**/pybind11/pybind11.h"), None)
if pybind11 is None:
    raise SystemExit("this TensorFlow has no headers of pybind11")

# There is one module for each minor version of TensorFlow, named after it, since the module calls unstable interfaces.
version = "{}_{}".format(*tf.__version__.split(".")[:2])
flags = [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith(("-I", "--std", "-std"))]
for folder in (tf_include, pybind11.parents[1]):
    flags += ["-isystem", str(folder)]  # no warnings about TensorFlow's own headers
flags += ["-std=c++20", "-O2", "-g0", "-DNDEBUG", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
flags += os.environ.get("SPILLWAY_MODULE_FLAGS", "").split()


class SourceDistribution(sdist):
    """Adds the library's headers and licence, which are outside of this folder."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        shutil.copytree(include, pathlib.Path(base_dir, "include"), dirs_exist_ok=True)
        shutil.copy(root / "LICENSE", base_dir)


def extension(kind, source, *more_flags):
    name = f"_spillway_tf{kind}_{version}"
    return Extension(f"spillway_tf.{name}", [source], include_dirs=[str(include)], language="c++",
                     extra_compile_args=[*flags, f"-DSPILLWAY_TF_MODULE={name}", *more_flags],
                     extra_link_args=tf.sysconfig.get_link_flags())


def gpu_extension():
    """Returns the part for GPUs, or the reason why it cannot be built. It uses the CUDA runtime that TensorFlow loads."""
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        return "this TensorFlow was built without CUDA"
    folders = [tf_include / "external" / part / "include" for part in ("cuda_cudart", "cuda_nvcc")]
    if not (folders[0] / "cuda_runtime_api.h").exists():
        return "this TensorFlow comes without the CUDA headers that it was built with"
    return extension("_gpu", "csrc/gpu_module.cpp", "-DGOOGLE_CUDA=1",
                     *(flag for folder in folders for flag in ("-isystem", str(folder))))


extensions = [extension("", "csrc/module.cpp")]
wanted = os.environ.get("SPILLWAY_TF_GPU", "")
if wanted != "0":
    gpu = gpu_extension()
    if not isinstance(gpu, str):
        extensions.append(gpu)
    elif wanted == "1":
        raise SystemExit(f"spillway_tf cannot be built for GPUs: {gpu}")
    else:
        print(f"spillway_tf is built without its part for GPUs: {gpu}")

local = "" if "sdist" in sys.argv else f"+tf{version.replace('_', '.')}"
setup(version=VERSION + local, ext_modules=extensions, cmdclass={"sdist": SourceDistribution})
