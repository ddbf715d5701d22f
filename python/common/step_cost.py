# SPDX-License-Identifier: Apache-2.0
"""Measures what training steps cost the processor, and how much of that is copying for swapping. The examples for
both frameworks have this file, by a link.

Costs are processor times of all threads of the process. The part of the operating system is also counted separately:
a device that maps memory makes the system find, clear and map pages for what is swapped in. The cost of copies is the
number of bytes copied in the step, at the speed of copies in this process. The *rest* is the other time by which a
step got longer, as a share of a step without a limit.
"""
import ctypes
import resource
import time

MIB = 1 << 20
#: Statistics of both modules that count copied bytes. The last one is missing in TensorFlow's, where nothing is moved.
COPIED = ("swap_out_bytes", "swap_in_bytes", "moved_bytes")


class Steps:
    """Calls a function several times, and keeps its results and what each call cost.

    stats  a function that returns the statistics of the module. The growth of these is a part of the cost
    """

    def __init__(self, count, stats):
        self.count, self.stats, self.losses, self.costs = count, stats, [], []
        self.begin()

    def begin(self):
        self._before, self._began = self.stats(), resource.getrusage(resource.RUSAGE_SELF)

    def add(self, loss):
        """Ends a step and begins the next one."""
        used, now = resource.getrusage(resource.RUSAGE_SELF), self.stats()
        system = used.ru_stime - self._began.ru_stime
        seconds = used.ru_utime - self._began.ru_utime + system
        grown = {key: now[key] - before for key, before in self._before.items() if isinstance(before, int)}
        self.costs.append({**grown, "seconds": seconds, "system_seconds": system, "copied_bytes": sum(grown.get(key, 0) for key in COPIED)})
        self.losses.append(loss)
        self.begin()

    def run(self, step):
        self.begin()
        for i in range(self.count):
            self.add(step(i))

    def least(self):
        """Returns the cost of the shortest step, from the third one on. The system's part is the mean of these steps,
        since it is counted in units of some milliseconds.
        """
        costs = self.costs[2:] or self.costs
        return {**min(costs, key=seconds_of), "system_seconds": sum(cost["system_seconds"] for cost in costs) / len(costs)}

    def mean(self, key):
        return sum(cost[key] for cost in self.costs) / len(self.costs)


def seconds_of(cost):
    return cost["seconds"]


def seconds_per_byte():
    """Measures the time of copies of 1 MiB between places that are not in the nearest caches."""
    total, part = 128 * MIB, MIB
    a, b = ctypes.create_string_buffer(total), ctypes.create_string_buffer(total)
    ctypes.memset(b, 1, total)

    def once():
        start = time.process_time()
        for at in range(0, total, part):
            ctypes.memmove(ctypes.addressof(b) + at, ctypes.addressof(a) + at, part)
        return time.process_time() - start
    return min(once() for _ in range(5)) / total


def compare(free, tight, per_byte):
    """Compares a step without a limit and one under a limit: the cost of both, of the copies, of the rest, and how
    much more time the system took, which is a part of the rest.
    """
    copies = tight["copied_bytes"] * per_byte
    return {"free_ms": 1e3 * free["seconds"], "capped_ms": 1e3 * tight["seconds"], "copied_bytes": tight["copied_bytes"],
            "copies_ms": 1e3 * copies, "system": (tight["system_seconds"] - free["system_seconds"]) / free["seconds"],
            "rest": (tight["seconds"] - free["seconds"] - copies) / free["seconds"]}
