# SPDX-License-Identifier: Apache-2.0
"""`spillway_torch.plan`: its predictions agree with what the module does, and its program prints what is expected."""
import json
import os
import pathlib
import pickle
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import spillway_torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples" / "pytorch"

TRAIN = f"""
import json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
import nets, spillway_torch
torch.set_num_threads(1)
"""

COMPARE = TRAIN + """
spillway_torch.install(device="cpu", limit="1GiB")
step = nets.training_step(NET, FOREACH)
step()
with spillway_torch.plan(out=None) as plan:
    step()
spillway_torch.set_enabled_lms(True)
step()
spillway_torch.reset_peak_memory_stats()
before = spillway_torch.memory_stats()
step()
after = spillway_torch.memory_stats()
result = {"peak": [plan.peak_bytes, after["tensor_bytes.all.peak"]], "bytes": {}}
used = sum(bool(operation.buffers) for operation in plan.recording.operations)
result["frames"] = [used, after["frames"] - before["frames"]]
for part in (0.7, 0.5, 0.3):
    limit = int(part * plan.peak_bytes)
    spillway_torch.set_limit_lms(limit)
    for _ in range(4):
        before = spillway_torch.memory_stats()
        step()
        after = spillway_torch.memory_stats()
    (row,) = plan.sweep([limit], [8.0])
    result["bytes"][part] = [row["in_bytes"], after["swap_in_bytes"] - before["swap_in_bytes"],
                             row["out_bytes"], after["swap_out_bytes"] - before["swap_out_bytes"]]
spillway_torch.set_limit_lms(int(1.05 * plan.smallest_limit))
step()
step()
result["smallest"] = plan.smallest_limit / plan.peak_bytes
print(json.dumps(result))
"""


@pytest.mark.parametrize("net, foreach", [("'conv', 4, 32", None), ("'mlp', 512, None", True), ("'transformer', 4, None", None)])
def test_what_is_predicted_is_what_happens(script, net, foreach):
    seen = json.loads(script(COMPARE.replace("NET", net).replace("FOREACH", str(foreach))))
    predicted, real = seen["peak"]
    assert predicted == pytest.approx(real, rel=0.02)
    if not foreach:  # with foreach, the module splits lists of tensors only if they do not fit
        used, frames = seen["frames"]
        assert used == pytest.approx(frames, rel=0.02)
    for part, (in_bytes, real_in, out_bytes, real_out) in seen["bytes"].items():  # copies ahead of need depend on times
        assert in_bytes == pytest.approx(real_in, rel=0.25), part
        assert out_bytes == pytest.approx(real_out, rel=0.4), part
    assert seen["smallest"] < 0.2


