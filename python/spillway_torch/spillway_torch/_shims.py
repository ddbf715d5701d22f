# SPDX-License-Identifier: Apache-2.0
"""Shims for code that asks for addresses, and for code that PyTorch calls back.

A tensor whose address is given out is brought in and kept as long as its storage lives. Code that looks at the
bytes only while it is called gets them for that long.
"""
import os
import sys
import threading
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _chosen as _C

_KEEPING = ("numpy", "__dlpack__", "__array__", "share_memory_", "_share_memory_")
_ADDRESSING = ("data_ptr",)
_HOLDING = ("tolist",)
_STORAGE_ADDRESSING = ("data_ptr",)
_STORAGE_HOLDING = ("__getitem__", "__setitem__", "fill_", "tolist", "copy_", "clone", "resize_", "_write_file",
                    "_share_filename_cpu_", "_share_fd_cpu_", "_share_cuda_", "byteswap", "_set_from_file", "cpu", "hex")

_is_installed = False
_hook_is_on = False
_naming = threading.local()


def set_hook(on):
    """Switches the hook on or off for this thread and the threads that it starts."""
    global _hook_is_on
    _hook_is_on = on
    _C.set_hook(on)


def _keeping(function):
    def call(self, *args, **kwargs):
        _C.bring_in(self, True)
        return function(self, *args, **kwargs)
    return _named_like(call, function)


def _addressing(function):
    """Inside of `hold` and of operations addresses are asked for to launch kernels, and are good until it ends."""
    def call(self, *args, **kwargs):
        _C.bring_in(self, not _C.is_holding())
        return function(self, *args, **kwargs)
    return _named_like(call, function)


def _holding(function):
    def call(self, *args, **kwargs):
        with _C.Held((self,)):
            return function(self, *args, **kwargs)
    return _named_like(call, function)


def _storage_addressing(function):
    def call(self, *args, **kwargs):
        if getattr(_naming, "depth", 0) and _C.is_ours(self):
            return self._cdata  # a number that names the storage; the address may change meanwhile
        _C.bring_in_storage(self, not _C.is_holding())
        return function(self, *args, **kwargs)
    return _named_like(call, function)


def _named_like(call, function):
    call.__name__ = getattr(function, "__name__", "call")
    call.__doc__ = getattr(function, "__doc__", None)
    call.__wrapped__ = function
    return call


def _wrap_methods(cls, names, wrap):
    for name in names:
        if hasattr(cls, name):
            setattr(cls, name, wrap(getattr(cls, name)))


class _Writer:
    """Stands in for a zip writer while a program saves: tensors are in while they are written."""

    def __init__(self, writer):
        self._writer = writer

    def __getattr__(self, name):
        return getattr(self._writer, name)

    def write_record(self, name, data, *rest):
        with _C.Held((data,)):
            return self._writer.write_record(name, data, *rest)


