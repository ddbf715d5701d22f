#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds wheels and source distributions of the Python modules, and tests each wheel in an environment without a compiler.
#
#   scripts/build-wheels.sh FOLDER PYTHON...
#
# Each PYTHON belongs to an environment with PyTorch or TensorFlow, such as build/pytorch-2.15.0/bin/python, which
# scripts/test-pytorch.sh makes. The wheel works with the minor versions of that framework and that Python. If auditwheel is
# found, the wheel gets the manylinux tag of the oldest system that it works on; otherwise it is for systems like this one.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '3,9s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
pythons=()
for python in "$@"; do
  # Do not follow links: the python of a virtual environment is a link, and finds its packages by its own path.
  python=$(realpath -s "$python")
  if [ ! -f "$python" ] || [ ! -x "$python" ]; then
    echo "build-wheels.sh: $python is no program" >&2
    exit 1
  fi
  pythons+=("$python")
done
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export MAX_JOBS=${MAX_JOBS:-1} TF_CPP_MIN_LOG_LEVEL=2

# A test program: a training step with half of the memory that it needs, so that tensors are swapped out.
cat > "$work/try_spillway_torch.py" <<'END'
import torch, spillway_torch
spillway_torch.install(device="cpu", limit="24MiB", host_limit="256MiB")
spillway_torch.set_enabled_lms(True)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1024, 512)).square().mean().backward()
optimizer.step()
assert all(p.isfinite().all() for p in model.parameters())
print("swapped out", spillway_torch.memory_stats()["reclaimed_bytes"] >> 20, "MiB")
assert spillway_torch.memory_stats()["reclaimed_bytes"] > 0
END
cat > "$work/try_spillway_tf.py" <<'END'
import tensorflow as tf, spillway_tf
spillway_tf.set_lms_limit(24 << 20)
spillway_tf.set_lms_enabled(True)
layers = [tf.Variable(tf.random.normal((512, 512)) / 22) for _ in range(12)]
with tf.GradientTape() as tape:
    x = tf.ones((1024, 512))
    for layer in layers:
        x = x @ layer
    loss = tf.reduce_mean(x * x)
for layer, gradient in zip(layers, tape.gradient(loss, layers)):
    layer.assign_sub(0.1 * gradient)
assert all(tf.reduce_all(tf.math.is_finite(layer)) for layer in layers)
print("swapped out", spillway_tf.get_bytes_reclaimed() >> 20, "MiB")
assert spillway_tf.get_bytes_reclaimed() > 0
END

# try_wheel PYTHON MODULE WHEEL: installs WHEEL into a new environment, which uses the framework of PYTHON's environment but
# has no compiler in its PATH, and runs the test program of MODULE.
try_wheel() {
  local packages
  packages=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -rf "$work/fresh"
  TIMEFORMAT="$(basename "$3"): the first training step with swapping was done after %0R s, %0U s of them on a processor, at a load of $(cut -d ' ' -f 1 /proc/loadavg)"
  time {
    "$1" -m venv --without-pip "$work/fresh"
    echo "$packages" > "$("$work/fresh/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/framework.pth"
    "$1" -m pip -q --python "$work/fresh/bin/python" install --no-index --no-deps --ignore-installed "$3"
    (cd "$work/fresh" && env -i PATH="$work/fresh/bin" HOME="$work" TF_CPP_MIN_LOG_LEVEL=2 python "$work/try_$2.py")
  }
}

for python in "${pythons[@]}"; do
  built=0
  for module in spillway_torch spillway_tf; do
    framework=torch
    [ $module = spillway_torch ] || framework=tensorflow
    status=0  # 77 if this Python does not have the framework
    "$python" -c "import importlib.util as u, sys; sys.exit(77 * (u.find_spec('$framework') is None))" || status=$?
    [ $status -ne 77 ] || continue
    if [ $status -ne 0 ]; then
      echo "build-wheels.sh: $python cannot be asked for $framework (status $status)" >&2
      exit 1
    fi
    # Build from a copy, since setuptools writes into the folder of the sources.
    rm -rf "$work"/{tree,source,wheels,repaired}
    mkdir -p "$work"/{tree/python,wheels}
    cp -rL "python/$module" "$work/tree/python/"  # -L: also the files that both modules share by links
    ln -s "$PWD/include" "$PWD/LICENSE" "$work/tree/"
    (cd "$work/tree/python/$module" && "$python" setup.py -q sdist -d "$work/source")
    rm -rf "$work/tree"  # so that the wheel is built from the source distribution alone
    "$python" -m pip -q wheel --no-build-isolation --no-deps --no-index -w "$work/wheels" "$work"/source/*.tar.gz
    if command -v auditwheel >/dev/null; then
      auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libtensorflow*' --exclude 'libcudart*' \
        -w "$work/repaired" "$work"/wheels/*.whl
    else
      echo "auditwheel was not found: the wheel is tagged for systems like this one"
      mv "$work/wheels" "$work/repaired"
    fi
    wheel=$(basename "$work"/repaired/*.whl)
    mv "$work/repaired/$wheel" "$work"/source/*.tar.gz "$folder/"
    try_wheel "$python" $module "$folder/$wheel"
    built=1
  done
  if [ $built = 0 ]; then
    echo "build-wheels.sh: $python has neither torch nor tensorflow, so no wheel was built for it" >&2
    exit 1
  fi
done
