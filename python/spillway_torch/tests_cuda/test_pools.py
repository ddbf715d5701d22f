# SPDX-License-Identifier: Apache-2.0
"""Private pools, and captures into CUDA graphs."""
import gc

import pytest
import torch

import spillway_torch

MIB = 1 << 20


def test_a_pools_tensors_never_leave_and_its_memory_stays_with_it(lms):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    address = x.untyped_storage().data_ptr()
    assert not lms.view(x)["ours"]

    lms.evict()
    assert x.untyped_storage().data_ptr() == address

    reserved = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == reserved
    with torch.cuda.use_mem_pool(pool):
        again = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    assert again.untyped_storage().data_ptr() == address
    del again, pool
    gc.collect()
    assert torch.cuda.memory_allocated() == reserved - 2 * MIB


def test_a_pool_counts_its_users():
    pool = torch.cuda.MemPool()
    assert pool.use_count() == 1

    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2

    assert pool.use_count() == 1


def test_a_pools_snapshot_shows_its_pieces():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        y = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    del y

    segments = pool.snapshot()

    assert sorted((s["total_size"], s["allocated_size"]) for s in segments) == [(2 * MIB, 0), (3 * MIB, 3 * MIB)]
    assert {tuple(s["segment_pool_id"]) for s in segments} == {tuple(pool.id)}
    del x


def test_memory_freed_outside_of_a_pool_goes_elsewhere():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    del x

    y = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")

    assert y.data_ptr() != address


def test_room_that_an_idle_pool_lends_is_no_want_of_memory():
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
    del x
    before = torch.cuda.memory_stats()["num_ooms"]
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: seen.append(what))

    y = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")

    assert y.numel() == 24 * MIB and torch.cuda.memory_stats()["num_ooms"] == before and not seen


def test_live_allocations_of_a_pool_can_be_checked():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty(MIB, dtype=torch.uint8, device="cuda")

    assert torch._C._cuda_checkPoolLiveAllocations(0, pool.id, {x.data_ptr()})
    assert not torch._C._cuda_checkPoolLiveAllocations(0, pool.id, set())


def test_a_pool_that_is_released_too_often_is_an_error():
    with pytest.raises(RuntimeError, match="pool is released that nobody uses"):
        torch._C._cuda_releasePool(0, (0, 12345))


class Capture:
    """Does the same as `torch.cuda.graph`, except that no graph is made, since the stand-in has none."""

    def __init__(self, stand_in, stream, pool):
        self.stand_in, self.stream, self.pool = stand_in, stream, pool

    def __enter__(self):
        torch.cuda.synchronize()
        self.inside = torch.cuda.stream(self.stream)
        self.inside.__enter__()
        torch._C._cuda_beginAllocateCurrentStreamToPool(0, self.pool)
        self.stand_in.spillway_fake_begin_capture(self.stream.cuda_stream)

    def __exit__(self, *error):
        self.stand_in.spillway_fake_end_capture(self.stream.cuda_stream)
        torch._C._cuda_endAllocateToPool(0, self.pool)
        self.inside.__exit__(*error)


