# SPDX-License-Identifier: Apache-2.0
import re
import signal

import pytest
import tensorflow as tf

import spillway_tf
from conftest import CAPACITY, random
from spillway_tf import _load

DEVICE = "CPU:0"


def test_statistics_follow_a_tensor_out_and_in(lms):
    before = spillway_tf.get_bytes_in_use()
    allocs = spillway_tf.get_num_allocs()
    x = random(256, 1024)
    assert spillway_tf.get_bytes_in_use() - before == 1 << 20
    assert spillway_tf.get_num_allocs() > allocs
    assert spillway_tf.get_largest_alloc_size() >= 1 << 20
    assert spillway_tf.get_bytes_limit() == CAPACITY
    reserved = spillway_tf.get_bytes_reserved()
    assert CAPACITY >= reserved >= spillway_tf.get_bytes_in_use()
    assert spillway_tf.get_bytes_inactive() == spillway_tf.get_bytes_in_use()
    reclaimed, full = spillway_tf.get_bytes_reclaimed(), spillway_tf.get_num_full_reclaims()
    pinned = spillway_tf.get_bytes_pinned()
    assert spillway_tf.reclaim_inactive() >= 1 << 20
    assert spillway_tf.get_bytes_pinned() == pinned == spillway_tf.get_bytes_in_use()
    assert lms.is_away(x)
    assert spillway_tf.get_bytes_reserved() == reserved
    assert spillway_tf.get_bytes_reclaimed() - reclaimed >= 1 << 20
    assert spillway_tf.get_num_full_reclaims() == full + 1
    assert spillway_tf.get_current_bytes_reclaimed() >= 1 << 20
    assert spillway_tf.get_peak_bytes_reclaimed() >= 1 << 20
    assert spillway_tf.get_host_bytes() >= 1 << 20
    away = spillway_tf.get_current_bytes_reclaimed()
    _ = tf.reduce_sum(x)
    assert spillway_tf.get_current_bytes_reclaimed() == away - (1 << 20)
    assert spillway_tf.get_bytes_reserved() == reserved  # the tensor came back without growth of the arena
    _ = x + 1.0
    assert spillway_tf.get_peak_bytes_active() >= 2 << 20
    assert "swapped out so far" in spillway_tf.memory_summary()


def test_every_statistic_of_the_interface_has_a_function():
    for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_active", "peak_bytes_active", "bytes_inactive",
                 "bytes_reclaimed", "current_bytes_reclaimed", "peak_bytes_reclaimed", "num_single_reclaims",
                 "num_full_reclaims", "num_defragmentations", "bytes_defragged", "num_allocs",
                 "largest_alloc_size", "bytes_limit", "bytes_reserved", "bytes_pinned"):
        assert getattr(spillway_tf, f"get_{name}")(0) == spillway_tf.get_lms_stats()[name] >= 0


def test_what_is_reclaimed_for_room_is_counted_one_by_one():
    singles = spillway_tf.get_num_single_reclaims()
    spillway_tf.set_lms_limit(32 << 20)
    kept = [random(1024, 1024, seed=i) for i in range(12)]
    assert spillway_tf.get_num_single_reclaims() - singles >= 4
    assert len(kept) == 12


def test_tensorflow_reads_and_resets_the_statistics():
    x = random(256, 1024)
    y = x * 2
    del y
    info = tf.config.experimental.get_memory_info(DEVICE)
    assert info["current"] == spillway_tf.get_bytes_in_use() > 0
    assert info["peak"] >= info["current"] + (1 << 20)
    tf.config.experimental.reset_memory_stats(DEVICE)
    info = tf.config.experimental.get_memory_info(DEVICE)
    assert info["peak"] == info["current"]


def test_the_limit_can_be_lowered_and_raised_again(lms):
    x = random(1024, 1024)
    spillway_tf.set_lms_limit(3 << 20)
    assert spillway_tf.get_lms_limit() == 3 << 20
    assert lms.is_away(x)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when bringing in the operands"):
        tf.reduce_sum(x)
    spillway_tf.set_lms_limit(0)
    assert spillway_tf.get_lms_limit() == CAPACITY
    assert tf.reduce_sum(x).shape == ()
    with pytest.raises(ValueError, match="at most"):
        spillway_tf.set_lms_limit(CAPACITY + (1 << 20))


