# SPDX-License-Identifier: Apache-2.0
"""Fails unless scripts/snapshot-to-trace.py writes the lifetimes in a snapshot, and loads no class from it.

Usage: snapshot_to_trace_test.py <scripts/snapshot-to-trace.py>
"""
import csv
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

folder = tempfile.TemporaryDirectory()
marker = pathlib.Path(folder.name, "was-run")


class Harm:
    def __reduce__(self):
        return os.mkdir, (str(marker),)


def run(snapshot, *options):
    path = pathlib.Path(folder.name, "snapshot.pickle")
    path.write_bytes(snapshot if isinstance(snapshot, bytes) else pickle.dumps(snapshot))
    return subprocess.run([sys.executable, sys.argv[1], path, *options], capture_output=True, text=True)


def event(action, addr, size):
    return {"action": action, "addr": addr, "size": size, "stream": 0}


def block(state, size):
    return {"state": state, "size": size, "requested_size": size - 12}


history = [
    event("segment_alloc", 4096, 2048),
    event("alloc", 5120, 400),            # time 2
    event("free_requested", 4096, 1000),  # allocated before the history begins
    event("free_completed", 4096, 1000),  # time 4
    event("alloc", 4096, 600),            # time 5, at the same address
    event("free_requested", 4096, 600),
    event("free_completed", 4096, 600),   # time 7
    event("alloc", 4096, 700),            # time 8, alive at the end
]
snapshot = {
    "segments": [
        {"device": 1, "address": 4096, "total_size": 2048,
         "blocks": [block("active_allocated", 1024), block("active_allocated", 512), block("inactive", 512)]},
        {"device": 1, "address": 8192, "total_size": 512, "blocks": [block("active_allocated", 512)]},
        {"device": 0, "address": 4096, "total_size": 512, "blocks": [block("active_allocated", 512)]},
    ],
    "device_traces": [[], history],
}

made = run(snapshot)
assert made.returncode == 0, made.stderr
header, *rows = csv.reader(made.stdout.splitlines())
assert header == ["id", "lower", "upper", "size"]
assert [tuple(map(int, row[1:])) for row in rows] == [
    (0, 4, 1000), (0, 9, 500), (2, 9, 400), (5, 7, 600), (8, 9, 700)], rows
assert "5 buffers, at most 0.0 MiB" in made.stderr and "device 1" in made.stderr

assert "no history of device 0" in run(snapshot, "--device", "0").stderr
assert run(snapshot, "--device", "7").returncode != 0
lists_of_others = [{"segments": [], "device_traces": traces} for traces in (5, None, [[1, 2]], [[{"action": "alloc", "addr": 1}]])]
lists_of_others.append({"segments": [{"address": 1}], "device_traces": [history]})
for wrong in [pickle.dumps([Harm()]), b"not a pickle", pickle.dumps([1]), b"", *lists_of_others]:
    refused = run(wrong)
    assert refused.returncode != 0 and "is no snapshot" in refused.stderr, refused
    assert "Traceback" not in refused.stderr
assert not marker.exists()
folder.cleanup()
