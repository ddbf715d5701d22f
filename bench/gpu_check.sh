#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and measures spillway on a machine with a GPU. Each call takes less than ten minutes.
#
#   bench/gpu_check.sh core|torch RESULTS [DEPENDENCIES]
#
# core          the C++ library: GPU tests, compute-sanitizer, bandwidth, compaction, the training job
# torch         the PyTorch module, with the PyTorch that python3 has
# RESULTS       folder for results.tgz, the full output of every step
# DEPENDENCIES  folder that scripts/download-dependencies.sh has filled, where nothing can be installed
#
# Prints the result of each step when it ends, and at last a table of all steps, even after a failed build or when
# the time is over. A step that no longer fits into the time is skipped, and the table says so.
# Exit status: 0 if every step succeeded, 77 if there is no GPU, otherwise 1.
#
# SPILLWAY_GPU_SECONDS        time for all steps; 540
# SPILLWAY_GPU_ARCHITECTURES  builds for this architecture instead of that of the machine's GPU
# SPILLWAY_GPU_BUILD          build folder; build-gpu
# SPILLWAY_GPU_BUILT=1        builds nothing: the programs are in the build folder, and the module in its folder torch
# SPILLWAY_CUDA_STAND_IN=1    runs the steps that need no kernels on a stand-in for the CUDA runtime, to try this
#                             script on a machine without a GPU; the figures then mean nothing
#
# The script changes no setting of the GPU and allocates no more memory than is free.
set -uo pipefail
usage() { sed -n '3,24s/^# \?//p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
part=$1
case $part in core | torch) ;; *) usage ;; esac
mkdir -p "$2" || exit 2
results=$(cd "$2" && pwd)
dependencies=
[ $# -lt 3 ] || dependencies=$(cd "$3" && pwd) || exit 2
cd "$(dirname "$0")/.."
source=$PWD
build=${SPILLWAY_GPU_BUILD:-$source/build-gpu}
seconds=${SPILLWAY_GPU_SECONDS:-540}
built=${SPILLWAY_GPU_BUILT:-0}
stand_in=${SPILLWAY_CUDA_STAND_IN:-0}
export PATH=$PATH:/usr/local/cuda/bin

# All output is written here and packed at the end, so that only a few files have to be copied from the machine.
work=$(mktemp -d)
: >"$work/steps.txt"
mkdir "$work/running"  # a file for each program that runs now: its process, with the name of its step
failed=0

# Ends a program that `timeout` runs. The program itself gets the signal, too, for `timeout` may have been about to start it.
terminate() { kill -- "-$1" 2>/dev/null || kill "$1" 2>/dev/null; }

finish() {
  local status=$?
  trap - EXIT
  [ "$status" -eq 0 ] || failed=1
  : >"$work/ending"
  local program
  for program in "$work"/running/*; do
    [ ! -e "$program" ] || terminate "${program##*/}"
  done
  wait
  for program in "$work"/running/*; do  # that of this shell, which no longer waits for it
    [ ! -e "$program" ] || record "$(cat "$program")" 143 0
  done
  rm -rf "$work/running" "$work/ending"
  echo
  python3 "$source/bench/gpu_table.py" "$work" || failed=1
  tar -C "$work" --exclude=./torch --exclude=./stand-in --exclude=./pycache -czf "$results/results.tgz" . || failed=1
  rm -rf "$work"
  exit "$failed"
}

if [ "$stand_in" = 1 ]; then
  echo "stand-in for the CUDA runtime: the figures below are not those of a GPU"
elif ! nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free --format=csv,noheader >"$work/gpu.txt" 2>&1; then
  rm -rf "$work"
  echo "no GPU: nvidia-smi fails"
  exit 77
else
  { nvcc --version 2>/dev/null | tail -n 2; date -u +%F; git rev-parse --short HEAD 2>/dev/null; } >>"$work/gpu.txt"
  cat "$work/gpu.txt"
fi
trap finish EXIT
trap 'exit 143' TERM INT

record() { echo "$1 $2 $3" >>"$work/steps.txt"; }
broken=  # a failed step that all following steps depend on

# step NAME LEAST MOST COMMAND...: runs COMMAND for at most MOST seconds, and no longer than the time that is left. Skips
# it if less than LEAST seconds are left. Its output goes to NAME.txt. `json` writes standard output to NAME.json instead.
step() {
  local name=$1 least=$2 most=$3 start=$SECONDS status=0 left=$((seconds - SECONDS))
  shift 3
  if [ -n "$broken" ]; then
    record "$name" "not-run" 0
    echo "$name not run: $broken failed"
    return 1
  fi
  if [ "$left" -lt "$least" ]; then
    record "$name" late 0
    echo "$name skipped: it needs $least s, and $left s of $seconds are left"
    return 1
  fi
  # In the background, since a shell that waits for a program runs its traps only when the program has ended.
  timeout -k 5 "$((most < left ? most : left))" "$@" >"$work/$name.txt" 2>&1 &
  local program=$!
  echo "$name" >"$work/running/$program"
  [ ! -e "$work/ending" ] || terminate "$program"
  wait "$program" || status=$?
  rm "$work/running/$program"
  record "$name" "$status" $((SECONDS - start))
  [ "$status" -eq 0 ] || tail -n 15 "$work/$name.txt"
  python3 bench/gpu_table.py "$work" "$name"
  return "$status"
}
json() {
  local name=$1 least=$2 most=$3
  shift 3
  # shellcheck disable=SC2016
  step "$name" "$least" "$most" bash -c '"${@:2}" >"$1"' - "$work/$name.json" "$@"
}
# Runs a step that launches kernels, or needs gigabytes of memory or the driver. The stand-in has none of these, so there
# the step is recorded as skipped.
on_gpu() {
  if [ "$stand_in" = 1 ]; then
    record "$2" 77 0
  else
    "$@"
  fi
}

if [ -n "$dependencies" ]; then
  export LD_LIBRARY_PATH=$dependencies/usr/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH-}
fi
preload=()
if [ "$stand_in" = 1 ]; then
  headers=$(dirname "$(dirname "$(command -v nvcc)")")/include
  mkdir -p "$work/stand-in"
  step stand_in 60 120 "${CXX:-g++}" -std=c++20 -O1 -fPIC -shared -I include -I tests -isystem "$headers" \
    -o "$work/stand-in/libcuda.so.1" tests/support/fake_cuda_device.cpp tests/support/fake_cuda_missing.cpp \
    tests/support/fake_cudart.cpp tests/support/fake_cuda_driver.cpp -pthread || exit 1
  export LD_LIBRARY_PATH=$work/stand-in:${LD_LIBRARY_PATH-} SPILLWAY_FAKE_CUDA_BYTES=$((4 << 30))
  preload=(env "LD_PRELOAD=$work/stand-in/libcuda.so.1")
else
  export SPILLWAY_REQUIRE_GPU=1
fi

build_core() {
  local prefix=() architectures=native targets=(spillway-bandwidth)
  [ -z "$dependencies" ] ||
    prefix=("-DCMAKE_PREFIX_PATH=$dependencies/usr" "-Dnvcomp_DIR=$dependencies/nvcomp/nvidia/libnvcomp/lib64/cmake/nvcomp")
  [ "$stand_in" = 0 ] || architectures=90
  step configure 10 60 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSPILLWAY_CUDA=ON \
    "-DSPILLWAY_CUDA_ARCHITECTURES=${SPILLWAY_GPU_ARCHITECTURES:-$architectures}" -DSPILLWAY_INSTALL=OFF \
    "${prefix[@]}" || broken=configure
  [ "$stand_in" = 1 ] || targets+=(spillway_gpu_tests gpu_hello train_beyond_memory spillway-replay bench_device_moves
                                   bench_allocate_latency bench_gpu_codec bench_virtual_memory)
  step build 60 300 cmake --build "$build" --target "${targets[@]}" || broken=${broken:-build}
}

# Under compute-sanitizer each access takes a hundred times as long, so the allocator's test uses a sixteenth of its bytes.
# compute-sanitizer may wait for each kernel before it returns from the launch (NVIDIA/stdexec#964). A kernel that waits
# for the host would then wait for ever, so cases with a KernelGate are left out here. The step `tests` runs them.
sanitizer() {
  SPILLWAY_GPU_TEST_SCALE=1 on_gpu step "$1_$2" 20 90 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$build/tests/gpu/bin/test_gpu" "--source-file=*/$2_test.cu" "${@:3}" --no-intro
}

