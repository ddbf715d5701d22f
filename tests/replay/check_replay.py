# SPDX-License-Identifier: Apache-2.0
"""Runs spillway-replay on small traces and checks its output. Usage: check_replay.py PROGRAM"""
import csv
import io
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

PROGRAM = sys.argv[1]
MAKE_TRACE = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "make-trace.py"
DRAW_SWEEP = MAKE_TRACE.with_name("draw-sweep.py")
KEYS = {
    "completed", "failed_at", "capacity_bytes", "lower_bound_bytes", "peak_reserved_bytes",
    "swapped_out_bytes", "swapped_in_bytes", "dropped_bytes", "moved_bytes", "compaction_passes",
    "evictions", "host_waits", "compute_ns", "simulated_ns", "ns_per_op_median", "ns_per_op_p99", "ops",
}
folder = pathlib.Path(tempfile.mkdtemp())
complaints = 0


def expect(condition, what):
    global complaints
    if not condition:
        print("FAILED:", what)
        complaints += 1


def run(text, *options, name="trace.csv"):
    trace = folder / name
    trace.write_text(text)
    done = subprocess.run([PROGRAM, str(trace), *options], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def replay(text, *options):
    status, out, err = run(text, *options, "--json")
    expect(status in (0, 3), f"{options}: exit status {status}, {err}")
    result = json.loads(out)
    expect(KEYS <= result.keys(), f"missing keys {KEYS - result.keys()}")
    expect(result["completed"] == (status == 0), "exit status and completed agree")
    return result


def lifetimes(seed, buffers=400):
    """Returns a trace with random lifetimes of buffers of up to 64 KiB."""
    draw = random.Random(seed)
    rows = ["id,lower,upper,size"]
    for i in range(buffers):
        lower = draw.randrange(1000)
        rows.append(f"{i},{lower},{lower + 1 + draw.randrange(60)},{1 + draw.randrange(65536)}")
    return "\n".join(rows) + "\n"


def network(layers=24, size=100_000):
    """Returns a trace of a training step. Layers keep their activations for the backward pass; weights are never freed."""
    rows = ["step,id,size,weight,kernel_ns"]
    step = 0
    for layer in [*range(layers), *reversed(range(layers))]:
        operands = [(2 * layer, 1), (2 * layer + 1, 0)]
        if 0 < layer:
            operands.append((2 * layer - 1, 0))
        for block, weight in operands:
            rows.append(f"{step},{block},{size},{weight},1000000")
        step += 1
    return "\n".join(rows) + "\n"


# At a capacity of exactly the peak and without swapping, compaction makes all traces fit; without it some do not.
moved = 0
refused = 0
for seed in range(5):
    trace = lifetimes(seed)
    tight = replay(trace, "--capacity", "1.0x", "--no-swap")
    expect(tight["completed"], f"seed {seed}: completes at the peak with compaction")
    expect(tight["swapped_out_bytes"] == 0, f"seed {seed}: --no-swap swaps nothing")
    expect(tight["capacity_bytes"] == tight["lower_bound_bytes"], "1.0x is the lower bound")
    moved += tight["moved_bytes"]
    refused += not replay(trace, "--capacity", "1.0x", "--no-swap", "--no-compaction")["completed"]
expect(moved > 0, "some of the random traces need compaction")
expect(refused > 0, "some of the random traces cannot do without it")

# The lower bound: at most two of three buffers live at once. Sizes are rounded up to 256 B.
small = "id,lower,upper,size\n1,0,10,1000\n2,5,20,2000\n3,10,30,512\n"
expect(replay(small)["lower_bound_bytes"] == 1024 + 2048, "lower bound of a small trace")
expect(replay(small, "--scale", "2")["lower_bound_bytes"] == 2048 + 4096, "scaled lower bound")
expect(replay(small, "--capacity", "1KiB", "--no-swap")["failed_at"] == 1, "failed_at names the operation")

# Repeated steps: all bytes are verified on the simulated device, and prediction is better than LRU.
trace = network()
whole = replay(trace, "--capacity", "1.0x", "--steps", "3")
expect(whole["swapped_in_bytes"] == 0 and whole["evictions"] == 0, "nothing leaves at the peak")
expect(whole["compute_ns"] == 3 * 48 * 1_000_000, "compute_ns adds up the kernels")
expect(whole["simulated_ns"] >= whole["compute_ns"], "time is at least the kernels' time")
early = replay(trace, "--capacity", "0.5x", "--no-swap", "--steps", "3")
expect(early["compute_ns"] == early["failed_at"] * 1_000_000 > 0, f"kernels that did not run take no time: {early}")
expect("of which compute" in run(trace)[1], "a table has the kernels' time")
idle = replay(trace, "--device", "sim")
expect(idle["compute_ns"] is None and "compute" not in run(trace, "--device", "sim")[1], f"no kernel runs on sim unless told: {idle}")
swapped_in = {}
for eviction in ("lru", "fifo", "size", "cost", "schedule"):
    for prefetch in ("off", "8"):
        result = replay(trace, "--capacity", "0.5x", "--steps", "3", "--eviction", eviction,
                        "--prefetch", prefetch, "--device", "sim", "--verify")
        expect(result["completed"], f"{eviction} completes at half the peak")
        expect(result["verified_bytes"] > 0 and result["corrupt_bytes"] == 0, f"{eviction} keeps every byte")
        expect(result["host_waits"] == 0, f"{eviction} never waits on the host")
        swapped_in[eviction, prefetch] = result["swapped_in_bytes"]
expect(swapped_in["schedule", "off"] < swapped_in["lru", "off"], f"schedule beats lru: {swapped_in}")
model, sim = (replay(trace, "--capacity", "0.5x", "--steps", "3", "--device", device)
              for device in ("model", "sim"))
expect(model["steps"][0]["swapped_in_bytes"] == sim["steps"][0]["swapped_in_bytes"],
       "the model decides as the device does")
expect(not replay(trace, "--capacity", "0.05x")["completed"], "less than one operation's operands fails")

# Blocks with a recipe are dropped instead of copied, and come back with the same bytes.
cheap = trace.replace(",1000000\n", ",1000\n")
for device, options in (("sim", ["--verify"]), ("model", [])):
    copied, made = (replay(cheap, "--capacity", "0.4x", "--steps", "3", "--device", device, *options, *more)
                    for more in ([], ["--recompute"]))
    expect(made["completed"] and made.get("corrupt_bytes", 0) == 0, f"{device}: recipes keep every byte")
    expect(copied["recomputed_bytes"] == 0 and made["recomputed_bytes"] > 0, f"{device}: blocks are made again")
    expect(made["swapped_out_bytes"] + made["spared_bytes"] > 0 and made["swapped_out_bytes"] < copied["swapped_out_bytes"],
           f"{device}: fewer bytes are copied")
modes = {mode: replay(cheap, "--capacity", "0.4x", "--steps", "28", f"--recompute={mode}")
         for mode in ("none", "cheaper", "planned", "always", "tuned")}
expect(modes["none"]["recomputed_bytes"] == 0, "--recompute=none makes nothing again")
expect(modes["planned"]["recomputed_bytes"] > 0, "what a recipe costs can be planned with")
expect(modes["always"]["recomputed_bytes"] >= modes["cheaper"]["recomputed_bytes"] > 0, "always is at least as often")
tuned, copied, cheaper = (modes[mode]["steps"][-1]["simulated_ns"] for mode in ("tuned", "none", "cheaper"))
expect(tuned <= 1.01 * min(copied, cheaper), f"tuning finds the faster way: {tuned}, {copied}, {cheaper}")
expect(replay(cheap, "--capacity", "0.4x", "--steps", "28", "--recompute")["simulated_ns"] == modes["tuned"]["simulated_ns"],
       "--recompute alone is tuned")
expect(run(cheap, "--recompute=often")[0] == 2, "an unknown rule is refused")
expect(run(lifetimes(1), "--recompute")[0] == 2, "lifetimes do not say what makes a buffer")

# The memory that a replay needs does not grow with the number of operations.
def run_within(limit_bytes, *options):
    return subprocess.run([PROGRAM, *options], capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes)))


