# SPDX-License-Identifier: Apache-2.0
"""Compares the step time of spillway-replay with the optimum of a mixed-integer program.

usage: compare_with_optimum.py PROGRAM [--graphs N] [--most-operations N] [--seed N] [--seconds S]
                               [--traces FOLDER] [--cuts N] [--recompute | --no-recompute]

PROGRAM is spillway-replay. Each graph is a random training step or, with --traces, also a cut-out of a recorded one, at a random
capacity and with a link of random bandwidth. The mixed-integer program (MIP) decides for each block that is not in use whether and when
it stays resident, is copied to the host and back, or is dropped and recomputed by the operation that made it. A block is recomputed
before its own next use, or as an operand of another recomputation. HiGHS solves the MIP (`highspy` from PyPI; exit status 77 if it is
missing), or proves a lower bound within the time limit. --seconds is the time limit for one graph.

The MIP is a relaxation: no plan can take less time than its optimum, but the optimum need not be a possible plan. It does not model
- the order of events between two moments, where an operation begins or ends. The capacity is checked at these moments only. Copies and
  recomputations between two moments may run in any order, and a copy may be split. There are two exceptions: a block that leaves and
  comes back between the same two moments is copied out before it is copied in; and if two blocks are recomputed between the same two
  moments and stay, there has to be room for the first one while the second one is recomputed;
- work that is left from the step before. A step may begin with any set of resident weights, as long as it ends with the same set, and
  the host has copies of all weights;
- addresses. Free memory counts as one range, so that no block has to be moved.
While a block is recomputed, there has to be room for it, for its operands, and for all blocks that are resident before and after and do
not leave and come back meanwhile. As in the library, a block can be recomputed only on its own, by the operation that made it, and only
if that operation was the last use of none of its operands.

Fails if a step takes less time than the bound, since the bound must then be wrong; if the bound of least_with_recipes.py, which is for
whole traces, is more than the optimum; or if a replay fails.
"""
import argparse
import collections
import dataclasses
import pathlib
import random
import sys
import tempfile

from least_with_recipes import least_ns
from step_graph import GRANULE, Graph, Program, read_trace, replay_ns


