# SPDX-License-Identifier: Apache-2.0
"""Communication uses the address of a tensor after the call that began it has returned, until the communication has ended."""
import sys

import pytest
import torch.distributed as dist
from conftest import LEAVE, run_together

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")

PAIR = """
import sys, torch, torch.distributed as dist, spillway_torch
from spillway_torch import _chosen as _C
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""


@pytest.fixture
def pair(tmp_path):
    """A function that runs code in two communicating processes and returns the output of each."""
    def run(code):
        return run_together([[sys.executable, "-c", PAIR + code + LEAVE, str(rank), str(tmp_path / "meet")] for rank in range(2)],
                            tmp_path)
    return run


def test_a_collective_of_sparse_tensors_takes_what_is_away(pair):
    out = pair("""
table = torch.nn.Embedding(5000, 16, sparse=True)
table(torch.arange(4000) + rank).sum().backward()
gradient = table.weight.grad
spillway_torch.reclaim_inactive()
dist.all_reduce(gradient)
print(int(gradient.to_dense().sum()), int(gradient.to_dense()[0, 0]), int(gradient.to_dense()[1, 0]))
""")
    assert out == ["128000 1 2\n"] * 2


def test_a_collective_that_joins_its_tensors_takes_what_is_away(pair):
    out = pair("""
import torch.distributed._functional_collectives as functional
group = dist.group.WORLD
xs = [torch.full((3000 + i,), rank + i + 1.) for i in range(3)]
parts = [[torch.zeros(3000 + i) for i in range(3)] for _ in range(2)]
spillway_torch.reclaim_inactive()
dist.all_reduce_coalesced(xs)
spillway_torch.reclaim_inactive()
dist.all_gather_coalesced(parts, xs)
with dist._coalescing_manager():
    for x in xs:
        dist.all_reduce(x)
print([int(x.mean()) for x in (*xs, *parts[0], *parts[1])])

seen = []
spillway_torch.reclaim_inactive()
begun = group.allreduce_coalesced(xs, dist.AllreduceCoalescedOptions())
future = begun.get_future().then(lambda future: seen.extend(int((x + 1).mean()) for x in future.value()))
future.wait()
spillway_torch.reclaim_inactive()
seen += [int(x.mean()) for x in functional.all_reduce_coalesced(xs, "sum", group)]
seen += [int(x.mean()) for x in functional.all_gather_into_tensor_coalesced(xs, group)]
print(seen)
""")
    assert out == ["[6, 10, 14, 3, 5, 7, 3, 5, 7]\n[13, 21, 29, 24, 40, 56, 12, 20, 28]\n"] * 2


def test_a_collective_that_runs_holds_its_tensors(pair):
    out = pair("""
x = torch.full((1 << 20,), float(rank + 1))
y, parts = torch.full((1 << 18,), float(rank)), [torch.zeros(1 << 18) for _ in range(2)]
spillway_torch.reclaim_inactive()

def begin():
    return dist.all_reduce(x, async_op=True), dist.all_gather(parts, y, async_op=True)

def are_held():
    return {_C.view(tensor)["has_address"] for tensor in (x, y, *parts)}

if rank == 0:
    works = begin()
    assert not any(work.is_completed() for work in works)  # the other one has not come yet
    spillway_torch.reclaim_inactive()
    pile = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(12)]  # under pressure
    print(are_held())
    store.set("go", "")
else:
    store.wait(["go"])
    works = begin()
    print({True})
for work in works:
    work.wait()
while are_held() != {False}:  # until the threads that communicate have said that it is done
    spillway_torch.reclaim_inactive()
print(x.min().item(), x.max().item(), [part[-1].item() for part in parts])
dist.barrier()
dist.destroy_process_group()
""")
    assert out == ["{True}\n3.0 3.0 [0.0, 1.0]\n"] * 2


def test_a_thread_without_room_waits_for_collectives_that_run(pair):
    out = pair("""
import threading
xs = [torch.full((1 << 20,), float(rank + i)) for i in range(12)]  # 48 of 64 MiB
seen = []

def fill():
    try:
        seen.append(torch.full((8 << 20,), 1.)[-1].item())
    except torch.OutOfMemoryError as error:
        seen.append(str(error))

if rank == 0:
    works = [dist.all_reduce(x, async_op=True) for x in xs]  # of which the other one has not heard yet
    thread = threading.Thread(target=fill)
    thread.start()
    while not seen and spillway_torch.memory_stats()["waits"] == 0:
        pass
    store.set("go", "")
    for work in works:
        work.wait()
    thread.join()
    print(seen)
else:
    store.wait(["go"])
    for x in xs:
        dist.all_reduce(x)
    print([1.])
print([x[-1].item() for x in xs] == [2. * i + 1 for i in range(12)])
dist.barrier()
dist.destroy_process_group()
""")
    assert out == ["[1.0]\nTrue\n"] * 2


def test_a_backend_that_is_called_by_itself_holds_its_tensors(pair):
    """A communication that is begun without `torch.distributed` is no operation of PyTorch."""
    out = pair("""
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
x, y = torch.full((1 << 20,), rank + 1.), torch.full((1 << 18,), float(rank))
parts = [torch.zeros(1 << 18) for _ in range(2)]
used = (x, y, *parts)

