# SPDX-License-Identifier: Apache-2.0
"""Computes a lower bound of the step time of an access trace with copies and recipes, and compares spillway-replay with it.

usage: least_with_recipes.py PROGRAM TRACE... [--link-gbps LIST] [--capacity LIST] [--segments N]

PROGRAM is spillway-replay. For each trace, link and capacity (a factor of the peak) a linear program (LP) gives a time that no plan can
beat. HiGHS solves the LP (`highspy` from PyPI; exit status 77 if it is missing). The output is the ratio of the time of the replay with
tuned recipes to this time.

The LP divides the step into segments. Its columns say for each absence of a block which part of the block comes back by a copy, and
which part by recomputation. Blocks count as divisible. The rows say that
- at the begin of each operation enough bytes are away, and at the begin of each segment no more than the absences at that time allow;
- a sequence of segments lasts at least as long as its operations and all recomputations for absences inside it; as the copies of what
  was away at its begin and is used in it; and as the copies to the host of what was made in it and is away at its end.
The LP does not model that the operands of a recomputation have to be resident, or to be recomputed as well. So the bound may be far
below the reachable time if much is recomputed.

compare_with_optimum.py has a more exact program, which can be solved for small graphs only. It checks that no bound of this script is
above its optimum.
"""
import argparse
import collections
import pathlib
import sys

from step_graph import GRANULE, Program, read_trace, replay_ns


class Absence:
    """A time between two uses of a block. `spans`: the ranges of operations [first, last] in which the block may be away; two
    if the absence lasts from one step to the next. `use`: the operation that ends the absence, or the number of operations if
    the end of the step does."""

    def __init__(self, program, block, spans, use, may_be_made):
        self.block, self.spans, self.use = block, spans, use
        self.copied = program.column()  # the part that comes back by a copy
        self.made = program.column() if may_be_made else None  # the part that is recomputed
        if may_be_made:
            program.row([(self.copied, 1.0), (self.made, 1.0)], 1.0)

    def columns(self):
        return [self.copied] if self.made is None else [self.copied, self.made]

    def contains(self, operation):
        return any(first <= operation <= last for first, last in self.spans)

    def is_inside(self, first, end):
        return len(self.spans) == 1 and first <= self.spans[0][0] and self.use <= end


