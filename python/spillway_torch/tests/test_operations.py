# SPDX-License-Identifier: Apache-2.0
"""Operations on tensors that are away, passed in every way in which an operation can get a tensor."""
import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import spillway_torch
from conftest import outside


def test_a_used_tensor_comes_back_and_an_unused_one_stays_away(lms):
    a, b = torch.randn(1000), torch.randn(1000)
    before = outside(a)
    lms.evict()
    assert lms.is_away(a) and lms.is_away(b)

    c = a + 0

    assert outside(c) == before
    assert lms.is_away(b)


def test_views_need_no_bytes(lms):
    x = torch.arange(1000.)
    lms.evict()

    v = x.view(10, 100)[::2].t()

    assert lms.is_away(x) and v.shape == (100, 5)
    assert v[3].tolist() == [3., 203., 403., 603., 803.]


def test_a_write_through_a_view_reaches_the_base(lms):
    x = torch.zeros(10, 100)
    v = x[::2]
    lms.evict()

    v.add_(1)
    lms.evict()

    assert x.sum().item() == 500 and x[1].sum().item() == 0


def test_in_place(lms):
    y = torch.ones(500)
    lms.evict()
    y.mul_(3)
    lms.evict()
    assert y.tolist() == [3.] * 500


def test_out_argument(lms):
    y, out = torch.ones(500), torch.empty(500)
    lms.evict()
    torch.add(y, y, out=out)
    lms.evict()
    assert out.tolist() == [2.] * 500


def test_out_argument_that_grows(lms):
    y, out = torch.ones(500), torch.empty(0)
    torch.add(y, y, out=out)
    lms.evict()
    assert lms.is_away(out)
    assert out.tolist() == [2.] * 500


def test_resize_keeps_the_bytes(lms):
    z = torch.arange(100.)
    lms.evict()
    z.resize_(1000)
    lms.evict()
    assert z[:100].tolist() == list(range(100))


def test_storage_resize_to_nothing_frees_the_host_copy(lms):
    z = torch.arange(100_000.)
    lms.evict()
    before = lms.stats()["host.pinned_bytes"]
    z.untyped_storage().resize_(0)
    assert lms.stats()["host.pinned_bytes"] <= before - 400_000


def test_set_shares_the_storage(lms):
    a = torch.arange(100.)
    lms.evict()
    b = torch.empty(0).set_(a.untyped_storage(), 0, (100,))
    lms.evict()
    assert b.tolist() == list(range(100))
    b.add_(1)
    lms.evict()
    assert a[0].item() == 1


def test_set_data_moves_to_another_storage(lms):
    p = torch.nn.Parameter(torch.zeros(100))
    q = torch.ones(100)
    lms.evict()
    p.data = q
    del q
    lms.evict()
    assert p.sum().item() == 100


def test_optional_arguments(lms):
    x, w = torch.randn(20, 30), torch.randn(30)
    expected = outside(F.layer_norm(x, (30,), w, None))
    lms.evict()
    assert outside(F.layer_norm(x, (30,), w, None)) == expected


def test_lists_of_tensors(lms):
    parts = [torch.full((50,), float(i)) for i in range(5)]
    lms.evict()
    assert torch.cat(parts).tolist() == [float(i) for i in range(5) for _ in range(50)]


def test_lists_of_optional_tensors(lms):
    a, i = torch.arange(600.).view(20, 30), torch.tensor([1, 3, 5])
    lms.evict()
    assert a[:, i][0].tolist() == [1., 3., 5.]
    lms.evict()
    a[:, i] = 0
    lms.evict()
    assert a[0, 3].item() == 0 and a[0, 4].item() == 4


def test_several_results(lms):
    m = torch.randn(10, 10)
    values, indices = m.sort()
    expected = outside(values), outside(indices)
    lms.evict()
    assert lms.is_away(values) and lms.is_away(indices)
    assert (outside(values), outside(indices)) == expected


def test_composites_that_read_indices_themselves(lms):
    x, at = torch.arange(10.), torch.tensor([2, 5])
    lms.evict()
    assert [p.tolist() for p in torch.tensor_split(x, at)] == [[0., 1.], [2., 3., 4.], [5., 6., 7., 8., 9.]]


def test_packed_sequences(lms):
    net = torch.nn.LSTM(8, 16, batch_first=True)
    x, lengths = torch.randn(3, 7, 8), torch.tensor([7, 5, 2])

    def run(evicts):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        if evicts:
            lms.evict()
        out, _ = net(packed)
        if evicts:
            lms.evict()
        padded, sizes = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return outside(padded), outside(sizes)
    assert run(False) == run(True)


