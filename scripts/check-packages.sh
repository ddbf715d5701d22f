#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Conan package and installs the vcpkg port of packaging/. Reports which of the two tools was not found. Exit
# status 77 if neither was found.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=77

if command -v conan >/dev/null; then
  export CONAN_HOME=$work/conan
  conan profile detect
  conan create packaging/conan -s compiler.cppstd=20  # also builds and runs test_package
  status=0
else
  echo "** The Conan recipe was NOT tested: there is no conan (pip install conan)" >&2
fi

if command -v vcpkg >/dev/null; then
  vcpkg install spillway --overlay-ports=packaging/vcpkg --x-install-root="$work/vcpkg"
  cmake -S tests/install/consumer -B "$work/consumer" -DCMAKE_PREFIX_PATH="$(echo "$work"/vcpkg/*-linux)" \
    -DTARGET=spillway::spillway -DPROGRAM="$PWD/examples/01_hello_swap/main.cpp"
  cmake --build "$work/consumer"
  "$work/consumer/consumer"
  status=0
else
  echo "** The vcpkg port was NOT tested: there is no vcpkg" >&2
fi
exit $status