def are_held():
    return {_C.view(tensor)["has_address"] for tensor in used}

spillway_torch.reclaim_inactive()
if rank == 1:
    store.wait(["go"])
assert are_held() == {False}
works = backend.allreduce([x]), backend.allgather([parts], [y])
if rank == 0:
    spillway_torch.reclaim_inactive()
    assert are_held() == {True}  # the other one has not come yet
    store.set("go", "")
for work in works:
    work.wait()
while are_held() != {False}:  # until the threads that communicate have said that it is done
    spillway_torch.reclaim_inactive()
print(x.min().item(), x.max().item(), [part[-1].item() for part in parts])

table = torch.sparse_coo_tensor([[rank, 5]], [1., 2.], (2000,))
row = torch.zeros(1000)
spillway_torch.reclaim_inactive()
backend.allreduce([table]).wait()
spillway_torch.reclaim_inactive()
sent = backend.send([y], 1, 0) if rank == 0 else backend.recv([row.resize_(1 << 18)], 0, 0)
spillway_torch.reclaim_inactive()
sent.wait()
print(table.to_dense()[:6].tolist(), row.sum().item())
dist.barrier()
dist.destroy_process_group()
""")
    assert out == ["3.0 3.0 [0.0, 1.0]\n[1.0, 1.0, 0.0, 0.0, 0.0, 4.0] 0.0\n"] * 2


def test_a_reducer_that_is_used_by_itself_takes_what_is_away(pair):
    out = pair("""
model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.001)
parameters = list(model.parameters())
spillway_torch.reclaim_inactive()
dist._verify_params_across_processes(dist.group.WORLD, parameters)
reducer = dist.Reducer(parameters, [[3, 2], [1, 0]], [1 << 20, 1 << 20], dist.group.WORLD)
for step in range(3):
    spillway_torch.reclaim_inactive()
    loss = model(torch.full((4, 200), rank + 1.)).mean()
    if step:
        reducer._rebuild_buckets()
    reducer.prepare_for_backward(loss)
    spillway_torch.reclaim_inactive()
    loss.backward()
    spillway_torch.reclaim_inactive()
    print(f"{parameters[0].grad.sum().item():.3f}", f"{parameters[3].grad.sum().item():.3f}")
    model.zero_grad()
dist.barrier()
dist.destroy_process_group()
""")
    assert out == ["60.000 1.000\n" * 3] * 2


def test_buckets_that_are_allocated_in_a_backward_pass_keep_their_places(pair):
    out = pair("""
import inspect
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Linear(200, 100)
with torch.no_grad():
    model.weight.fill_(0.001)
can_be_lazy = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel.__init__).parameters
model = DistributedDataParallel(model, **({"lazy_bucket_allocation": True} if can_be_lazy else {}))
for step in range(3):
    spillway_torch.reclaim_inactive()
    loss = model(torch.full((4, 200), rank + 1.)).sum()
    spillway_torch.reclaim_inactive()
    loss.backward()
    spillway_torch.reclaim_inactive()
    print(model.module.weight.grad.sum().item())
    model.zero_grad()
dist.barrier()
dist.destroy_process_group()
""")
    assert out == ["120000.0\n" * 3] * 2


def test_a_collective_that_fails_lets_go(pair):
    out = pair("""
x = torch.ones(1 << 20)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)  # of which the other one never hears
    spillway_torch.reclaim_inactive()
    print(_C.view(x)["has_address"])
    store.set("go", "")
    try:
        work.wait()
    except RuntimeError:
        print("failed")
    while _C.view(x)["has_address"]:
        spillway_torch.reclaim_inactive()
    print(x.sum().item() == 1 << 20)
else:
    store.wait(["go"])
""")
    assert out == ["True\nfailed\nTrue\n", ""]


def test_what_goes_to_another_process_by_itself_keeps_its_place(pair):
    out = pair("""
x = torch.ones(1 << 20)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)  # their ends are not told
spillway_torch.reclaim_inactive()
print(_C.view(x)["has_address"])
dist.barrier()
dist.destroy_process_group()
""")
    assert out == ["True\n"] * 2


def test_collectives_take_what_is_away(pair):
    out = pair("""
def away():
    x = torch.arange(100_000.) + rank
    spillway_torch.reclaim_inactive()
    assert not _C.view(x)["has_address"]
    return x

x = away()
dist.broadcast(x, 1)
print("broadcast", x[0].item() == 1)
parts = [torch.zeros(100_000), torch.zeros(100_000)]
dist.all_gather(parts, away())
spillway_torch.reclaim_inactive()
print("all_gather", [part[-1].item() for part in parts] == [99_999, 100_000])
part = torch.zeros(50_000)
dist.reduce_scatter_tensor(part, away())
print("reduce_scatter", part[0].item() == 1 + 2 * 50_000 * rank)
mixed = torch.zeros(100_000)
dist.all_to_all_single(mixed, away())
print("all_to_all", [mixed[0].item(), mixed[50_000].item()] == [50_000 * rank, 50_000 * rank + 1])
x = away()
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
print("send", x[0].item() == 0)
dist.barrier()
dist.destroy_process_group()
""")
    names = ["broadcast", "all_gather", "reduce_scatter", "all_to_all", "send"]
    assert out == ["".join(f"{name} True\n" for name in names)] * 2
