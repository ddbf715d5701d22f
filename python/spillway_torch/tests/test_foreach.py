# SPDX-License-Identifier: Apache-2.0
"""Operators over lists of tensors, which the hook runs on parts of the lists, give the same results and errors as without
support: for lists of wrong lengths, empty tensors, mixed data types, and lists of which some elements require a gradient."""
import pytest
import torch
from torch.utils._pytree import tree_leaves

import spillway_torch
from spillway_torch import _chosen as _C

LENGTH, ELEMENTS = 6, 256
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.complex64)
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "momentum": 0.9, "dampening": 0., "weight_decay": 0.01,
           "lr_decay": 0.1}


@pytest.fixture(autouse=True)
def parts_of_two():
    """The hook cuts lists after two tensors of `ELEMENTS` numbers, or after each row of several lists."""
    _C.set_foreach_bytes(2 * 4 * ELEMENTS)
    yield
    _C.set_foreach_bytes(32 << 20)


def schemas(*prefixes):
    return [schema for schema in torch._C._jit_get_all_schemas()
            if schema.name.removeprefix("aten::").startswith(prefixes)]


FOREACH = schemas("_foreach_", "_amp_foreach_")
FUSED = schemas("_fused_adam", "_fused_sgd", "_fused_adagrad")


def named(schema):
    return f"{schema.name.removeprefix('aten::')}.{schema.overload_name or 'default'}"


def is_list(argument):
    return str(argument.type).startswith("List[")


class Case:
    """Makes the arguments of an operator. Each case changes something of what is made by default."""

    def __init__(self, name, length=lambda argument: LENGTH, tensor=lambda tensor, index, number: tensor,
                 packed=lambda scalars: scalars, amsgrad=False, is_scaled=False):
        self.name, self.length, self.tensor, self.packed = name, length, tensor, packed
        self.amsgrad, self.is_scaled = amsgrad, is_scaled

    def arguments_of(self, schema):
        torch.manual_seed(3)
        args, kwargs, lists = [], {}, 0
        for argument in schema.arguments:
            value = self.value_of(argument, schema, lists)
            lists += is_list(argument)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return args, kwargs

    def value_of(self, argument, schema, number):
        kind, name = str(argument.type), argument.name
        if kind == "List[Tensor]":
            length = 0 if name == "max_exp_avg_sqs" and not self.amsgrad else self.length(argument)
            shape = (16, 16) if schema.name == "aten::_foreach_mm" else (ELEMENTS,)
            return [self.tensor(torch.tensor(3.) if name == "state_steps" else torch.rand(shape) + 0.1, i, number)
                    for i in range(length)]
        if is_list(argument):
            return [1.5 + i for i in range(self.length(argument))]
        if kind in ("Tensor", "Optional[Tensor]"):
            if name == "scalars":
                return self.packed(torch.arange(1., self.length(argument) + 1))
            if name in ("found_inf", "inv_scale", "grad_scale"):
                is_given = kind == "Tensor" or self.is_scaled
                return torch.full((1,), 0. if name == "found_inf" else 0.25) if is_given else None
            return torch.tensor(NUMBERS.get(name, 2.5))
        if kind == "bool" and name == "amsgrad":
            return self.amsgrad
        if argument.has_default_value():
            return argument.default_value
        return {"float": NUMBERS.get(name), "bool": False}.get(kind, 1.5)


def lengths_of(schema):
    """Yields a case for each wrong length of each list."""
    for wrong in schema.arguments:
        if is_list(wrong) or wrong.name == "scalars":
            for length in (0, 1, 2, 3, 5, 7, 12):
                yield Case(f"{wrong.name} has {length}",
                           lambda argument, wrong=wrong, length=length: length if argument.name == wrong.name else LENGTH)


def with_gradient(*which, is_leaf):
    def tensor(tensor, index, _):
        if index not in which:
            return tensor
        return tensor.requires_grad_() if is_leaf else tensor.requires_grad_() * 1
    return tensor


CASES = [
    Case("as they should be"),
    Case("empty lists", length=lambda argument: 0),
    *[Case(f"empty tensors at {which}", tensor=lambda t, i, number, which=which: t.new_empty(0) if i in which else t)
      for which in ((0,), (2, 3), (5,), range(LENGTH))],
    *[Case(f"data types {step}", tensor=lambda t, i, number, step=step: t.to(DTYPES[(i + step * number) % len(DTYPES)]))
      for step in range(3)],
    *[Case(f"{dtype} at 4 of list {which}",
           tensor=lambda t, i, number, dtype=dtype, which=which: t.to(dtype) if (i, number) == (4, which) else t)
      for dtype in DTYPES for which in range(2)],
    *[Case(f"all {dtype}", tensor=lambda t, i, number, dtype=dtype: t.to(dtype)) for dtype in DTYPES],
    Case("one leaf requires a gradient", tensor=with_gradient(4, is_leaf=True)),
    Case("all leaves require a gradient", tensor=with_gradient(*range(LENGTH), is_leaf=True)),
    Case("one result requires a gradient", tensor=with_gradient(4, is_leaf=False)),
    Case("all results require a gradient", tensor=with_gradient(*range(LENGTH), is_leaf=False)),
]
SHAPES = [*[Case(f"list {which} has another shape at 4",
                 tensor=lambda t, i, number, which=which: torch.rand(7) if (i, number) == (4, which) else t)
            for which in range(3)]]
