# SPDX-License-Identifier: Apache-2.0
"""Large-model support for PyTorch: tensors that no operation uses may be swapped out to the host.

    import spillway_torch
    spillway_torch.set_enabled_lms(True)

With these lines a model trains although its tensors need more memory than there is. Results are bitwise the same. The
names of the functions are those of IBM's Large Model Support.
"""
import gc
import numbers
import sys
import threading
import warnings

import torch

from . import _chosen as _C, _shims
from ._bytes import file_tier as _file_tier
from ._bytes import number_of_bytes as _bytes
from ._bytes import numbers_of_bytes as _numbers_of_bytes
from ._device import make_calls as _make_calls
from ._hold import Hold as _Hold
from ._paging import chunk, page, unpage
from ._stats import memory_stats, memory_summary, reset_peak_memory_stats
from ._steps import begin_step, watch_optimizers

__all__ = [
    "install", "set_enabled_lms", "get_enabled_lms", "set_limit_lms", "get_limit_lms", "set_size_lms", "get_size_lms",
    "set_recompute", "get_recompute", "set_codec", "reclaim_inactive", "park", "wake", "share", "share_members", "memory_stats", "memory_summary", "reset_peak_memory_stats", "empty_cache",
    "begin_step", "keep", "hold", "page", "chunk", "unpage", "plan",
]

#: Default for the least size of tensors that may be swapped out. There are many smaller tensors, and swapping them gains
#: nothing. Among them are the states of random number generators, whose bytes PyTorch reads outside of operations.
LEAST_BYTES = 8192

_lock = threading.RLock()
_limit_before_install = None
_size_before_install = LEAST_BYTES


def install(device=None, limit=None, host_limit=None, file_tier=None, *, file_limit=None,
            least_bytes=None, link_bytes_per_second=None):
    """Replaces PyTorch's allocator by the library's, for one device of the process. Call it once, before the first
    large tensor is made; for CUDA, before PyTorch uses CUDA at all. Support is off afterwards: see `set_enabled_lms`.

    device      "cpu", "cuda" (the current device) or "cuda:N"; default: CUDA if it can be used, else the CPU
    limit       most bytes that tensors may take up on the device, which are reserved when they are needed; default:
                what `set_limit_lms` was given, else nine tenths of what is free
    host_limit  most bytes of host memory for tensors that are swapped out; default: half of the machine's memory
    file_tier   folder for tensors that do not fit into host memory; default: none
    file_limit  most bytes in that folder; default: half of what is free there
    least_bytes tensors smaller than this come from PyTorch's own allocator. On CUDA they come from the library's, but
                are swapped out only after `set_recompute(True)`. Default: what `set_size_lms` was given, else 8192
    link_bytes_per_second  rate of the link between host and device in each direction, in bytes per second. On CUDA
                the library plans with it; default: 25e9. The CPU has no link: there copies are slowed down to this
                rate; default: they are not

    Bytes are whole numbers, or text such as "2GB" or "512MiB".

    Raises ValueError for an argument that is not as above, and RuntimeError if the module is installed already, if
    the device cannot be used, or if it is called too late for CUDA. Warns of large tensors that exist already, since
    these cannot be swapped out.
    """
    least_bytes = _size_before_install if least_bytes is None else least_bytes
    limit, host_limit, file_limit, least_bytes, link = _numbers_of_bytes(
        "install", limit=limit, host_limit=host_limit, file_limit=file_limit, least_bytes=least_bytes,
        link_bytes_per_second=link_bytes_per_second)
    file_tier, file_limit = _file_tier(file_tier, file_limit)
    if device is None:
        device = "cuda" if torch.cuda.is_available() and _C.has_cuda() else "cpu"
    device = torch.device(device)
    with _lock:
        if device.type == "cuda":
            _check_cuda(device)
        module = _C.module_for(device.type)
        if _C.is_installed():
            raise RuntimeError("spillway_torch is installed already")
        _C.choose(module)
        _C.install(-1 if device.index is None else device.index, limit or _limit_before_install or 0, host_limit, file_tier,
                   file_limit, least_bytes, link)
        _C.enable(False)
        _shims.install()
        watch_optimizers()
        _warn_of_earlier_tensors(device.type, least_bytes)


def _check_cuda(device):
    if torch.version.cuda is None:
        raise RuntimeError(f"spillway_torch.install(device={str(device)!r}): this PyTorch was built without CUDA")
    if not torch.cuda.is_available():
        raise RuntimeError(f"spillway_torch.install(device={str(device)!r}): torch.cuda.is_available() is False here; "
                           "device=\"cpu\" works without a GPU")


