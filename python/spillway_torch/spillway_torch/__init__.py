# SPDX-License-Identifier: Apache-2.0
"""Large-model support for PyTorch: tensors that no operation uses may leave the device.

    import spillway_torch
    spillway_torch.set_enabled_lms(True)

and a model whose tensors need more memory than there is trains, with bitwise the same results. The names are
those of IBM's Large Model Support.
"""
import gc
import sys
import threading
import warnings

import torch

from . import _chosen as _C, _shims
from ._bytes import file_bytes as _file_bytes
from ._bytes import number_of_bytes as _bytes
from ._bytes import numbers_of_bytes as _numbers_of_bytes
from ._device import make_calls as _make_calls
from ._paging import chunk, page, unpage
from ._stats import memory_stats, memory_summary, reset_peak_memory_stats
from ._steps import begin_step, watch_optimizers

__all__ = [
    "install", "set_enabled_lms", "get_enabled_lms", "set_limit_lms", "get_limit_lms", "set_size_lms", "get_size_lms",
    "set_recompute", "get_recompute", "set_codec", "reclaim_inactive", "park", "wake", "share", "share_members", "memory_stats", "memory_summary", "reset_peak_memory_stats", "empty_cache",
    "begin_step", "keep", "hold", "page", "chunk", "unpage", "plan",
]

#: Tensors smaller than this come from PyTorch's own allocator: they are many, and moving them gains nothing.
#: The states of random number generators are among them, whose bytes PyTorch reads outside of operations.
LEAST_BYTES = 8192

_lock = threading.RLock()
_limit_before_install = None
_size_before_install = LEAST_BYTES


def install(device=None, limit=None, host_limit=None, file_tier=None, *, file_limit=None,
            least_bytes=None, link_bytes_per_second=None):
    """Puts the library's allocator in the place of PyTorch's, for one device of a process. To be called before the
    first large tensor, on CUDA before the first tensor there is.

    device      "cpu", "cuda" (the current one) or "cuda:N"; by default CUDA where it can be used
    limit       bytes that tensors may take up; by default nine tenths of what is free. They are taken from the
                device when they are needed
    host_limit  bytes that swapped-out tensors may take up in host memory; by default half of the machine's
    file_tier   a folder for what host memory cannot hold; file_limit says how many bytes
    least_bytes tensors smaller than this are left to PyTorch; on CUDA they never leave before `set_recompute`. By default what `set_size_lms`
                was given, or 8192
    link_bytes_per_second  of the link between host and device, each way. On CUDA it is what plans count with, by default 25e9;
                on the CPU, which has no link, copies are made so slow

    Bytes are numbers, or text such as "2GB" or "512MiB".
    """
    least_bytes = _size_before_install if least_bytes is None else least_bytes
    limit, host_limit, file_limit, least_bytes, link = _numbers_of_bytes(
        "install", limit=limit, host_limit=host_limit, file_limit=file_limit, least_bytes=least_bytes,
        link_bytes_per_second=link_bytes_per_second)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() and _C.has_cuda() else "cpu"))
    with _lock:
        if device.type == "cuda":
            _check_cuda(device)
        module = _C.module_for(device.type)
        if _C.is_installed():
            raise RuntimeError("spillway_torch is installed already")
        _C.choose(module)
        _C.install(-1 if device.index is None else device.index, limit or _limit_before_install or 0, host_limit, str(file_tier or ""),
                   _file_bytes(file_tier, file_limit), least_bytes, link)
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
    """Tensors that PyTorch's own allocator made can never leave: a common mistake, worth one look."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device_type and thing.layout is torch.strided:
            try:
                storage = thing.untyped_storage()
            except (RuntimeError, NotImplementedError):  # without storage
                continue
            storages[storage._cdata] = storage.nbytes()
    stay = [n for n in storages.values() if n >= max(least_bytes, LEAST_BYTES)]
    if stay:
        warnings.warn(
            f"spillway_torch: {len(stay)} tensors ({sum(stay)} bytes) were made before install() and never leave: call "
            "it before the model is made, or replace them by clones.", stacklevel=4)


def set_enabled_lms(enabled):
    """Switches support for large models on or off, for all threads that are started from now on and this one.

    While it is off nothing new leaves; what is away still comes back when it is used.
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
    return _C.is_installed() and _C.is_enabled()


def set_limit_lms(limit):
    """Sets how many bytes tensors may take up. It can be raised again up to what `install` was given."""
    global _limit_before_install
    limit = _bytes(limit, "set_limit_lms", "limit")
    with _lock:
        if _C.is_installed():
            if _C.is_shared():
                raise RuntimeError("spillway_torch.set_limit_lms(): the device is shared, and the limit is this process' share")
            _C.set_limit(limit)
        else:
            _limit_before_install = limit