def test_the_benchmark_of_plans_compares_what_is_planned_with_what_is_trained():
    """Checks no times, since other programs use the processor, too. The benchmark itself compares them."""
    done = subprocess.run([sys.executable, EXAMPLES / "bench_plan.py", "mlp", "--caps", "0.5", "--rounds", "1", "--steps", "4", "--json"],
                          capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    (planned,), (_, trained) = seen["planned"]["rows"], seen["trained"]["rows"]
    assert seen["planned"]["peak"] == pytest.approx(seen["trained"]["peak"], rel=0.02)
    assert planned["step_ns"] > 0 and trained["ms"] > 0


def test_the_table_names_limits_links_and_who_holds_the_peak(script, tmp_path):
    printed = script(TRAIN + """
step = nets.training_step("mlp", 256, None)
step()
with spillway_torch.plan(limits=["6MiB", "64KiB"], links=[5, 10], picture="plan.svg") as plan:
    step()
plan.write_trace("plan.csv")
roles = plan.holders()
assert sum(nbytes for nbytes, _ in roles.values()) == plan.peak_bytes, roles
assert roles["weights"][1] == 15 and roles["optimizer state"][1] == 30, roles
""")
    lines = printed.splitlines()
    assert lines[0].startswith("One step on cpu: ") and "measured" in lines[0]
    assert [line.split()[0] for line in lines if line.endswith("does not fit")] == ["5", "10"]
    assert sum("activations" in line and "MiB" in line for line in lines[lines.index(""):]) == 2
    ElementTree.parse(tmp_path / "plan.svg")
    header, *rows = (tmp_path / "plan.csv").read_text().splitlines()
    assert header == "step,id,size,weight,kernel_ns" and len(rows) > 100


def test_tensors_before_the_step_that_it_makes_anew_do_not_live_throughout(script):
    """Gradients and batches of one step are freed before those of the next step are made."""
    script(TRAIN + """
step = nets.training_step("mlp", 64, None)
step()
with spillway_torch.plan(out=None) as plan:
    step()
weights = [b for b in plan.recording.buffers if b.weight]
assert {b.role for b in weights} == {"weights", "optimizer state", "others before the step"}, {b.role for b in weights}
gradients = [b for b in plan.recording.buffers if b.role == "gradients" and b.born >= 0]
assert len(gradients) == 15 and not any(b.weight for b in gradients)
""")


def test_a_step_is_recorded_though_a_class_of_tensors_refuses_to_be_asked(script):
    out = script("""
import torch, spillway_torch
class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.exp:
            raise ValueError("not to be asked")
        return super().__torch_function__(function, types, args, kwargs or {})
lazy = torch.nn.LazyLinear(3)
x = torch.ones(1 << 16).as_subclass(Refusing)
with spillway_torch.plan(out=None) as plan:
    y = x.exp()
print([operation.name for operation in plan.recording.operations], plan.peak_bytes)
""")
    assert out.split("]")[0] == "['exp'" and int(out.split("]")[1]) == 2 << 18


def test_a_step_is_recorded_though_a_constructor_has_failed(script):
    """What it has left behind is alive as long as somebody keeps the error."""
    assert script("""
import torch, spillway_torch
class Module(torch.nn.Module):
    def __init__(self):
        raise ValueError("not yet")
class Optimizer(torch.optim.SGD):
    __init__ = Module.__init__
errors = []
for kind in Module, Optimizer:
    try:
        kind()
    except ValueError as error:
        errors.append(error)
with spillway_torch.plan(out=None) as plan:
    torch.ones(1 << 16).exp()
print(plan.peak_bytes)
""").split() == [str(1 << 19)]


def test_steps_of_several_threads_are_recorded_at_the_same_time(script):
    """In whatever order they end, functions are compiled again afterwards."""
    assert script("""
import threading, torch, spillway_torch
calls, plans = [], []
@torch.compile(backend=lambda graph, _: calls.append(1) or graph)
def double(x):
    return 2 * x
x = torch.ones(1 << 16)
began, both, one = threading.Event(), threading.Barrier(2), threading.Event()
def record(is_first):
    if not is_first:
        began.wait()
    with spillway_torch.plan(out=None) as plan:
        began.set()
        both.wait()
        double(x)
        if not is_first:
            one.wait()
    one.set()
    plans.append(plan.peak_bytes)
threads = [threading.Thread(target=record, args=(is_first,)) for is_first in (True, False)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(calls), *plans)
double(x)
print(len(calls))
""").split() == ["0", str(1 << 19), str(1 << 19), "1"]


def test_a_context_that_cannot_be_entered_changes_nothing(script):
    """Neither how compiled functions run, nor what a dispatch mode sees."""
    out = script("""
import torch, spillway_torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes
calls = []
@torch.compile(backend=lambda graph, _: calls.append(1) or graph)
def double(x):
    return 2 * x
x = torch.ones(1 << 16)
plan = spillway_torch.plan(out=None)
with plan:
    double(x)
before = len(calls)
try:
    with plan:
        pass
except RuntimeError as error:
    print("records one step" in str(error))
recorder = spillway_torch.plan(out=None)
recorder._recorder._find_what_is_there = lambda: 1 / 0
try:
    with recorder:
        pass
except ZeroDivisionError:
    print(modes() == [])
double(x)
print(before, len(calls), plan.peak_bytes)
""")
    assert out.split() == ["True", "True", "0", "1", str(1 << 19)]


def test_a_step_cannot_be_recorded_while_tensors_may_leave(script):
    script("""
import torch, spillway_torch
spillway_torch.install(device="cpu", limit="1GiB")
spillway_torch.set_enabled_lms(True)
try:
    with spillway_torch.plan():
        pass
except RuntimeError as error:
    assert "set_enabled_lms(False)" in str(error)
else:
    raise SystemExit("nothing was raised")
""")


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "spillway_torch.plan", *map(str, arguments)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def peak_of(printed):
    return float(printed.split("Peak: ")[1].split()[0])


def test_a_program_is_recorded_on_tensors_with_and_without_bytes(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAIN + """
spillway_torch.install(device="cpu", limit="1MiB")  # too little: a plan is made at full memory
spillway_torch.set_enabled_lms(True)
assert sys.argv[1:] == ["--batch", "512"], sys.argv
step = nets.training_step("mlp", int(sys.argv[2]), None)
for i in range(5):
    step()
    print("step", i, flush=True)
raise SystemExit("the program ran to its end")
""")
    real, fake = (run(*options, "--picture", tmp_path / "plan.svg", program, "--batch", 512) for options in ([], ["--fake"]))
    assert real.returncode == 0 and "step 0" in real.stdout and "step 1\n" not in real.stdout, real.stderr
    assert fake.returncode == 0 and "estimated" in fake.stdout.splitlines()[1], fake.stderr
    assert peak_of(fake.stdout) == pytest.approx(peak_of(real.stdout), rel=0.02)
    ElementTree.parse(tmp_path / "plan.svg")


def test_a_program_without_steps_is_told_what_to_do(tmp_path):
    program = tmp_path / "none.py"
    program.write_text("import torch\ntorch.ones(10)\n")
    done = run(program)
    assert done.returncode == 1 and "ended after 0 steps" in done.stderr and "with spillway_torch.plan()" in done.stderr


SMALL = """
import sys, torch, spillway_torch
def make(layers):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(layers)])
    return model, torch.optim.SGD(model.parameters(), 0.1)
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(16, 64)).square().mean().backward()
    optimizer.step()
model, optimizer = make(4)
"""


@pytest.mark.parametrize("ending, code, message", [
    ("sys.exit()", 1, "ended after 1 steps"), ("sys.exit('my own')", 1, "my own"), ("sys.exit(3)", 3, "")])
def test_a_program_that_exits_too_early_is_told_of_it_unless_it_fails_by_itself(tmp_path, ending, code, message):
    program = tmp_path / "early.py"
    program.write_text(SMALL + f"step(model, optimizer)\n{ending}\n")
    done = run(program)
    assert done.returncode == code and message in done.stderr and ("ended after" in done.stderr) == ("ended after" in message)


def test_a_program_may_catch_what_ends_it_and_read_counts(tmp_path):
    program = tmp_path / "swallow.py"
    program.write_text(SMALL + """
spillway_torch.install(limit="64MiB")
for i in range(4):
    try:
        step(model, optimizer)
    except:
        print("went on", i)
    assert spillway_torch.memory_stats()["tensor_bytes.all.peak"] == 0
raise RuntimeError("because a step failed")
""")
    done = run("--trace", tmp_path / "step.csv", program)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("Peak: ") == 1 and "went on 3" in done.stdout and (tmp_path / "step.csv").exists()


def test_a_program_may_call_all_functions_of_the_module(tmp_path):
    program = tmp_path / "calls.py"
    program.write_text(SMALL + """
spillway_torch.install(limit="64MiB")
spillway_torch.set_enabled_lms(True)
spillway_torch.share("/no/such/folder/table")
spillway_torch.set_limit_lms("32MiB")
spillway_torch.set_size_lms("4KiB")
spillway_torch.set_recompute(True)
spillway_torch.set_codec("lossless")
spillway_torch.set_codec("lossless", for_=model.parameters())
spillway_torch.keep(model)
spillway_torch.unpage(spillway_torch.page(torch.nn.Linear(8, 8)))
assert spillway_torch.chunk(torch.nn.Linear(8, 8), 1 << 20).spillway_resident_bytes == 0
for i in range(4):
    spillway_torch.begin_step()
    with spillway_torch.hold(model):
        step(model, optimizer)
    assert spillway_torch.park() + spillway_torch.wake() + spillway_torch.empty_cache() + spillway_torch.reclaim_inactive() == 0
    assert not spillway_torch.get_enabled_lms() and not spillway_torch.get_recompute() and not spillway_torch.share_members()
    print(spillway_torch.memory_summary())
    spillway_torch.reset_peak_memory_stats()
""")
    done = run("--trace", tmp_path / "step.csv", program)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.count("Peak: ") == 1 and (tmp_path / "step.csv").exists()


def test_the_first_of_several_optimizers_tells_where_a_step_ends(tmp_path):
    program = tmp_path / "two.py"
    program.write_text(SMALL + """
other, its_optimizer = make(8)
for i in range(6):
    step(model, optimizer)
    step(other, its_optimizer)
""")
    done = run("--trace", tmp_path / "step.csv", program)
    assert done.returncode == 0, done.stderr
    roles = [line.split() for line in done.stdout.splitlines() if "  weights, " in line]
    assert [role[-1] for role in roles] == ["12"], done.stdout  # the large weights of both models


def test_a_snapshot_tells_where_the_program_fits_and_runs_nothing(tmp_path):
    def event(action, addr, size):
        return {"action": action, "addr": addr, "size": size, "stream": 0}
    history = [event("alloc", 0, 4096), event("alloc", 4096, 4096), event("free_completed", 0, 4096), event("alloc", 8192, 8192)]
    snapshot = {"segments": [{"device": 0, "address": 0, "total_size": 1 << 16, "blocks": []}], "device_traces": [history]}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert "3 buffers, at most 12.0 KiB" in done.stdout and "Fits with compaction at 12.0 KiB" in done.stdout
    assert run(path, "--device", 3).returncode == 1

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was-run"),)
    path.write_bytes(pickle.dumps([Harm()]))
    done = run(path)
    assert done.returncode == 1 and "is no snapshot" in done.stderr and not (tmp_path / "was-run").exists()


@pytest.fixture
def complaint(monkeypatch, capsys):
    """A function that runs the program with options and returns its error message, or its exit status if that is not 2."""
    main = runpy.run_module("spillway_torch.plan", run_name="options")["main"]  # an import would hide the function `plan`

    def ask(*arguments):
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        if ended.value.code == 2:
            return capsys.readouterr().err
        return ended.value.code
    return ask


@pytest.mark.parametrize("options, named", [
    ("--tflops=-1", "--tflops"), ("--tflops=0", "--tflops"), ("--tflops=nan", "--tflops"), ("--memory-gbps=inf", "--memory-gbps"),
    ("--links=12,0", "--links"), ("--links=a", "--links"), ("--limits=0", "--limits: a limit of 0 bytes"),
    ("--limits=8GiB,", "--limits"), ("--limits=0.5", "bytes are a whole number"), ("--device=1", "--device is for snapshots")])
def test_numbers_that_say_nothing_are_refused(complaint, options, named):
    assert named in complaint(options, __file__)


@pytest.mark.parametrize("options", [{"links": ()}, {"links": (12, 0)}, {"links": (1e300,)}, {"links": (float("nan"),)}, {"tflops": 0},
                                     {"tflops": -1.0}, {"memory_gbps": float("inf")}, {"memory_gbps": 1e3}, {"limits": ["0.5"]},
                                     {"links": 12}, {"links": ["fast"]}, {"tflops": "100"}, {"limits": "8GiB"}, {"limits": 0},
                                     {"limits": 1 << 30}, {"least_bytes": "some"}, {"least_bytes": -1}])
def test_numbers_that_say_nothing_are_refused_by_the_function_too(options):
    with pytest.raises(ValueError, match=rf"spillway_torch\.plan\({next(iter(options))}="):
        spillway_torch.plan(**options)


def test_options_of_a_snapshot_stand_on_both_sides_of_it_and_those_of_programs_are_refused(complaint, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[], []]}))
    for options in (["--picture", "a.svg", path], [path, "--trace", "a.csv"], ["--limits", "1GiB", path], ["--fake", path]):
        assert "is for programs, and" in complaint(*options)
    assert "a snapshot has no arguments: more" in complaint(path, "more")
    for options in (["--device", 1, path, "--step", 2], [path, "--device", 1], ["--device", 0, path, "--device", 1]):
        assert "no history of device 1" in complaint(*options)
