#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plots what bench_overlap --csv prints: step time against capacity, a line for each policy.

usage: bench_overlap --csv TRACE... | plot-overlap.py [FOLDER]

Writes FOLDER/step-time-TRACE.svg (default docs/figures) for each trace, with a panel for each link. Needs
matplotlib. The same numbers make the same file.
"""
import collections
import csv
import pathlib
import sys

try:
    import matplotlib
except ImportError:
    sys.exit("plot-overlap.py: needs matplotlib (pip install matplotlib)")
matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "spillway", "font.size": 9})
import matplotlib.pyplot as plt  # noqa: E402

STYLES = {
    "lru": dict(color="#b05020", marker="s", label="LRU, nothing ahead"),
    "schedule": dict(color="#8080c0", marker="^", label="schedule, nothing ahead"),
    "schedule+prefetch": dict(color="#107040", marker="o", label="schedule and prefetch"),
}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures")
    traces = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in csv.DictReader(sys.stdin):
        traces[row["trace"]][float(row["link_gbps"])].append(row)
    if not traces:
        sys.exit("plot-overlap.py: no rows on standard input")
    folder.mkdir(parents=True, exist_ok=True)
    for trace, links in traces.items():
        figure, panels = plt.subplots(1, len(links), figsize=(2.6 * len(links), 2.9), sharey=True, squeeze=False)
        for panel, (link, rows) in zip(panels[0], sorted(links.items())):
            least = sorted({(float(row["capacity_factor"]), float(row["least_ns"]) / 1e9) for row in rows})
            panel.plot(*zip(*least), color="black", linestyle=":", label="least possible")
            for policy, style in STYLES.items():
                points = sorted((float(row["capacity_factor"]), float(row["step_ns"]) / 1e9)
                                for row in rows if row["policy"] == policy and row["completed"] == "1")
                if points:
                    panel.plot(*zip(*points), markersize=3, linewidth=1.2, **style)
            panel.set_title(f"{link:g} GB/s each way", fontsize=9)
            panel.set_xlabel("capacity / peak")
            panel.grid(alpha=0.3)
        panels[0][0].set_ylabel("step time, s")
        handles, labels = panels[0][0].get_legend_handles_labels()
        name = pathlib.Path(trace).stem
        figure.suptitle(name, fontsize=10)
        figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=8)
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        path = folder / f"step-time-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(path)


if __name__ == "__main__":
    main()