def begins_captures():
    return hasattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool")


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
def test_what_a_capture_uses_stays_where_it_is(stand_in, lms, make):
    x, host = make(2)
    pool = torch.cuda.graph_pool_handle()
    with Capture(stand_in, torch.cuda.Stream(), pool):
        y = torch.empty_like(x)
        y.copy_(x)

    made = [make(4, seed)[0] for seed in range(10)]  # more than fits
    lms.evict()

    assert lms.view(x)["resident"] and lms.view(x)["kept"] and not lms.view(y)["ours"]
    assert torch.equal(x.cpu(), host)
    del y, made
    torch._C._cuda_releasePool(0, pool)


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
def test_an_operand_that_is_away_comes_in_beside_a_capture(stand_in, lms, make):
    x, host = make(2)
    lms.evict()
    pool = torch.cuda.graph_pool_handle()

    with Capture(stand_in, torch.cuda.Stream(), pool):
        torch.empty(x.shape, dtype=x.dtype, device="cuda").copy_(x)
        assert lms.view(x)["has_address"]

    lms.evict()
    assert lms.view(x)["kept"] and lms.view(x)["resident"]
    assert torch.equal(x.cpu(), host)
    torch._C._cuda_releasePool(0, pool)


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
@pytest.mark.parametrize("how", ["freed", "made to leave"])
def test_what_the_captured_stream_used_before_may_be_given_up_in_the_capture(stand_in, lms, make, how):
    """As in a warm-up on the stream of the capture, whose results are replaced in the capture."""
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    host = make(4)[1]
    with torch.cuda.stream(stream):
        before = [host.to("cuda") * 2 for _ in range(6)]
    with Capture(stand_in, stream, pool):
        if how == "freed":
            del before
        else:
            lms.evict()
        inside = [torch.empty(host.shape, device="cuda") for _ in range(2)]
    made = [make(4, seed) for seed in range(10)]  # more than fits
    assert all(torch.equal(x.cpu(), y) for x, y in made)
    if how == "made to leave":
        assert all(torch.equal(x.cpu(), host * 2) for x in before)
        del before
    del inside, made
    torch._C._cuda_releasePool(0, pool)
    assert lms.stats()["tensor_bytes.all.current"] == 0


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
def test_what_a_capture_inside_of_hold_uses_stays_where_it_is(stand_in, lms, make):
    """Both a tensor that was used before `hold`, and one that was made inside of `hold`, where tensors are not enrolled."""
    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(side):
        x, host = make(2)
        with spillway_torch.hold(x):
            z = torch.empty_like(x).copy_(x)
            with Capture(stand_in, side, pool):
                torch.empty_like(x).copy_(x)
                torch.empty_like(z).copy_(z)
    assert torch.equal(x.cpu(), host) and torch.equal(z.cpu(), host)

    lms.evict()

    for used in (x, z):
        assert lms.view(used)["kept"] and lms.view(used)["has_address"]
    torch._C._cuda_releasePool(0, pool)


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
def test_memory_for_a_captured_stream_is_of_its_capture_whichever_stream_is_current(stand_in, make):
    captured, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    x, _ = make(20)
    del x  # its place is free after the work of the default stream, for which a captured stream cannot wait
    with Capture(stand_in, captured, pool):
        with torch.cuda.stream(torch.cuda.Stream()):
            p = torch.cuda.caching_allocator_alloc(20 * MIB, stream=captured)
    torch.cuda.caching_allocator_delete(p)
    torch._C._cuda_releasePool(0, pool)


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
def test_a_stream_outside_of_a_capture_can_be_recorded_in_it(native, stand_in, takes_the_place_early):
    x = torch.ones(20 << 18, device="cuda")
    y = torch.zeros(1 << 18, device="cuda")
    last, to = x.data_ptr() + (19 << 20), y.data_ptr()
    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with Capture(stand_in, torch.cuda.Stream(), pool):
        stand_in.spillway_fake_stall(side.cuda_stream)
        native.add_on_stream(last, last, to, 1 << 18, side.cuda_stream)
        x.record_stream(side)
    del x

    assert not takes_the_place_early(side)

    assert torch.equal(y.cpu(), torch.full((1 << 18,), 2.0))
    torch._C._cuda_releasePool(0, pool)


@pytest.mark.stand_in
@pytest.mark.skipif(not begins_captures(), reason="this PyTorch calls it otherwise")
def test_a_pool_in_use_keeps_its_idle_memory_when_the_cache_is_emptied(stand_in):
    pool = torch.cuda.graph_pool_handle()
    with Capture(stand_in, torch.cuda.Stream(), pool):
        x = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    del x

    torch.cuda.empty_cache()  # PyTorch does this before it captures another graph

    assert [segment["address"] for segment in torch.cuda.memory_snapshot(pool)] == [address]
    torch._C._cuda_releasePool(0, pool)


def test_a_graph_is_launched_after_another_one_was_captured(make):
    x, host = make(2)
    w, other_host = make(2, seed=20)
    y = torch.empty_like(x)
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        between = torch.empty_like(x).copy_(x)
        y.copy_(between)
        del between
    with torch.cuda.graph(second):
        z = torch.empty_like(w).copy_(w)  # would get the memory of `between` if that were reused
    others = [make(2, seed) for seed in range(1, 14)]  # more than fits

    second.replay()
    first.replay()
    torch.cuda.synchronize()

    assert torch.equal(y.cpu(), host) and torch.equal(z.cpu(), other_host)
    assert all(torch.equal(other.cpu(), bytes_) for other, bytes_ in others)


