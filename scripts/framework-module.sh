# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Functions for the tests of the modules for PyTorch and TensorFlow. Source this file in the project's folder, with
# `framework` set to the framework's name and `home` to the folder of the virtual environment.
# shellcheck disable=SC2154

python=$home/bin/python

# skip REASON: prints why nothing was tested, and exits with 77.
skip() {
  printf '\n*****************************************************************\n' >&2
  printf '** The %s module was NOT tested: %s\n' "$framework" "$*" >&2
  printf '*****************************************************************\n' >&2
  exit 77
}

# Replaces the virtual environment with an empty one.
make_environment() {
  python3 -c 'import ensurepip, os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    skip "python3 lacks the module venv or its C headers (packages python3-venv and python3-dev)"
  rm -rf "$home"
  python3 -m venv "$home"
}

pip() { "$python" -m pip install -q --no-compile --retries 2 "$@" 2>"$home/pip.log"; }

# Prints why `pip` failed.
pip_failure() { tail -n 1 "$home/pip.log"; }

# install_module FOLDER: builds and installs the module in FOLDER, with the same warnings as the rest of the project, as
# errors. It is optimised less than a wheel, since full optimisation would take longer than it saves in the tests.
install_module() {
  local python_headers
  python_headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  export SPILLWAY_INCLUDE=$PWD/include
  export SPILLWAY_MODULE_FLAGS="-O1 -Wpedantic -Wconversion -Wsign-conversion -Werror -isystem $python_headers"
  export PATH=$home/bin:$PATH
  # Byte code is cached outside of the sources. Without it every test that starts a process would need some seconds
  # more to import the framework.
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=$home/pycache
  if command -v ccache >/dev/null; then
    mkdir -p "$home/compiler"
    ln -sf "$(command -v ccache)" "$home/compiler/g++"
    export CC=$home/compiler/g++ CXX=$home/compiler/g++
  fi
  # Build from a copy, since setuptools writes into the folder of the sources.
  rm -rf "$home/module"
  cp -rL "$1" "$home/module"
  "$python" -m pip install -q --no-build-isolation --no-deps --no-index --force-reinstall "$home/module"
}

# run_tests OPTIONS...: runs pytest in as many processes as there are processors, but at most 4. With the option `-n 0` the
# tests run in one process.
run_tests() {
  local processes
  processes=$(nproc)
  "$python" -m pytest -q -p no:cacheprovider -n "$((processes < 4 ? processes : 4))" "$@"
}
