# SPDX-License-Identifier: Apache-2.0
"""Doors: functions by which Python code reaches the bytes or the address of a tensor without an operation. The tensor stays
as long as the code uses it, but not for ever."""
import copy
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import pathlib
import shutil
import sys
import sysconfig
import typing
import zipfile

import numpy
import pytest
import torch

import spillway_torch
from conftest import outside


def test_elements_are_set_from_tensors(lms):
    z, one, three = torch.zeros(5, 4), torch.ones(1), torch.tensor(3.)
    i, j, rows = torch.tensor(2), torch.tensor(0), torch.tensor([4])
    for index, value in (((1, 2), three), ((i, j), three), (rows, one), ((3, slice(None)), three), (i, one), ((..., 3), 7.),
                         ((0, 0), 5)):
        lms.evict()
        z[index] = value
    lms.evict()
    z[0, 1] = z.max()
    lms.evict()
    assert lms.is_away(z)
    assert z.tolist() == [[5., 7., 0., 7.], [0., 0., 3., 7.], [1., 1., 1., 7.], [3., 3., 3., 7.], [1., 1., 1., 7.]]


def test_elements_are_set_with_gradients(lms):
    x, y = torch.ones(4, 4, requires_grad=True), torch.tensor(2., requires_grad=True)
    lms.evict()
    z = x * 3
    lms.evict()
    z[1, 2] = y
    lms.evict()
    z.sum().backward()
    assert x.grad.sum().item() == 45 and y.grad.item() == 1
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x[0, 0] = y


def test_functions_of_python_on_elements(lms):
    a, b, c = (torch.arange(10.) for _ in range(3))
    lms.evict()
    a.apply_(lambda v: v + 1)
    lms.evict()
    a.map_(b, lambda x, y: x + y)
    lms.evict()
    a.map2_(b, c, lambda x, y, z: x + y + z)
    lms.evict()
    assert lms.is_away(a) and a.tolist() == [4. * i + 1 for i in range(10)]


def test_tensors_made_from_lists_under_deterministic_algorithms(lms):
    torch.use_deterministic_algorithms(True)
    try:
        lms.evict()  # from now on each tensor leaves as soon as an operation has used it
        a = torch.tensor([1., 2., 3.])
        assert a.tolist() == [1., 2., 3.] and a.new_tensor([[1, 2], [3, 4]]).tolist() == [[1., 2.], [3., 4.]]
        assert torch.as_tensor(numpy.arange(3)).tolist() == [0, 1, 2]
        b = torch.ones(100).fill_(2)
        lms.evict()
        assert b.sum().item() == 200
    finally:
        torch.use_deterministic_algorithms(False)


def test_quantiles(lms):
    x, q = torch.arange(101.), torch.tensor([0.1, 0.5])
    lms.evict()
    assert torch.quantile(x, q).tolist() == [10., 50.]
    lms.evict()
    assert torch.nanquantile(x, q).tolist() == [10., 50.] and torch.quantile(x, 0.25).item() == 25


def test_the_loss_of_sequences_reads_lengths_that_it_has_converted(lms):
    scores = torch.randn(4, 3, 20).log_softmax(2)
    targets = torch.randint(1, 20, (3, 2))

    def loss(dtype):
        lengths = torch.full((3,), 4, dtype=dtype), torch.full((3,), 2, dtype=dtype)
        lms.evict()
        return torch.nn.functional.ctc_loss(scores, targets, *lengths).item()
    assert loss(torch.int32) == loss(torch.int64)


def test_quasirandom_numbers(lms):
    def draw(evicts):
        engine, out = torch.quasirandom.SobolEngine(5, scramble=True, seed=3), []
        for _ in range(3):
            if evicts:
                lms.evict()
            out.append(outside(engine.draw(4)))
            if evicts:
                lms.evict()
            engine.fast_forward(2)
        return out
    assert draw(False) == draw(True)


@pytest.mark.filterwarnings("ignore")
def test_storages_are_asked_what_they_are(lms):
    def is_shared(x):
        lms.evict()
        return x.is_shared()
    x = torch.arange(1000.)
    assert not is_shared(x) and not is_shared(x.untyped_storage()) and not is_shared(x.storage())
    lms.evict()
    assert x.untyped_storage().filename is None
    lms.evict()
    with pytest.raises(RuntimeError, match="shared file descriptor"):
        x.untyped_storage()._get_shared_fd()
    lms.evict()
    assert lms.is_away(x)
    assert torch._C._data_address(x) == x.data_ptr() != 0
    assert x.share_memory_().is_shared()


@pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="needs PyTorch 2.15")
def test_storages_that_are_away_exchange_their_memory_while_a_profiler_runs(lms):
    first, second = torch.full((1000,), 1.), torch.full((1000,), 2.)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        lms.evict()
        assert lms.is_away(first) and lms.is_away(second)
        first.untyped_storage()._swap_data_ptr_(second.untyped_storage())
    lms.evict()
    assert outside(first) == [2.] * 1000 and outside(second) == [1.] * 1000


def test_tensors_that_are_away_are_told_from_their_views(lms):
    x, other = torch.ones(64), torch.ones(64)
    view = x[1:]
    lms.evict()
    assert torch._C._is_alias_of(x, view) and not torch._C._is_alias_of(other, view)
    lms.evict()
    assert lms.is_away(x) and lms.is_away(other)


@torch.jit.script
class Scale:
    def __init__(self, by: torch.Tensor):
        self.by = by


class Scaled(torch.nn.Module):
    more: typing.Dict[str, typing.List[torch.Tensor]]

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.arange(1000.))
        self.attribute = torch.full((1000,), 2.)
        self.more = {"a": [torch.full((1000,), 3.)]}
        self.scale = Scale(torch.full((1000,), 4.))

    def forward(self, x):
        return self.parameter * self.attribute * self.more["a"][0] * self.scale.by * x


@pytest.mark.filterwarnings("ignore")
def test_attributes_of_scripted_modules_are_saved_and_packaged(lms, tmp_path, monkeypatch):
    def is_right(module):
        lms.evict()
        return outside(module(torch.full((1000,), 2.))) == [48. * i for i in range(1000)]
    modules = [torch.jit.script(Scaled()) for _ in range(2)]
    lms.evict()
    file = io.BytesIO()
    torch.jit.save(modules[0], file)
    assert is_right(torch.jit.load(io.BytesIO(file.getvalue())))
    monkeypatch.setattr("torch.package.package_exporter._gate_torchscript_serialization", False)
    lms.evict()
    with torch.package.PackageExporter(tmp_path / "p.pt") as exporter:
        exporter.save_pickle("a", "one.pkl", modules[0])
        lms.evict()
        exporter.save_pickle("a", "both.pkl", modules)
        lms.evict()
    importer = torch.package.PackageImporter(tmp_path / "p.pt")
    loaded = [importer.load_pickle("a", "one.pkl"), *importer.load_pickle("a", "both.pkl")]
    assert all(map(is_right, [*modules, *loaded]))
    lms.evict()
    assert all(lms.is_away(module.parameter) for module in modules)


