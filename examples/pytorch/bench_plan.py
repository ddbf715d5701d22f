# SPDX-License-Identifier: Apache-2.0
"""Measures how well `spillway_torch.plan` predicts: compares its figures with training on the CPU device under
limits.

    python bench_plan.py [MODEL ...] [--caps 0.7 0.5 0.3 0.2] [--rounds 3] [--steps 5] [--json]

MODEL is conv, mlp or transformer. Each is planned in one process, with support off, and trained in another one, on
one thread. Times are processor times of all threads; a copy takes processor time for its bytes. The least time of all
rounds counts. Steps under a limit count from the third one.
"""
import argparse
import json
import os
import subprocess
import sys
import time

import torch

import nets
from bench_swap import seconds_per_byte
from progress import progress, say

MIB = 1 << 20
KEYS = ("limit", "completed", "step_ns", "in_bytes", "out_bytes")
BATCH = {"conv": (16, 64), "mlp": (1024, None), "transformer": (32, None)}


def plan(options):
    import spillway_torch
    # Support stays off, but memory is reused as it is under a limit.
    spillway_torch.install(device="cpu", limit="16GB")
    step = nets.training_step(options.models[0], *BATCH[options.models[0]])
    step()
    best = None
    for _ in range(options.rounds * options.steps):
        with spillway_torch.plan(links=[1.0], limits=[1 << 50], overlap=False, out=None) as made:
            made.clock = time.thread_time_ns
            step()
        if best is None or made.recording.compute_ns < best.recording.compute_ns:
            best = made
    link = 1e-9 / seconds_per_byte()
    rows = best.sweep([int(cap * best.peak_bytes) for cap in options.caps], [link])
    return {"peak": best.peak_bytes, "smallest": best.smallest_limit, "compute_ms": best.recording.compute_ns / 1e6, "link_gbps": link,
            "rows": [{"cap": cap, **{key: row.get(key) for key in KEYS}} for cap, row in zip(options.caps, rows)]}


def train(options):
    import spillway_torch
    spillway_torch.install(device="cpu", limit="16GB")
    spillway_torch.set_enabled_lms(True)
    step = nets.training_step(options.models[0], *BATCH[options.models[0]])
    step()
    spillway_torch.reset_peak_memory_stats()
    step()
    peak = spillway_torch.memory_stats()["tensor_bytes.all.peak"]
    best = {}
    for _ in range(options.rounds):
        for cap in (None, *options.caps):
            spillway_torch.set_limit_lms(int(cap * peak) if cap else 16 * 10**9)
            for i in range(options.steps):
                before, start = spillway_torch.memory_stats(), time.process_time()
                step()
                seconds, after = time.process_time() - start, spillway_torch.memory_stats()
                if i >= 2 and seconds < best.get(cap, (float("inf"),))[0]:
                    best[cap] = seconds, after["swap_in_bytes"] - before["swap_in_bytes"], after["swap_out_bytes"] - before["swap_out_bytes"]
    return {"peak": peak, "rows": [{"cap": cap, "ms": 1e3 * s, "in_bytes": i, "out_bytes": o} for cap, (s, i, o) in best.items()]}


def run(options, name, what):
    command = [sys.executable, os.path.abspath(__file__), name, "--only", what, "--rounds", str(options.rounds),
               "--steps", str(options.steps), "--caps", *map(str, options.caps)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[*BATCH])
    parser.add_argument("--caps", type=float, nargs="*", default=[0.7, 0.5, 0.3, 0.2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="an object for each model")
    parser.add_argument("--only", choices=["plan", "train"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        torch.set_num_threads(1)
        print(json.dumps(plan(options) if options.only == "plan" else train(options)))
        return
    if not options.json:
        print("| | limit | peak, MiB: predicted | trained | in, MiB: predicted | trained | out, MiB: predicted | trained | "
              "step, ms: predicted | trained | predicted / trained |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in progress(options.models):
        planned, trained = run(options, name, "plan"), run(options, name, "train")
        if options.json:
            say(json.dumps({"model": name, "planned": planned, "trained": trained}))
            continue
        free = {"completed": True, "step_ns": planned["compute_ms"] * 1e6, "in_bytes": 0, "out_bytes": 0}
        predicted = {None: free, **{row["cap"]: row for row in planned["rows"]}}
        for real in trained["rows"]:
            mine = predicted[real["cap"]]
            cap = f"{real['cap']:g} P" if real["cap"] else "none"
            say(f"| {name} | {cap} | {planned['peak'] / MIB:.1f} | {trained['peak'] / MIB:.1f} | "
                f"{mine['in_bytes'] / MIB:.0f} | {real['in_bytes'] / MIB:.0f} | {mine['out_bytes'] / MIB:.0f} | {real['out_bytes'] / MIB:.0f} | "
                f"{mine['step_ns'] / 1e6:.0f} | {real['ms']:.0f} | {mine['step_ns'] / 1e6 / real['ms']:.2f} |")


if __name__ == "__main__":
    main()
