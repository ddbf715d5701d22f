# SPDX-License-Identifier: Apache-2.0
"""Kernels for a simulated CUDA device: operations run on the CPU, in the order of the streams (kernels.cpp).

The stand-in for the CUDA runtime is tests/support/fake_cuda_device.cpp.
"""
import atexit
import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile

import torch
from torch.utils.cpp_extension import include_paths

FOLDER = pathlib.Path(__file__).resolve().parent
LIBRARY = "SPILLWAY_CUDA_KERNELS"

_library = None


def is_stand_in():
    return os.environ.get("SPILLWAY_CUDA_STAND_IN") == "1"


def build(output, *options):
    """Compiles C++ code that calls PyTorch and the CUDA runtime."""
    toolkits = [pathlib.Path(path).parent for path in include_paths(device_type="cuda")]
    major = torch.version.cuda.split(".")[0]
    packages = pathlib.Path(torch.__file__).parents[1] / "nvidia" / f"cu{major}"
    toolkits = [packages, *toolkits, pathlib.Path("/usr/local/cuda")]
    headers = [t / "include" for t in toolkits if (t / "include" / "cuda_runtime_api.h").exists()]
    runtime = next(f for t in toolkits for f in (t / "lib" / f"libcudart.so.{major}", t / "lib64" / f"libcudart.so.{major}")
                   if f.exists())
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", *map(str, options), "-o", str(output),
               f"-L{libraries}", "-ltorch", "-lc10_cuda", "-lc10", "-ltorch_cpu", "-ltorch_cuda", str(runtime)]
    for path in [*include_paths(), *headers]:
        command += ["-isystem", str(path)]
    for folder in (libraries, runtime.parent):
        command += [f"-Wl,-rpath,{folder}", f"-Wl,-rpath-link,{folder}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(source, library):
    """Compiles C++ code that calls PyTorch, and loads it as a library."""
    build(library, "-O1", "-shared", "-fPIC", FOLDER / source)
    return ctypes.CDLL(str(library))


def install(waits=False):
    """Compiles and installs the kernels, for this process and those that it starts. Call it once, before the first operation.

    With `waits` each kernel waits for its stream. Then PyTorch need not import the code that computes the shapes of
    results, which takes four seconds, so short programs should use it.
    """
    global _library
    if _library is not None or not is_stand_in():
        return
    torch.backends.cudnn.enabled = False
    for kernels in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernels}_sdp")(False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling needs a kernel
    if LIBRARY in os.environ:
        _library = ctypes.CDLL(os.environ[LIBRARY])
    else:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        os.environ[LIBRARY] = os.path.join(folder, "kernels.so")
        _library = compiled("kernels.cpp", os.environ[LIBRARY])
    _library.spillway_kernel_failure.restype = ctypes.c_char_p
    _library.spillway_install_kernels(ctypes.c_bool(waits))


def failure():
    """Waits for all kernels. Returns the error of a kernel since the last call, or an empty text."""
    if _library is None:
        return ""
    torch.cuda.synchronize()
    return _library.spillway_kernel_failure().decode()