def test_bytes_may_be_text_and_what_is_no_number_of_bytes_is_refused_by_name():
    spillway_tf.set_lms_limit("64MiB")
    assert spillway_tf.get_lms_limit() == 64 << 20
    for wrong in (-1, "2 houses", None, 1.5, "", "0.5", "1.5", "0.0001KB", "9" * 400, 10 ** 400):
        with pytest.raises(ValueError, match=r"spillway_tf\.set_lms_limit\(limit=.*\): bytes are a whole number"):
            spillway_tf.set_lms_limit(wrong)
    with pytest.raises(ValueError, match="at least one page, which is 16384 bytes"):
        spillway_tf.set_lms_limit(1)
    assert spillway_tf.get_lms_limit() == 64 << 20


@pytest.mark.parametrize("argument,message", [
    ("limit=1", "a limit of 1 bytes: it can be 16384 bytes, which are one page, to "),
    ("limit=1 << 60", f"a limit of {1 << 60} bytes: it can be .*, which this machine has"),
    ("limit=-1", r"spillway_tf\.install\(limit=-1\): bytes are a whole number"),
    ("host_limit='much'", r"spillway_tf\.install\(host_limit='much'\): bytes are a whole number")])
def test_an_installation_with_impossible_limits_is_refused_by_name(script, argument, message):
    done = script(f"import tensorflow, spillway_tf\nspillway_tf.install({argument})\n")
    assert done.returncode == 1
    assert re.search("ValueError: .*" + message, done.stderr), done.stderr[-2000:]


def test_errors_name_the_functions_of_this_module():
    spillway_tf.set_lms_limit(32 << 20)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="The limit is 33554432 bytes: set_lms_limit") as caught:
        random(4096, 4096)
    assert "capacity_bytes" not in str(caught.value)
    assert "capacity_bytes" not in spillway_tf.why_out_of_memory()


@pytest.mark.parametrize("use", (lambda x: x.numpy(), memoryview, spillway_tf.keep, lambda x: spillway_tf.hold(x).__enter__(),
                                 lambda x: x.__dlpack__()))
def test_a_tensor_that_does_not_fit_is_out_of_memory_for_code_outside_of_operations_too(lms, use):
    x = random(1024, 1024)
    spillway_tf.set_lms_limit(3 << 20)
    for kind in (tf.errors.ResourceExhaustedError, MemoryError):
        with pytest.raises(kind, match="OOM when bringing in a tensor: .*The limit is 3145728 bytes: set_lms_limit"):
            use(x)


def test_a_python_function_whose_argument_does_not_fit_is_out_of_memory(lms):
    x = random(1024, 1024)
    in_graph = tf.function(lambda t: tf.numpy_function(lambda array: array[0], [t], tf.float32))
    in_graph(x)
    spillway_tf.set_lms_limit(3 << 20)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when bringing in a tensor: .*set_lms_limit"):
        in_graph(x)


def test_what_is_reserved_grows_on_demand_and_can_be_given_back(script):
    out = script("""
import spillway_tf
spillway_tf.install(limit=256 << 20)
import tensorflow as tf
reserved = spillway_tf.get_bytes_reserved
x = tf.random.normal((1024, 1024))
print(4 << 20 <= reserved() <= 64 << 20)
print(spillway_tf.get_bytes_pinned() == spillway_tf.get_bytes_in_use() >= 4 << 20)  # support is off
spillway_tf.set_lms_enabled(True)
pile = [tf.random.normal((1024, 1024)) for _ in range(80)]
for y in pile:
    _ = y + 1.0
    assert spillway_tf.get_bytes_pinned() <= spillway_tf.get_bytes_in_use() <= reserved() <= 256 << 20
print(spillway_tf.get_lms_stats()["bytes_allocated"] >= 320 << 20)
del pile, y, _
print(spillway_tf.empty_cache() >= 128 << 20, reserved() <= 64 << 20)
""")
    assert out.stdout.split() == ["True"] * 5


