# SPDX-License-Identifier: Apache-2.0
"""The part for GPUs, as far as it can be tested without one."""

import pytest
import tensorflow as tf

import spillway_tf
from spillway_tf import _load

running = ".".join(tf.__version__.split(".")[:2])
needs_cuda = pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="this TensorFlow was built without CUDA")


@needs_cuda
def test_it_is_built_and_every_symbol_it_needs_is_found(script):
    assert running in _load.built_for("gpu")
    done = script("import os, sys\n"
                  "sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL)\n"
                  "import spillway_tf._load\n"
                  "part = spillway_tf._load.load(kind='gpu')\n"
                  "print(part.is_installed(), part.is_enabled())\n")
    assert done.stdout.split() == ["False", "False"], done.stderr[-2000:]


@needs_cuda
def test_put_in_place_without_a_gpu_it_leaves_the_cpu_alone(script):
    done = script("import tensorflow as tf\n"
                  "from spillway_tf import _load\n"
                  "part = _load.load(kind='gpu')\n"
                  "part.install(1 << 30, 0, '', 0, 0)\n"
                  "print(part.is_installed(), [d.name for d in tf.config.list_logical_devices()])\n"
                  "print(float(tf.reduce_sum(tf.ones(5000))))\n"
                  "try:\n"
                  "    part.install(1 << 30, 0, '', 0, 0)\n"
                  "except RuntimeError as error:\n"
                  "    print(error)\n")
    assert done.stdout.splitlines() == ["True ['/device:CPU:0']", "5000.0", "spillway_tf is installed already"], \
        done.stderr[-2000:]


@needs_cuda
def test_after_tensorflow_has_begun_to_use_its_gpus_it_is_too_late(script):
    done = script("import ctypes, os, tensorflow as tf\n"
                  "from spillway_tf import _load\n"
                  "folder = tf.sysconfig.get_lib()\n"
                  "library = ctypes.CDLL(os.path.join(folder, 'libtensorflow_framework.so.2'))\n"
                  "singleton = library._ZN10tensorflow15GPUProcessState9singletonEPS0_\n"
                  "singleton.argtypes, singleton.restype = [ctypes.c_void_p], ctypes.c_void_p\n"
                  "assert singleton(None)\n"
                  "_load.load(kind='gpu').install(1 << 30, 0, '', 0, 0)\n")
    assert done.returncode == 1
    assert "TensorFlow has begun to use its GPUs already" in done.stderr


def test_without_a_gpu_it_is_refused_with_a_message(script):
    done = script("import spillway_tf\nspillway_tf.install(device='GPU:0')\n")
    assert done.returncode == 1
    why = "TensorFlow finds no GPU here" if tf.test.is_built_with_cuda() else "this TensorFlow was built without CUDA"
    assert f"spillway_tf.install(device='GPU:0'): {why}" in done.stderr
    done = script("import spillway_tf\n"
                  "try:\n"
                  "    spillway_tf.install(device='GPU:0')\n"
                  "except RuntimeError:\n"
                  "    spillway_tf.set_lms_enabled(True)\n"
                  "print(spillway_tf.get_lms_enabled())\n")
    assert done.stdout.split() == ["True"], done.stderr[-2000:]


def test_gpus_that_tensorflow_must_not_use_do_not_count(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["one"])
    assert spillway_tf._kind_of(None) == "cpu"


@needs_cuda
def test_several_gpus_are_refused_before_anything_is_replaced(script):
    done = script("import tensorflow as tf, spillway_tf\n"
                  "from spillway_tf._load import C\n"
                  "gpus = [tf.config.PhysicalDevice(f'/physical_device:GPU:{i}', 'GPU') for i in range(2)]\n"
                  "tf.config.get_visible_devices = lambda kind: gpus\n"
                  "tf.config.get_logical_device_configuration = lambda gpu: [tf.config.LogicalDeviceConfiguration()] * 2\n"
                  "for device in (None, 'GPU:0'):\n"
                  "    for left in (2, 1):\n"
                  "        gpus = gpus[:left]\n"
                  "        try:\n"
                  "            spillway_tf.install(device=device)\n"
                  "        except RuntimeError as error:\n"
                  "            print(error)\n"
                  "print(C.kind, C.is_installed())\n"
                  "spillway_tf.install(device='CPU:0')\n"
                  "print(float(tf.reduce_sum(tf.ones(5000))))\n")
    refusals = [line for line in done.stdout.splitlines() if line.startswith("spillway_tf.install: ")]
    assert len(refusals) == 4, done.stdout + done.stderr[-2000:]
    assert 'sees 2 GPUs' in refusals[0] and 'tf.config.set_visible_devices(gpus[:1], "GPU")' in refusals[0]
    assert all("divided into several logical devices" in refusal for refusal in refusals[1:])
    assert done.stdout.splitlines()[-2:] == ["cpu False", "5000.0"]


def test_other_devices_are_refused_by_name(script):
    done = script("import spillway_tf\nspillway_tf.install(device='GPU:1')\n")
    assert "ValueError: spillway_tf.install(device='GPU:1'): the devices are CPU:0 and GPU:0" in done.stderr


def test_for_a_tensorflow_that_it_was_not_built_for_there_is_a_message():
    with pytest.raises(ImportError, match=r"part for GPUs was not built for TensorFlow 2\.99"):
        _load.load("2.99.1", kind="gpu")
