#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the same as bench_allocate_latency for PyTorch's caching allocator: prints ns per replacement.

256 blocks of 4 KiB to 8 MiB are alive. Each round replaces one of them, chosen at random, with a block of
random size. The cost of the loop itself is measured with a function that does nothing, and subtracted.
"""

import json
import random
import statistics
import sys
import time

LIVE_BLOCKS = 256
ROUNDS = 20_000
REPETITIONS = 5


def nothing(*_):
    return 0


def ns_per_round(allocate, free):
    generator = random.Random(42)
    draws = [
        (generator.randrange(LIVE_BLOCKS), int(2 ** generator.uniform(12, 23)))
        for _ in range(ROUNDS)
    ]
    live = [allocate(size, None) for _, size in draws[:LIVE_BLOCKS]]
    start = time.perf_counter_ns()
    for block, size in draws:
        free(live[block])
        live[block] = allocate(size, None)
    elapsed = time.perf_counter_ns() - start
    for handle in live:
        free(handle)
    return elapsed / ROUNDS


def main():
    try:
        import torch
    except ImportError:
        sys.exit("no PyTorch here")
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    torch.zeros(1, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    from torch.cuda.memory import caching_allocator_alloc, caching_allocator_delete

    def allocate(size, _):
        return caching_allocator_alloc(size, None, stream)

    ns_per_round(allocate, caching_allocator_delete)  # fills the cache
    runs = [
        ns_per_round(allocate, caching_allocator_delete) - ns_per_round(nothing, nothing)
        for _ in range(REPETITIONS)
    ]
    # Both functions are called from Python, so the result includes some time of the interpreter.
    print(json.dumps({"name": "cuda/pytorch", "ns": statistics.median(runs), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
