#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/step.svg, a step under a memory limit, and docs/figures/compaction.svg, a memory map before and after
a compaction pass, from the timelines that `spillway-replay --timeline` writes for two synthetic traces.

usage: draw-timeline.py [--check] [--programs FOLDER]

With --check nothing is written: it is an error if a picture in the tree is not up to date.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import picture

ROOT = pathlib.Path(__file__).resolve().parents[1]
WIDTH, MARGIN = 960, picture.MARGIN
MIB = 1 << 20

LIGHT = """
  .axis { stroke: #9ca3af; stroke-width: 1 }
  .room { fill: #f3f4f6; stroke: #9ca3af }
  .kernel { fill: #2563eb } .copy_to_device { fill: #059669 } .copy_to_host { fill: #d97706 } .copy_on_device { fill: #7c3aed }
  .block { fill: #93c5fd; stroke: #ffffff; stroke-width: 0.7 } .moved { fill: #7c3aed; stroke: #ffffff; stroke-width: 0.7 }
  .way { fill: #7c3aed; opacity: 0.22 }"""
DARK = """
    .axis { stroke: #6b7280 }
    .room { fill: #2b303b; stroke: #6b7280 }
    .kernel { fill: #60a5fa } .copy_to_device { fill: #34d399 } .copy_to_host { fill: #fbbf24 } .copy_on_device { fill: #a78bfa }
    .block { fill: #1e5a9c; stroke: #111827 } .moved { fill: #a78bfa; stroke: #111827 }
    .way { fill: #a78bfa; opacity: 0.3 }"""


