# SPDX-License-Identifier: Apache-2.0
"""Calls PyTorch's operators with PyTorch's own samples, without support and with it, where all tensors are evicted before
each call, and compares the results."""
import random
import zlib

import torch
from torch.utils._pytree import tree_leaves, tree_map

import spillway_torch
from spillway_torch import _chosen as _C

#: Operators whose results differ between two runs even without support, since they contain uninitialised memory.
NOT_REPEATABLE = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
                  "resize_", "resize_as_"}


def operators():
    from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def on_tensors(function, values):
    return tree_map(lambda value: function(value) if isinstance(value, torch.Tensor) else value, values)


def copy_of(tensor):
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    # Copies the storage and makes the same view of it, since operators may look at strides. The storage is copied by an
    # operation: UntypedStorage.clone() would allocate memory that never leaves.
    old = tensor.detach().untyped_storage()
    old_bytes = torch.empty(0, dtype=torch.uint8, device=old.device).set_(old, 0, (old.nbytes(),), (1,))
    whole = torch.empty(old.nbytes(), dtype=torch.uint8, device=old.device).copy_(old_bytes).untyped_storage()
    twin = torch.empty(0, dtype=tensor.dtype, device=old.device).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        twin = twin.conj()
    if tensor.is_neg():
        twin = torch._neg_view(twin)
    return twin.requires_grad_(tensor.requires_grad)


def send_away(values):
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            _C.bring_in(value, False)  # counts as a use by an operation, so that the tensor may leave
    spillway_torch.reclaim_inactive()


def described(values):
    def one(value):
        if not isinstance(value, torch.Tensor):
            return repr(value)
        value = value.detach()
        if value.is_quantized:
            value = value.int_repr()
        if value.layout is not torch.strided:
            value = value.to_dense()
        value = value.resolve_conj().resolve_neg().contiguous().cpu()
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tree_map(one, values)


class Attempt:
    """A call of an operator with one sample, in one of the forms of `forms_of`. `failure` returns an error that the operator
    did not raise, such as one of a kernel that runs later."""

    def __init__(self, function, sample, form, failure):
        self.function, self.sample, self.form, self.failure = function, sample, form, failure

    def run(self, is_supported):
        """Returns the results and gradients as bytes, or the error."""
        spillway_torch.set_enabled_lms(False)
        x, args, kwargs = on_tensors(copy_of, (self.sample.input, self.sample.args, self.sample.kwargs))
        if self.form != "forward":
            x, args, kwargs = on_tensors(lambda tensor: tensor.detach(), (x, args, kwargs))
        if self.form == "too small":
            x = torch.ones((), dtype=x.dtype, device=x.device)
        torch.manual_seed(5)
        try:
            if self.form.startswith("out"):
                like = self.function(x, *args, **kwargs)
                kwargs["out"] = on_tensors(
                    torch.zeros_like if self.form == "out" else lambda t: torch.empty(0, dtype=t.dtype, device=t.device), like)
                torch.manual_seed(5)
            spillway_torch.set_enabled_lms(is_supported)
            rest = is_supported and (lambda *values: send_away(values)) or (lambda *values: None)
            rest(x, args, kwargs)
            result = self.function(x, *args, **kwargs)
            rest()
            results = [result, x] if self.form != "forward" else [result]
            if self.form == "forward":
                outputs = [t for t in tree_leaves(result)
                           if isinstance(t, torch.Tensor) and t.requires_grad and t.layout is torch.strided]
                inputs = [t for t in tree_leaves((x, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
                if outputs and inputs:
                    results.append(torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs],
                                                       allow_unused=True))
                    rest()
            seen = described(results)
            return self.failure() or seen
        except Exception as error:
            self.failure()
            return type(error).__name__, str(error)
        finally:
            spillway_torch.set_enabled_lms(True)


def samples_of(op, device, dtype, takes_all):
    spillway_torch.set_enabled_lms(False)
    torch.manual_seed(1)
    try:
        samples = list(op.sample_inputs(device, dtype, requires_grad=op.supports_autograd and dtype.is_floating_point))
    finally:
        spillway_torch.set_enabled_lms(True)
    if takes_all or len(samples) <= 2:
        return samples
    return [samples[0], random.Random(zlib.crc32(op.formatted_name.encode())).choice(samples[1:])]


def forms_of(op, sample):
    yield op.op, "forward"
    if any(isinstance(value, torch.Tensor) and value.requires_grad
           for value in tree_leaves((sample.input, sample.args, sample.kwargs))):
        yield op.op, "detached"  # some operators run other code if no gradient is needed
    if op.inplace_variant is not None:
        yield op.inplace_variant, "in-place"
        if isinstance(sample.input, torch.Tensor) and sample.input.dim() != 0:
            yield op.inplace_variant, "too small"
    if op.supports_out and op.name != "_batch_norm_with_update":  # it has several `out` arguments with other names
        yield op.op, "out"
        yield op.op, "out that grows"


def differences_of(chosen, device, takes_all, failure=lambda: ""):
    """Returns the differences from runs without support, and how many calls were compared. Takes all samples and data
    types, or a few."""
    differences, checks = [], 0
    for op in chosen:
        if op.name in NOT_REPEATABLE:
            continue
        dtypes = sorted(op.supported_dtypes(device), key=lambda dtype: (dtype is not torch.float32, str(dtype)))
        if not takes_all:
            dtypes = dtypes[:1] + [dtype for dtype in dtypes[1:] if dtype in (torch.int64, torch.complex64)][:1]
        for dtype in dtypes:
            for sample in samples_of(op, device, dtype, takes_all):
                for function, form in forms_of(op, sample):
                    attempt = Attempt(function, sample, form, failure)
                    wanted, got = attempt.run(False), attempt.run(True)
                    checks += 1
                    if got != wanted and attempt.run(False) == wanted:
                        differences.append((op.formatted_name, str(dtype), form, str(wanted)[:200], str(got)[:200]))
    return differences, checks
