#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the TensorFlow module against a TensorFlow of its own and runs its tests on the CPU device.
#
#   scripts/test-tensorflow.sh [--tensorflow VERSION] [PYTEST OPTIONS]
#
# TensorFlow goes into build/tensorflow-VERSION, from wherever pip gets its packages, and stays there: the first
# run fetches 400 MB, later ones nothing. Exit status 77 if it cannot be had: nothing was tested then.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.21.0
if [ "${1-}" = --tensorflow ]; then
  version=${2:?--tensorflow needs a version}
  shift 2
fi

skip() {
  printf '\n*****************************************************************\n' >&2
  printf '** The TensorFlow module was NOT tested: %s\n' "$*" >&2
  printf '*****************************************************************\n' >&2
  exit 77
}

home=$PWD/build/tensorflow-$version
python=$home/bin/python
export TF_CPP_MIN_LOG_LEVEL=2
is_there() { [ -x "$python" ] && "$python" -c 'import keras, pytest, tensorflow' 2>/dev/null; }

if ! is_there; then
  python3 -c 'import ensurepip, os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    skip "python3 lacks the module venv or its C headers (packages python3-venv and python3-dev)"
  rm -rf "$home"
  python3 -m venv "$home"
  pip() { "$python" -m pip install -q --no-compile --retries 2 "$@" 2>"$home/pip.log"; }
  pip "tensorflow-cpu==$version" || pip "tensorflow==$version" ||
    skip "pip could not install tensorflow==$version: $(tail -n 1 "$home/pip.log")"
  pip 'setuptools>=77' pytest wheel || skip "pip could not install pytest: $(tail -n 1 "$home/pip.log")"
  is_there || skip "tensorflow $version was installed but cannot be imported"
fi

export SPILLWAY_INCLUDE=$PWD/include
python_headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
export SPILLWAY_TF_FLAGS="-Wpedantic -Wconversion -Wsign-conversion -Werror -isystem $python_headers"
export PATH=$home/bin:$PATH
if command -v ccache >/dev/null; then
  mkdir -p "$home/compiler"
  ln -sf "$(command -v ccache)" "$home/compiler/g++"
  export CC=$home/compiler/g++ CXX=$home/compiler/g++
fi
# Built from a copy: setuptools writes beside the sources.
rm -rf "$home/module"
cp -r examples/tensorflow/spillway_tf "$home/module"
"$python" -m pip install -q --no-build-isolation --no-deps --no-index --force-reinstall "$home/module"

export PYTHONDONTWRITEBYTECODE=1
"$python" -m pytest -q -p no:cacheprovider examples/tensorflow/tests "$@"