def profiled(steps, **options):
    """Returns a profiler that has recorded a training, with all tensors away before each forward, backward and optimizer step."""
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 40))
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(128, 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
        for _ in range(steps):
            spillway_torch.reclaim_inactive()
            loss = net(x).square().sum()
            spillway_torch.reclaim_inactive()
            loss.backward()
            spillway_torch.reclaim_inactive()
            optimizer.step()
    return profiler


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"with_stack": True, "with_modules": True, "profile_memory": True}])
def test_profilers_see_the_shapes_of_what_is_away(lms, options):
    def shapes():
        return [(event.name, event.input_shapes) for event in profiled(2, record_shapes=True, **options).events()
                if event.name.startswith("aten::")]
    swapped = lms.stats()["swap_out_bytes"]
    seen = shapes()
    assert lms.stats()["swap_out_bytes"] > swapped
    spillway_torch.set_enabled_lms(False)
    expected = shapes()
    assert ("aten::linear", [[128, 20], [30, 20], [30]]) in seen and seen == expected


@pytest.mark.filterwarnings("ignore")
def test_execution_traces_name_operands_that_are_away(lms, tmp_path):
    x = torch.ones(64, 64)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    observer.start()
    lms.evict()
    x.add(1)
    observer.stop()
    observer.unregister_callback()
    nodes = json.loads((tmp_path / "trace.json").read_text())["nodes"]
    assert [node["inputs"]["shapes"] for node in nodes if node["name"] == "aten::add"] == [[[64, 64], [], []]]


def test_addresses_of_what_is_away_are_errors_unless_a_profiler_asks(lms):
    def address(tensor):  # as C++ code does, without the module's wrapper
        return torch.UntypedStorage.data_ptr.__wrapped__(tensor.untyped_storage())
    def is_refused(message):
        with pytest.raises(RuntimeError, match=message):
            address(x)
    x = torch.ones(64, 64)
    lms.evict()
    is_refused("swapped out")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        is_refused("invalid python storage")  # PyTorch's own check: the address is null
    is_refused("swapped out")
    assert x.sum().item() == 64 * 64


def test_a_profiler_that_does_not_start_asks_for_no_addresses(lms):
    def fail_to_start(message):
        with pytest.raises(TypeError):
            torch.autograd._enable_profiler("no configuration")
        with pytest.raises(RuntimeError, match=message):
            torch.UntypedStorage.data_ptr.__wrapped__(x.untyped_storage())  # as C++ code does
    x = torch.ones(64, 64)
    lms.evict()
    fail_to_start("swapped out")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        fail_to_start("invalid python storage")  # for the profiler that runs, the address is null
    fail_to_start("swapped out")


def test_a_profiler_that_runs_during_install_sees_shapes(script):
    shapes = script("""
import torch, spillway_torch
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
    spillway_torch.install(device="cpu", limit="64MiB", least_bytes=1)
    spillway_torch.set_enabled_lms(True)
    x = torch.ones(64, 64)
    for _ in range(2):
        spillway_torch.reclaim_inactive()
        x.mm(x)
print([event.input_shapes for event in profiler.events() if event.name == "aten::mm"])
""")
    assert shapes.split("\n")[-2] == "[[[64, 64], [64, 64]], [[64, 64], [64, 64]]]"


@pytest.mark.filterwarnings("ignore")
def test_a_memory_profile_of_tensors_that_moved_is_refused_by_name():
    options = {"record_shapes": True, "with_stack": True, "profile_memory": True}
    with pytest.raises(RuntimeError, match="set_enabled_lms"):
        profiled(2, **options)._memory_profile()
    spillway_torch.set_enabled_lms(False)
    assert profiled(2, **options)._memory_profile().timeline


def test_sparse_tensors_are_validated(lms):
    i, v = torch.tensor([[0, 1], [1, 0]]), torch.tensor([1., 2.])
    lms.evict()
    s = torch.sparse_coo_tensor(i, v, (2, 2), check_invariants=True)
    lms.evict()
    assert torch.sparse_coo_tensor(i, v).shape == (2, 2)
    with pytest.raises(RuntimeError, match="size is inconsistent"):
        torch.sparse_coo_tensor(i, v, (1, 2), check_invariants=True)
    lms.evict()
    assert s.coalesce().to_dense().tolist() == [[0., 1.], [2., 0.]]
    rows = torch.tensor([0, 1, 2])
    lms.evict()
    assert torch.sparse_csr_tensor(rows, i[1], v, (2, 2), check_invariants=True).to_dense().tolist() == \
        [[0., 1.], [2., 0.]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_packed_parameters(lms, dtype):
    net, x = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 5)), torch.randn(3, 10)
    lms.evict()
    packed = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=dtype)
    wanted = outside(packed(x))
    lms.evict()
    assert outside(packed(x)) == wanted
    lms.evict()
    assert packed[0].weight().shape == (20, 10) and packed[0].bias().shape == (20,)
    lms.evict()
    twin = copy.deepcopy(packed)
    lms.evict()
    assert outside(twin(x)) == wanted and outside(packed(x)) == wanted
    file = io.BytesIO()
    lms.evict()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=False))
    lms.evict()
    assert outside(twin(x)) == wanted


def test_operations_are_told_from_those_whose_library_is_gone(lms):
    """A new operation may have its schema at the address where the schema of a destroyed operation was."""
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8), None)

    def is_kept_by(name, result, function):
        x = torch.ones(100)
        with torch.library._scoped_library("spillway_passing", "DEF") as library:
            library.define(f"{name}(Tensor x) -> {result}")
            library.impl(name, function, "CPU")
            getattr(torch.ops.spillway_passing, name)(x)
        return lms.view(x)["kept"]
    for i in range(20):
        assert not is_kept_by(f"plain{i}", "Tensor", lambda x: x + 1)
        assert is_kept_by(f"packs{i}", "__torch__.torch.classes.quantized.LinearPackedParamsBase", lambda x: packed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(2, 10))])