run_core() {
  local bin=$build/bin small=()
  [ "$stand_in" = 0 ] || small=(--max-size 16MiB)
  [ "$built" = 1 ] || build_core

  # Tests that measure no times run in parallel, except those that look at the device's free memory.
  on_gpu step tests 30 120 ctest --test-dir "$build/tests/gpu" -L gpu -j 8 --output-on-failure --no-tests=error
  sanitizer memcheck allocator -sce='compaction moves blocks ordered after work in flight*,three streams: *' &
  sanitizer racecheck interop -tce='CudaMemoryResource: memory passes between streams*' &
  sanitizer racecheck codec -tc='CudaZeroBitmap*' &
  sanitizer memcheck copy_kernel &
  sanitizer memcheck streams -tce='cuda_check*' &  # left out: its launch fails on purpose
  sanitizer racecheck streams &
  local suite
  for suite in graph share; do
    sanitizer memcheck "$suite" &
    sanitizer racecheck "$suite" &
  done
  sanitizer memcheck interop &
  wait
  json bandwidth 20 60 "${preload[@]}" "$bin/spillway-bandwidth" --device cuda --tier pinned --json "${small[@]}"
  on_gpu json bandwidth_kernel 10 30 "$bin/spillway-bandwidth" --device cuda --tier pinned --json --copy-kernel \
    --max-size 16KiB
  on_gpu json device_moves 10 60 "$bin/bench_device_moves" --benchmark_filter=^cuda --benchmark_format=json
  on_gpu json allocate_latency 5 30 "$bin/bench_allocate_latency" --benchmark_filter=^cuda \
    --benchmark_format=json
  if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    json torch_allocate_latency 10 30 python3 scripts/torch-allocate-latency.py
  fi
  on_gpu json virtual_memory 5 30 "$bin/bench_virtual_memory" --benchmark_filter=^cuda --benchmark_format=json
  on_gpu json gpu_codec 5 30 "$bin/bench_gpu_codec" --benchmark_format=json
  on_gpu json training 20 90 "$bin/train_beyond_memory" --device cuda --json
  on_gpu json training_recompute 20 60 "$bin/train_beyond_memory" --device cuda --recompute --json
  json bandwidth_file 20 60 "${preload[@]}" "$bin/spillway-bandwidth" --device cuda --json --tier file \
    --file-folder "$work" --max-size 16MiB --repetitions 3
}