(folder / "trace.csv").write_text(network(layers=2000))
if run_within(1 << 33, "--version").returncode == 0:  # a program with a sanitizer reserves more
    done = run_within(1 << 33, str(folder / "trace.csv"), "--capacity", "1KiB", "--steps", "1000000", "--json")
    expect(done.returncode == 3 and json.loads(done.stdout)["failed_at"] == 0, f"a million steps begin: {done.stderr}")

# A faster link does not increase the simulated time.
slow, fast = (replay(trace, "--capacity", "0.5x", "--steps", "2", "--link-gbps", gbps)["simulated_ns"]
              for gbps in ("0.5", "50"))
expect(slow > fast, f"a slow link takes longer: {slow} against {fast}")
halved, twice = (replay(trace, "--capacity", "0.5x", "--steps", "2", *options)["simulated_ns"]
                 for options in (("--link-gbps", "0.5", "--codec-ratio", "2"), ("--link-gbps", "1")))
expect(halved == twice < slow, f"half the bytes take half the time: {halved}, {twice}, {slow}")
slowest = replay(trace, "--capacity", "0.5x", "--link-gbps", "1e-9")
expect(slowest["simulated_ns"] > 0.99e9 * slowest["swapped_out_bytes"] > 0, f"a byte per second is no infinitely fast link: {slowest}")
status, out, _ = run(trace, "--sweep", "0.5x:1.0x:2", "--codec-ratio", "2", "--link-gbps", "25")
expect("host link 25 GB/s each way" in out and "2 times" in out, f"a sweep names the link, and what a codec makes of it: {out}")
expect(run(trace, "--codec-ratio", "2", "--device", "cuda")[0] == 2, "a GPU's link is what it is")

