# SPDX-License-Identifier: Apache-2.0
"""The functions that PyTorch calls of its CUDA allocator, and what `torch.cuda` reports about it."""
import gc
import json

import pytest
import torch

MIB = 1 << 20


def test_it_is_the_allocator_of_cuda_tensors(lms, make):
    x, _ = make()

    assert torch.cuda.memory.get_allocator_backend() == "spillway"
    assert lms.view(x)["ours"]


def test_tensors_beyond_the_limit_keep_their_bytes(lms, make):
    made = [make(4, seed) for seed in range(16)]  # 64 MiB, where 32 fit

    assert all(torch.equal(x.cpu(), host) for x, host in made)
    assert lms.stats()["swap_out_bytes"] > 0
    assert lms.stats()["tensor_bytes.all.current"] >= 64 * MIB
    assert torch.cuda.memory_allocated() <= torch.cuda.memory_reserved() <= 32 * MIB


def test_memory_stats_has_the_keys_of_the_native_allocator(script):
    keys = script("import json, torch; x = torch.empty(1000, device='cuda'); "
                  "print(json.dumps(sorted(torch.cuda.memory_stats())))")

    assert set(json.loads(keys)) <= set(torch.cuda.memory_stats())


def test_allocated_requested_and_peak_follow_tensors():
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    before = torch.cuda.memory_stats()

    x = torch.empty(3 * MIB + 1, dtype=torch.uint8, device="cuda")
    during = torch.cuda.memory_stats()
    del x
    after = torch.cuda.memory_stats()

    def grown(now, key):
        return now[key] - before[key]
    assert grown(during, "allocated_bytes.all.current") == 3 * MIB + 256
    assert grown(during, "allocated_bytes.large_pool.current") == 3 * MIB + 256
    assert grown(during, "requested_bytes.all.current") == 3 * MIB + 1
    assert grown(during, "allocation.all.current") == 1
    assert grown(after, "allocated_bytes.all.current") == 0
    assert after["allocated_bytes.all.peak"] == before["allocated_bytes.all.current"] + 3 * MIB + 256
    assert (after["allocation.all.allocated"], after["allocation.all.freed"]) == (1, 1)


def test_small_allocations_are_counted_apart():
    before = torch.cuda.memory_stats()

    x = torch.empty(1000, dtype=torch.uint8, device="cuda")

    now = torch.cuda.memory_stats()
    assert now["allocated_bytes.small_pool.current"] - before["allocated_bytes.small_pool.current"] == 1024
    assert now["allocated_bytes.large_pool.current"] == before["allocated_bytes.large_pool.current"]
    del x


def test_peaks_and_totals_can_be_reset(make):
    x, _ = make(8)
    del x
    gc.collect()

    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()

    now = torch.cuda.memory_stats()
    assert now["allocated_bytes.all.peak"] == now["allocated_bytes.all.current"]
    assert now["allocated_bytes.all.allocated"] == now["num_ooms"] == 0