PACKED = [Case("column", packed=lambda scalars: scalars[:, None]), Case("row", packed=lambda scalars: scalars[None]),
          Case("with gaps", packed=lambda scalars: scalars.repeat_interleave(2)[::2]),
          Case("with gradient", packed=lambda scalars: scalars.requires_grad_()),
          *[Case(f"{dtype}", packed=lambda scalars, dtype=dtype: scalars.to(dtype)) for dtype in DTYPES]]
FUSED_CASES = [*CASES, Case("amsgrad", amsgrad=True), Case("scaled", is_scaled=True),
               Case("no momentum", length=lambda argument: 0 if argument.name == "momentum_buffer_list" else LENGTH)]


def described(value):
    if isinstance(value, torch.Tensor):
        node = value.grad_fn and value.grad_fn.name()
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return (str(value.dtype), value.shape, value.stride(), value.requires_grad, node, value._version,
                plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else [])
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    return repr(value)


def tensors_of(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def attempt(schema, case, is_supported):
    """Returns what a call returns and leaves in its arguments, and gradients; or the error, and what is in the arguments."""
    spillway_torch.set_enabled_lms(False)
    args, kwargs = case.arguments_of(schema)
    spillway_torch.set_enabled_lms(is_supported)
    if is_supported:
        for tensor in tensors_of((args, kwargs)):
            _C.bring_in(tensor, False)
        spillway_torch.reclaim_inactive()
    function = getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), schema.overload_name or "default")
    try:
        seen = ["results", result := function(*args, **kwargs)]
        outputs = [t for t in tensors_of(args if result is None else result) if t.grad_fn is not None]
        inputs = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
        if outputs and inputs:
            try:
                seen.append(torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True))
            except RuntimeError as error:
                seen.append(str(error))
    except (RuntimeError, IndexError, TypeError) as error:
        seen = ["error", type(error).__name__, str(error)]
    finally:
        spillway_torch.set_enabled_lms(True)
    return described([*seen, args, list(kwargs.values())])


def assert_same(schema, cases):
    different = [case.name for case in cases if attempt(schema, case, True) != attempt(schema, case, False)]
    assert not different


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schema", FOREACH, ids=named)
def test_lists_of_wrong_lengths(schema):
    if schema.name == "aten::_foreach_copy":
        pytest.skip("PyTorch itself reads beyond the shorter list")
    assert_same(schema, lengths_of(schema))


def test_a_wrong_length_changes_nothing_and_is_pytorchs_own_error(lms):
    ones = [torch.ones(ELEMENTS) for _ in range(4)]
    lms.evict()
    with pytest.raises(RuntimeError, match="Tensor list must have same number of elements as scalar list"):
        torch._foreach_mul_(ones, [10., 20.])
    with pytest.raises(RuntimeError, match="Tensor lists must have the same number of tensors, got 4 and 2"):
        torch._foreach_add_(ones, ones[:2])
    assert all(tensor.tolist() == [1.] * ELEMENTS for tensor in ones)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schema", FOREACH, ids=named)
def test_other_elements(schema):
    assert_same(schema, [*CASES, *SHAPES])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schema", [schema for schema in FOREACH if any(a.name == "scalars" and str(a.type) == "Tensor"
                                                                        for a in schema.arguments)], ids=named)
def test_scalars_in_one_tensor(schema):
    assert_same(schema, PACKED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schema", FUSED, ids=named)
def test_fused_optimizers(schema):
    # Before 2.15 PyTorch's own kernel left arbitrary bits in momentum buffers of bfloat16 (its issue 191763).
    is_arbitrary = schema.name.startswith("aten::_fused_sgd") and torch.__version__ < (2, 15)
    assert_same(schema, [case for case in FUSED_CASES if not (is_arbitrary and case.name == f"all {torch.bfloat16}")])


def test_lists_with_scalars_in_one_tensor_are_cut(lms):
    many = [torch.full((1 << 20,), float(i)) for i in range(70)]  # 280 MiB, where 256 fit
    _C.set_foreach_bytes(32 << 20)
    lms.evict()
    torch._foreach_addcmul_(many, many, many, torch.arange(70.))
    lms.evict()
    assert [tensor[-1].item() for tensor in many] == [i + i * i * i for i in range(70)]
