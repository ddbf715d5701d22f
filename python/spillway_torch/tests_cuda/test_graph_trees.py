# SPDX-License-Identifier: Apache-2.0
"""CUDA graph trees, which `torch.compile(mode="reduce-overhead")` makes. The backend "cudagraphs" makes the same trees without
generating kernels, so the stand-in can run it."""
import gc
import json

import pytest
import torch

MIB = 1 << 20

# Prints the results of a program, with support if `limit` is not 0. `sees` is called between the graphs.
START = """
import gc, hashlib, json, sys, torch
import kernels
if limit:
    import spillway_torch
    spillway_torch.install(device="cuda", limit=limit, host_limit=256 << 20)
kernels.install()
if limit:
    spillway_torch.set_enabled_lms(True)
torch.manual_seed(7)
results, others = [], []
def sees(*tensors):
    results.append([hashlib.sha256(t.detach().cpu().numpy().tobytes()).hexdigest()[:12] for t in tensors])
    if limit:
        spillway_torch.reclaim_inactive()
    others.append(torch.full((1 << 20,), len(others), dtype=torch.float32, device="cuda"))  # 4 MiB
    del others[:-6]
def replays():
    from torch._inductor import cudagraph_trees
    manager = cudagraph_trees.get_container(0).tree_manager
    return manager is not None and manager.new_graph_id().id > 0
"""
END = """
for i, other in enumerate(others):
    assert (other == other[0]).all()
print(json.dumps({"results": results, "graphs": replays(), "failure": kernels.failure(),
                  "out": spillway_torch.memory_stats()["swap_out_bytes"] if limit else 0}))
"""

