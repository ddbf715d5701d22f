# SPDX-License-Identifier: Apache-2.0
"""Training over several processes: DTensor, FSDP, tensor parallelism, checkpoints, remote procedure calls."""
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from conftest import LEAVE, run_together

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")

BEGIN = """
import gc, hashlib, json, sys, torch, torch.nn as nn, torch.distributed as dist, spillway_torch
from spillway_torch import _chosen as _C
torch.set_num_threads(1)
rank, world, meet, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
spillway_torch.install(device="cpu", limit=limit, least_bytes=1)
spillway_torch.set_enabled_lms(True)
evict = spillway_torch.reclaim_inactive
dist.init_process_group("gloo", store=dist.FileStore(meet, world), rank=rank, world_size=world)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (world,))

def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        t = t.full_tensor() if isinstance(t, DTensor) else t
        h.update(str(t.detach().double().flatten().tolist()).encode())
    return h.hexdigest()

def is_kept():
    return any(holder["kept"] for holder in _C.holders())

def end():
    dist.barrier()
    dist.destroy_process_group()
""" + textwrap.indent(LEAVE, "    ")


@pytest.fixture
def world(tmp_path):
    """A function that runs code in communicating processes and returns the last line that each has printed."""
    runs = 0

    def run(code, processes, limit=64 << 20):
        nonlocal runs
        runs += 1
        commands = [[sys.executable, "-c", BEGIN + code, str(rank), str(processes), str(tmp_path / f"meet{runs}"), str(limit)]
                    for rank in range(processes)]
        return [out.splitlines()[-1] for out in run_together(commands, tmp_path)]
    return run


def test_operations_of_dtensors_whose_parts_are_away(world):
    out = world("""
torch.manual_seed(0)
x, y = torch.randn(64, 64), torch.randn(64, 64)
a, b = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(y, mesh, [Replicate()])
good, kept = [], False
for act, wanted in ((lambda: a.relu(), x.relu()), (lambda: a @ b, x @ y), (lambda: a @ a, x @ x), (lambda: a + b, x + y),
                    (lambda: a.redistribute(mesh, [Replicate()]), x), (lambda: a.lerp_(b, 0.5), x.lerp(y, 0.5))):
    evict()
    result = act()
    kept = kept or is_kept()
    evict()
    good.append(torch.allclose(result.full_tensor(), wanted, atol=1e-4))
evict()
print(all(good), len(good), _C.view(a.to_local())["resident"], kept or is_kept())
end()
""", 2)
    assert out == ["True 6 False False"] * 2


def test_what_a_functional_collective_has_returned_leaves_after_it_was_waited_for(world):
    out = world("""
import torch.distributed._functional_collectives as collectives
x = torch.arange(100_000.) + rank
waiting = collectives.all_gather_tensor(x, 0, mesh)
evict()
before = _C.view(waiting.elem)["has_address"], is_kept()
whole = collectives.wait_tensor(waiting)
evict()
while _C.view(whole)["has_address"]:  # until the threads that communicate have said that it is done
    evict()
print(*before, _C.view(whole)["has_address"], is_kept(), whole[0].item(), whole[-1].item())
end()
""", 2)
    assert out == ["True False False False 0.0 100000.0"] * 2


# Trains the network that the function `sharded` makes from the layers.
SHARDED = """
def train(steps=3):
    torch.manual_seed(0)
    net = sharded(nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    x, losses = torch.randn(256, 256), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses, digest(net.parameters())
"""

FSDP = SHARDED + """
from torch.distributed.fsdp import fully_shard

def sharded(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)
"""

FLAT_FSDP = SHARDED + """
from torch.distributed.fsdp import FullyShardedDataParallel

def sharded(net):
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True,
                                    auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear))
"""

TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def make():
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(5)])
    for block in net:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)

def train(steps=3):
    net, optimizer = make()
    x, losses = torch.randn(256, 128), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item().hex())
    return losses, digest(net.parameters())
"""

RUN = """
whole = train()
gc.collect()
spillway_torch.reset_peak_memory_stats()
good = [train() == whole]
peak = spillway_torch.memory_stats()["allocated_bytes.all.peak"]
for cap in (0.5, 0.35):
    gc.collect()
    spillway_torch.set_limit_lms(int(cap * peak))
    before = spillway_torch.memory_stats()["swap_out_bytes"]
    good += [train() == whole, spillway_torch.memory_stats()["swap_out_bytes"] - before > (1 - cap) * peak]
