# SPDX-License-Identifier: Apache-2.0
"""What happens at the limit, and when the limit or support is changed while a program runs."""
import pytest
import torch

import spillway_torch


def test_out_of_memory_is_pytorchs_own_and_the_program_goes_on(lms):
    with pytest.raises(torch.OutOfMemoryError, match="^CPU out of memory. DefaultCPUAllocator: can't allocate memory. "
                                                     "spillway: .* requested 314572800 bytes"):
        torch.empty(300 << 20, dtype=torch.uint8)
    assert torch.ones(1000).sum().item() == 1000


def test_out_of_memory_names_what_is_held(lms):
    a = [torch.ones(30 << 20, dtype=torch.uint8) for _ in range(9)]
    with pytest.raises(torch.OutOfMemoryError, match=r"largest first: 31457280 bytes Byte\[31457280\]"):
        torch.stack(a)
    assert all(t[5].item() == 1 for t in a)


def test_ten_times_the_limit(lms):
    big = [torch.full((16 << 20,), i, dtype=torch.uint8) for i in range(160)]
    assert all(int(b[0]) == i and int(b[-1]) == i for i, b in enumerate(big))
    assert lms.stats()["tensor_bytes.all.current"] > 10 * (255 << 20) - (120 << 20)


def test_disable_and_enable_in_mid_program(lms):
    a = torch.arange(1000.)
    lms.evict()
    spillway_torch.set_enabled_lms(False)
    assert not spillway_torch.get_enabled_lms()
    assert a.sum().item() == 499500  # tensors that are away come back even with support off
    b = [torch.ones(60 << 20, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match="is off"):
        b.append([torch.ones(60 << 20, dtype=torch.uint8) for _ in range(3)])
    spillway_torch.set_enabled_lms(True)
    b += [torch.ones(60 << 20, dtype=torch.uint8) for _ in range(3)]
    assert [int(t[9]) for t in b] == [1] * 6


def test_the_limit_can_be_lowered_and_raised(lms):
    tensors = [torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(20)]
    spillway_torch.set_limit_lms(64 << 20)
    assert spillway_torch.get_limit_lms() == 64 << 20
    assert lms.stats()["allocated_bytes.all.current"] <= lms.stats()["reserved_bytes.all.current"] <= 64 << 20
    peak = lms.stats()["tensor_bytes.all.peak"]
    with pytest.raises(torch.OutOfMemoryError, match=f"capacity {64 << 20}"):
        torch.empty(100 << 20, dtype=torch.uint8)
    assert lms.stats()["tensor_bytes.all.peak"] == peak  # the failed allocation does not count
    assert "64.0 MiB" in spillway_torch.memory_summary()
    assert [int(t[5]) for t in tensors] == list(range(20))
    spillway_torch.set_limit_lms(0)
    assert spillway_torch.get_limit_lms() == 256 << 20
    assert torch.empty(100 << 20, dtype=torch.uint8).numel() == 100 << 20
    assert [int(t[5]) for t in tensors] == list(range(20))


def test_steps_under_a_lowered_limit_are_planned(lms):
    net = torch.nn.Sequential(*[layer for _ in range(10) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())])
    x, before = torch.randn(2048, 256), lms.stats()
    spillway_torch.set_limit_lms(24 << 20)
    for step in range(200):
        net.zero_grad()
        net(x).square().mean().backward()
        spillway_torch.begin_step()
        now = lms.stats()
        if step >= 5 and now["prefetch.hits"] > before["prefetch.hits"]:
            break  # while the threads that copy get no time, all copies are late
    spillway_torch.set_limit_lms(256 << 20)
    assert now["speculative"] > before["speculative"]  # copied out ahead of need
    assert now["prefetch.hits"] > before["prefetch.hits"]


SPLIT = """
import torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=LIMIT)
spillway_torch.set_enabled_lms(True)
UNIT = 1 << 20
spillway_torch.set_limit_lms(8 * UNIT)
def split_room():
    # Eight tensors fill the limit. The second and the fifth, used together, leave six units in three pieces.
    tensors = [torch.full((UNIT - 4096,), i, dtype=torch.uint8) for i in range(8)]
    return tensors[1], tensors[4], tensors
def counts():
    now = spillway_torch.memory_stats()
    return now["regroups"], now["num_ooms"]
"""
JOINED = SPLIT.replace("LIMIT", "64 << 20")
# With this limit memory is mapped in pieces of 2 MiB, as on a GPU, so that few pieces are completely free.
LARGE_PIECES = SPLIT.replace("LIMIT", "128 << 30")

