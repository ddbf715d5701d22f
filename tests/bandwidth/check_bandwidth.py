# SPDX-License-Identifier: Apache-2.0
"""Runs spillway-bandwidth on small sizes and checks its output. Usage: check_bandwidth.py PROGRAM

Rates are not checked, since they depend on the machine. The program itself checks every byte that was copied back.
"""
import json
import math
import subprocess
import sys
import tempfile

PROGRAM = sys.argv[1]
SMALL = ["--min-size", "4KiB", "--max-size", "64KiB", "--bytes", "64KiB", "--repetitions", "3"]
KEYS = {"device", "direction", "tier", "size_bytes", "count", "gbps", "raw_gbps", "ratio"}
complaints = 0


def expect(condition, what):
    global complaints
    if not condition:
        print("FAILED:", what)
        complaints += 1


def run(*options):
    done = subprocess.run([PROGRAM, *options], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def rows(*options):
    status, out, err = run(*SMALL, "--json", *options)
    expect(status == 0, f"{options}: exit status {status}, {err}")
    return json.loads(out)


def check_row(row):
    expect(KEYS <= row.keys(), f"missing keys {KEYS - row.keys()}")
    expect(row["device"] == "sim", "the device is named")
    for rate in ("gbps", "raw_gbps", "best_gbps", "best_raw_gbps"):
        expect(row[rate] > 0 and math.isfinite(row[rate]), f"{rate} of {row}")
    expect(math.isclose(row["ratio"], row["gbps"] / row["raw_gbps"]), "the ratio is ours over the plain copy's")
    expect(row["best_gbps"] >= row["gbps"], "the best is no worse than the median")
    expect(row["count"] == max(1, 65536 // row["size_bytes"]), "as many blocks as make up the bytes")
    expect((row["layout"] == "one") == (row["count"] == 1), "one block is not a pattern of several")
    if row["tier"] == "file":
        expect(row["file_calls"], "the calls that carry bytes to the file are named")
        for rate in ("cpu_s_per_gb", "raw_cpu_s_per_gb", "copies_cpu_s_per_gb"):
            expect(row[rate] >= 0 and math.isfinite(row[rate]), f"{rate} of {row}")
    has_naive = row["tier"] == "pinned" and row["count"] > 1
    expect(("naive_gbps" in row) == has_naive, "the naive loop is a peer of several blocks in the pinned tier")


def key(row):
    return row["direction"], row["tier"], row["size_bytes"], row["layout"]


scratch = tempfile.TemporaryDirectory()
folder = scratch.name
everything = rows("--file-folder", folder)
for one in everything:
    check_row(one)
wanted = {
    (way, tier, size, layout)
    for way in ("out", "in", "both")
    for tier in ("pinned", "pageable", "file")
    for size, layouts in ((4096, ("packed", "scattered")), (16384, ("packed", "scattered")), (65536, ("one",)))
    for layout in layouts + (("apart",) if tier == "file" and "packed" in layouts else ())
}
expect({key(row) for row in everything} == wanted and len(everything) == len(wanted), "one row for each case")

chosen = rows("--tier", "pageable", "--direction", "in")
expect({(row["tier"], row["direction"]) for row in chosen} == {("pageable", "in")}, "tiers and directions can be chosen")

through = rows("--through", "allocator", "--file-folder", folder)
for one in through:
    check_row(one)
    expect(one["through"] == "allocator", "the way is named")
expect({row["tier"] for row in through} == {"pinned", "pageable", "file"}, "an allocator reaches every tier")

for codec, zeros, shares in (("zero_bitmap", "0.5", (0.5, 0.6)), ("zero_bitmap", "0", (1, 1.01)), ("bfloat16", "0.5", (0.5, 0.51))):
    for one in rows("--through", "allocator", "--tier", "pinned", "--tier", "pageable", "--codec", codec, "--zeros", zeros):
        check_row(one)
        expect((one["codec"], one["zeros"]) == (codec, float(zeros)), "the codec is named, and what it was given")
        expect(shares[0] <= one["stored_share"] <= shares[1], f"what is stored of each byte: {one}")
        expect(math.isclose(one["stored_gbps"], one["stored_share"] * one["gbps"]), "stored bytes are a share of the raw ones")

linked = rows("--tier", "pinned", "--direction", "out", "--link-gbps", "0.5", "--copy-latency-us", "5")
expect(all(row["raw_gbps"] <= 0.51 for row in linked), "a link of the given rate is not faster than that")

status, table, _ = run(*SMALL, "--tier", "pinned")
expect(status == 0 and "scattered" in table and "x naive" in table, "a table by default")

refused = {
    ("--tier", "file"): "--file-folder",
    ("--tier", "floppy"): "--tier",
    ("--max-size", "3"): "--max-size",
    ("--min-size", "8KiB", "--max-size", "4KiB"): "--min-size",
    ("--file-folder", folder + "/nowhere"): "--file-folder",
    ("--device", "cuda", "--link-gbps", "1"): "--device sim",
    ("--min-size", "4097", "--max-size", "64KiB"): "--min-size: expected a multiple of 256",
    ("--max-size", "65535"): "--max-size: expected a multiple of 256",
    ("--seed", "-1"): "--seed: expected a whole number",
    ("--link-gbps", "nan"): "--link-gbps",
    ("--link-gbps", "1e-10"): "--link-gbps",
    ("--link-gbps", "1e11"): "--link-gbps",
    ("--copy-latency-us", "0.0001"): "--copy-latency-us",
    ("--copy-latency-us", "1e17"): "--copy-latency-us",
    ("--codec", "zip"): "bfloat16|identity|zero_bitmap",
    ("--codec", "bfloat16"): "--through allocator",
    ("--codec", "bfloat16", "--through", "allocator", "--link-gbps", "1"): "no link",
    ("--zeros", "2"): "--zeros",
    ("--zeros", "nan"): "--zeros",
    ("--direction", "up"): "both|in|out",
}
for bad, named in refused.items():
    status, out, err = run(*bad)
    expect(status == 2 and named in err and not out, f"{bad} is refused with status 2 and a reason, not {status}: {err}")

status, out, _ = run("--help")
expect(status == 0 and out.replace("\n", "").isprintable(), "the help is plain text")
status, out, _ = run("--version")
expect(status == 0 and out.startswith("spillway-bandwidth 0."), f"the version is told: {out}")
with open("/dev/full", "w") as full:
    done = subprocess.run([PROGRAM, *SMALL, "--tier", "pinned", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
expect(done.returncode == 1 and "incomplete" in done.stderr, f"a full disk is told: {done}")

sys.exit(complaints != 0)
