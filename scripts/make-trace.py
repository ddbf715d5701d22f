#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a made-up trace of accesses for spillway-replay to standard output.

usage: make-trace.py [--operations N] [--live N] [--uses N] [--operands N] [--weights N] [--seed N] > trace.csv

Operations create blocks until --live of them live, and then use one of those, drawn at random, that was
not used --uses times yet; at its last use it goes. Sizes lie between 4 KiB and 1 MiB, as many from each
octave; a kernel takes 20 ns a KiB of its operands. The same options make the same trace.
"""
import argparse
import random
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1_000, help="blocks alive at once")
    parser.add_argument("--uses", type=int, default=4, help="how often each block is used")
    parser.add_argument("--operands", type=int, default=1, help="of each operation")
    parser.add_argument("--weights", type=int, default=0, help="blocks among the first that live throughout")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    draw = random.Random(options.seed).random
    live, left, sizes = [], [], []  # by place: the block, its uses to come, its size
    rows = ["step,id,size,weight,kernel_ns"]
    born = 0
    for step in range(options.operations):
        operands = {}
        while len(operands) < options.operands:
            if len(live) < options.live:
                at = len(live)
                live.append(born)
                left.append(options.uses)
                sizes.append(int(4096 * 2 ** (8 * draw())))
                born += 1
            else:
                at = int(draw() * len(live))
            operands[live[at]] = sizes[at]
            left[at] -= 1
            if left[at] <= 0 and live[at] >= options.weights:
                for column in (live, left, sizes):
                    column[at] = column[-1]
                    column.pop()
        kernel_ns = sum(operands.values()) // 1024 * 20
        for block, size in operands.items():
            rows.append(f"{step},{block},{size},{int(block < options.weights)},{kernel_ns}")
        if len(rows) > 100_000:
            sys.stdout.write("\n".join(rows) + "\n")
            rows.clear()
    if rows:
        sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
