# SPDX-License-Identifier: Apache-2.0
"""Will a training program fit under a memory limit, and what will a step cost then?

    python -m spillway_torch.plan [OPTIONS] train.py [ITS ARGUMENTS]
    python -m spillway_torch.plan snapshot.pickle [--device N]

The first form runs the program until its optimizer has made two steps, records the second at full memory, without
limit or swapping, and prints what the step would cost under limits and over links. --fake does so with tensors that have no
bytes, for programs that do not fit here; times are estimated then.

The second reads a memory snapshot of torch.cuda.memory._dump_snapshot, and says in how much memory the program fits if
blocks can be moved. It does not say what operations use, so nothing can be said of times. No class of the pickle is loaded.
"""
# The function `plan` is in the package itself; this module is only run as a program.
import argparse
import collections
import contextlib
import math
import os
import pathlib
import runpy
import sys
import weakref


class Recorded(BaseException):
    """Ends the program after its step has been recorded."""


class StepRecorder:
    """Records the step that ends with the `wanted`th step of an optimizer. If there are several optimizers, the first
    one counts, as long as it lives; steps of the others are parts of a step.
    """

    def __init__(self, plan, wanted):
        self.plan, self.wanted, self.steps = plan, wanted, 0
        self.is_done = False
        self._leader = None

    def after_step(self, optimizer, *_):
        if self.is_done:  # the program has caught `Recorded` and goes on
            raise Recorded
        leader = self._leader() if self._leader is not None else None
        if leader is None:
            self._leader, leader = weakref.ref(optimizer), optimizer
        if leader is not optimizer:
            return
        self.steps += 1
        if self.steps == self.wanted - 1:
            self.plan.__enter__()
        elif self.steps == self.wanted:
            self.plan.__exit__(None, None, None)
            self.is_done = True
            raise Recorded


def page(model, *_, **__):
    """Does to a model what `page` of the package does, except that nothing leaves."""
    return model.eval().requires_grad_(False)


def chunk(model, *_, **__):
    """The same for `chunk`. Nothing counts as kept."""
    model.spillway_resident_bytes = 0
    return page(model)


def run(arguments, plan):
    """Runs the program as if it had been started directly, until its step has been recorded."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import spillway_torch
    # The step is recorded at full memory, without swapping. Calls that return numbers must return some.
    for name in ("install", "set_enabled_lms", "set_limit_lms", "set_codec", "share"):
        setattr(spillway_torch, name, lambda *_, **__: None)
    for name in ("park", "wake", "reclaim_inactive", "empty_cache"):
        setattr(spillway_torch, name, lambda *_, **__: 0)
    spillway_torch.page, spillway_torch.chunk = page, chunk
    spillway_torch.memory_stats = lambda *_, **__: collections.defaultdict(int)
    steps = StepRecorder(plan, arguments.step)
    register_optimizer_step_post_hook(steps.after_step)
    sys.argv = [arguments.program, *arguments.arguments]
    sys.path.insert(0, str(pathlib.Path(arguments.program).resolve().parent))
    with contextlib.ExitStack() as context:
        if arguments.fake:
            context.enter_context(fake_tensors())
        if steps.wanted == 1:
            plan.__enter__()
        try:
            runpy.run_path(arguments.program, run_name="__main__")
        except Recorded:
            pass
        except SystemExit as ended:
            if ended.code and not steps.is_done:
                raise
        except Exception:
            if not steps.is_done:  # otherwise the error may result from the program catching `Recorded`
                raise
    if steps.is_done:
        return
    sys.exit(f"spillway_torch.plan: {arguments.program} ended after {steps.steps} steps of its optimizer, and {steps.wanted} are "
             "needed (--step). Of a program without one, put `with spillway_torch.plan():` around a step")


@contextlib.contextmanager
def fake_tensors():
    """Makes all new tensors fake, and lets modules of such tensors be converted. PyTorch refuses that: it would swap
    a parameter with its successor, which is impossible since a fake parameter has a weak reference from the start.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.weak import WeakIdKeyDictionary
    successors = WeakIdKeyDictionary()  # so that modules which share a parameter still do

    def apply(module, convert, recurse=True):
        for child in module.children() if recurse else ():
            child._apply(convert)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in successors:
                    with torch.no_grad():
                        made = convert(tensor)
                    if made is not tensor and isinstance(tensor, torch.nn.Parameter):
                        made = torch.nn.Parameter(made, tensor.requires_grad)
                    if made is not tensor:
                        successors[tensor] = made
                table[name] = successors.get(tensor, tensor)
        return module

    original, torch.nn.Module._apply = torch.nn.Module._apply, apply
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.nn.Module._apply = original


