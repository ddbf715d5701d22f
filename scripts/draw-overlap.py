#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/step-time-*.svg: the time of a step against the memory limit. The numbers come from a table in
docs/benchmarks.md, which scripts/figures.py makes from the output of bench_overlap.

usage: draw-overlap.py [--check]

With --check nothing is written: it is an error if a picture in the tree is not up to date.
"""
import collections
import pathlib
import re

import picture

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
PICTURES = {"BERT base, 256": "step-time-bert.svg", "ResNet152, 512": "step-time-resnet152.svg"}
LINKS = ["12", "25"]  # GB/s in each direction; at higher rates the curves hardly rise above 1
POLICIES = ["lru", "schedule", "prefetch"]
LABELS = [(24, "LRU"), (120, "recorded schedule"), (296, "recorded schedule and prefetch: the default")]

WIDTH, LEFT, TOP, PANEL, HEIGHT, GAP = 640, 64, 108, 250, 190, 42
LIGHT = """
  .tick { font-size: 14px; fill: #4b5563 }
  .grid { stroke: #d1d5db; stroke-width: 1 }
  .ideal { stroke: #111827; stroke-width: 1.5; stroke-dasharray: 2 4 }
  .line { fill: none; stroke-width: 2.5 }
  .lru { stroke: #c2410c } .schedule { stroke: #6366f1 } .prefetch { stroke: #047857 }
  .dot { stroke-width: 2; fill: #ffffff }"""
DARK = """
    .tick { fill: #9ca3af }
    .grid { stroke: #374151 }
    .ideal { stroke: #f9fafb }
    .lru { stroke: #fb923c } .schedule { stroke: #a5b4fc } .prefetch { stroke: #34d399 }
    .dot { fill: #1e2129 }"""


def curves():
    """Returns, by trace, link and policy, the points (capacity, step time / least time) at which the step completes."""
    table = re.search(r"<!-- figures overlap -->\n(.*?)<!-- figures end -->", PAGE.read_text(), re.DOTALL)[1]
    found = collections.defaultdict(list)
    for line in table.splitlines()[2:]:
        trace, link, capacity, *ratios = (cell.strip() for cell in line.strip("|").split("|"))
        for policy, ratio in zip(POLICIES, ratios):
            if ratio != "-":
                found[trace, link, policy].append((float(capacity.removesuffix("x")), float(ratio)))
    return found


def draw(trace, found):
    here = {(link, policy): found[trace, link, policy] for link in LINKS for policy in POLICIES}
    most = max(ratio for points in here.values() for _, ratio in points)
    top = 1 + 0.1 * -(-(most - 1) // 0.1)  # rounded up to a tenth
    places = sorted({capacity for points in here.values() for capacity, _ in points})
    body = picture.heading(f"One training step of {trace.replace(', ', ', batch ')}",
                           "time over the least possible, with a part of the memory that it needs")
    for policy, (x, label) in zip(POLICIES, LABELS):
        body.append(f'<line class="line {policy}" x1="{x}" y1="74" x2="{x + 22}" y2="74"/>')
        body.append(f'<text class="note" x="{x + 28}" y="79">{label}</text>')
    for number, link in enumerate(LINKS):
        left = LEFT + number * (PANEL + GAP)

        def place(capacity, ratio, left=left):
            return (left + 14 + (capacity - places[0]) / (places[-1] - places[0]) * (PANEL - 28),
                    TOP + HEIGHT - (ratio - 1) / (top - 1) * HEIGHT)

        body.append(f'<text x="{left + PANEL / 2:.0f}" y="{TOP - 8}" text-anchor="middle">{link} GB/s each way</text>')
        for tenth in range(int(round((top - 1) * 10)) + 1):
            y = place(places[0], 1 + tenth / 10)[1]
            body.append(f'<line class="{"grid" if tenth else "ideal"}" x1="{left}" y1="{y:.1f}" x2="{left + PANEL}" y2="{y:.1f}"/>')
            if number == 0:
                body.append(f'<text class="tick" x="{left - 8}" y="{y + 5:.1f}" text-anchor="end">{1 + tenth / 10:.1f}</text>')
        body += [f'<text class="tick" x="{place(capacity, 1)[0]:.1f}" y="{TOP + HEIGHT + 22}" text-anchor="middle">{capacity:g}</text>'
                 for capacity in places]
        for policy in POLICIES:
            points = [place(*point) for point in sorted(here[link, policy])]
            body.append(f'<polyline class="line {policy}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
            body += [f'<circle class="dot {policy}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
    body.append(f'<text class="tick" x="{LEFT + PANEL + GAP / 2:.0f}" y="{TOP + HEIGHT + 44}" text-anchor="middle">'
                "capacity over the peak</text>")
    return picture.svg(WIDTH, TOP + HEIGHT + 58, "Time of a training step over the memory that it may use", body, LIGHT, DARK)


def main():
    arguments = picture.parser(__doc__).parse_args()
    found = curves()
    picture.put({name: draw(trace, found) for trace, name in PICTURES.items()}, arguments.check)


if __name__ == "__main__":
    main()
