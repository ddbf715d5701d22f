# SPDX-License-Identifier: Apache-2.0
"""Trains a network on handwritten digits in a part of the memory it needs.

    python train_digits.py [--limit-mib 24] [--epochs 8] [--batch 256] [--device cpu|cuda] [--without-support]

Only the lines that say `spillway_torch` differ from a usual script.
"""
import argparse
import pathlib
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import spillway_torch
from progress import progress, say

DIGITS = pathlib.Path(__file__).resolve().parents[1] / "train_beyond_memory" / "data" / "digits.csv"


def load(path):
    """1797 pictures of 8 x 8 pixels from 0 to 16, and which digit each shows; the last 360 are for the test."""
    rows = [[float(x) for x in line.split(",")] for line in path.read_text().splitlines() if line[:1].isdigit()]
    table = torch.tensor(rows)
    pictures, digits = table[:, :64].view(-1, 1, 8, 8) / 16, table[:, 64].long()
    return (pictures[:-360], digits[:-360]), (pictures[-360:], digits[-360:])


def make():
    layers = [nn.Conv2d(1, 48, 3, padding=1), nn.ReLU()]
    for _ in range(8):
        layers += [nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 64, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=float, default=24)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--without-support", action="store_true")
    options = parser.parse_args()

    spillway_torch.install(device=options.device, limit=int(options.limit_mib * (1 << 20)))
    spillway_torch.set_enabled_lms(not options.without_support)

    torch.manual_seed(1)
    (pictures, digits), (test_pictures, test_digits) = (
        [tensor.to(options.device) for tensor in part] for part in load(DIGITS))
    model = make().to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(options.epochs):
        start = time.perf_counter()
        model.train()
        batches = torch.randperm(len(digits)).to(options.device).split(options.batch)
        for batch in progress(batches, desc=f"epoch {epoch + 1}"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pictures[batch]), digits[batch])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_pictures).argmax(1) == test_digits).sum().item() / len(test_digits)
        now = spillway_torch.memory_stats()
        say(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {right:.3f}, "
            f"{time.perf_counter() - start:.1f} s, "
            f"tensors at most {now['tensor_bytes.all.peak'] / (1 << 20):.1f} MiB, "
            f"swapped out {now['swap_out_bytes'] / (1 << 20):.0f} MiB so far")
    print(spillway_torch.memory_summary())


if __name__ == "__main__":
    main()
