# SPDX-License-Identifier: Apache-2.0
"""The functions that users know from PyTorch's LMS and from torch.cuda, and the statistics that they return."""
import re

import pytest
import torch

import spillway_torch
from spillway_torch._bytes import numbers_of_bytes

POOLS = ("all", "large_pool", "small_pool")


def test_statistics_have_the_names_of_torch_cuda(lms):
    a = torch.ones(1 << 20)
    lms.evict()
    a.add_(1)
    now = lms.stats()
    for name in ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes", "tensor_bytes"):
        for pool in POOLS:
            assert {f"{name}.{pool}.{what}" in now for what in ("current", "peak", "allocated", "freed")} == {True}
            assert now[f"{name}.{pool}.allocated"] - now[f"{name}.{pool}.freed"] == now[f"{name}.{pool}.current"]
    for name in ("reserved_bytes", "inactive_split", "inactive_split_bytes", "pinned", "pinned_bytes"):
        assert all(f"{name}.{pool}.current" in now for pool in POOLS)
    for name in ("freelist", "cudamalloc", "reclaim_one", "reclaim_fragments", "reclaim_all", "cudamalloc_retry"):
        assert isinstance(now[f"alloc_distribution.{name}"], int)
    for name in ("reclaimed", "reclaimed_bytes", "num_ooms", "num_alloc_retries"):
        assert isinstance(now[name], int)


def test_statistics_count_what_happens(lms):
    torch.ones(2 << 20)  # grows the arena, so that the operand and the sum below fit, whatever other tests have released
    before = lms.stats()
    a = torch.ones(1 << 20)
    made = lms.stats()
    assert made["allocated_bytes.all.current"] - before["allocated_bytes.all.current"] == 4 << 20
    assert made["allocation.all.allocated"] - before["allocation.all.allocated"] >= 1
    lms.evict()
    gone = lms.stats()
    assert gone["reclaimed_bytes"] - made["reclaimed_bytes"] >= 4 << 20
    assert gone["host.pinned_bytes"] - made["host.pinned_bytes"] >= 4 << 20
    assert made["allocated_bytes.all.current"] - gone["allocated_bytes.all.current"] >= 4 << 20
    assert gone["tensor_bytes.all.current"] == made["tensor_bytes.all.current"]
    assert gone["reserved_bytes.all.current"] == made["reserved_bytes.all.current"]
    assert gone["pinned_bytes.all.current"] == made["pinned_bytes.all.current"]
    a.sum()
    back = lms.stats()
    assert back["swap_in_bytes"] - gone["swap_in_bytes"] == 4 << 20
    assert back["allocated_bytes.all.current"] - gone["allocated_bytes.all.current"] >= 4 << 20
    assert back["alloc_distribution.freelist"] > gone["alloc_distribution.freelist"]
    assert back["alloc_distribution.cudamalloc"] == gone["alloc_distribution.cudamalloc"]
    del a
    assert lms.stats()["allocated_bytes.all.current"] <= before["allocated_bytes.all.current"]


def test_what_is_reserved_starts_small_and_grows_on_demand(script):
    out = script("""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=256 << 20)
stats = spillway_torch.memory_stats
print(stats()["reserved_bytes.all.current"] == 0)
a = torch.ones(1 << 20)
now = stats()
print(now["pinned_bytes.all.current"] == now["allocated_bytes.all.current"] >= 4 << 20)  # support is off
print(4 << 20 <= now["reserved_bytes.all.current"] <= 12 << 20)
print(now["alloc_distribution.cudamalloc"])
spillway_torch.set_enabled_lms(True)
kept = spillway_torch.keep(torch.ones(1 << 18))
pile = [torch.ones(1 << 22) for _ in range(32)]  # 512 MiB in 256
for _ in range(2):
    for t in pile:
        t.sum()
        now = stats()
        assert now["pinned_bytes.all.current"] <= now["allocated_bytes.all.current"]
        assert now["allocated_bytes.all.current"] <= now["reserved_bytes.all.current"] <= now["capacity_bytes"] == 256 << 20
print(now["tensor_bytes.all.current"] >= 512 << 20, now["pinned_bytes.all.current"] >= 1 << 20)
found = sum(now[f"alloc_distribution.{name}"] for name in (
    "freelist", "cudamalloc", "reclaim_one", "reclaim_fragments", "reclaim_all", "cudamalloc_retry"))
print(found >= now["swap_ins"] + 34, now["reserved_bytes.all.peak"] == 256 << 20)
del pile, t
print(spillway_torch.empty_cache() >= 200 << 20, stats()["reserved_bytes.all.current"] <= 40 << 20)
""")
    assert out.split() == ["True"] * 3 + ["1"] + ["True"] * 6