# A sweep prints the cost of the last step at each capacity, or why the replay fails.
def sweep(text, *options):
    status, out, err = run(text, *options, "--csv")
    expect(not err, f"{options}: {err}")
    return status, list(csv.DictReader(io.StringIO(out)))


status, rows = sweep(trace, "--sweep", "0.05x:1.0x:5", "--link-gbps", "0.1")
peak = whole["lower_bound_bytes"]
expect(status == 0, "a sweep works if some capacity does")
expect(len(rows) == 5 and int(rows[-1]["capacity_bytes"]) == peak, "both ends belong to a sweep")
expect(rows[0]["completed"] == "0" and "one operation alone needs" in rows[0]["reason"],
       f"a capacity below one operation's operands says so: {rows[0]}")
expect(not rows[0]["step_ns"], "what does not work took no time")
expect(all(row["completed"] == "1" and not row["reason"] for row in rows[1:]), f"the others work: {rows}")
times = [int(row["step_ns"]) for row in rows[1:]]
expect(all(more < 1.05 * less for less, more in zip(times, times[1:])), f"more memory takes no longer: {times}")
expect(float(rows[-1]["slowdown"]) == 1 and int(rows[-1]["swapped_in_bytes"]) == 0,
       f"at the peak only kernels take time: {rows[-1]}")
expect(float(rows[1]["slowdown"]) > 1.01, f"at a quarter of it a slow link shows: {rows[1]}")
single = replay(trace, "--capacity", rows[2]["capacity_bytes"], "--steps", "3", "--link-gbps", "0.1")
expect(single["steps"][-1]["simulated_ns"] == int(rows[2]["step_ns"]), "a row is a run's last step")
expect(all(0.999 * float(row["least_ns"]) <= int(row["step_ns"]) for row in rows[1:]), f"no step beats the bound: {rows}")
expect({row["link_gbps"] for row in rows} == {"0.1"} and not rows[0]["least_ns"], f"a row names its link: {rows[0]}")
# In a first step weights begin, too: nothing is copied in before its first use.
first = "step,id,size,weight,kernel_ns\n" + "".join(f"{step},{block},25000192,{int(block > 1)},1000\n" for step, block in enumerate((1, 2, 1, 3)))
for steps in ("1", "2"):
    _, rows = sweep(first, "--sweep", "0.4x:0.95x:3", "--steps", steps, "--link-gbps", "25")
    expect(all(float(row["least_ns"]) <= int(row["step_ns"]) + 2 for row in rows), f"step {steps} does not beat its bound: {rows}")
    expect(float(rows[0]["least_ns"]) > 4 * 1000, f"the bound counts copies: {rows}")
