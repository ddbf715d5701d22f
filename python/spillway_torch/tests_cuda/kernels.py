# SPDX-License-Identifier: Apache-2.0
"""Kernels for a CUDA device without cores: what they would compute is computed on the CPU and copied back.

With the stand-in for the CUDA runtime (tests/support/fake_cuda_device.cpp) tensors, streams and copies of the
unpatched PyTorch work as on a GPU, and kernels cannot be launched. Each operation registered here copies its
operands to the host, calls the CPU's kernel, and copies what it wrote or made to the device.
"""
import os
import warnings

import torch
from torch.utils._pytree import tree_map

NAMES = """
    add.Tensor add_.Tensor add.out sub.Tensor mul.Tensor mul_.Tensor mul.Scalar mul.out div.Tensor div_.Tensor div.Scalar neg
    sum sum.dim_IntList mean mean.dim sqrt sqrt_ rsqrt lerp_.Scalar addcmul_ addcdiv_ pow.Tensor_Scalar exp log abs maximum
    fill_.Scalar fill_.Tensor zero_ relu relu_ threshold_backward gelu gelu_backward
    mm mm.out addmm addmm.out bmm bmm.out convolution convolution_backward
    native_batch_norm native_batch_norm_backward native_layer_norm native_layer_norm_backward
    _log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward mse_loss mse_loss_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    _foreach_add_.Scalar _foreach_add_.List _foreach_mul_.Scalar _foreach_lerp_.Scalar _foreach_addcmul_.Scalar
    _foreach_addcdiv_.Scalar _foreach_addcdiv_.ScalarList _foreach_div_.ScalarList _foreach_sqrt
    _amp_foreach_non_finite_check_and_unscale_ embedding embedding_dense_backward
    eq.Tensor ne.Scalar all any masked_fill_.Scalar cat argmax index.Tensor index_select arange.start_out
    add.Scalar sub.Scalar reciprocal erf sin cos minimum clamp clamp_min where.self masked_fill.Scalar masked_fill.Tensor
    leaky_relu elu silu mish tanh sigmoid softplus hardtanh hardswish hardsigmoid _softmax _safe_softmax native_group_norm
    avg_pool2d baddbmm silu_backward tanh_backward sigmoid_backward _softmax_backward_data select_backward slice_backward
    sub_.Tensor add_.Scalar sub_.Scalar mul_.Scalar div_.Scalar neg_ exp_ clamp_ clamp_min_ masked_fill_.Tensor leaky_relu_
    elu_ silu_ tanh_ sigmoid_ hardtanh_ hardswish_ gt.Scalar ge.Scalar
""".split()

#: Operations that draw random numbers, from the counter of a generator of the device.
DRAWS = "uniform_ normal_ exponential_ random_ random_.from random_.to bernoulli_.float bernoulli_.Tensor".split()


def is_stand_in():
    return os.environ.get("SPILLWAY_CUDA_STAND_IN") == "1"


def _is_on_device(value):
    return isinstance(value, torch.Tensor) and value.is_cuda


def _all_of_storage(tensor):
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,))


def _to_host(tensor):
    """Also of views that are not contiguous, for which PyTorch would launch a kernel."""
    everything = _all_of_storage(tensor)
    copy = torch.empty(everything.shape, dtype=tensor.dtype, device="cpu").copy_(everything)
    return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _to_device(tensor):
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        tensor = tensor.contiguous()
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
    return made.copy_(tensor)


def _write_back(tensor, copy):
    everything = _all_of_storage(tensor)
    everything.copy_(copy.as_strided(everything.size(), (1,), 0))


def _kernel(op):
    writes = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]
    names = [a.name for a in op._schema.arguments]

    def run(*args, **kwargs):
        with torch.no_grad():
            given = {**dict(zip(names, args)), **kwargs}
            copies = tree_map(lambda v: _to_host(v) if _is_on_device(v) else v, given)
            copies = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in copies.items()}
            positional = [copies[n] for n in names[:len(args)]]
            result = op(*positional, **{n: copies[n] for n in kwargs})
            written = {}
            for name, is_written in zip(names, writes):
                several = given.get(name) if isinstance(given.get(name), (list, tuple)) else [given.get(name)]
                if is_written and all(_is_on_device(one) for one in several):
                    for one, copy in zip(several, copies[name] if several is given.get(name) else [copies[name]]):
                        _write_back(one, copy)
                        written[id(copy)] = one
                elif not is_written and name in ("running_mean", "running_var") and _is_on_device(given.get(name)):
                    _write_back(given[name], copies[name])  # written without the schema's saying so
            return tree_map(lambda v: v if not isinstance(v, torch.Tensor) else
                            written[id(v)] if id(v) in written else _to_device(v), result)
    return run


def _draw(op):
    """As the device's generators do: numbers depend on a seed and on a counter, which moves on by four or more."""
    kernel = _kernel(op)

    def run(*args, generator=None, **kwargs):
        generator = generator or torch.cuda.default_generators[torch.cuda.current_device()]
        counter = generator.get_offset()
        generator.set_offset(counter + 4)
        numbers = torch.Generator("cpu").manual_seed(hash((generator.initial_seed(), counter)) % (1 << 63))
        return kernel(*args, generator=numbers, **kwargs)
    return run


_library = None


def install():
    """Once, before the first operation."""
    global _library
    if _library is not None or not is_stand_in():
        return
    torch.backends.cudnn.enabled = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # by a kernel
    _library = torch.library.Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in NAMES + DRAWS:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _library.impl(name, (_draw if name in DRAWS else _kernel)(op), allow_override=True)