PROGRAMS = {
    "training": """
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
step = torch.compile(net, backend="cudagraphs")
for _ in range(6):
    loss = (step(torch.randn(512, 64, device="cuda")) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sees(loss, *net.parameters())
""",
    "branches": """
# Every graph may follow every other. So memory of one is that of another, and the tree goes back and forth.
a, b = torch.nn.Linear(64, 128).cuda(), torch.nn.Linear(128, 64).cuda()
with torch.no_grad():
    first = torch.compile(lambda x: a(x).relu(), backend="cudagraphs", dynamic=False)
    second = torch.compile(lambda x: (b(x).tanh(), b(x).exp()), backend="cudagraphs", dynamic=False)
    for i in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(64 << i % 3, 64, device="cuda")
        y = first(x)
        if i % 4 != 1:
            z, w = second(y)
            if i % 4 == 2:
                del z
                z, more = second(first(w) if i % 3 else y)
                sees(more)
            sees(z, w)
        sees(y)
""",
    "outputs that live on": """
a = torch.nn.Linear(64, 64).cuda()
f = torch.compile(lambda x: (a(x).relu(), a(x) * 2, x + 1), backend="cudagraphs", dynamic=False)
kept = []
with torch.no_grad():
    for i in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        p, q, r = f(torch.randn(1024 if i % 2 else 512, 64, device="cuda"))
        kept.append(q.clone())
        p = f(p)[2] if i % 3 == 0 else p
        sees(p, q, r)
        del q
    sees(*kept)
""",
    "generation": """
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).cuda().eval()
head = torch.nn.Linear(32, 50).cuda()
embedding = torch.nn.Embedding(50, 32).cuda()
step = torch.compile(lambda tokens: head(layer(embedding(tokens))[:, -1]).argmax(-1), backend="cudagraphs", dynamic=False)
with torch.no_grad():
    for _ in range(3):
        tokens = torch.zeros(8, 1, dtype=torch.long, device="cuda")
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            tokens = torch.cat([tokens, step(tokens)[:, None]], 1)
        sees(tokens)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_trees_of_graphs_compute_the_same(script, name):
    plain, done = (json.loads(script(f"limit = {limit}\n{START}{PROGRAMS[name]}{END}").splitlines()[-1])
                   for limit in (0, 24 * MIB))

    assert plain["graphs"] and done["graphs"] and not done["failure"]
    assert done["results"] == plain["results"]
    assert done["out"] >= 8 * MIB


@pytest.fixture
def captured():
    """A function that makes a graph as Inductor does with mode="reduce-overhead", from Python code for a list of inputs. Those
    with the numbers `static` are always the same tensors."""
    from spillway_torch._compiled import _leasing_graph
    from torch._inductor import cudagraph_trees

    class Graph:
        def __init__(self, code, example, static=()):
            self.current_callable = cudagraph_trees.cudagraphify_impl(
                code, example, static, device_index=0, is_backward=False, is_inference=True, stack_traces=[None])

        __call__ = _leasing_graph(lambda self, inputs: self.current_callable(inputs))

    with torch.no_grad():
        yield Graph
    cudagraph_trees.reset_cudagraph_trees()


def recorded_graphs():
    from torch._inductor import cudagraph_trees
    return cudagraph_trees.get_container(0).tree_manager.new_graph_id().id


@pytest.mark.stand_in
def test_the_inputs_of_a_captured_graph_that_takes_addresses_stay(native, lms, captured):
    """Graphs that Inductor wraps in C++ take addresses there. They are called with their inputs leased until they return."""
    def code(inputs):
        weight, x = inputs
        inputs.clear()
        stream = torch.cuda.current_stream().cuda_stream
        out = torch.empty_like(x)
        native.add_on_stream(*(native.address_of(t._cdata) for t in (weight, x, out)), x.numel(), stream)
        return (out,)

    weight = torch.full((MIB,), 5.0, device="cuda")
    graph = captured(code, [weight, weight], static=[0])
    for i in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((MIB,), float(i), device="cuda")
        (out,) = graph([weight, x])
        assert (out == 5 + i).all(), i
        lms.evict()
        if i >= 1:  # recorded
            assert lms.view(weight)["resident"] and lms.is_away(x) == (i > 1)
        others = [torch.full((MIB,), float(j), device="cuda") for j in range(6)]
        lms.evict()
    assert all((other == j).all() for j, other in enumerate(others))
    assert recorded_graphs() == 1


@pytest.mark.stand_in
def test_a_captured_graph_reuses_the_memory_of_inputs_that_have_ended(captured):
    def double(inputs):
        (x,) = inputs
        inputs.clear()
        return (x * 2,)

    def chain(inputs):
        (x,) = inputs
        inputs.clear()
        y = x + 1
        addresses.append(x.untyped_storage().data_ptr())
        del x
        z = y * 3
        addresses.append(z.untyped_storage().data_ptr())
        return (z,)

    x = torch.ones(MIB, device="cuda")
    first, second = captured(double, [x]), captured(chain, [x])
    for i in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        addresses = []
        (z,) = second(list(first([x])))
        assert (z == 9).all()
        assert len(addresses) == (2 if i < 2 else 0) and len(set(addresses)) <= 1
    assert recorded_graphs() == 2


@pytest.mark.stand_in
def test_the_memory_of_a_tree_is_given_back_with_it(captured):
    from torch._inductor import cudagraph_trees

    def double(inputs):
        (x,) = inputs
        inputs.clear()
        return (x * 2 + 1,)

    x = torch.ones(MIB, device="cuda")
    before = torch.cuda.memory_allocated()
    graph = captured(double, [x])
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        (y,) = graph([x])
        assert (y == 3).all()
    assert torch.cuda.memory_allocated() > before + 4 * MIB
    del y, graph
    cudagraph_trees.reset_cudagraph_trees()
    gc.collect()
    torch.cuda.synchronize()

    assert torch.cuda.memory_allocated() == before


def test_a_checkpoint_says_what_is_allocated_in_a_pool(make):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x, y = torch.zeros(MIB, device="cuda"), torch.ones(MIB, device="cuda")
    at_first = torch._C._cuda_getCheckpointState(0, pool.id)
    address = y.untyped_storage().data_ptr()
    del y
    with torch.cuda.use_mem_pool(pool):
        z = torch.full((2 * MIB,), 2.0, device="cuda")

    torch._C._cuda_setCheckpointPoolState(0, at_first, [z.untyped_storage()._cdata], [])

    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, {x.data_ptr(), address})
    assert x.sum().item() == 0
    del x, z
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)
    gc.collect()
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, set())


def test_a_checkpoint_of_a_pool_that_is_gone_is_refused():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.zeros(MIB, device="cuda")
    state = torch._C._cuda_getCheckpointState(0, pool.id)
    del x, pool
    gc.collect()

    with pytest.raises(RuntimeError, match="memory pool that nobody uses"):
        torch._C._cuda_setCheckpointPoolState(0, state, [], [])


def test_the_snapshot_of_all_memory_names_the_pool_of_each_piece(make):
    x, _ = make(1)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        live, idle = torch.zeros(MIB, device="cuda"), torch.ones(MIB // 2, device="cuda")
    address = live.data_ptr()
    del idle

    segments = torch.cuda.memory_snapshot()

    own = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool.id)]
    assert sorted((s["total_size"], s["allocated_size"]) for s in own) == [(2 * MIB, 0), (4 * MIB, 4 * MIB)]
    assert [s["address"] for s in own if s["allocated_size"]] == [address]
    assert [b["state"] for s in own for b in s["blocks"] if s["address"] != address] == ["inactive"]
    assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
    for segment in segments:
        assert segment["total_size"] == sum(b["size"] for b in segment["blocks"])
    del x, live