# Copies to the host that end after the last kernel run beside the next step, which takes no less than its own kernels.
kernels = [(1000, 2, 5), (0, 3, 7, 1), (1000, 4), (1000, 7, 0, 1), (50000, 1), (50000, 1), (0, 2), (50000, 6, 4), (1000, 4, 5, 2), (0, 0),
           (1000, 5, 7, 4), (50000, 4), (50000, 5, 6, 3)]
sizes = [4000256, 8000512, 8000512, 8000512, 2000128, 2000128, 8000512, 2000128]
tail = "step,id,size,weight,kernel_ns\n" + "".join(f"{step},{block},{sizes[block]},{int(block in (1, 2))},{kernel_ns}\n"
                                                  for step, (kernel_ns, *blocks) in enumerate(kernels) for block in blocks)
_, rows = sweep(tail, "--sweep", "0.5375x:0.95x:4", "--steps", "8", "--link-gbps", "25")
expect(all(float(row["slowdown"]) >= 1 and float(row["least_ns"]) <= int(row["step_ns"]) for row in rows),
       f"no step takes less than its kernels: {rows}")
_, slower = sweep(trace, "--sweep", "1.0x:1.0x:2", "--kernel-scale", "2")
expect(int(slower[0]["step_ns"]) == 2 * times[-1], "kernels take the time they are told")

status, rows = sweep(trace, "--sweep", "2MiB:4MiB:3")
expect([int(row["capacity_bytes"]) for row in rows] == [2 << 20, 3 << 20, 4 << 20], "sizes are sizes")
status, rows = sweep(trace, "--sweep", "0.01x:0.02x:2")
expect(status == 3 and len(rows) == 2, "a sweep of which nothing works says so by its exit status")
status, rows = sweep(lifetimes(1), "--sweep", "0.5x:1.0x:3", "--no-swap")
expect(status == 0 and "operation" in rows[0]["reason"] and not rows[-1]["slowdown"],
       f"a trace without kernels has no slowdown: {rows}")
status, out, err = run(trace, "--sweep", "0.05x:1.0x:5")
expect(status == 0 and len(out.splitlines()) == 9 and "does not work: one operation" in out, f"a table: {out}")
status, out, err = run(trace, "--sweep", "0.5x:1.0x:2", "--json")
expect(status == 0 and [KEYS <= one.keys() for one in json.loads(out)] == [True, True], "a sweep as JSON")
status, out, err = run(trace, "--sweep", "0.5x:1.0x:2", "--json", "--device", "cuda")
expect(isinstance(json.loads(out), list), f"an array has an end though the first run has failed: {status}, {out!r}, {err!r}")
for more in ([], ["--sweep", "0.5x:1.0x:2"]):
    status, out, err = run(trace, "--json", *more, name="not\udcffUTF-8.csv")
    expect(status == 0 and "not\ufffdUTF-8.csv" in str(json.loads(out)), f"a file's name need not be UTF-8: {err}")
status, rows = sweep(trace, "--sweep", "0.5x:1.0x:2", "--device", "sim", "--kernel-scale", "0.01", "--verify")
expect(status == 0 and float(rows[0]["slowdown"]) >= 1, f"on the device kernels take real time: {rows}")

# draw-sweep.py draws the concatenated sweeps of two links.
def plot(text):
    return subprocess.run([sys.executable, DRAW_SWEEP, "A <step>"], input=text, capture_output=True, text=True)


