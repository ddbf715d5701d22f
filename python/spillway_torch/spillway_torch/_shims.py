# SPDX-License-Identifier: Apache-2.0
"""Wrappers for code that asks for addresses of tensors, and for code that PyTorch calls back.

A tensor whose address is given out is swapped in, and stays on the device as long as its storage lives. Code that
uses the bytes only during a call has the tensor leased for the call, and a NumPy array for as long as the array
lives. Code that only distinguishes storages gets numbers that name them in place of addresses.
"""
import _thread
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import mmap
import re
import sys
import threading
import types
import weakref

import torch
from torch.utils._pytree import tree_leaves

from . import _chosen as _C, _compiled

_KEEPING = ("__dlpack__",)
_HOLDING = ("tolist",)
_WRITING = ("apply_", "map_", "map2_")
_STORAGE_HOLDING = ("tolist", "clone", "_write_file", "cpu", "hex", "is_shared", "_get_filename",
                    "_get_shared_fd", "_shared_incref", "_shared_decref")
_STORAGE_WRITING = ("__setitem__", "fill_", "copy_", "resize_", "_share_filename_cpu_", "_share_fd_cpu_", "byteswap",
                    "_set_from_file", "_resize_with_addr_", "_swap_data_ptr_")

_COMMUNICATING = (
    "broadcast", "reduce", "gather", "gather_single", "gather_into_tensor", "scatter", "send", "recv", "recv_anysource",
    "allreduce", "allreduce_coalesced", "allreduce_sparse", "allgather", "_allgather_base", "allgather_coalesced",
    "all_gather_single", "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single")

#: Functions of `torch._C` that call NCCL for several devices of the process, without an operation.
_ENQUEUING = ("_broadcast", "_broadcast_out", "_broadcast_coalesced", "_nccl_all_gather", "_nccl_all_reduce",
              "_nccl_broadcast", "_nccl_reduce", "_nccl_reduce_scatter")

#: Functions that ask for addresses only to distinguish storages, or to see whether they are empty or aligned: a number that
#: names a tensor is aligned to 16 bytes where its address is.
_NAMING = {
    "torch.nn.modules.rnn": ("flatten_parameters",),
    "torch._inductor.utils": ("copy_misaligned_inputs",),
    "torch.serialization": ("_save", "_load", "persistent_id", "load_tensor", "persistent_load"),
    "torch.distributed.checkpoint._state_dict_stager": ("_offload_tensor",),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("reset_sharded_param",),
    "torch.distributed.fsdp._flat_param": ("_same_storage",),
    "torch.distributed.fsdp._runtime_utils": ("_catch_all_reshard",),
    "torch.distributed.utils": ("_data_ptr_allocated",),
    "safetensors.torch": ("storage_ptr", "_filter_shared_not_shared", "_is_complete"),
    "transformers.modeling_utils": ("_find_disjoint", "_find_identical"),
    "transformers.pytorch_utils": ("id_tensor_storage",),
    "huggingface_hub.serialization._torch": ("get_torch_storage_id", "_get_unique_id", "storage_ptr", "_is_complete",
                                             "_filter_shared_not_shared"),
    "accelerate.utils.modeling": ("id_tensor_storage",),
    "peft.tuners.tuners_utils": ("_unload_and_optionally_merge",),
}

_is_installed = False
_hook_is_on = False


def set_hook(on):
    """Switches the hook on or off for this thread and the threads that it starts."""
    global _hook_is_on
    _hook_is_on = on
    _C.set_hook(on)


def _keeping(function):
    """Wraps a method whose caller uses the tensor's address afterwards."""
    def call(self, *args, **kwargs):
        _C.bring_in(self, True)
        return function(self, *args, **kwargs)
    return _named_like(call, function)


def _sharing(function):
    """Wraps a method that moves a tensor of the CPU to shared memory, and that does nothing on CUDA."""
    keeping = _keeping(function)

    def call(self, *args, **kwargs):
        return (function if self.is_cuda else keeping)(self, *args, **kwargs)
    return _named_like(call, function)


def _handing_over(function):
    """Wraps the method by which a storage on CUDA is shared with other processes."""
    def call(self, *args, **kwargs):
        if self.nbytes() != 0 and _C.is_ours(self):
            _C.hand_over(self)
        return function(self, *args, **kwargs)
    return _named_like(call, function)


def _is_naming(caller):
    # Skips typed storages, which ask untyped ones, and `_end_ptr`, whose caller compares the end with begins.
    """Whether the caller only wants to distinguish storages (`_NAMING`)."""
    while caller is not None and (caller.f_globals.get("__name__") == "torch.storage" or caller.f_code.co_name == "_end_ptr"):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name in _NAMING.get(caller.f_globals.get("__name__"), ())


