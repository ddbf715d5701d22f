# SPDX-License-Identifier: Apache-2.0
"""Finds the largest image and the largest batch that train under a memory limit, with and without support.

    python many_models.py [MODEL ...] [--limit-mib 512] [--steps 2] [--csv FILE] [--most-image 512] [--most-batch 64]
                          [--device cpu|cuda]

MODEL is a name that torchvision knows (resnet18, densenet121, ...), or `residual`, a small network that needs no
torchvision. Each attempt is a process of its own. Statistics of each step go to the CSV file; a table ends the run.
"""
import argparse
import csv
import json
import os
import subprocess
import sys
import time

COLUMNS = ["model", "support", "image", "batch", "step", "ok", "seconds", "peak_mib", "swapped_out_mib", "swapped_in_mib",
           "moved_mib", "prefetched_in_time"]
BASE_IMAGE, BASE_BATCH, IMAGE_STEP = 64, 1, 32


def make(name):
    import torch.nn as nn
    if name != "residual":
        import torchvision
        return torchvision.models.get_model(name, weights=None)

    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

        def forward(self, x):
            return x + self.inner(x)
    return nn.Sequential(nn.Conv2d(3, 32, 7, stride=2, padding=3), *[Block(32) for _ in range(8)],
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1000))


def work(options):
    """Trains a few steps and prints a line of JSON for each. Exits with status 3 if memory runs out."""
    import torch
    import torch.nn.functional as F

    import spillway_torch
    mib = 1 << 20
    torch.set_num_threads(1)
    spillway_torch.install(device=options.device, limit=int(options.limit_mib * mib))
    spillway_torch.set_enabled_lms(options.support)
    torch.manual_seed(0)
    try:
        model = make(options.models[0]).train().to(options.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        x = torch.randn(options.batch, 3, options.image, options.image).to(options.device)
        y = torch.randint(0, 1000, (options.batch,)).to(options.device)
        last = spillway_torch.memory_stats()
        for step in range(options.steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            out = model(x)
            F.cross_entropy(getattr(out, "logits", out), y).backward()
            optimizer.step()
            if options.device == "cuda":
                torch.cuda.synchronize()
            now = spillway_torch.memory_stats()
            print(json.dumps({
                "step": step, "seconds": round(time.perf_counter() - start, 3),
                "peak_mib": round(now["tensor_bytes.all.peak"] / mib, 1),
                **{name: round((now[key] - last[key]) / mib, 1) for name, key in (
                    ("swapped_out_mib", "swap_out_bytes"), ("swapped_in_mib", "swap_in_bytes"), ("moved_mib", "moved_bytes"))},
                "prefetched_in_time": now["prefetch.hits"] - last["prefetch.hits"]}), flush=True)
            last = now
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        sys.exit(3)


class Sweep:
    def __init__(self, options):
        self.options = options
        self.attempts = 0
        self.file = open(options.csv, "w", newline="") if options.csv else None
        self.csv = csv.DictWriter(self.file, COLUMNS) if self.file else None
        if self.csv:
            self.csv.writeheader()

    def trains(self, model, support, image, batch):
        o = self.options
        command = [sys.executable, os.path.abspath(__file__), model, "--worker", "--limit-mib", str(o.limit_mib), "--steps",
                   str(o.steps), "--device", o.device, "--image", str(image), "--batch", str(batch)] + ["--support"] * support
        self.attempts += 1
        self.show(f"{model}, support {'on' if support else 'off'}: image {image}, batch {batch}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 3):
            raise SystemExit(f"\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        for row in rows or [{"step": 0}]:
            if self.csv:
                self.csv.writerow({"model": model, "support": support, "image": image, "batch": batch,
                                   "ok": done.returncode == 0, **row})
        self.last = rows[-1] if done.returncode == 0 else None
        return done.returncode == 0

    def show(self, text):
        if sys.stderr.isatty():
            print(f"\r\033[K[{'#' * (self.attempts % 31):<30}] {text}", end="", file=sys.stderr, flush=True)

    def largest(self, least, step, most, trains):
        """Returns the largest of least, least + step, ..., up to most, that trains, and the statistics of its last step."""
        count = (most - least) // step + 1
        low, high, stride, seen = -1, count, 1, None  # low trains, high does not
        while high - low > 1:
            at = min(low + stride, count - 1) if high == count else (low + high) // 2
            if trains(least + at * step):
                low, stride, seen = at, 2 * stride, self.last
            else:
                high = at
        return (None, None) if low < 0 else (least + low * step, seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["residual"])
    parser.add_argument("--limit-mib", type=float, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--csv")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--most-image", type=int, default=512)
    parser.add_argument("--most-batch", type=int, default=64)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--support", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--image", type=int, default=BASE_IMAGE, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=BASE_BATCH, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    sweep = Sweep(options)
    table = []
    for model in options.models:
        for support in (False, True):
            image, of_image = sweep.largest(BASE_IMAGE, IMAGE_STEP, options.most_image,
                                            lambda n: sweep.trains(model, support, n, 4))
            batch, of_batch = sweep.largest(BASE_BATCH, 1, options.most_batch,
                                            lambda n: sweep.trains(model, support, BASE_IMAGE * 2, n))
            table.append((model, "on" if support else "off", image, of_image, batch, of_batch))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(f"limit {options.limit_mib:g} MiB; images in batches of 4; batches of images of {BASE_IMAGE * 2} x {BASE_IMAGE * 2}\n")
    print("| model | support | largest image | s/step | largest batch | s/step |\n|---|---|---:|---:|---:|---:|")
    for model, support, image, of_image, batch, of_batch in table:
        print(f"| {model} | {support} | {image or 'none'} | {of_image['seconds'] if of_image else '-'} | "
              f"{batch or 'none'} | {of_batch['seconds'] if of_batch else '-'} |")
    if sweep.file:
        sweep.file.close()


if __name__ == "__main__":
    main()
