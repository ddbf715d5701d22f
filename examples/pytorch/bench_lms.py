# SPDX-License-Identifier: Apache-2.0
"""Measures what large-model support costs: time per step under limits, compared with PyTorch's own ways to save memory.

    python bench_lms.py [--net conv|mlp|resnet50|transformer] [--device cpu|cuda] [--caps 0.6 0.4 0.3 0.2 0.15]
                        [--recompute] [--steps 8] [--rounds 3] [--batch N] [--size PIXELS | --size HIDDEN] [--json]

Every line is a process of its own, on the CPU device with one thread. The lines run in turn, `rounds` times, and a time
is the least of all steps after the second. `P` is the peak of bytes in tensors without a limit; a cap is a part of P.
On CUDA, PyTorch uses deterministic algorithms where it has them, so that losses and weights can be compared.

With `--recompute` each cap has a second line, where tensors may be recomputed instead of copied. The module tries its
rules for that in the first steps, so these lines train for that many steps before they are timed.
"""
import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import nets
from host_copies import host_copy
from progress import progress, say

MIB = 1 << 20
#: Steps after which the module has tried all its rules for recomputing.
STEPS_TO_TUNE = 26


def saving(kind, lms, device):
    """Returns a context that does what `save_on_cpu` does on a GPU: tensors that are saved for backward are copied to
    the host, and back when they are used.
    """
    if kind != "cpu":
        return contextlib.nullcontext()
    if device == "cuda":
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: host_copy(tensor, lms), torch.clone)


