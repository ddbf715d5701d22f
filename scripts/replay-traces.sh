#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Replays every trace of a folder and fails if one does not complete.
#
#   scripts/replay-traces.sh FOLDER [PROGRAM]       default program: build/bin/spillway-replay
#
# Lifetimes must fit into exactly their peak without swapping, so that compaction alone has to do; every
# trace must run in three quarters of its peak; and on the simulated device no byte may be lost on the way.
set -euo pipefail
folder=$1
program=${2:-$(dirname "$0")/../build/bin/spillway-replay}

replay() {
  "$program" "$@" --json >/dev/null || { echo "failed: spillway-replay $*" >&2; exit 1; }
}

count=0
while IFS= read -r trace; do
  scale=1 small=0.001
  case $trace in
    *minimalloc*) scale=1024 small=16 ;;  # sizes in units, not in bytes
  esac
  if head -n 1 "$trace" | grep -q lower; then
    replay "$trace" --scale "$scale" --capacity 1.0x --no-swap
  fi
  replay "$trace" --scale "$scale" --capacity 0.75x
  replay "$trace" --scale "$small" --capacity 0.75x --device sim --verify
  count=$((count + 1))
done < <(find "$folder" -name '*.csv' | sort)
[ "$count" -gt 0 ] || { echo "no trace in $folder" >&2; exit 1; }
echo "$count traces replayed"