def _naming_storages(function):
    """While it runs, `data_ptr` of a storage is only used as its name, or to see whether it is empty."""
    def call(*args, **kwargs):
        _naming.depth = getattr(_naming, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _naming.depth -= 1
    return _named_like(call, function)


def _wrap_saving_and_loading():
    inner = torch.serialization._save

    def _save(obj, zip_file, *args, **kwargs):
        return inner(obj, _Writer(zip_file), *args, **kwargs)
    torch.serialization._save = _naming_storages(_named_like(_save, inner))
    torch.serialization._load = _naming_storages(torch.serialization._load)


def _wrap_threads():
    """Makes threads inherit the hook from the thread that starts them."""
    run = threading.Thread.run

    def run_with_hook(self):
        if _hook_is_on:
            _C.set_hook(True)
        return run(self)
    threading.Thread.run = _named_like(run_with_hook, run)


_wrapped_classes = weakref.WeakSet()


def _wrap_dispatch(cls):
    """Python that runs in the middle of an operation: its own operations are outermost."""
    method = cls.__dict__.get("__torch_dispatch__")
    if method is None or cls in _wrapped_classes:
        return
    is_bound = isinstance(method, (classmethod, staticmethod))
    function = method.__func__ if is_bound else method
    if not hasattr(function, "__code__"):
        return

    def call(*args, **kwargs):
        barrier = _C.Barrier()
        try:
            return function(*args, **kwargs)
        finally:
            barrier.exit()
    _named_like(call, function)
    cls.__torch_dispatch__ = type(method)(call) if is_bound else call
    _wrapped_classes.add(cls)


def _wrap_dispatch_of_subclasses(base):
    pending = [base]
    while pending:
        cls = pending.pop()
        for subclass in cls.__subclasses__():
            _wrap_dispatch(subclass)
            pending.append(subclass)
    inner = base.__dict__.get("__init_subclass__")

    def __init_subclass__(cls, **kwargs):
        if inner is not None:
            inner.__get__(None, cls)(**kwargs)
        else:
            super(base, cls).__init_subclass__(**kwargs)
        _wrap_dispatch(cls)
    base.__init_subclass__ = classmethod(__init_subclass__)


def _wrap_higher_order_operators():
    """Lets the hook's dispatch key fall through all higher-order operators, which do not know it."""
    from torch import _ops
    key = torch._C._parse_dispatch_key(_C.hook_key())
    for op in list(_ops._higher_order_ops.values()):
        op.fallthrough(key)
    inner = _ops.HigherOrderOperator.__init__

    def __init__(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        self.fallthrough(key)
    _ops.HigherOrderOperator.__init__ = _named_like(__init__, inner)


def _wrap_captured_graphs():
    """Tells the allocator which streams graphs are launched on: what a graph uses is free after all known streams."""
    inner = torch.cuda.CUDAGraph.replay

    def replay(self):
        _C.name_stream()
        return inner(self)
    torch.cuda.CUDAGraph.replay = _named_like(replay, inner)


def _wrap_compiled_graphs():
    """Kernels of a compiled graph take addresses without an operation: the graph is one operation as a whole."""
    compile_ = torch.compile
    is_wrapped = False

    def wrap():
        nonlocal is_wrapped
        if not is_wrapped:
            is_wrapped = True
            from torch._inductor import output_code
            for name in ("CompiledFxGraph", "CompiledAOTI"):
                cls = getattr(output_code, name, None)
                if cls is not None:
                    cls.__call__ = _holding_inputs(cls.__call__)

    def compile(*args, **kwargs):
        wrap()
        return compile_(*args, **kwargs)
    torch.compile = _named_like(compile, compile_)
    if "torch._inductor" in sys.modules:  # something may have been given to torch.compile before
        wrap()


def _wrap_distributed():
    """The reducer of DistributedDataParallel works on its buckets and on gradients between operations."""
    if not torch.distributed.is_available():
        return
    from torch.nn.parallel import distributed
    ddp = distributed.DistributedDataParallel
    inner = ddp.__init__ = _keeping_new(ddp.__init__)
    ddp._pre_forward = _keeping_new(ddp._pre_forward)  # makes the buckets anew after the first step

    def __init__(self, *args, **kwargs):
        inner(self, *args, **kwargs)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                _keep_gradients(parameter)
    ddp.__init__ = _named_like(__init__, inner)


def _keeping_new(function):
    def call(*args, **kwargs):
        before = _C.keep_new(True)
        try:
            return function(*args, **kwargs)
        finally:
            _C.keep_new(before)
    return _named_like(call, function)


def _keep_gradients(parameter):
    parameter.register_post_accumulate_grad_hook(lambda p: _C.bring_in(p.grad, True))


def _holding_inputs(function):
    def call(self, inputs):
        with _C.Held([x for x in inputs if isinstance(x, torch.Tensor)]):
            return function(self, inputs)
    return _named_like(call, function)


def install():
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _wrap_methods(torch.Tensor, _KEEPING, _keeping)
    _wrap_methods(torch.Tensor, _HOLDING, _holding)
    _wrap_methods(torch.Tensor, _ADDRESSING, _addressing)
    _wrap_methods(torch.UntypedStorage, _STORAGE_ADDRESSING, _storage_addressing)
    _wrap_methods(torch.UntypedStorage, _STORAGE_HOLDING, _holding)
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _keeping(getattr(torch._C, name)))
    torch.to_dlpack = torch.utils.dlpack.to_dlpack = torch._C._to_dlpack
    torch.set_rng_state = torch.random.set_rng_state = _holding(torch.random.set_rng_state)
    _wrap_saving_and_loading()
    _wrap_threads()
    _wrap_captured_graphs()
    _wrap_compiled_graphs()
    _wrap_distributed()
    _wrap_dispatch_of_subclasses(torch.Tensor)
    _wrap_dispatch_of_subclasses(TorchDispatchMode)
    _wrap_higher_order_operators()
    os.register_at_fork(before=_C.before_fork, after_in_parent=_C.after_fork_in_parent,
                        after_in_child=_C.after_fork_in_child)
