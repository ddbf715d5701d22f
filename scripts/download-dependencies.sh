#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Downloads the libraries that tests and benchmarks need and unpacks them into FOLDER, for a machine on which nothing
# can be installed: copy FOLDER there and pass it to bench/gpu_check.sh. Runs on Debian or Ubuntu.
#
#   scripts/download-dependencies.sh FOLDER
set -euo pipefail
[ $# -eq 1 ] || { sed -n '3,6s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
"$(dirname "$0")"/fetch-nvcomp.sh "$1/nvcomp" >/dev/null
cd "$1"
packages=(doctest-dev libcli11-dev nlohmann-json3-dev libbenchmark-dev libbenchmark1debian liburing-dev liburing2)
apt-get download -q "${packages[@]}"
for package in *.deb; do
  dpkg -x "$package" .
done
rm -- *.deb
# For the PyTorch module's tests. These packages are pure Python, so they work with any version of Python.
python3 -m pip install -q --target python --no-compile expecttest pytest setuptools
