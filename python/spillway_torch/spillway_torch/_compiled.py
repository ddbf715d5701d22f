# SPDX-License-Identifier: Apache-2.0
"""Leases tensors for graphs that Inductor has compiled: each of their kernels counts as an operation.

The code that Inductor generates for a graph is a Python function. It makes buffers, calls kernels of its own with
tensors, and calls operations of PyTorch for the rest. Its kernels take addresses from the tensors without an
operation, so each is called here with its tensors leased. Between two kernels everything may be swapped out: inputs,
buffers, and tensors that are saved for the backward graph. Graphs that are no such functions (wrappers in C++,
packages, captured graphs), and code that itself passes addresses to kernels, count as one operation as a whole.
"""
import types

import torch

from . import _chosen as _C

#: Names that occur in generated code if it passes addresses, or objects with addresses, to kernels.
_ADDRESSING = frozenset(("data_ptr", "c_void_p", "TensorDescriptor"))
_GENERATED = "torch._inductor.runtime.compile_tasks."
_MARK = "_spillway_kernels_lease"


class _Kernel:
    """A kernel that is called by its method `run`, such as one of Triton's."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.run = leasing(kernel.run)

    def __getattr__(self, name):
        return getattr(self._kernel, name)


def leasing(kernel):
    def run(*args, **kwargs):
        with _C.Held(args):
            return kernel(*args, **kwargs)
    run.__wrapped__ = kernel
    return run


def lease_by_kernel(graph):
    """Makes the kernels of a compiled graph lease their tensors. Returns whether all of them do now. If not, the
    caller of the graph must lease its inputs until it ends.
    """
    function = getattr(graph, "__func__", graph)
    if not isinstance(function, types.FunctionType):
        return False
    if function.__qualname__ == "align_inputs_from_check_idxs.<locals>.run":
        inner = function.__closure__[function.__code__.co_freevars.index("model")].cell_contents
        return lease_by_kernel(inner)
    names = function.__globals__
    if function.__name__ != "call" or not names.get("__name__", "").startswith(_GENERATED):
        return False
    if _MARK not in names:
        leases = not any(_takes_addresses(code) for code in _codes(names))
        if leases:
            _wrap_kernels(names)
        names[_MARK] = leases
    return names[_MARK]


def _codes(names):
    """Returns the code objects of all functions and methods that a generated module defines."""
    for value in list(names.values()):
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            if isinstance(member, types.FunctionType) and member.__globals__ is names:
                yield member.__code__


def _takes_addresses(code):
    return not _ADDRESSING.isdisjoint(code.co_names) or any(
        _takes_addresses(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _copy_if_misaligned(tensor):
    """Does what the function of that name in C++ does, which asks for the address of an input before a kernel uses it. If the
    input cannot be swapped in, an error would end the process there.
    """
    from torch._inductor.utils import copy_misaligned_inputs
    inputs = [tensor]
    copy_misaligned_inputs(inputs, [0])
    return inputs[0]


def _wrap_kernels(names):
    for name, value in list(names.items()):
        if isinstance(value, types.BuiltinFunctionType):
            if value.__name__ == "copy_if_misaligned":
                names[name] = _copy_if_misaligned
            elif not (value.__module__ or "").startswith("torch"):
                names[name] = leasing(value)
        elif type(value).__module__.startswith("torch._inductor.") and callable(getattr(value, "run", None)):
            names[name] = _Kernel(value)


def wrap_graphs(module):
    """Wraps the calls of compiled graphs, for the classes of `torch._inductor.output_code`."""
    for name in ("CompiledFxGraph", "CompiledAOTI"):
        cls = getattr(module, name, None)
        if cls is not None:
            cls.__call__ = _leasing_graph(cls.__call__)


def _leasing_graph(function):
    def __call__(self, inputs):
        # A thread without the hook leases nothing for PyTorch's own operations.
        if lease_by_kernel(self.current_callable) and _C.has_hook():
            return function(self, inputs)
        with _C.Held([x for x in inputs if isinstance(x, torch.Tensor)]):
            return function(self, inputs)
    __call__.__wrapped__ = function
    return __call__