def test_scripts_are_saved(lms, make, tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(10, 10)
            self.register_buffer("shift", torch.arange(10.))

        def forward(self, x):
            return self.linear(x) + self.shift
    net = make(Net())
    wanted = outside(net(torch.ones(2, 10)))
    file = io.BytesIO()
    lms.evict()
    torch.jit.save(net, file)
    lms.evict()
    net.save(str(tmp_path / "net.pt"))
    lms.evict()
    assert all(lms.is_away(tensor) for tensor in (*net.parameters(), *net.buffers()))
    file.seek(0)
    for where in (file, str(tmp_path / "net.pt")):
        loaded = torch.jit.load(where)
        lms.evict()
        assert outside(loaded(torch.ones(2, 10))) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="no quantized operators")
@pytest.mark.parametrize("way", ["file", "buffer", "package", "lite"])
def test_objects_that_are_written_in_cpp_are_loaded(lms, way, tmp_path, monkeypatch):
    torch.backends.quantized.engine = "x86"
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    net = torch.jit.script(torch.ao.quantization.quantize_dynamic(net))
    x, path = torch.ones(2, 8), str(tmp_path / "net")
    wanted = outside(net(x))
    if way == "package":
        monkeypatch.setattr(torch.package.package_exporter, "_gate_torchscript_serialization", False)
        with torch.package.PackageExporter(path) as exporter:
            exporter.save_pickle("net", "net.pkl", net)
    elif way == "lite":
        net._save_for_lite_interpreter(path)
    else:
        net.save(path)
    lms.evict()
    if way == "package":
        loaded = torch.package.PackageImporter(path).load_pickle("net", "net.pkl")
    elif way == "lite":
        from torch.jit.mobile import _load_for_lite_interpreter
        loaded = _load_for_lite_interpreter(path)
    else:
        with open(path, "rb") as file:
            loaded = torch.jit.load(path if way == "file" else file)
    lms.evict()
    assert outside(loaded(x)) == wanted


@pytest.mark.filterwarnings("ignore")
def test_scripts_are_loaded_from_what_is_no_archive(lms, tmp_path):
    from torch.jit.mobile import _load_for_lite_interpreter
    net, x, path = torch.jit.script(torch.nn.Linear(8, 3)), torch.ones(2, 8), str(tmp_path / "net")
    wanted = outside(net(x))
    net._save_for_lite_interpreter(path, _use_flatbuffer=True)
    lms.evict()
    loaded = _load_for_lite_interpreter(path)
    lms.evict()
    assert outside(loaded(x)) == wanted
    with pytest.raises(TypeError, match="incompatible function arguments"):
        torch._C.import_ir_module(1)


@pytest.mark.filterwarnings("ignore")
def test_outputs_that_cannot_be_traced_are_named(lms):
    class Net(torch.nn.Module):
        def forward(self, x):
            return {"sum": (2 * x, 1)}

        def total(self, x):
            return {"sum": (2 * x, 1)}
    x = torch.ones(4)
    lms.evict()
    for trace in (lambda: torch.jit.trace(Net(), x, strict=False),
                  lambda: torch.jit.trace_module(Net(), {"total": x}, strict=False),
                  lambda: torch.jit.trace(lambda x: Net()(x), x, strict=False),
                  lambda: torch.jit.trace(lambda x: Net()(x), example_kwarg_inputs={"x": x}, strict=False),
                  lambda: torch.jit._get_trace_graph(lambda x: Net()(x), x)):
        lms.evict()
        with pytest.raises(RuntimeError, match="cannot be understood by the tracer"):
            trace()
    lms.evict()
    assert lms.is_away(x)


@pytest.mark.filterwarnings("ignore")
def test_scripts_are_cloned(lms):
    net = torch.jit.script(torch.nn.Linear(10, 10))
    wanted = outside(net(torch.ones(2, 10)))
    lms.evict()
    twin = torch.jit._recursive.wrap_cpp_module(
        torch._C._hack_do_not_use_clone_module_with_class(net._c, [], []))
    lms.evict()
    assert lms.is_away(net.weight)
    assert outside(twin(torch.ones(2, 10))) == wanted


class Wrapper(torch.Tensor):
    """A tensor that forwards all operations to another one."""

    @staticmethod
    def __new__(cls, data):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=data.dtype, device=data.device)
        wrapper.data_ = data
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda x: x.data_, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_scripts_index_with_tensors_that_wrap_others(lms):
    def pick(x: torch.Tensor, at: torch.Tensor):
        return x[at]
    x, at = torch.randn(64, 32), torch.arange(0, 64, 2)
    expected = outside(x[at])
    script = torch.jit.script(pick)
    for arguments in ({"x": x, "at": Wrapper(at)}, {"x": x, "at": Wrapper(Wrapper(at))}):
        for call in (lambda: script(*arguments.values()), lambda: script(**arguments)):
            lms.evict()
            assert outside(call()) == expected


@pytest.mark.filterwarnings("ignore")
def test_scripts_are_observed_for_quantization(lms):
    from torch.ao.quantization import default_qconfig
    from torch.ao.quantization.quantize_jit import script_qconfig
    net = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(10, 10)).eval())
    observers = script_qconfig(default_qconfig)
    lms.evict()
    observed = torch._C._jit_pass_insert_observers(net._c, "forward", {"": observers}, False, 0)
    lms.evict()
    assert lms.is_away(net[0].weight)
    wanted = outside(net(torch.ones(2, 10)))
    assert outside(torch.jit._recursive.wrap_cpp_module(observed)(torch.ones(2, 10))) == wanted


@pytest.mark.filterwarnings("ignore")
def test_scripts_are_fused_by_onednn(lms):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).eval()
    x = torch.ones(1, 3, 16, 16)
    with torch.no_grad():
        torch.jit.enable_onednn_fusion(True)
        try:
            script = torch.jit.freeze(torch.jit.trace(net, x))
            first = script(x)
            for _ in range(3):  # oneDNN compiles it in the second or third call
                lms.evict()
                result = script(x)
        finally:
            torch.jit.enable_onednn_fusion(False)
        assert "oneDNNFusionGroup" in str(torch.jit.last_executed_optimized_graph())
        lms.evict()
        assert torch.equal(script(x), result) and torch.allclose(result, first)


def test_packages(lms, tmp_path):
    net, file = torch.nn.Linear(10, 10), str(tmp_path / "net.zip")
    wanted = outside(net(torch.ones(2, 10)))
    lms.evict()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("net", "net.pkl", net)
    lms.evict()
    assert lms.is_away(net.weight)
    loaded = torch.package.PackageImporter(file).load_pickle("net", "net.pkl")
    lms.evict()
    assert outside(loaded(torch.ones(2, 10))) == wanted


def test_a_saved_model_can_leave_again(lms, tmp_path):
    net = torch.nn.Linear(100, 100)
    wanted = outside(net.weight)
    lms.evict()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    lms.evict()
    assert net.weight.detach().numpy().sum() != 0
    lms.evict()
    assert all(lms.is_away(p) and not lms.view(p)["kept"] for p in net.parameters())
    assert outside(torch.load(tmp_path / "net.pt")["weight"]) == wanted


