# SPDX-License-Identifier: Apache-2.0
"""Shims for code that uses a tensor's bytes without an operation.

A NumPy array of a tensor, or a buffer of one, is a copy: TensorFlow would give out the tensor's own memory, which is
not there when the tensor leaves. Tensors of other allocators, and small ones, are given out as ever.
"""
import functools

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from ._load import C

_is_installed = False
_base = ops._EagerTensorBase  # what every eager tensor is
_numpy_of = _base._numpy
_to_dlpack = tf.experimental.dlpack.to_dlpack


def _array(tensor):
    """NumPy's view of a tensor's memory, wherever its bytes are: nothing is read yet."""
    found = _numpy_of(tensor)
    return found if isinstance(found, np.ndarray) and found.nbytes >= C.least_bytes() else None


def address_of(tensor):
    """Where a tensor's memory begins; 0 for tensors that are not the library's."""
    if not isinstance(tensor, _base):
        return 0
    if C.kind == "gpu":
        address = _gpu_address_of(tensor)
    else:
        array = _array(tensor) if tensor.dtype.is_numpy_compatible else None
        address = 0 if array is None else array.__array_interface__["data"][0]
    return address if C.owns(address) else 0


def _gpu_address_of(tensor):
    if tensor.dtype in (tf.string, tf.resource, tf.variant) or not tensor.device.endswith("GPU:0"):
        return 0
    return C.address_in(_to_dlpack(tensor))


def _copy_of(tensor):
    """A copy of a tensor of the library's as an array; None for others."""
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


def _keeping(function):
    @functools.wraps(function)
    def call(tensor, *args, **kwargs):
        if address := address_of(tensor):
            C.keep(address)
        return function(tensor, *args, **kwargs)
    return call


def values_of(thing):
    """Eager tensors behind a tensor or a variable."""
    if isinstance(thing, _base):
        return [thing]
    value = getattr(thing, "value", thing)
    value = value() if callable(value) else value  # a tf.Variable's is a function, a Keras variable's is not
    if isinstance(value, tf.Variable):
        return values_of(value)
    return [value] if isinstance(value, _base) else []


def install():
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    if C.kind == "cpu":  # what a GPU gives out is a copy
        _base.numpy = _copying_once(_base.numpy)
        _base._numpy = _numpy
        C.wrap_buffer(ops.EagerTensor, _copy_of)
    _base.__dlpack__ = _keeping(_base.__dlpack__)
    tf.experimental.dlpack.to_dlpack = _keeping(tf.experimental.dlpack.to_dlpack)
