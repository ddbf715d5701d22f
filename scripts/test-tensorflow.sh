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

framework=TensorFlow
home=$PWD/build/tensorflow-$version
. scripts/framework-module.sh
export TF_CPP_MIN_LOG_LEVEL=2
is_there() { [ -x "$python" ] && "$python" -c 'import keras, pytest, tensorflow' 2>/dev/null; }

if ! is_there; then
  make_environment
  pip "tensorflow-cpu==$version" || pip "tensorflow==$version" ||
    skip "pip could not install tensorflow==$version: $(pip_failure)"
  pip 'setuptools>=77' pytest wheel || skip "pip could not install pytest: $(pip_failure)"
  is_there || skip "tensorflow $version was installed but cannot be imported"
fi

install_module examples/tensorflow/spillway_tf
"$python" -m pytest -q -p no:cacheprovider examples/tensorflow/tests "$@"