def test_the_least_size_that_may_leave_can_be_set(script):
    out = script("""
import torch, spillway_torch
spillway_torch.set_size_lms(1 << 20)
print(spillway_torch.get_size_lms())
spillway_torch.install(device="cpu", limit=64 << 20)
spillway_torch.set_enabled_lms(True)
small, large = torch.ones(1 << 16), torch.ones(1 << 18)
print(spillway_torch._C.view(small)["ours"], spillway_torch._C.view(large)["ours"])
spillway_torch.set_size_lms(8192)
print(spillway_torch.get_size_lms(), spillway_torch._C.view(torch.ones(1 << 16))["ours"])
""")
    assert out.split() == ["1048576", "False", "True", "8192", "True"]


def test_a_tensor_that_was_only_frozen_weights_leaves_without_a_copy(lms):
    a = torch.ones(1 << 20)
    spillway_torch._C.freeze(a, True)
    lms.evict()
    out = lms.stats()["swap_out_bytes"]
    for _ in range(3):
        assert a.sum().item() == 1 << 20
        lms.evict()
    assert lms.is_away(a) and lms.stats()["swap_out_bytes"] - out < 4 << 10


def test_peaks_can_be_reset(lms):
    a = torch.ones(4 << 20)
    del a
    assert lms.stats()["allocated_bytes.all.peak"] >= 16 << 20
    spillway_torch.reset_peak_memory_stats()
    now = lms.stats()
    assert now["allocated_bytes.all.peak"] == now["allocated_bytes.all.current"]


def test_the_summary_names_the_largest_holders(lms):
    a, b = torch.ones(3, 1 << 20), torch.ones(1 << 20, dtype=torch.int8)
    a.add_(1)
    array = b.numpy()
    away = torch.ones(5, 1 << 18)
    lms.evict()
    a.add_(1)
    text = spillway_torch.memory_summary()
    assert re.search(r"5\.0 MiB +Float\[5, 262144\] +on the host", text) and lms.is_away(away)
    assert re.search(r"12\.0 MiB +Float\[3, 1048576\] +on the device", text)
    assert re.search(r"limit +256\.0 MiB", text)
    assert re.search(r"1\.0 MiB +Char\[1048576\] +kept", text) and array is not None
    assert spillway_torch.memory_summary(holders=-1) == spillway_torch.memory_summary(holders=0)


def test_nothing_to_reclaim_is_said_once_with_the_reason(script):
    out = script("""
import warnings, torch, spillway_torch
early = torch.ones(100_000)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    spillway_torch.install(device="cpu", limit=64 << 20)
    spillway_torch.set_enabled_lms(True)
    a = torch.ones(1 << 20)
    array = a.numpy()
    for _ in range(3):
        assert spillway_torch.reclaim_inactive() == 0
for one in seen:
    print(one.message)
""")
    lines = out.splitlines()
    assert len(lines) == 2
    assert "1 tensors (400000 bytes) were made before install()" in lines[0]
    assert "4194304 bytes are kept because their addresses were given out" in lines[1]


def test_earlier_tensors_are_counted_though_a_class_of_tensors_refuses_to_be_asked(script):
    out = script("""
import warnings, torch, spillway_torch
class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise ValueError("not to be asked")
lazy = torch.nn.LazyLinear(3)
early = torch.ones(100_000).as_subclass(Refusing)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    spillway_torch.install(device="cpu", limit=64 << 20)
for one in seen:
    print(one.message)
""")
    assert "1 tensors (400000 bytes) were made before install()" in out


def test_running_out_of_memory_with_nothing_to_reclaim_is_explained_once(script):
    out = script("""
import warnings, torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20)
spillway_torch.set_enabled_lms(True)
kept = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(5)]
arrays = [t.numpy() for t in kept]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(2):
        try:
            torch.ones(32 << 20, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            print("(kept: its address is known outside of operations)" in str(error), "41943040 bytes in all" in str(error))
for one in seen:
    print(one.message)
""")
    lines = out.splitlines()
    assert lines[:2] == ["True True"] * 2 and len(lines) == 3, lines
    assert "no tensor can leave: 41943040 bytes are kept because their addresses were given out" in lines[2]


