#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cross-compiles for AArch64 and runs the programs under QEMU.
#
#   scripts/test-aarch64.sh                          compiles the public headers, tests code that differs by processor
#   scripts/test-aarch64.sh --all [CTEST OPTIONS]    all tests that need no GPU
#
# Needs the packages g++-aarch64-linux-gnu and qemu-user-static of Debian or Ubuntu.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1-}" = --all ]; then
  cmake -S . -B build-aarch64 -G Ninja -DCMAKE_BUILD_TYPE=Release -DSPILLWAY_CUDA=OFF -DSPILLWAY_BUILD_BENCHMARKS=OFF \
    -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
  cmake --build build-aarch64
  exec ctest --test-dir build-aarch64 --output-on-failure --no-tests=error "${@:2}"
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compile() {
  aarch64-linux-gnu-g++ -std=c++20 -O1 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -Iinclude -Itests \
    -idirafter /usr/include -pthread "$@"
}
printf '#include <spillway/%s.hpp>\n' spillway sim | compile -fsyntax-only -x c++ -
compile tests/support/main.cpp tests/core/streaming_store_test.cpp tests/policy/codec/{as_bfloat16,zero_bitmap}_test.cpp \
  -o "$folder/tests"
qemu-aarch64-static -L /usr/aarch64-linux-gnu "$folder/tests"