def read_snapshot(arguments):
    import tempfile

    from . import _plan_module, _snapshot
    from ._bytes import text_of
    from ._plan import smallest
    device, lives, reserved = _snapshot.analyse(arguments.program, arguments.device)
    if not lives:
        sys.exit(f"spillway_torch.plan: the snapshot's history of device {device} has no allocation")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.csv")
        with open(path, "w", encoding="utf-8") as file:
            _snapshot.write(lives, file)
        replay = _plan_module.Replay(path)

    def fits(limit):
        return replay.run(limit, steps=1, swapping=False)["completed"]
    limit = smallest(fits, replay.peak_bytes, max(reserved, 2 * replay.peak_bytes))
    result = replay.run(limit, steps=1, swapping=False)
    print(f"Snapshot of device {device}: {len(lives)} buffers, at most {text_of(replay.peak_bytes)} alive at once; PyTorch has reserved "
          f"{text_of(reserved)} at the end\n"
          f"Fits with compaction at {text_of(limit)}, {limit / replay.peak_bytes:.3f} of that peak, where {text_of(result['moved_bytes'])} "
          "are moved\n"
          "What operations use is not in a snapshot, so there is nothing to say of swapping and of times")


def positive_number(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return number


def positive_numbers(text):
    return [positive_number(part) for part in text.split(",")]


def limits(text):
    from ._bytes import number_of_bytes
    try:
        numbers = [number_of_bytes(part, "plan", "limits") for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from None
    if 0 in numbers:
        raise argparse.ArgumentTypeError("a limit of 0 bytes")
    return numbers


# Options for programs, and not for snapshots.
OF_PROGRAMS = ("limits", "links", "no_overlap", "step", "picture", "trace", "fake", "tflops", "memory_gbps")


def options_of_snapshot(parser, arguments):
    """Also reads the options after the name of the snapshot, which argparse leaves to a program."""
    snapshot, behind = arguments.program, arguments.arguments
    parser.parse_args([*behind, snapshot], arguments)  # options that are not given again keep their values
    if arguments.program != snapshot or arguments.arguments:
        parser.error(f"a snapshot has no arguments: {' '.join(behind)}")
    for name in OF_PROGRAMS:
        if getattr(arguments, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for programs, and {snapshot} is a snapshot")


def main():
    parser = argparse.ArgumentParser(prog="python -m spillway_torch.plan", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=limits,
                        help="such as 8GiB,4GiB; by default parts of the peak and the smallest that trains")
    parser.add_argument("--links", type=positive_numbers,
                        help="bandwidths of the host link, GB/s each way; by default 12,25")
    parser.add_argument("--no-overlap", action="store_true", help="copies take the time of what computes, as on the CPU device")
    parser.add_argument("--step", type=int, default=2, help="which step of the optimizer ends the recorded one; by default 2")
    parser.add_argument("--picture", metavar="FILE.svg", help="draw step time and bytes against the limit")
    parser.add_argument("--trace", metavar="FILE.csv", help="write the step as a trace for spillway-replay")
    parser.add_argument("--fake", action="store_true", help="run the program on tensors without bytes")
    parser.add_argument("--tflops", type=positive_number,
                        help="estimate times for a device of this many TFLOP/s; with --fake 100")
    parser.add_argument("--memory-gbps", type=positive_number,
                        help="and with this bandwidth of its memory, GB/s; 1500 unless given")
    parser.add_argument("--device", type=int, help="of a snapshot; the one with the longest history unless given")
    parser.add_argument("program", help="a Python program, or a memory snapshot (.pickle, .pkl)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    arguments = parser.parse_args()
    if arguments.step < 1:
        parser.error("--step is 1 or more")
    if not os.path.exists(arguments.program):
        parser.error(f"{arguments.program}: no such file")
    if arguments.program.endswith((".pickle", ".pkl")):
        options_of_snapshot(parser, arguments)
        read_snapshot(arguments)
        return
    if arguments.device is not None:
        parser.error(f"--device is for snapshots, and {arguments.program} is a program")
    import spillway_torch
    tflops = arguments.tflops or (100.0 if arguments.fake or arguments.memory_gbps else None)
    options = {"limits": arguments.limits, "links": arguments.links,
               "overlap": not arguments.no_overlap, "picture": arguments.picture, "tflops": tflops,
               "memory_gbps": arguments.memory_gbps}
    plan = spillway_torch.plan(**{name: value for name, value in options.items() if value is not None})
    plan.title = f"One step of {os.path.basename(arguments.program)}"
    run(arguments, plan)
    if arguments.trace:
        plan.write_trace(arguments.trace)


if __name__ == "__main__":
    main()
