#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Downloads NVIDIA's nvCOMP (30 MB) into FOLDER with pip, unless it is there already, and prints the folder of its CMake
# package.
#
#   cmake -S . -B build -Dnvcomp_DIR="$(scripts/fetch-nvcomp.sh FOLDER)"
set -euo pipefail
[ $# -eq 1 ] || { sed -n '3,6s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
package=$(cd "$1" && pwd)/nvidia/libnvcomp/lib64/cmake/nvcomp
if [ ! -f "$package/nvcomp-config.cmake" ]; then
  python3 -m pip install -q --no-deps --no-compile --target "$1" nvidia-libnvcomp-cu13==6.0.0.12 >&2
fi
echo "$package"
