#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a short table of the results that gpu_check.sh has written to a folder, or the rows of one step.

usage: gpu_table.py RESULTS [STEP]

Each figure is compared with another allocator or a lower bound that was measured in the same run. Missing and failed steps
are named, and make the exit status 1.
"""

import json
import sys
from pathlib import Path


def load(folder, name):
    """Returns the JSON values that a step has written, one for each line. An incomplete last line is ignored."""
    try:
        text = (folder / f"{name}.json").read_text()
    except OSError:
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    values = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:
            break
    return values


def row(what, value, against="", ratio=None, goal=""):
    shown = "" if ratio is None else f"{ratio:.3f}"
    print(f"{what:<44} {value:>14} {against:>24} {shown:>8} {goal:>8}")


def training(result):
    for run in result["runs"]:
        if run["swapping"]:
            same = "same bits" if run["bitwise_equal"] else "OTHER BITS"
            how = ", recompute" if run["recomputed_bytes"] else ""
            row(f"training at {run['capacity_factor']:g}x{how}", f"{run['step_ms']:.1f} ms/step", same)
    return all(run["bitwise_equal"] for run in result["runs"] if run["swapping"])


def bandwidth(rows):
    for one in rows:
        if one["tier"] == "pageable" or one["size_bytes"] not in (4096, 1 << 20, 16 << 20, 64 << 20, 1 << 30):
            continue
        layout = "" if one["layout"] == "one" else ", " + one["layout"]
        what = f"swap {one['direction']}, {one['count']} x {one['size_bytes'] // 1024} KiB{layout}"
        goal = ">=0.95" if one["direction"] == "both" else ">=0.97"
        if one["tier"] == "file":
            what, goal = "file: " + what, ">=0.9"
        elif one["size_bytes"] < 1 << 20:
            goal = ""
        row(what, f"{one['gbps']:.2f} GB/s", f"raw {one['raw_gbps']:.2f} GB/s", one["ratio"], goal)
        if one.get("naive_gbps"):
            naive = one["naive_gbps"]
            naive_goal = ">=4" if one["size_bytes"] == 4096 else ""
            row("  against the naive loop", "", f"{naive:.2f} GB/s", one["gbps"] / naive, naive_goal)


def device_moves(result):
    runs = {one["name"]: one for one in result["benchmarks"]}
    floor = next(one["bytes_per_second"] for name, one in runs.items() if name.startswith("cuda/plain_copy"))
    for name, one in runs.items():
        device, kind, *arguments = name.split("/")
        if kind not in ("compaction", "copies"):
            continue
        how = device.removeprefix("cuda").strip("_").replace("_", " ") or "batches"
        rate = one["bytes_per_second"]
        what = f"{kind} of {int(arguments[0]) // 1024} KiB, {how}"
        row(what, f"{rate / 1e9:.0f} GB/s", f"copy {floor / 1e9:.0f} GB/s", rate / floor, ">=0.85" if kind == "compaction" else "")
        back = kind == "compaction" and runs.get(name.replace("compaction", "round_trip"))
        if back:
            ratio = back["real_time"] / one["real_time"]
            row("  faster than by way of the host", f"{one['real_time']:.0f} us", f"{back['real_time']:.0f} us", ratio, ">=20")


def torch_training(lines):
    """The first line of `bench_lms.py` says what is measured; each further line has the results of one way to train."""
    head, *rows = lines if isinstance(lines, list) else [lines]
    for one in rows:
        what = f"PyTorch {head['net']}: {one['line']}"
        if "error" in one:
            row(what[:44], "FAILED", one["error"][:24])
            continue
        same = "same bits" if one["bitwise"] else "other bits"
        goal = "<=1.02" if one["line"] == "support on, no cap" else ""
        row(what[:44], f"{one['ms']:.0f} ms/step", f"{one['peak_mib']:.0f} MiB, {same}", one["ratio"], goal)
    return bool(rows) and not any("error" in one for one in rows)


def torch_page(result):
    floor = result["copy in, use, drop"]["ms"]
    for name, one in result.items():
        read = f"{one['in_mib']:.0f} MiB in, {one['out_mib']:.0f} out"
        row(f"PyTorch inference: {name}", f"{one['ms']:.1f} ms", read, one["ms"] / floor)


def ns_of(result):
    return {one["name"]: one["real_time"] for one in result["benchmarks"]}


def latency(result):
    runs = ns_of(result)
    ours = runs.pop("cuda/spillway")
    row("allocate and free", f"{ours:.0f} ns")
    for name, ns in runs.items():
        row(f"  against {name.removeprefix('cuda/')}", "", f"{ns:.0f} ns", ours / ns, "<1")


def gpu_codec(result):
    rates = {one["name"].split("/")[1] + "/" + one["name"].split("/")[2]: one["bytes_per_second"]
             for one in result["benchmarks"] if "plain_copy" in one["name"]}
    for one in result["benchmarks"]:
        _, codec, way, *zeros = one["name"].split("/")
        if codec == "plain_copy":
            continue
        what = f"{codec} {way}, {zeros[0]} % zeros" + (f", {one['stored']:.2f} stored" if "stored" in one else "")
        if one.get("error_occurred"):
            row(what, "FAILED", one["error_message"][:24])
            return False
        rate, copy = one["bytes_per_second"], rates[f"plain_copy/{way}"]
        row(what, f"{rate / 1e9:.1f} GB/s", f"copy {copy / 1e9:.1f} GB/s", rate / copy, ">=0.8")


def virtual_memory(result):
    for one in result["benchmarks"]:
        _, what, granules = one["name"].split("/")[:3]
        row(f"{what}, {int(granules) * 2} MiB", f"{one['real_time'] / 1000:.1f} us")


OUTCOMES = {"0": "ok", "77": "SKIPPED", "late": "NO TIME LEFT", "not-run": "NOT RUN"}
# By step: the function that prints its figures. It returns False if a figure is bad.
FIGURES = {
    "training": training,
    "training_recompute": training,
    "bandwidth": bandwidth,
    "bandwidth_file": bandwidth,
    "bandwidth_kernel": bandwidth,
    "device_moves": device_moves,
    "gpu_codec": gpu_codec,
    "virtual_memory": virtual_memory,
    "allocate_latency": latency,
    "torch_training_resnet50": torch_training,
    "torch_training_transformer": torch_training,
    "torch_page": torch_page,
}


def show(folder, name, status, seconds):
    """Prints one step and its figures. Returns False if the step failed or a figure is bad."""
    outcome = OUTCOMES.get(status, "FAILED with " + status)
    print(f"step {name:<39} {seconds:>12} s {outcome:>24}")
    is_good = status in {"0", "77"}
    if name == "torch_allocate_latency" and status == "0":
        ns, ours = load(folder, name)["ns"], load(folder, "allocate_latency")
        ratio = ns_of(ours)["cuda/spillway"] / ns if ours else None
        row("  against PyTorch, called from Python", "", f"{ns:.0f} ns", ratio, "<1")
    if name in FIGURES and status not in {"77", "late", "not-run"}:
        results = load(folder, name)
        if not results:
            print(f"{name}: no results")
            return False
        is_good = FIGURES[name](results) is not False and is_good
    return is_good


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    try:
        steps = [line.split() for line in (folder / "steps.txt").read_text().splitlines()]
    except OSError as error:
        sys.exit(f"gpu_table.py: no results of gpu_check.sh: {error}")
    if len(sys.argv) == 3:
        steps = [step for step in steps if step[0] == sys.argv[2]]
        if not steps:
            sys.exit(f"gpu_table.py: {folder} has no step {sys.argv[2]}")
    else:
        print(f"{'':<44} {'measured':>14} {'against':>24} {'ratio':>8} {'goal':>8}")
    # A list, so that every step is shown even after one has failed.
    sys.exit(0 if all([show(folder, *step) for step in steps]) else 1)


if __name__ == "__main__":
    main()