sweeps = "".join(run(trace, "--sweep", "0.05x:1.0x:5", "--link-gbps", link, "--csv")[1] for link in ("0.1", "1"))
picture = plot(sweeps)
expect(picture.returncode == 0 and picture.stdout == plot(sweeps).stdout, f"a picture: {picture.stderr}")
drawn = [element.text for element in ElementTree.fromstring(picture.stdout).iter("{http://www.w3.org/2000/svg}text")]
expect("A <step>" in drawn and {"0.1 GB/s each way", "1 GB/s each way"} <= set(drawn), f"it names its links: {drawn}")
expect(picture.stdout.count('class="dot"') == 8 and picture.stdout.count('class="none"') == 4, "what works, and what does not")
for text in ("", "a,b\n1,2\n"):
    expect(plot(text).returncode == 1 and "standard input" in plot(text).stderr, f"no picture of {text!r}")
header, row = sweeps.splitlines()[0], sweeps.splitlines()[-1]
cut = plot(f"{header}\n{row}\n{row[:row.rindex(',')]}\n")
expect(cut.returncode == 1 and "row 2" in cut.stderr, f"a row that is not whole is named: {cut.stderr}")
for wrong in ("nan", "inf", "many"):
    cells = dict(zip(header.split(","), row.split(","))) | {"step_ns": wrong}
    refused = plot(f"{header}\n{','.join(cells.values())}\n")
    expect(refused.returncode == 1 and "row 1" in refused.stderr, f"a row with {wrong} is named: {refused.stderr}")
