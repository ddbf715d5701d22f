# SPDX-License-Identifier: Apache-2.0
"""Builds the extension against the PyTorch that is installed: pip install . --no-build-isolation

The part for CUDA is built if PyTorch has its CUDA libraries and the headers of the CUDA runtime are found, in CUDA_HOME or
in packages beside PyTorch. With SPILLWAY_TORCH_CUDA=1 it is an error if the part cannot be built; with
SPILLWAY_TORCH_CUDA=0 it is left out. Codecs for CUDA tensors also need nvcc. They are built for the GPUs of
TORCH_CUDA_ARCH_LIST.

A wheel works with one minor version of PyTorch, which the wheel's version and its requirements name. A source distribution
works with all versions, and contains the library's headers.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback

import torch
from setuptools import setup
from setuptools.command.sdist import sdist
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, include_paths, library_paths

VERSION = "0.1.0"

here = pathlib.Path(__file__).resolve().parent
root = here if (here / "include").exists() else here.parents[1]  # the root of a source distribution, or of the project
include = pathlib.Path(os.environ.get("SPILLWAY_INCLUDE", root / "include"))
if not (include / "spillway" / "interop" / "torch.hpp").exists():
    raise SystemExit(f"spillway's headers are not in {include}: set SPILLWAY_INCLUDE to their folder")

flags = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"]
for folder in include_paths():
    flags += ["-isystem", folder]  # no warnings about PyTorch's own headers
flags += os.environ.get("SPILLWAY_MODULE_FLAGS", "").split()
torch_minor = ".".join(torch.__version__.split(".")[:2])


class Build(BuildExtension):
    """Builds MAX_JOBS extensions in parallel, by default one for each processor. Records which version of PyTorch the
    module works with."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or int(os.environ.get("MAX_JOBS") or os.cpu_count())

    def build_extension(self, ext):
        """Uses a separate process and folder, since PyTorch's changes to setuptools are not thread-safe."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                self.build_temp = os.path.join(self.build_temp, ext.name)
                super().build_extension(ext)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(f"{ext.name} could not be built")

    def run(self):
        super().run()
        folder = here if self.inplace else pathlib.Path(self.build_lib)
        (folder / "spillway_torch" / "_built_for.py").write_text(f'TORCH = "{torch_minor}"\n')


class SourceDistribution(sdist):
    """Adds the library's headers and licence, which are outside of this folder."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        shutil.copytree(include, pathlib.Path(base_dir, "include"), dirs_exist_ok=True)
        shutil.copy(root / "LICENSE", base_dir)


def cuda_toolkits():
    """Yields folders with include/ and lib/, first those of packages for the CUDA version that PyTorch was built for."""
    major = (torch.version.cuda or "").split(".")[0]
    for key in ("purelib", "platlib"):
        yield pathlib.Path(sysconfig.get_path(key)) / "nvidia" / f"cu{major}"
    if os.environ.get("CUDA_HOME"):
        yield pathlib.Path(os.environ["CUDA_HOME"])
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield pathlib.Path(nvcc).resolve().parents[1]
    yield pathlib.Path("/usr/local/cuda")


def find_cuda(toolkits, major):
    """Returns the include folders and the runtime library to build with, or the reason why there are none.

    Headers of the package nvidia-cuda-runtime include headers in crt/, which are in another package.
    """
    toolkits = list(toolkits)
    for toolkit in toolkits:
        headers = toolkit / "include"
        runtime = next((f / f"libcudart.so.{major}" for f in (toolkit / "lib", toolkit / "lib64")
                        if (f / f"libcudart.so.{major}").exists()), None)
        if (headers / "cuda_runtime_api.h").exists() and (headers / "cuda.h").exists() and runtime:
            crt = next((t / "include" for t in [toolkit, *toolkits] if (t / "include/crt/host_defines.h").exists()), None)
            if crt is None:
                return f"{headers} has no crt/host_defines.h: pip install 'nvidia-cuda-crt=={major}.*', or set CUDA_HOME"
            return list(dict.fromkeys([headers, crt])), runtime
    return f"no CUDA {major} runtime with headers was found: pip install 'nvidia-cuda-runtime=={major}.*' " \
           f"'nvidia-cuda-crt=={major}.*', or set CUDA_HOME"


