# SPDX-License-Identifier: Apache-2.0
"""Programs that use several devices, one of which has large-model support."""
import json

import pytest
import torch

MIB = 1 << 20

START = """
import hashlib, json, torch
import kernels
if limit:
    import spillway_torch
    spillway_torch.install(device=f"cuda:{ours}", limit=limit, host_limit=256 << 20)
kernels.install()
if limit:
    spillway_torch.set_enabled_lms(True)
torch.manual_seed(7)
results = []
def sees(*tensors):
    results.append([hashlib.sha256(t.detach().cpu().numpy().tobytes()).hexdigest()[:12] for t in tensors])
    if limit:
        spillway_torch.reclaim_inactive()
"""
END = """
print(json.dumps({"results": results, "failure": kernels.failure(),
                  "out": spillway_torch.memory_stats()["swap_out_bytes"] if limit else 0}))
"""

PROGRAMS = {
    # A model whose layers are on different devices, as `device_map` of accelerate makes them.
    "layers on two devices": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)).to(f"cuda:{i % 2}")
            for i in range(6))
    def forward(self, x):
        for i, part in enumerate(self.parts):
            x = x + part(x.to(f"cuda:{i % 2}")).to(x.device)
        return x
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for _ in range(4):
    loss = net(torch.randn(1024, 256, device="cuda:0")).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    sees(loss, *net.parameters())
""",
    "copies in both directions": """
torch.cuda.set_device(1)
side = {i: torch.cuda.Stream(i) for i in range(2)}
made = []
for i in range(40):
    x = torch.full((1 << 18,), float(i), device=f"cuda:{i % 2}")
    y = x.to(f"cuda:{1 - i % 2}", non_blocking=True)
    made += [x, y]
    with torch.cuda.device(i % 2), torch.cuda.stream(side[i % 2]):
        side[i % 2].wait_stream(torch.cuda.default_stream(i % 2))
        z = y.to(f"cuda:{i % 2}") + x
        x.record_stream(side[i % 2])
        y.copy_(z, non_blocking=True)
    torch.cuda.default_stream(0).wait_stream(side[i % 2])
    torch.cuda.default_stream(1).wait_stream(side[i % 2])
    made.append(y * 2 + z.to(y.device))
    if i % 5 == 0:
        sees(*made[-3:])
    del made[:-9]
sees(*made)
""",
    "one thread for each device": """
import threading
def train(device, out):
    generator = torch.Generator().manual_seed(device)
    net = torch.nn.Linear(512, 512)
    torch.nn.init.normal_(net.weight, generator=generator)
    torch.nn.init.zeros_(net.bias)
    net = net.to(f"cuda:{device}")
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9)
    if limit:
        spillway_torch.set_enabled_lms(True)
    for _ in range(5):
        x = torch.randn(2048, 512, generator=generator).to(f"cuda:{device}")
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    out[device] = net.weight
out = {}
threads = [threading.Thread(target=train, args=(i, out)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sees(out[0], out[1])
""",
    # Graphs on one device, and graphs that copy from the other device.
    "captures": """
weights = [torch.full((1 << 20,), float(i + 1), device=f"cuda:{i}") for i in range(2)]
graphs = []
for i in range(2):
    with torch.cuda.device(i):
        x = torch.zeros(1 << 20, device=f"cuda:{i}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * weights[i] + 1
            z = y.neg()
    graphs.append((graph, x, y, z))
for step in range(6):
    for i, (graph, x, y, z) in enumerate(graphs):
        with torch.cuda.device(i):
            x.fill_(float(step))
            graph.replay()
            sees(y, z)
    others = [torch.full((1 << 20,), float(step), device=f"cuda:{i % 2}") for i in range(12)]
    sees(*others)
    del others
""",
    "trees of graphs": """
nets = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).to(f"cuda:{i}") for i in range(2)]
steps = [torch.compile(net, backend="cudagraphs", dynamic=False) for net in nets]
with torch.no_grad():
    for n in range(8):
        for i in range(2):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.cuda.device(i):
                y = steps[i](torch.randn(512 << n % 2, 64, device=f"cuda:{i}"))
                z = steps[i](y)
                del y
                sees(z)
        others = [torch.full((1 << 20,), float(n), device=f"cuda:{i % 2}") for i in range(12)]
        sees(*others)
        del others
""",
    "replicas, with NCCL": """
net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16)).cuda()
replicas = torch.nn.DataParallel(net, device_ids=[0, 1])
x = torch.randn(1024, 256)
for _ in range(3):
    y = replicas(x.cuda())
    y.square().mean().backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.01 * p.grad
            p.grad = None
    sees(y, *net.parameters())
