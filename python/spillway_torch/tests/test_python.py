# SPDX-License-Identifier: Apache-2.0
"""Code outside of operations: addresses that Python code gets, and Python functions that PyTorch calls."""
import copy
import ctypes
import threading
from functools import partial

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import spillway_torch
from conftest import outside


def test_numpy_shares_memory(lms):
    a = torch.arange(100.)
    lms.evict()
    array = a.numpy()
    lms.evict()
    array[7] = -1
    assert a[7].item() == -1 and not lms.is_away(a)


def test_numpy_of_a_view_keeps_the_base(lms):
    a = torch.arange(100.)
    lms.evict()
    array = a.view(10, 10)[3].numpy()
    lms.evict()
    array[:] = 5
    assert a[35].item() == 5


def test_numpy_of_a_subclass_that_returns_something_else(lms):
    class WithUnit(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            return (result, "m") if func.__name__ == "numpy" else result

    a = torch.arange(100.)
    b = a.as_subclass(WithUnit)
    lms.evict()
    array, unit = b.numpy()
    lms.evict()
    array[7] = -1
    assert unit == "m" and a[7].item() == -1 and not lms.is_away(a)


@pytest.mark.parametrize("view", [torch.conj, lambda t: t.conj().imag])
def test_numpy_is_forced_on_tensors_whose_bytes_differ_from_their_values(lms, view):
    a = view(torch.complex(torch.arange(100.), torch.arange(100.)).requires_grad_())
    lms.evict()
    array = a.numpy(force=True)
    lms.evict()
    assert array[3] == view(torch.tensor(3 + 3j)).item()


@pytest.mark.parametrize("convert", [numpy.asarray, numpy.array, lambda t: numpy.add(t, 0)])
def test_numpy_functions_take_tensors(lms, convert):
    a = torch.arange(100.)
    lms.evict()
    assert convert(a).sum() == 4950


def test_dlpack(lms):
    a = torch.arange(100.)
    lms.evict()
    array = numpy.from_dlpack(a)
    lms.evict()
    a.add_(1)
    assert array[0] == 1
    b = torch.arange(100.)
    lms.evict()
    c = torch.from_dlpack(b)
    lms.evict()
    c.add_(1)
    assert b[0].item() == 1
    d = torch.arange(100.)
    lms.evict()
    e = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(d))
    lms.evict()
    e.add_(1)
    assert d[99].item() == 100


@pytest.fixture(params=[name for name in ("_dlpack_exchange_api", "_const_dlpack_exchange_api") if hasattr(torch._C, name)])
def exchange(request):
    """Two functions of PyTorch's DLPack exchange table, by which C code takes a tensor: one shares its memory, the other one
    returns its address."""
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = pointer_of(getattr(torch._C, request.param)(), b"dlpack_exchange_api")
    share, lend = ((ctypes.c_void_p * 7).from_address(table)[i] for i in (3, 5))  # after the header and the allocator
    function = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)

    def address_of(take, tensor):
        out = (ctypes.c_void_p * 8)()  # room for a DLTensor, which begins with the address, or for a pointer
        assert take(tensor, out) == 0
        return out[0]
    return partial(address_of, function(share)), partial(address_of, function(lend))


def test_code_in_c_has_the_address_of_a_tensor_for_good(lms, exchange):
    share, lend = exchange
    a, b = torch.arange(100, dtype=torch.int32), torch.arange(100, dtype=torch.int32)
    lms.evict()
    assert share(a) != 0
    address = lend(b)
    lms.evict()
    assert not lms.is_away(a) and not lms.is_away(b)
    assert list((ctypes.c_int32 * 100).from_address(address)) == list(range(100)) and b.data_ptr() == address


def test_code_in_c_has_the_address_of_a_tensor_inside_of_hold(lms, exchange):
    _, lend = exchange
    a = torch.arange(100, dtype=torch.int32)
    lms.evict()
    with spillway_torch.hold():
        address = lend(a)
        lms.evict()
        assert list((ctypes.c_int32 * 100).from_address(address)) == list(range(100))
    lms.evict()
    assert lms.is_away(a)


def test_data_ptr(lms):
    a = torch.arange(100, dtype=torch.int32)
    lms.evict()
    p = a.data_ptr()
    lms.evict()
    assert list((ctypes.c_int32 * 100).from_address(p)) == list(range(100))
    assert a.data_ptr() == p


def test_data_ptr_of_a_storage(lms):
    a = torch.arange(100, dtype=torch.int32)
    lms.evict()
    p = a.untyped_storage().data_ptr()
    lms.evict()
    assert list((ctypes.c_int32 * 100).from_address(p)) == list(range(100))


