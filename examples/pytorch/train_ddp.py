# SPDX-License-Identifier: Apache-2.0
"""Trains a network in several processes. Each has device memory of its own, which is too small for the network.

    torchrun --nproc-per-node 2 train_ddp.py [--limit-mib 64] [--steps 10] [--device cpu|cuda]

Each process installs its own allocator: on the CPU with gloo, or with NCCL on as many GPUs as there are processes.
The operands of a collective stay at their addresses until the collective has ended, which is after the call has
returned. Then they may be swapped out like any tensor.
"""
import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import spillway_torch


def make():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(8):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=float, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()

    torch.set_num_threads(1)
    device = "cpu" if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"
    spillway_torch.install(device=device, limit=int(options.limit_mib * (1 << 20)))
    spillway_torch.set_enabled_lms(True)

    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(make().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)  # different data in each process
    x, y = torch.randn(8, 3, 32, 32).repeat(2, 1, 2, 2).to(device), torch.randint(0, 10, (16,)).to(device)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    now = spillway_torch.memory_stats()
    digest = hashlib.sha256(str([p.tolist() for p in model.parameters()]).encode()).hexdigest()[:16]
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank:
            print(f"process {rank}: {options.steps} steps, parameters {digest}, loss {loss.item().hex()}, tensors at most "
                  f"{now['tensor_bytes.all.peak'] / (1 << 20):.1f} MiB, "
                  f"swapped out {now['swap_out_bytes'] / (1 << 20):.0f} MiB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