def random_graph(draw, operations):
    """Returns a random training step: a forward pass, and a backward pass that reads the activations of the forward pass."""
    forward = max(2, operations // 2)
    unit = 1 << 20
    graph = Graph({}, set(), [])

    def block(size, is_weight=False):
        graph.sizes[len(graph.sizes)] = size * unit
        if is_weight:
            graph.weights.add(len(graph.sizes) - 1)
        return len(graph.sizes) - 1

    def kernel_ns(blocks, is_cheap):
        moved = sum(graph.sizes[block] for block in blocks)
        return int(moved / 1.5 * (draw.uniform(0.8, 1.5) if is_cheap else draw.uniform(2, 40)) / 1000)  # 1.5 TB/s

    made = [block(draw.randint(16, 256))]
    graph.operations.append((kernel_ns(made, True), list(made)))
    layers = []
    for _ in range(forward - 1):
        is_cheap = draw.random() < 0.6
        inputs = [made[-1]]
        if len(made) > 3 and draw.random() < 0.25:
            inputs.append(draw.choice(made[-8:-1]))
        inputs = list(dict.fromkeys(inputs))
        if not is_cheap:
            inputs.append(block(draw.randint(1, 32), True))
        result = block(draw.randint(16, 256))
        graph.operations.append((kernel_ns([*inputs, result], is_cheap), [*inputs, result]))
        made.append(result)
        layers.append((inputs, result, is_cheap))
    gradient = None
    for inputs, result, is_cheap in reversed(layers[-(operations - forward):]):
        read = [block for block in inputs if draw.random() < 0.7] or [result]
        if gradient is not None:
            read.append(gradient)
        gradient = block(draw.randint(16, 256))
        graph.operations.append((2 * kernel_ns([*read, gradient], is_cheap), [*read, gradient]))
    return graph


def cut_of_trace(draw, path, operations):
    """Returns a step that consists of some operations of a recorded one, in the same order: consecutive operations of the
    forward pass, and as many later operations that use their blocks."""
    whole = read_trace(path)
    half = operations // 2
    at = draw.randrange(0, max(1, len(whole.operations) // 3 - half))
    first, rest = whole.operations[at:at + half], whole.operations[at + half:]
    seen = {block for _, blocks in first for block in blocks}
    back = [operation for operation in rest if sum(block in seen for block in operation[1]) > 1][-(operations - half):]
    chosen = first + back
    used = {block for _, blocks in chosen for block in blocks}
    return Graph({block: whole.sizes[block] for block in used}, whole.weights & used, chosen)


@dataclasses.dataclass
class Gap:
    """A time in which a block is not in use: the moments `first` to `last`. Each list has a column for each of these moments."""
    first: int
    last: int  # included
    room: list  # whether memory is allocated for the block
    there: list  # the part of its bytes that is resident
    copied_in: list  # the part that is copied in during the stretch after the moment
    made: list  # whether it is recomputed in that stretch; empty if it cannot be

    def there_after(self, moment):
        """Returns terms whose sum is an upper bound of the part that is resident at the end of the stretch after a moment."""
        columns = [self.there, self.copied_in] + ([self.made] if self.made else [])
        return [(column[moment - self.first], 1.0) for column in columns]


def negative(terms):
    return [(column, -factor) for column, factor in terms]


def bound_ns(highspy, graph, capacity, link_gbps, recompute, seconds):
    """Returns the least time of a step, or a lower bound of it, in nanoseconds, and whether it is the optimum of the MIP.

    Operation i begins at moment 2 i and ends at moment 2 i + 1. Stretch m is the time from moment m to moment m + 1.
    """
    program = Program(highspy)
    count = 2 * len(graph.operations)
    scale = 1.0 / graph.kernels_ns()
    uses = collections.defaultdict(list)
    for i, (_, blocks) in enumerate(graph.operations):
        for block in blocks:
            uses[block].append(i)
    born = {block: operations[0] for block, operations in uses.items() if block not in graph.weights}
    # By block that can be recomputed: its operands.
    recipes = {}
    if recompute:
        for block, birth in born.items():
            operands = [other for other in graph.operations[birth][1] if other in graph.weights or born[other] < birth]
            if len(uses[block]) > 1 and all(other in graph.weights or uses[other][-1] > birth for other in operands):
                recipes[block] = operands
    needed_until = collections.defaultdict(int)  # by block: up to which operation recomputations need it
    for block in sorted(recipes, key=lambda block: -born[block]):
        for other in recipes[block]:
            needed_until[other] = max(needed_until[other], uses[block][-1], needed_until[block])

    # The unit of time is the sum of all kernel times. The time between two operations is as long as needed.
    kernel = [kernel_ns * scale for kernel_ns, _ in graph.operations]
    stretch = []
    for time in kernel:
        stretch.append(program.column(lower=time, upper=time, cost=1.0))
        stretch.append(program.column(upper=float("inf"), cost=1.0))
    outs = [[] for _ in range(count)]  # by stretch: the bytes that are copied out
    ins = [[] for _ in range(count)]
    work = [[] for _ in range(count)]
    room = [[] for _ in range(count)]  # by moment: the bytes of blocks in a gap; `fixed` are those of blocks in use
    fixed = [0.0] * count
    idle = collections.defaultdict(list)
    link = link_gbps / scale  # bytes per unit of time

    out = collections.defaultdict(dict)  # by block and stretch: the part that is copied out
    copied = collections.defaultdict(dict)  # by block and stretch: the part that is copied in
    made = collections.defaultdict(dict)  # by block and stretch: whether it is recomputed

    def after_copy_out(block, moment, copied_in):
        """A block can be copied in only after all of it was copied out. In the same stretch the copies run one after the other."""
        if block in graph.weights:
            return
        is_on_host = program.column(integral=True)
        program.row([(is_on_host, 1.0)] + [(column, -1.0) for at, column in out[block].items() if at <= moment], 0.0)
        program.row([(copied_in, 1.0), (is_on_host, -1.0)], 0.0)
        if moment in out[block]:
            program.row([(stretch[moment], -link), (out[block][moment], graph.sizes[block]), (copied_in, graph.sizes[block])], 0.0)

    for block, operations in uses.items():
        size = float(graph.sizes[block])
        is_weight = block in graph.weights
        for operation in operations:
            fixed[2 * operation] += size
            fixed[2 * operation + 1] += size
        gaps = [(2 * before + 2, 2 * after - 1, True) for before, after in zip(operations, operations[1:]) if after > before + 1]
        after_last = 2 * operations[-1] + 2
        if is_weight:
            gaps += [(0, 2 * operations[0] - 1, True)] if operations[0] > 0 else []
            gaps += [(after_last, count - 1, False)] if after_last < count else []
        elif 2 * needed_until[block] > after_last:
            gaps += [(after_last, 2 * needed_until[block] - 1, False)]
        for first, last, must_return in gaps:
            span = range(first, last + 1)
            gap = Gap(first, last, [program.column(integral=True) for _ in span], [program.column() for _ in span],
                      [program.column() for _ in span],
                      [program.column(upper=moment % 2, integral=True) for moment in span] if block in recipes else [])
            idle[block].append(gap)
            for at, moment in enumerate(span):
                program.row([(gap.there[at], 1.0), (gap.room[at], -1.0)], 0.0)
                if at > 0:
                    program.row([(gap.there[at], 1.0)] + negative(gap.there_after(moment - 1)), 0.0)
                room[moment].append((gap.room[at], size))
                ins[moment].append((gap.copied_in[at], size))
                copied[block][moment] = gap.copied_in[at]
                if gap.made:
                    made[block][moment] = gap.made[at]
                    work[moment].append((gap.made[at], kernel[operations[0]]))
            if must_return:
                program.row(negative(gap.there_after(last)), -1.0)
        if is_weight and operations[-1] + 1 < len(graph.operations):
            # At the end of the step the same parts of weights are resident as at its begin.
            at_first = [(idle[block][-2].there[0], 1.0)] if operations[0] > 0 else []
            program.row(at_first + negative(idle[block][-1].there_after(count - 1)), 0.0 if at_first else -1.0)
        returns_until = max([operations[-1] * 2] + [last + 1 for _, last, _ in gaps])
        for moment in range(2 * operations[0] + 1, 0 if is_weight else returns_until):
            out[block][moment] = program.column()
            outs[moment].append((out[block][moment], size))
        if out[block]:
            program.row([(column, 1.0) for column in out[block].values()], 1.0)
        for gap in idle[block]:
            for moment in range(gap.first, gap.last + 1):
                after_copy_out(block, moment, gap.copied_in[moment - gap.first])
                if moment in out[block]:
                    is_there = [(gap.there[moment - gap.first], 1.0)]
                    is_made = [(gap.made[moment - gap.first], 1.0)] if gap.made else []
                    program.row([(out[block][moment], 1.0)] + negative(is_there + is_made), 0.0)

    def gap_at(block, moment):
        return next((gap for gap in idle[block] if gap.first <= moment <= gap.last), None)

    def is_in_use(block, moment):
        return moment // 2 in uses[block]

    # By stretch between two operations and by block: terms whose sum is at least 1 if the block is resident throughout.
    through = collections.defaultdict(dict)
    for block in uses if recipes else ():
        size = float(graph.sizes[block])
        for moment in range(1, count - 1, 2):
            before, after = gap_at(block, moment), gap_at(block, moment + 1)
            stays_before, stays_after = is_in_use(block, moment), is_in_use(block, moment + 1)
            if not (before or stays_before) or not (after or stays_after) or block not in graph.weights and born[block] > moment // 2:
                continue
            leaves = program.column(integral=True)
            terms = [(leaves, -1.0)]
            terms += [(before.room[moment - before.first], 1.0)] if before else []
            terms += [(after.room[moment + 1 - after.first], 1.0)] if after else []
            through[moment][block] = terms, 1.0 - (before is not None) - (after is not None)
            # A block that leaves in the stretch comes back by a copy or by recomputation.
            back = [(leaves, 1.0)]
            if before:
                back += [(before.copied_in[moment - before.first], -1.0)]
                back += [(before.made[moment - before.first], -1.0)] if before.made else []
            else:
                copied[block][moment] = program.column()
                ins[moment].append((copied[block][moment], size))
                after_copy_out(block, moment, copied[block][moment])
                back.append((copied[block][moment], -1.0))
                if block in recipes:
                    made[block][moment] = program.column(integral=True)
                    work[moment].append((made[block][moment], kernel[born[block]]))
                    back.append((made[block][moment], -1.0))
            if after:
                program.row([*back, (after.there[moment + 1 - after.first], 1.0)], 1.0)
            else:
                program.row(back, 0.0)

    def needed_to_make(block):
        return {block, *recipes[block]}

    def there_at(block, moment):
        """Returns terms and a constant whose sum is 1 if memory is allocated for the block at a moment, else 0."""
        gap = gap_at(block, moment)
        return ([(gap.room[moment - gap.first], 1.0)], 0.0) if gap else ([], float(is_in_use(block, moment)))

    for block, operands in recipes.items():
        for moment, is_made in made[block].items():
            if moment % 2 == 0:
                continue
            needed = needed_to_make(block)
            others = {other: terms for other, terms in through[moment].items() if other not in needed}
            needed_bytes = float(sum(graph.sizes[other] for other in needed))
            all_bytes = needed_bytes + sum(graph.sizes[other] for other in others)
            if all_bytes > capacity:  # this row is a constraint only if the block is recomputed
                most = 1.0 - needed_bytes / capacity + (all_bytes - capacity) / capacity
                terms = [(is_made, (all_bytes - capacity) / capacity)]
                for other, (columns, constant) in others.items():
                    part = graph.sizes[other] / capacity
                    there = program.column()
                    program.row([(there, -1.0), *columns], -constant)
                    terms.append((there, part))
                program.row(terms, most)
            for other in operands:
                if not is_in_use(other, moment):
                    other_gap = gap_at(other, moment)
                    there = [] if other_gap is None else other_gap.there_after(moment)
                    program.row([(is_made, 1.0)] + negative(there), 0.0)
            # If two blocks are recomputed in this stretch and stay, the first one is resident while the second one is recomputed.
            for other in recipes:
                if other <= block or moment not in made[other]:
                    continue
                bytes_at_least = min(sum(graph.sizes[one] for one in needed_to_make(second) | {first})
                                     for first, second in ((block, other), (other, block)))
                if bytes_at_least > capacity:
                    stays, constant = zip(there_at(block, moment + 1), there_at(other, moment + 1))
                    program.row([(is_made, 1.0), (made[other][moment], 1.0), *stays[0], *stays[1],
                                 (copied[block][moment], -1.0), (copied[other][moment], -1.0)], 3.0 - sum(constant))

    for moment in range(count):
        if moment % 2 == 1:
            program.row([(stretch[moment], -1.0), *work[moment]], 0.0)
        program.row([(stretch[moment], -link), *outs[moment]], 0.0)
        program.row([(stretch[moment], -link), *ins[moment]], 0.0)
        program.row([(column, factor / capacity) for column, factor in room[moment]], 1.0 - fixed[moment] / capacity)

    bound, is_optimum = program.solve(seconds)
    return max(bound, 1.0) / scale, is_optimum


def known_cases(highspy):
    """Yields graphs whose optimum is known: name, graph, capacity, whether blocks may be recomputed, nanoseconds."""
    mb = 1_000_000 // GRANULE * GRANULE
    # A copy of block 0 takes 1 ms in each direction. If three blocks fit, it comes back while a kernel runs; if two fit, after it.
    away = Graph({0: mb, 1: mb, 2: mb, 3: mb}, set(),
                 [(2_000_000, [0]), (1_000_000, [0, 1]), (1_000_000, [1, 2]), (1_000_000, [2, 3]), (1_000_000, [0])])
    yield "all fits", away, 4 * mb, False, 6_000_000
    yield "copies hide", away, 3 * mb, False, 6_000_000
    yield "a copy waits for room", away, 2 * mb, False, 7_000_000
    # Block 0 is made first and used again last. Only three blocks fit, so it has to leave.
    chain = Graph({i: mb for i in range(6)}, set(),
                  [(1000, blocks) for blocks in ([0], [0, 1], [1, 2], [2, 3], [3, 4], [2, 4, 5], [0, 5])])
    yield "a copy there and back", chain, 3 * mb, False, 2_003_872
    yield "made again", chain, 3 * mb, True, 8000


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--graphs", type=int, default=6)
    parser.add_argument("--most-operations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--traces", type=pathlib.Path, help="folder of access traces to cut graphs from")
    parser.add_argument("--cuts", type=int, default=3, help="how many graphs are cut from each trace")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    try:
        import highspy
    except ImportError:
        print("compare_with_optimum.py: skipped, the Python package highspy is missing")
        sys.exit(77)

    failures = []
    for name, graph, capacity, recompute, expected in known_cases(highspy):
        least, is_optimum = bound_ns(highspy, graph, capacity, 1.0, recompute, 60)
        print(f"{name}: {least:.0f} ns")
        if not is_optimum or abs(least - expected) > 0.002 * expected:
            failures.append(f"{name}: {least} ns instead of {expected}")

    draw = random.Random(arguments.seed)
    graphs = [(f"random {i}", lambda n: random_graph(draw, n)) for i in range(arguments.graphs)]
    if arguments.traces:
        graphs += [(f"{path.stem} {i}", lambda n, path=path: cut_of_trace(draw, path, n))
                   for path in sorted(arguments.traces.glob("*.csv")) for i in range(arguments.cuts)]
    folder = pathlib.Path(tempfile.mkdtemp())
    ratios = collections.defaultdict(list)
    print("graph,operations,capacity,link_gbps,over_kernels,over_bound,swap_only_over_kernels,is_optimum")
    for name, make in graphs:
        graph = make(draw.randint(max(10, arguments.most_operations // 4), arguments.most_operations))
        least_room = 1.2 * graph.working_set()
        factor = draw.uniform(0.2, 0.9)
        capacity = int(max(least_room, factor * graph.peak())) // GRANULE * GRANULE
        link_gbps = draw.choice([12, 25, 55])
        path = folder / "graph.csv"
        graph.write(path)
        ours = replay_ns(arguments.program, path, capacity, link_gbps, arguments.recompute)
        copies = replay_ns(arguments.program, path, capacity, link_gbps, False)
        if ours is None or copies is None:
            failures.append(f"{name}: the replay found no room")
            continue
        least, is_optimum = bound_ns(highspy, graph, capacity, link_gbps, arguments.recompute, arguments.seconds)
        kernels = graph.kernels_ns()
        print(f"{name},{len(graph.operations)},{capacity / graph.peak():.2f},{link_gbps},{ours / kernels:.4f},"
              f"{ours / least:.4f},{copies / kernels:.4f},{int(is_optimum)}", flush=True)
        if ours < least * (1 - 2e-3):
            failures.append(f"{name}: a step takes {ours:.0f} ns, less than the bound {least:.0f}")
        divisible = least_ns(highspy, graph, capacity, link_gbps, arguments.recompute, len(graph.operations))
        if is_optimum and divisible > least * (1 + 2e-3):
            failures.append(f"{name}: least_with_recipes.py gives {divisible:.0f} ns, more than the optimum {least:.0f}")
        ratios["of the optimum, least_with_recipes.py"].append(divisible / least)
        ratios[is_optimum].append(ours / least)
        ratios["of copies only"].append(ours / copies)

    for kind, values in ratios.items():
        values.sort()
        title = {True: "over the optimum", False: "over a bound"}.get(kind, kind)
        at = [values[min(len(values) - 1, int(part * len(values)))] for part in (0.5, 0.9, 0.99)]
        print(f"{title}: {len(values)} graphs, least {values[0]:.4f}, median {at[0]:.4f}, 90 % {at[1]:.4f}, 99 % {at[2]:.4f}, "
              f"worst {values[-1]:.4f}; at most 1.05: {sum(value <= 1.05 for value in values)}")
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
