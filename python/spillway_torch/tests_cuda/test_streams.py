# SPDX-License-Identifier: Apache-2.0
"""Tensors that are used by several streams, and leave and come back in between."""
import pytest
import torch

import spillway_torch


def test_what_one_stream_wrote_another_reads(lms, make):
    side = torch.cuda.Stream()
    x, host = make(2)
    lms.evict()

    with torch.cuda.stream(side):  # only the library orders this stream after the other one
        y = torch.empty_like(x).copy_(x)
    side.synchronize()

    assert torch.equal(y.cpu(), host)


def test_memory_used_by_another_stream_is_not_reused_before_it_is_done(make):
    side = torch.cuda.Stream()
    for seed in range(20):
        x, host = make(4, seed)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = torch.empty_like(x)
            for _ in range(4):
                y.copy_(x)
        x.record_stream(side)
        del x
        z, _ = make(4, seed + 100)  # may take x's place at once
        side.synchronize()
        assert torch.equal(y.cpu(), host)
        del y, z


@pytest.mark.stand_in
@pytest.mark.parametrize("how", ["freed after record_stream", "made to leave"])
def test_a_place_is_taken_after_all_streams_that_used_it(how, stand_in, takes_the_place_early, lms, make):
    x, host = make(20)
    y = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        y.copy_(x[-(1 << 18):])
    if how == "freed after record_stream":
        x.record_stream(side)
        del x

    assert not takes_the_place_early(side)

    assert torch.equal(y.cpu(), host[-(1 << 18):])


@pytest.mark.stand_in
def test_a_place_is_taken_before_streams_that_did_not_use_it(stand_in, takes_the_place_early, lms, make):
    """`x` was lent six times, as to a collective, and each loan ended on another stream. `side` has not used `x`."""
    x, _ = make(20)
    y, bytes_ = make(1)
    z = torch.empty_like(y)
    side = torch.cuda.Stream()
    others = [torch.cuda.Stream() for _ in range(6)]
    torch.cuda.synchronize()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        z.copy_(y)
        torch.empty_like(y).copy_(y)  # the memory of this temporary is free when `side` gets there
    for other in others:
        lent = lms.lend(x)
        with torch.cuda.stream(other):
            del lent
    del x

    assert takes_the_place_early(side, waits=True)

    assert torch.equal(z.cpu(), bytes_)


def test_two_streams_take_turns_beyond_the_limit(make):
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made = [make(4, seed) for seed in range(16)]
    copies = []
    for i, (x, host) in enumerate(made):
        stream = streams[i % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copies.append(torch.empty_like(x).copy_(x))
    torch.cuda.synchronize()

    assert all(torch.equal(y.cpu(), host) for y, (_, host) in zip(copies, made))
    assert all(torch.equal(x.cpu(), host) for x, host in made)


def test_recording_a_stream_twice_or_for_what_is_away_does_no_harm(lms, make):
    side = torch.cuda.Stream()
    x, host = make(2)
    x.record_stream(side)
    x.record_stream(side)
    lms.evict()

    x.record_stream(side)

    assert torch.equal(x.cpu(), host)


def test_non_blocking_copies_are_ordered(lms):
    host = torch.randint(0, 1 << 30, (1 << 19,), dtype=torch.int32).pin_memory()
    back = torch.empty_like(host).pin_memory()
    x = host.to("cuda", non_blocking=True)
    lms.evict()
    back.copy_(x, non_blocking=True)
    torch.cuda.synchronize()

    assert torch.equal(back, host)


@pytest.mark.stand_in
def test_kernels_of_the_stand_in_run_when_their_stream_comes_to_them(stand_in):
    side = torch.cuda.Stream()
    x = torch.ones(1 << 16, device="cuda")
    torch.cuda.synchronize()
    stand_in.spillway_fake_stall(side.cuda_stream)
    with torch.cuda.stream(side):
        y = x + 1
        done = torch.cuda.Event()
        done.record()

    assert not done.query()

    stand_in.spillway_fake_resume()
    done.synchronize()
    assert torch.equal(y.cpu(), torch.full((1 << 16,), 2.0))


class LeavesInBackward(torch.autograd.Function):
    """Doubles a tensor. Its gradient is swapped out before the next function gets it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        made = gradient * 2
        spillway_torch.reclaim_inactive()
        return made


def test_gradients_that_are_away_pass_from_one_stream_to_another():
    side = torch.cuda.Stream()
    x = torch.ones(1 << 16, device="cuda", requires_grad=True)
    tripled = x * 3
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = LeavesInBackward.apply(tripled)
    torch.cuda.current_stream().wait_stream(side)
    gradient = torch.full_like(y, 5)
    spillway_torch.reclaim_inactive()

    y.backward(gradient)

    assert torch.equal(x.grad.cpu(), torch.full((1 << 16,), 30.0))


def test_futures_pass_what_is_away_from_one_stream_to_another(lms, make):
    side = torch.cuda.Stream()
    x, host = make()
    future = torch.futures.Future(devices=["cuda:0"])
    halved = future.then(lambda done: done.value() // 2)
    lms.evict()
    future.set_result(x)
    lms.evict()

    with torch.cuda.stream(side):
        difference = future.wait() - halved.wait()

    side.synchronize()
    assert torch.equal(difference.cpu(), host - host // 2)


def test_hooks_of_communication_pass_gradients_on(script):
    """The hooks run in threads of the process group, where an error would end the process."""
    code = """
import os
import sys
import threading
import torch
import torch.distributed as dist
import kernels
import spillway_torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
spillway_torch.install(device="cuda", limit=64 << 20, host_limit=256 << 20)
kernels.install()
spillway_torch.set_enabled_lms(True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def reclaim(stop):
    while not stop.wait(0.0005):
        spillway_torch.reclaim_inactive()

def gradients(model):
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(32, 256, device="cuda")).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters()]

def model():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(layers, device_ids=[0], bucket_cap_mb=1)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp

wanted = gradients(model())
stop = threading.Event()
thread = threading.Thread(target=reclaim, args=[stop])
thread.start()
try:
    got = [gradients(model())]
    while spillway_torch.memory_stats()["reclaimed"] <= 10:  # the thread may have had no turn yet
        got.append(gradients(model()))
finally:
    stop.set()
    thread.join()
print(all(all(map(torch.equal, wanted, one)) for one in got))
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # see `LEAVE` of the other tests
"""
    assert script(code) == "True\n"


def test_kernels_on_two_streams_agree_with_the_host():
    side = torch.cuda.Stream()
    x = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    for _ in range(50):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        x = y * 1
        fill = [torch.randn(1 << 20, device="cuda") for _ in range(8)]
        del fill
    assert torch.equal(x.cpu(), torch.arange(1 << 20, dtype=torch.float32) + 50)