def network(layers=16, mib=64, kernel_ns=4_000_000):
    """Returns a trace of a training step. Layers keep their activations for the backward pass, whose kernels take twice as long."""
    rows = ["step,id,size,weight,kernel_ns"]
    for step, layer in enumerate([*range(layers), *reversed(range(layers))]):
        operands = [(2 * layer, mib // 8 * MIB, 1), (2 * layer + 1, mib * MIB, 0)]
        if layer:
            operands.append((2 * layer - 1, mib * MIB, 0))
        ns = kernel_ns if step < layers else 2 * kernel_ns
        rows += [f"{step},{block},{size},{weight},{ns}" for block, size, weight in operands]
    return "\n".join(rows) + "\n", 2 * layers


def lifetimes():
    """Returns a trace of buffers that are allocated and freed. It is the same in each run."""
    return subprocess.run([sys.executable, ROOT / "scripts" / "make-trace.py", "--lifetimes", "--sizes", "uniform", "--live", "40",
                           "--operations", "2000", "--seed", "5"], check=True, capture_output=True, text=True).stdout


def replay(programs, trace, *options):
    """Returns the JSON result of spillway-replay and the events of the timeline that it writes."""
    with tempfile.TemporaryDirectory() as work:
        (pathlib.Path(work) / "trace.csv").write_text(trace)
        try:
            done = subprocess.run([programs / "spillway-replay", "trace.csv", "--json", "--timeline", "timeline.json", *options],
                                  cwd=work, check=True, capture_output=True, text=True)
        except OSError as error:
            sys.exit(f"draw-timeline.py: {error.filename}: {error.strerror}; build the program, or name its folder with "
                     "--programs")
        return json.loads(done.stdout), json.loads((pathlib.Path(work) / "timeline.json").read_text())["traceEvents"]


def draw_step(programs):
    trace, kernels = network()
    part, link = 0.5, 25
    result, events = replay(programs, trace, "--capacity", f"{part}x", "--steps", "4", "--link-gbps", f"{link}")
    spans = {row: [(one["ts"], one["ts"] + one["dur"]) for one in events if one["ph"] == "X" and one["name"] == row]
             for row in ("kernel", "copy_to_device", "copy_to_host", "copy_on_device")}
    begin, end = spans["kernel"][-kernels][0], spans["kernel"][-1][1]
    busy = sum(b - a for a, b in spans["kernel"][-kernels:])
    left, right, top, row_height = 132, WIDTH - MARGIN, 72, 34
    scale = (right - left) / (end - begin)
    body, y = [], top
    for row, label in [("kernel", "kernels"), ("copy_to_device", "copies in"), ("copy_to_host", "copies out"),
                       ("copy_on_device", "moves")]:
        shown = [(max(a, begin), min(b, end)) for a, b in spans[row] if a < end and begin < b]
        if not shown:
            continue
        body.append(f'<text x="{MARGIN}" y="{y + 18}">{label}</text>')
        body.append(f'<rect class="room" x="{left}" y="{y}" width="{right - left}" height="{row_height - 8}"/>')
        body += [f'<rect class="{row}" x="{left + (a - begin) * scale:.1f}" y="{y + 3}" '
                 f'width="{max((b - a) * scale - 0.6, 0.6):.1f}" height="{row_height - 14}"/>' for a, b in shown]
        y += row_height
    for tick in range(0, int((end - begin) / 1000) + 1, 50):
        x = left + tick * 1000 * scale
        body.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 6}"/>')
        body.append(f'<text class="note" x="{x:.1f}" y="{y + 20}" text-anchor="middle">{tick}{" ms" * (tick == 0)}</text>')
    note = (f"{kernels // 2} layers forward and back in {part:g} of the memory that they need, over {link} GB/s each way: "
            f"{(end - begin) / busy:.2f} of the time of the kernels")
    return picture.svg(WIDTH, y + 32, "Kernels and copies of one training step, over time",
                       [*picture.heading("One training step", note), *body], LIGHT, DARK)


def maps(events):
    """Returns for each compaction pass: addresses and sizes of the blocks before it, those after it, and which were moved."""
    resident, passes, before, moved = {}, [], None, set()
    for one in events:
        if one["ph"] not in "iX" or "block" not in one.get("args", {}):
            continue
        args, name = one["args"], one["name"]
        if name == "move":
            before = dict(resident) if before is None else before
            moved.add(args["block"])
        elif before is not None:
            passes.append((before, dict(resident), moved))
            before, moved = None, set()
        if name in ("make_resident", "swap_in", "prefetch", "move"):
            resident[args["block"]] = (args["address"], args["bytes"])
        elif name in ("swap_out", "drop", "deallocate"):
            resident.pop(args["block"], None)
    return passes


def draw_compaction(programs):
    result, events = replay(programs, lifetimes(), "--no-swap", "--capacity", "1.0x", "--scale", "64")
    base = min(one["args"]["address"] for one in events if one["name"] == "make_resident")
    # Of the passes that move less than a fifth of the capacity, as most do, the one that moves the most blocks.
    before, after, moved = max((one for one in maps(events) if sum(one[0][block][1] for block in one[2]) * 5 < result["capacity_bytes"]),
                               key=lambda one: len(one[2]))
    left, scale = MARGIN, (WIDTH - 2 * MARGIN) / result["capacity_bytes"]
    body = []

    def x_of(place):
        return left + (place[0] - base) * scale

    for label, blocks, y in [("before", before, 92), ("after", after, 222)]:
        gaps, at = [], base
        for address, size in [*sorted(blocks.values()), (base + result["capacity_bytes"], 0)]:
            gaps += [address - at] * (address > at)
            at = address + size
        free = f"{len(gaps)} gap{'s' * (len(gaps) != 1)}, the largest of {max(gaps, default=0) / MIB:.0f} MiB"
        body.append(f'<text x="{left}" y="{y - 8}">{label}: {free}</text>')
        body.append(f'<rect class="room" x="{left}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="48"/>')
        for block, place in sorted(blocks.items(), key=lambda one: one[1]):
            body.append(f'<rect class="{"moved" if block in moved else "block"}" x="{x_of(place):.2f}" y="{y}" '
                        f'width="{place[1] * scale:.2f}" height="48"/>')
    for block in sorted(moved):
        a, b, size = x_of(before[block]), x_of(after[block]), before[block][1] * scale
        body.append(f'<path class="way" d="M{a:.2f} 140 L{a + size:.2f} 140 L{b + size:.2f} 222 L{b:.2f} 222 Z"/>')
    bytes_moved = sum(before[block][1] for block in moved)
    note = (f"{result['capacity_bytes'] / MIB:.0f} MiB, of which {sum(size for _, size in before.values()) / MIB:.0f} MiB are in "
            f"use: {len(moved)} blocks with {bytes_moved / MIB:.0f} MiB moved, none left")
    return picture.svg(WIDTH, 292, "Device memory before and after a compaction pass",
                       [*picture.heading("A compaction pass", note), *body], LIGHT, DARK)


def main():
    parser = picture.parser(__doc__)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build" / "bin")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()
    picture.put({"step.svg": draw_step(programs), "compaction.svg": draw_compaction(programs)}, arguments.check)


if __name__ == "__main__":
    main()