def test_active_and_inactive_make_up_what_is_reserved(make):
    made = [make(3, seed) for seed in range(14)]  # more than fits, so that some are away

    now = torch.cuda.memory_stats()

    assert now["active_bytes.all.current"] + now["inactive_split_bytes.all.current"] == \
        now["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
    assert now["active_bytes.all.current"] == now["allocated_bytes.all.current"]
    del made


@pytest.mark.alone
def test_memory_is_taken_on_demand_and_given_back(script):
    out = script("import torch, spillway_torch\n"
                 "spillway_torch.install(device='cuda', limit=64 << 20, host_limit=256 << 20)\n"
                 "spillway_torch.set_enabled_lms(True)\n"
                 "x = torch.full((4 << 20,), 1, dtype=torch.uint8).cuda()\n"
                 "print(torch.cuda.memory_reserved() <= 12 << 20)\n"
                 "pile = [torch.full((4 << 20,), i, dtype=torch.uint8).cuda() for i in range(24)]\n"
                 "print(torch.cuda.memory_reserved() == 64 << 20)\n"
                 "free = torch.cuda.mem_get_info()[0]\n"
                 "print(spillway_torch.park() == 64 << 20, torch.cuda.mem_get_info()[0] - free == 64 << 20)\n"
                 "print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())\n"
                 "print(all(int(t[-1:].cpu()) == i for i, t in enumerate(pile)), int(x[:1].cpu()))\n"
                 "spillway_torch.set_limit_lms(32 << 20)\n"
                 "print(torch.cuda.memory_reserved() <= 32 << 20)\n"
                 "print(all(int(t[-1:].cpu()) == i for i, t in enumerate(pile)))",
                 SPILLWAY_FAKE_CUDA_MAPS="1")

    assert out.split() == ["True"] * 4 + ["0", "0", "True", "1", "True", "True"]


@pytest.mark.stand_in
def test_all_memory_is_taken_at_once_where_the_driver_cannot_map_it(script):
    out = script("import torch, spillway_torch\n"
                 "spillway_torch.install(device='cuda', limit=64 << 20, host_limit=256 << 20)\n"
                 "spillway_torch.set_enabled_lms(True)\n"
                 "x = torch.empty(4 << 20, dtype=torch.uint8, device='cuda')\n"
                 "print(torch.cuda.memory_reserved() >> 20)\n"
                 "del x\n"
                 "torch.cuda.empty_cache()\n"
                 "print(torch.cuda.memory_reserved() >> 20)\n"
                 "x = torch.empty(4 << 20, dtype=torch.uint8, device='cuda')\n"
                 "y = torch.empty(56 << 20, dtype=torch.uint8, device='cuda')\n"
                 "print(torch.cuda.memory_reserved() >> 20)",
                 SPILLWAY_FAKE_CUDA_MAPS="0")

    assert out.split() == ["64", "0", "64"]


def test_memory_summary_is_a_table():
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert "GPU reserved memory" in torch.cuda.memory_summary()


def test_an_allocation_that_cannot_fit_is_pytorchs_error(make):
    x, host = make(2)
    before = torch.cuda.memory_stats()["num_ooms"]
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *what: seen.append(what))

    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory. spillway: .* capacity 33554432"):
        torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")

    assert torch.cuda.memory_stats()["num_ooms"] == before + 1
    assert [(device, size) for device, size, *_ in seen] == [(0, 40 * MIB)]
    assert torch.equal(x.cpu(), host)


def test_snapshot_shows_each_resident_block(lms, make):
    made = [make(1, seed)[0] for seed in range(3)]
    addresses = {x.data_ptr(): x for x in made}

    snapshot = torch.cuda.memory_snapshot()

    shown = {block["address"]: block for segment in snapshot for block in segment["blocks"]}
    for address in addresses:
        assert shown[address]["state"] == "active_allocated"
        assert shown[address]["requested_size"] == MIB
    assert sum(segment["total_size"] for segment in snapshot) == torch.cuda.memory_reserved()
    for segment in snapshot:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_what_has_left_is_not_in_the_snapshot(lms, make):
    x, _ = make(5)
    lms.evict()
    assert lms.is_away(x)

    sizes = [b["size"] for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["state"] != "inactive"]

    assert 5 * MIB not in sizes


def test_recorded_history_has_stacks_and_opens_in_memory_viz(tmp_path, lms, make):
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    try:
        x, _ = make(2)
        lms.evict()
        x.cpu()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)

    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert actions.count("alloc") >= 2 and "free_completed" in actions  # the tensor left and came back
    allocated = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["size"] == 2 * MIB]
    assert any("conftest" in frame["filename"] for entry in allocated for frame in entry["frames"])
    from torch.cuda import _memory_viz
    for picture in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "MemoryViz" in picture
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot)
    with open(tmp_path / "snapshot.pickle", "rb") as file:
        import pickle
        assert pickle.load(file)["segments"]


