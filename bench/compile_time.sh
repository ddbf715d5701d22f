#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures how long it takes to compile a file that includes the library: in CPU seconds of g++ -O2, and as a multiple
# of the time for ten standard headers. Each line is the least of RUNS runs; a busy machine makes all of them slower.
#
#   bench/compile_time.sh [RUNS]        RUNS is 3 by default; CXX names another compiler, CUDA the toolkit
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1-3}
compiler=${CXX-g++}
toolkit=${CUDA-/usr/local/cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The ten standard headers that the library includes most. They contain I/O, as most programs do.
printf '#include <%s>\n' algorithm chrono functional iostream map memory mutex string unordered_map vector \
  >"$work/standard.cpp"
printf '#include <thrust/%s>\n' host_vector.h device_vector.h sort.h >"$work/thrust.cpp"
echo '#include <spillway/spillway.hpp>' >"$work/spillway.cpp"
echo '#include <spillway/sim.hpp>' >"$work/sim.cpp"
echo '#include <spillway/cuda.hpp>' >"$work/cuda.cpp"

# seconds SOURCE [OPTION...]: user and system time of the compiler, the least of $runs.
seconds() {
  local least=
  for _ in $(seq "$runs"); do
    local TIMEFORMAT='%U %S' taken
    taken=$({ time "$compiler" -std=c++20 -O2 -Iinclude "${@:2}" -c "$1" -o "$work/out.o" 2>"$work/errors"; } 2>&1) ||
      { cat "$work/errors" >&2; return 1; }
    least=$(awk -v least="$least" '{ s = $1 + $2; print (least == "" || s < least) ? s : least }' <<<"$taken")
  done
  echo "$least"
}

report() {  # report NAME SOURCE [OPTION...]
  local taken
  taken=$(seconds "${@:2}")
  base=${base:-$taken}
  awk -v name="$1" -v s="$taken" -v base="$base" 'BEGIN { printf "%-44s %6.2f s %6.1fx\n", name, s, s / base }'
}

"$compiler" --version | head -1
report "ten standard headers" "$work/standard.cpp"
for include in "$toolkit/include/cccl" /usr/include; do
  if [ -e "$include/thrust/version.h" ]; then
    report "Thrust's vectors and sort" "$work/thrust.cpp" -isystem "$include" \
      -DTHRUST_HOST_SYSTEM=THRUST_HOST_SYSTEM_CPP -DTHRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP
    break
  fi
done
report "<spillway/spillway.hpp>" "$work/spillway.cpp"
report "<spillway/sim.hpp>" "$work/sim.cpp"
[ ! -e "$toolkit/include/cuda_runtime_api.h" ] ||
  report "<spillway/cuda.hpp>" "$work/cuda.cpp" -isystem "$toolkit/include"
report "01_hello_swap" examples/01_hello_swap/main.cpp
report "01_hello_swap against spillway::compiled" examples/01_hello_swap/main.cpp -DSPILLWAY_COMPILED
