# SPDX-License-Identifier: Apache-2.0
"""Calls of the allocator by C++ code in PyTorch: for cuDNN, cuBLAS and NCCL, and by code that looks for a segment."""
import ctypes

import pytest
import torch

import spillway_torch

MIB = 1 << 20


def test_the_largest_piece_can_be_had_without_anything_leaving(native, lms, make):
    made = [make(4, seed)[0] for seed in range(3)]
    before = lms.stats()

    bytes_ = native.largest_piece(0)
    workspace = torch.cuda.caching_allocator_alloc(bytes_)

    assert bytes_ >= 16 * MIB  # of 32 MiB 12 are in use
    assert lms.stats()["reclaimed"] == before["reclaimed"]
    torch.cuda.caching_allocator_delete(workspace)
    del made


def test_the_largest_piece_is_small_when_memory_is_full(native, lms, make):
    made = [make(4, seed)[0] for seed in range(12)]  # 48 MiB, where 32 fit

    assert native.largest_piece(0) < 8 * MIB
    del made


def test_the_workspaces_of_cublas_are_named(native, lms):
    before = lms.stats()["cublas_workspace_bytes"]

    native.keep_workspace(3 * MIB)

    assert lms.stats()["cublas_workspace_bytes"] - before == 3 * MIB
    assert "workspaces of cuBLAS" in spillway_torch.memory_summary()
    torch._C._cuda_clearCublasWorkspaces()
    assert lms.stats()["cublas_workspace_bytes"] == 0


def test_an_address_is_traced_to_its_segment(native, make):
    x, _ = make(4)
    size = ctypes.c_size_t()

    base = native.base_of(x.data_ptr() + 5, ctypes.byref(size))

    segments = {s["address"]: s["total_size"] for s in torch.cuda.memory_snapshot()}
    assert segments[base] == size.value and base <= x.data_ptr() < base + size.value


has_hooks = torch.__version__ >= "2.13"  # then a storage calls a hook when its address is asked for


@pytest.mark.skipif(not has_hooks, reason="nothing can bring the tensor in")
def test_an_address_that_code_in_cpp_asks_for_is_good_and_stays(native, lms, make):
    x, host = make()
    lms.evict()

    address = native.address_of(x._cdata)

    lms.evict()
    assert address != 0 and address == native.address_of(x._cdata)
    assert lms.view(x)["kept"] and not lms.is_away(x)
    assert torch.equal(x.cpu(), host)


@pytest.mark.skipif(has_hooks, reason="the tensor is brought in")
def test_an_address_that_code_in_cpp_asks_for_is_refused(native, lms, make):
    x, host = make()
    lms.evict()

    assert native.refuses_address(x._cdata)

    with spillway_torch.hold(x):
        assert not native.refuses_address(x._cdata)
    assert torch.equal(x.cpu(), host)


@pytest.mark.filterwarnings("ignore")
def test_profilers_see_the_shapes_of_what_is_away(lms, make):
    x, _ = make(1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True, with_modules=True) as profiler:
        lms.evict()
        torch.nn.Hardtanh()(x)
    shapes = [event.input_shapes[0] for event in profiler.events() if event.name == "aten::hardtanh"]
    assert shapes and all(shape == list(x.shape) for shape in shapes)


def test_trackers_hear_of_memory_that_comes_and_goes(native, lms, make):
    native.track()
    x, host = make(4)
    come, gone = native.tracked_allocations(), native.tracked_frees()
    assert come >= 1

    lms.evict()

    assert native.tracked_frees() > gone
    assert torch.equal(x.cpu(), host)
    assert native.tracked_allocations() > come


def test_trackers_hear_of_a_segment_that_goes_while_it_is_there(native, script):
    out = script("import ctypes, torch, spillway_torch\n"
                 f"native = ctypes.CDLL({native._name!r})\n"
                 "spillway_torch.install(device='cuda', limit=16 << 20)\n"
                 "x = torch.empty(1 << 20, device='cuda')\n"
                 "native.track()\n"
                 "del x\n"
                 "torch.cuda.empty_cache()\n"
                 "native.were_segments_there.restype = ctypes.c_bool\n"
                 "print(native.tracked_segment_frees() > 0, native.were_segments_there())")

    assert out == "True True\n"
