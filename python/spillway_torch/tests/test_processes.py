# SPDX-License-Identifier: Apache-2.0
"""Threads, processes, and how a program ends."""
import _thread
import gc
import queue
import threading

import pytest
import torch

import spillway_torch


def test_threads_follow_the_one_that_starts_them(lms):
    big = [torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(40)]
    sums = []

    def work():
        sums.extend(int(t[5]) + int((t[:100] + 1)[7]) for t in big)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(sums) == sorted([2 * i + 1 for i in range(40)] * 4)


@pytest.mark.parametrize("start", ["a class of its own", "a timer", "a bare thread"])
def test_threads_follow_whatever_they_run(lms, start):
    big, sums, done = torch.ones(1000), [], threading.Event()

    def work():
        nonlocal big
        lms.evict()
        sums.append(float((big * 2).sum()))
        big = None  # by now, since nothing waits for the thread's end
        done.set()

    class Worker(threading.Thread):
        def run(self):
            work()
    if start == "a bare thread":
        _thread.start_new_thread(work, ())
    else:
        (Worker() if start == "a class of its own" else threading.Timer(0, work)).start()
    done.wait(300)
    assert sums == [2000.0]


def test_a_thread_that_was_started_before_support_was_enabled_enables_it_itself(script):
    script("""
from concurrent.futures import ThreadPoolExecutor
import torch, spillway_torch
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
spillway_torch.install(device="cpu", limit="64MB", least_bytes=1)
spillway_torch.set_enabled_lms(True)
ones = torch.ones(1000)
spillway_torch.reclaim_inactive()
error = str(pool.submit(ones.sum).exception())
assert "call set_enabled_lms(True) in it" in error, error
pool.submit(spillway_torch.set_enabled_lms, True).result()
assert pool.submit(ones.sum).result().item() == 1000
made = pool.submit(torch.ones, 1000).result()
spillway_torch.reclaim_inactive()
assert not spillway_torch._C.view(made)["resident"]
""")


def test_threads_that_need_more_together_than_there_is_wait_for_each_other(lms):
    wrong = []

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        a = torch.randint(0, 100, (12 << 20,), generator=g, dtype=torch.int32)  # 48 MiB
        for k in range(4):
            b = a + k  # uses 96 MiB; four threads at once would use 384 MiB, where 256 fit
            if int(b[17]) != int(a[17]) + k or int(b[-1]) != int(a[-1]) + k:
                wrong.append((seed, k))
    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


class InThread:
    """A thread that runs functions one after the other, until `join` is called."""

    def __init__(self):
        self.calls, self.done = queue.Queue(), queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        for call in iter(self.calls.get, None):
            self.done.put(call())
            del call

    def call(self, function):
        self.calls.put(function)
        return self.done.get(timeout=60)

    def join(self):
        self.calls.put(None)
        self.thread.join()


def hold_and_use(held, *tensors):
    held.__enter__()
    for tensor in tensors:
        tensor.sum()


def test_a_hold_that_another_thread_ends_ends_with_the_next_operation_of_its_own(lms):
    a, b = torch.ones(1000), torch.ones(1000)
    lms.evict()
    held, other = spillway_torch.hold(a), InThread()
    other.call(lambda: hold_and_use(held, b))
    held.__exit__(None, None, None)
    assert not spillway_torch._C.is_holding()
    lms.evict()
    assert not lms.is_away(a) and not lms.is_away(b)  # until the other thread has noticed the end of the hold
    other.call(lambda: torch.ones(10).sum().item())
    assert not other.call(spillway_torch._C.is_holding)
    lms.evict()
    assert lms.is_away(a) and lms.is_away(b) and lms.stats()["active_frames"] == 0
    with spillway_torch.hold(a):
        assert spillway_torch._C.is_holding()
    other.join()


def test_a_hold_that_another_thread_drops_ends_with_its_own(lms):
    a = torch.ones(1000)

    def context():
        with spillway_torch.hold(a):
            yield
    generator, other = context(), InThread()
    other.call(lambda: next(generator))
    del generator
    gc.collect()
    lms.evict()
    assert not lms.is_away(a)  # this thread does not change the frames of the other one
    other.join()
    lms.evict()
    assert lms.is_away(a) and lms.stats()["active_frames"] == 0


