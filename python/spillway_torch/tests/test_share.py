# SPDX-License-Identifier: Apache-2.0
"""Processes that share one device."""
import json
import os
import signal
import subprocess
import sys

import pytest

import spillway_torch

# Each program prints a line when it reaches a certain place, and continues when it gets a line on stdin.
PROGRAM = """
import sys, torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=256 << 20)
spillway_torch.set_enabled_lms(True)
spillway_torch.share(sys.argv[1], least="24MiB", idle_after=0.2, patience=600)
def stop_at(place):
    print(place, flush=True)
    sys.stdin.readline()
def limit():
    return spillway_torch.get_limit_lms() >> 20
def active():
    return sorted(one["is_active"] for one in spillway_torch.share_members())
"""


class Program:
    def __init__(self, file, body):
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM + body, str(file)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def next(self):
        return self.process.stdout.readline().strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        self.go_on()
        return self.process.wait(120)


@pytest.fixture
def programs(tmp_path):
    started = []

    def start(body):
        started.append(Program(tmp_path / "device", body))
        return started[-1]
    yield start
    for program in started:
        program.process.kill()
        program.process.wait()


FILL = """
held = [torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(24)]
"""
UNTIL = """
while not ({condition}):
    assert all(int(t.sum()) == i * (8 << 20) for i, t in enumerate(held))
"""


# Works until each of two programs has had half of the memory at some time.
HALF = """
import pathlib
seen = pathlib.Path(sys.argv[1] + {own!r})
other = pathlib.Path(sys.argv[1] + {other!r})
while not (seen.exists() and other.exists()):
    assert all(int(t.sum()) == i * (8 << 20) for i, t in enumerate(held))
    if limit() in (127, 128):
        seen.touch()
"""


def test_a_process_that_is_alone_has_all_and_two_have_half(programs):
    first = programs(FILL + "stop_at(limit())" + HALF.format(own="1", other="2")
                     + UNTIL.format(condition="limit() == 256") + "stop_at('end')")
    assert first.next() == "256"
    second = programs(FILL + HALF.format(own="2", other="1") + "stop_at('end')")
    first.go_on()
    assert second.next() == "end"
    assert second.end() == 0
    assert first.next() == "end"  # the first one has all memory again
    assert first.end() == 0


def test_a_process_that_rests_makes_room_and_one_that_is_killed_does_too(programs):
    resting = programs(FILL + "stop_at('rests')" + UNTIL.format(condition="limit() == 256") + "stop_at('end')")
    assert resting.next() == "rests"
    working = programs(FILL + UNTIL.format(condition="limit() >= 230 and active() == [False, True]") + "stop_at('works')")
    assert working.next() == "works"
    working.process.send_signal(signal.SIGKILL)
    resting.go_on()
    assert resting.next() == "end"
    assert resting.end() == 0


@pytest.mark.parametrize("operation, holds", [
    ("a + i", "float(b[0]) == i and float(b[-1]) == 1 + i"), ("torch.rand_like(a)", "0 <= float(b.min()) < float(b.max()) < 1"),
    ("torch.bernoulli(a, generator=own)", "float(b[0]) == 0 and float(b[-1]) == 1")])
def test_operations_that_do_not_fit_beside_each_other_take_turns(programs, operation, holds):
    alone = run_beside_each_other(programs, [(operation, holds)])
    assert len(json.loads(alone[0])) == 9
    assert run_beside_each_other(programs, [(operation, holds)] * 2) == alone * 2


def run_beside_each_other(programs, operations):
    """Runs each operation in a program of its own, all at once, and returns the results. Each needs 192 MiB of the 256."""
    together = [programs(f"""
a = torch.linspace(0, 1, 24 << 20)
torch.manual_seed(7)
own = torch.Generator().manual_seed(7)
mean, variance = torch.zeros(1), torch.ones(1)
stop_at("begins")
ends = []
for i in range(3):
    b = {operation}
    assert {holds}
    ends += [float(b[0]), float(b[12345]), float(b[-2])]
    del b
stop_at(ends)
""") for operation, holds in operations]
    assert [program.next() for program in together] == ["begins"] * len(together)
    for program in together:
        program.go_on()
    made = [program.next() for program in together]
    assert [program.end() for program in together] == [0] * len(together)
    return made


def test_an_operation_that_cannot_begin_anew_comes_before_those_that_can(programs):
    # `written` changes `mean` and `variance`, so it is not known whether it could be started again. The other operation
    # can give up its memory and start again, even when it has everything but its result.
    written = ("torch.batch_norm(a.view(1, 1, -1), None, None, mean, variance, True, 0.1, 1e-5, False).flatten()",
               "float(b[0]) < 0 < float(b[-1]) and float(mean) > 0")
    others = ("a + i", "float(b[0]) == i and float(b[-1]) == 1 + i")
    alone = [run_beside_each_other(programs, [one])[0] for one in (written, others)]
    for _ in range(3):
        assert run_beside_each_other(programs, [written, others]) == alone


def test_what_cannot_be_shared_is_refused_by_name(programs):
    body = """
def why(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
print(why(lambda: spillway_torch.share(sys.argv[1])))
print(why(lambda: spillway_torch.set_limit_lms("128MiB")))
print(why(lambda: spillway_torch.share(sys.argv[1], weight=0)))
print(why(lambda: spillway_torch.share(sys.argv[1], weight="much")))
print(why(lambda: spillway_torch.share(sys.argv[1], least="much")))
print(why(lambda: torch.empty(300 << 20, dtype=torch.uint8)).splitlines()[0])
stop_at("end")
"""
    program = programs(body)
    assert "the device is shared already" in program.next()
    assert "the limit is this program's share" in program.next()
    for _ in range(2):
        assert program.next() == ("ValueError: spillway_torch.share(): weight is from 1e-6 to 1e6, and idle_after and "
                                  "patience are seconds")
    assert "bytes are a whole number" in program.next()
    assert program.next().startswith("OutOfMemoryError: ")
    assert program.next() == "end"
    assert program.end() == 0


def test_a_forked_child_takes_no_part(programs):
    program = programs(FILL + """
import os
child = os.fork()
if child == 0:
    is_right = int(held[3].sum()) == 3 * (8 << 20) and spillway_torch.share_members() == []
    sys.exit(0 if is_right else 1)
print(os.waitpid(child, 0)[1], len(spillway_torch.share_members()))
stop_at("end")
""")
    assert program.next() == "0 1"
    assert program.next() == "end"
    assert program.end() == 0


def test_nobody_shares_before_anything_can_leave(tmp_path):
    spillway_torch.set_enabled_lms(False)
    with pytest.raises(RuntimeError, match="no tensor can be swapped out before set_enabled_lms"):
        spillway_torch.share(tmp_path / "device")
    assert not os.path.exists(tmp_path / "device")
    assert spillway_torch.share_members() == []