TYPED = "torch.cat([a, b, a, b, a])"
BOXED = "torch.complex(*(t.view(torch.float32).expand(2, -1) for t in (a, b)))"
WRITING = "torch.cat([a, b, a, b, a], out=torch.empty(0, dtype=torch.uint8))"
RANDOM = "torch.normal(a.view(torch.float32).expand(5, -1), b.view(torch.float32))"
DRAWN = "torch.native_dropout(a.view(torch.float32).expand(5, -1), 0.5, True)"  # draws before it allocates its result


@pytest.mark.parametrize("pieces, operation", [(JOINED, TYPED), (JOINED, BOXED), (JOINED, WRITING), (JOINED, RANDOM),
                                               (LARGE_PIECES, TYPED), (LARGE_PIECES, BOXED), (LARGE_PIECES, RANDOM)])
def test_room_in_pieces_between_operands_is_made_one(script, pieces, operation):
    """Free memory becomes contiguous by remapping, or else by swapping the operands in again, side by side."""
    result = script(pieces + f"""
for _ in range(3):
    a, b, tensors = split_room()
    torch.manual_seed(7)
    result = {operation}
    assert result.numel() * result.element_size() >= 3.9 * UNIT
    seen = result.flatten()[:5].clone()
    del result
    a, b = (t[:20].clone() for t in (a, b))
    torch.manual_seed(7)
    assert torch.equal(seen, ({operation}).flatten()[:5])
    assert [int(t[0]) for t in tensors] == list(range(8)) and all((t == t[0]).all() for t in tensors)
    del tensors
regroups, ooms = counts()
print(regroups > 0, ooms)
""")
    assert result.split() == [str(pieces == LARGE_PIECES), "0"]


def test_operands_that_come_in_late_find_room_in_one_piece(script):
    result = script(LARGE_PIECES + """
big = torch.ones(5 * UNIT, dtype=torch.uint8)
spillway_torch.reclaim_inactive()
a, b, tensors = split_room()
a[:1], b[:1]
small = torch.full((UNIT,), 3, dtype=torch.uint8)
middle = tensors[4]
big[:middle.numel()].add_(middle)
assert int(big[0]) == int(big[middle.numel() - 1]) == 5 and int(big[middle.numel()]) == int(big[-1]) == 1
print(*counts())
""")
    assert int(result.split()[1]) == 0


def test_an_operation_with_effects_does_not_run_twice(script):
    result = script(LARGE_PIECES + f"""
a, b, tensors = split_room()
refused = 0
for operation in (lambda: {WRITING}, lambda: {DRAWN}):
    try:
        operation()
    except torch.OutOfMemoryError as error:
        refused += "Leases lie between" in str(error)
print(refused, *counts())
assert [int(t[0]) for t in tensors] == list(range(8))
""")
    assert result.split() == ["2", "0", "2"]


def test_requests_inside_hold_that_find_room_in_pieces_only_are_counted_at_once(script):
    result = script(LARGE_PIECES + """
a, b, tensors = split_room()
with spillway_torch.hold(a, b):
    try:
        torch.empty(4 * UNIT + UNIT // 2, dtype=torch.uint8)
    except torch.OutOfMemoryError:
        print(*counts())
""")
    assert result.split() == ["0", "1"]


def test_parked_the_memory_is_given_back_and_use_brings_back_what_it_uses(script):
    out = script("""
import torch, spillway_torch

def mapped():
    "Bytes of memory of this process that are there, without those in the pool of what was swapped out."
    with open("/proc/self/status") as status:
        rss = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
    now = spillway_torch.memory_stats()
    return rss - now["host.pinned_bytes"]

spillway_torch.install(device="cpu", limit=256 << 20)
spillway_torch.set_enabled_lms(True)
kept = spillway_torch.keep(torch.ones(1 << 18))
pile = [torch.full((1 << 20,), float(i)) for i in range(40)]
before = mapped()
freed = spillway_torch.park()
now = spillway_torch.memory_stats()
print(freed >= 120 << 20, now["reserved_bytes.all.current"] <= 40 << 20)
print(before - mapped() >= 100 << 20)
print(now["allocated_bytes.all.current"] == now["pinned_bytes.all.current"] == 1 << 20)
print(pile[3][9].item(), spillway_torch.memory_stats()["allocated_bytes.all.current"] == 5 << 20)
print(spillway_torch.wake() == 39 * (4 << 20), spillway_torch.memory_stats()["allocated_bytes.all.current"] == 161 << 20)
print([int(t[-1]) for t in pile] == list(range(40)), kept[0].item())
""")
    assert out.split() == ["True"] * 4 + ["3.0"] + ["True"] * 4 + ["1.0"]