free = plot(run(trace, "--sweep", "0.5x:2.5x:5", "--link-gbps", "25", "--csv")[1].replace(",25\n", ",0\n"))
elements = ElementTree.fromstring(free.stdout)
expect("no link limit" in [element.text for element in elements.iter("{http://www.w3.org/2000/svg}text")], "a link without a bandwidth")
dots = [float(element.get("cx")) for element in elements.iter("{http://www.w3.org/2000/svg}circle")]
panels = [rect for rect in elements.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") == "frame"]
right = float(panels[0].get("x")) + float(panels[0].get("width"))
expect(dots and max(dots) <= right, f"more than the peak is drawn inside its panel: {dots}")
for options in (["--live", "0"], ["--operations", "0"], ["--uses", "0"], ["--operands", "-1"], ["--weights", "-1"],
                ["--live", "2", "--operands", "3", "--weights", "2"]):
    refused = subprocess.run([sys.executable, MAKE_TRACE, *options], capture_output=True, text=True)
    expect(refused.returncode == 2 and not refused.stdout, f"no trace of {options}: {refused.stderr}")

# Copies that the schedule predicts run while kernels do.
def steady(*options):
    result = replay(trace, "--capacity", "0.5x", "--steps", "4", "--link-gbps", "0.1", *options)
    return result["steps"][-1]["simulated_ns"] / (result["compute_ns"] / 4)


waiting, hiding = steady("--eviction", "lru", "--prefetch", "off"), steady()
expect(hiding < 1.1 and hiding - 1 < (waiting - 1) / 4, f"prefetching hides transfers: {hiding} of {waiting}")

# make-trace.py writes the same trace each time, of the size that its options name.
made = [subprocess.run([sys.executable, MAKE_TRACE, "--operations", "2000", "--live", "100", "--weights", "10"],
                       capture_output=True, text=True, check=True).stdout for _ in range(2)]
expect(made[0] == made[1], "the same options make the same trace")
result = replay(made[0], "--capacity", "0.6x")
expect(result["completed"] and result["ops"] == 2000 and result["swapped_in_bytes"] > 0,
       f"a made-up trace is replayed: {result}")
expect(made[0].count(",1,") >= 10, "weights are marked")

# Bad input: exit status 2, and a message that names the file and the line.
header = "id,lower,upper,size\n"
bad = {
    "id,lower,size\n": 1,
    header: 1,
    header + "1,0,10,100\n2,5\n": 3,
    header + "1,0,10,-5\n": 2,
    header + "1,0,10,0\n": 2,
    header + "1,10,10,5\n": 2,
    header + "1,0,10,5\n1,20,30,5\n": 3,
    header + "1,0,10,5,7\n": 2,
    header + "1,0,10,99999999999999999999999\n": 2,
    header + "1,0,10,9000000000000000000\n": 2,
    header + "1,0,10,1e3\n": 2,
    header + "\x00\x01\x02\n": 2,
    "step,id,size,weight,kernel_ns\n0,1,100,2,5\n": 2,
    "step,id,size,weight,kernel_ns\n0,1,100,0,5\n1,1,101,0,5\n": 3,
    "step,id,size,weight,kernel_ns\n0,1,100,0,5\n0,2,100,0,6\n": 3,
    "step,id,size,weight,kernel_ns\n0,1,100,0,1152921504606846976\n1,1,100,0,1\n": 3,
    header + "1,0,10," + "5" * 5000 + "\n": 2,
    # Together too large: the buffer that begins to live when the others do is named, wherever its line is.
    header + f"1,5,10,{1 << 59}\n2,0,10,{1 << 60}\n3,10,20,1\n": 2,
    f"step,id,size,weight,kernel_ns\n0,1,{1 << 60},0,1\n0,2,{1 << 60},0,1\n5,3,10,0,1\n": 3,
    f"step,id,size,weight,kernel_ns\n9,1,{1 << 60},0,1\n0,2,{1 << 60},0,1\n9,2,{1 << 60},0,1\n": 2,
    f"step,id,size,weight,kernel_ns\n0,1,{1 << 60},1,1\n1,2,10,1,1\n2,3,10,0,1\n": 3,
}
for number, (text, line) in enumerate(bad.items()):
    status, out, err = run(text, "--json", name=f"bad{number}.csv")
    expect(status == 2 and not out, f"bad trace {number}: exit status {status}")
    expect(f"bad{number}.csv:{line}:" in err, f"bad trace {number}: names its line {line}: {err!r}")
status, out, err = run("", name="empty.csv")
expect(status == 2 and err.endswith("/empty.csv: the file is empty\n"), f"an empty trace has no line to name: {err!r}")
status, out, err = run(header + "1,0,10\n")
expect("expected 4 columns, not 3" in err, f"a short row is called short: {err!r}")
expect(replay("\ufeff" + small)["lower_bound_bytes"] == 1024 + 2048, "a byte order mark is no part of the header")
expect(replay(small.rstrip("\n").replace("\n", "\r\n"))["lower_bound_bytes"] == 1024 + 2048, "lines may end as on Windows")
with open("/dev/zero") as endless:
    done = subprocess.run([PROGRAM, "/dev/stdin"], stdin=endless, capture_output=True, text=True, timeout=60)
expect(done.returncode == 2 and "a line of more than" in done.stderr, f"input without an end is refused: {done.stderr!r}")
# A timeline contains the bytes that the statistics count, and shows that copies run while kernels do.
timeline = folder / "timeline.json"
result = replay(network(), "--capacity", "0.5x", "--steps", "2", "--timeline", str(timeline))
events = json.loads(timeline.read_text())["traceEvents"]
spans = {name: [(one["ts"], one["ts"] + one["dur"]) for one in events if one["ph"] == "X" and one["name"] == name]
         for name in ("kernel", "copy_to_host", "copy_to_device")}
moved = {name: sum(one["args"]["bytes"] for one in events if one["ph"] == "X" and one["name"] == name)
         for name in ("copy_to_host", "copy_to_device")}
rounded = 100_096 / 100_000  # statistics count whole granules, spans count the block's bytes
expect({name: round(count * rounded) for name, count in moved.items()} ==
       {"copy_to_host": result["swapped_out_bytes"], "copy_to_device": result["swapped_in_bytes"]},
       f"the timeline has all bytes: {moved}")
expect(len(spans["kernel"]) == result["ops"] > 0, "the timeline has a span for each kernel")
expect(any(start < end_of_copy and start_of_copy < end for start, end in spans["kernel"]
           for start_of_copy, end_of_copy in spans["copy_to_device"]), "copies run while kernels do")
replay(network(), "--capacity", "0.5x", "--eviction", "lru", "--timeline", str(timeline))
expect("swap_out" in timeline.read_text(), "a timeline has what another policy evicts")
for options in [("--device", "sim"), ("--sweep", "0.5x:1.0x:2")]:
    status, _, err = run(network(), "--timeline", str(timeline), *options)
    expect(status == 2 and "--timeline" in err, f"{options}: no timeline is made of that: {err}")
(folder / "link.csv").symlink_to(folder / "trace.csv")
for name in ("trace.csv", "link.csv"):
    status, _, err = run(network(), "--timeline", str(folder / name))
    expect(status == 2 and name in err and (folder / "trace.csv").read_text() == network(), f"a timeline is not written over the trace: {err}")
status, _, err = run(network(), "--timeline", "/dev/full")
expect(status == 1 and "/dev/full" in err, f"a timeline on a full disk is told: {err}")

with open("/dev/full", "w") as full:
    for options in ([], ["--json"], ["--sweep", "0.5x:1.0x:2", "--csv"], ["--help"], ["--version"]):
        done = subprocess.run([PROGRAM, str(folder / "trace.csv"), *options], stdout=full, stderr=subprocess.PIPE, text=True)
        expect(done.returncode == 1 and "incomplete" in done.stderr, f"{options}: a full disk is told: {done}")
done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True)
expect(done.returncode == 0 and done.stdout.startswith("spillway-replay 0."), f"--version: {done}")

