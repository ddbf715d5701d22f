# SPDX-License-Identifier: Apache-2.0
"""Compares copying a tensor with computing it again: time per step of a transformer under a limit, on the CPU device
with a slow link.

    python bench_recompute.py [--part 0.3] [--link 0.1] [--batch 16] [--hidden 128] [--layers 4] [--steps 8]
                              [--rounds 2] [--json]

Each line is a process of its own with one thread. The lines run in turn, `rounds` times, and a time is the median of
all steps after the second. `P` is the peak of bytes in tensors without a limit. A CPU has no link to a host, so
copies are slowed down to `link` times the rate of memcpy in each direction. Checkpointing and `save_on_cpu` run
without a limit, since nothing else can be swapped out with them; their peaks show under which limits they fit. As on
a GPU, the program waits for what `save_on_cpu` copies.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import nets
from host_copies import host_copy
from progress import progress

MIB = 1 << 20
KINDS = ("no limit", "swap only", "recompute", "checkpoint", "save_on_cpu")


def memcpy_rate():
    """Returns the rate of memcpy in one thread, in bytes per second."""
    a, b = torch.ones(16 * MIB), torch.ones(16 * MIB)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        b.copy_(a)
        times.append(time.perf_counter() - start)
    return a.nbytes / min(times)


def over_link(copy, tensor, rate):
    start = time.perf_counter()
    done = copy(tensor)
    time.sleep(max(0.0, tensor.nbytes / rate - (time.perf_counter() - start)))
    return done


def work(options):
    import spillway_torch
    torch.set_num_threads(1)
    spillway_torch.install(device="cpu", limit=options.limit or 16 << 30, link_bytes_per_second=options.rate)
    spillway_torch.set_enabled_lms(True)
    spillway_torch.set_recompute(options.kind == "recompute")
    lms = spillway_torch._spillway_torch
    hooks = contextlib.nullcontext
    if options.kind == "save_on_cpu":
        def hooks():
            return torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: over_link(lambda t: host_copy(t, lms), tensor, options.rate),
                lambda tensor: over_link(torch.clone, tensor, options.rate))
    torch.manual_seed(0)
    model = nets.Transformer(options.hidden, options.layers)
    x, y = torch.randint(0, 1000, (options.batch, 128)), torch.randint(0, 10, (options.batch,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    losses, seconds = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        with hooks():
            loss = F.cross_entropy(nets.checkpointed(model, x) if options.kind == "checkpoint" else model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
        seconds.append(time.perf_counter() - start)
    stats = spillway_torch.memory_stats()
    print(json.dumps({"losses": losses, "seconds": seconds[2:], "peak": stats["tensor_bytes.all.peak"],
                      "out": stats["swap_out_bytes"] // options.steps, "in": stats["swap_in_bytes"] // options.steps,
                      "recomputed": stats["recomputed_bytes"] // options.steps,
                      "recompute_ms": stats["recompute_ns"] / 1e6 / options.steps}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=float, default=0.3)
    parser.add_argument("--link", type=float, default=0.1)
    for name, value in (("batch", 16), ("hidden", 128), ("layers", 4), ("steps", 8), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        work(options)
        return
    torch.set_num_threads(1)
    rate = int(options.link * memcpy_rate())
    limit, runs = 0, {}
    for kind in progress(options.rounds * KINDS):
        command = [sys.executable, os.path.abspath(__file__), "--kind", kind, "--rate", str(rate)]
        for name in ("batch", "hidden", "layers", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        if kind in ("swap only", "recompute"):
            command += ["--limit", str(limit)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        run = json.loads(done.stdout.strip().splitlines()[-1])
        if kind in runs:
            runs[kind]["seconds"] += run["seconds"]
        runs.setdefault(kind, run)
        limit = limit or int(options.part * run["peak"])
    peak = runs["no limit"]["peak"]
    swap_only = statistics.median(runs["swap only"]["seconds"])
    if options.json:
        print(json.dumps({"peak": peak, "limit": limit, "rate": rate, "runs": runs}))
        return
    print(f"P = {peak / MIB:.0f} MiB, limit {options.part} P, link {rate / 1e9:.2f} GB/s each way\n\n"
          "| | s/step | beside swap only | out, MiB | in, MiB | recomputed, MiB | in ms | peak / P | losses |\n"
          "|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for kind, run in runs.items():
        median = statistics.median(run["seconds"])
        print(f"| {kind} | {median:.3f} | {median / swap_only:.2f} | {run['out'] / MIB:.0f} | {run['in'] / MIB:.0f} | "
              f"{run['recomputed'] / MIB:.0f} | {run['recompute_ms']:.0f} | {run['peak'] / peak:.2f} | "
              f"{'the same' if run['losses'] == runs['no limit']['losses'] else 'others'} |")


if __name__ == "__main__":
    main()
