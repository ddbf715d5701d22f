# SPDX-License-Identifier: Apache-2.0
"""Wrappers for code that uses a tensor's bytes without an operation.

NumPy arrays and buffers of a tensor become copies: TensorFlow would give out the tensor's own memory, which does not
exist while the tensor is swapped out. Tensors of other allocators are given out as always.
"""
import faulthandler
import functools

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import composite_tensor, ops
from tensorflow.python.ops import script_ops

from ._load import C

_is_installed = False
_earlier_tasks = set()  # names of this process as a task, before it was connected under another one
_base = ops._EagerTensorBase  # the base class of all eager tensors
_numpy_of = _base._numpy
_to_dlpack = pywrap_tfe.TFE_ToDlpackCapsule


class OutOfMemoryError(tf.errors.ResourceExhaustedError, MemoryError):
    """A tensor whose bytes are used without an operation does not fit on the device.

    It is a MemoryError, too, since an operation that calls a Python function reports that as ResourceExhaustedError, and
    errors of other classes as unknown ones.
    """


def address_of(tensor):
    """Returns the address of the memory that a tensor lies in, which a slice shares with the tensor that it was cut
    from; 0 for tensors that are not the library's.
    """
    if not isinstance(tensor, _base):
        return 0
    if C.kind == "gpu":
        return C.base_of(_gpu_address_of(tensor))
    if not _is_memory_here(tensor.device) or not tensor.dtype.is_numpy_compatible or tensor.dtype == tf.string:
        return 0
    return _base_of_array(_numpy_of(tensor))  # an array of strings would be a copy, which takes long


def _base_of_array(array):
    """Does the same by means of NumPy's view of the tensor's memory, which is not read. A scalar has no array; it is
    small, so it is never swapped out.
    """
    return C.base_of(array.__array_interface__["data"][0]) if isinstance(array, np.ndarray) else 0


def _gpu_address_of(tensor):
    if tensor.dtype in (tf.string, tf.resource, tf.variant) or not tensor.device.endswith("GPU:0"):
        return 0
    return C.address_in(_to_dlpack(tensor))


def _copy_of(tensor):
    """Returns a copy of one of the library's tensors as an array; None for other tensors."""
    address = address_of(tensor)
    if not address:
        return None
    with C.Held([address]):
        return _numpy_of(tensor).copy()


def _numpy(self):
    copy = _copy_of(self)
    return _numpy_of(self) if copy is None else copy


def _copying_once(function):
    @functools.wraps(function)
    def numpy(self):
        copy = _copy_of(self)
        return function(self) if copy is None else copy
    return numpy


def _copying_arguments(function):
    """Wraps the call of a Python function from a graph, whose arguments are views of tensors, or tensors."""
    @functools.wraps(function)
    def call(self, token, device, args):
        return function(self, token, device, [_copy_of_view(arg) for arg in args])
    return call


def _copy_of_view(array):
    """Returns a copy of an array that is a view of one of the library's tensors; other objects as they are."""
    address = _base_of_array(array)
    if not address:
        return array
    with C.Held([address]):
        return array.copy()


def _keeping(function):
    @functools.wraps(function)
    def call(tensor, *args, **kwargs):
        if address := address_of(tensor):
            C.keep(address)
        return function(tensor, *args, **kwargs)
    return call


def _task_of(device):
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.task or 0


# The answers are cached until the program is connected anew: asking takes longer than many operations.
@functools.lru_cache(maxsize=None)
def _is_elsewhere(device):
    """Whether a device, whose name may be incomplete, belongs to another task."""
    job, task = _task_of(device)
    here = _task_of(context.context().host_address_space())
    return (job or here[0], task) != here


@functools.lru_cache(maxsize=None)
def _comes_from_elsewhere(device):
    """Does the same for the device of a tensor, which names the task that this process was when the tensor was made."""
    return _is_elsewhere(device) and _task_of(device) not in _earlier_tasks


