# SPDX-License-Identifier: Apache-2.0
"""Large-model support for TensorFlow: tensors that no operation uses may be swapped out to the host.

    import spillway_tf
    spillway_tf.set_lms_enabled(True)

With these lines, before the first operation, a model trains although its tensors need more memory than there is.
Results are bitwise the same. The names of the functions are those of IBM's TensorFlow Large Model Support.
"""
import re
import threading

import tensorflow as tf
from tensorflow.python.eager import context as _context

from . import _shims
from ._bytes import file_tier as _file_tier
from ._bytes import number_of_bytes as _bytes
from ._bytes import numbers_of_bytes as _numbers_of_bytes
from ._device import make_calls as _make_calls
from ._hold import Hold as _Hold
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
    """Replaces one of TensorFlow's devices by the library's. Call it once, before the first operation. Support is off
    afterwards: see `set_lms_enabled`.

    limit       most bytes that tensors may take up on the device; default: what `set_lms_limit` was given, else nine
                tenths of the machine's memory, or on a GPU seven eighths of what TensorFlow may use there
    host_limit  most bytes of host memory for tensors that are swapped out; default: what `set_lms_host_limit` was
                given, else half of the machine's memory
    file_tier   folder for tensors that do not fit into host memory; default: none
    file_limit  most bytes in that folder; default: half of what is free there
    device      "CPU:0" or "GPU:0"; default: the GPU if TensorFlow has one and the module was built for it
    least_bytes tensors smaller than this, or than 512 bytes, stay with TensorFlow's allocator: they are not counted
                and never swapped out

    Bytes are whole numbers, or text such as "2GB" or "512MiB".

    Settings that TensorFlow reads when it makes its devices, such as those of visible devices and of threads, have to
    be made before this is called for a GPU.

    Raises ValueError for an argument that is not as above, and RuntimeError if the module is installed already, if
    TensorFlow has made its devices, or if the device cannot be used.
    """
    global _host_limit
    limit, host_limit, file_limit, least_bytes = _numbers_of_bytes(
        "install", limit=limit, host_limit=host_limit, file_limit=file_limit, least_bytes=least_bytes)
    file_tier, file_limit = _file_tier(file_tier, file_limit)
    with _lock:
        if not _C.is_installed() and _context.context_safe() is not None and _context.context()._initialized:
            raise RuntimeError(
                "TensorFlow has made its devices already: call spillway_tf.install() or set_lms_enabled(True) before "
                "the first operation")
        if not _C.is_installed():
            _C.choose(_kind_of(device))
        host_limit = host_limit or _host_limit
        _C.install(limit or _limit_before_install, host_limit, file_tier, file_limit, least_bytes)
        _host_limit = host_limit
        _shims.install()
        if _C.kind == "gpu":
            tf.config.list_logical_devices()  # makes the devices, or raises an error that says why not


def _kind_of(device):
    """Returns "cpu" or "gpu" for the name of a device, or for None. GPUs that TensorFlow must not use do not count."""
    if device is None:
        has_part = bool(set(_built_for("gpu")) & {".".join(tf.__version__.split(".")[:2])})
        return "gpu" if has_part and _has_gpu() else "cpu"
    match = re.fullmatch(r"(?:/DEVICE:)?(CPU|GPU)(?::0)?", str(device).upper())
    if not match:
        raise ValueError(f"spillway_tf.install(device={device!r}): the devices are CPU:0 and GPU:0")
    if match[1] == "GPU":
        if not tf.test.is_built_with_cuda():
            raise RuntimeError(f"spillway_tf.install(device={device!r}): this TensorFlow was built without CUDA; "
                               "device=\"CPU:0\" works with it")
        _load_part(kind="gpu")
        if not _has_gpu():
            raise RuntimeError(f"spillway_tf.install(device={device!r}): TensorFlow finds no GPU here; device=\"CPU:0\" "
                               "works without one")
    return match[1].lower()