def test_random_numbers_are_the_same(lms):
    x = torch.ones(1000)
    torch.manual_seed(3)
    expected = outside(F.dropout(x))
    torch.manual_seed(3)
    lms.evict()
    assert outside(F.dropout(x)) == expected


def test_buffers_that_a_kernel_writes_without_saying_so(lms):
    norm = torch.nn.BatchNorm1d(16)
    reference = copy.deepcopy(norm)
    x = torch.randn(8, 16)
    lms.evict()
    for _ in range(3):
        norm(x)
        lms.evict()
    for _ in range(3):
        reference(x)
    assert outside(norm.running_mean) == outside(reference.running_mean)
    assert outside(norm.running_var) == outside(reference.running_var)


def test_item_bool_and_repr(lms):
    t = torch.tensor([7.5])
    lms.evict()
    assert t.item() == 7.5
    lms.evict()
    assert bool(t)
    lms.evict()
    assert repr(t) == "tensor([7.5000])"


def test_save_and_load(lms):
    sent = {"a": torch.arange(100.), "b": torch.arange(100), "c": torch.ones(3, dtype=torch.int8)}
    sent["view"] = sent["a"][10:20]
    lms.evict()
    file = io.BytesIO()
    torch.save(sent, file)
    assert not lms.view(sent["a"])["kept"]
    file.seek(0)
    got = torch.load(file)
    assert all(torch.equal(sent[k], got[k]) for k in sent)
    assert got["view"].untyped_storage()._cdata == got["a"].untyped_storage()._cdata


def test_save_of_many_types_whose_addresses_come_and_go(lms):
    types = [torch.float32, torch.int32, torch.int16, torch.float64, torch.uint8]
    sent = [torch.ones(8 << 20, dtype=types[i % 5]) * i for i in range(10)]  # more than fit at once
    file = io.BytesIO()
    torch.save(sent, file)
    file.seek(0)
    for i, got in enumerate(torch.load(file)):
        assert got.dtype == types[i % 5] and got[0].item() == i and got[-1].item() == i


def test_deepcopy(lms):
    a = torch.arange(100.)
    lms.evict()
    assert copy.deepcopy(a).tolist() == list(range(100))


def test_pickle(lms):
    a = torch.arange(100.)
    lms.evict()
    assert pickle.loads(pickle.dumps(a)).tolist() == list(range(100))


def test_module_state_dict_round_trip(lms):
    net = torch.nn.Linear(30, 30)
    lms.evict()
    other = torch.nn.Linear(30, 30)
    other.load_state_dict(net.state_dict())
    lms.evict()
    assert torch.equal(net.weight, other.weight)


def test_sparse(lms):
    s = torch.eye(50).to_sparse()
    lms.evict()
    assert torch.equal(s.to_dense(), torch.eye(50))
    lms.evict()
    assert torch.equal(torch.sparse.mm(s, torch.eye(50)), torch.eye(50))


def test_sparse_rows(lms):
    c = torch.eye(50).to_sparse_csr()
    lms.evict()
    assert torch.equal(c.to_dense(), torch.eye(50))
    lms.evict()
    assert torch.equal(c @ torch.ones(50), torch.ones(50))


def test_sparse_gradients(lms):
    e = torch.nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SGD(e.parameters(), lr=1.)
    lms.evict()
    e(torch.tensor([1, 2, 1])).sum().backward()
    lms.evict()
    assert e.weight.grad.to_dense().sum().item() == 12
    optimizer.step()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore")
def test_nested(lms, layout):
    n = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=layout)
    lms.evict()
    assert [p.sum().item() for p in n.unbind()] == [12., 20.]
    lms.evict()
    m = n * 2
    lms.evict()
    assert [p.sum().item() for p in m.unbind()] == [24., 40.]
    lms.evict()
    assert [p.shape[0] for p in F.linear(m, torch.eye(4)).unbind()] == [3, 5]


@pytest.mark.filterwarnings("ignore")
def test_views_of_nested_tensors(lms):
    """Their sizes and strides are tensors, which views read and create."""
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    n = torch.nested.nested_tensor(parts)
    lms.evict()
    t = n.transpose(1, 2)
    lms.evict()
    t = t.transpose(1, 2)
    lms.evict()
    assert all(torch.equal(a, b) for a, b in zip(t.unbind(), parts))
    r = n.reshape(2, -1, 2, 2)
    lms.evict()
    r = r.reshape(2, -1, 4)
    lms.evict()
    assert all(torch.equal(a, b) for a, b in zip(r.unbind(), parts))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", [torch.clone, torch.nn.functional.dropout], ids=["clone", "dropout"])
def test_sizes_of_copies_of_nested_tensors(lms, act):
    copy = act(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)]))
    lms.evict()
    assert [copy.size(0), copy.size(2)] == [2, 3]