""",
}


@pytest.fixture
def two_devices():
    if torch.cuda.device_count() < 2 and not __import__("kernels").is_stand_in():
        pytest.skip("needs two devices")
    return {"SPILLWAY_FAKE_CUDA_DEVICES": "2", "SPILLWAY_FAKE_CUDA_MAPS": "1"}


@pytest.mark.parametrize("name, ours, peers", [
    ("copies in both directions", 0, 1), ("copies in both directions", 1, 0), ("layers on two devices", 1, 1),
    ("one thread for each device", 1, 0), ("captures", 0, 0), ("trees of graphs", 1, 0),
    pytest.param("replicas, with NCCL", 0, 1, marks=pytest.mark.gpu)])
def test_programs_on_two_devices_compute_the_same(script, two_devices, name, ours, peers):
    plain, done = (json.loads(script(f"limit, ours = {limit}, {ours}\n{START}{PROGRAMS[name]}{END}",
                                     SPILLWAY_FAKE_CUDA_PEERS=str(peers), **two_devices).splitlines()[-1])
                   for limit in (0, 24 * MIB))

    assert not plain["failure"] and not done["failure"]
    assert done["results"] == plain["results"]
    assert done["out"] > 2 * MIB


@pytest.mark.stand_in
@pytest.mark.parametrize("gives_streams", [False, True])
def test_what_a_function_enqueues_without_an_operation_is_leased_for_it(native, lms, make, gives_streams):
    from spillway_torch import _shims

    def add(tensors, streams):
        native.add_on_stream(*(native.address_of(t._cdata) for t in tensors), tensors[0].numel(),
                             (streams[0] if streams else torch.cuda.current_stream()).cuda_stream)

    a, b = (torch.full((MIB // 2,), float(i), device="cuda") for i in range(2))
    side = torch.cuda.Stream()
    for _ in range(5):
        out = torch.zeros(MIB // 2, device="cuda")
        lms.evict()
        torch.cuda.synchronize()
        _shims._enqueuing(add)([a, b, out], [side] if gives_streams else None)
        lms.evict()
        assert lms.view(out)["kept"] == gives_streams
        others = torch.full((4 * MIB,), 3.0, device="cuda")
        side.synchronize()
        assert (out == 1).all() and (others == 3).all()
        del others


def test_other_devices_have_an_allocator_of_their_own(script, two_devices):
    script("import gc, torch, spillway_torch\n"
           "spillway_torch.install(device='cuda:1', limit=16 << 20)\n"
           "spillway_torch.set_enabled_lms(True)\n"
           "x = torch.empty(1 << 20, dtype=torch.uint8, device='cuda:0')\n"
           "y = torch.empty(1 << 21, dtype=torch.uint8, device='cuda:1')\n"
           "cuda = torch.cuda\n"
           "assert (cuda.memory_allocated(0), cuda.memory_allocated(1)) == (1 << 20, 1 << 21)\n"
           "assert cuda.max_memory_allocated(0) == 1 << 20\n"
           "cuda.reset_peak_memory_stats(0)\n"
           "assert {s['device'] for s in cuda.memory_snapshot()} == {0, 1}\n"
           "cuda.memory._record_memory_history()\n"
           "z = torch.empty(1 << 22, dtype=torch.uint8, device='cuda:0')\n"
           "w = torch.empty(1 << 22, dtype=torch.uint8, device='cuda:1')\n"
           "traces = cuda.memory._snapshot()['device_traces']\n"
           "assert all('alloc' in {e['action'] for e in traces[i]} for i in range(2)), traces\n"
           "p = cuda.caching_allocator_alloc(1 << 20, device=0)\n"
           "q = cuda.caching_allocator_alloc(1 << 20, device=1)\n"
           "assert (cuda.memory_allocated(0), cuda.memory_allocated(1)) == (6 << 20, 7 << 20)\n"
           "cuda.caching_allocator_delete(p)\n"
           "cuda.caching_allocator_delete(q)\n"
           "with cuda.device(0):\n"
           "    pool = cuda.MemPool()\n"
           "    with cuda.use_mem_pool(pool):\n"
           "        a = torch.empty(1 << 20, dtype=torch.uint8, device='cuda:0')\n"
           "    assert pool.use_count() == 1 and len(pool.snapshot()) == 1\n"
           "    cuda.set_per_process_memory_fraction(0.5, 0)\n"
           "x.record_stream(cuda.Stream(0))\n"
           "try: y.record_stream(cuda.Stream(0))\n"
           "except NotImplementedError as error: assert 'memory of cuda:1 cannot be recorded on a stream of cuda:0' in str(error)\n"
           "else: assert False\n"
           "stream = cuda.Stream(0)\n"
           "with cuda.device(0): torch.from_dlpack(x[256:]).record_stream(stream)\n"
           "del x, z, a, pool\n"
           "gc.collect()\n"
           "cuda.empty_cache()\n"
           "assert (cuda.memory_allocated(0), cuda.memory_reserved(0)) == (0, 0)\n", **two_devices)