def _has_gpu():
    """Returns whether TensorFlow may use a GPU. Raises RuntimeError if it may use several. This has to be known before
    TensorFlow's parts are replaced: afterwards it would fail to make its devices, and could not be put right again.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) > 1:
        raise RuntimeError(f"spillway_tf.install: TensorFlow sees {len(gpus)} GPUs, and one can be served: before this call "
                           "tf.config.set_visible_devices(gpus[:1], \"GPU\"), with gpus = "
                           "tf.config.list_physical_devices(\"GPU\"), or install(device=\"CPU:0\")")
    for gpu in gpus:
        if len(tf.config.get_logical_device_configuration(gpu) or ()) > 1:
            raise RuntimeError(f"spillway_tf.install: {gpu.name} is divided into several logical devices, and one can be "
                               "served: call tf.config.set_logical_device_configuration with one, or not at all")
    return bool(gpus)


def set_lms_enabled(enabled):
    """Switches support for large models on or off. Installs the module with default arguments if that has not
    happened yet, and then raises what `install` raises.

    While support is off, nothing is swapped out any more. What is swapped out already still comes back when it is
    used.

    enabled  whether support is on
    """
    with _lock:
        if enabled and not _C.is_installed():
            install()
        if _C.is_installed():
            _C.enable(bool(enabled))


def get_lms_enabled():
    """Returns whether support for large models is on."""
    return _C.is_installed() and _C.is_enabled()


def set_lms_limit(limit):
    """Sets the most bytes that tensors may take up on the device. Before `install`, sets what that uses by default.

    limit  a number of bytes, or text such as "2GB" or "512MiB". After `install` no more than what that was given, and
           at least one page of the device's memory; 0 sets what `install` was given again

    Raises ValueError for another argument, and RuntimeError if the device is shared (`share`) or if the tensors that
    are in use now do not fit under the limit.
    """
    global _limit_before_install
    limit = _bytes(limit, "set_lms_limit", "limit")
    with _lock:
        if _C.is_installed():
            _C.set_limit(limit)
        else:
            _limit_before_install = limit


def get_lms_limit():
    """Returns the most bytes that tensors may take up on the device; before `install` 0 if no limit was set."""
    return _C.limit() if _C.is_installed() else _limit_before_install


def set_lms_host_limit(limit):
    """Sets the most bytes of host memory for tensors that are swapped out.

    limit  a number of bytes, or text such as "2GB" or "512MiB"

    Raises ValueError for another argument, and RuntimeError after `install`.
    """
    global _host_limit
    with _lock:
        if _C.is_installed():
            raise RuntimeError("set_lms_host_limit() has to be called before install() or set_lms_enabled(True)")
        _host_limit = _bytes(limit, "set_lms_host_limit", "limit")


def get_lms_host_limit():
    """Returns what `set_lms_host_limit` or `install` was given, in bytes; 0 if nothing was."""
    return _host_limit


def set_lms_defrag_enabled(enabled):
    """Has no effect except on `get_lms_defrag_enabled`; it is there for programs that call it. Memory consists of
    pages that are mapped where they are needed, so any free pages make one range, and there is nothing to defragment.
    """
    global _defragments
    _defragments = bool(enabled)


def get_lms_defrag_enabled():
    """Returns what `set_lms_defrag_enabled` was given; at first True."""
    return _defragments


def reclaim_inactive():
    """Swaps out every tensor that is not in use now. Returns the bytes that left the device; 0 while support is off."""
    return _C.reclaim() if get_lms_enabled() else 0


empty_cache, park, wake, share, share_members = _make_calls(_C, "set_lms_enabled")


def why_out_of_memory():
    """Returns why the last request for memory failed, as text; empty if none has. TensorFlow's error says the same."""
    return _C.last_failure()


def begin_step():
    """Marks the start of a step. Only needed if no optimizer counts its steps. Does nothing before `install`."""
    if _C.is_installed():
        _C.begin_step()


def set_codec(codec, for_=None):
    """Sets how tensors are written when they are swapped out, so that they take fewer bytes of host memory. Only for
    tensors on the CPU.

    codec  "lossless": zeros take almost no room, as in results of ReLU. Given up for tensors of a size that it does
           not make smaller. "bfloat16": float32 is rounded to bfloat16, which loses bits. None: bytes are copied, as
           at first
    for_   a tensor or a variable, or a list, tuple or dictionary of them, from their next swap-out on, for as long as
           each keeps its memory; an assignment may give a variable other memory. Default: all tensors that are made
           from now on. "bfloat16" can be set only for given tensors

    A codec holds for the whole memory that a tensor lies in. Memory that is shared with a tensor of another type, by
    `tf.bitcast`, must not have "bfloat16"; this cannot be checked. Tensors that are never swapped out are ignored.

    Raises ValueError for another codec, or if a tensor that is to have "bfloat16" is not of float32, TypeError for
    what is no tensor, and NotImplementedError on a GPU.
    """
    codec = None if codec is None else str(codec)
    with _lock:
        if codec is not None and for_ is None and not _C.is_installed():
            install()
        if for_ is None:
            if _C.is_installed():
                _C.set_codec(codec, None)
            return
        values = _values_in(for_, "set_codec")
        if codec == "bfloat16":
            for value in values:
                if value.dtype != tf.float32:
                    raise ValueError("spillway_tf.set_codec(\"bfloat16\"): only memory of float32 can travel as bfloat16, not "
                                     f"that of a tensor of {value.dtype.name}")
        _C.set_codec(codec, [address for address in map(_shims.address_of, values) if address])


def _values_in(objects, name):
    values = []
    for leaf in tf.nest.flatten(objects):
        for part in getattr(leaf, "variables", [leaf]):
            found = _shims.values_of(part)
            if not found and part is not None:
                raise TypeError(f"spillway_tf.{name}(): tensors, variables, models, or lists, tuples and dictionaries of them, "
                                f"outside of any tf.function, not a {type(part).__name__}")
            values += found
    return values


def keep(tensor):
    """Swaps a tensor in and never swaps its memory out again. Use it before other code remembers the tensor's
    address.

    tensor  a tensor (also a ragged or sparse one), a variable, a model, layer or module (its variables), or a list, tuple
            or dictionary of these

    Returns `tensor`. Raises TypeError for other objects, and for the tensors of a graph, which have no memory yet.
    """
    for value in _values_in(tensor, "keep"):
        if address := _shims.address_of(value):
            _C.keep(address)
    return tensor


def hold(*tensors):
    """Returns a context for code that works on addresses: until the context ends, the given tensors stay on the
    device. It may read and write there.

    tensors  tensors (also ragged and sparse ones), variables, models, layers and modules (their variables), or lists,
             tuples and dictionaries of these

    The context may be entered several times, also by several threads at the same time. It keeps the tensors alive, and holds
    the memory that a variable has when it is entered: an assignment may give the variable other memory. Raises TypeError for
    other objects, and for the tensors of a graph, which have no memory yet.
    """
    leaves = tf.nest.flatten(tensors)
    _values_in(leaves, "hold")  # raises the error now

    def make():
        # not before, since a variable may have other memory by now, and its old memory may belong to another tensor
        values = _values_in(leaves, "hold")
        return _C.Held([address for address in map(_shims.address_of, values) if address], may_write=True)
    return _Hold(make)