def test_parked_the_memory_is_given_back_and_use_brings_back_what_it_uses(lms):
    x, y = random(1024, 1024), random(1024, 1024, seed=1)
    expected = x.numpy().tobytes(), y.numpy().tobytes()
    x, y = tf.identity(x) + 0.0, tf.identity(y) + 0.0
    assert spillway_tf.park() >= 8 << 20
    parked = spillway_tf.get_bytes_in_use()
    assert parked == spillway_tf.get_bytes_reserved() == spillway_tf.get_bytes_pinned()
    assert lms.is_away(x) and lms.is_away(y)
    _ = tf.reduce_sum(x)
    assert not lms.is_away(x) and lms.is_away(y)
    assert spillway_tf.wake() >= 4 << 20
    assert spillway_tf.get_bytes_in_use() - parked >= 8 << 20
    assert (x.numpy().tobytes(), y.numpy().tobytes()) == expected


def test_parked_in_a_file_nothing_stays_in_host_memory_either(script, tmp_path):
    done = script("import tensorflow as tf, spillway_tf\n"
                  f"spillway_tf.install(limit=64 << 20, file_tier={str(tmp_path)!r}, file_limit=256 << 20)\n"
                  "spillway_tf.set_lms_enabled(True)\n"
                  "xs = [tf.fill((1024, 1024), float(i)) for i in range(30)]\n"
                  "print(spillway_tf.get_host_bytes() >= 48 << 20)\n"
                  "print(spillway_tf.park('file') >= 48 << 20)\n"
                  "now = spillway_tf.get_lms_stats()\n"
                  "print(now['bytes_reserved'], now['host_bytes'], now['file_bytes'] >> 20)\n"
                  "print(all(float(tf.reduce_mean(x)) == i for i, x in enumerate(xs)))\n"
                  "xs.append(tf.fill((1024, 1024), 30.0))\n"
                  "spillway_tf.park()  # in host memory again, but for what the file has already\n"
                  "print(spillway_tf.get_host_bytes() == 4 << 20, spillway_tf.wake() >= 48 << 20)\n"
                  "print(all(float(x[-1, -1]) == i for i, x in enumerate(xs)))\n")
    assert done.stdout.split() == ["True", "True", "0", "0", "120", "True", "True", "True", "True"], done.stderr[-2000:]


def test_an_install_that_fails_changes_no_limit(tmp_path):
    before = spillway_tf.get_lms_host_limit()
    with pytest.raises(ValueError, match=r"spillway_tf\.install\(file_tier=.*\): expected a folder"):
        spillway_tf.install(host_limit="5MiB", file_tier=tmp_path / "missing")
    with pytest.raises(RuntimeError, match="installed already"):
        spillway_tf.install(host_limit="5MiB")
    assert spillway_tf.get_lms_host_limit() == before


def test_where_to_park_is_checked():
    with pytest.raises(ValueError, match="file_tier"):
        spillway_tf.park("file")
    with pytest.raises(ValueError, match="level"):
        spillway_tf.park("moon")


def test_switched_off_nothing_leaves_and_the_error_is_tensorflows():
    spillway_tf.set_lms_limit(32 << 20)
    spillway_tf.set_lms_enabled(False)
    assert not spillway_tf.get_lms_enabled()
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating tensor"):
        _ = [random(1024, 1024, seed=i) for i in range(12)]
    assert "out of device memory" in spillway_tf.why_out_of_memory()


def test_small_tensors_are_left_alone(lms):
    assert not lms.is_ours(random(100))
    assert lms.is_ours(random(2000))


