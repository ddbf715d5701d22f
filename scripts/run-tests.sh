#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds all programs except the bench_* programs that only measure times, runs run-example.sh
# and then all tests.
#
#   scripts/run-tests.sh [CMAKE OPTIONS]        e.g. -DSPILLWAY_WARNINGS_AS_ERRORS=ON
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install-dependencies.sh
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release "$@"
cmake --build build
scripts/run-example.sh
ctest --test-dir build --output-on-failure --no-tests=error -j "$(nproc)"
