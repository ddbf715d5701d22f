# SPDX-License-Identifier: Apache-2.0
"""What swapping costs the processor, apart from its copies: CPU time of training steps without a limit and under one, in
turn in one process, the least of some.

    python bench_swap.py [MODEL ...] [--hidden 256] [--layers 4] [--batch 4] [--length 64] [--cap 0.5]
                         [--rounds 3] [--steps 6] [--json]

MODEL is bert, llama, t5, mamba, lora (a Llama; these need transformers, lora needs peft) or mlp. Each model is a process
of its own. `P` is the peak of bytes in tensors without a limit. A step counts from the third one after each change of the
limit. What the copies cost is the bytes that were copied in the step, at the speed of copies of 1 MiB in this process.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys
import time

MIB = 1 << 20


def seconds_per_byte():
    """Of copies between places that are not in the near caches."""
    total, part = 128 * MIB, MIB
    a, b = ctypes.create_string_buffer(total), ctypes.create_string_buffer(total)
    ctypes.memset(b, 1, total)

    def once():
        start = time.process_time()
        for at in range(0, total, part):
            ctypes.memmove(ctypes.addressof(b) + at, ctypes.addressof(a) + at, part)
        return time.process_time() - start
    return min(once() for _ in range(5)) / total


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

    def step():
        start = time.process_time()
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        return time.process_time() - start

    def best_of(limit, steps):
        spillway_torch.set_limit_lms(limit)
        best = None
        for i in range(steps):
            before = spillway_torch.memory_stats()
            seconds = step()
            after = spillway_torch.memory_stats()
            if i >= 2 and (best is None or seconds < best["seconds"]):
                best = {"seconds": seconds, **{k: after[k] - before[k] for k in (
                    "swap_out_bytes", "swap_in_bytes", "moved_bytes", "frames")}}
        return best

    step()
    spillway_torch.reset_peak_memory_stats()
    step()
    peak = spillway_torch.memory_stats()["tensor_bytes.all.peak"]
    free, capped, per_byte = [], [], []
    for _ in range(options.rounds):
        free.append(best_of(plenty, options.steps))
        per_byte.append(seconds_per_byte())
        capped.append(best_of(int(options.cap * peak), options.steps))
    free, capped = (min(all, key=lambda one: one["seconds"]) for all in (free, capped))
    copied = sum(capped[k] for k in ("swap_out_bytes", "swap_in_bytes", "moved_bytes"))
    copies = copied * min(per_byte)
    print(json.dumps({
        "model": options.models[0], "hidden": options.hidden, "peak_bytes": peak, "frames": capped["frames"],
        "free_ms": 1e3 * free["seconds"], "capped_ms": 1e3 * capped["seconds"], "copied_bytes": copied,
        "copies_ms": 1e3 * copies, "rest": (capped["seconds"] - free["seconds"] - copies) / free["seconds"]}))


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
    for model in options.models:
        command = [sys.executable, os.path.abspath(__file__), model, "--worker", "--cap", str(options.cap)]
        for name in ("hidden", "layers", "batch", "length", "rounds", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        line = done.stdout.strip().splitlines()[-1]
        if options.json:
            print(line, flush=True)
            continue
        r = json.loads(line)
        print(f"| {r['model']}, hidden {r['hidden']} | {r['peak_bytes'] / MIB:.0f} | {r['frames']} | {r['free_ms']:.1f} | "
              f"{r['capped_ms']:.1f} | {r['capped_ms'] / r['free_ms']:.2f} | {r['copied_bytes'] / MIB:.0f} | "
              f"{r['copies_ms']:.1f} | {100 * r['rest']:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
