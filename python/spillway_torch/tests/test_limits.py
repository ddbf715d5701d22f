# SPDX-License-Identifier: Apache-2.0
"""What happens at the limit, and when it or support is changed in mid-program."""
import pytest
import torch

import spillway_torch


def test_out_of_memory_is_pytorchs_own_and_the_program_goes_on(lms):
    with pytest.raises(torch.OutOfMemoryError, match="requested 314572800 bytes"):
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
    assert lms.stats()["allocated_bytes.all.current"] > 10 * (255 << 20) - (120 << 20)


def test_disable_and_enable_in_mid_program(lms):
    a = torch.arange(1000.)
    lms.evict()
    spillway_torch.set_enabled_lms(False)
    assert not spillway_torch.get_enabled_lms()
    assert a.sum().item() == 499500  # what is away comes back
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
    assert lms.stats()["resident_bytes.all.current"] <= 256 << 20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 20, dtype=torch.uint8)
    assert [int(t[5]) for t in tensors] == list(range(20))
    spillway_torch.set_limit_lms(256 << 20)
    assert torch.empty(100 << 20, dtype=torch.uint8).numel() == 100 << 20
    assert [int(t[5]) for t in tensors] == list(range(20))


def test_steps_under_a_lowered_limit_are_planned(lms):
    net = torch.nn.Sequential(*[layer for _ in range(10) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())])
    x, before = torch.randn(2048, 256), lms.stats()
    spillway_torch.set_limit_lms(24 << 20)
    for _ in range(6):
        net.zero_grad()
        net(x).square().mean().backward()
        spillway_torch.begin_step()
    now = lms.stats()
    spillway_torch.set_limit_lms(256 << 20)
    assert now["speculative"] > before["speculative"]  # copied out ahead of need
    assert now["prefetch.hits"] > before["prefetch.hits"]