def _warn_of_earlier_tensors(device_type, least_bytes):
    """Warns if there are tensors that PyTorch's own allocator made: they can never be swapped out. This is a common
    mistake.
    """
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():  # a class may refuse questions, as parameters of lazy modules do
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.device.type == device_type and thing.layout is torch.strided:
                try:
                    storage = thing.untyped_storage()
                except (RuntimeError, NotImplementedError):  # it has no storage
                    continue
                storages[storage._cdata] = storage.nbytes()
    stay = [n for n in storages.values() if n >= max(least_bytes, LEAST_BYTES)]
    if stay:
        warnings.warn(
            f"spillway_torch: {len(stay)} tensors ({sum(stay)} bytes) were made before install() and never leave: call "
            "it before the model is made, or replace them by clones.", stacklevel=4)


def set_enabled_lms(enabled):
    """Switches support for large models on or off, for this thread and all threads that are started from now on.
    Installs the module with default arguments if that has not happened yet, and then raises what `install` raises.

    While support is off, nothing is swapped out any more. What is swapped out already still comes back when it is
    used.

    enabled  whether support is on
    """
    with _lock:
        if enabled and not _C.is_installed():
            install()
        if not _C.is_installed():
            return
        _C.enable(bool(enabled))
        _shims.set_hook(bool(enabled) or _has_tensors_away())


def _has_tensors_away():
    return any(not holder["leased"] for holder in _C.holders())


def get_enabled_lms():
    """Returns whether support for large models is on."""
    return _C.is_installed() and _C.is_enabled()


def set_limit_lms(limit):
    """Sets the most bytes that tensors may take up on the device. Before `install`, sets what that uses by default.

    limit  a number of bytes, or text such as "2GB" or "512MiB". After `install` no more than what that was given, and
           0 sets that again

    Raises ValueError for another argument; RuntimeError if the limit is higher than that of `install` or the device
    is shared (`share`); torch.OutOfMemoryError if tensors that are in use now do not fit under it.
    """
    global _limit_before_install
    limit = _bytes(limit, "set_limit_lms", "limit")
    with _lock:
        if _C.is_installed():
            _C.set_limit(limit)
        else:
            _limit_before_install = limit


def get_limit_lms():
    """Returns the most bytes that tensors may take up on the device; before `install` 0 if no limit was set."""
    return _C.limit() if _C.is_installed() else _limit_before_install or 0


def set_size_lms(least_bytes):
    """Sets the least size of a tensor that may be swapped out. Tensors that exist stay as they are.

    least_bytes  a number of bytes, or text such as "16KiB"

    Raises ValueError for another argument.
    """
    global _size_before_install
    with _lock:
        if _C.is_installed():
            _C.set_least_bytes(_bytes(least_bytes, "set_size_lms", "least_bytes"))
        else:
            _size_before_install = _bytes(least_bytes, "set_size_lms", "least_bytes")


def get_size_lms():
    """Returns the least size of a tensor that may be swapped out, in bytes."""
    return _C.least_bytes() if _C.is_installed() else _size_before_install


def set_recompute(enabled):
    """Sets whether a tensor may leave the device without a copy, if running the operations that made it again takes
    less time than a copy. Results stay bitwise the same: an operation is run again only if it computes the same from
    the same operands and the same random numbers. On CUDA, tensors smaller than `least_bytes` may then leave, too,
    and an operation is run again only if one of its kind, on operands of the same shapes, has been measured before.

    enabled  whether tensors may be recomputed. If true, installs the module with default arguments if that has not
             happened yet
    """
    with _lock:
        if enabled and not _C.is_installed():
            install()
        if _C.is_installed():
            _C.set_recompute(bool(enabled))


def get_recompute():
    """Returns whether tensors may be recomputed instead of copied."""
    return _C.recomputes()


def set_codec(codec, for_=None):
    """Sets how tensors are written when they are swapped out, so that they take fewer bytes of host memory.

    codec  "lossless": zeros take almost no room, as in results of ReLU. Given up for tensors of a size that it does
           not make smaller. "bfloat16": float32 is rounded to bfloat16, which loses bits. None: bytes are copied, as
           at first
    for_   a tensor or several, from their next swap-out on, for as long as each keeps its memory; default: all
           tensors that are made from now on. "bfloat16" can be set only for given tensors

    A codec holds for the whole memory of a tensor, with all its views. Memory that is viewed as another type than
    float32, now or later, must not have "bfloat16". This is checked for the type with which the memory was first
    used, and cannot be checked for others. Tensors that are never swapped out are ignored. CUDA tensors can have
    codecs if the module was built with nvcc: kernels on the stream of the copy encode them into pinned memory. What
    goes to a file is not encoded.

    Raises ValueError for an unknown codec, or if a tensor that is to have "bfloat16" is not of float32,
    NotImplementedError if the module has no codecs for the device, and RuntimeError for given tensors before `install`.
    """
    codec = None if codec is None else str(codec)
    tensors = None if for_ is None else [for_] if isinstance(for_, torch.Tensor) else list(for_)
    with _lock:
        if codec is not None and tensors is None and not _C.is_installed():
            install()
        if _C.is_installed() or tensors is not None:
            _C.set_codec(codec, tensors)


