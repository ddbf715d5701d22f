#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and measures spillway on a machine with a GPU: one call, less than ten minutes.
#
#   bench/gpu_check.sh RESULTS [DEPENDENCIES]
#
# RESULTS       folder for the full results; a short table is printed last
# DEPENDENCIES  folder that scripts/download-dependencies.sh has filled, where nothing can be installed
#
# Ends with 0 if every step did, with 77 where there is no GPU, else with 1 after all steps have run.
# SPILLWAY_GPU_ARCHITECTURES builds for another GPU than the one there.
# It changes no setting of the card and asks for no more memory than is free.
set -uo pipefail
[ $# -ge 1 ] || { sed -n '3,13s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
results=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
source=$PWD
build=${SPILLWAY_GPU_BUILD:-$source/build-gpu}
export PATH=$PATH:/usr/local/cuda/bin

nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free --format=csv,noheader \
  >"$results/gpu.txt" 2>&1 || { echo "no GPU: nvidia-smi fails"; exit 77; }
nvcc --version | tail -n 2 >>"$results/gpu.txt"
cat "$results/gpu.txt"

failed=0
: >"$results/steps.txt"
# step NAME SECONDS COMMAND...: runs it with a limit, its output in RESULTS/NAME.txt.
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  timeout "$limit" "$@" >"$results/$name.txt" 2>&1 || status=$?
  echo "$name $status $((SECONDS - start))" | tee -a "$results/steps.txt"
  [ "$status" -eq 0 ] || { failed=1; tail -n 15 "$results/$name.txt"; }
  return "$status"
}

prefix=()
dependencies=
if [ $# -ge 2 ]; then
  dependencies=$(cd "$2" && pwd)
  prefix=("-DCMAKE_PREFIX_PATH=$dependencies/usr")
  export LD_LIBRARY_PATH=$dependencies/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH-}
fi
# The PyTorch module is compiled while everything else is: it takes one core and a minute or two.
has_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }
export PYTHONPATH=$results/torch:$dependencies/python:${PYTHONPATH-} PYTHONDONTWRITEBYTECODE=1
torch_build=
if has_torch; then
  (step torch_build 300 scripts/build-pytorch.sh "$results/torch") &
  torch_build=$!
fi

step configure 60 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSPILLWAY_CUDA=ON \
  "-DSPILLWAY_CUDA_ARCHITECTURES=${SPILLWAY_GPU_ARCHITECTURES:-native}" -DSPILLWAY_INSTALL=OFF "${prefix[@]}" || exit 1
step build 240 cmake --build "$build" --target spillway_gpu_tests train_beyond_memory spillway-replay \
  spillway-bandwidth bench_device_moves bench_allocate_latency bench_virtual_memory || exit 1

export SPILLWAY_REQUIRE_GPU=1
step tests 120 ctest --test-dir "$build" -L gpu --output-on-failure --no-tests=error
sanitizer() { step "$1" 90 compute-sanitizer --tool "$1" --error-exitcode 9 "${@:2}"; }
sanitizer memcheck "$build/tests/bin/test_gpu_allocator" --no-intro
sanitizer racecheck "$build/tests/bin/test_gpu_interop" --no-intro

bin=$build/bin
# json NAME SECONDS COMMAND...: a step whose standard output is kept as RESULTS/NAME.json.
json() {
  local name=$1 limit=$2
  shift 2
  # shellcheck disable=SC2016
  step "$name" "$limit" bash -c '"${@:2}" >"$1"' - "$results/$name.json" "$@"
}
json training 120 "$bin/train_beyond_memory" --device cuda --json
json bandwidth 120 "$bin/spillway-bandwidth" --device cuda --json
json bandwidth_file 60 "$bin/spillway-bandwidth" --device cuda --json --tier file --file-folder "$results" \
  --max-size 64MiB --repetitions 3
json device_moves 60 "$bin/bench_device_moves" --benchmark_filter=^cuda --benchmark_format=json
json allocate_latency 60 "$bin/bench_allocate_latency" --benchmark_filter=^cuda --benchmark_format=json
json virtual_memory 60 "$bin/bench_virtual_memory" --benchmark_filter=^cuda --benchmark_format=json
if [ -n "$torch_build" ]; then
  json torch_allocate_latency 60 python3 scripts/torch-allocate-latency.py
  if wait "$torch_build"; then
    step torch_tests 240 python3 -m pytest -q -p no:cacheprovider python/spillway_torch/tests_cuda
    json torch_training 120 python3 examples/pytorch/bench_lms.py --device cuda --net resnet50 --batch 64 --size 224 \
      --caps 0.5 0.3 --rounds 1 --steps 8 --json
    json torch_page 60 python3 examples/pytorch/bench_page.py --device cuda --width 4096 --json
  else
    failed=1
  fi
else
  echo "torch 77 0" >>"$results/steps.txt"
  echo "PyTorch is NOT tested: python3 has none that finds a GPU"
fi

python3 bench/gpu_table.py "$results" || failed=1
exit "$failed"