def work(options):
    torch.set_num_threads(1)
    if options.device == "cuda":
        nets.compute_the_same_each_time()
    lms = None
    if options.limit:
        import spillway_torch
        spillway_torch.install(device=options.device, limit=options.limit)
        spillway_torch.set_enabled_lms(options.kind in ("none", "recompute") and not options.off)
        spillway_torch.set_recompute(options.kind == "recompute")
        lms = spillway_torch._spillway_torch
    torch.manual_seed(0)
    result = {"ok": True}
    before = {}
    try:
        model, x, y = nets.make(options.net, options.batch, options.size)
        model, x, y = model.to(options.device), x.to(options.device), y.to(options.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def train():
            """Trains some steps. Returns their losses and their times in seconds."""
            losses, seconds = [], []
            for _ in range(options.steps):
                start = time.perf_counter()
                optimizer.zero_grad()
                with saving(options.kind, lms, options.device):
                    loss = F.cross_entropy(nets.checkpointed(model, x) if options.kind == "checkpoint" else model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item().hex())
                seconds.append(time.perf_counter() - start)
            return losses, seconds
        result["losses"], result["seconds"] = train()
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        result["digest"] = digest.hexdigest()
        if options.kind == "recompute":
            for _ in range(0, STEPS_TO_TUNE, options.steps):
                train()
            before = spillway_torch.memory_stats()
            _, result["seconds"] = train()
    except RuntimeError as error:
        result |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
    if options.device == "cuda":
        result["peak"] = torch.cuda.max_memory_allocated()
    if lms is not None:
        stats = spillway_torch.memory_stats()
        result["peak"] = stats["tensor_bytes.all.peak"]
        result["stats"] = {k: v - before.get(k, 0) for k, v in stats.items() if isinstance(v, int) and ".all." not in k and v}
    print(json.dumps(result))


def run(**options):
    command = [sys.executable, os.path.abspath(__file__), "--worker"]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    if done.returncode != 0:
        return {"ok": False, "error": done.stderr[-300:], "losses": [], "seconds": []}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="conv", choices=["conv", "mlp", "resnet50", "transformer"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--caps", type=float, nargs="*", default=[0.6, 0.4, 0.3, 0.2, 0.15])
    parser.add_argument("--recompute", action="store_true", help="also each cap with recomputation")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=0, help="by default 16 pictures, 4096 rows, 4 pictures or 32 sequences")
    parser.add_argument("--size", type=int, default=0,
                        help="of pictures: 64 by default, 128 for resnet50; of the transformer's hidden states: 128 by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--off", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="none", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 3:
        parser.error("--steps is 3 or more: times count after the second")
    if options.worker:
        work(options)
        return
    shared = {"net": options.net, "device": options.device, "steps": options.steps, "batch": options.batch,
              "size": options.size}
    plenty = 4 << 30
    if options.device == "cuda":
        plenty = torch.cuda.mem_get_info()[0] * 8 // 10
    first = run(**shared, limit=plenty)
    if not first["ok"]:
        sys.exit(f"bench_lms.py: without a cap it does not train: {first['error']}")
    peak = first["peak"]
    lines = {"PyTorch as it is": {}, "support on, no cap": {"limit": plenty}}
    for cap in options.caps:
        lines[f"cap {cap:g} P"] = {"limit": int(cap * peak)}
        if options.recompute:
            lines[f"cap {cap:g} P, recompute"] = {"limit": int(cap * peak), "kind": "recompute"}
    lines["save_on_cpu"] = {"kind": "cpu"}
    lines["checkpointing"] = {"kind": "checkpoint"}
    report = Report(options, peak)
    results = {name: [] for name in lines}
    for name in progress([*lines] * options.rounds):
        results[name].append(run(**shared, **lines[name]))
        if len(results[name]) < options.rounds:
            continue
        if name in ("save_on_cpu", "checkpointing"):  # once more with this module's allocator, which measures the peak
            results[name][0]["peak"] = run(**shared, **lines[name], limit=plenty, off=True).get("peak", 0)
        report.add(name, results)


def least_step(runs):
    return min(min(r["seconds"][2:]) for r in runs)


class Report:
    """Prints a row for each way to train as soon as it has been measured: in a table, or with --json as an object on
    a line.
    """

    def __init__(self, options, peak):
        self.options, self.peak = options, peak
        if options.json:
            self.print_json({"net": options.net, "device": options.device, "torch": torch.__version__, "peak_bytes": peak})
            return
        print(f"{options.net} on {options.device}: P = {peak / MIB:.1f} MiB, PyTorch {torch.__version__}, {options.rounds} rounds of "
              f"{options.steps} steps\n")
        print("| | ms/step | over PyTorch | over no cap | bitwise | device MiB | out MiB/step | in | made again | moved | "
              "prefetched in time / late / wasted |")
        print("|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|", flush=True)

    @staticmethod
    def print_json(value):
        say(json.dumps(value))

    def row(self, name, results):
        runs, stock, uncapped = results[name], results["PyTorch as it is"], results["support on, no cap"]
        if not all(r["ok"] for r in runs):
            return {"line": name, "error": next(r["error"] for r in runs if not r["ok"])}
        stats = runs[0].get("stats", {})
        per_step = {key: stats.get(f"{key}_bytes", 0) / MIB / self.options.steps
                    for key in ("swap_out", "swap_in", "recomputed", "moved")}
        return {
            "line": name, "ms": 1e3 * least_step(runs), "ratio": least_step(runs) / least_step(stock),
            "ratio_uncapped": least_step(runs) / least_step(uncapped) if uncapped else None,
            "bitwise": all(r["losses"] == stock[0]["losses"] and r["digest"] == stock[0]["digest"] for r in runs),
            "peak_mib": min(runs[0].get("peak", self.peak), lines_cap(name, self.peak)) / MIB,
            "out_mib": per_step["swap_out"], "in_mib": per_step["swap_in"], "recomputed_mib": per_step["recomputed"],
            "moved_mib": per_step["moved"],
            "hits": stats.get("prefetch.hits", 0), "late": stats.get("prefetch.late", 0),
            "wasted": stats.get("prefetch.wasted", 0), "waits_ms": stats.get("host_wait_ns", 0) / 1e6 / self.options.steps,
        }

    def add(self, name, results):
        row = self.row(name, results)
        if self.options.json:
            self.print_json(row)
        elif "error" in row:
            say(f"| {name} | {row['error']} |")
        else:
            over_uncapped = f"{row['ratio_uncapped']:.3f}" if row["ratio_uncapped"] else ""
            say(f"| {name} | {row['ms']:.0f} | {row['ratio']:.3f} | {over_uncapped} | "
                f"{'yes' if row['bitwise'] else 'no'} | {row['peak_mib']:.0f} | {row['out_mib']:.0f} | {row['in_mib']:.0f} | "
                f"{row['recomputed_mib']:.0f} | {row['moved_mib']:.0f} | "
                f"{row['hits']} / {row['late']} / {row['wasted']} |")


def lines_cap(name, peak):
    return float(name.split()[1]) * peak if name.startswith("cap") else float("inf")


if __name__ == "__main__":
    main()