def test_bytes_of_a_storage(lms):
    a = torch.tensor([1, 2, 3], dtype=torch.uint8)
    storage = a.untyped_storage()
    lms.evict()
    assert storage.tolist() == [1, 2, 3]
    lms.evict()
    assert storage[1] == 2 and bytes(storage) == b"\1\2\3"
    lms.evict()
    storage[0] = 9
    lms.evict()
    assert a.tolist() == [9, 2, 3]
    other = storage.clone()
    lms.evict()
    assert other.tolist() == [9, 2, 3] and copy.deepcopy(storage).tolist() == [9, 2, 3]
    lms.evict()
    storage.fill_(4)
    assert a.tolist() == [4] * 3


def test_a_slice_of_a_storage_shares_its_memory(lms):
    a = torch.arange(100, dtype=torch.uint8)
    part = a.untyped_storage()[10:20]
    twin = torch.empty(0, dtype=torch.uint8).set_(part)
    lms.evict()
    other = torch.zeros(4096)  # would reuse the memory if it had been freed
    a += 1
    lms.evict()
    assert part.tolist() == list(range(11, 21)) == twin.tolist()
    part[0] = 77
    lms.evict()
    assert a[10].item() == 77 and other.sum().item() == 0


def test_typed_storages(lms):
    a = torch.arange(10.)
    storage = a.storage()
    lms.evict()
    assert storage[3] == 3. and storage.tolist() == list(range(10))
    lms.evict()
    storage[3] = 8.
    lms.evict()
    assert a[3].item() == 8.


def test_cuda_array_interface_is_refused_as_ever(lms):
    a = torch.ones(10)
    lms.evict()
    with pytest.raises(AttributeError, match="Can't get __cuda_array_interface__ on non-CUDA"):
        a.__cuda_array_interface__
    assert not hasattr(a, "__cuda_array_interface__")


def test_hold_gives_an_address_for_as_long_as_it_lasts(lms):
    a, b = torch.arange(100.), torch.arange(100.)
    lms.evict()
    with spillway_torch.hold(a, b):
        lms.evict()
        assert lms.view(a)["has_address"] and lms.view(b)["has_address"]
    lms.evict()
    assert lms.is_away(a) and lms.is_away(b)


def test_a_hold_may_be_entered_again_before_it_ends(lms):
    x = torch.arange(64.)
    hold = spillway_torch.hold(x)
    with hold:
        with hold:
            pass
        lms.evict()
        assert not lms.is_away(x)
    lms.evict()
    assert lms.is_away(x)


def test_several_threads_may_be_inside_of_one_hold(lms):
    x = torch.arange(64.)
    hold = spillway_torch.hold(x)
    is_inside, may_end = threading.Event(), threading.Event()

    def work():
        with hold:
            is_inside.set()
            may_end.wait()
    thread = threading.Thread(target=work)
    with hold:
        thread.start()
        is_inside.wait()
    lms.evict()
    assert not lms.is_away(x)
    may_end.set()
    thread.join()
    lms.evict()
    assert lms.is_away(x)


def test_hold_and_keep_take_collections_storages_and_modules(lms):
    a, b, c, d = (torch.arange(100.) for _ in range(4))
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(100))
    named = [a, b, c, d, *model.parameters(), model[1].running_mean]
    objects = [a, (b, {"c": c, "none": None})], d.untyped_storage(), model
    lms.evict()
    with spillway_torch.hold(*objects):
        lms.evict()
        assert all(lms.view(tensor)["has_address"] for tensor in named)
    lms.evict()
    assert all(map(lms.is_away, named))

    assert spillway_torch.keep(objects) is objects
    lms.evict()
    assert all(lms.view(tensor)["kept"] and lms.view(tensor)["has_address"] for tensor in named)


@pytest.mark.parametrize("call", [spillway_torch.hold, spillway_torch.keep])
def test_hold_and_keep_refuse_what_they_do_not_know(call):
    with pytest.raises(TypeError, match=rf"spillway_torch.{call.__name__}\(\): tensors, modules, .* not a generator"):
        call(torch.nn.Linear(2, 2).parameters())


def test_what_is_named_inside_hold_stays_though_no_operation_has_used_it_before(lms):
    with spillway_torch.hold(torch.ones(1 << 12)):
        lent, kept = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(1 << 16)
        array = lent.numpy()
        spillway_torch.keep(kept)
        named = torch.zeros(1 << 16)
        with spillway_torch.hold(named):
            pass
        lms.evict()
        assert lms.is_ours(named) and not lms.is_away(named)
    lent.fill_(3)
    kept.fill_(4)
    lms.evict()
    assert not lms.is_away(lent) and not lms.is_away(kept) and lms.is_away(named)
    array[:] += 4
    assert lent[5] == 7


