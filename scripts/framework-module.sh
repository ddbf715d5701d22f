# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the tests of the modules for PyTorch and TensorFlow have in common. To be sourced, in the project's folder, with
# `framework` being the name and `home` the folder of the virtual environment.
# shellcheck disable=SC2154

python=$home/bin/python

# Says loudly why nothing was tested, and ends with 77.
skip() {
  printf '\n*****************************************************************\n' >&2
  printf '** The %s module was NOT tested: %s\n' "$framework" "$*" >&2
  printf '*****************************************************************\n' >&2
  exit 77
}

# Makes the environment anew, empty.
make_environment() {
  python3 -c 'import ensurepip, os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    skip "python3 lacks the module venv or its C headers (packages python3-venv and python3-dev)"
  rm -rf "$home"
  python3 -m venv "$home"
}

pip() { "$python" -m pip install -q --no-compile --retries 2 "$@" 2>"$home/pip.log"; }

# Why `pip` failed.
pip_failure() { tail -n 1 "$home/pip.log"; }

# Builds and installs the module in a folder, with the warnings of the rest of the project as errors. It is optimised less
# than what is handed out: that would take longer to compile than the tests take to run.
install_module() {
  local python_headers
  python_headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  export SPILLWAY_INCLUDE=$PWD/include
  export SPILLWAY_MODULE_FLAGS="-O1 -Wpedantic -Wconversion -Wsign-conversion -Werror -isystem $python_headers"
  export PATH=$home/bin:$PATH
  # Nothing is written beside the sources. Without byte code every test that is a program of its own takes some
  # seconds longer to import the framework.
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=$home/pycache
  if command -v ccache >/dev/null; then
    mkdir -p "$home/compiler"
    ln -sf "$(command -v ccache)" "$home/compiler/g++"
    export CC=$home/compiler/g++ CXX=$home/compiler/g++
  fi
  # From a copy: setuptools writes beside the sources.
  rm -rf "$home/module"
  cp -rL "$1" "$home/module"
  "$python" -m pip install -q --no-build-isolation --no-deps --no-index --force-reinstall "$home/module"
}

# Runs tests with pytest in as many processes as there are processors, but no more than 4. `-n 0` as an option: in this one.
run_tests() {
  local processes
  processes=$(nproc)
  "$python" -m pytest -q -p no:cacheprovider -n "$((processes < 4 ? processes : 4))" "$@"
}
