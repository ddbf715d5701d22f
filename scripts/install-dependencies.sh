#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the missing packages that are needed to build and test spillway on Debian or Ubuntu. A second run does nothing.
#
#   scripts/install-dependencies.sh         compiler, CMake and the libraries that tests and tools use
#   scripts/install-dependencies.sh --ci    also the tools that check the code: clang, clang-tidy, clang-format, and a
#                                           compiler for AArch64 with QEMU
set -euo pipefail

packages=(g++ cmake ninja-build python3 doctest-dev libcli11-dev nlohmann-json3-dev libbenchmark-dev
          liburing-dev libxxhash-dev libzstd-dev liblz4-dev)
if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  packages+=(libthrust-dev libcub-dev)  # the CUDA toolkit contains them
fi
case "${1-}" in
  "") ;;
  --ci) packages+=(clang clang-tidy clang-format libclang-rt-dev clang-19 libclang-rt-19-dev git
                   g++-aarch64-linux-gnu qemu-user-static) ;;
  *) sed -n '3,7s/^# \?//p' "$0" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "installing: ${missing[*]}"
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -qy --no-install-recommends "${missing[@]}"