def test_history_that_is_off_records_nothing(make):
    make(1)

    assert torch.cuda.memory._snapshot()["device_traces"][0][:-1] == []


def test_empty_cache_leaves_tensors_alone(make):
    x, host = make(2)

    torch.cuda.empty_cache()

    assert torch.equal(x.cpu(), host)


@pytest.mark.alone
def test_empty_cache_gives_back_what_no_tensor_is_in(script):
    out = script("import torch, spillway_torch\n"
                 "spillway_torch.install(device='cuda', limit=16 << 20)\n"
                 "x = torch.empty(1 << 20, device='cuda')\n"
                 "free = torch.cuda.mem_get_info()[0]\n"
                 "del x\n"
                 "torch.cuda.empty_cache()\n"
                 "print(torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0] - free >= 4 << 20)\n"
                 "x = torch.empty(1 << 20, device='cuda')\n"
                 "print(torch.cuda.memory_reserved() >= 4 << 20)")

    assert out == "0 True\nTrue\n"


def test_a_memory_fraction_is_a_limit(make):
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(20 * MIB / total)
        assert abs(torch.cuda.get_per_process_memory_fraction() * total - 20 * MIB) <= MIB
        made = [make(4, seed) for seed in range(8)]
        assert all(torch.equal(x.cpu(), host) for x, host in made)
        assert torch.cuda.memory_stats()["active_bytes.all.current"] <= 32 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)  # a limit above the available memory counts as all of it
    del made
    torch.cuda.empty_cache()  # without mapped memory, growth is not contiguous with the rest of the arena
    torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")


def test_plain_memory_can_be_allocated():
    before = torch.cuda.memory_allocated()

    p = torch.cuda.caching_allocator_alloc(MIB)

    assert p != 0 and torch.cuda.memory_allocated() - before == MIB
    torch.cuda.caching_allocator_delete(p)
    assert torch.cuda.memory_allocated() == before


def test_a_second_install_is_refused():
    import spillway_torch
    with pytest.raises(RuntimeError, match="installed already"):
        spillway_torch.install(device="cuda")


def test_install_does_not_begin_to_use_cuda(script):
    out = script("import torch, spillway_torch\n"
                 "spillway_torch.install(device='cuda', limit=16 << 20)\n"
                 "spillway_torch.set_enabled_lms(True)\n"
                 "print(torch.cuda.is_initialized())\n"
                 "torch.empty(10, device='cuda')\n"
                 "print(torch.cuda.is_initialized())")

    assert out == "False\nTrue\n"