def test_an_address_asked_for_inside_hold_is_good_until_its_end(lms):
    a = torch.arange(100, dtype=torch.int32)
    lms.evict()
    with spillway_torch.hold():
        p, q = a.data_ptr(), a.untyped_storage().data_ptr()
        lms.evict()
        assert p == q and list((ctypes.c_int32 * 100).from_address(p)) == list(range(100))
    lms.evict()
    assert lms.is_away(a)


def test_keep_is_for_good(lms):
    a = spillway_torch.keep(torch.arange(100.))
    lms.evict()
    assert not lms.is_away(a) and lms.view(a)["kept"]


def test_a_collection_that_contains_itself_is_an_error_each_time(lms):
    def depth(n):
        return 0 if n == 0 else 1 + depth(n - 1)
    endless = []
    endless.append(endless)
    for _ in range(3):
        with pytest.raises(RecursionError):
            spillway_torch._C.Held(endless)
        assert depth(300) == 300  # none of the permitted depth is lost


def test_iteration_comparison_and_conversion(lms):
    a = torch.arange(5.)
    lms.evict()
    assert [float(x) for x in a] == [0., 1., 2., 3., 4.]
    lms.evict()
    assert 3. in a and torch.equal(a, a.clone())
    lms.evict()
    assert torch.tensor([a[0], a[1]]).tolist() == [0., 1.]
    lms.evict()
    assert torch.as_tensor(a.tolist()).tolist() == [0., 1., 2., 3., 4.]
    lms.evict()
    assert format(a[2]) == "2.0" and int(a[3]) == 3 and [10, 20, 30][torch.tensor(1)] == 20


class Scaled(torch.Tensor):
    """A wrapper subclass without storage. Its operations run on the tensor that it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        spillway_torch.reclaim_inactive()
        plain = tree_map(lambda x: x.inner if isinstance(x, Scaled) else x, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        spillway_torch.reclaim_inactive()
        return tree_map(lambda x: Scaled(x) if isinstance(x, torch.Tensor) else x, out)


def test_subclasses_with_inner_tensors(lms):
    s = Scaled(torch.arange(100.))
    lms.evict()
    t = (s * 2 + s).relu()
    lms.evict()
    assert lms.is_away(t.inner)
    assert t.inner.tolist() == [3. * i for i in range(100)]


def test_subclasses_train(lms):
    w = torch.randn(20, 20, requires_grad=True)
    s = Scaled(torch.randn(5, 20))
    lms.evict()
    y = torch.nn.functional.linear(s, Scaled(w.detach()))
    lms.evict()
    assert torch.equal(y.inner, torch.nn.functional.linear(s.inner, w).detach())


def test_subclasses_that_override_functions(lms):
    class Counting(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += 1
            lms.evict()
            return super().__torch_function__(func, types, args, kwargs or {})

    c = torch.arange(100.).as_subclass(Counting)
    lms.evict()
    assert (c + c).sum().item() == 9900. and Counting.calls >= 2


def test_dispatch_modes(lms):
    class Logging(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            spillway_torch.reclaim_inactive()
            out = func(*args, **(kwargs or {}))
            spillway_torch.reclaim_inactive()
            return out

    x, y = torch.arange(100.), torch.ones(100)
    lms.evict()
    with Logging() as log:
        z = x * y + x
        lms.evict()
    assert lms.is_away(z)
    assert z.tolist() == [2. * i for i in range(100)] and "aten.mul.Tensor" in log.seen


def test_subclasses_that_tell_their_sizes_in_python(script):
    out = script("""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
other = torch.ones(1000)
class Sized(torch.Tensor):
    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False, dispatch_sizes_strides_policy="sizes")
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        other.add_(1)
        if function in (torch.ops.aten.sym_size.default, torch.ops.aten.size.default):
            return (10, 100)
        return torch.zeros(3) if function is torch.ops.aten.add.Tensor else NotImplemented
data = torch.empty(1000)  # is registered together with the tensor whose size Python tells
print(int((Sized(data) + 1).sum()), spillway_torch._C.view(data)["enrolled"],
      *[row["tensor"] for row in spillway_torch._C.holders() if row["bytes"] == data.nbytes])
