# SPDX-License-Identifier: Apache-2.0
"""Measures what swapping costs the processor, apart from its copies: processor time of training steps without a limit
and under one, in turn in one process, the least of several.

    python bench_swap.py [MODEL ...] [--hidden 256] [--layers 4] [--batch 4] [--length 64] [--cap 0.5]
                         [--rounds 3] [--steps 6] [--json]

MODEL is bert, llama, t5, mamba, lora (a Llama) or mlp. All but mlp need transformers; lora also needs peft. Each
model runs in a process of its own. `P` is the peak of bytes in tensors without a limit. Steps count from the third
one after each change of the limit. step_cost.py explains how the costs are separated.
"""
import argparse
import json
import os
import subprocess
import sys

from progress import progress, say
from step_cost import MIB, Steps, compare, seconds_of, seconds_per_byte


def work(options):
    import torch

    import nets
    import spillway_torch
    torch.set_num_threads(1)
    plenty = 16 << 30
    spillway_torch.install(device="cpu", limit=plenty)
    spillway_torch.set_enabled_lms(True)
    torch.manual_seed(0)
    model = nets.language_model(options.models[0], options.hidden, options.layers).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    words = torch.randint(0, nets.WORDS, (options.batch, options.length))

    def step(_):
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()

    def least(limit):
        spillway_torch.set_limit_lms(limit)
        steps = Steps(options.steps, spillway_torch.memory_stats)
        steps.run(step)
        return steps.least()

    step(0)
    spillway_torch.reset_peak_memory_stats()
    step(1)
    peak = spillway_torch.memory_stats()["tensor_bytes.all.peak"]
    free, capped, per_byte = [], [], []
    for _ in range(options.rounds):
        free.append(least(plenty))
        per_byte.append(seconds_per_byte())
        capped.append(least(int(options.cap * peak)))
    free, capped = min(free, key=seconds_of), min(capped, key=seconds_of)
    print(json.dumps({"model": options.models[0], "hidden": options.hidden, "peak_bytes": peak, "frames": capped["frames"],
                      **compare(free, capped, min(per_byte))}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["bert", "llama", "t5", "mamba", "lora"])
    for name, value in (("hidden", 256), ("layers", 4), ("batch", 4), ("length", 64), ("rounds", 3), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cap", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    if not options.json:
        print("| | P, MiB | operations | no limit, CPU ms | limit, CPU ms | ratio | copied, MiB | copies, ms | rest |\n"
              "|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for model in progress(options.models):
        command = [sys.executable, os.path.abspath(__file__), model, "--worker", "--cap", str(options.cap)]
        for name in ("hidden", "layers", "batch", "length", "rounds", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        line = done.stdout.strip().splitlines()[-1]
        if options.json:
            say(line)
            continue
        r = json.loads(line)
        say(f"| {r['model']}, hidden {r['hidden']} | {r['peak_bytes'] / MIB:.0f} | {r['frames']} | {r['free_ms']:.1f} | "
            f"{r['capped_ms']:.1f} | {r['capped_ms'] / r['free_ms']:.2f} | {r['copied_bytes'] / MIB:.0f} | "
            f"{r['copies_ms']:.1f} | {100 * r['rest']:.0f} % |")


if __name__ == "__main__":
    main()