@pytest.mark.parametrize("option", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_what_pytorchs_own_allocator_was_told_makes_no_difference(script, option):
    out = script("import torch, spillway_torch\n"
                 "spillway_torch.install(device='cuda', limit=16 << 20, host_limit=64 << 20)\n"
                 "spillway_torch.set_enabled_lms(True)\n"
                 "made = [torch.full((4 << 20,), i, dtype=torch.uint8).cuda() for i in range(8)]\n"
                 "print(torch.cuda.memory.get_allocator_backend(), [t[-1:].cpu().item() for t in made],\n"
                 "      torch.cuda.max_memory_allocated() <= 16 << 20, spillway_torch.memory_stats()['swap_outs'] > 0)",
                 PYTORCH_CUDA_ALLOC_CONF=option)

    assert out == "spillway [0, 1, 2, 3, 4, 5, 6, 7] True True\n"


def test_a_program_may_end_with_tensors_away_and_in_use(script):
    out = script("import atexit, torch, spillway_torch\n"
                 "spillway_torch.install(device='cuda', limit=16 << 20, host_limit=64 << 20)\n"
                 "spillway_torch.set_enabled_lms(True)\n"
                 "side = torch.cuda.Stream()\n"
                 "made = [torch.full((4 << 20,), i, dtype=torch.uint8).cuda() for i in range(8)]\n"
                 "with torch.cuda.stream(side):\n"
                 "    copies = [torch.empty_like(t).copy_(t) for t in made[:2]]\n"
                 "made[0].record_stream(side)\n"
                 "held = spillway_torch.hold(made[5])\n"
                 "held.__enter__()\n"
                 "pool = torch.cuda.MemPool()\n"
                 "with torch.cuda.use_mem_pool(pool):\n"
                 "    pooled = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\n"
                 "class Cycle: pass\n"
                 "cycle = Cycle(); cycle.itself, cycle.tensor = cycle, made[3]\n"
                 "atexit.register(lambda: print(made[7][-1:].cpu().item()))\n"
                 "print('end')")

    assert out == "end\n7\n"


def test_an_install_after_cuda_was_used_is_refused(script):
    out = script("import torch, spillway_torch\n"
                 "torch.empty(10, device='cuda')\n"
                 "try: spillway_torch.install(device='cuda')\n"
                 "except RuntimeError as error: print(error)")

    assert "comes too late" in out


def test_asking_for_the_default_device_takes_cuda(script):
    out = script("import torch, spillway_torch\n"
                 "spillway_torch.set_limit_lms(16 << 20)\n"
                 "spillway_torch.set_enabled_lms(True)\n"
                 "print(torch.cuda.memory.get_allocator_backend())")

    assert out == "spillway\n"


def test_cpu_tensors_are_left_alone(lms):
    assert not lms.view(torch.ones(100000))["ours"]


def test_the_cuda_array_interface_and_dlpack_give_addresses_that_stay(lms, make):
    x, host = make(2)
    y, other = make(2, seed=1)
    lms.evict()

    address = x.__cuda_array_interface__["data"][0]
    shared = torch.from_dlpack(y)
    lms.evict()

    assert x.data_ptr() == address and lms.view(x)["kept"] and lms.view(y)["kept"]
    assert shared.data_ptr() == y.data_ptr()
    assert torch.equal(x.cpu(), host) and torch.equal(shared.cpu(), other)


def test_an_address_for_a_launch_holds_for_the_launch(lms, make):
    import spillway_torch
    x, host = make(2)
    lms.evict()

    with spillway_torch.hold():  # as a compiled graph does
        address = x.data_ptr()
        lms.evict()
        assert lms.view(x)["resident"] and x.data_ptr() == address
    lms.evict()

    assert lms.is_away(x) and torch.equal(x.cpu(), host)


def test_addresses_that_were_given_out_stay(lms, make):
    x, host = make(2)
    address = x.data_ptr()

    lms.evict()

    assert x.data_ptr() == address and lms.view(x)["resident"]
    assert torch.equal(x.cpu(), host)


@pytest.mark.gpu
def test_kernels_that_are_compiled_from_text_take_what_is_away(lms):
    tripled = torch.cuda.jiterator._create_jit_fn("template <typename T> T tripled(T x) { return 3 * x; }")
    x = torch.ones(1 << 16, device="cuda")
    lms.evict()

    assert torch.equal(tripled(x).cpu(), torch.full((1 << 16,), 3.0))


@pytest.mark.gpu
def test_cudnn_benchmarks_its_algorithms():
    x = torch.randn(4, 8, 32, 32, device="cuda")
    w = torch.randn(8, 8, 3, 3, device="cuda")

    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        y = torch.nn.functional.conv2d(x, w, padding=1)

    assert torch.allclose(y.cpu(), torch.nn.functional.conv2d(x.cpu(), w.cpu(), padding=1), atol=1e-3)


def test_the_allocator_cannot_be_replaced_after_install(script):
    script("import pytest, torch, spillway_torch\n"
           "spillway_torch.install(device='cuda', limit=16 << 20)\n"
           "allocator = torch.cuda.memory._get_current_allocator()\n"
           "with pytest.raises(RuntimeError, match='has replaced the allocator'):\n"
           "    torch.cuda.memory.change_current_allocator(allocator)\n"
           "torch.cuda.caching_allocator_enable(False)\n"
           "x = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\n"
           "assert spillway_torch._chosen.view(x)['ours']\n")
