#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, and trains a network that needs more memory than the device has:
# on the GPU where there is one, else on the simulated device.
#
#   scripts/run-example.sh [ARGUMENTS OF train_beyond_memory]
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install-dependencies.sh
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release
cmake --build build --target train_beyond_memory
build/bin/train_beyond_memory "$@"
