# SPDX-License-Identifier: Apache-2.0
"""Compares ways to run inference with weights that need twice the device's memory: `page`, `chunk`, and loops that
move one layer after the other.

    python bench_page.py [--layers 24] [--width 1024] [--batch 64] [--rounds 12] [--device cpu|cuda] [--json]

One loop copies each layer's weights to the device, uses them and drops them. The other uses `layer.to(device)` and
`layer.to("cpu")`, which also copies them back. On the CPU device there is one thread, and PyTorch's own allocator
stands for the host's memory.
"""
import argparse
import json
import time
import warnings

import torch

import spillway_torch
from host_copies import host_copy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--rounds", type=int, default=12)
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
parser.add_argument("--json", action="store_true")
options = parser.parse_args()
if options.rounds < 4:
    parser.error("--rounds is 4 or more: times count after the third")

torch.set_num_threads(1)
weight_bytes = options.width * options.width * 4
limit = options.layers * weight_bytes // 2
torch.manual_seed(0)
on_host = [torch.randn(options.width, options.width) / options.width ** 0.5 for _ in range(options.layers)]
x = torch.randn(options.batch, options.width)
warnings.filterwarnings("ignore", "spillway_torch: .* before install")  # these tensors are on the host on purpose
spillway_torch.install(device=options.device, limit=limit + (8 << 20), least_bytes=1)
spillway_torch.set_enabled_lms(True)
x = x.to(options.device)


def make():
    layers = [torch.nn.Linear(options.width, options.width, bias=False, device=options.device) for _ in on_host]
    for layer, weight in zip(layers, on_host):
        layer.weight.data.copy_(weight)
    return torch.nn.Sequential(*layers)


def to_device(weight):
    return weight.to("cuda") if options.device == "cuda" else torch.empty(weight.shape).copy_(weight)


def to_host(weight):
    return weight.to("cpu") if options.device == "cuda" else host_copy(weight, spillway_torch._C)


def loop(x):
    for weight in on_host:
        x = torch.nn.functional.linear(x, to_device(weight))  # one weight at a time
    return x


def loop_and_back(x):
    for i, weight in enumerate(on_host):
        here = to_device(weight)
        x = torch.nn.functional.linear(x, here)
        on_host[i] = to_host(here)
    return x


def resident(x):
    for weight in on_host:
        x = torch.nn.functional.linear(x, weight)
    return x


def measure(function):
    seconds, before = [], None
    with torch.no_grad():
        for i in range(options.rounds):
            if i == 3:
                before = spillway_torch.memory_stats()
            start = time.perf_counter()
            result = function(x)
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    now = spillway_torch.memory_stats()
    passes = max(1, options.rounds - 3)
    moved = {key: (now[key] - before[key]) / passes / (1 << 20) for key in ("swap_in_bytes", "swap_out_bytes")}
    return {"ms": 1e3 * min(seconds[3:]), "in_mib": moved["swap_in_bytes"], "out_mib": moved["swap_out_bytes"],
            "digest": hash(tuple(result.flatten().tolist()))}


rows = {"copy in, use, drop": measure(loop), "copy in, use, copy back": measure(loop_and_back)}
if options.device == "cpu":
    rows = {"all on the device (does not fit)": measure(resident), **rows}
model = spillway_torch.page(make())
rows["page"] = measure(model)
del model
model = spillway_torch.chunk(make(), max_capacity=limit - 4 * weight_bytes)
rows["chunk"] = measure(model)
all_mib = options.layers * weight_bytes / (1 << 20)
rows["copy in, use, drop"]["in_mib"] = all_mib
rows["copy in, use, copy back"] |= {"in_mib": all_mib, "out_mib": all_mib}
assert len({row["digest"] for row in rows.values()}) == 1, "results differ"
if options.json:
    print(json.dumps(rows))
else:
    print(f"{options.layers} layers of {weight_bytes >> 20} MiB, limit {limit >> 20} MiB\n")
    print("| | ms/pass | in, MiB/pass | out, MiB/pass |\n|---|---:|---:|---:|")
    for name, row in rows.items():
        print(f"| {name} | {row['ms']:.1f} | {row['in_mib']:.0f} | {row['out_mib']:.0f} |")
