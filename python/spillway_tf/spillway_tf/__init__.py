# SPDX-License-Identifier: Apache-2.0
"""Large-model support for TensorFlow: tensors that no operation uses may leave the device.

    import spillway_tf
    spillway_tf.set_lms_enabled(True)

before the first operation, and a model whose tensors need more memory than there is trains, with bitwise the same
results. The names are those of IBM's TensorFlow Large Model Support.
"""
import re
import threading

import tensorflow as tf
from tensorflow.python.eager import context as _context

from . import _shims
from ._bytes import file_bytes as _file_bytes
from ._bytes import number_of_bytes as _bytes
from ._bytes import numbers_of_bytes as _numbers_of_bytes
from ._device import make_calls as _make_calls
from ._keras import LMSStatsLogger
from ._load import C as _C
from ._load import built_for as _built_for
from ._load import load as _load_part
from ._stats import *  # noqa: F401,F403
from ._stats import NAMES as _STATS
from ._stats import get_lms_stats, memory_summary, reset_peak_stats

__all__ = [
    "install", "set_lms_enabled", "get_lms_enabled", "set_lms_limit", "get_lms_limit", "set_lms_host_limit",
    "get_lms_host_limit", "set_lms_defrag_enabled", "get_lms_defrag_enabled", "reclaim_inactive", "empty_cache", "park", "wake",
    "share", "share_members", "begin_step", "set_codec", "keep",
    "hold", "why_out_of_memory", "get_lms_stats", "reset_peak_stats", "memory_summary", "LMSStatsLogger",
] + _STATS

_lock = threading.RLock()
_limit_before_install = 0
_host_limit = 0
_defragments = True


def install(limit=None, host_limit=None, file_tier=None, *, device=None, file_limit=None, least_bytes=0):
    """Puts the library's device in the place of one of TensorFlow's. To be called before the first operation.

    limit       bytes that tensors may take up; by default nine tenths of the machine's memory, or seven eighths of what
                TensorFlow may use on the GPU
    host_limit  bytes that swapped-out tensors may take up in host memory; by default half of the machine's
    file_tier   a folder for what host memory cannot hold; file_limit says how many bytes
    device      "CPU:0" or "GPU:0"; by default the GPU if TensorFlow has one
    least_bytes tensors smaller than this, or than 512 bytes, are left to TensorFlow: they do not count and never leave

    Bytes are numbers, or text such as "2GB" or "512MiB".

    Settings that TensorFlow takes before its devices are made, such as visible devices and threads, have to be made
    before this is called for a GPU.
    """
    global _host_limit
    limit, host_limit, file_limit, least_bytes = _numbers_of_bytes(
        "install", limit=limit, host_limit=host_limit, file_limit=file_limit, least_bytes=least_bytes)
    with _lock:
        if not _C.is_installed() and _context.context_safe() is not None and _context.context()._initialized:
            raise RuntimeError(
                "TensorFlow has made its devices already: call spillway_tf.install() or set_lms_enabled(True) before "
                "the first operation")
        if not _C.is_installed():
            _C.choose(_kind_of(device))
        _host_limit = host_limit or _host_limit
        _C.install(limit or _limit_before_install, _host_limit, str(file_tier or ""),
                   _file_bytes(file_tier, file_limit), least_bytes)
        if _C.kind == "gpu":
            tf.config.list_logical_devices()  # makes them, or says why it cannot
        _C.enable(False)
        _shims.install()


def _kind_of(device):
    """"cpu" or "gpu", for a name of a device."""
    if device is None:
        has_part = bool(set(_built_for("gpu")) & {".".join(tf.__version__.split(".")[:2])})
        return "gpu" if has_part and tf.config.list_physical_devices("GPU") else "cpu"
    match = re.fullmatch(r"(?:/DEVICE:)?(CPU|GPU)(?::0)?", str(device).upper())
    if not match:
        raise ValueError(f"spillway_tf.install(device={device!r}): the devices are CPU:0 and GPU:0")
    if match[1] == "GPU":
        if not tf.test.is_built_with_cuda():
            raise RuntimeError(f"spillway_tf.install(device={device!r}): this TensorFlow was built without CUDA; "
                               "device=\"CPU:0\" works with it")
        _load_part(kind="gpu")
        if not tf.config.list_physical_devices("GPU"):
            raise RuntimeError(f"spillway_tf.install(device={device!r}): TensorFlow finds no GPU here; device=\"CPU:0\" "
                               "works without one")
    return match[1].lower()


def set_lms_enabled(enabled):
    """Switches support for large models on or off. While it is off nothing new leaves; what is away still comes back
    when it is used."""
    with _lock:
        if enabled and not _C.is_installed():
            install()
        if _C.is_installed():
            _C.enable(bool(enabled))


