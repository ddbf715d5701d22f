#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Does what run-example.sh does, then builds all programs but the benchmarks of single parts, and runs all tests.
#
#   scripts/run-tests.sh [CMAKE OPTIONS]        e.g. -DSPILLWAY_WARNINGS_AS_ERRORS=ON
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install-dependencies.sh
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release "$@"
cmake --build build
scripts/run-example.sh
ctest --test-dir build --output-on-failure --no-tests=error -j "$(nproc)"
