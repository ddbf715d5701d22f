#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs TensorFlow into a virtual environment, builds the TensorFlow module and runs its tests: on the CPU device, those of
# the part for GPUs that need no GPU, and on the GPU if there is one.
#
#   scripts/test-tensorflow.sh [--tensorflow VERSION] [PYTEST OPTIONS]
#   scripts/test-tensorflow.sh [--tensorflow VERSION] --keras [OPTIONS OF scripts/framework-tests.py]
#   scripts/test-tensorflow.sh [--tensorflow VERSION] --fetch
#
# With --keras it runs Keras' own tests instead, with and without support: those that the options name, by default --quick.
# With --fetch it only makes the environment.
# TensorFlow is installed with pip into build/tensorflow-VERSION and stays there: the first run downloads 800 MB, later
# ones nothing. Exit status 77 if it cannot be installed; then nothing was tested.
# With SPILLWAY_REQUIRE_GPU=1 it fails if there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.21.0
if [ "${1-}" = --tensorflow ]; then
  version=${2:?--tensorflow needs a version}
  shift 2
fi

framework=TensorFlow
home=$PWD/build/tensorflow-$version
. scripts/framework-module.sh
export TF_CPP_MIN_LOG_LEVEL=2
is_there() { [ -x "$python" ] && "$python" -c 'import keras, tensorflow, xdist' 2>/dev/null; }

if ! is_there; then
  make_environment
  # Prefer the build with CUDA, which also works without a GPU. On a machine with a GPU it needs its CUDA libraries.
  cuda=
  if nvidia-smi >/dev/null 2>&1; then cuda='[and-cuda]'; fi
  pip "tensorflow$cuda==$version" || pip "tensorflow-cpu==$version" ||
    skip "pip could not install tensorflow==$version: $(pip_failure)"
  pip 'setuptools>=77' pytest pytest-xdist wheel || skip "pip could not install pytest: $(pip_failure)"
  is_there || skip "tensorflow $version was installed but cannot be imported"
fi
if [ "${1-}" = --fetch ]; then exit; fi

install_module python/spillway_tf

if [ "${1-}" = --keras ]; then
  shift
  [ $# -gt 0 ] || set -- --quick
  exec "$python" scripts/framework-tests.py keras "$@"
fi

# One value per line, since folder names may contain spaces.
{ read -r has_cuda && IFS= read -r library && IFS= read -r headers; } < <("$python" -c 'import tensorflow as tf
print(int(bool(tf.sysconfig.get_build_info().get("is_cuda_build"))), tf.sysconfig.get_lib(), tf.sysconfig.get_include(),
      sep="\n")')
if [ "$has_cuda" = 0 ]; then
  printf '\n** The part for GPUs was NOT tested: this TensorFlow was built without CUDA\n' >&2
fi
${CXX:-g++} -std=c++20 -O1 -DNDEBUG -DGOOGLE_CUDA="$has_cuda" -DEIGEN_MAX_ALIGN_BYTES=64 -Wall -Wextra -Wshadow -Wpedantic \
  -Wconversion -Wsign-conversion -Werror -I include -isystem "$headers" -isystem "$headers/external/cuda_cudart/include" \
  -isystem "$headers/external/cuda_nvcc/include" python/spillway_tf/tests_native/leased_copy_test.cpp \
  -o "$home/leased_copy_test" -L"$library" -l:libtensorflow_framework.so.2 -l:libtensorflow_cc.so.2 -Wl,-rpath,"$library"
"$home/leased_copy_test" --no-intro

run_tests python/spillway_tf/tests "$@"
run_tests python/spillway_tf/tests_gpu "$@"
