#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a trace of lifetimes for spillway-replay from a memory snapshot of PyTorch.

usage: snapshot-to-trace.py SNAPSHOT.pickle [--device N] > trace.csv

The snapshot is a file written by torch.cuda.memory._dump_snapshot, with recorded history. To see how much memory the program
needs if blocks can be moved, and how many bytes are then moved, run `spillway-replay trace.csv --no-swap --capacity 1.0x`.
A buffer lives from its allocation until its memory may be reused. If the history does not contain the allocation, the buffer
lives from the first event on. The trace has no uses or times of operations, since a snapshot does not say what they use.

No class of the pickle is loaded, so that a file from an untrusted source can do no harm. `python -m spillway_torch.plan
SNAPSHOT.pickle` uses this code.
"""
import argparse
import collections
import csv
import pathlib
import pickle
import sys


NAME = pathlib.Path(sys.argv[0]).name


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it holds an object of {module}.{name}; snapshots are made of plain lists and numbers")


def read(path):
    try:
        with open(path, "rb") as file:
            snapshot = PlainUnpickler(file).load()
    except OSError as error:
        sys.exit(f"{NAME}: {path}: {error.strerror}")
    except Exception as error:  # a broken pickle can raise nearly any exception
        sys.exit(f"{NAME}: {path} is no snapshot: {error}")
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        sys.exit(f"{NAME}: {path} is no snapshot: it has no segments and device_traces")
    return snapshot


def choose_device(snapshot, wanted):
    lengths = [len(trace) for trace in snapshot["device_traces"]]
    if wanted is None:
        wanted = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    if not 0 <= wanted < len(lengths) or lengths[wanted] == 0:
        sys.exit(f"{NAME}: the snapshot has no history of device {wanted}; record one with "
                 "torch.cuda.memory._record_memory_history()")
    return wanted


def blocks_in_use(snapshot, device):
    """Yields address and size of each buffer that is allocated at the end."""
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment.get("device", 0) == device and block["state"].startswith("active"):
                yield block.get("address", address), block.get("requested_size", block["size"])
            address += block["size"]


def lifetimes(snapshot, device):
    """Yields begin, end and size of each buffer. The time of an event is its number in the history, from 1."""
    events = snapshot["device_traces"][device]
    begun = {}
    for time, event in enumerate(events, 1):
        if event["action"] == "alloc":
            begun[event["addr"]] = (time, event["size"])
        elif event["action"] == "free_completed":
            begin, size = begun.pop(event["addr"], (0, event["size"]))
            yield begin, time, size
    end = len(events) + 1
    for address, size in blocks_in_use(snapshot, device):
        begin, size = begun.pop(address, (0, size))
        yield begin, end, size
    for begin, size in begun.values():  # freed by the program, but still in use on a stream at the end
        yield begin, end, size


def peak(lives):
    changes = collections.Counter()
    for begin, end, size in lives:
        changes[begin] += size
        changes[end] -= size
    live = most = 0
    for time in sorted(changes):
        live += changes[time]
        most = max(most, live)
    return most


def reserved_bytes(snapshot, device):
    return sum(segment["total_size"] for segment in snapshot["segments"] if segment.get("device", 0) == device)


def analyse(path, wanted):
    """Returns the index of the device, its buffers as `lifetimes` yields them, and the bytes that PyTorch has reserved there.
    Ends the program with a message if the file is no snapshot or has no history of the wanted device.
    """
    snapshot = read(path)
    try:
        device = choose_device(snapshot, wanted)
        lives = sorted(life for life in lifetimes(snapshot, device) if life[2] > 0)
        return device, lives, reserved_bytes(snapshot, device)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        sys.exit(f"{NAME}: {path} is no snapshot: its lists are not those of PyTorch ({type(error).__name__}: {error})")


def write(lives, file):
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["id", "lower", "upper", "size"])
    rows.writerows((number, *life) for number, life in enumerate(lives))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("snapshot", help="a file written by torch.cuda.memory._dump_snapshot")
    parser.add_argument("--device", type=int, help="index of the device; by default the one with the longest history")
    arguments = parser.parse_args()
    device, lives, reserved = analyse(arguments.snapshot, arguments.device)
    write(lives, sys.stdout)
    print(f"device {device}: {len(lives)} buffers, at most {peak(lives) / 2**20:.1f} MiB alive at once; PyTorch has "
          f"reserved {reserved / 2**20:.1f} MiB at the end", file=sys.stderr)


if __name__ == "__main__":
    main()
