#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the PyTorch module, with its CUDA part, against the PyTorch that python3 finds. Needs no network, and
# installs nothing: add FOLDER to PYTHONPATH to use the module.
#
#   scripts/build-pytorch.sh FOLDER
#
# Needs setuptools, a C++ compiler, Python's C headers and CUDA's. PYTHON names another python3.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '3,8s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
python=${PYTHON:-python3}
case $python in
  */*) python=$(realpath -s "$python") ;;  # an absolute path, since it is called from other folders
esac
cd "$(dirname "$0")/.."
export SPILLWAY_INCLUDE=$PWD/include SPILLWAY_TORCH_CUDA=${SPILLWAY_TORCH_CUDA-1}
# Build from a copy, since setuptools writes into the folder of the sources.
rm -rf "$folder/source"
cp -rL python/spillway_torch "$folder/source"
cd "$folder/source"
"$python" setup.py -q build_ext --build-lib "$folder" --build-temp "$folder/objects"
cp spillway_torch/*.py "$folder/spillway_torch/"
