# SPDX-License-Identifier: Apache-2.0
"""Fails unless scripts/snapshot-to-pickle.py keeps the contents of a snapshot and writes what PyTorch's viewers expect.

Usage: snapshot_to_pickle_test.py <program that prints a snapshot> <scripts/snapshot-to-pickle.py>
"""
import json
import pathlib
import pickle
import pickletools
import subprocess
import sys
import tempfile

# The opcodes of pickle that the viewer in the browser understands.
KNOWN_OPCODES = set(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST "
    "EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM "
    "SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3".split())

program, script = sys.argv[1:]
printed = subprocess.run([program], check=True, capture_output=True).stdout
with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder, "snapshot.json")
    target = pathlib.Path(folder, "snapshot.pickle")
    source.write_bytes(printed)
    subprocess.run([sys.executable, script, source, target], check=True)
    pickled = target.read_bytes()

snapshot = pickle.loads(pickled)
opcodes = {opcode.name for opcode, _, _ in pickletools.genops(pickled)}
assert opcodes <= KNOWN_OPCODES, opcodes - KNOWN_OPCODES

expected = json.loads(printed)
assert expected["segments"] and len(expected["device_traces"][0]) > 100
for segment in expected["segments"]:
    segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
assert snapshot == expected

for segment in snapshot["segments"]:
    address = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == address
        address += block["size"]
    assert address == segment["address"] + segment["total_size"]
(failure,) = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "oom"]
assert failure["size"] == 768 * 1024 and 0 < failure["device_free"] < 768 * 1024



def refused(*arguments):
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, done
    return done.stderr


# Without arguments the script prints its usage. What it cannot convert is told in one line, and nothing is written.
assert "Usage" in refused()
with tempfile.TemporaryDirectory() as folder:
    source, target = pathlib.Path(folder, "snapshot.json"), pathlib.Path(folder, "snapshot.pickle")
    told = [refused(source, target)]
    for text in (b"{", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"segments": [1]}', b'{"segments": [{}]}'):
        source.write_bytes(text)
        told.append(refused(source, target))
        assert not target.exists(), text
    source.write_bytes(printed)
    told += [refused(source, folder), refused(source, "/dev/full")]
named = [source] * 8 + [folder, "/dev/full"]
for line, name in zip(told, named):
    assert line.startswith(f"snapshot-to-pickle.py: {name}") and line.count("\n") == 1, line
assert len(told) == len(named)