def least_ns(highspy, graph, capacity, link_gbps, recompute, segments):
    program = Program(highspy)
    count = len(graph.operations)
    segments = min(segments, count)
    begin = [count * i // segments for i in range(segments + 1)]
    total_ns = graph.kernels_ns()  # the unit of time; the capacity is the unit of bytes
    link = link_gbps * total_ns / capacity
    kernel = [kernel_ns / total_ns for kernel_ns, _ in graph.operations]
    size = {block: graph.sizes[block] / capacity for block in graph.sizes}
    uses = collections.defaultdict(list)
    for operation, (_, blocks) in enumerate(graph.operations):
        for block in blocks:
            uses[block].append(operation)
    length = [program.column(upper=float("inf"), cost=1.0) for _ in range(segments)]

    absences = []
    for block, operations in uses.items():
        is_weight = block in graph.weights
        for before, after in zip(operations, operations[1:]):
            if after > before + 1:
                absences.append(Absence(program, block, [(before + 1, after - 1)], after, recompute and not is_weight))
        around = [(operations[-1] + 1, count - 1), (0, operations[0] - 1)]
        around = [(first, last) for first, last in around if first <= last]
        if is_weight and around:
            absences.append(Absence(program, block, around, operations[0] or count, False))
    of_block = collections.defaultdict(list)
    for absence in absences:
        of_block[absence.block].append(absence)

    alive = [0.0] * (count + 1)
    for block, operations in uses.items():
        is_weight = block in graph.weights
        alive[0 if is_weight else operations[0]] += size[block]
        alive[count if is_weight else operations[-1] + 1] -= size[block]
    for operation in range(1, count):
        alive[operation] += alive[operation - 1]

    changes = [[] for _ in range(count + 1)]  # changes of the bytes that are away, by operation
    for absence in absences:
        for first, last in absence.spans:
            for column in absence.columns():
                changes[first].append((column, size[absence.block]))
                changes[last + 1].append((column, -size[absence.block]))
    away = []
    for operation in range(count):
        column = program.column(lower=max(0.0, alive[operation] - 1.0), upper=float("inf"))
        program.row([(column, 1.0), *away, *((other, -factor) for other, factor in changes[operation])], 0.0, 0.0)
        away = [(column, -1.0)]

    # A block may leave later and come back earlier than its absence allows. So there are more columns, which say which part
    # of it is away at the begin of a segment. `at_begin` has, by absence, those of the parts that come back by a copy.
    at_begin = [{} for _ in range(segments + 1)]
    for segment in range(1, segments):
        operation = begin[segment]
        terms = []
        for absence in absences:
            if absence.contains(operation):
                for most in absence.columns():
                    column = program.column()
                    program.row([(column, 1.0), (most, -1.0)], 0.0)
                    terms.append((column, -size[absence.block]))
                    at_begin[segment].setdefault(absence, column)
        program.row(terms, min(0.0, 1.0 - alive[operation]))

    copied_out = {block: program.column() for block in of_block if block not in graph.weights}
    for block, column in copied_out.items():
        for absence in of_block[block]:
            program.row([(absence.copied, 1.0), (column, -1.0)], 0.0)

    def out_by(block, end_segment, end):
        """Returns a column that is a lower bound of the part of a block that has been copied out at `end`, or None."""
        if end_segment == segments:
            return copied_out[block]
        away = [at_begin[end_segment][absence] for absence in of_block[block] if absence in at_begin[end_segment]]
        was_away = [absence.copied for absence in of_block[block] if absence.use <= end]
        return next(iter(away + was_away), None)

    for from_segment in range(segments):
        for end_segment in range(from_segment + 1, segments + 1):
            first, end = begin[from_segment], begin[end_segment]
            stretch = range(from_segment, end_segment)
            work, ins, outs = [], [], []
            for absence in absences:
                is_inside = absence.is_inside(first, end)
                if is_inside and absence.made is not None:
                    work.append((absence.made, kernel[uses[absence.block][0]]))
                if is_inside or len(stretch) == segments:
                    ins.append((absence.copied, size[absence.block]))
                elif absence in at_begin[from_segment] and first <= absence.use <= end:
                    ins.append((at_begin[from_segment][absence], size[absence.block]))
            for block in copied_out:
                column = out_by(block, end_segment, end) if uses[block][0] >= first else None
                if column is not None:
                    outs.append((column, size[block]))
            program.row([*((length[segment], -1.0) for segment in stretch), *work], -sum(kernel[first:end]))
            for copies in (ins, outs):
                program.row([*((length[segment], -link) for segment in stretch), *copies], 0.0)
    return program.solve(600)[0] * total_ns


def numbers(text):
    return [float(part) for part in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("traces", nargs="+", type=pathlib.Path)
    parser.add_argument("--link-gbps", type=numbers, default=[12.0, 25.0])
    parser.add_argument("--capacity", type=numbers, default=[0.2, 0.3, 0.4, 0.6, 0.8])
    parser.add_argument("--segments", type=int, default=16)
    arguments = parser.parse_args()
    try:
        import highspy
    except ImportError:
        print("least_with_recipes.py: skipped, the Python package highspy is missing")
        sys.exit(77)
    failed = False
    print("trace,link_gbps,capacity,least_over_kernels,replay_over_least")
    for path in arguments.traces:
        graph = read_trace(path)
        for link_gbps in arguments.link_gbps:
            for factor in arguments.capacity:
                capacity = int(factor * graph.peak()) // GRANULE * GRANULE
                least = least_ns(highspy, graph, capacity, link_gbps, True, arguments.segments)
                ours = replay_ns(arguments.program, path, capacity, link_gbps, True)
                if ours is None:
                    sys.exit(f"{path}: the replay found no room")
                print(f"{path.stem},{link_gbps:g},{factor:g},{least / graph.kernels_ns():.4f},{ours / least:.4f}", flush=True)
                failed = failed or ours < least * (1 - 2e-3)
    if failed:
        sys.exit("FAILED: a step takes less than the bound")


if __name__ == "__main__":
    main()
