# SPDX-License-Identifier: Apache-2.0
"""Measures what support costs each operation while nothing is swapped out: microseconds of processor time, with the
hook off and on in turn, the least of many rounds.

    python bench_ops.py [--rounds 60] [--recompute] [--json]

The tensors are large enough to be the library's (`framed`), but so small that the cost of the hook is noticeable.
With `--recompute` the hook is on both times, and `set_recompute` is off and on in turn.
"""
import argparse
import json
import time

import torch
import torch.nn as nn

import spillway_torch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=60)
parser.add_argument("--recompute", action="store_true", help="switch set_recompute instead of the hook")
parser.add_argument("--json", action="store_true")
options = parser.parse_args()

torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=1 << 30, least_bytes=1)
torch.manual_seed(0)
a, b, m = torch.randn(8), torch.randn(8), torch.randn(4, 4)
w = torch.randn(8, requires_grad=True)
eight = [torch.randn(8) for _ in range(8)]
net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())])
optimizer = torch.optim.Adam(net.parameters(), foreach=False)
x = torch.randn(4, 8)


def step():
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()


cases = {
    "add_, 2 tensors": (lambda: a.add_(b), 2000),
    "add, a new result": (lambda: torch.add(a, b), 2000),
    "add, requires grad": (lambda: torch.add(w, b), 2000),
    "view": (lambda: a.view(2, 4), 2000),
    "mm": (lambda: torch.mm(m, m), 2000),
    "sinh, boxed": (lambda: torch.sinh(a), 2000),
    "linear, a composite": (lambda: nn.functional.linear(m, m), 2000),
    "cat of 8": (lambda: torch.cat(eight), 1000),
    "empty": (lambda: torch.empty(8), 2000),
    "layer_norm": (lambda: nn.functional.layer_norm(m, (4,)), 1000),
    "step of 8 x 8 tensors, worst case": (step, 5),
}


def least(function, count):
    start = time.thread_time()
    for _ in range(count):
        function()
    return (time.thread_time() - start) / count * 1e6


def switch(on):
    spillway_torch._C.set_hook(on or options.recompute)
    if options.recompute:
        spillway_torch.set_recompute(on)


rows = []
for name, (function, count) in cases.items():
    best = {False: float("inf"), True: float("inf")}
    frames = 0
    for _ in range(options.rounds):
        for on in (False, True):
            switch(on)
            function()
            before = spillway_torch.memory_stats()["frames"]
            best[on] = min(best[on], least(function, count))
            if on:
                frames = (spillway_torch.memory_stats()["frames"] - before) / count
    spillway_torch._C.set_hook(False)
    rows.append({"operation": name, "off_us": best[False], "on_us": best[True], "frames": frames,
                 "per_frame_us": (best[True] - best[False]) / max(1, frames)})
if options.json:
    print(json.dumps(rows))
else:
    print("| operation | off, us | on, us | framed operations | more per framed operation, us |\n|---|---:|---:|---:|---:|")
    for r in rows:
        print(f"| {r['operation']} | {r['off_us']:.2f} | {r['on_us']:.2f} | {r['frames']:.0f} | {r['per_frame_us']:+.2f} |")
