#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/benchmarks.md that are the same on every machine, and writes them into the page.

usage: figures.py [--check] [--programs FOLDER] [--traces FOLDER]

These are the tables whose figures are bytes or times of the virtual clock: compaction at exactly the peak, bytes that eviction
swaps in, and the step time under a memory limit, compared with other systems. Tables of measured times are not covered: they
name their date, machine and command. A table stands between `<!-- figures NAME -->` and `<!-- figures end -->`.
A figure of a table that the text repeats stands between `<!-- NAME: FIRST CELLS OF THE ROW / COLUMN -->` and `<!-- -->`.
--check changes nothing and fails if a table or a figure differs from what the programs print now.
"""
import argparse
import collections
import concurrent.futures
import csv
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
TABLE = re.compile(r"(<!-- figures (\S+) -->\n).*?(<!-- figures end -->)", re.DOTALL)
QUOTE = re.compile(r"(<!-- (\S+): ([^>]+?) / ([^>]+?) -->)[^<]*(<!-- -->)")

# Bytes moved per byte allocated by a simple compacting allocator with best fit, as a reference: see docs/benchmarks.md.
COMPACTION = [
    ("minimalloc_A", "minimalloc A", "0.208"),
    ("minimalloc_B", "minimalloc B", "0.159"),
    ("minimalloc_C", "minimalloc C", "0.200"),
    ("minimalloc_D", "minimalloc D", "0.369"),
    ("minimalloc_E", "minimalloc E", "0.313"),
    ("minimalloc_F", "minimalloc F", "0.232"),
    ("somas_pangu_2.6B", "SOMAS Pangu 2.6B", "0.020"),
    ("torch_cs336_medium_128_training", "PyTorch medium, training, 128", "0.220"),
    ("torch_cs336_medium_512_training", "PyTorch medium, training, 512", "0.065"),
    ("torch_cs336_medium_256_inference", "PyTorch medium, inference, 256", "0.180"),
    ("azure_llm_conv_derived", "Azure LLM conversations", "0.0077"),
    ("g10_BERT_Base_256", "BERT base, 256", "0.322"),
    ("g10_ResNet152_512", "ResNet152, 512", "0.247"),
]
ACCESSES = [
    ("g10_BERT_Base_256", "BERT base, 256"),
    ("g10_BERT_Base_512", "BERT base, 512"),
    ("g10_ResNet152_512", "ResNet152, 512"),
    ("g10_ViT_1280", "ViT, 1280"),
]

# Seconds per iteration as published in G10's artifact (example_results/overall_batchsize): for FlashNeuron, DeepUM, G10
# (prefetch_lru) and the ideal.
G10 = [
    ("g10_BERT_Base_256", "BERT base, 256", 12.258600000, 10.992552904, 8.773229325, 8.742558777),
    ("g10_BERT_Base_512", "BERT base, 512", 52.895639999, 18.980722809, 17.607178175, 11.799396628),
    ("g10_ResNet152_512", "ResNet152, 512", 132.902400000, 130.104165057, 130.306919425, 130.102121477),
    ("g10_ViT_1280", "ViT, 1280", None, 9.069040214, 6.647685439, 4.459141336),
]


def steps(mode):
    """Returns how many steps are replayed. Only the last one counts. `TunedRecompute` tries its rules in the first 24."""
    return 28 if mode == "tuned" else 12


PROCESSORS = threading.BoundedSemaphore(os.cpu_count())


def run(*command):
    try:
        with PROCESSORS:
            result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"figures.py: {command[0]}: {error.strerror}; build the programs, or name their folder with --programs")
    if result.returncode != 0:
        sys.exit(f"figures.py: {' '.join(map(str, command))} failed:\n{result.stderr}")
    return result.stdout


def table(head, rows):
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def compaction(programs, traces):
    rows = []
    for name, title, reference in COMPACTION:
        scale = 1024 if name.startswith("minimalloc") else 1  # the sizes in these traces are not in bytes
        result = json.loads(run(programs / "spillway-replay", traces / f"{name}.csv", "--scale", scale,
                                "--no-swap", "--capacity", "1.0x", "--json"))
        moved = result["moved_bytes"] / result["allocated_bytes"] if result["completed"] else None
        rows.append([title, "out of memory" if moved is None else f"{moved:.2g}", reference])
    return table(["trace", "moved / allocated", "reference"], rows)


def eviction(programs, traces):
    rows = []
    for name, title in ACCESSES:
        printed = run(programs / "bench_eviction_quality", traces / "access" / f"{name}.csv")
        for line in printed.splitlines()[2:]:
            capacity, lru, fifo, size, cost, schedule, bound, over = line.split()
            rows.append([title, f"{float(capacity):g}x", lru, fifo, size, cost, schedule, bound,
                         over.replace("%", " %")])
    return table(["trace", "capacity", "lru", "fifo", "size", "cost", "schedule", "bound", "over the bound"], rows)


def overlap(programs, traces):
    printed = run(programs / "bench_overlap", *(traces / "access" / f"{name}.csv" for name, _ in ACCESSES), "--csv")
    ratios = collections.defaultdict(list)
    for row in csv.DictReader(printed.splitlines()):
        ratio = f"{float(row['step_ns']) / float(row['least_ns']):.3f}" if row["completed"] == "1" else "-"
        ratios[row["trace"], float(row["link_gbps"]), float(row["capacity_factor"])].append(ratio)
    titles = dict(ACCESSES)
    rows = [[titles[pathlib.Path(trace).stem], f"{link:g}", f"{capacity:g}x", *values]
            for (trace, link, capacity), values in ratios.items()]
    return table(["trace", "GB/s each way", "capacity", "lru, nothing ahead", "schedule, nothing ahead",
                  "schedule and prefetch"], rows)


def others(programs, traces):
    rows = []
    for name, title, *seconds, ideal in G10:
        for mode in "none", "tuned":
            result = json.loads(run(programs / "spillway-replay", traces / "access" / f"{name}.csv", "--device", "model",
                                    "--capacity", 40_000_000_000, "--link-gbps", 15.754, f"--recompute={mode}",
                                    "--steps", steps(mode), "--json"))
            seconds.append(result["steps"][-1]["simulated_ns"] / 1e9 if result["completed"] else None)
        rows.append([title, f"{ideal:.3f}",
                     *("out of memory" if s is None else f"{s / ideal:.3f}" for s in seconds)])
    return table(["trace", "ideal, s", "FlashNeuron", "DeepUM", "G10", "spillway", "with recipes"], rows)


def recompute(programs, traces):
    modes = "none", "cheaper", "planned", "always", "tuned"

    def sweep(name, link, mode):
        printed = run(programs / "spillway-replay", traces / "access" / f"{name}.csv", "--device", "model",
                      "--sweep", "0.2x:0.9x:8", "--link-gbps", link, f"--recompute={mode}", "--steps", steps(mode), "--csv")
        return [f"{float(row['step_ns']) / float(row['least_ns']):.3f}" if row["completed"] == "1" else "-"
                for row in csv.DictReader(printed.splitlines())]

    rows = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        sweeps = [(title, link, [pool.submit(sweep, name, link, mode) for mode in modes])
                  for name, title, *_ in G10 for link in (12, 25, 55)]
        for title, link, of_modes in sweeps:
            ratios = zip(*(ratios.result() for ratios in of_modes))
            rows += [[title, f"{link}", f"{part / 10:g}x", *row] for part, row in enumerate(ratios, 2)]
    return table(["trace", "GB/s each way", "capacity", "copies only", "what is cheaper", "the same, planned for", "always", "tuned"], rows)


TABLES = {"compaction": compaction, "eviction": eviction, "overlap": overlap, "others": others, "recompute": recompute}


def quote(made, name, cells, column):
    """Returns the figure in `column` of the table row that begins with `cells`."""
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in made[name].splitlines())
    wanted = cells.split(" | ")
    found = [row[head.index(column)] for row in rows if row[:len(wanted)] == wanted]
    if len(found) != 1:
        sys.exit(f"figures.py: {PAGE.name} repeats a figure of {len(found)} rows of {name} that begin with {cells}")
    return found[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a table of the page is out of date")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build" / "bin")
    parser.add_argument("--traces", type=pathlib.Path, default=ROOT.parent / "shared" / "traces")
    arguments = parser.parse_args()
    programs = arguments.programs.resolve()  # `Path(".") / "name"` is a name without a folder, which PATH would find elsewhere
    page = PAGE.read_text()
    if missing := set(TABLES) - {match[1] for match in TABLE.findall(page)}:
        sys.exit(f"figures.py: {PAGE.name} has no place for {', '.join(sorted(missing))}")
    with concurrent.futures.ThreadPoolExecutor(len(TABLES)) as pool:
        made_of = {name: pool.submit(make, programs, arguments.traces) for name, make in TABLES.items()}
    tables = {name: table.result() for name, table in made_of.items()}
    made = TABLE.sub(lambda match: match[1] + tables[match[2]] + match[3], page)
    made = QUOTE.sub(lambda match: match[1] + quote(tables, *match.groups()[1:4]) + match[5], made)
    if not arguments.check:
        PAGE.write_text(made)
        subprocess.run([sys.executable, ROOT / "scripts" / "draw-overlap.py"], check=True)  # charts of the page's tables
    elif made != page:
        sys.stdout.writelines(difflib.unified_diff(page.splitlines(True), made.splitlines(True),
                                                   "docs/benchmarks.md", "what the programs print"))
        sys.exit("figures.py: tables of docs/benchmarks.md are stale; run scripts/figures.py")


if __name__ == "__main__":
    main()