def why_no_nvcc(cuda_home, major):
    """Returns the reason why the codecs' kernels cannot be compiled, or None."""
    nvcc = pathlib.Path(cuda_home or "", "bin", "nvcc")
    if not cuda_home or not nvcc.exists():
        return "there is no nvcc in CUDA_HOME"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    if re.search(rf"release {major}\.", version) is None:
        return f"{nvcc} is not of CUDA {major}, which this PyTorch is built for"
    with tempfile.TemporaryDirectory() as folder:  # nvcc may refuse the C++ compiler, or lack CUB
        source = pathlib.Path(folder, "probe.cu")
        source.write_text("#include <cub/block/block_scan.cuh>\n")
        compiler = ["-ccbin", os.environ["CC"]] if os.environ.get("CC") else []
        probe = subprocess.run([nvcc, *compiler, "-std=c++20", "-c", source, "-o", f"{folder}/probe.o"], capture_output=True,
                               text=True, check=False)
    return None if probe.returncode == 0 else f"{nvcc} compiles nothing here: {probe.stderr.strip()[:500]}"


def cuda_extension():
    """Returns the part for CUDA, or the reason why it cannot be built."""
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    if torch.version.cuda is None or not (libraries / "libc10_cuda.so").exists():
        return "this PyTorch has no CUDA libraries"
    found = find_cuda(cuda_toolkits(), torch.version.cuda.split(".")[0])
    if isinstance(found, str):
        return found
    headers, runtime = found
    sources = ["csrc/cuda_module.cpp"]
    cxx = [*flags, *(flag for folder in headers for flag in ("-isystem", str(folder)))]
    refusal = why_no_nvcc(CUDA_HOME, torch.version.cuda.split(".")[0])
    if refusal is None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "7.5;8.0;9.0+PTX")
        sources.append("csrc/cuda_codecs.cu")
        cxx.append("-DSPILLWAY_WITH_CUDA_CODECS=1")
    else:
        print(f"spillway_torch is built without codecs for CUDA tensors: {refusal}")
    return CppExtension(
        "spillway_torch._spillway_torch_cuda", sources, include_dirs=[str(include)],
        extra_compile_args={"cxx": cxx, "nvcc": ["-std=c++20", "-O2", "-Xcompiler=-fvisibility=hidden"]},
        library_dirs=[*library_paths(device_type="cuda"), str(libraries)],
        libraries=["c10_cuda", "torch_cuda"], extra_link_args=[str(runtime)])


def main():
    extensions = [
        CppExtension("spillway_torch._spillway_torch", ["csrc/module.cpp"], include_dirs=[str(include)],
                     extra_compile_args=flags),
        CppExtension("spillway_torch._plan_module", ["csrc/plan_module.cpp", "csrc/bench/replay/trace.cpp"],
                     include_dirs=[str(include), "csrc"], extra_compile_args=flags),
    ]
    wanted = os.environ.get("SPILLWAY_TORCH_CUDA", "")
    if wanted != "0":
        extension = cuda_extension()
        if not isinstance(extension, str):
            extensions.append(extension)
        elif wanted == "1":
            raise SystemExit(f"spillway_torch cannot be built for CUDA: {extension}")
        else:
            print(f"spillway_torch is built without its CUDA part: {extension}")
    is_source = "sdist" in sys.argv
    setup(version=VERSION if is_source else f"{VERSION}+torch{torch_minor}",
          install_requires=["torch>=2.11" if is_source else f"torch=={torch_minor}.*"],
          ext_modules=extensions, cmdclass={"build_ext": Build, "sdist": SourceDistribution})


if __name__ == "__main__":  # the tests import this file
    main()