def test_scalars_and_shapes_never_leave_however_small_a_tensor_may_be(script):
    done = script("import tensorflow as tf, spillway_tf\n"
                  "spillway_tf.install(limit=64 << 20, least_bytes=1)\n"
                  "spillway_tf.set_lms_enabled(True)\n"
                  "scalar, large = tf.random.normal(()) * 0 + 3, tf.random.normal((1000,))\n"
                  "shape = tf.cast(tf.stack([tf.size(large), 1]), tf.int64) * 1\n"
                  "spillway_tf.reclaim_inactive()\n"
                  "print(float(scalar), scalar.numpy(), tf.reshape(large, shape).shape, bool(scalar > 2))\n"
                  "print(spillway_tf.get_current_bytes_reclaimed() > 0)\n")
    assert done.stdout.splitlines() == ["3.0 3.0 (1000, 1) True", "True"], done.stderr[-2000:]


def test_what_python_made_is_left_alone(lms):
    assert not lms.is_ours(tf.constant([[1.0] * 1024] * 1024))


def test_there_is_nothing_to_defragment():
    spillway_tf.set_lms_defrag_enabled(False)
    assert not spillway_tf.get_lms_defrag_enabled()
    spillway_tf.set_lms_defrag_enabled(True)
    assert spillway_tf.get_lms_defrag_enabled()


def test_settings_of_the_installation_cannot_change_later():
    with pytest.raises(RuntimeError, match="before install"):
        spillway_tf.set_lms_host_limit(1 << 30)
    with pytest.raises(RuntimeError, match="installed already"):
        spillway_tf.install()


def test_a_tensorflow_that_it_was_not_built_for_is_refused_with_a_message():
    running = ".".join(tf.__version__.split(".")[:2])
    assert running in _load.built_for()
    with pytest.raises(ImportError, match=rf"not built for TensorFlow 2\.99, .* built for: .*{running}") as refusal:
        _load.load("2.99.1")
    assert str(refusal.value).count("\n  pip install ") == 2, refusal.value


def test_installing_too_late_is_refused(script):
    done = script("import tensorflow as tf, spillway_tf\n"
                  "tf.constant(1.0)\n"
                  "spillway_tf.set_lms_enabled(True)\n")
    assert done.returncode == 1
    assert "before the first operation" in done.stderr


USED_OUTSIDE = """
import ctypes, os, faulthandler, tensorflow as tf, spillway_tf
from spillway_tf import _C, _shims
spillway_tf.set_lms_enabled(True)
def make(value):
    x = tf.fill((512, 1024), value)
    return x, _shims.address_of(x)
def read(p, at=0):
    return ctypes.c_float.from_address(p + 4 * at).value
"""


def test_a_use_that_is_not_known_of_brings_a_tensor_back(script):
    done = script(USED_OUTSIDE + """
import threading
xs, ps = zip(*(make(float(i)) for i in range(9)))
spillway_tf.reclaim_inactive()
print({_C.view(p)["resident"] for p in ps})
ctypes.memset(ps[8] + 4 * 9999, 0, 4)
seen = []
threads = [threading.Thread(target=lambda p: seen.append(read(p, 524287)), args=[ps[i % 8]]) for i in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
spillway_tf.reclaim_inactive()
print(sorted(seen) == [float(i // 2) for i in range(16)], {_C.view(p)["may_leave"] for p in ps})
print([read(p) for p in ps] == list(range(9)), float(tf.reduce_sum(xs[8])) == 8 * (512 * 1024 - 1))
""", is_used_outside=True)
    assert done.stdout.split("\n") == ["{False}", "True {False}", "True True", ""], done.stderr[-2000:]
    assert done.stderr.count("was used outside of any operation") == 1


def test_a_tensor_on_a_parallel_device_is_printed(script):
    done = script("""
import tensorflow as tf, spillway_tf
from tensorflow.python.distribute.parallel_device import parallel_device
spillway_tf.install(limit=64 << 20, least_bytes=512)
spillway_tf.set_lms_enabled(True)
cpu, = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with parallel_device.ParallelDevice(["CPU:0", "CPU:1"]):
    x = tf.ones((1000,)) + 1.0
    text = str(x)
    spillway_tf.reclaim_inactive()
    print("2 2 2" in text and str(x) == text)
""", is_used_outside=True)
    assert done.stdout.split() == ["True"], done.stderr[-2000:]