def test_a_fallback_of_somebody_else_on_the_same_key_is_reported(script):
    out = script("""
import torch
other = torch.library.Library("_", "IMPL")
import spillway_torch
other.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), spillway_torch._C.hook_key())
try:
    spillway_torch.install(device="cpu", limit=64 << 20)
except RuntimeError as error:
    print("cannot be installed beside a module that has a fallback on" in str(error), spillway_torch.memory_stats())
del other
""")
    assert out.split() == ["True", "{}"]


def test_names_without_install_do_nothing(script):
    out = script("""
import torch, spillway_torch
spillway_torch.set_limit_lms(96 << 20)
print(spillway_torch.get_limit_lms(), spillway_torch.get_enabled_lms(), spillway_torch.memory_summary())
spillway_torch.set_enabled_lms(True)
print(spillway_torch.get_limit_lms(), spillway_torch.get_enabled_lms())
x = torch.ones(1 << 20)
print(spillway_torch.memory_stats()["allocated_bytes.all.current"], spillway_torch.empty_cache() >= 0)
""")
    assert out.splitlines() == [f"{96 << 20} False spillway_torch is not installed", f"{96 << 20} True", f"{4 << 20} True"]


def test_a_file_takes_what_host_memory_cannot(script, tmp_path):
    out = script(f"""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=32 << 20, host_limit=64 << 20, file_tier={str(tmp_path)!r}, file_limit=512 << 20)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(24)]
print(spillway_torch.memory_stats()["host.file_bytes"] >= 64 << 20)
print(all(int(t[0]) == i and int(t[-1]) == i for i, t in enumerate(pile)))
""")
    assert out.split() == ["True", "True"]


def test_host_memory_that_runs_out_is_an_error_of_pytorch(script):
    out = script("""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=32 << 20, host_limit=16 << 20)
spillway_torch.set_enabled_lms(True)
pile = []
try:
    for i in range(24):
        pile.append(torch.full((8 << 20,), i, dtype=torch.uint8))
except torch.OutOfMemoryError as error:
    print(len(pile) >= 4, "host pool is full" in str(error))
del pile[4]  # room to exchange tensors in
pile.insert(4, torch.tensor([4]))
print(all(int(t[0]) == i and int(t[-1]) == i for i, t in enumerate(pile)))
""")
    assert out.splitlines() == ["True True", "True"]


def test_what_is_no_number_of_bytes_is_refused_and_not_taken_for_no_limit():
    def read(limit):
        return numbers_of_bytes("install", limit=limit)[0]
    assert [read(n) for n in (None, 0, "0 GB", "7", "1.0", "1.5KB", "0.3 KiB", 1 << 63)] == [0, 0, 0, 7, 1, 1500, 307, 1 << 63]
    for wrong in (-1, 1.5, float("nan"), [], "", "0.5", "1.5", "0.0001KB", "9" * 400, 10 ** 400, "2 houses"):
        with pytest.raises(ValueError, match=r"spillway_torch\.install\(limit=.*\): bytes are a whole number"):
            read(wrong)


def test_what_is_no_folder_is_refused_by_name(script, tmp_path):
    for folder in tmp_path / "missing", str(tmp_path / "missing"), 7:
        with pytest.raises(ValueError, match=r"spillway_torch\.install\(file_tier=.*\): expected a folder"):
            spillway_torch.install(device="cpu", file_tier=folder)
    assert script(f"""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=32 << 20, file_tier={bytes(tmp_path)!r})
spillway_torch.set_enabled_lms(True)
x = torch.ones(1 << 20)
spillway_torch.park("file")
print(spillway_torch.memory_stats()["host.file_bytes"] >= 4 << 20)
""").split() == ["True"]


def test_other_devices_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="knows the devices cpu and cuda, not xpu"):
        spillway_torch.install(device="xpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_by_name_where_there_is_none():
    for device in "cuda:0", 0:  # PyTorch's number of the device
        with pytest.raises(RuntimeError, match="is_available.. is False here|was built without CUDA"):
            spillway_torch.install(device=device)