def _addressing(function):
    """Wraps a method that returns the address of a tensor. Inside of `hold` and of operations, addresses are asked
    for to launch kernels, and stay valid until these end; otherwise the tensor stays on the device.
    """
    def call(self):
        if _is_naming(sys._getframe(1)):
            storage = self.untyped_storage()
            if storage.nbytes() != 0 and _C.is_ours(storage):
                return storage._cdata + self.storage_offset() * self.element_size()
        _C.bring_in(self, not _C.is_holding())
        return function(self)
    return _named_like(call, function)


def _storage_addressing(function):
    """Does the same for a storage."""
    def call(self):
        if self.nbytes() != 0 and _is_naming(sys._getframe(1)) and _C.is_ours(self):
            return self._cdata  # a number that names the storage, since its address may change
        _C.bring_in_storage(self, not _C.is_holding())
        return function(self)
    return _named_like(call, function)


def _storage_indexing(function):
    """Wraps the indexing of a storage. A slice is another storage, which uses the same address from then on."""
    holding = _holding(function)

    def call(self, index):
        if isinstance(index, slice):
            _C.bring_in_storage(self, True)
        return holding(self, index)
    return _named_like(call, function)


def _holding(function, may_write=False):
    """Wraps a function whose arguments are leased while it runs."""
    def call(*args, **kwargs):
        with _C.Held((*args, *kwargs.values()), may_write):
            return function(*args, **kwargs)
    return _named_like(call, function)


def _writing(function):
    return _holding(function, may_write=True)


def _enqueuing(function):
    """Wraps a function that enqueues work on tensors, on the current streams or on streams that it is given. In the second
    case the tensors stay on the device, since nothing says when that work has ended.
    """
    writing = _writing(function)

    def call(*args, **kwargs):
        given = tree_leaves((args, kwargs))
        for stream in (x for x in given if isinstance(x, torch.cuda.Stream)):
            with torch.cuda.stream(stream):  # it runs after what swaps the tensors in
                for x in given:
                    if isinstance(x, torch.Tensor):
                        _C.bring_in(x, True)
        return writing(*args, **kwargs)
    return _named_like(call, function)


class _Borrower(weakref.ref):
    """A weak reference to an object that shares a tensor's memory; keeps the lease until the object dies."""
    __slots__ = ("lease",)


_borrowers = {}  # by the `id` of the lease


def _lending(function):
    """Wraps a method whose result shares the tensor's memory: the tensor is leased until the result dies."""
    def call(self, *args, **kwargs):
        if kwargs.get("force") and not torch.overrides.has_torch_function_unary(self):
            self = self.detach().cpu().resolve_conj().resolve_neg()  # as `force` does, whose result might be swapped out
        lease = _C.Lent(self)
        result = function(self, *args, **kwargs)
        try:
            # No Python code may run when the array dies, since an exception of a signal handler in it would be lost.
            borrower = _Borrower(result, functools.partial(_borrowers.pop, id(lease)))
        except TypeError:  # a subclass returns something else, such as a tuple with an array, whose end nothing reports
            _C.bring_in(self, True)
            return result
        borrower.lease = lease
        _borrowers[id(lease)] = borrower
        return result
    return _named_like(call, function)


def _wrap_addresses_of_arrays(module):
    """Wraps `array.ctypes`, whose address may be used after the array has died, as long as the tensor lives."""
    cls = module._ctypes
    inner = cls.__init__

    def __init__(self, array, *args, **kwargs):
        owner = array
        while owner is not None and not isinstance(owner, torch.Tensor):
            owner = getattr(owner, "obj" if isinstance(owner, memoryview) else "base", None)
        if owner is not None:
            _C.bring_in(owner, not _C.is_holding())
        inner(self, array, *args, **kwargs)
    cls.__init__ = _named_like(__init__, inner)


def _named_like(call, function):
    call.__name__ = getattr(function, "__name__", "call")
    call.__doc__ = getattr(function, "__doc__", None)
    call.__wrapped__ = function
    return call


def _wrap_methods(cls, names, wrap):
    for name in names:
        if hasattr(cls, name):
            setattr(cls, name, wrap(getattr(cls, name)))


def _wrap_saving():
    writer = torch._C.PyTorchFileWriter  # the writer of torch.save and torch.package
    writer.write_record = _holding(writer.write_record)
    _wrap_packaging(torch._C.ScriptModuleSerializer)
    _after_import("safetensors.torch", _wrap_safetensors)


def _wrap_packed_objects():
    """Wraps objects that are written in C++ and use the tensors of their state from then on."""
    cls = torch._C.ScriptObject
    _wrap_methods(cls, ("__copy__", "__deepcopy__", "__getstate__"), _holding)
    _wrap_methods(cls, ("__setstate__",), _keeping_leaves)


