#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and tests what is committed in another release of Debian, with a compiler of that release. Warnings are errors.
#
#   scripts/test-debian.sh FOLDER RELEASE COMPILER      e.g. test-debian.sh /var/tmp/sid sid g++-16
#
# Installs the release in FOLDER unless it is there already, which takes 2 GB. Needs root and the packages debootstrap and git.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 3 ] || { sed -n '3,7s/^# \?//p' "$0" >&2; exit 2; }
folder=$1 release=$2 compiler=$3

[ -e "$folder/etc/debian_version" ] || debootstrap --variant=minbase "$release" "$folder"
rm -rf "$folder/spillway"
git clone -q . "$folder/spillway"

# The mounts are seen by these processes only and end with them.
unshare --mount bash -euo pipefail -c '
  mount -t proc proc "$1/proc"
  mount --rbind /dev "$1/dev"
  chroot "$1" apt-get update -q
  chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends git "$2"
  chroot "$1" /spillway/scripts/run-tests.sh -DSPILLWAY_WARNINGS_AS_ERRORS=ON "-DCMAKE_CXX_COMPILER=$3"
' bash "$folder" "${compiler/clang++/clang}" "$compiler"
