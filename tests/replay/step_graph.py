# SPDX-License-Identifier: Apache-2.0
"""A step of a program, which is read from an access trace or synthetic; linear and mixed-integer programs for HiGHS; replays."""
import collections
import csv
import dataclasses
import json
import subprocess
import sys

GRANULE = 512


@dataclasses.dataclass
class Graph:
    sizes: dict  # by block
    weights: set
    operations: list  # of (kernel_ns, [blocks])

    def kernels_ns(self):
        return sum(kernel_ns for kernel_ns, _ in self.operations)

    def working_set(self):
        return max(sum(self.sizes[block] for block in blocks) for _, blocks in self.operations)

    def peak(self):
        """Returns the most bytes that are alive at once. Weights are always alive."""
        first, last = {}, {}
        for i, (_, blocks) in enumerate(self.operations):
            for block in blocks:
                first.setdefault(block, i)
                last[block] = i
        weights = sum(self.sizes[block] for block in self.weights)
        return weights + max(
            sum(self.sizes[block] for block in first if block not in self.weights and first[block] <= i <= last[block])
            for i in range(len(self.operations)))

    def write(self, path):
        lines = ["step,id,size,weight,kernel_ns"]
        for i, (kernel_ns, blocks) in enumerate(self.operations):
            lines += [f"{i},{block},{self.sizes[block]},{int(block in self.weights)},{kernel_ns}" for block in blocks]
        path.write_text("\n".join(lines) + "\n")


def read_trace(path):
    recorded = collections.defaultdict(list)
    kernels, sizes, weights = {}, {}, set()
    with path.open() as file:
        for row in csv.DictReader(file):
            step, block = int(row["step"]), int(row["id"])
            recorded[step].append(block)
            kernels[step] = int(row["kernel_ns"])
            sizes[block] = -(-int(row["size"]) // GRANULE) * GRANULE
            if row["weight"] == "1":
                weights.add(block)
    return Graph(sizes, weights, [(kernels[step], list(dict.fromkeys(recorded[step]))) for step in sorted(recorded)])


class Program:
    """A linear or mixed-integer program for HiGHS, to which columns and rows can be added."""

    def __init__(self, highspy):
        self.highspy = highspy
        self.cost, self.lower, self.upper, self.integral = [], [], [], []
        self.row_lower, self.row_upper, self.start, self.index, self.value = [], [], [0], [], []

    def column(self, upper=1.0, integral=False, cost=0.0, lower=0.0):
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.cost) - 1

    def row(self, terms, at_most, at_least=float("-inf")):
        """Adds a constraint for the sum of `terms`, which are pairs (column, factor). A column may occur twice."""
        factors = collections.defaultdict(float)
        for column, factor in terms:
            factors[column] += factor
        self.index += factors.keys()
        self.value += factors.values()
        self.start.append(len(self.index))
        self.row_upper.append(at_most)
        self.row_lower.append(at_least)

    def solve(self, seconds):
        """Returns the proven lower bound of the cost, and whether it is the optimum."""
        highspy = self.highspy
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.row_upper)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self.cost, self.lower, self.upper
        lp.row_lower_, lp.row_upper_ = self.row_lower, self.row_upper
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = self.start, self.index, self.value
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        lp.integrality_ = [kinds[is_integral] for is_integral in self.integral]
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", float(seconds))
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 1e-3)
        solver.passModel(lp)
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            sys.exit("the program has no solution")
        is_optimum = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        if any(self.integral):
            return solver.getInfo().mip_dual_bound, is_optimum
        if not is_optimum:
            sys.exit("the linear program was not solved in time")
        return solver.getInfo().objective_function_value, True


def replay_ns(program, path, capacity, link_gbps, recompute):
    """Returns the mean time of the last eight of 36 steps, or None if the step does not fit. Recomputation is tuned in the first
    24 steps, and work that these have left may delay the next ones."""
    steps, last = 36, 8
    done = subprocess.run([program, path, "--device", "model", "--capacity", str(capacity), "--link-gbps", str(link_gbps),
                           "--steps", str(steps), "--json", *(["--recompute"] if recompute else [])],
                          capture_output=True, text=True)
    if done.returncode not in (0, 3):
        sys.exit(f"{program} {path} failed: {done.stderr}")
    result = json.loads(done.stdout)
    if not result["completed"]:
        return None
    return sum(step["simulated_ns"] for step in result["steps"][-last:]) / last