def keep_tensors(things):
    for thing in things:
        if isinstance(thing, torch.Tensor):
            _C.bring_in(thing, True)
        else:
            _C.bring_in_storage(thing, True)  # ignores what is not a storage


def _keeping_leaves(function):
    """Wraps a function that uses the addresses of its arguments after it has returned."""
    def call(self, *args, **kwargs):
        keep_tensors(tree_leaves((args, kwargs)))
        with _C.Held(()):
            return function(self, *args, **kwargs)
    return _named_like(call, function)


def _wrap_packaging(serializer):
    """Wraps torch.package, which takes TorchScript modules one by one and writes parts of them at the end."""
    serialize, write_files = _holding_scripts(serializer.serialize), serializer.write_files
    modules = weakref.WeakKeyDictionary()

    def remembering_serialize(self, module, *args):
        modules.setdefault(self, []).append(module)
        return serialize(self, module, *args)

    def holding_write_files(self):
        with _C.Held([tensor for module in modules.pop(self, ()) for tensor in _tensors_of(module)]):
            return write_files(self)
    serializer.serialize = _named_like(remembering_serialize, serialize)
    serializer.write_files = _named_like(holding_write_files, write_files)


#: Operators of TorchScript that read tensors and do not pass PyTorch's dispatcher.
_READING = ("prim::tolist", "aten::format", "aten::str", "aten::percentFormat", "aten::save", "prim::Print")
#: The words in the types of values that contain no tensor.
_PLAIN = {"int", "float", "bool", "str", "complex", "Scalar", "Device", "NoneType", "List", "Dict", "Tuple", "Optional"}


def _reads_tensors(graph):
    """Whether a graph may apply such an operator to a tensor. Code that `torch.jit.fork` begins is left out, since it
    runs in another thread.
    """
    return any(not _PLAIN.issuperset(re.findall(r"\w+", str(value.type())))
               for kind in _READING for node in graph.findAllNodes(kind) for value in node.inputs())


#: Whether a script may contain kernels of oneDNN's fuser. It keeps them when the fuser is switched off.
_may_be_fused = False


def _note_fusion(on):
    global _may_be_fused
    _may_be_fused = _may_be_fused or bool(on)


def _noting_fusion(set_enabled):
    def call(on):
        _note_fusion(on)
        return set_enabled(on)
    return _named_like(call, set_enabled)


def _reading(run):
    """Wraps the call of a script. A script that reads tensors, or whose kernels do, counts as one operation."""
    keep = _keeping_leaves(run)

    def call(self, *args, **kwargs):
        reads = getattr(self, "_spillway_reads", None)
        if reads is None:
            try:
                reads = _reads_tensors(self.inlined_graph)
            except RuntimeError:
                reads = "native"
            self._spillway_reads = reads
        if reads == "native":  # a method in C++, whose object may use the tensors that it is given later
            return keep(self, *args, **kwargs)
        is_plain = _PLAIN_TYPES.issuperset(map(type, args)) and not kwargs
        parts = [] if is_plain else [*_parts_of_wrappers([args, kwargs])]
        if not reads and not _may_be_fused and not parts:
            return run(self, *args, **kwargs)
        if isinstance(self, torch._C.ScriptMethod):
            own = _tensors_of_script(self.owner)
        else:
            own = [*_tensors_of(self), *_tensors_of_scripted(_default_values(self))]
        with _C.Held([*_tensors_of_scripted([args, kwargs]), *own, *parts]):
            return run(self, *args, **kwargs)
    return _named_like(call, run)


#: Types of arguments of scripts without parts; to look for parts takes some microseconds.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