def get_lms_enabled():
    return _C.is_installed() and _C.is_enabled()


def set_lms_limit(limit):
    """Sets how many bytes tensors may take up. It can be raised again up to what `install` was given."""
    global _limit_before_install
    limit = _bytes(limit, "set_lms_limit", "limit")
    with _lock:
        if _C.is_installed():
            if _C.is_shared():
                raise RuntimeError("spillway_tf.set_lms_limit(): the device is shared, and the limit is this process' share")
            _C.set_limit(limit)
        else:
            _limit_before_install = limit


def get_lms_limit():
    return _C.limit() if _C.is_installed() else _limit_before_install


def set_lms_host_limit(limit):
    """Sets how many bytes of host memory swapped-out tensors may take up; before `install` only."""
    global _host_limit
    with _lock:
        if _C.is_installed():
            raise RuntimeError("the host limit is set before install() or set_lms_enabled(True)")
        _host_limit = _bytes(limit, "set_lms_host_limit", "limit")


def get_lms_host_limit():
    return _host_limit


def set_lms_defrag_enabled(enabled):
    """For programs that call it. Memory is made of pages that are mapped where they are needed: any free pages make
    one range, and there is nothing to defragment."""
    global _defragments
    _defragments = bool(enabled)


def get_lms_defrag_enabled():
    return _defragments


def reclaim_inactive():
    """Makes every tensor that is not in use leave now. Returns the bytes that left: none while support is off."""
    return _C.reclaim() if get_lms_enabled() else 0


empty_cache, park, wake, share, share_members = _make_calls(_C, "set_lms_enabled")


def why_out_of_memory():
    """What stood in the way when memory was last asked for in vain, as TensorFlow's error says, too."""
    return _C.last_failure()


def begin_step():
    """Marks the start of a step by hand. Optimizers that count their steps mark it by themselves."""
    if _C.is_installed():
        _C.begin_step()


def set_codec(codec, for_=None):
    """Sets how tensors are written while they are away, so that they take fewer bytes of host memory. CPU tensors only.

    codec  "lossless": what is 0 takes no room, for results of ReLU; given up for tensors of a size that it does not make smaller.
           "bfloat16": float32 is rounded to bfloat16, which loses bits. None: bytes are copied, as at first
    for_   a tensor or a variable, or a list of them, from their next leaving on, for as long as each keeps its memory, which a
           variable may change when it is assigned; by default all that are made from now on. "bfloat16" has to be asked for
           by tensor

    A codec is one of the whole memory that a tensor lies in. Memory that is shared with a tensor of another type, by
    `tf.bitcast`, must not have "bfloat16": that cannot be told here. Tensors that never leave are ignored."""
    codec = None if codec is None else str(codec)
    things = None if for_ is None else for_ if isinstance(for_, (list, tuple)) else [for_]
    with _lock:
        if codec is not None and things is None and not _C.is_installed():
            install()
        if things is None:
            if _C.is_installed():
                _C.set_codec(codec, None)
            return
        values = [value for thing in things for value in _shims.values_of(thing)]
        if codec == "bfloat16":
            for value in values:
                if value.dtype != tf.float32:
                    raise ValueError("spillway_tf.set_codec(\"bfloat16\"): only memory of float32 can travel as bfloat16, not "
                                     f"that of a tensor of {value.dtype.name}")
        _C.set_codec(codec, [address for address in map(_shims.address_of, values) if address])


def _values_in(objects, name):
    values = []
    for leaf in tf.nest.flatten(objects):
        found = [value for part in getattr(leaf, "variables", [leaf]) for value in _shims.values_of(part)]
        if not found and leaf is not None and not tf.is_tensor(leaf) and not hasattr(leaf, "variables"):
            raise TypeError(f"spillway_tf.{name}(): tensors, variables, models, or lists, tuples and dictionaries of them, not a "
                            f"{type(leaf).__name__}")
        values += found
    return values


def keep(tensor):
    """Brings a tensor in and never lets its memory go again, for code that remembers its address. It may be a collection of
    tensors, or a model, too, as for `hold`."""
    for value in _values_in(tensor, "keep"):
        if address := _shims.address_of(value):
            _C.keep(address)
    return tensor


def hold(*tensors):
    """A context for code that works on addresses: the tensors stay where they are until it ends. Lists, tuples and dictionaries
    of tensors are taken, too, and models, layers and modules, which stand for their variables."""
    return _C.Held([address for address in map(_shims.address_of, _values_in(tensors, "hold")) if address])