def test_safetensors(lms, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
    net[1].weight = net[0].weight  # save_file refuses tensors that share memory, save_model does not
    wanted = outside(net[0].weight)
    lms.evict()
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.save_file(net.state_dict(), tmp_path / "net.safetensors")
    lms.evict()
    safetensors.save_model(net, str(tmp_path / "net.safetensors"))
    lms.evict()
    written = safetensors.save(net[0].state_dict())
    lms.evict()
    assert all(lms.is_away(p) and not lms.view(p)["kept"] for p in net.parameters())
    assert outside(safetensors.load(written)["weight"]) == wanted
    assert outside(safetensors.load_file(tmp_path / "net.safetensors")["0.weight"]) == wanted


def test_safetensors_finds_the_end_of_a_tensor(lms):
    safetensors = pytest.importorskip("safetensors.torch")
    tensor = torch.zeros(100)
    lms.evict()
    assert safetensors._end_ptr(tensor) - tensor.data_ptr() == 400


def test_a_model_larger_than_the_limit_is_written_to_safetensors(lms, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = {str(i): torch.full((32 << 20,), i, dtype=torch.uint8) for i in range(12)}  # 384 MiB, where 256 fit
    safetensors.save_file(state, tmp_path / "net.safetensors")
    loaded = safetensors.load_file(tmp_path / "net.safetensors")
    assert [loaded[str(i)][5].item() for i in range(12)] == list(range(12))


def test_transformers_and_accelerate_save_in_parts_without_keeping_anything(lms, tmp_path):
    transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32))
    wanted = [outside(p) for p in model.parameters()]  # this model has two weights that are the same tensor
    lms.evict()
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "saved", max_shard_size="100KB")
    accelerate.utils.save(model.state_dict(), tmp_path / "state.bin")
    gc.collect()
    lms.evict()
    assert all(lms.is_away(p) and not lms.view(p)["kept"] for p in model.parameters())
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2 < len(list((tmp_path / "saved").glob("*.safetensors")))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert [outside(p) for p in loaded.parameters()] == wanted
    assert outside(torch.load(tmp_path / "state.bin")["transformer.wte.weight"]) == wanted[0]


def test_adapters_are_merged_without_keeping_tied_weights(lms):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4, n_positions=32))
    merged = peft.get_peft_model(model, peft.LoraConfig(r=4, fan_in_fan_out=True)).merge_and_unload()
    lms.evict()
    assert merged.config.tie_word_embeddings and all(lms.is_away(p) for p in merged.parameters())


def test_an_array_holds_its_tensor_until_it_dies(lms):
    a = torch.arange(100.)
    lms.evict()
    array = a.numpy()
    part = array[10:20]
    del array
    lms.evict()
    part[0] = -1
    assert a[10].item() == -1 and lms.view(a)["has_address"]
    del part
    gc.collect()
    lms.evict()
    assert lms.is_away(a) and a[10].item() == -1


def test_an_exception_of_a_signal_handler_leaves_no_state_behind(lms):
    # A handler may raise one as soon as a function in C has returned, as this function does.
    def interrupt(frame, event, _):
        if event == "c_return" and frame.f_code.co_name == "call":
            raise KeyboardInterrupt
    keeping = spillway_torch._shims._keeping_new(torch.zeros)
    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        keeping(1000)
    made = torch.zeros(1000) + 1
    lms.evict()
    assert lms.is_away(made)


def test_no_code_that_could_be_interrupted_runs_when_an_array_dies(lms):
    array, events = torch.arange(100.).numpy(), []
    sys.setprofile(lambda frame, event, _: events.append((event, frame.f_code.co_name)))
    del array
    sys.setprofile(None)
    assert not [event for event in events if event[0] == "call"]


def test_an_array_that_is_asked_for_its_address_keeps_its_tensor(lms):
    tensors = [torch.arange(100.) for _ in range(3)]
    lms.evict()
    views = [lambda array: array, lambda array: array[10:], lambda array: numpy.frombuffer(memoryview(array), numpy.float32)]
    addresses = [view(t.numpy()).ctypes.data for view, t in zip(views, tensors)]
    lms.evict()
    assert all(lms.view(t)["has_address"] for t in tensors)
    assert [ctypes.c_float.from_address(a).value for a in addresses] == [0, 10, 0]
    other = torch.arange(100.)
    with spillway_torch.hold():
        address = other.numpy().ctypes.data
        lms.evict()
        assert ctypes.c_float.from_address(address + 4).value == 1
    lms.evict()
    assert lms.is_away(other)


def test_the_profiler_sees_memory(lms):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        a = torch.ones(1000, 1000)
        b = a + a
        del a
        spillway_torch.reclaim_inactive()
        del b
    used = {event.key: event.self_cpu_memory_usage for event in seen.key_averages()}
    assert used["aten::empty"] == 4_000_000 and used["aten::add"] == 4_000_000
    assert used["[memory]"] == -8_000_000


