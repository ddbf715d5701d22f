#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs PyTorch into a virtual environment, builds the PyTorch module and runs its tests: on the CPU device and, if
# that PyTorch has its CUDA libraries, for CUDA on a stand-in for the CUDA runtime. For tests on a GPU use
# bench/gpu_check.sh.
#
#   scripts/test-pytorch.sh [--torch VERSION] [PYTEST OPTIONS]
#   scripts/test-pytorch.sh [--torch VERSION] --zoo [OPTIONS OF examples/pytorch/model_zoo.py]
#   scripts/test-pytorch.sh [--torch VERSION] --own-tests FOLDER [OPTIONS OF scripts/framework-tests.py]
#   scripts/test-pytorch.sh [--torch VERSION] --fetch
#
# The second form trains models of other packages instead, which it downloads (about 200 MB), and prints a table.
# The third form runs PyTorch's own tests from a checkout of its sources, with and without support, and prints a table.
# The fourth form only makes the environment.
#
# PyTorch is installed with pip into build/pytorch-VERSION and stays there: the first run downloads 2 GB, later ones
# nothing. Exit status 77 if it cannot be installed; then nothing was tested.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.15.0
if [ "${1-}" = --torch ]; then
  version=${2:?--torch needs a version}
  shift 2
fi

framework=PyTorch
home=$PWD/build/pytorch-$version
. scripts/framework-module.sh
is_there() { [ -x "$python" ] && "$python" -c 'import numpy, torch, xdist' 2>/dev/null; }

if ! is_there; then
  make_environment
  # Prefer the CPU build. The default build is linked to CUDA libraries, so those are installed too, but not
  # Triton, which only compiled models use.
  pip --no-deps "torch==$version+cpu" || pip --no-deps "torch==$version" ||
    skip "pip could not install torch==$version: $(pip_failure)"
  "$python" - > "$home/requirements.txt" <<'END'
from importlib.metadata import requires
for one in requires("torch"):
    if "extra ==" not in one and not one.startswith(("triton", "cuda-bindings")):
        print(one)
END
  pip -r "$home/requirements.txt" 'setuptools>=77' numpy ninja pytest pytest-xdist wheel expecttest safetensors ||
    skip "pip could not install what torch needs: $(pip_failure)"
  is_there || skip "torch $version was installed but cannot be imported"
fi
if [ "${1-}" = --fetch ]; then exit; fi

export MAX_JOBS=${MAX_JOBS:-1} TORCHINDUCTOR_CACHE_DIR=$home/inductor
install_module python/spillway_torch
if [ "${1-}" = --zoo ]; then
  packages=(accelerate diffusers lightning peft torchvision transformers)
  "$python" -c 'import sys; from importlib.util import find_spec; sys.exit(None in map(find_spec, sys.argv[1:]))' "${packages[@]}" ||
    pip "torch==$version" "${packages[@]}" || skip "pip could not install the zoo's packages: $(pip_failure)"
  exec "$python" examples/pytorch/model_zoo.py "${@:2}"
fi
if [ "${1-}" = --own-tests ]; then
  exec "$python" scripts/framework-tests.py torch --sources "${@:2}"
fi
run_tests python/spillway_torch/tests "$@"

headers=$("$python" - <<'END'
import glob, os, sysconfig
found = [*glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu*", "include")), "/usr/local/cuda/include"]
print(next((f for f in found if os.path.exists(os.path.join(f, "cuda_runtime_api.h"))), ""))
END
)
if ! "$python" -c 'import torch, spillway_torch._spillway_torch_cuda' 2>/dev/null || [ -z "$headers" ]; then
  printf '\n** CUDA tensors were NOT tested: this PyTorch has no CUDA libraries, or there are no CUDA headers\n' >&2
  exit 0
fi
mkdir -p "$home/stand-in"
${CXX:-g++} -std=c++20 -O1 -fPIC -shared -I include -I tests -isystem "$headers" -o "$home/stand-in/libcuda.so.1" \
  tests/support/fake_cuda_kernels.cpp tests/support/fake_cuda_device.cpp tests/support/fake_cuda_missing.cpp \
  tests/support/fake_cudart.cpp tests/support/fake_cuda_driver.cpp -pthread
LD_PRELOAD=$home/stand-in/libcuda.so.1 LD_LIBRARY_PATH=$home/stand-in:${LD_LIBRARY_PATH-} \
  SPILLWAY_CUDA_STAND_IN=1 SPILLWAY_FAKE_CUDA_BYTES=$((256 << 20)) SPILLWAY_FAKE_CUDA_MAPS=1 \
  run_tests python/spillway_torch/tests_cuda "$@"