def test_memory_that_a_stream_used_before_it_joined_a_capture_is_reused_in_the_capture(make):
    x, host = make(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = [torch.empty_like(x).copy_(x) for _ in range(24)]
    side.synchronize()
    kept = made[::2]
    del made  # leaves gaps, which cannot be given back to the device
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies = [torch.empty_like(x).copy_(x) for _ in range(4)]
        torch.cuda.current_stream().wait_stream(side)

    graph.replay()
    torch.cuda.synchronize()

    assert all(torch.equal(y.cpu(), host) for y in copies + kept)


class Copies(torch.nn.Module):
    """A module that only copies, which needs no kernels."""

    def forward(self, x):
        return x.clone().clone()


def test_graphed_callables_agree_after_others_were_made(make):
    x, host = make(2)
    one = torch.cuda.make_graphed_callables(Copies(), (x.clone(),))
    two = torch.cuda.make_graphed_callables(Copies(), (x.clone(),))
    others = [make(2, seed) for seed in range(1, 14)]  # more than fits

    second = two(others[0][0])
    first = one(x)
    torch.cuda.synchronize()

    assert torch.equal(first.cpu(), host) and torch.equal(second.cpu(), others[0][1])
    assert all(torch.equal(other.cpu(), bytes_) for other, bytes_ in others)


def last_mib(x):
    return x[-(1 << 18):]


@pytest.mark.stand_in
@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_pools_memory_is_free_after_the_streams_that_were_recorded(is_used_again, stand_in, takes_the_place_early, make):
    y = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x, host = make(20)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        y.copy_(last_mib(x))
    x.record_stream(side)
    del x
    if is_used_again:
        with torch.cuda.use_mem_pool(pool):
            assert not takes_the_place_early(side)
    else:
        del pool
        gc.collect()
        assert not takes_the_place_early(side)

    assert torch.equal(y.cpu(), last_mib(host))


@pytest.mark.stand_in
def test_a_graphs_memory_is_free_after_its_launches(stand_in, takes_the_place_early, make):
    x, host = make(1)
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = torch.empty(20 << 18, dtype=torch.int32, device="cuda")
        last_mib(between).copy_(x)
        y.copy_(last_mib(between))
        del between
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        graph.replay()
    del graph
    gc.collect()

    assert not takes_the_place_early(side)

    assert torch.equal(y.cpu(), host)


@pytest.mark.stand_in
def test_what_a_graph_uses_is_free_after_its_launches(stand_in, takes_the_place_early, lms, make):
    x, host = make(20)
    y = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    lms.evict()
    with torch.cuda.graph(graph):
        y.copy_(last_mib(x))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        graph.replay()
    del x

    assert not takes_the_place_early(side)

    assert torch.equal(y.cpu(), last_mib(host))


@pytest.mark.stand_in
def test_a_pools_own_allocator_gets_memory_back_after_the_streams_that_used_it(native, stand_in):
    allocator = torch.cuda.memory.CUDAPluggableAllocator(native._name, "take", "clear_and_give_back")
    host = torch.full((4 << 18,), 7, dtype=torch.int32)
    y = torch.empty_like(host, device="cuda")
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        x = torch.empty_like(host, device="cuda").copy_(host)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        y.copy_(x)
    x.record_stream(side)
    del x, pool
    gc.collect()
    stand_in.spillway_fake_resume()
    torch.cuda.synchronize()

    assert torch.equal(y.cpu(), host)


def test_a_pools_own_allocator_may_have_no_room(native):
    allocator = torch.cuda.memory.CUDAPluggableAllocator(native._name, "take", "clear_and_give_back")
    pool = torch.cuda.MemPool(allocator.allocator())

    with torch.cuda.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory. "):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")

    assert not pool.snapshot()


def test_a_graph_is_launched_after_everything_else_has_left(lms):
    x = torch.randn(1 << 20, device="cuda")
    warm = (x * 2 + 1).sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    del warm
    fill = [torch.randn(1 << 20, device="cuda") for _ in range(16)]
    lms.evict()

    x.copy_(torch.ones(1 << 20))
    graph.replay()

    assert torch.equal(y.cpu(), torch.full((1 << 20,), 3.0))
    del fill
