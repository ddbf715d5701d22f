#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the cost of a step under memory limits: its time, a lower bound of its time, and the bytes that are copied.

usage: spillway-replay TRACE --sweep 0.2x:1x:17 --csv | draw-sweep.py [TITLE] > sweep.svg

The input may contain several sweeps with different --link-gbps, one after the other; each link gets a column.
spillway_torch.plan draws its pictures with this file. It needs only Python, and the same numbers make the same picture.
"""
import csv
import math
import sys
from xml.sax.saxutils import escape

try:
    from . import _svg as picture  # a part of spillway_torch
except ImportError:
    import picture

PANEL, HEIGHT, LEFT, TOP, GAP = 250, 170, 64, 104, 22
LIGHT = """
  .tick { font-size: 12px; fill: #4b5563 }
  .frame { fill: none; stroke: #9ca3af }
  .grid { stroke: #d1d5db }
  .line { fill: none; stroke-width: 2 }
  .step { stroke: #047857 } .dot { fill: #047857 }
  .least { stroke: #111827; stroke-dasharray: 2 4 }
  .in { stroke: #2563eb } .out { stroke: #c2410c; stroke-dasharray: 6 3 }
  .none { fill: #c2410c; fill-opacity: .12 }"""
DARK = """
    .tick { fill: #9ca3af }
    .grid { stroke: #374151 }
    .step { stroke: #34d399 } .dot { fill: #34d399 }
    .least { stroke: #f9fafb }
    .in { stroke: #60a5fa } .out { stroke: #fb923c }
    .none { fill: #fb923c; fill-opacity: .18 }"""


def ticks(most):
    """Returns round numbers from 0 to about `most`, in at most six steps."""
    step = 10 ** math.floor(math.log10(most / 5)) if most > 0 else 1
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor * 6 >= most)
    return [i * step for i in range(int(most / step) + 1)]


def tenths(span):
    """Returns the distance between the numbers on an axis that is `span` tenths long, in tenths."""
    if span <= 3:
        return 1
    power = 10 ** max(math.floor(math.log10(span / 5)), 0)
    return next(power * factor for factor in (2, 5, 10) if power * factor * 5 >= span)


class Panel:
    """One diagram, with a horizontal and a vertical axis."""

    def __init__(self, column, line, least_x, most_x, most_y):
        self.x, self.y = LEFT + column * (PANEL + GAP), TOP + line * (HEIGHT + 2 * GAP)
        self.least_x, self.most_x, self.most_y = least_x, most_x, most_y or 1
        self.parts = []

    def at(self, x, y):
        width = max(self.most_x - self.least_x, 1e-9)
        return (self.x + PANEL * (x - self.least_x) / width, self.y + HEIGHT * (1 - y / self.most_y))

    def text(self, x, y, text, anchor="middle", kind="tick"):
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def axes(self, has_numbers):
        for value in ticks(self.most_y):
            _, y = self.at(0, value)
            self.parts.append(f'<path class="grid" d="M{self.x} {y:.1f}h{PANEL}"/>')
            if has_numbers:
                self.text(self.x - 6, y + 4, f"{value:g}", "end")
        first, last = math.ceil(self.least_x * 10 - 1e-9), math.floor(self.most_x * 10 + 1e-9)
        step = tenths(last - first)
        for tenth in range(last - last % step, first - 1, -step):
            x, _ = self.at(tenth / 10, 0)
            self.parts.append(f'<path class="grid" d="M{x:.1f} {self.y}v{HEIGHT}"/>')
            self.text(x, self.y + HEIGHT + 15, f"{tenth / 10:g}")
        self.parts.append(f'<rect class="frame" x="{self.x}" y="{self.y}" width="{PANEL}" height="{HEIGHT}"/>')

    def refuse(self, up_to):
        """Marks the limits, up to `up_to`, under which the program does not complete."""
        x, _ = self.at(up_to, 0)
        self.parts.append(f'<rect class="none" x="{self.x}" y="{self.y}" width="{max(x - self.x, 0):.1f}" height="{HEIGHT}"/>')

    def line(self, kind, points, dots=False):
        if not points:
            return
        places = [self.at(x, y) for x, y in points]
        self.parts.append(f'<path class="line {kind}" d="M' + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) + '"/>')
        if dots:
            self.parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]


def draw(rows, title):
    """Returns an SVG. Each row is a dictionary with link_gbps, capacity_factor, completed, step_ns, swapped_in_bytes,
    swapped_out_bytes and, optionally, least_ns."""
    links = sorted({row["link_gbps"] for row in rows})
    done = [row for row in rows if row["completed"]]
    least_x = math.floor(min((row["capacity_factor"] for row in rows), default=0) * 10) / 10
    least_x = min(least_x, 0.9)
    most_x = max((row["capacity_factor"] for row in rows), default=1)
    most_x = max(most_x, 1)
    time_unit, per_ns = next(((u, f) for u, f in (("s", 1e-9), ("ms", 1e-6)) if
                              max((row["step_ns"] for row in done), default=0) * f >= 2), ("us", 1e-3))
    most_bytes = max((max(row["swapped_in_bytes"], row["swapped_out_bytes"]) for row in done), default=0)
    bytes_unit, per_byte = ("GiB", 2 ** -30) if most_bytes >= 2 ** 31 else ("MiB", 2 ** -20)
    parts = []
    for column, link in enumerate(links):
        mine = sorted((row for row in done if row["link_gbps"] == link), key=lambda row: row["capacity_factor"])
        failed = max((row["capacity_factor"] for row in rows if row["link_gbps"] == link and not row["completed"]), default=0)
        time = Panel(column, 0, least_x, most_x, 1.1 * per_ns * max((row["step_ns"] for row in done), default=0))
        copied = Panel(column, 1, least_x, most_x, 1.1 * per_byte * most_bytes)
        for panel in (time, copied):
            panel.axes(column == 0)
            if failed:
                panel.refuse(failed)
        time.text(time.x + PANEL / 2, time.y - 7, f"{link:g} GB/s each way" if link else "no link limit")
        time.line("least", [(row["capacity_factor"], row["least_ns"] * per_ns) for row in mine if row.get("least_ns")])
        time.line("step", [(row["capacity_factor"], row["step_ns"] * per_ns) for row in mine], dots=True)
        copied.line("in", [(row["capacity_factor"], row["swapped_in_bytes"] * per_byte) for row in mine])
        copied.line("out", [(row["capacity_factor"], row["swapped_out_bytes"] * per_byte) for row in mine])
        copied.text(copied.x + PANEL / 2, copied.y + HEIGHT + 32, "limit / peak")
        if column == 0:
            time.text(time.x, time.y - 7, f"step, {time_unit}", "end")
            copied.text(copied.x, copied.y - 7, bytes_unit, "end")
        parts += time.parts + copied.parts
    width = max(LEFT + len(links) * (PANEL + GAP), LEFT + 2 * PANEL + 2 * GAP)
    height = TOP + 2 * (HEIGHT + 2 * GAP) + 6
    body, x = picture.heading(escape(title), "step time and bytes that are copied, with a part of the memory that the step needs"), 24
    for kind, text in (("step", "step"), ("least", "the least that any plan of copies takes"), ("in", "in"), ("out", "out")):
        body.append(f'<path class="line {kind}" d="M{x} 72h22"/><text class="note" x="{x + 28}" y="76">{text}</text>')
        x += 48 + 7 * len(text)
    return picture.svg(width, height, f"{escape(title)}: step time and bytes copied against the memory limit", [*body, *parts],
                       LIGHT, DARK)


def number(text):
    made = float(text) if text else None
    if made is not None and not math.isfinite(made):
        raise ValueError
    return made


def numbers(row):
    """Returns a row of the table as numbers. Raises ValueError if the row is incomplete."""
    if None in row or None in row.values():  # too many or too few columns
        raise ValueError
    made = {"completed": row["completed"] == "1", "link_gbps": number(row["link_gbps"]) or 0,
            **{key: number(row.get(key)) for key in (
                "capacity_factor", "step_ns", "least_ns", "swapped_in_bytes", "swapped_out_bytes")}}
    needed = ["capacity_factor"]
    if made["completed"]:
        needed += ["step_ns", "swapped_in_bytes", "swapped_out_bytes"]
    if None in [made[key] for key in needed]:
        raise ValueError
    return made


def main():
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    rows = []
    table = csv.DictReader(line for at, line in enumerate(sys.stdin) if at == 0 or not line.startswith("capacity_bytes,"))
    for count, row in enumerate(table, 1):
        if not {"capacity_factor", "completed", "step_ns", "link_gbps"} <= row.keys():
            sys.exit("draw-sweep.py: standard input is not what spillway-replay --sweep --csv prints")
        try:
            rows.append(numbers(row))
        except ValueError:
            sys.exit(f"draw-sweep.py: row {count} on standard input is not whole, or has something else than a number")
    if not rows:
        sys.exit("draw-sweep.py: no rows on standard input")
    sys.stdout.write(draw(rows, sys.argv[1] if len(sys.argv) > 1 else "A sweep"))


if __name__ == "__main__":
    main()