def reclaim_inactive():
    """Swaps out every tensor that is not in use now. Returns the bytes that left the device; 0 while support is off.
    Warns once if no tensor can be swapped out, and says why.
    """
    if not get_enabled_lms():
        return 0
    freed = _C.reclaim()
    warning = _C.take_warning() if freed == 0 else ""
    if warning:
        warnings.warn(warning, stacklevel=2)
    return freed


empty_cache, park, wake, share, share_members = _make_calls(_C, "set_enabled_lms")


def _tensors_in(objects, name):
    leaves = [leaf for leaf in _shims.leaves_of(objects) if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage, torch.nn.Module)):
            raise TypeError(f"spillway_torch.{name}(): tensors, modules, or lists, tuples and dictionaries of them, not a "
                            f"{type(leaf).__name__}")
    return leaves


def keep(tensor):
    """Swaps a tensor in and never swaps it out again. Use it before other code remembers the tensor's address.

    tensor  a tensor, a storage, a module (its parameters and buffers), or a list, tuple or dictionary of these

    Returns `tensor`. Raises TypeError for other objects.
    """
    _shims.keep_tensors(_tensors_in(tensor, "keep"))
    return tensor


def hold(*tensors):
    """Returns a context for code that works on addresses: until the context ends, the given tensors stay on the
    device, and so does everything that its thread uses or makes in it. The address that `data_ptr()` returns in the
    context is valid until then.

    tensors  tensors, storages, modules (their parameters and buffers), or lists, tuples and dictionaries of these

    The context may be entered several times, also by several threads at the same time. If another thread ends it, it
    really ends before the next operation of the thread that entered it, or with that thread. Raises TypeError for other
    objects.
    """
    held = _tensors_in(tensors, "hold")
    return _Hold(lambda: _C.Held(held, may_write=True))


def plan(limits=None, links=(12.0, 25.0), *, overlap=True, tflops=None, memory_gbps=None, least_bytes=LEAST_BYTES,
         picture=None, out=sys.stdout):
    """Returns a context around one step of a program, best not the first. It records the step without a limit, so
    nothing needs to be installed, and then prints what the step would cost under limits. For whole programs see
    `python -m spillway_torch.plan`.

    limits       limits to try, in bytes or as text such as "8GiB"; default: parts of the peak, and the smallest limit
                 with which the step runs
    links        rates of the host link to try, in GB/s in each direction
    overlap      False: copies take time of the processor that computes, as on the CPU device
    tflops       estimate times for a device of this many TFLOP/s; default: measure them here
    memory_gbps  memory bandwidth of that device, in GB/s; only with `tflops`. Default: 1500
    least_bytes  as in `install`
    picture      name of an SVG file to draw into; default: none
    out          file to print the table to; None: do not print it

    Raises ValueError for an argument that is not as above. Entering the context raises RuntimeError if support is on
    or if it was entered before, and leaving it raises RuntimeError if no operation was recorded.
    """
    from . import _plan, _record
    if isinstance(limits, (str, numbers.Number)):
        raise ValueError(f"spillway_torch.plan(limits={limits!r}): expected several, such as [{limits!r}]")
    if limits is not None:
        limits = [_bytes(limit, "plan", "limits") for limit in limits]
    least_bytes = _bytes(least_bytes, "plan", "least_bytes")
    for name, value in (("tflops", tflops), ("memory_gbps", memory_gbps)):
        if value is not None and not (isinstance(value, numbers.Real) and 0 < value < float("inf")):
            raise ValueError(f"spillway_torch.plan({name}={value!r}): expected a number above 0")
    if memory_gbps is not None and tflops is None:
        raise ValueError(f"spillway_torch.plan(memory_gbps={memory_gbps!r}): give tflops, too, of the same device")
    estimate = _record.Estimate(tflops, memory_gbps or 1500.0) if tflops else None
    return _plan.Plan(limits, links, overlap, estimate, least_bytes, out, picture)