def _parts_of_wrappers(value):
    """Yields the tensors that tensors of classes with a `__torch_dispatch__` consist of. A script passes such a tensor to
    PyTorch's own kernel if it is an index. The kernel reads what views of it return, and no operation leases that.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and type(leaf).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            for part in vars(leaf).values():
                if isinstance(part, torch.Tensor):
                    yield part
                    yield from _parts_of_wrappers(part)


def _wrap_scripts():
    """Wraps TorchScript: it writes everything that a module has in one call, and prints constants without an
    operation.
    """
    C = torch._C
    saving = ("save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile")
    _wrap_methods(C.ScriptModule, (*saving, "dump", "dump_to_str", "__copy__", "__deepcopy__"), _holding_scripts)
    _wrap_methods(C.ScriptFunction, saving, _holding_scripts)
    _wrap_methods(C.Graph, ("_export_onnx", "_pretty_print_onnx"), _holding_scripts)
    for cls in (C.Graph, C.Node, C.Value):
        _wrap_methods(cls, ("__str__", "__repr__", "str", "copy"), _holding_what_is_shown)
    copying = "_save_jit_module|_freeze_module|_hack_do_not_use_clone|_jit_pass_(onnx|.*(fold|freez|frozen|inference|constant|observer|quant))"
    _wrap_methods(C, [name for name in dir(C) if re.match(copying, name)], _holding_scripts)
    _wrap_methods(C.FileCheck, ("run",), _holding_what_is_shown)
    for position, owner, names in ((0, C, ("_create_graph_by_tracing",)),
                                   (1, C, ("_create_function_from_trace", "_create_function_from_trace_with_dict")),
                                   (2, C.ScriptModule, ("_create_method_from_trace", "_create_method_from_trace_with_dict"))):
        for name in names:
            method = _C.holding_after_program(getattr(owner, name), position)
            # Dynamo puts functions into sets, but methods of this kind are not hashable.
            setattr(owner, name, method if isinstance(owner, type) else method.__func__)
    for name in ("import_ir_module", "import_ir_module_from_buffer", "_import_ir_module_from_package", "_load_for_lite_interpreter",
                 "_load_for_lite_interpreter_from_buffer"):
        _wrap_methods(C, (name,), _loading)
    # Kernels of oneDNN's fuser ask for addresses outside of operations. It is off unless the program switches it on.
    _note_fusion(C._jit_llga_enabled())
    _wrap_methods(C, ("_jit_set_llga_enabled",), _noting_fusion)
    for cls in (C.ScriptMethod, C.ScriptFunction):
        _wrap_methods(cls, ("code", "code_with_constants"), lambda code: property(_holding_scripts(code.fget)))
        _wrap_methods(cls, ("__call__",), _reading)


def _loading(function):
    """Wraps the loading of a TorchScript file, which may contain objects that are written in C++. They are made while
    the file is read, outside of operations, from tensors whose addresses they use from then on. So if there are such
    objects, all tensors of the file stay on the device.
    """
    keeping = _keeping_new(function)

    def call(*args):
        file = next((argument for argument in args if isinstance(argument, (str, bytes, torch._C.PyTorchFileReader))), None)
        return (keeping if file is not None and _has_objects(file) else function)(*args)
    return _named_like(call, function)


def _has_objects(file):
    reader = file
    if not isinstance(file, torch._C.PyTorchFileReader):
        try:
            reader = torch._C.PyTorchFileReader(io.BytesIO(file) if isinstance(file, bytes) else file)
        except RuntimeError:  # not an archive: another format, or a file that PyTorch itself will reject
            return False
    return any("/torch/classes/" in name for name in reader.get_all_records())


def _holding_scripts(function, holds=lambda tensor: True):
    """Wraps a function that takes TorchScript objects, or tensors, as arguments."""
    def call(*args, **kwargs):
        with _C.Held([tensor for argument in args for tensor in _tensors_of(argument) if holds(tensor)]):
            return function(*args, **kwargs)
    return _named_like(call, function)


def _holding_what_is_shown(function):
    return _holding_scripts(function, lambda tensor: tensor.numel() <= 16)  # larger tensors are not printed


def _tensors_of(argument):
    C = torch._C
    if isinstance(argument, (C.ScriptMethod, C.ScriptFunction)):
        return _constants(argument.inlined_graph)
    if isinstance(argument, (C.Graph, C.Node)):
        return _constants(argument)
    return _constants(argument.node()) if isinstance(argument, C.Value) else _tensors_of_scripted(argument)


def _default_values(method):
    return [argument.default_value for argument in method.schema.arguments]


def _constants(part):
    """Returns the constants of a graph, or of a node and the blocks in it. `part` keeps the nodes alive."""
    nodes = part.findAllNodes("prim::Constant")
    for kind in ("prim::fork", "prim::Closure"):
        for node in part.findAllNodes(kind):
            if node.hasAttribute("Subgraph"):
                yield from _constants(node.g("Subgraph"))
    for node in [part, *nodes] if isinstance(part, torch._C.Node) else nodes:
        kind = node.kindOf("value") if node.hasAttribute("value") else None
        if kind in ("t", "ts", "ival"):
            yield from _tensors_of_scripted(getattr(node, kind)("value"))


def _tensors_of_script(module):
    for name in torch._C.ConcreteModuleType.from_jit_type(module._type()).get_attributes():
        try:
            value = module.getattr(name)
        except RuntimeError:  # an object of a class that is unknown in Python
            continue
        yield from _tensors_of_scripted(value)
    for name in module._method_names():
        method = module._get_method(name)
        yield from _constants(method.inlined_graph)
        yield from _tensors_of_scripted(_default_values(method))
    for _, child in torch._C.ModuleDict(module).items():
        yield from _tensors_of_script(child)


def _tensors_of_scripted(value):
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch._C.ScriptModule):
            yield from _tensors_of_script(leaf)
        elif torch.jit._state._get_script_class(type(leaf)) is not None:
            yield from _tensors_of_scripted(list(vars(leaf).values()))


def _wrap_safetensors(module):
    if hasattr(module, "_to_ndarray"):  # its array does not own the memory, and one call writes all of them
        to_array = module._to_ndarray

        def _to_ndarray(tensor):
            with _C.Held((tensor,)):
                array, tensor = to_array(tensor)
                return array.copy() if isinstance(tensor, torch.Tensor) else array, tensor
        module._to_ndarray = _named_like(_to_ndarray, to_array)
    if hasattr(module, "_tobytes"):
        module._tobytes = _holding(module._tobytes)


class _Finder(importlib.abc.MetaPathFinder):
    """Calls functions with modules when these have been imported. A module may be searched for and not be imported
    (`importlib.util.find_spec`), or its import may fail; so its function waits until the module has been executed.
    """

    def __init__(self):
        self.waiting = {}
        self.here = threading.local()  # `searched`: names for which this thread asks the other finders

    def find_spec(self, name, path, target=None):
        searched = self.here.__dict__.setdefault("searched", set())
        if name not in self.waiting or name in searched:
            return None
        searched.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            searched.discard(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                # A loader may serve several modules, and this one may have been searched for more than once.
                act = self.waiting.pop(name, None) if module.__name__ == name else None
                if act is not None:
                    act(module)
            spec.loader.exec_module = exec_module
        return spec


_finder = _Finder()


def _after_import(name, act):
    if name in sys.modules:
        act(sys.modules[name])
    else:
        _finder.waiting[name] = act


def _with_hook(function):
    """Wraps a function that may be called in a thread without the hook."""
    def call(*args, **kwargs):
        if _hook_is_on:
            _C.set_hook(True)
        return function(*args, **kwargs)
    return _named_like(call, function)


def _from_beginning_to_end(function):
    """Wraps the function that a thread runs: when it returns, everything that the thread holds ends."""
    run = _with_hook(function)

    def call(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        finally:
            _C.end_all_holds()
    return _named_like(call, function)


def _wrap_threads():
    """Makes threads inherit the hook, whatever class or function they run."""
    threading.Thread._bootstrap_inner = _from_beginning_to_end(threading.Thread._bootstrap_inner)
    start = _thread.start_new_thread

    def start_new_thread(function, *args):
        return start(_from_beginning_to_end(function) if callable(function) else function, *args)
    _thread.start_new_thread = _thread.start_new = _named_like(start_new_thread, start)


def _wrap_extensions():
    """Wraps functions and classes of extensions in C++. They are not operations, and may use the addresses of their
    arguments and of results of operations later. Each call counts as one operation, and what an object is made of or
    given stays on the device.
    """
    loader = importlib.machinery.ExtensionFileLoader
    inner = loader.exec_module

    def wrap(module, path):
        functions = {}
        if module.__name__.partition(".")[0] not in ("torch", "functorch", __package__) and _is_linked_to_torch(path):
            _wrap_extension(module, functions)
        return functions

    def exec_module(self, module):
        inner(self, module)
        wrap(module, self.path)
    loader.exec_module = _named_like(exec_module, inner)
    functions = {}
    for module in list(sys.modules.values()):
        its_loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if isinstance(its_loader, loader):
            functions |= wrap(module, its_loader.path)
    # Also in modules that have imported the functions by name.
    for module in list(sys.modules.values()) if functions else ():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in functions:
                setattr(module, name, functions[id(value)])


def _wrap_extension(module, functions):
    """Wraps the functions of an extension, and records in `functions` what each was replaced by, under its `id`. The
    replacement keeps the original alive.
    """
    for name, value in list(vars(module).items()):
        if isinstance(value, types.BuiltinFunctionType):
            if not _is_of(value, module.__name__):
                continue
            call = functions[id(value)] = _holding_leaves(value)
            call.__module__, call.__qualname__ = module.__name__, name  # pickle finds it by these names
            setattr(module, name, call)
        elif type(value).__name__ == "pybind11_type" and value.__module__ == module.__name__:
            _wrap_extension_class(value)
        elif isinstance(value, types.ModuleType) and value.__name__.startswith(module.__name__ + "."):
            _wrap_extension(value, functions)


def _is_of(function, name):
    """Whether a function is of the extension with this name or its submodules, and not one that it has imported."""
    home = function.__module__ or ""
    return home not in sys.modules or home == name or home.startswith(name + ".") or name.startswith(home + ".")


def _wrap_extension_class(cls):
    for name, value in list(vars(cls).items()):
        if isinstance(value, type):
            if type(value).__name__ == "pybind11_type" and value.__qualname__.startswith(cls.__qualname__ + "."):
                _wrap_extension_class(value)  # a class that is defined inside of this one
        elif isinstance(value, staticmethod):
            setattr(cls, name, staticmethod(_holding_leaves(value.__func__)))
        elif type(value) is property:  # not static ones, since setting one would set its value
            setter = value.fset and _keeping_leaves(value.fset)
            getter = value.fget and _holding_leaves(value.fget)
            setattr(cls, name, property(getter, setter, value.fdel, value.__doc__))
        elif name in ("__init__", "__setstate__", "__setitem__"):
            setattr(cls, name, _keeping_leaves(value))
        elif type(value).__name__ == "instancemethod":
            setattr(cls, name, _holding_leaves(value))


def _is_linked_to_torch(path):
    """Whether an extension is linked to PyTorch. False if its file is gone: packages are removed or replaced while
    programs run, and such an extension is hardly ever one for PyTorch.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b"libc10.so") >= 0
    except (OSError, ValueError):  # ValueError: it is empty
        return False


