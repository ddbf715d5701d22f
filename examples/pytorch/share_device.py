# SPDX-License-Identifier: Apache-2.0
"""Trains in two processes on one device, in two ways: with half of the memory for each, and with memory that they
share (`spillway_torch.share`).

    python share_device.py [--device cpu|cuda] [--net NET] [--batch N] [--size N] [--capacity 1.2] [--steps 8]
                           [--rounds 3] [--gbps 1]

In each round, first one process trains while the other one rests, then the other way round, then both train at once.
P is the peak of bytes in tensors of one process. --capacity is the memory of both together, as a factor of P. On the
CPU device copies are as slow as on a link of --gbps in each direction. Prints the time and the swapped bytes of a
step, and whether both end with the same weights as a process that has the device alone. NET, --batch and --size are
as in bench_lms.py.
"""
import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20


def work(options):
    """Trains as many steps as each line on stdin says, and prints what they took."""
    import torch

    import nets
    import spillway_torch
    torch.set_num_threads(1)
    if options.device == "cuda":
        nets.compute_the_same_each_time()
        spillway_torch.install(device="cuda", limit=options.limit or None)
    else:
        spillway_torch.install(device="cpu", limit=options.limit or 8 << 30, link_bytes_per_second=options.gbps * 1e9)
    spillway_torch.set_enabled_lms(True)
    if options.share:
        spillway_torch.share(options.share, idle_after=0.5)
    torch.manual_seed(1)
    model, x, y = (one.to(options.device) for one in nets.make(options.net, options.batch, options.size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for line in sys.stdin:
        before = spillway_torch.memory_stats()["swap_out_bytes"]
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        stats = spillway_torch.memory_stats()
        weights = hashlib.sha256()
        for parameter in model.parameters():
            weights.update(parameter.detach().cpu().numpy().tobytes())
        print(json.dumps({"seconds": statistics.median(seconds), "peak": stats["tensor_bytes.all.peak"],
                          "swapped": (stats["swap_out_bytes"] - before) / len(seconds),
                          "weights": weights.hexdigest()}), flush=True)


class Worker:
    def __init__(self, options, limit=0, share=""):
        same = [f"--{name}={getattr(options, name)}" for name in ("device", "net", "batch", "size", "gbps")]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", *same, "--limit", str(limit), "--share", share],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})

    def begin(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def result(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a process that trains has ended early")
        return json.loads(line)

    def train(self, steps):
        self.begin(steps)
        return self.result()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def measure(workers, options):
    """Returns what a step took and swapped in each way to train, and the digests of all weights at the end."""
    found = {"one at a time": [], "both at once": []}
    for _ in range(options.rounds):
        found["one at a time"] += [worker.train(options.steps) for worker in workers]
        for worker in workers:
            worker.begin(options.steps)
        found["both at once"] += [worker.result() for worker in workers]
    for worker in workers:
        worker.end()
    digests = {result["weights"] for result in found["both at once"][-len(workers):]}
    return {way: (statistics.median(result["seconds"] for result in results[len(workers):]),
                  statistics.median(result["swapped"] for result in results[len(workers):]))
            for way, results in found.items()}, digests


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--net", default="conv", choices=["conv", "mlp", "resnet50", "transformer"])
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--capacity", type=float, default=1.2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gbps", type=float, default=1)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is 2 or more: the first one does not count")
    if options.work:
        work(options)
        return

    alone = Worker(options)
    steps = [alone.train(options.steps) for _ in range(2 * options.rounds)]
    alone.end()
    peak, weights = steps[-1]["peak"], steps[-1]["weights"]
    capacity = int(options.capacity * peak)
    print(f"P: {peak / MIB:.0f} MiB; both have {capacity / MIB:.0f} MiB; a step of a process that has the device alone: "
          f"{1000 * statistics.median(step['seconds'] for step in steps[1:]):.0f} ms")
    print("| memory | one at a time, ms a step | MiB out | both at once, ms a step | MiB out | weights |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, start in (("half for each", {"limit": capacity // 2}),
                            ("shared", {"limit": capacity, "share": f"{folder}/device"})):
            found, digests = measure([Worker(options, **start) for _ in range(2)], options)
            columns = " | ".join(f"{1000 * seconds:.0f} | {swapped / MIB:.0f}" for seconds, swapped in found.values())
            print(f"| {name} | {columns} | {'the same' if digests == {weights} else 'DIFFERENT'} |", flush=True)


if __name__ == "__main__":
    main()