def test_parked_in_a_file_nothing_stays_in_host_memory_either(script, tmp_path):
    out = script(f"""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20, file_tier={str(tmp_path)!r}, file_limit=256 << 20)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((1 << 20,), float(i)) for i in range(30)]
sums = [t.sum().item() for t in pile[:5]]
print(spillway_torch.memory_stats()["host.pinned_bytes"] > 32 << 20)
spillway_torch.park("file")
now = spillway_torch.memory_stats()
print(now["reserved_bytes.all.current"], now["host.pinned_bytes"], now["host.file_bytes"] >> 20)
print([int(t[-1]) for t in pile] == list(range(30)), sums == [t.sum().item() for t in pile[:5]])
print(spillway_torch.memory_stats()["host.pinned_bytes"] >= 0)
""")
    assert out.split() == ["True", "0", "0", "120", "True", "True", "True"]


FULL_HOST = """
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20, host_limit=16 << 20)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(6)]
def are_right():
    return [(int(t[0]), int(t[-1])) for t in pile] == [(i, i) for i in range(6)]
def error_of(call, *arguments):
    try:
        call(*arguments)
    except torch.OutOfMemoryError as error:
        return str(error)
"""


def test_what_host_memory_has_no_room_for_stays(script):
    out = script(FULL_HOST + """
print(spillway_torch.reclaim_inactive() >> 20, spillway_torch.reclaim_inactive(), are_right())
spillway_torch.park()
print(spillway_torch.memory_stats()["allocated_bytes.all.current"] >> 20, spillway_torch.wake() >> 20, are_right())
""")
    assert out.split() == ["16", "0", "True", "32", "16", "True"]


def test_a_limit_that_host_memory_has_no_room_for_is_refused(script):
    out = script(FULL_HOST + """
print("The host pool is full" in error_of(spillway_torch.set_limit_lms, 16 << 20), spillway_torch.get_limit_lms() >> 20, are_right())
""")
    assert out.split() == ["True", "64", "True"]


@pytest.mark.parametrize("operation", [TYPED, BOXED])
def test_an_operation_for_which_host_memory_has_no_room_is_out_of_memory(script, operation):
    out = script(LARGE_PIECES.replace("limit=", "host_limit=2 << 20, limit=") + f"""
a, b, tensors = split_room()
try:
    {operation}
except torch.OutOfMemoryError as error:
    print("host pool is full" in str(error))
print([int(t[0]) for t in tensors] == list(range(8)), spillway_torch.memory_stats()["active_frames"])
""")
    assert out.split() == ["True", "True", "0"]


def test_where_to_park_is_checked(lms):
    with pytest.raises(ValueError, match="file_tier"):
        spillway_torch.park("file")
    with pytest.raises(ValueError, match="level"):
        spillway_torch.park("moon")


def test_two_processes_take_turns_on_one_limit(script, tmp_path):
    """Each process computes with three quarters of the memory of both, while the other one is parked."""
    import subprocess
    import sys
    code = """
import sys, torch, spillway_torch
limit = 64 << 20
spillway_torch.install(device="cpu", limit=limit)
spillway_torch.set_enabled_lms(True)
weights = [torch.full((1 << 20,), float(i)) for i in range(12)]
spillway_torch.park()
for line in sys.stdin:
    for w in weights:
        w += 1
    used = spillway_torch.memory_stats()["reserved_bytes.all.current"]
    spillway_torch.park()
    print(used, spillway_torch.memory_stats()["reserved_bytes.all.current"], sum(int(w[5]) for w in weights[:1]), flush=True)
    spillway_torch.park()
"""
    programs = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                 cwd=tmp_path) for _ in range(2)]
    try:
        for i in range(3):
            for program in programs:
                program.stdin.write("go\n")
                program.stdin.flush()
                used, parked, value = map(int, program.stdout.readline().split())
                assert 48 << 20 <= used <= 64 << 20
                assert parked == 0
                assert value == i + 1
    finally:
        for program in programs:
            program.stdin.close()
            program.wait(timeout=60)


def test_switched_off_nothing_leaves(lms):
    a = torch.ones(1 << 20)
    spillway_torch.set_enabled_lms(False)
    assert spillway_torch.reclaim_inactive() == 0
    now = lms.stats()
    assert now["pinned_bytes.all.current"] == now["allocated_bytes.all.current"] >= 4 << 20
    with pytest.raises(RuntimeError, match="set_enabled_lms"):
        spillway_torch.park()
    spillway_torch.set_enabled_lms(True)
    assert a[3].item() == 1