def test_batched_tensors_whose_addresses_are_compared(lms):
    matrix, values = torch.zeros(2, 3), torch.tensor([4., 5.])
    lms.evict()
    torch.vmap(torch.Tensor.fill_)(matrix, values)
    lms.evict()
    assert lms.is_away(matrix) and lms.is_away(values)
    assert outside(matrix) == [[4, 4, 4], [5, 5, 5]]


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_pieces_of_nested_tensors(lms):
    parts = [torch.randn(2, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)]
    piece = torch.nested.as_nested_tensor(parts).split_with_sizes([2, 3], dim=-1)[1].unbind()[0]
    lms.evict()
    grads = torch.autograd.grad(piece.sum(), parts)
    assert [sum(map(sum, outside(grad))) for grad in grads] == [6, 0]


@pytest.mark.filterwarnings("ignore")
def test_errors_of_nodes_of_nested_tensors(lms):
    nested = torch.nested.nested_tensor([torch.rand(2), torch.rand(2)], requires_grad=True)
    x = nested.clone()
    sums = x.sum(-1, keepdim=True)
    x.add_(x)
    lms.evict()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sums.backward(torch.nested.nested_tensor([torch.rand(1), torch.rand(1)]))


@pytest.mark.filterwarnings("ignore")
def test_linear_layers_of_nested_tensors(lms):
    parts, w = [torch.randn(3, 4), torch.randn(5, 4)], torch.randn(4, 4)
    n = torch.nested.nested_tensor(parts)
    wanted = [p.clone() for p in F.linear(F.linear(n, w), w).unbind()]
    # Layers called for each part may give other bits, since PyTorch may call other kernels.
    assert all(torch.allclose(a, F.linear(F.linear(p, w), w), atol=1e-5) for a, p in zip(wanted, parts))
    for _ in range(2):
        lms.evict()
        n = F.linear(n, w)
    lms.evict()
    assert all(torch.equal(a, b) for a, b in zip(n.unbind(), wanted))
    a = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    b = torch.nested.nested_tensor([torch.randn(2, 4, 6), torch.randn(2, 4, 6)])
    wanted = [torch.matmul(x, y) for x, y in zip(a.unbind(), b.unbind())]
    lms.evict()
    c = torch.matmul(a, b)
    lms.evict()
    assert all(torch.allclose(x, y) for x, y in zip(c.unbind(), wanted))
    e = torch.empty_like(n)
    lms.evict()
    assert [p.shape for p in e.unbind()] == [p.shape for p in n.unbind()]


def test_without_the_hook_nested_tensors_are_left_to_pytorch():
    spillway_torch._C.set_hook(False)
    n = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)])
    before = spillway_torch.memory_stats()["frames"]
    assert [tuple(p.shape) for p in n.transpose(1, 2).unbind()] == [(4, 3), (4, 5)]
    assert F.linear(n, torch.eye(4)).unbind()[1].sum().item() == 20
    assert spillway_torch.memory_stats()["frames"] == before


def test_quantized(lms):
    q = torch.quantize_per_tensor(torch.arange(10.), 0.5, 0, torch.qint8)
    lms.evict()
    assert q.dequantize().tolist() == list(range(10))


def test_quantized_with_scales_for_each_channel(lms):
    x, scales, zeros = torch.randn(64, 32), torch.rand(64, dtype=torch.double) + 0.01, torch.zeros(64, dtype=torch.long)

    def results(send_away):
        q = torch.quantize_per_channel(x, scales.clone(), zeros.clone(), 0, torch.qint8)
        acts = (lambda: q.dequantize(), lambda: q[:, 3:9].dequantize(), lambda: q.q_per_channel_scales(),
                lambda: torch.equal(q, q.clone()), lambda: q.copy_(torch.ones(64, 32)).int_repr(), lambda: repr(q))
        found = []
        for act in acts:
            send_away()
            found.append(act())
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in found]
    wanted = results(lambda: None)
    assert results(lms.evict) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", [
    lambda x: torch.max_pool1d(x[None], 2),
    lambda x: torch.choose_qparams_optimized(x, x.numel(), 200, 0.16, 8),
    lambda x: torch._saturate_weight_to_fp16(x * 1e5)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_composites_that_read_their_operands(lms, act, requires_grad):
    x = torch.randn(64, 256)
    wanted = act(x)
    x.requires_grad_(requires_grad)
    lms.evict()
    assert lms.is_away(x)
    torch.testing.assert_close(act(x), wanted, rtol=0, atol=0)


def test_composites_whose_errors_print_tensors(lms):
    matrix = torch.ones(2, 2)
    lms.evict()
    with pytest.raises(RuntimeError, match="Expected 0D or 1D tensor in the tensor list but got: +1 +1"):
        torch.meshgrid(matrix, indexing="ij")
    lms.evict()
    assert lms.is_away(matrix)