def test_a_hold_ends_with_its_thread(lms):
    a, b = torch.ones(1000), torch.ones(1000)
    held, other = spillway_torch.hold(a), InThread()
    other.call(lambda: hold_and_use(held, b))
    other.join()
    assert lms.stats()["active_frames"] == 0
    lms.evict()
    assert lms.is_away(a) and lms.is_away(b)
    held.__exit__(None, None, None)
    assert not spillway_torch._C.is_holding()


def test_holds_of_one_thread_end_in_any_order(lms):
    a, b, c = torch.ones(1000), torch.ones(1000), torch.ones(1000)
    first, second = spillway_torch.hold(a), spillway_torch.hold(b)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    c.sum()
    lms.evict()
    assert not lms.is_away(b) and not lms.is_away(c) and spillway_torch._C.is_holding()
    second.__exit__(None, None, None)
    lms.evict()
    assert lms.is_away(a) and lms.is_away(b) and lms.is_away(c) and lms.stats()["active_frames"] == 0


def test_a_hold_that_begins_inside_an_operation_may_outlast_it(lms):
    x, named = torch.ones(1000), torch.ones(1000)
    held = spillway_torch.hold(named)

    @torch.library.custom_op("spillway_tests::begin_to_hold", mutates_args=())
    def begin_to_hold(x: torch.Tensor) -> torch.Tensor:
        held.__enter__()
        return x + 1
    y = begin_to_hold(x)
    lms.evict()
    assert not lms.is_away(named) and spillway_torch._C.is_holding()
    held.__exit__(None, None, None)
    lms.evict()
    assert lms.is_away(named) and lms.is_away(x) and lms.stats()["active_frames"] == 0
    assert y.sum().item() == 2000


#: Ways in which a thread can run code of the program while `x` is held for it.
JOINERS = {
    "hold": """
with spillway_torch.hold(x):
    join()""",
    "holds inside of holds, in several threads": """
with spillway_torch.hold(x), spillway_torch.hold(x[:5]):
    join(lambda: with_hold(make))""",
    "a wrapped function that calls back": """
small = torch.zeros(1, dtype=torch.float64)
small.set_(x.untyped_storage(), 0, (1,)).apply_(lambda value: join() or value)""",
    "an operation in Python": """
@torch.library.custom_op("spillway_test::joining", mutates_args=())
def joining(x: torch.Tensor) -> torch.Tensor:
    join()
    return torch.zeros(1)
joining(x)""",
    "a kernel in Python of PyTorch's own operation": """
library = torch.library.Library("aten", "IMPL")
library.impl("erfinv_", lambda x: join() or x, "CPU")
x.erfinv_()""",
    "an index": """
class Index:
    def __index__(self):
        join()
        return 0
x[Index()] = 0.""",
    "a class of tensors that assigns in its own way": """
class Joining(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__setitem__:
            join()
        return super().__torch_function__(function, types, args, kwargs)
x.as_subclass(Joining)[0] = 0.""",
    "a hook for tensors that autograd saves": """
with torch.autograd.graph.saved_tensors_hooks(lambda tensor: join() or tensor, lambda tensor: tensor):
    x.requires_grad_()[:1].sin()""",
    "a dispatch mode": """
class Joining(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        join()
        return function(*args, **(kwargs or {}))
with Joining():
    x.neg_()""",
}


@pytest.mark.parametrize("how", JOINERS)
def test_a_thread_that_is_waited_for_does_not_wait_for_what_is_held(script, how):
    out = script("""
import threading, torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
x = torch.zeros(5 << 20, dtype=torch.float64)
errors = []
def make():
    return torch.zeros(60 << 20, dtype=torch.uint8)
def with_hold(act):
    with spillway_torch.hold(torch.zeros(5000)):
        act()
def join(act=make):
    def run():
        try:
            act()
        except torch.OutOfMemoryError as error:
            errors.append(str(error))
    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(300)
""" + JOINERS[how] + """
assert len(errors) == 2, errors
assert all("41943040 bytes Double[5242880]" in error for error in errors), errors
thread = threading.Thread(target=lambda: errors.append(make()[-1]))
thread.start()
thread.join()
print(int(errors[-1]), int(x.sum()), spillway_torch.memory_stats()["active_frames"])
""")
    assert out.strip() == "0 0 0"


def test_a_thread_waits_for_operations_that_run_code_in_python(script):
    out = script("""
import threading, time, torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
a, b = (torch.full((40 << 20,), i, dtype=torch.uint8) for i in (3, 4))
begun = threading.Event()
class Slow(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        begun.set()
        time.sleep(0.5)
        return function(*args, **(kwargs or {}))
def use():
    with Slow():
        a.max()
thread = threading.Thread(target=use)
thread.start()
begun.wait()
print(int(b.max()), spillway_torch.memory_stats()["num_ooms"])
thread.join()
print(spillway_torch.memory_stats()["active_frames"])
""")
    assert out.split() == ["4", "0", "0"]