def get_limit_lms():
    return _C.limit() if _C.is_installed() else _limit_before_install or 0


def set_size_lms(least_bytes):
    """Sets the least size of a tensor that may leave. Tensors that exist stay as they are."""
    global _size_before_install
    with _lock:
        if _C.is_installed():
            _C.set_least_bytes(_bytes(least_bytes, "set_size_lms", "least_bytes"))
        else:
            _size_before_install = _bytes(least_bytes, "set_size_lms", "least_bytes")


def get_size_lms():
    return _C.least_bytes() if _C.is_installed() else _size_before_install


def set_recompute(enabled):
    """Sets whether a tensor may leave without a copy, to be made again by the operations that made it, where that takes less
    time than a copy. Results stay bitwise the same: only operations are run again that compute the same from the same
    operands, and from the same random numbers. On CUDA tensors of less than `least_bytes` may then leave, too, and an
    operation is run again only where its like has been measured before, by events on its stream."""
    with _lock:
        if enabled and not _C.is_installed():
            install()
        if _C.is_installed():
            _C.set_recompute(bool(enabled))


def get_recompute():
    return _C.recomputes()


def set_codec(codec, for_=None):
    """Sets how tensors are written while they are away, so that they take fewer bytes of host memory.

    codec  "lossless": what is 0 takes no room, for results of ReLU; given up for tensors of a size that it does not make smaller.
           "bfloat16": float32 is rounded to bfloat16, which loses bits. None: bytes are copied, as at first
    for_   a tensor or several, from their next leaving on, for as long as each keeps its memory; by default all that are made
           from now on. "bfloat16" has to be asked for by tensor

    A codec is one of a tensor's whole memory, with all views of it. Memory that is, or will be, viewed as another type than
    float32 must not have "bfloat16": such a tensor is refused if its memory was first used so, and cannot be told otherwise.
    Tensors that never leave are ignored. CUDA tensors have codecs where the module was built with nvcc: kernels on the stream of
    the copy write them to pinned memory; what goes to a file is copied as it is."""
    codec = None if codec is None else str(codec)
    tensors = None if for_ is None else [for_] if isinstance(for_, torch.Tensor) else list(for_)
    with _lock:
        if codec is not None and tensors is None and not _C.is_installed():
            install()
        if _C.is_installed() or tensors is not None:
            _C.set_codec(codec, tensors)


def reclaim_inactive():
    """Makes every tensor that is not in use leave now. Returns the bytes that left: none while support is off."""
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
    """Brings a tensor in and never lets it go again, for code that remembers its address. It may be a collection of tensors,
    or a module, too, as for `hold`."""
    _shims.keep_tensors(_tensors_in(tensor, "keep"))
    return tensor


def hold(*tensors):
    """A context for code that works on addresses: the tensors stay where they are, and so does whatever is used or
    made inside until it ends. `data_ptr()` inside gives an address that is good until then, and keeps nothing. Lists, tuples
    and dictionaries of tensors are taken, too, and modules, which stand for their parameters and buffers.

    What is used or made inside is what the thread does in which the context was entered. If another thread ends the context, it
    ends before the next operation of its own thread, or with that thread.
    """
    return _C.Held(_tensors_in(tensors, "hold"), may_write=True)


def plan(limits=None, links=(12.0, 25.0), *, overlap=True, tflops=None, memory_gbps=None, least_bytes=LEAST_BYTES,
         picture=None, out=sys.stdout):
    """A context around one step of a program, best not the first. It records the step at full memory, so nothing needs to be
    installed, and then prints what the step costs under limits; see `python -m spillway_torch.plan` for whole programs.

    limits       bytes, or text such as "8GiB"; by default parts of the peak, and the smallest limit that trains
    links        bandwidths of the host link to try, GB/s each way
    overlap      False: copies take the time of what computes, as on the CPU device
    tflops       estimate times for a device of this many TFLOP/s, instead of measuring them here
    memory_gbps  and of this bandwidth of its memory, GB/s; by default 1500
    least_bytes  as of `install`
    picture      a file to draw into, as SVG
    out          where to print the table; None: nowhere
    """
    from . import _plan, _record
    limits = limits and [_bytes(limit, "plan", "limits") for limit in limits]
    for name, value in (("tflops", tflops), ("memory_gbps", memory_gbps)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"spillway_torch.plan({name}={value!r}): a number above 0")
    estimate = _record.Estimate(tflops, memory_gbps or 1500.0) if tflops else None
    return _plan.Plan(limits, links, overlap, estimate, least_bytes, out, picture)