@pytest.mark.filterwarnings("ignore:fbgemm")
@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no FBGEMM")
def test_weights_packed_for_fbgemm(lms):
    weight, x, bias = torch.randn(64, 256), torch.randn(8, 256), torch.randn(64)

    def results(send_away):
        send_away()
        half = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        send_away()
        found = [torch.fbgemm_linear_fp16_weight_fp32_activation(x, half, bias)]
        send_away()
        bytes_of, offsets, scale, zero = torch.fbgemm_linear_quantize_weight(weight)
        send_away()
        packed = torch.fbgemm_pack_quantized_matrix(bytes_of)
        send_away()
        return [*found, torch.fbgemm_linear_int8_weight(x, bytes_of, packed, offsets, scale, zero, bias)]
    wanted = results(lambda: None)
    torch.testing.assert_close(results(lms.evict), wanted, rtol=0, atol=0)


def test_foreach_in_pieces(lms):
    lists = [[torch.full((1 << 18,), float(i + j)) for i in range(40)] for j in range(2)]
    spillway_torch._C.set_foreach_bytes(8 << 20)
    lms.evict()
    torch._foreach_add_(lists[0], lists[1], alpha=2.)
    results = torch._foreach_mul(lists[0], [float(i) for i in range(40)])
    lms.evict()
    for i in range(40):
        assert lists[0][i][5].item() == i + 2 * (i + 1)
        assert results[i][-1].item() == i * (i + 2 * (i + 1))


def test_foreach_of_sizes_that_are_not_known_yet(lms):
    lists = [[torch.full((n,), float(n + j)) for n in (16, 8)] for j in range(2)]
    add = torch.compile(torch._foreach_add_, backend="eager", dynamic=True, fullgraph=True)
    lms.evict()
    add(*lists)
    lms.evict()
    assert [t.tolist() for t in lists[0]] == [[33.] * 16, [17.] * 8]


def test_gradients_are_unscaled_in_pieces(lms):
    def run(bad):
        gradients = [torch.full((1 << 20,), 8.) for _ in range(70)]  # 280 MiB, where 256 fit
        gradients[31][5] = bad
        found = torch.zeros(1)
        lms.evict()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full((1,), 0.25))
        lms.evict()
        return found.item(), gradients[0][7].item(), gradients[69][-1].item()
    spillway_torch._C.set_foreach_bytes(32 << 20)
    assert run(8.) == (0., 2., 2.) and run(float("inf")) == (1., 2., 2.)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_over_lists(lms, kind):
    def train(evicts):
        torch.manual_seed(1)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, **{kind: True})
        x = torch.randn(16, 64)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            if evicts:
                lms.evict()
            optimizer.step()
        return [outside(p) for p in net.parameters()]
    spillway_torch._C.set_foreach_bytes(20_000)
    assert train(False) == train(True)


def test_a_storage_that_dies_while_it_is_away_frees_its_host_copy(lms):
    q = torch.randn(100_000)
    lms.evict()
    before = lms.stats()["host.pinned_bytes"]
    del q
    gc.collect()
    assert lms.stats()["host.pinned_bytes"] <= before - 400_000


def test_foreign_storages_are_left_alone(lms, tmp_path):
    import numpy
    array = numpy.ones(5000, numpy.float32)
    f = torch.from_numpy(array)
    f.add_(1)
    lms.evict()
    assert not lms.is_ours(f) and array.sum() == 10_000
    shared = torch.ones(5000)
    lms.evict()
    shared.share_memory_()  # its bytes move to shared memory, which is not the library's
    lms.evict()
    assert not lms.is_ours(shared) and shared.sum().item() == 5000
    path = tmp_path / "f"
    array.tofile(path)
    mapped = torch.from_file(str(path), size=5000)
    lms.evict()
    assert mapped.sum().item() == 10_000
    b = torch.frombuffer(bytearray(b"\1\2\3\4" * 4096), dtype=torch.uint8)
    lms.evict()
    assert b[3].item() == 4


def test_a_lazy_clone_is_a_copy(lms):
    a = torch.arange(5000.)
    b = torch._lazy_clone(a)
    lms.evict()
    b.add_(1)
    lms.evict()
    assert a[7].item() == 7 and b[7].item() == 8


def test_an_exception_in_a_kernel_leaves_nothing_held(lms):
    p = torch.randn(30, 40)
    with pytest.raises(RuntimeError):
        torch.mm(p, p)
    assert not lms.view(p)["in_use"]
    assert lms.stats()["active_frames"] == 0
    assert lms.evict() >= 4800
