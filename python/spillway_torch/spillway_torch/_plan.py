# SPDX-License-Identifier: Apache-2.0
"""Answers whether a program fits under a limit and what it costs then, from one recorded step that is replayed on a
virtual clock.
"""
import collections
import contextlib
import os
import tempfile
import threading

import torch

from . import _picture, _plan_module as _native
from ._bytes import text_of
from ._record import ROLES, Recorder, Recording

FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_MOST_BOUNDED = 20_000  # operations: computing the bound takes time in the square of their number


def _bandwidths(links):
    try:
        numbers = tuple(float(link) for link in links)
    except (TypeError, ValueError):  # no collection, or not of numbers
        numbers = ()
    if not numbers or not all(1e-9 <= number <= 1e9 for number in numbers):
        raise ValueError(f"spillway_torch.plan(links={links!r}): one or more bandwidths, in GB/s from 1e-9 to 1e9")
    return numbers


_lock = threading.Lock()
_eager = contextlib.ExitStack()
_eager_plans = 0  # contexts that need `_eager`


@contextlib.contextmanager
def _running_eagerly():
    """Makes compiled functions run as they are written. PyTorch's setting for this is one of the whole process, and
    contexts of several threads need not end in the order in which they began: the last one resets it.
    """
    global _eager_plans
    with _lock:
        if _eager_plans == 0:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _eager_plans += 1
    try:
        yield
    finally:
        with _lock:
            _eager_plans -= 1
            if _eager_plans == 0:
                _eager.close()


