# SPDX-License-Identifier: Apache-2.0
"""Runs bench_overlap and bench_eviction_quality on a small trace, and checks which options they refuse.

Usage: check_benchmarks.py FOLDER-OF-PROGRAMS"""
import csv
import pathlib
import subprocess
import sys
import tempfile

PROGRAMS = pathlib.Path(sys.argv[1])
complaints = 0


def run(program, *options):
    done = subprocess.run([PROGRAMS / program, str(trace), *options], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def expect(condition, what):
    global complaints
    if not condition:
        print("FAILED:", what)
        complaints += 1


with tempfile.TemporaryDirectory() as folder:
    trace = pathlib.Path(folder, "trace.csv")
    rows = [(0, 1, 1), (0, 2, 0), (1, 3, 0), (1, 2, 0), (2, 1, 1), (2, 3, 0)]
    trace.write_text("step,id,size,weight,kernel_ns\n" +
                     "".join(f"{step},{block},100000,{weight},1000000\n" for step, block, weight in rows))

    for program, *options in (("bench_overlap", "--kernel-scale", "1e18"), ("bench_overlap", "--link-gbps", "1e-12"),
                              ("bench_overlap", "--kernel-scale", "1e12", "--link-gbps", "1e9"),
                              ("bench_overlap", "--scale", "1e-9", "--link-gbps", "0.1"),
                              ("bench_overlap", "--capacity", "1e300"), ("bench_overlap", "--warm-steps", "1e18"),
                              ("bench_eviction_quality", "--capacity", "1e300"),
                              ("bench_eviction_quality", "--changing", "--time")):
        status, out, err = run(program, *options)
        expect(status == 2 and options[0] in err and not out, f"{program} {options} is refused: {status}, {out!r}, {err!r}")

    status, out, err = run("bench_overlap", "--csv", "--capacity", "0.7", "--link-gbps", "1", "--kernel-scale", "1e9")
    rows = [line.split(",") for line in out.splitlines()[1:]]
    expect(status == 0 and len(rows) == 3 and all(float(row[5]) >= 0.999 * float(row[6]) > 0 for row in rows),
           f"no step takes less than its least: {out}{err}")
    trace = trace.rename(trace.with_name('a "b",c.csv'))
    _, out, err = run("bench_overlap", "--csv", "--capacity", "0.7", "--link-gbps", "1")
    rows = list(csv.DictReader(out.splitlines()))
    expect(len(rows) == 3 and {(row["trace"], row["link_gbps"], None in row) for row in rows} == {(trace.name, "1", False)},
           f"a name with commas is one field: {out}{err}")
    status, out, err = run("bench_eviction_quality", "--time", "--capacity", "0.3,0.7")
    expect(status == 0 and "0.30     less than the largest operation needs" in out and "%" in out.splitlines()[-1],
           f"planning is timed where the steps fit: {out}{err}")

print("benchmarks of traces:", "failed" if complaints else "all as expected")
sys.exit(bool(complaints))
