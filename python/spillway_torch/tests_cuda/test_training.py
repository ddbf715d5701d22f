# SPDX-License-Identifier: Apache-2.0
"""Training under limits on CUDA gives bitwise the same results as with PyTorch's own allocator."""
import json
import os
import subprocess
import sys

import pytest

import kernels

# A network like a ResNet, which is smaller on the stand-in.
PROGRAM = """
import json, sys
import torch, torch.nn as nn
import kernels
limit, link, blocks, width, size, batch = (int(a) for a in sys.argv[1:7])
if limit:
    import spillway_torch
    spillway_torch.install(device="cuda", limit=limit, host_limit=2 << 30, link_bytes_per_second=link or None)
    spillway_torch.set_enabled_lms(True)
    spillway_torch.set_recompute(link != 0)
kernels.install(waits=True)
torch.use_deterministic_algorithms(True)

class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
                                  nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                                  nn.BatchNorm2d(channels))
    def forward(self, x):
        return torch.relu(self.body(x) + x)

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *[Block(width) for _ in range(blocks)],
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
x, y = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
model, x, y = model.cuda(), x.cuda(), y.cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
weights = sum(p.cpu().double().sum().item() for p in model.state_dict().values())
print(json.dumps({"losses": losses, "weights": weights.hex(), "peak": torch.cuda.max_memory_allocated(),
                  "out": spillway_torch.memory_stats()["swap_out_bytes"] if limit else 0,
                  "again": spillway_torch.memory_stats()["recomputations"] if limit else 0}))
"""


def train(limit, folder, link=0):
    """Trains in a new process. `link` is the copy rate that recomputation is compared with; 0 turns recomputation off."""
    shape = (4, 16, 32, 8) if kernels.is_stand_in() else (8, 64, 64, 64)
    path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(limit), str(link), *map(str, shape)], capture_output=True, text=True,
                          timeout=300, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return train(0, tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("part", [0.5, 0.3])
def test_training_under_a_cap_is_bitwise_the_same(stock, part, tmp_path):
    capped = train(int(part * stock["peak"]), tmp_path)

    assert capped["losses"] == stock["losses"] and capped["weights"] == stock["weights"]
    assert capped["out"] > 0


@pytest.mark.parametrize("part", [0.5, 0.3])
def test_training_with_recomputation_is_bitwise_the_same(stock, part, tmp_path):
    capped = train(int(part * stock["peak"]), tmp_path, link=1_000_000)

    assert capped["losses"] == stock["losses"] and capped["weights"] == stock["weights"]
    assert capped["again"] > 0