class Plan:
    """The context that `plan` returns. It records the step around which it is put, best not the first, and then says
    what the step would cost under limits.

    After the step it has the members `peak_bytes`, `smallest_limit` and `rows`, and the functions `table()`,
    `write_picture(path)` and `write_trace(path)`.
    """

    def __init__(self, limits, links, overlap, estimate, least_bytes, out, picture):
        self.title = "One step"
        self._limits, self._links, self._overlap = limits, _bandwidths(links), overlap
        self._out, self._picture = out, picture
        self._recorder = Recorder(least_bytes, estimate)
        self._context = None
        self._rows = None

    def __enter__(self):
        import spillway_torch
        if spillway_torch.get_enabled_lms():
            raise RuntimeError("spillway_torch.plan() records a step at full memory: call set_enabled_lms(False) first, or "
                               "leave install() and set_enabled_lms() out")
        if self._context is not None:
            raise RuntimeError("spillway_torch.plan() records one step: call it again for another one")
        with contextlib.ExitStack() as context:
            context.enter_context(_running_eagerly())
            context.enter_context(self._recorder)
            self._context = context.pop_all()
        return self

    @property
    def clock(self):
        """What tells the time in nanoseconds. To be set within the context: `time.thread_time_ns` for the processor's."""
        return self._recorder.clock

    @clock.setter
    def clock(self, clock):
        self._recorder.clock = clock

    def __exit__(self, kind, error, trace):
        self._context.close()
        if error is None:
            self._analyse()
            if self._out is not None:
                print(self.table(), file=self._out)
            if self._picture is not None:
                self.write_picture(self._picture)

    def _analyse(self):
        self.recording = Recording(self._recorder)
        self._recorder = None
        if not any(operation.buffers for operation in self.recording.operations):
            raise RuntimeError("spillway_torch.plan(): no operation was recorded. Put the context around a whole step")
        self.peak_bytes = self.recording.peak_bytes
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "step.csv")
            self.write_trace(path)
            self._replay = _native.Replay(path)
        self.smallest_limit = smallest(
            lambda limit: self._replay.run(limit, self._links[-1], steps=2)["completed"],
            self._replay.largest_operation_bytes, max(self.peak_bytes, self._replay.peak_bytes))

    # Results.

    @property
    def rows(self):
        """A dictionary for each link and limit, with limit and in_bytes, out_bytes (bytes), link_gbps (GB/s),
        completed (whether it fits), step_ns, least_ns (nanoseconds) and left_bytes (bytes that leave the device, by
        role).
        """
        if self._rows is None:
            self._rows = self.sweep(self._limits_to_try(), self._links)
        return self._rows

    def sweep(self, limits, links):
        """Returns rows as `rows` has them, for other limits (bytes) and links (GB/s)."""
        return [self._row(limit, link) for link in _bandwidths(links) for limit in limits]

    def _limits_to_try(self):
        limits = self._limits
        if limits is None:
            limits = [int(factor * self.peak_bytes) for factor in FACTORS]
            limits = [limit for limit in limits if limit > self.smallest_limit] + [self.smallest_limit]
        return sorted({int(limit) for limit in limits}, reverse=True)

    def _row(self, limit, link):
        result = self._replay.run(limit, link)
        row = {"limit": limit, "capacity_factor": limit / self.peak_bytes, "link_gbps": link, **result}
        if not row["completed"]:
            return row
        copied = row["in_bytes"] + row["out_bytes"]
        compute = self._replay.compute_ns
        if self._overlap:
            bounded = self._replay.operations <= _MOST_BOUNDED
            row["least_ns"] = self._replay.least_ns(limit, link) if bounded else float(compute)
        else:  # the processor copies
            row["step_ns"], row["least_ns"] = compute + copied / link, float(compute)
        roles = {b.id: b.role for b in self.recording.buffers}
        left = collections.Counter()
        for number, nbytes in result["left_bytes"].items():
            left[roles.get(number, "inside operations")] += nbytes
        return row | {"left_bytes": dict(left)}

    def holders(self):
        """Returns what is in memory at the peak: for each role the bytes and the number of buffers."""
        held = {role: [0, 0] for role in ROLES}
        for buffer in self.recording.at_peak():
            held[buffer.role][0] += buffer.rounded
            held[buffer.role][1] += 1
        if self.recording.peak_scratch:
            held["inside operations"] = [self.recording.peak_scratch, 1]
        return {role: tuple(counts) for role, counts in held.items() if counts[1]}

    def table(self, largest=8):
        """Returns the result as text, with the `largest` largest groups of buffers at the peak."""
        recording = self.recording
        times = (str(recording.estimate) if recording.estimate else "measured on this processor" if recording.device == "cpu"
                 else "measured by the host's clock")
        lines = [
            f"One step on {recording.device}{' (fake tensors)' if recording.is_fake else ''}: {len(recording.operations)} operations, "
            f"{recording.compute_ns / 1e6:.1f} ms, {times}",
            f"Peak: {text_of(self.peak_bytes)}, in operation {recording.peak_at} ({recording.peak_operation}); held by"]
        if recording.is_fake:
            lines.append("  (what operations allocate for themselves is not known of fake tensors)")
        lines += [f"  {text_of(nbytes):>12}  {role}, {count}" for role, (nbytes, count) in self.holders().items()]
        lines.append("The largest of them:")
        groups = collections.Counter()
        for buffer in recording.at_peak():
            groups[buffer.text, buffer.role, buffer.maker] += buffer.rounded
        counts = collections.Counter((b.text, b.role, b.maker) for b in recording.at_peak())
        for (text, role, maker), nbytes in groups.most_common(largest):
            many = f"{counts[text, role, maker]} x " if counts[text, role, maker] > 1 else ""
            lines.append(f"  {text_of(nbytes):>12}  {many}{text}, {role}: {maker}")
        lines.append(f"The smallest limit that trains: {text_of(self.smallest_limit)}, {self.smallest_limit / self.peak_bytes:.2f} of the "
                     f"peak; one operation needs {text_of(self._replay.largest_operation_bytes)}")
        if not self._overlap:
            lines.append("Copies take the processor's time: nothing overlaps")
        lines.append("")
        lines.append(f"{'GB/s':>6} {'limit':>12} {'of peak':>8} {'step ms':>10} {'least ms':>10} {'over least':>10} {'in':>12} "
                     f"{'out':>12}  what leaves")
        for row in self.rows:
            start = f"{row['link_gbps']:>6g} {text_of(row['limit']):>12} {row['capacity_factor']:>8.2f} "
            if not row["completed"]:
                lines.append(start + "does not fit")
                continue
            leaves = ", ".join(f"{role} {text_of(row['left_bytes'][role])}" for role in ROLES if role in row["left_bytes"])
            lines.append(start + f"{row['step_ns'] / 1e6:>10.1f} {row['least_ns'] / 1e6:>10.1f} {row['step_ns'] / max(row['least_ns'], 1):>10.3f} "
                         f"{text_of(row['in_bytes']):>12} {text_of(row['out_bytes']):>12}  {leaves or '-'}")
        return "\n".join(lines)

    def write_trace(self, path):
        """Writes the recorded accesses into a file, for spillway-replay."""
        with open(path, "w", encoding="utf-8") as file:
            self.recording.write(file)

    def write_picture(self, path):
        """Draws the times of the step under all limits into an SVG file."""
        rows = [{"link_gbps": row["link_gbps"], "capacity_bytes": row["limit"], "capacity_factor": row["capacity_factor"],
                 "completed": row["completed"], "step_ns": row.get("step_ns"), "least_ns": row.get("least_ns"),
                 "swapped_in_bytes": row.get("in_bytes"), "swapped_out_bytes": row.get("out_bytes")} for row in self.rows]
        rows += [{"link_gbps": link, "capacity_factor": self.smallest_limit / self.peak_bytes, "completed": False} for link in self._links]
        with open(path, "w", encoding="utf-8") as file:
            file.write(_picture.draw(rows, self.title))


def smallest(fits, low, high):
    """Returns the smallest number of bytes for which `fits` is true, to one per cent. `high` is assumed to fit."""
    if fits(low):
        return low
    while high - low > max(low // 100, _native.granule_bytes):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
