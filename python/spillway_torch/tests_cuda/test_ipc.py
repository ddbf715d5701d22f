# SPDX-License-Identifier: Apache-2.0
"""Sharing tensors with other processes by CUDA IPC."""
import gc

import pytest
import torch
from torch.multiprocessing import reductions

MIB = 1 << 20


def received(tensor):
    """Does what another process does with what is sent to it, but in this process, which is possible on the stand-in."""
    _, (_, size, stride, offset, _, dtype, *sent) = reductions.reduce_tensor(tensor)
    device, handle, bytes_, first, _, *counter = sent
    storage = torch.UntypedStorage._new_shared_cuda(device, handle, bytes_, first, *counter)
    return torch.empty(0, dtype=dtype, device="cuda").set_(storage, offset, size, stride)


@pytest.mark.stand_in
def test_a_tensor_that_is_sent_moves_to_other_memory_and_stays_there(lms, make):
    x, host = make(4)
    view = x[1000:]
    lms.evict()
    assert lms.is_away(x)
    limited = torch.cuda.memory_allocated()

    there = received(view)

    assert not lms.view(x)["ours"] and torch.cuda.memory_allocated() == limited
    others = [make(4, seed)[0] for seed in range(10)]
    lms.evict()
    assert torch.equal(there.cpu(), host[1000:]) and torch.equal(x.cpu(), host) and torch.equal(view.cpu(), host[1000:])
    there.add_(1)
    assert torch.equal(x.cpu()[1000:], host[1000:] + 1)
    assert torch.equal(received(x).cpu(), x.cpu())
    del there, others
    gc.collect()


@pytest.mark.stand_in
def test_a_module_that_is_shared_and_sent_trains_on(lms):
    net = torch.nn.Linear(256, 512).cuda().share_memory()
    sent = [received(p.detach()) for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        net(torch.ones(64, 256, device="cuda")).square().mean().backward()
        lms.evict()
        optimizer.step()
        optimizer.zero_grad()

    assert all(torch.equal(a, b) for a, b in zip(sent, net.parameters()))
    assert not any(lms.view(p)["ours"] for p in net.parameters())


def test_a_tensor_that_cannot_move_is_not_sent(lms, make):
    x, host = make(1)
    x.data_ptr()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        y = torch.empty(MIB, device="cuda").zero_()

    for tensor in (x, y):
        with pytest.raises(NotImplementedError, match=r"Share a copy: tensor.clone\(\)"):
            tensor.untyped_storage()._share_cuda_()

    assert torch.equal(x.cpu(), host) and (y == 0).all()


@pytest.mark.stand_in
def test_what_is_sent_needs_room_beside_the_limit_only(script):
    """The memory of tensors that are sent is not the limit's, so it is the device's."""
    script("import torch, spillway_torch, kernels\n"
           "spillway_torch.install(device='cuda', limit=16 << 20, host_limit=64 << 20)\n"
           "kernels.install()\n"
           "spillway_torch.set_enabled_lms(True)\n"
           "sent = [torch.full((1 << 21,), float(i), device='cuda') for i in range(8)]\n"
           "for i, x in enumerate(sent):\n"
           "    x.untyped_storage()._share_cuda_()\n"
           "assert all((x == i).all() for i, x in enumerate(sent))\n"
           "assert torch.cuda.memory_allocated() == 0\n"
           "try: x = [torch.ones(1 << 22, device='cuda').untyped_storage()._share_cuda_() for _ in range(20)]\n"
           "except torch.OutOfMemoryError as error: print(error)\n"
           "else: assert False\n"
           "assert all((x == i).all() for i, x in enumerate(sent))\n")


@pytest.mark.gpu
def test_another_process_gets_a_tensor(script):
    assert script("import torch, spillway_torch\n"
                  "import torch.multiprocessing as mp\n"
                  "def double(queue, done):\n"
                  "    x = queue.get()\n"
                  "    x.mul_(2)\n"
                  "    torch.cuda.synchronize()\n"
                  "    del x\n"
                  "    done.set()\n"
                  "if __name__ == '__main__':\n"
                  "    context = mp.get_context('fork')\n"
                  "    queue, done = context.SimpleQueue(), context.Event()\n"
                  "    child = context.Process(target=double, args=(queue, done))\n"
                  "    child.start()  # before this process uses CUDA\n"
                  "    spillway_torch.install(device='cuda', limit=64 << 20)\n"
                  "    spillway_torch.set_enabled_lms(True)\n"
                  "    x = torch.arange(1 << 20, device='cuda')\n"
                  "    spillway_torch.reclaim_inactive()\n"
                  "    queue.put(x)\n"
                  "    done.wait()\n"
                  "    child.join()\n"
                  "    print(child.exitcode, bool((x == 2 * torch.arange(1 << 20, device='cuda')).all()))\n") == "0 True\n"