@functools.lru_cache(maxsize=None)
def _is_memory_here(device):
    """Whether memory on a device is in this process. It is not on a device of another task. On a device that stands
    for several, as that of packed tensors does, the memory cannot be asked for.
    """
    return tf.DeviceSpec.from_string(device).device_type == "CPU" and not _comes_from_elsewhere(device)


def _keeping_what_is_sent(function):
    """Wraps functions that run operations or copy a tensor. If another task runs the operation, its operands are
    serialized without an operation here, so they must stay.
    """
    @functools.wraps(function)
    def execute(*args, **kwargs):
        operands = [leaf for leaf in tf.nest.flatten(args) if isinstance(leaf, (_base, tf.Variable))]
        here = [operand for operand in operands if not _comes_from_elsewhere(operand.device)]
        scopes = [context.context().device_name, *(arg for arg in args[1:2] if str(arg).startswith("/"))]
        if len(here) < len(operands) or any(map(_is_elsewhere, scopes)):
            for address in [address_of(value) for operand in here for value in values_of(operand)]:
                if address:
                    C.keep(address)
        return function(*args, **kwargs)
    return execute


_SENDERS = [(pywrap_tfe, "TFE_Py_Execute"), (pywrap_tfe, "TFE_Py_ExecuteCancelable"), (pywrap_tfe, "TFE_Py_FastPathExecute"),
            (ops.EagerTensor, "_copy_to_device")]


def _keeping_from_now_on(function):
    """Wraps functions that connect the program to other tasks."""
    @functools.wraps(function)
    def connect(self, *args, **kwargs):
        for module, name in _SENDERS:
            send = getattr(module, name)
            if not hasattr(send, "__wrapped__"):
                setattr(module, name, _keeping_what_is_sent(send))
        if self._initialized:
            _earlier_tasks.add(_task_of(self.host_address_space()))
        try:
            return function(self, *args, **kwargs)
        finally:
            for answers in (_is_elsewhere, _comes_from_elsewhere, _is_memory_here):
                answers.cache_clear()
    return connect


def _handling_first(function):
    """Wraps `faulthandler.enable`, whose handler would otherwise be called in place of this module's."""
    @functools.wraps(function)
    def enable(*args, **kwargs):
        function(*args, **kwargs)
        C.handle_faults()
    return enable


def values_of(thing):
    """Returns the eager tensors behind a tensor or a variable, in a list. A ragged or sparse tensor consists of several."""
    if isinstance(thing, _base):
        return [thing]
    if isinstance(thing, tf.Variable):
        value = _value_of(thing)
    elif isinstance(thing, composite_tensor.CompositeTensor):
        parts = tf.nest.flatten(thing, expand_composites=True)
        return [value for part in parts if part is not thing for value in values_of(part)]
    else:
        value = getattr(thing, "value", None)  # of a Keras variable
        value = value() if callable(value) else value
        if isinstance(value, tf.Variable):
            return values_of(value)
    return [value] if isinstance(value, _base) else []


def _value_of(variable):
    """Returns the tensor that lies in a variable's memory. Once a variable has had a sparse update, `value` would return a
    copy. The device is named, since the tensor would be copied to another one.
    """
    read = getattr(variable, "read_value_no_copy", None)
    if read is None:
        return variable.value()
    with tf.device(variable.device):
        return read()


def install():
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    if C.kind == "cpu":  # a GPU only gives out copies
        _base.numpy = _copying_once(_base.numpy)
        _base._numpy = _numpy
        C.wrap_buffer(ops.EagerTensor, _copy_of)
        script_ops.FuncRegistry.__call__ = _copying_arguments(script_ops.FuncRegistry.__call__)
        faulthandler.enable = _handling_first(faulthandler.enable)
        for name in ("set_server_def", "update_server_def"):
            setattr(context.Context, name, _keeping_from_now_on(getattr(context.Context, name)))
    # Called by all functions that export a tensor, which a program may have imported already.
    pywrap_tfe.TFE_ToDlpackCapsule = _keeping(_to_dlpack)
