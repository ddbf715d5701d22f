#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a synthetic trace for spillway-replay to standard output.

usage: make-trace.py [--operations N] [--live N] [--uses N] [--operands N] [--weights N] [--seed N]
                     [--sizes octaves|uniform|power] [--ends random|stack] [--lifetimes] > trace.csv

Operations create blocks until --live blocks are alive. Further operations use a block that is alive, chosen at
random. A block is freed after --uses uses, and then a new one is created. With --ends stack, operations use the
newest block instead, until a random number of blocks is left. A kernel takes 20 ns per KiB of its operands. With
--lifetimes, blocks are only created and freed, and a row is the lifetime of a block. The same options make the
same trace.

Sizes: octaves    4 KiB to 1 MiB, log-uniformly distributed
       uniform    4 KiB to 1 MiB, uniformly distributed
       power      4 KiB to 64 MiB, at least s bytes with a probability of 4096/s
"""
import argparse
import random
import sys

SIZES = {
    "octaves": lambda x: int(4096 * 2 ** (8 * x)),
    "uniform": lambda x: int(4096 + (2**20 - 4096) * x),
    "power": lambda x: int(min(4096 / (1 - x), 2**26)),
}


class Rows:
    """Collects rows and writes them to standard output in batches."""

    def __init__(self, header):
        self.rows = [header]

    def add(self, row):
        self.rows.append(row)
        if len(self.rows) > 100_000:
            self.flush()

    def flush(self):
        if self.rows:
            sys.stdout.write("\n".join(self.rows) + "\n")
            self.rows.clear()


class Chooser:
    """Chooses the index of the block that is used next, or None if a new block has to be created."""

    def __init__(self, options, draw):
        self.most = options.live
        self.is_stack = options.ends == "stack"
        self.draw = draw
        self.least = None  # with --ends stack: the number of blocks at which creation resumes

    def choose(self, live):
        if not self.is_stack:
            return None if live < self.most else int(self.draw() * live)
        if self.least is None:
            if live < self.most:
                return None
            self.least = int(self.draw() * self.most)
        if live <= self.least:
            self.least = None
            return None
        return live - 1


def write_accesses(options, draw, rows):
    chooser = Chooser(options, draw)
    live, left, sizes = [], [], []  # parallel lists: block ids, remaining uses, sizes
    born = 0
    for step in range(options.operations):
        operands = {}
        while len(operands) < options.operands:
            at = chooser.choose(len(live))
            if at is None:
                at = len(live)
                live.append(born)
                left.append(options.uses)
                sizes.append(SIZES[options.sizes](draw()))
                born += 1
            operands[live[at]] = sizes[at]
            left[at] -= 1
            if left[at] <= 0 and live[at] >= options.weights:
                for column in (live, left, sizes):
                    column[at] = column[-1]
                    column.pop()
        kernel_ns = sum(operands.values()) // 1024 * 20
        for block, size in operands.items():
            rows.add(f"{step},{block},{size},{int(block < options.weights)},{kernel_ns}")


def write_lifetimes(options, draw, rows):
    chooser = Chooser(options, draw)
    live = []  # (block id, time of creation, size) of each live block
    born = 0
    for time in range(options.operations):
        at = chooser.choose(len(live))
        if at is None:
            live.append((born, time, SIZES[options.sizes](draw())))
            born += 1
        else:
            block, lower, size = live[at]
            rows.add(f"{block},{lower},{time},{size}")
            live[at] = live[-1]
            live.pop()
    for block, lower, size in live:
        rows.add(f"{block},{lower},{options.operations},{size}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=1_000, help="how many blocks are alive at once")
    parser.add_argument("--uses", type=int, default=4, help="how often each block is used")
    parser.add_argument("--operands", type=int, default=1, help="how many blocks each operation uses")
    parser.add_argument("--weights", type=int, default=0, help="how many of the first blocks are never freed")
    parser.add_argument("--sizes", choices=SIZES, default="octaves")
    parser.add_argument("--ends", choices=("random", "stack"), default="random")
    parser.add_argument("--lifetimes", action="store_true", help="write lifetimes of blocks instead of their uses")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.ends == "stack" and options.weights:
        parser.error("the newest block cannot go if it is a weight")
    for name in "operations", "live", "uses", "operands":
        if getattr(options, name) < 1:
            parser.error(f"--{name} is 1 or more")
    if options.weights < 0:
        parser.error("--weights is 0 or more")
    if not options.lifetimes and options.live <= options.weights and options.live < options.operands:
        # All live blocks are weights, which are never freed, so an operation would search for another operand for ever.
        parser.error(f"{options.live} weights alive at once cannot be {options.operands} operands of an operation")
    write = write_lifetimes if options.lifetimes else write_accesses
    rows = Rows("id,lower,upper,size" if options.lifetimes else "step,id,size,weight,kernel_ns")
    write(options, random.Random(options.seed).random, rows)
    rows.flush()


if __name__ == "__main__":
    main()