def _holding_leaves(function):
    """Wraps a function that uses the addresses of its arguments until it returns. Arguments that it keeps, and
    tensors that it has made and returns, stay on the device for good, since whoever has them may use their addresses.
    """
    def call(*args, **kwargs):
        given = leaves_of((args, kwargs))
        counts = {id(tensor): (tensor, tensor._use_count()) for tensor in given if isinstance(tensor, torch.Tensor)}
        held = _C.Held(given)
        with held:
            result = function(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                keep_tensors(_retained(held, counts, result))
            return _holding_leaves(result) if isinstance(result, types.BuiltinFunctionType) else result
    return _named_like(call, function)


def _retained(held, counts, result):
    """Returns the tensors that somebody else refers to after a call and did not before.

    held    the hold around the call
    counts  for the `id` of each argument: the tensor, and the number of references to it before the call
    result  what the call has returned
    """
    returned = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
    retained = [tensor for tensor in returned if id(tensor) not in counts and tensor._use_count() > 1]
    if any(tensor.requires_grad for tensor in returned):  # the graph may refer to the arguments
        held.returns(returned)
        return retained
    bases = {id(tensor._base) for tensor in returned if tensor._is_view()}
    return retained + [tensor for name, (tensor, count) in counts.items()
                       if tensor._use_count() > count and name not in bases]


def leaves_of(arguments):
    """Returns the leaves of nested collections of arguments, and the parameters and buffers of modules among them."""
    leaves = tree_leaves(arguments)
    for module in [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]:
        leaves += [*module.parameters(), *module.buffers()]
    return leaves


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


def _wrap_kernels_in_python():
    """Wraps kernels that the program writes in Python for operations of PyTorch."""
    def running_program(kernel):
        def call(*args, **kwargs):
            with _C.KernelInPython():
                return kernel(*args, **kwargs)
        return _named_like(call, kernel)
    cls = torch._C._DispatchModule
    impl = cls.impl

    def wrapping_impl(self, name, dispatch, func, *args, **kwargs):
        is_kernel = func is not torch.library.fallthrough_kernel
        return impl(self, name, dispatch, running_program(func) if is_kernel else func, *args, **kwargs)
    cls.impl = _named_like(wrapping_impl, impl)


def _wrap_captured_graphs():
    """Tells the allocator on which streams graphs are launched, since what a graph uses is free only after all these.
    """
    inner = torch.cuda.CUDAGraph.replay

    def replay(self):
        _C.name_stream()
        return inner(self)
    torch.cuda.CUDAGraph.replay = _named_like(replay, inner)


def _wrap_change_of_allocator():
    """Refuses another CUDA allocator. New tensors would not be this module's any more."""
    def change(_allocator):
        raise RuntimeError("torch.cuda.memory.change_current_allocator: spillway_torch.install() has replaced the allocator. "
                           "Another one can only serve a pool: torch.cuda.MemPool(allocator)")
    if hasattr(_C, "hand_over"):
        torch._C._cuda_changeCurrentAllocator = change


def _wrap_packaged_graphs():
    """Wraps graphs that were compiled into a library. They use the addresses of their arguments during a call, and
    those of constants that the program manages from then on.
    """
    def holding_all(function):
        def call(self, *args, **kwargs):
            things = tree_leaves((args, kwargs))
            if kwargs.get("user_managed", len(args) > 3 and args[3]):
                keep_tensors(things)
            with _C.Held(things):
                return function(self, *args, **kwargs)
        return _named_like(call, function)
    libraries = getattr(torch._C, "_aoti", None)
    for name in ("AOTIModelContainerRunnerCpu", "AOTIModelContainerRunnerCuda", "AOTIModelPackageLoader"):
        if hasattr(libraries, name):
            _wrap_methods(getattr(libraries, name), ("run", "boxed_run", "load_constants", "update_constant_buffer"),
                          holding_all)


def _wrap_native_runners():
    """Wraps static modules and kernels of TorchScript's tensor expressions. They run without operations, and use the
    weights that they were made of from then on.
    """
    C = torch._C
    if hasattr(C, "StaticModule"):
        to_static = _keeping_new(C._jit_to_static_module)  # freezing the module makes new weights

        def to_static_module(part):
            keep_tensors(_tensors_of(part))
            return to_static(part)
        C._jit_to_static_module = _named_like(to_static_module, to_static)
        keys = C.DispatchKeySet(C._parse_dispatch_key(_C.hook_key()))

        def without_hook(function):  # threads that a script forks have no hook either, so what they make stays
            def call(*args, **kwargs):
                with C._ExcludeDispatchKeyGuard(keys):
                    return function(*args, **kwargs)
            return _named_like(call, function)
        _wrap_methods(C.StaticModule, ("__call__", "benchmark", "benchmark_individual_ops", "runAsync"), without_hook)
        _wrap_methods(C.StaticModule, ("__call__", "benchmark", "benchmark_individual_ops"), _holding_leaves)
        _wrap_methods(C.StaticModule, ("runAsync",), _keeping_leaves)
    if hasattr(C, "_te"):
        cls = C._te.TensorExprKernel
        init = cls.__init__

        def __init__(self, *args, **kwargs):
            keep_tensors([tensor for part in (*args, *kwargs.values()) if isinstance(part, C.Graph)
                          for tensor in _tensors_of(part)])
            init(self, *args, **kwargs)
        cls.__init__ = _named_like(__init__, init)
        _wrap_methods(cls, ("run", "fallback"), _holding_leaves)
        _wrap_methods(C._te.CodeGen, ("call",), _holding_leaves)


def _wrap_dlpack_exchange():
    """Replaces the tables of C functions with which other code takes tensors; such code remembers the tables."""
    if hasattr(torch._C, "_dlpack_exchange_api"):
        _C.wrap_dlpack_exchange(torch._C._dlpack_exchange_api())
    if hasattr(torch._C, "_const_dlpack_exchange_api"):
        _C.wrap_read_only_dlpack_exchange(torch._C._const_dlpack_exchange_api())


def _wrap_backends():
    """Wraps process groups that are used without `torch.distributed`: they communicate without operations."""
    if not torch.distributed.is_available():
        return
    from torch._C import _distributed_c10d as c10d

    def communicating(function):
        def call(*args, **kwargs):
            with _C.Communicating((*args, *kwargs.values())) as communication:
                work = function(*args, **kwargs)
                communication.begun(work)
                return work
        return _named_like(call, function)
    _wrap_methods(c10d.Backend, _COMMUNICATING, communicating)


def _wrap_rpc(module):
    """Wraps functions that other processes call."""
    module._run_function = _with_hook(module._run_function)


def _wrap_futures():
    """Wraps callbacks, which run in the thread that completes a future."""
    def taking(method):
        def call(self, callback):
            return method(self, _with_hook(callback))
        return _named_like(call, method)
    _wrap_methods(torch._C.Future, ("then", "add_done_callback"), taking)


def _wrap_rpc_backends(module):
    """Wraps the start of an RPC backend, which calls its collectives without operations."""
    module.init_backend = _holding(module.init_backend)


def _wrap_distributed():
    """Wraps the reducer of DistributedDataParallel, which works on its buckets and on gradients between operations,
    and the functions that compare processes, which fill and read tensors of their own between operations.
    """
    if not torch.distributed.is_available():
        return
    from torch._C import _distributed_c10d as c10d
    cls = c10d.Reducer
    inner = _keeping_new(cls.__init__)
    cls._rebuild_buckets = _keeping_new(cls._rebuild_buckets)  # called after the first step

    def __init__(self, params, *args, **kwargs):
        # Ignores the request for buckets that are allocated in a backward pass, since the thread that would
        # allocate them does not keep them on the device.
        kwargs.pop("lazy_bucket_allocation", None)
        inner(self, params, *args[:13], **kwargs)
        for parameter in params:
            if parameter.requires_grad:
                _keep_gradients(parameter)
    cls.__init__ = _named_like(__init__, inner)
    for module in (c10d, torch.distributed):
        _wrap_methods(module, ("_verify_params_across_processes", "_hash_tensors"), _holding)


def _keeping_new(function):
    def call(*args, **kwargs):
        # Unlike `try`, `with` leaves no gap after its first call, in which a signal handler could raise an exception.
        with _C.KeepingNew():
            return function(*args, **kwargs)
    return _named_like(call, function)


def _keep_gradients(parameter):
    parameter.register_post_accumulate_grad_hook(lambda p: _C.bring_in(p.grad, True))


_recorders = set()


def _wrap_profilers():
    """Wraps profilers: they ask for the addresses of operands, of parameters and of an optimizer's state before an
    operation uses them.
    """
    def note(name, records):
        (_recorders.add if records else _recorders.discard)(name)
        _C.set_profiled(bool(_recorders))

    def enabling(function, name):
        def call(*args, **kwargs):
            before = name in _recorders
            note(name, True)
            try:
                return function(*args, **kwargs)
            except BaseException:
                note(name, before)  # it does not record, unless it did before
                raise
        return _named_like(call, function)

    def disabling(function, name):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            note(name, False)
            return result
        return _named_like(call, function)

    from torch.autograd import profiler
    from torch.profiler import profiler as kineto
    for name, modules in {"profiler": (torch._C._autograd, torch.autograd, profiler),
                          "execution_trace_observer": (torch._C._profiler, kineto)}.items():
        for prefix, wrap in (("_enable_", enabling), ("_disable_", disabling)):
            for module in modules:
                if hasattr(module, prefix + name):
                    setattr(module, prefix + name, wrap(getattr(module, prefix + name), name))
    if torch.autograd._profiler_enabled():
        note("profiler", True)
    _after_import("torch.profiler._memory_profiler", _wrap_memory_profile)


def _wrap_memory_profile(module):
    cls = module.MemoryProfile
    init = cls.__init__

    def __init__(self, *args, **kwargs):
        try:
            init(self, *args, **kwargs)
        except AssertionError as error:
            raise RuntimeError(
                "PyTorch's memory profile tells tensors apart by their addresses, and an address changes when its tensor "
                "is swapped out. Record the profile after spillway_torch.set_enabled_lms(False).") from error
    cls.__init__ = _named_like(__init__, init)


def install():
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    _wrap_methods(torch.Tensor, _KEEPING, _keeping)
    _wrap_methods(torch.Tensor, ("share_memory_", "_share_memory_"), _sharing)
    _wrap_methods(torch.Tensor, _HOLDING, _holding)
    _wrap_methods(torch.Tensor, _WRITING, _writing)
    _wrap_methods(torch.Tensor, ("data_ptr", "const_data_ptr"), _addressing)
    _wrap_methods(torch.Tensor, ("numpy",), _lending)
    for name in ("numpy._core._internal", "numpy.core._internal"):  # the second one before NumPy 2.0
        _after_import(name, _wrap_addresses_of_arrays)
    torch.Tensor.__setitem__ = _C.set_item_method()
    _wrap_methods(torch._C, ("_data_address",), _addressing)
    _wrap_methods(torch.UntypedStorage, ("data_ptr",), _storage_addressing)
    _wrap_methods(torch.UntypedStorage, ("__getitem__",), _storage_indexing)
    _wrap_methods(torch.UntypedStorage, ("_share_cuda_",), _handing_over)
    _wrap_methods(torch.UntypedStorage, _STORAGE_HOLDING, _holding)
    _wrap_methods(torch.UntypedStorage, _STORAGE_WRITING, _writing)
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        if hasattr(torch._C, name):
            setattr(torch._C, name, _keeping(getattr(torch._C, name)))
    torch.to_dlpack = torch.utils.dlpack.to_dlpack = torch._C._to_dlpack
    _wrap_dlpack_exchange()
    torch.set_rng_state = torch.random.set_rng_state = _holding(torch.random.set_rng_state)
    # The first one runs a kernel without passing the dispatcher.
    _wrap_methods(torch._C, ("_cuda_jiterator_compile_and_launch_kernel", "_pickle_save", "_is_cow_tensor", "_is_alias_of"),
                  _holding)
    _wrap_methods(torch._C, _ENQUEUING, _enqueuing)
    sys.meta_path.insert(0, _finder)
    _wrap_saving()
    _wrap_scripts()
    _wrap_packed_objects()
    _wrap_profilers()
    _wrap_threads()
    _wrap_extensions()
    _wrap_futures()
    _wrap_kernels_in_python()
    _wrap_captured_graphs()
    _wrap_change_of_allocator()
    _wrap_packaged_graphs()
    _wrap_native_runners()
    _after_import("torch._inductor.output_code", _compiled.wrap_graphs)
    # Dynamo must not trace the wrappers in this module: a graph made from one would call itself.
    _after_import("torch._dynamo.trace_rules", lambda rules: rules.add(__package__))
    _after_import("torch.distributed.rpc.internal", _wrap_rpc)
    _after_import("torch.distributed.rpc.backend_registry", _wrap_rpc_backends)
    _wrap_distributed()
    _wrap_backends()
    _C.install_barriers()
    _wrap_higher_order_operators()
