# SPDX-License-Identifier: Apache-2.0
"""Inference with models whose weights are larger than the device. The names are those of PyTorch Optimem."""
import torch

from . import _chosen as _C
from ._steps import begin_step

_HOOK = "_spillway_begin_step"


def page(model, max_layer_size=None):
    """Lets the weights of a model come and go while it computes results; each forward pass predicts the next.

    The model is put into eval mode and its parameters need no gradients from then on. Weights are only read: they
    are copied to the host once, and after that they leave without a copy.

    max_layer_size  bytes: refuse a model with a layer whose own parameters and buffers take up more
    """
    _install_and_enable()
    for name, layer in model.named_modules():
        # Of a view its own bytes: layers may share one storage, which is no layer's.
        size = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in _own_tensors(layer))
        if max_layer_size is not None and size > max_layer_size:
            raise ValueError(f"layer {name or '(the model itself)'} takes up {size} bytes, "
                             f"more than max_layer_size={max_layer_size}")
    model.eval().requires_grad_(False)
    for tensor in _all_tensors(model):
        _C.freeze(tensor, True)
    if not hasattr(model, _HOOK):
        setattr(model, _HOOK, model.register_forward_pre_hook(_before_pass))
    return model


def _before_pass(model, arguments):
    """Of the module, so that a model with this hook can be pickled."""
    begin_step()


def chunk(model, max_capacity):
    """Like `page`, but weights of up to `max_capacity` bytes stay on the device for good, the largest part that fits.

    Whole layers stay, those that are used first before others of their size.
    """
    page(model)
    left = int(max_capacity)
    layers = [{t.untyped_storage()._cdata: t for t in _own_tensors(m)} for m in model.modules()]

    def size_of(tensors):
        return sum(t.untyped_storage().nbytes() for t in tensors.values())
    kept = {}  # by storage: several layers may share one, which takes up its bytes once
    for layer in sorted(layers, key=size_of, reverse=True):
        layer = {storage: tensor for storage, tensor in layer.items() if storage not in kept}
        if size_of(layer) <= left:
            for tensor in layer.values():
                _C.bring_in(tensor, True)
            left -= size_of(layer)
            kept |= layer
    model.spillway_resident_bytes = size_of(kept)
    return model


def unpage(model):
    """Ends `page` or `chunk`: the weights may be written again. What `chunk` kept on the device stays there."""
    for tensor in _all_tensors(model):
        _C.freeze(tensor, False)
    hook = model.__dict__.pop(_HOOK, None)
    if hook is not None:
        hook.remove()
    return model


def _install_and_enable():
    import spillway_torch
    if not spillway_torch.get_enabled_lms():
        spillway_torch.set_enabled_lms(True)


def _own_tensors(layer):
    return [t.data for t in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
            if t.layout is torch.strided]


def _all_tensors(model):
    return [t.data for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided]