# A sweep prints each row when it is done, so that the reader of a pipe sees it before the program ends.
(folder / "trace.csv").write_text(network(layers=200))
sweeping = subprocess.Popen([PROGRAM, str(folder / "trace.csv"), "--sweep", "0.5x:1.0x:40", "--steps", "50", "--csv"],
                            stdout=subprocess.PIPE, text=True)
first = [sweeping.stdout.readline() for _ in range(2)]
expect(sweeping.poll() is None and first[1].count(",") == first[0].count(","), f"the first row comes before the last: {first}")
sweeping.terminate()
sweeping.wait()
# On a terminal, standard error shows in one line, which is overwritten, which capacity is being replayed.
terminal, standard_error = os.openpty()
done = subprocess.run([PROGRAM, str(folder / "trace.csv"), "--sweep", "0.5x:1.0x:2", "--csv"], stdout=subprocess.PIPE,
                      stderr=standard_error, text=True)
os.close(standard_error)
said = ""
try:
    while part := os.read(terminal, 4096).decode():  # a read may return a part of what was written
        said += part
except OSError:  # on Linux this is the end of the terminal's output
    pass
expect("capacity 1 of 2: " in said and "capacity 2 of 2: " in said and said.endswith("\x1b[K") and "\n" not in said,
       f"a sweep says how far it is: {said!r}")
expect("capacity " not in done.stdout, "and not on standard output")

for options in (["--capacity", "many"], ["--capacity", "-1x"], ["--capacity", "0"], ["--prefetch", "x"],
                ["--sweep", "1x:2x"], ["--sweep", "1x:2x:1"], ["--sweep", "1x:2x:many"], ["--sweep", "x:2x:3"],
                ["--sweep", "1x:2x:3", "--capacity", "1x"], ["--csv"], ["--kernel-scale", "0"],
                ["--eviction", "best"], ["--steps", "0"], ["--scale", "-1"], ["--verify"], ["--unknown"],
                ["--sweep", ""], ["--prefetch", ""], ["--capacity", ""], ["--capacity", "1TiB"], ["--capacity", "1e30x"],
                ["--sweep", "1x:1024GiB:2"], ["--kernel-scale", "2"], ["--link-gbps", "1e-12"], ["--link-gbps", "1e300"], ["--codec-ratio", "1e300"],
                ["--link-gbps", "1e-9", "--codec-ratio", "0.5"], ["--link-gbps", "1e-9", "--steps", "1000000"],
                ["--scale", "nan"], ["--link-gbps", "inf"], ["--kernel-scale", "nan"], ["--capacity", "nanx"]):
    status, out, err = run(small, *options)
    expect(status == 2 and options[0] in err and not out, f"{options}: exit status {status}, {err}")
expect(replay(trace, "--capacity", "1023.9GiB")["completed"], "an arena of less than 1 TiB works")
missing = subprocess.run([PROGRAM, str(folder / "none.csv")], capture_output=True, text=True)
expect(missing.returncode == 2 and "none.csv" in missing.stderr, "a missing file is named")

print("replay:", "failed" if complaints else "all as expected")
sys.exit(bool(complaints))