IN_PLACE = {
    "addr_": lambda self: self.addr_(torch.ones(5), torch.ones(10)),
    "addmm_": lambda self: self.addmm_(torch.ones(5, 3), torch.ones(3, 10)),
    "addmv_": lambda self: self.addmv_(torch.ones(5, 3), torch.ones(3)),
    "addbmm_": lambda self: self.addbmm_(torch.ones(2, 5, 3), torch.ones(2, 3, 10)),
    "baddbmm_": lambda self: self.baddbmm_(torch.ones(2, 5, 3), torch.ones(2, 3, 10)),
    "addmm_ of rows": lambda self: self.addmm_(torch.ones(5, 3).to_sparse_csr(), torch.ones(3, 10)),
    "addmv_ of rows": lambda self: self.addmv_(torch.ones(5, 3).to_sparse_csr(), torch.ones(3)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_kernels_that_compare_references_raise_their_errors(lms, name):
    def attempt():
        self = torch.ones(())
        try:
            return IN_PLACE[name](self).shape
        except RuntimeError as error:
            return str(error), self.shape
    with_support = attempt()
    spillway_torch._C.set_hook(False)
    try:
        without = attempt()
    finally:
        spillway_torch._C.set_hook(True)
    assert with_support == without


@pytest.mark.filterwarnings("ignore")
def test_packaged_graphs(lms, tmp_path):
    pytest.importorskip("torch._inductor")
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    x = torch.randn(4, 16)
    with torch.no_grad():
        wanted = net(x)
        package = torch._inductor.aoti_compile_and_package(torch.export.export(net, (x,)),
                                                           package_path=str(tmp_path / "net.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        lms.evict()
        torch.testing.assert_close(loaded(x), wanted)
        lms.evict()
        assert lms.is_away(x)

        with zipfile.ZipFile(package) as archive:  # use the library directly, as aot_load does
            library = next(name for name in archive.namelist() if name.endswith(".so"))
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(archive.extract(library, tmp_path), 1)
        lms.evict()
        torch.testing.assert_close(runner.run([x])[0], wanted)
        for is_managed in (False, True):
            state = {name: torch.full_like(p, 0.5) for name, p in net.state_dict().items()}
            lms.evict()
            loaded.load_constants(state, check_full_update=True, user_managed=is_managed)
            lms.evict()
            assert {lms.is_away(p) for p in state.values()} == {not is_managed}
            torch.testing.assert_close(loaded(x), (x.sum(-1, keepdim=True) * 0.5 + 0.5).relu().expand(-1, 16))


def test_a_thread_without_support_can_use_what_it_makes(lms):
    lms.evict()  # from now on each tensor leaves as soon as an operation has used it
    spillway_torch._C.set_hook(False)
    try:
        s = torch.arange(2., 6.)
        s[1::2] *= -1.
        assert s.numpy().sum() == -2
        assert s.add_(1).tolist() == [3., -2., 5., -4.]
    finally:
        spillway_torch._C.set_hook(True)


@torch.jit.script
def described(x: torch.Tensor) -> tuple[str, str, str, list[int], list[list[float]]]:
    numbers: list[int] = x.long().flatten().tolist()
    rows: list[list[float]] = x.tolist()
    print(x, [x])
    return str(x), "{} {}".format(x, [x]), "%s" % x, numbers, rows


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: int


class Described(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.tensor([2., 2.], dtype=torch.float64))
        self.pair = Pair(torch.ones(2), 1)

    def forward(self, x: torch.Tensor):
        sizes: list[float] = self.sizes.tolist()
        return described(x), sizes, str(self.pair), str(self.sizes)


def without_tensors(x: torch.Tensor) -> str:
    return "{}".format(x.shape) + str((x * 2).shape)


@pytest.mark.parametrize("make", [lambda: described, Described], ids=["function", "module"])
def test_scripts_read_and_print_what_is_away(lms, capfd, make):
    script, x = torch.jit.script(make()), torch.arange(4., dtype=torch.float64).reshape(2, 2)
    spillway_torch.set_enabled_lms(False)
    expected = script(x), capfd.readouterr().out
    assert "[0, 1, 2, 3], [[0.0, 1.0], [2.0, 3.0]]" in str(expected[0])
    spillway_torch.set_enabled_lms(True)
    with lms.evicting():
        for _ in range(50):
            lms.evict()
            assert (script(x), capfd.readouterr().out) == expected
    lms.evict()
    assert lms.is_away(x)


@pytest.mark.filterwarnings("ignore")
def test_scripts_save_what_is_away(lms, tmp_path):
    class Saving(torch.nn.Module):
        def forward(self, x: torch.Tensor, path: str):
            torch.save(x, path)

    script, x = torch.jit.script(Saving()), torch.arange(4.)
    lms.evict()
    script(x, str(tmp_path / "x"))
    lms.evict()
    assert lms.is_away(x)
    assert outside(torch.load(tmp_path / "x")) == [0, 1, 2, 3]


def test_scripts_that_print_no_tensors_are_not_one_operation(lms):
    script = torch.jit.script(without_tensors)
    before = lms.stats()["frames"]
    assert script(torch.ones(3)) == "[3][3]" and lms.stats()["frames"] == before + 1
    assert not script._spillway_reads


def test_the_fuser_of_torchscript_is_off():
    assert not torch._C._jit_texpr_fuser_enabled()


class Traced(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.mm(x, self.weight) + 1.0 + torch.tensor([1., 2.]).sum()


@pytest.mark.filterwarnings("ignore")
def test_constants_of_scripts_are_saved_copied_and_printed(lms):
    weight = torch.arange(35.).reshape(5, 7)

    def function(x):
        return torch.mm(x, weight) + 1.0 + torch.tensor([1., 2.]).sum()
    x = torch.ones(3, 5)
    expected = outside(function(x))
    traced = torch.jit.trace(function, x)
    module = torch.jit.freeze(torch.jit.trace(Traced(weight), x).eval())

    def text_of(*ways):
        texts = []
        for way in ways:
            lms.evict()
            texts.append(way())
        return texts

    def ways(script):
        yield lambda: script.code
        yield lambda: str(script.graph)
        yield lambda: str(script.inlined_graph)
        yield lambda: str(script.graph.copy())
        yield lambda: str([*script.graph.nodes()][0])
        yield lambda: str([*script.graph.outputs()][0])
    for script in (traced, module):
        seen = text_of(*ways(script))
        spillway_torch.set_enabled_lms(False)
        assert seen == [way() for way in ways(script)]
        spillway_torch.set_enabled_lms(True)
        file = io.BytesIO()
        lms.evict()
        torch.jit.save(script, file)
        lms.evict()
        for one in (script, torch.jit.load(io.BytesIO(file.getvalue()))):
            lms.evict()
            assert outside(one(x)) == expected
    lms.evict()
    twin = copy.deepcopy(module)
    lms.evict()
    assert outside(twin(x)) == expected
    assert "aten::mm" in text_of(lambda: module._c.dump_to_str(True, True, True))[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="no quantized operators")
def test_methods_of_objects_that_are_written_in_cpp(lms):
    weight = torch.quantize_per_tensor(torch.randn(8, 3, 3, 3), 0.1, 0, torch.qint8)
    torch.backends.quantized.engine = "x86"
    packed = torch.ops.quantized.conv2d_prepack(weight, torch.randn(8), [1, 1], [0, 0], [1, 1], 1)
    lms.evict()
    assert torch.equal(packed.unpack()[0].int_repr(), weight.int_repr()) and packed.stride() == [1, 1]


def test_initializers_of_exported_graphs_are_compared(evicted):
    graph = torch.jit.trace(torch.add, (torch.ones(4), torch.ones(4))).graph.copy()
    values = {value.debugName(): torch.ones(4) for value in graph.inputs()}
    evicted(*values.values())
    assert len(values) == 2 and len(torch._C._jit_pass_onnx_deduplicate_initializers(graph, values, False)) == 1


EXTENSION = """
#include <ATen/ops/zeros.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <numeric>

static at::Tensor row_sums(at::Tensor const& x) {  // asks for addresses first, and runs operations then
  at::Tensor sums = at::zeros({x.size(0)});
  float* const to = sums.data_ptr<float>();
  at::Tensor const twice = at::mul(x, x);
  float const* from = twice.data_ptr<float>();
  for (int64_t i = 0; i < twice.numel(); ++i) { to[i / twice.size(1)] += from[i]; }
  return sums;
}
struct Rows {
  at::Tensor rows;
  explicit Rows(at::Tensor const& x) : rows{x} {}
  at::Tensor sums() const { return row_sums(rows); }
  float dot(at::Tensor const& x) const {
    float const *a = rows.data_ptr<float>(), *b = x.data_ptr<float>();
    return std::inner_product(a, a + rows.numel(), b, 0.0F);
  }
  static float first(at::Tensor const& x) { return *x.data_ptr<float>(); }
  static Rows of(at::Tensor const& x) { return Rows{x}; }
  void set(int64_t i, at::Tensor const& x) { rows.data_ptr<float>()[i] = *x.data_ptr<float>(); }
  float times(at::Tensor const& x) const { return dot(x); }
  enum class Kind { few, many };
  static inline int made = 0;
};
struct View {  // goes on with an address
  at::Tensor kept;
  float const* from;
  float sum() const { return std::accumulate(from, from + kept.numel(), 0.0F); }
};
static View view_of(at::Tensor const& x) { return {x, x.data_ptr<float>()}; }
static float first_weight(pybind11::object module) {
  return *module.attr("weight").cast<at::Tensor>().data_ptr<float>();
}
struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor const& x) {
    at::Tensor const doubled = at::add(x, x);
    context->save_for_backward({at::mul(doubled, doubled), x});
    return at::mul(x, x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto const saved = context->get_saved_variables();
    at::Tensor result = at::empty_like(saved[1]);
    at::Tensor const unused = at::zeros_like(saved[1]);
    float const *square = saved[0].data_ptr<float>(), *x = saved[1].data_ptr<float>(), *gradient = gradients[0].data_ptr<float>();
    for (int64_t i = 0; i < result.numel(); ++i) {
      TORCH_CHECK(square[i] == 4 * x[i] * x[i], "these are other bytes");
      result.data_ptr<float>()[i] = 2 * x[i] * gradient[i];
    }
    TORCH_CHECK(x[0] >= 0, "that is less than nothing");
    return {result};
  }
};
static at::Tensor square(at::Tensor const& x) { return Square::apply(x); }
static at::Tensor shared(at::Tensor const& x) { return at::from_blob(x.data_ptr(), x.sizes(), [x](void*) {}, x.options()); }
static double sum(c10::Dict<std::string, at::Tensor> const& values) {
  double sum = 0;
  for (auto const& entry : values) sum += entry.value().data_ptr<float>()[1];
  return sum;
}
static double sum_of_pairs(c10::List<std::tuple<at::Tensor, at::Tensor>> const& pairs) {
  double sum = 0;
  for (std::tuple<at::Tensor, at::Tensor> const pair : pairs) {
    sum += std::get<0>(pair).data_ptr<float>()[1] + std::get<1>(pair).data_ptr<float>()[1];
  }
  return sum;
}
static c10::Dict<std::string, at::Tensor> doubled(c10::Dict<std::string, at::Tensor> const& values) {
  c10::Dict<std::string, at::Tensor> results;
  for (auto const& entry : values) results.insert(entry.key(), at::mul(at::from_blob(entry.value().data_ptr<float>(), {2}), 2));
  return results;
}
TORCH_LIBRARY(row_sums, library) {
  library.def("sum(Dict(str, Tensor) values) -> float", &sum);
  library.def("sum_of_pairs((Tensor, Tensor)[] pairs) -> float", &sum_of_pairs);
  library.def("doubled(Dict(str, Tensor) values) -> Dict(str, Tensor)", &doubled);
  library.def("square(Tensor x) -> Tensor", &square);
  library.def("shared(Tensor x) -> Tensor", &shared);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("square", &square);
  module.def("row_sums", &row_sums, pybind11::arg("x"));
  auto inner = module.def_submodule("inner");
  inner.def("row_sums", &row_sums);
  module.def("view_of", &view_of);
  module.def("first_weight", &first_weight);
  module.def("adder", [](at::Tensor const& x) {
    return pybind11::cpp_function([x](at::Tensor const& y) { return *x.data_ptr<float>() + *y.data_ptr<float>(); });
  });
  module.def("itself", [](at::Tensor const& x) { return x; });
  module.def("same", [](at::Tensor const& x) { return x.view(-1); });
  pybind11::class_<View>(module, "View").def("sum", &View::sum).def_static("of", &view_of);
  pybind11::class_<Rows> rows(module, "Rows");
  pybind11::enum_<Rows::Kind>(rows, "Kind").value("few", Rows::Kind::few).value("many", Rows::Kind::many);
  rows.def(pybind11::init<at::Tensor const&>())
      .def_static("of", &Rows::of)
      .def_readwrite_static("made", &Rows::made)
      .def("__setitem__", &Rows::set)
      .def("__mul__", &Rows::times)
      .def("sums", &Rows::sums)
      .def("dot", &Rows::dot)
      .def_static("first", &Rows::first)
      .def_readwrite("rows", &Rows::rows);
}
"""


@pytest.fixture(scope="module")
def extension_folder(tmp_path_factory):
    """The folder of the extension, which is compiled by the first program that loads it."""
    folder = tmp_path_factory.mktemp("extension")
    (folder / "extension.cpp").write_text(EXTENSION)
    return folder


def loading(folder):
    return ("import torch.utils.cpp_extension as cpp; "
            f'extension = cpp.load("row_sums", ["{folder}/extension.cpp"], build_directory="{folder}", extra_cflags=["-O0"])')


def test_functions_of_extensions_are_operations(script, extension_folder):
    install = 'spillway_torch.install(device="cpu", limit=28 << 20, least_bytes=1)'
    imported = "import row_sums as extension; from row_sums import row_sums as by_name"
    for first, second in (install, loading(extension_folder) + "; by_name = extension.row_sums"), (imported, install):
        assert script(f"""
import sys
sys.path.insert(0, "{extension_folder}")
import torch, spillway_torch
torch.set_num_threads(1)
{first}
{second}
spillway_torch.set_enabled_lms(True)
other = torch.ones(2 << 20)
x = torch.ones(2 << 20, 1)
spillway_torch.reclaim_inactive()
print(int(extension.row_sums(x).sum()), int(extension.row_sums(x=x).sum()), spillway_torch.memory_stats()["swap_out_bytes"] > 0)
for function in by_name, extension.inner.row_sums:
    spillway_torch.reclaim_inactive()
    print(int(function(x).sum()))
del x, other
rows, vector = torch.full((1000, 1), 2.0), torch.ones(1000, 1)
spillway_torch.reclaim_inactive()
held = extension.Rows(rows)
for rows in rows, torch.full((1000, 1), 3.0):
    held.rows = rows
    spillway_torch.reclaim_inactive()
    print(int(held.sums().sum()), int(held.dot(vector)), int(extension.Rows.first(vector)), int(held.rows.sum()))
""").split() == "2097152 2097152 True 2097152 2097152 4000 2000 1 2000 9000 3000 1 3000".split()


def test_functions_that_an_extension_has_imported_stay_what_they_are(script, tmp_path):
    """As the module of a Cython file, which holds all that it imports by name. Functions are replaced in all modules."""
    (tmp_path / "linked.so").write_bytes(b"libc10.so")
    assert script(f"""
import importlib.machinery, math, sys, types
import torch, spillway_torch
module = sys.modules["linked"] = types.ModuleType("linked")
loader = importlib.machinery.ExtensionFileLoader("linked", {str(tmp_path / "linked.so")!r})
module.__spec__ = importlib.machinery.ModuleSpec("linked", loader)
taken = module.sqrt, module.len, module.empty = math.sqrt, len, torch.empty
spillway_torch.install(device="cpu", limit=64 << 20)
print(taken == (math.sqrt, len, torch.empty) == (module.sqrt, module.len, module.empty), taken[0].__module__)
""").split() == ["True", "math"]


def test_an_extension_may_be_gone_from_the_disk(script, tmp_path):
    """The program has loaded it, and its package was replaced or removed since."""
    file = next(path for path in pathlib.Path(sysconfig.get_config_var("DESTSHARED")).iterdir() if path.name.startswith("_queue."))
    copies = [tmp_path / name / file.name for name in ("removed", "emptied")]
    for path in copies:
        path.parent.mkdir()
        shutil.copy(file, path)
    assert script(f"""
import importlib.util, os, sys
import torch, spillway_torch
for number, path in enumerate({[str(path) for path in copies]}):
    spec = importlib.util.spec_from_file_location("_queue", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["gone" + str(number)] = module
    os.remove(path)
open(path, "w").close()
spillway_torch.install(device="cpu", limit=64 << 20)
print(hasattr(torch._C.Future.then, "__wrapped__"))
""").split() == ["True"]


def test_nodes_of_the_graph_that_extensions_wrote_are_operations(script, extension_folder):
    """Tensors that they have saved may leave until the backward pass runs them."""
    assert script(f"""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=28 << 20, least_bytes=1)
{loading(extension_folder)}
spillway_torch.set_enabled_lms(True)
def away():
    spillway_torch.reclaim_inactive()
    return [torch.full((1 << 20,), 7.0) for _ in range(8)]
for square in extension.square, torch.ops.row_sums.square:
    leaf = torch.full((1 << 20,), 3.0, requires_grad=True)
    x = leaf * 1
    squares = square(x)
    y = (squares * 2).sum()
    away()
    print(spillway_torch._C.view(x)["has_address"], end=" ")
    y.backward()
    print(int(leaf.grad.sum()) == 12 << 20, spillway_torch.memory_stats()["active_frames"])

less = torch.full((1000,), -1.0, requires_grad=True)
y = (extension.square(less * 1) * 2).sum()
away()
try:
    y.backward()
except RuntimeError as error:
    print("than_nothing" in str(error).replace(" ", "_"), spillway_torch.memory_stats()["active_frames"])
""").split() == "False True 0 False True 0 True 0".split()


def test_a_child_makes_nodes_though_another_thread_of_the_parent_was_making_some(script, extension_folder):
    """That thread is not in the child, where it could end what it had begun. The child uses another tensor than it, since
    PyTorch locks a tensor that gets a node.
    """
    assert script(f"""
import os, signal, sys, threading
import torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=28 << 20, least_bytes=1)
{loading(extension_folder)}
spillway_torch.set_enabled_lms(True)
x, of_child = [torch.ones(8, requires_grad=True) for _ in range(2)]
kept, ended = [], threading.Event()
square = torch.ops.row_sums.square
square(x)
def make():
    while not ended.is_set():
        kept.extend([square(x) for _ in range(2000)])
        if len(kept) > 8000:
            kept.clear()
sys.setswitchinterval(1e-4)
making = threading.Thread(target=make)
making.start()
codes = []
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that waits for the thread waits for ever
        square(of_child)
        os._exit(0)
    codes.append(os.waitpid(child, 0)[1])
    if codes[-1]:
        break
ended.set()
making.join()
print(sum(codes))
""").split()[-1] == "0"


def test_a_result_in_the_memory_of_an_operand_keeps_it(script, extension_folder):
    """An operator may give its result a storage of its own that refers to an operand's memory."""
    assert script(f"""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=28 << 20, least_bytes=1)
{loading(extension_folder)}
spillway_torch.set_enabled_lms(True)
x, other = torch.full((1 << 20,), 3.0), torch.full((1 << 20,), 2.0)
y, square = torch.ops.row_sums.shared(x), torch.ops.row_sums.square(other)
spillway_torch.reclaim_inactive()
overwriting = [torch.full((1 << 20,), 7.0) for _ in range(8)]
print(int(y.sum()) >> 20, spillway_torch._C.view(x)["kept"], spillway_torch._C.view(other)["kept"], end=" ")
x[0] = 5
print(int(y[0]), int(square[0]))
""").split() == "3 True False 5 4".split()


def test_operators_may_let_their_operands_go(script):
    # The C library overwrites memory that is freed, so that it is noticed if such memory is read.
    assert script("""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20)
spillway_torch.set_enabled_lms(True)
library = torch.library.Library("spillway_tests", "DEF")
library.define("three(Tensor x) -> Tensor")
library.impl("three", lambda x: torch.full((5,), 3), "CPU")
x = torch.ones(10000)
call = torch.jit.trace(lambda x: torch.ops.spillway_tests.three(torch.mul(x, 2)), (x,), check_trace=False)
with spillway_torch.hold(x):
    print(*[int(call(x).sum()) for _ in range(5)])
""", GLIBC_TUNABLES="glibc.malloc.tcache_count=0", MALLOC_PERTURB_="85").split() == ["15"] * 5


def test_operators_take_and_return_dictionaries_and_tuples(script, extension_folder):
    assert script(f"""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=28 << 20, least_bytes=1)
{loading(extension_folder)}
spillway_torch.set_enabled_lms(True)
named, pairs = dict(a=torch.ones(100), b=torch.ones(100)), [(torch.ones(100), torch.ones(100))]
spillway_torch.reclaim_inactive()
print(torch.ops.row_sums.sum(named), torch.ops.row_sums.sum_of_pairs(pairs), end=" ")
spillway_torch.reclaim_inactive()
doubled = torch.ops.row_sums.doubled(named)
spillway_torch.reclaim_inactive()
print(spillway_torch._C.view(doubled["a"])["has_address"], doubled["b"].tolist())
""").split() == "2.0 2.0 False [2.0, 2.0]".split()


def test_what_an_extension_retains_stays(script, extension_folder):
    assert script(f"""
import pickle, sys
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=28 << 20, least_bytes=1)
{loading(extension_folder)}
sys.path.insert(0, "{extension_folder}")  # where pickle looks for it
spillway_torch.set_enabled_lms(True)
def is_kept(tensor):
    return spillway_torch._C.view(tensor)["kept"]
def overwrite():
    spillway_torch.reclaim_inactive()
    return [torch.full((1 << 20,), 7.0) for _ in range(8)]
x, y, one = torch.ones(1 << 20), torch.ones(1 << 20), torch.ones(1)
views = extension.view_of(x), extension.View.of(y)
add = extension.adder(one)
overwrite()
print(int(add(one)))
print(*(int(view.sum()) for view in views), is_kept(x), is_kept(y))
del x, y, views

rows = extension.Rows.of(torch.ones(1000, 1))
rows.rows.sum()  # an operation may use what the object has
spillway_torch.reclaim_inactive()
rows[0] = one
spillway_torch.reclaim_inactive()
print(int(rows * torch.ones(1000)), int(rows.sums().sum()))

weights = torch.nn.Linear(100, 100)
torch.nn.init.ones_(weights.weight)
z = torch.ones(1000, 1)
with_graph = torch.ones(1000, 1, requires_grad=True)
spillway_torch.reclaim_inactive()
print(int(extension.first_weight(weights)), int(extension.same(z).sum()), int(extension.row_sums(with_graph).sum()))
print(is_kept(weights.weight), is_kept(z), is_kept(with_graph))

class Guarded(torch.Tensor):  # which PyTorch's functions are not for
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError(function)
guarded = z.as_subclass(Guarded)
print(int(extension.Rows.first(guarded)), extension.itself(guarded) is guarded)

extension.Rows.made = 3
many = extension.Rows.Kind.many
print(extension.Rows.made, many == extension.Rows.Kind.many, isinstance(many, extension.Rows.Kind),
      pickle.loads(pickle.dumps(extension.row_sums)) is extension.row_sums)
""").split() == ("2 1048576 1048576 True True 1000 1000 1 1000 1000 False False False 1 True 3 True True True").split()


has_static_runtime = pytest.mark.skipif(not hasattr(torch._C, "StaticModule"), reason="this PyTorch has no static runtime")


@has_static_runtime
def test_static_modules_run_without_operations(lms):
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 20)).eval()
    x = torch.rand(10, 30)
    expected = outside(model(x))
    static = torch._C._jit_to_static_module(torch.jit.freeze(torch.jit.script(model))._c)
    results = []
    for _ in range(3):  # the first run plans the memory that further runs use
        lms.evict()
        results.append(static(x))
        assert outside(results[-1]) == expected
    lms.evict()
    assert all(lms.is_away(one) for one in (x, *results)) and [outside(one) for one in results] == [expected] * 3
    assert outside(static.runAsync((x,), {}).wait()) == expected


@has_static_runtime
def test_static_modules_that_fork(lms):
    def part(x: torch.Tensor):
        x = ((x * 0.5 + 1) * 0.5 + 1) * 0.5 + 1
        return ((x * 0.5 + 1) * 0.5 + 1) * 0.5 + 1

    def forking(x: torch.Tensor):
        first, second = torch.jit.fork(part, x), torch.jit.fork(part, x + 64)
        return torch.jit.wait(first) + torch.jit.wait(second)

    static = torch._C._jit_to_static_module(torch.jit.script(forking).graph)
    x = torch.full((200_000,), 2.)
    lms.evict()
    with lms.evicting():
        results = [static(x) for _ in range(5)] + [static.runAsync((x,), {}).wait()]
        assert [(one.min().item(), one.max().item()) for one in results] == [(5., 5.)] * 6


def test_kernels_of_tensor_expressions_run_without_operations(lms):
    te = torch._C._te
    size, dtype = te.ExprHandle.int(100), te.Dtype.Float
    a, b = (te.BufHandle(name, [size], dtype) for name in "ab")
    sums = te.Compute("sums", [size], lambda i: a.load([i]) + b.load([i]))
    loops = te.LoopNest([sums])
    loops.prepare_for_codegen()
    kernel = te.construct_codegen("ir_eval", te.simplify(loops.root_stmt()), [a, b, sums])
    x, y, z = torch.full((100,), 2.), torch.full((100,), 3.), torch.zeros(100)
    lms.evict()
    kernel.call([x, y, z])
    lms.evict()
    assert all(lms.is_away(one) for one in (x, y, z)) and outside(z) == [5.] * 100


@pytest.fixture
def after_import(tmp_path, monkeypatch):
    """A function that writes modules, into a folder or an archive, and returns a list. When one of them has been imported,
    the module's finder appends it to the list."""
    from spillway_torch import _shims

    def write(sources, in_archive=False):
        place = tmp_path / ("archive.zip" if in_archive else "")
        for name, source in sources.items():
            if in_archive:
                with zipfile.ZipFile(place, "a") as archive:
                    archive.writestr(f"{name}.py", source)
            else:
                (place / f"{name}.py").write_text(source)
            _shims._after_import(name, seen.append)
            names.append(name)
        monkeypatch.syspath_prepend(str(place))
        return seen
    seen, names = [], []
    yield write
    for name in names:
        _shims._finder.waiting.pop(name, None)
        sys.modules.pop(name, None)


@pytest.mark.parametrize("in_archive", [False, True])  # all modules of an archive have the same loader
def test_a_module_is_wrapped_though_it_was_searched_for_before(after_import, in_archive):
    seen = after_import({"searched_one": "", "searched_two": ""}, in_archive)
    for name in ("searched_one", "searched_two", "searched_one"):
        assert importlib.util.find_spec(name) is not None
    assert not seen
    one, two = importlib.import_module("searched_one"), importlib.import_module("searched_two")
    assert seen == [one, two]
    importlib.reload(one)
    assert seen == [one, two]


def test_a_module_is_wrapped_though_its_first_import_failed(after_import):
    seen = after_import({"failing_once": "import sys\nif not hasattr(sys, '_failed'):\n    sys._failed = True\n    raise KeyError"})
    try:
        with pytest.raises(KeyError):
            importlib.import_module("failing_once")
        assert not seen
        assert [importlib.import_module("failing_once")] == seen
    finally:
        del sys._failed