def test_backward_threads_share_the_graph(lms):
    w = torch.ones(1000, requires_grad=True)
    graphs = [(w * i).sum() for i in range(8)]
    lms.evict()
    threads = [threading.Thread(target=g.backward) for g in graphs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert w.grad.tolist() == [28.] * 1000


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((3000,), float(i * i)), torch.tensor(i)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(lms, workers):
    pile = [torch.ones(60 << 20, dtype=torch.uint8) for _ in range(5)]  # so that tensors of the parent leave
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers)
    for _ in range(2):
        for x, i in loader:
            lms.evict()
            assert torch.equal(x[:, 5], i.float() ** 2)
    assert [int(t[9]) for t in pile] == [1] * 5


def test_a_forked_child_works_on_its_own_copy(script):
    out = script("""
import os, torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((10 << 20,), i, dtype=torch.uint8) for i in range(12)]
pid = os.fork()
if pid == 0:
    good = all(int(t[3]) == i and int(t[-1]) == i for i, t in enumerate(pile))
    pile[0] += 7
    os._exit(0 if good and int(pile[0][4]) == 7 else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert all(int(t[3]) == i for i, t in enumerate(pile))
print("good")
""")
    assert out.strip() == "good"


def test_a_forked_child_leaves_the_file_to_its_parent(script):
    out = script("""
import os, torch, spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, host_limit=1 << 20, file_tier=".", file_limit=1 << 30, least_bytes=1)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((10 << 20,), i, dtype=torch.uint8) for i in range(12)]
spillway_torch.park("file")
pid = os.fork()
if pid == 0:
    mine = [torch.full((10 << 20,), 100 + i, dtype=torch.uint8) for i in range(5)]
    try:
        pile[3][-1].item()
    except RuntimeError as error:
        os._exit(0 if "process from which this one was forked" in str(error) else 1)
    os._exit(2)
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert all(int(t[3]) == i for i, t in enumerate(pile))
print("good")
""")
    assert out.strip() == "good"


@pytest.mark.parametrize("inside", ["nothing", "hold", "a mode inside of an operation"])
def test_a_forked_child_has_nothing_that_other_threads_held(script, inside):
    out = script("""
import os, threading, torch, spillway_torch
from torch.utils._python_dispatch import TorchDispatchMode
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
x, mine = torch.full((40 << 20,), 3, dtype=torch.uint8), torch.full((2 << 20,), 4, dtype=torch.uint8)
array = torch.full((1 << 20,), 5, dtype=torch.uint8).numpy()
holds, forked = threading.Event(), threading.Event()
def hold():
    with spillway_torch.hold(x):
        holds.set()
        forked.wait()
holding = threading.Thread(target=hold, daemon=True)
holding.start()
holds.wait()

def fork():
    pid = os.fork()
    if pid == 0:
        import signal
        signal.alarm(60)  # a child that waits for a thread of its parent waits for ever
        address = mine.data_ptr() if inside == "hold" else 0
        made = torch.full((50 << 20,), 7, dtype=torch.uint8)
        good = inside != "hold" or mine.data_ptr() == address
        sums = []
        def use():  # in a thread that may have the place of the one that held
            for _ in range(2):
                made[-1] += 1
                sums.append(int((x[-5:] + 1)[-1]))
        again = threading.Thread(target=use)
        again.start()
        again.join()
        good = good and sums == [4, 4] and int(made[-1]) == 9 and int(mine[-1]) == 4 and int(array[-1]) == 5
        return lambda: os._exit(0 if good and spillway_torch.memory_stats()["active_frames"] == 0 else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    return lambda: None

class Forking(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.add.Tensor:
            self.end = fork()
        return function(*args, **(kwargs or {}))

inside = "INSIDE"
if inside == "nothing":
    end = fork()
elif inside == "hold":
    with spillway_torch.hold(mine):
        end = fork()
else:
    with Forking() as mode:
        mine + 1
    end = mode.end
end()
forked.set()
holding.join()
print("good", int(x[-1]))
""".replace("INSIDE", inside))
    assert out.strip() == "good 3"