evict()
print(good, is_kept())
end()
"""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("code", [FSDP, FLAT_FSDP, TENSOR_PARALLEL], ids=["fsdp", "flat_fsdp", "tensor_parallel"])
def test_training_under_caps_is_bitwise_the_same(world, code, processes):
    assert world(code + RUN, processes) == ["[True, True, True, True, True] False"] * processes


HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

def summing(_, bucket):
    like = bucket.buffer().clone()
    return dist.all_reduce(like, async_op=True).get_future().then(lambda future: future.value()[0] + like * 0)

def register(net, name):
    if name == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=1)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "summing":
        net.register_comm_hook(None, summing)
    elif name == "builtin":
        net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        net.register_comm_hook(None, getattr(default_hooks, name))

def train(name, rest):
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    register(net, name)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(4):
        rest()
        net(torch.randn(16, 64)).square().mean().backward()
        rest()
        optimizer.step()
        optimizer.zero_grad()
    return digest(net.parameters())

# The one in C++ comes first: callbacks in Python give the backend's threads the hook.
hooks = ("builtin", "fp16_compress_hook", "bf16_compress_hook", "summing", "powerSGD_hook")
different = [name for name in hooks if train(name, lambda: None) != train(name, evict)]
print(different)
end()
"""


def test_hooks_of_communication_run_in_other_threads(world):
    assert world(HOOKS, 2) == ["[]", "[]"]


def test_distributed_checkpoints(world, tmp_path):
    out = world(TENSOR_PARALLEL + f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
folder = {str(tmp_path)!r}
net, optimizer = make()
net(torch.randn(256, 128)).square().mean().backward()
optimizer.step()
before = digest(net.parameters())

def spoil():
    for p in net.parameters():
        p.data.zero_()
    evict()

evict()
dcp.save({{"net": net.state_dict()}}, checkpoint_id=folder + "/one")
spoil()
state = {{"net": net.state_dict()}}
dcp.load(state, checkpoint_id=folder + "/one")
net.load_state_dict(state["net"])
good = [digest(net.parameters()) == before]
evict()
weights, states = get_state_dict(net, optimizer)
evict()
dcp.async_save({{"net": weights, "states": states}}, checkpoint_id=folder + "/two").result()
spoil()
weights, states = get_state_dict(net, optimizer)
dcp.load({{"net": weights, "states": states}}, checkpoint_id=folder + "/two")
set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=states)
good.append(digest(net.parameters()) == before)
print(good, is_kept())
end()
""", 2)
    assert out == ["[True, True] False"] * 2


def test_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import torch, torch.distributed as dist, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=16 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
dist.init_process_group("gloo")
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
for layer in net:
    fully_shard(layer)
fully_shard(net)
for _ in range(2):
    net(torch.ones(64, 512)).sum().backward()
    spillway_torch.begin_step()
dist.barrier()
open(f"done{dist.get_rank()}", "w").write(str(spillway_torch.memory_stats()["swap_outs"] > 0))
dist.destroy_process_group()
""" + LEAVE)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                           str(program)], capture_output=True, text=True, timeout=300, cwd=tmp_path,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"done{rank}").read_text() for rank in range(2)] == ["True", "True"]


def test_remote_procedure_calls_take_and_return_what_is_away(tmp_path):
    code = """
import os, sys, torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
import torch.distributed.rpc as rpc

weight = torch.arange(10000.)

def multiply(x):
    spillway_torch.reclaim_inactive()
    y = weight * x
    spillway_torch.reclaim_inactive()
    return y

def get():
    return weight

rank = int(sys.argv[1])
spillway_torch.reclaim_inactive()
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2,
             rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[2]}"))
if rank == 0:
    x = torch.ones(10000)
    def away():
        spillway_torch.reclaim_inactive()
        return x
    good = [rpc.rpc_sync("w1", torch.add, (away(), 1)).sum().item() == 20000,
            rpc.rpc_sync("w1", multiply, (away(),))[7].item() == 7,
            rpc.rpc_async("w1", multiply, (away(),)).wait()[8].item() == 8,
            rpc.remote("w1", get).to_here()[9].item() == 9,
            rpc.remote("w1", torch.add, (away(), 1)).to_here()[9].item() == 2]
    spillway_torch.reclaim_inactive()
    print(all(good), spillway_torch._C.view(x)["resident"])
rpc.shutdown()
""" + LEAVE
    program = tmp_path / "program.py"
    program.write_text(code)
    outs = run_together([[sys.executable, str(program), str(rank), str(tmp_path / "meet")] for rank in range(2)], tmp_path)
    assert outs[0] == "True False\n"


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this PyTorch cannot take the object away again")
def test_a_communication_keeps_no_python_object(world):
    """Otherwise the thread that ends the communication would release the object, perhaps after the interpreter has ended."""
    out = world("""
kept, given = object(), torch.ones(4)
before = sys.getrefcount(kept)
torch._C._stash_obj_in_tls("context", kept)
work = dist.all_reduce(given, async_op=True)
is_there = torch._C._is_key_in_tls("context")
torch._C._remove_obj_from_tls("context")
after = sys.getrefcount(kept)
work.wait()
print(is_there, after - before)
end()
""", 2)
    assert out == ["True 0"] * 2