run_torch() {
  local module=$work/torch
  [ "$built" = 0 ] || module=$build/torch
  export PYTHONPATH=$module:$dependencies/python:$source/python/spillway_torch/tests_cuda:${PYTHONPATH-}
  # Many tests start a process that imports PyTorch, which takes twice as long without cached byte code.
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=$work/pycache
  if ! "${preload[@]}" python3 -c 'import torch; assert torch.cuda.is_available()' >"$work/torch.txt" 2>&1; then
    record torch 77 0
    echo "PyTorch is NOT tested: python3 has none that finds a GPU"
    failed=1
    return
  fi
  if [ "$stand_in" = 0 ]; then
    TORCH_CUDA_ARCH_LIST=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
    export TORCH_CUDA_ARCH_LIST
  fi
  [ "$built" = 1 ] || step torch_build 60 300 scripts/build-pytorch.sh "$module" || broken=torch_build
  # Each file runs in its own process, since a process cannot use the GPU any more after a kernel has failed.
  local file
  torch_test() {
    # shellcheck disable=SC2016 # pytest ends with 5 if a file has no test for this version of PyTorch.
    step "torch_$1" 30 200 bash -c '"$@" || [ $? -eq 5 ]' - "${preload[@]}" python3 -m pytest -q --tb=short \
      -p no:cacheprovider "${@:2}"
  }
  torch_test alone -m alone python/spillway_torch/tests_cuda/test_*.py
  for file in python/spillway_torch/tests_cuda/test_*.py; do
    [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n
    torch_test "$(basename "$file" .py)" -m "not alone" "$file" &
  done
  wait
  training() {
    on_gpu json "torch_training_$1" 60 150 python3 examples/pytorch/bench_lms.py --device cuda --net "$1" --batch 64 \
      --size "$2" --caps 0.5 0.3 --recompute --rounds 1 --steps 8 --json
  }
  training resnet50 224
  training transformer 1024
  on_gpu json torch_page 20 60 python3 examples/pytorch/bench_page.py --device cuda --width 4096 --json
}

"run_$part"