""", timeout=60)
    assert out.split() == ["0", "True", "Float[1000]", "Float[1000]"]


def test_what_a_dispatch_mode_makes_for_code_that_remembers_addresses_stays(lms):
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with spillway_torch._C.KeepingNew(), Passing():
        made = torch.zeros(1000)
    with Passing():
        other = torch.zeros(1000)
    lms.evict()
    assert not lms.is_away(made) and lms.is_away(other)


def test_fake_tensors(lms):
    from torch._subclasses.fake_tensor import FakeTensorMode
    net = torch.nn.Linear(30, 30)
    expected = outside(net.weight)
    lms.evict()
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = net(torch.empty(5, 30))
    assert y.shape == (5, 30) and outside(net.weight) == expected


def test_meta_tensors(lms):
    with torch.device("meta"):
        net = torch.nn.Linear(30, 30)
    assert net(torch.empty(5, 30, device="meta")).shape == (5, 30)
    real = net.to_empty(device="cpu")
    torch.nn.init.ones_(real.weight)
    lms.evict()
    assert real.weight.sum().item() == 900


def test_higher_order_operators(lms):
    from torch._higher_order_ops.cond import cond_op
    x = torch.arange(100.)
    lms.evict()
    assert cond_op(True, lambda a: a + 1, lambda a: a - 1, (x,))[3].item() == 4


def test_flex_attention_is_a_higher_order_operator(lms):
    from torch.nn.attention.flex_attention import flex_attention
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    lms.evict()
    torch.testing.assert_close(flex_attention(q, k, v), expected)


def test_higher_order_operators_that_are_made_later(lms):
    class Twice(torch._ops.HigherOrderOperator):
        def __init__(self):
            super().__init__("spillway_twice")

        def __call__(self, x):
            return super().__call__(x)
    twice = Twice()
    twice.fallthrough(torch._C.DispatchKey.AutogradCPU)
    twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x: x * 2)
    x = torch.arange(10.)
    lms.evict()
    assert twice(x).tolist() == [2. * i for i in range(10)]


def test_operations_defined_in_python(lms):
    @torch.library.custom_op("spillway_tests::sum_of_numpy", mutates_args=())
    def sum_of_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float(x.numpy().sum()))
    x = torch.arange(100.)
    lms.evict()
    assert sum_of_numpy(x).item() == 4950


def test_operations_on_lists_of_any_values(lms):
    library, seen = torch.library.Library("spillway_tests_any", "DEF"), []
    library.define("second(Any[] values) -> Tensor")
    library.impl("second", lambda values: seen.append(lms.view(values[1])["in_use"]) or values[1].clone(),
                 "CompositeExplicitAutograd")
    x = torch.ones(1000)
    lms.evict()
    assert torch.ops.spillway_tests_any.second([1, x]).sum().item() == 1000 and seen == [True]


def test_an_address_asked_for_inside_an_operation_is_good_until_its_end(lms):
    @torch.library.custom_op("spillway_tests::negate", mutates_args={"x"})
    def negate(x: torch.Tensor) -> None:
        p = x.data_ptr()
        lms.evict()
        values = (ctypes.c_float * x.numel()).from_address(p)
        values[:] = [-v for v in values]
    x = torch.arange(100.)
    lms.evict()
    negate(x)
    lms.evict()
    assert lms.is_away(x) and x.tolist() == [-float(i) for i in range(100)]


def test_operations_that_mutate_without_saying_so(lms):
    @torch.library.custom_op("spillway_tests::bump", mutates_args={"x"})
    def bump(x: torch.Tensor) -> None:
        x += 1
    x = torch.arange(100.)
    lms.evict()
    bump(x)
    lms.evict()
    assert x.tolist() == [float(i + 1) for i in range(100)]


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_traced_functions(lms):
    def f(x):
        return (x * 2 + 1).relu()
    x = torch.arange(100.)
    traced = torch.jit.trace(f, x)
    scripted = torch.jit.script(f)
    for compiled in (traced, scripted):
        for _ in range(3):
            lms.evict()
            assert compiled(x).tolist() == [2. * i + 1 for i in range(100)]


def test_random_states(lms):
    lms.evict()
    state = torch.get_rng_state()
    a = torch.rand(3)
    lms.evict()
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), a)
    lms.evict()
    assert lms.is_away(state)
    torch.set_rng_state(new_state=state)
    assert torch.equal(torch.rand(3), a)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    b = torch.rand(3, generator=generator)
    lms.evict()
    generator.set_state(state)
    assert outside(torch.rand(3, generator=generator)) == outside(b)


def test_numpy_arrays_of_results_are_safe_to_drop(lms):
    for _ in range(50):
        a = torch.arange(1000.)
        lms.evict()
        array = a.numpy()
        del a
        lms.evict()
        assert array.sum() == 499500.


def test_hold_counts_as_one_operation_for_modes_inside(lms):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))
    a = torch.arange(100.)
    lms.evict()
    with spillway_torch.hold(a), Mode():
        b = a + 1
        lms.evict()
        assert lms.view(a)["has_address"] and lms.view(b)["has_address"]
