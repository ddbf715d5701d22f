# SPDX-License-Identifier: Apache-2.0
"""Whole trainings under limits: losses, parameters, buffers and optimizer states are bitwise the same as without."""
import json
import pathlib

import pytest

EXAMPLES = str(pathlib.Path(__file__).resolve().parents[3] / "examples" / "pytorch")

TRAIN = """
import gc, hashlib, json, sys, threading
import torch, torch.nn as nn, torch.nn.functional as F
torch.set_num_threads(1)
sys.path.insert(0, {folder!r})
import nets

def digest(values):
    h = hashlib.sha256()
    for v in values:
        h.update(str(v.double().flatten().tolist()).encode())
    return h.hexdigest()

def train(steps=5):
    torch.manual_seed(0)
    model, x, y = nets.make({net!r}, batch={batch})
    optimizer = {optimizer}
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return losses, digest(model.state_dict().values()), digest(states)

stock = train()
import spillway_torch
spillway_torch.install(device="cpu", limit=1 << 30)
spillway_torch.set_enabled_lms(True)
out = {{"uncapped": train() == stock}}
peak = spillway_torch.memory_stats()["tensor_bytes.all.peak"]
before = spillway_torch.memory_stats()
assert before["swap_outs"] == 0 and before["reclaimed"] == 0
for cap in (0.6, 0.4, 0.3, 0.2):
    gc.collect()
    spillway_torch.set_limit_lms(int(cap * peak))
    swapped = spillway_torch.memory_stats()["swap_out_bytes"]
    out[cap] = train() == stock
    swapped = spillway_torch.memory_stats()["swap_out_bytes"] - swapped
    assert swapped > (1 - cap) * peak, (cap, swapped, peak)
now = spillway_torch.memory_stats()
out["steps"] = now["steps"]
out["in_time"] = now["prefetch.hits"] + now["prefetch.late"]
out["wasted"] = now["prefetch.wasted"]
out["swap_ins"] = now["swap_ins"]
spillway_torch.set_enabled_lms(False)
try:
    train(1)
except torch.OutOfMemoryError as error:
    out["without support"] = str(error)
print(json.dumps(out))
"""


@pytest.mark.parametrize(("net", "batch", "optimizer"), [
    ("conv", 4, "torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)"),
    ("mlp", 512, "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)"),
])
def test_training_under_caps_is_bitwise_the_same(script, net, batch, optimizer):
    out = json.loads(script(TRAIN.format(folder=EXAMPLES, net=net, batch=batch, optimizer=optimizer)))
    assert out["uncapped"] and out["0.6"] and out["0.4"] and out["0.3"] and out["0.2"]
    assert "is off" in out["without support"]
    assert out["steps"] == 25
    # The schedule of the step before tells what is needed next, so that most swap-ins begin before the use.
    assert out["in_time"] > out["swap_ins"] / 3 and out["wasted"] < out["swap_ins"] / 4, out


def test_what_is_not_needed_soon_is_copied_out_before_its_room_is_asked_for(script):
    out = json.loads(script(f"""
import json, sys
sys.path.insert(0, {EXAMPLES!r})
import torch, torch.nn.functional as F, nets, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=40 << 20)
spillway_torch.set_enabled_lms(True)
model, x, y = nets.make("conv", 4)  # needs 91 MiB
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
print(json.dumps(spillway_torch.memory_stats()))
"""))
    assert out["speculative_bytes"] > out["swap_out_bytes"] / 4, out
    assert out["dropped_bytes"] >= 0.9 * out["speculative_bytes"], out  # copied ahead of need, so dropped