def test_garbage_that_is_collected_while_a_process_forks(script):
    out = script("""
import gc, os, torch
gc.disable()  # but for what the handlers do
def leave_garbage():
    ring = [torch.full((1 << 20,), 7, dtype=torch.uint8)]
    ring.append(ring)
def collect():
    leave_garbage()
    assert gc.collect() > 0
    leave_garbage()
os.register_at_fork(before=collect, after_in_parent=gc.collect, after_in_child=gc.collect)
import spillway_torch
torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((10 << 20,), i, dtype=torch.uint8) for i in range(12)]
pid = os.fork()
if pid == 0:
    os._exit(0 if all(int(t[-1]) == i for i, t in enumerate(pile)) else 1)
_, status = os.waitpid(pid, 0)
assert status == 0, status
print("good")
""")
    assert out.strip() == "good"


def test_queues_between_processes(script):
    out = script("""
import torch, torch.multiprocessing as mp, spillway_torch

def child(q, back, done):
    x = q.get()
    back.put(x + 1)
    done.wait()  # until the parent has it: what is sent is the sender's until then

if __name__ == "__main__":
    torch.set_num_threads(1)
    spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
    spillway_torch.set_enabled_lms(True)
    context = mp.get_context("fork")
    q, back, done = context.Queue(), context.Queue(), context.Event()
    p = context.Process(target=child, args=(q, back, done))
    p.start()
    x = torch.arange(100000.)
    spillway_torch.reclaim_inactive()
    q.put(x)
    y = back.get()
    done.set()
    spillway_torch.reclaim_inactive()
    assert torch.equal(y, torch.arange(100000.) + 1)
    p.join()
    print("good", p.exitcode)
""")
    assert out.strip() == "good 0"


def test_a_program_may_end_with_tensors_away(script):
    out = script("""
import atexit, torch, threading, spillway_torch
torch.set_num_threads(2)
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
pile = [torch.full((10 << 20,), i, dtype=torch.uint8) for i in range(12)]
late = torch.arange(100000.)
atexit.register(lambda: print(int(late[5])))
net = torch.nn.Linear(300, 300)
net(torch.ones(2, 300)).sum().backward()
spillway_torch.reclaim_inactive()
used, never = threading.Event(), threading.Event()
def use():
    pile[0] + pile[1]
    used.set()
    never.wait()
threading.Thread(target=use, daemon=True).start()
used.wait()
print("end")
""")
    assert out.split() == ["end", "5"]


def test_the_program_ends_while_a_daemon_thread_makes_room(script):
    assert script("""
import threading
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
begun = threading.Event()
def reclaim():
    while True:
        spillway_torch.reclaim_inactive()
        begun.set()
threading.Thread(target=reclaim, daemon=True).start()
numbers = [torch.ones(1000) for _ in range(200)]
begun.wait()
print("end")
""").split() == ["end"]


def test_the_program_ends_while_a_daemon_thread_waits_for_memory(script):
    """The thread releases the GIL to wait, and the interpreter is already ending when the thread needs the GIL again."""
    assert script("""
import colorsys, threading
import torch, spillway_torch
spillway_torch.install(device="cpu", limit=64 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)
class Late:
    def __init__(self):
        self.held = spillway_torch.hold(torch.ones(60 << 20, dtype=torch.uint8))
        self.held.__enter__()
    def __del__(self, count=range(20_000_000)):
        del self.held  # now there is room
        sum(count)
        print("late", flush=True)
colorsys.late = Late()  # in a module that nothing refers to, and that goes when the interpreter ends
threading.Thread(target=lambda: torch.ones(10).untyped_storage().resize_(60 << 20), daemon=True).start()
while spillway_torch.memory_stats()["waits"] == 0:
    pass
print("end", flush=True)
""").split() == ["end", "late"]


def test_support_that_is_never_used_changes_nothing(script):
    out = script("""
import torch, spillway_torch
assert not spillway_torch.get_enabled_lms() and spillway_torch.memory_stats() == {}
spillway_torch.set_enabled_lms(False)
assert spillway_torch.reclaim_inactive() == 0 and spillway_torch.empty_cache() == 0
x = torch.arange(1000.)
spillway_torch.install(device="cpu", limit=64 << 20)
spillway_torch.set_enabled_lms(True)
y = x + 1  # x is from before and is left alone
spillway_torch.reclaim_inactive()
print(int(y.sum() - x.sum()))
try:
    spillway_torch.install(device="cpu")
except RuntimeError as error:
    print(error)
""")
    assert out.splitlines()[0] == "1000" and "already" in out
