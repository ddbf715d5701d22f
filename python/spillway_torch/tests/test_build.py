# SPDX-License-Identifier: Apache-2.0
"""Where the build finds CUDA's headers and runtime, what a source distribution contains, and which PyTorch a build is for."""
import importlib.util
import pathlib
import subprocess
import sys

import pytest

import source_distribution

SETUP = pathlib.Path(__file__).resolve().parents[1] / "setup.py"


@pytest.fixture(scope="module")
def setup():
    spec = importlib.util.spec_from_file_location("spillway_torch_setup", SETUP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def find_cuda(setup):
    return setup.find_cuda


def toolkit(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


RUNTIME = ("include/cuda.h", "include/cuda_runtime_api.h", "lib/libcudart.so.13")
CRT = "include/crt/host_defines.h"


def test_packages_alone_serve_where_they_are_complete(find_cuda, tmp_path):
    packages = toolkit(tmp_path / "packages", *RUNTIME, CRT)
    assert find_cuda([packages, tmp_path / "none"], "13") == ([packages / "include"], packages / "lib/libcudart.so.13")


def test_headers_that_the_runtime_package_lacks_are_taken_from_a_toolkit(find_cuda, tmp_path):
    packages, cuda = toolkit(tmp_path / "packages", *RUNTIME), toolkit(tmp_path / "cuda", *RUNTIME, CRT)
    assert find_cuda([packages, cuda], "13") == ([packages / "include", cuda / "include"], packages / "lib/libcudart.so.13")


def test_what_is_missing_is_named_with_the_command_that_installs_it(find_cuda, tmp_path):
    packages = toolkit(tmp_path / "packages", *RUNTIME)
    assert "crt/host_defines.h: pip install 'nvidia-cuda-crt==13.*'" in find_cuda([packages], "13")
    assert "nvidia-cuda-runtime==12.*" in find_cuda([packages], "12")


def test_a_compiler_that_cannot_be_used_is_named_and_left_out(setup, tmp_path):
    def nvcc(name, on_compiling):
        compiler = tmp_path / name / "bin" / "nvcc"
        compiler.parent.mkdir(parents=True)
        compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 'release 13.0, V13.0.88' && exit\n{on_compiling}\n")
        compiler.chmod(0o755)
        return tmp_path / name

    assert setup.why_no_nvcc(None, "13") == "there is no nvcc in CUDA_HOME"
    assert setup.why_no_nvcc(tmp_path / "empty", "13") == "there is no nvcc in CUDA_HOME"
    assert setup.why_no_nvcc(nvcc("good", "exit 0"), "13") is None
    assert "is not of CUDA 12" in setup.why_no_nvcc(tmp_path / "good", "12")
    refused = setup.why_no_nvcc(nvcc("bad", "echo 'unsupported GNU version' >&2; exit 1"), "13")
    assert refused.endswith("compiles nothing here: unsupported GNU version")


def test_another_pytorch_is_refused_with_the_commands_that_build_for_it():
    program = "import torch; torch.__version__ = '2.99.0+cpu'; import spillway_torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "torch 2.99.0+cpu is running" in done.stderr, done.stderr
    assert done.stderr.count("\n  pip install ") == 2, done.stderr


def test_a_source_distribution_carries_the_headers_and_all_of_the_package(tmp_path):
    names = source_distribution.names_in(SETUP.parent, tmp_path)
    assert {"LICENSE", "include/spillway/interop/torch.hpp", "csrc/module.cpp", "csrc/bindings.hpp",
            "csrc/bench/step_bound.hpp", "csrc/bench/replay/trace.cpp"} <= names
    assert {f"spillway_torch/{path.name}" for path in (SETUP.parent / "spillway_torch").glob("*.py")} <= names
