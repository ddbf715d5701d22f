# SPDX-License-Identifier: Apache-2.0
"""Inference with models whose weights need more memory than the device has. The names are those of PyTorch Optimem."""
import torch

from . import _chosen as _C
from ._steps import begin_step

_HOOK = "_spillway_begin_step"


def page(model, max_layer_size=None):
    """Lets the weights of a model be swapped in and out during inference. Each forward pass predicts the next one.
    Switches support on if it is off. The result of `torch.jit.script` takes no hooks, so that its passes are not seen:
    call `begin_step` before each.

    The model is put into eval mode, and its parameters require no gradients from then on. Weights are only read, so
    they are copied to the host once, and are dropped without a copy after that.

    max_layer_size  bytes: refuse a model with a layer whose own parameters and buffers take up more; default: no
                    limit

    Returns the model. Raises ValueError if a layer is too large, or if it is a lazy one that has no weights yet.
    """
    _install_and_enable()
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no size yet: call the model once before page()")
    for name, layer in model.named_modules():
        # A view counts with its own bytes: layers may share one storage, which belongs to none of them.
        size = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in _own_tensors(layer))
        if max_layer_size is not None and size > max_layer_size:
            raise ValueError(f"layer {name or '(the model itself)'} takes up {size} bytes, "
                             f"more than max_layer_size={max_layer_size}")
    model.eval()
    for parameter in model.parameters():  # script modules do not have `requires_grad_`
        parameter.requires_grad_(False)
    for tensor in _all_tensors(model):
        _C.freeze(tensor, True)
    if _HOOK not in vars(model) and not isinstance(model, torch.jit.RecursiveScriptModule):
        vars(model)[_HOOK] = model.register_forward_pre_hook(_before_pass)
    return model


def _before_pass(model, arguments):
    """Marks the start of a step. A function of the module, so that a model with this hook can be pickled."""
    begin_step()


def chunk(model, max_capacity):
    """Like `page`, but keeps the weights of some layers on the device for good.

    Layers are kept whole. The largest are chosen first, and of layers of the same size those that come first in the
    model. A layer that does not fit into what is left is skipped.

    max_capacity  most bytes to keep on the device

    Returns the model, whose member `spillway_resident_bytes` says how many bytes are kept.
    """
    left = int(max_capacity)
    page(model)
    layers = [{t.untyped_storage()._cdata: t for t in _own_tensors(m)} for m in model.modules()]

    def size_of(tensors):
        return sum(t.untyped_storage().nbytes() for t in tensors.values())
    kept = {}  # by storage, since several layers may share one, which counts once
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
    """Ends `page` or `chunk`: the weights may be written again. Those that `chunk` has kept stay on the device. Eval
    mode and `requires_grad` are left as they are. Returns the model.
    """
    for tensor in _all_tensors(model) if _C.is_installed() else ():
        _C.freeze(tensor, False)
    hook = vars(model).pop(_HOOK, None)
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