#: Signals that end a program which accesses unmapped memory. SIGBUS occurs where the operating system moves pages.
FAULTS = signal.SIGSEGV, signal.SIGBUS


@pytest.mark.parametrize("handler", ["", "faulthandler.enable()", "faulthandler.enable(); faulthandler.enable()"])
def test_a_use_of_memory_that_was_freed_ends_loudly(script, handler):
    done = script(f"{USED_OUTSIDE}{handler}\n"
                  "x, p = make(3.0)\n"
                  "print(read(p), flush=True)\n"
                  "spillway_tf.reclaim_inactive()\n"
                  "del x\n"
                  "read(p)\n"
                  "print('not reached')\n", is_used_outside=True, PYTHONFAULTHANDLER="")
    assert done.stdout.split() == ["3.0"]
    assert -done.returncode in FAULTS
    assert done.stderr.count("spillway_tf: the memory of a tensor was used after it was freed") == 1
    assert len(re.findall("Fatal Python error: (Segmentation fault|Bus error)", done.stderr)) == bool(handler)


def test_a_use_that_is_not_known_of_ends_a_forked_child_loudly(script):
    done = script(USED_OUTSIDE + """
x, p = make(3.0)
spillway_tf.reclaim_inactive()
child = os.fork()
if child == 0:
    read(p)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), read(p))
""", is_used_outside=True, PYTHONFAULTHANDLER="")
    status, value = done.stdout.split()
    assert -int(status) in FAULTS and value == "3.0", done.stderr[-2000:]
    assert done.stderr.count("was used outside of any operation, and is not there") == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_signal_that_a_program_sends_itself_ends_it(script, fault):
    done = script("import os, signal, tensorflow, spillway_tf\n"
                  "spillway_tf.set_lms_enabled(True)\n"
                  f"os.kill(os.getpid(), {int(fault)})\n"
                  "print('not reached')\n", PYTHONFAULTHANDLER="")
    assert done.returncode == -fault
    assert "spillway_tf:" not in done.stderr and not done.stdout


def test_what_swapped_out_goes_to_a_file_where_memory_is_limited(script, tmp_path):
    done = script("import tensorflow as tf, spillway_tf, sys\n"
                  f"spillway_tf.install(limit=32 << 20, host_limit=8 << 20, file_tier={str(tmp_path)!r},\n"
                  "                    file_limit=128 << 20)\n"
                  "spillway_tf.set_lms_enabled(True)\n"
                  "xs = [tf.fill((1024, 1024), float(i)) for i in range(20)]\n"
                  "print(spillway_tf.get_lms_stats()['file_bytes'] > 0)\n"
                  "print(all(float(tf.reduce_mean(x)) == i for i, x in enumerate(xs)))\n")
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]


def test_a_host_limit_that_does_not_suffice_is_an_error_and_not_exceeded(script):
    done = script("import tensorflow as tf, spillway_tf\n"
                  "spillway_tf.set_lms_host_limit(8 << 20)\n"
                  "spillway_tf.set_lms_limit(32 << 20)\n"
                  "spillway_tf.set_lms_enabled(True)\n"
                  "xs = []\n"
                  "try:\n"
                  "    for i in range(20):\n"
                  "        xs.append(tf.fill((1024, 1024), float(i)))\n"
                  "except tf.errors.ResourceExhaustedError:\n"
                  "    print(len(xs), 'host' in spillway_tf.why_out_of_memory())\n"
                  "print(spillway_tf.get_lms_stats()['peak_host_bytes'] <= 8 << 20)\n"
                  "xs.pop()  # with both full nothing could change places\n"
                  "print(all(float(tf.reduce_mean(x)) == i for i, x in enumerate(xs)))\n")
    assert done.stdout.split()[1:] == ["True", "True", "True"], done.stdout + done.stderr[-2000:]
    assert 8 <= int(done.stdout.split()[0]) <= 10
