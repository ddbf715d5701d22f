#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Replays every trace of a folder and fails if one does not complete.
#
#   scripts/replay-traces.sh FOLDER [PROGRAM]       default program: build/bin/spillway-replay
#
# Traces of lifetimes must fit into exactly their peak without swapping, by compaction alone. Every trace must run in
# three quarters of its peak, also on the simulated device, where the blocks' bytes are verified.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { sed -n '3,8s/^# \?//p' "$0" >&2; exit 2; }
folder=$1
export program=${2:-$(dirname "$0")/../build/bin/spillway-replay}

replay() {
  "$program" "$@" --json >/dev/null || { echo "failed: spillway-replay $*" >&2; exit 1; }
}

replay_in_all_ways() {
  local trace=$1 scale=1 small=0.001
  case $trace in
    *minimalloc*) scale=1024 small=16 ;;  # the sizes in these traces are not in bytes
  esac
  if head -n 1 "$trace" | grep -q lower; then
    replay "$trace" --scale "$scale" --capacity 1.0x --no-swap
  fi
  replay "$trace" --scale "$scale" --capacity 0.75x
  replay "$trace" --scale "$small" --capacity 0.75x --device sim --verify
}
export -f replay replay_in_all_ways

mapfile -t traces < <(find "$folder" -name '*.csv' | sort)
[ "${#traces[@]}" -gt 0 ] || { echo "no trace in $folder" >&2; exit 1; }
printf '%s\0' "${traces[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'replay_in_all_ways "$1"' replay
echo "${#traces[@]} traces replayed"
