# SPDX-License-Identifier: Apache-2.0
"""Random programs, which compute the same with support and without it, on the CPU and on several streams of a CUDA device.
All values are small whole numbers, so that rounding makes no difference between a GPU and the CPU."""
import contextlib
import copy
import gc
import hashlib
import io
import random
import threading

import torch
from torch.utils.checkpoint import checkpoint

import spillway_torch

MOST_TENSORS = 30
STEPS = 100


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return 2 * gradient * x


def bounded(tensor):
    return tensor.clamp(-8, 8)


UNARY = [torch.relu, torch.neg, torch.abs, torch.clone, torch.t, Square.apply,
         lambda x: x.flip(0), lambda x: x.roll(1, 0), lambda x: x.sort(dim=0, stable=True)[0],
         lambda x: x.detach().cumsum(0), lambda x: x.detach().amax(0),  # their gradients would depend on the order of sums
         lambda x: x.to(torch.bfloat16).float(), lambda x: x.reshape(-1)[::2], lambda x: x[:1], lambda x: x.view(-1),
         lambda x: checkpoint(lambda y: y.relu() * y, x, use_reentrant=False)]
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: torch.where(x > 0, x, y)]
IN_PLACE = [lambda x, y: x.add_(1), lambda x, y: x.copy_(y), lambda x, y: x.mul_(y), lambda x, y: x.zero_(),
            lambda x, y: x[:len(x) // 2].fill_(2), lambda x, y: torch._foreach_add_([x], 1), lambda x, y: x.relu_()]


class Program:
    """A program that depends only on the seed; with `evicts` it sometimes evicts all tensors. It is correct without support: a
    stream waits for the streams that used the same storage before it, and `record_stream` is called for a tensor that is
    dropped."""

    def __init__(self, seed, device, evicts=False):
        self.choices, self.numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device, self.is_cuda, self.evicts = device, device != "cpu", evicts
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()] if self.is_cuda else [None] * 3
        self.users = {}  # of each storage: the indices of the streams that have used it
        self.tensors, self.results = [], []

    def run(self):
        steps = {self.make: 5, self.apply_unary: 16, self.apply_binary: 10, self.change: 10, self.differentiate: 3,
                 self.read: 6, self.drop: 4, self.compute_in_thread: 2, self.wait: 3, self.exchange: 2, self.copy: 2}
        for step in self.choices.choices(list(steps), list(steps.values()), k=STEPS):
            if self.choices.random() < 0.2 and self.evicts:
                spillway_torch.reclaim_inactive()
            try:
                step()
            except RuntimeError as error:  # such as one of autograd about a tensor that was changed
                self.results.append(str(error).split(":")[0])  # what follows may name the device
        for tensor in self.tensors:
            self.note(tensor, 0)
        return self.results

    @contextlib.contextmanager
    def using(self, index, *tensors):
        """Makes a stream the current one, after all work on the tensors."""
        if not self.is_cuda:
            yield
            return
        for tensor in tensors:
            users = self.users.setdefault(tensor.untyped_storage()._cdata, set())
            for other in sorted(users - {index}):
                self.streams[index].wait_stream(self.streams[other])
            users.add(index)
        with torch.cuda.stream(self.streams[index]):
            yield

    def keep(self, index, *tensors):
        for tensor in tensors:
            self.users.setdefault(tensor.untyped_storage()._cdata, set()).add(index)
            self.tensors.append(tensor)
        while len(self.tensors) > MOST_TENSORS:
            self.drop()

    def pick(self, *like):
        fitting = [t for t in self.tensors if all(t.shape == one.shape for one in like)]
        return self.choices.choice(fitting) if fitting else self.make()

    def stream(self):
        return self.choices.randrange(len(self.streams))

    def note(self, tensor, index):
        with self.using(index, tensor):
            values = tensor.detach().nan_to_num().cpu()
        self.results.append((tuple(values.shape), hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:12]))

    def wait_for_all(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    # Steps. Each takes the same random numbers on every device.

    def make(self):
        rows, index, is_pinned = self.choices.choice([1, 16, 256, 2048, 4096]), self.stream(), self.choices.random() < 0.5
        host = torch.randint(-8, 9, (rows, 64), generator=self.numbers).float()
        with self.using(index):
            if self.is_cuda:
                made = (host.pin_memory() if is_pinned else host).to(self.device, non_blocking=is_pinned)
            else:
                made = host.clone()
        self.keep(index, made.requires_grad_(self.choices.random() < 0.3))
        return made

    def apply_unary(self):
        function, x, index = self.choices.choice(UNARY), self.pick(), self.stream()
        with self.using(index, x):
            made = function(x)
            made = made if made._is_view() else bounded(made)
        self.keep(index, made)

    def apply_binary(self):
        function, x, index = self.choices.choice(BINARY), self.pick(), self.stream()
        y = self.pick(x)
        with self.using(index, x, y):
            made = bounded(function(x, y))
        self.keep(index, made)

    def change(self):
        function, x, index = self.choices.choice(IN_PLACE), self.pick(), self.stream()
        y = self.pick(x)
        with torch.no_grad(), self.using(index, x, y):
            function(x, y)
            x.clamp_(-8, 8)

    def differentiate(self):
        outputs = [t for t in self.tensors if t.grad_fn is not None]
        leaves = [t for t in self.tensors if t.is_leaf and t.requires_grad]
        if not (outputs and leaves):
            return
        output, index = self.choices.choice(outputs), self.stream()
        self.wait_for_all()  # autograd runs on the streams of the forward pass
        with self.using(index, output):
            gradients = torch.autograd.grad(output.sum(), leaves, allow_unused=True, retain_graph=True)
        self.wait_for_all()
        for gradient in gradients:
            if gradient is not None:
                self.note(gradient, index)
                with self.using(index, gradient):
                    self.keep(index, bounded(gradient))

    def read(self):
        self.note(self.pick(), self.stream())

    def drop(self):
        if self.tensors:
            tensor = self.tensors.pop(self.choices.randrange(len(self.tensors)))
            storage = tensor.untyped_storage()._cdata
            if self.is_cuda:
                for index in self.users.get(storage, ()):
                    tensor.record_stream(self.streams[index])
            if all(t.untyped_storage()._cdata != storage for t in self.tensors):
                self.users.pop(storage, None)

    def compute_in_thread(self):
        x, index = self.pick(), self.stream()
        made = []

        def compute():
            with self.using(index, x):
                made.append(x.detach().flip(0) * 1)
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        self.keep(index, *made)

    def wait(self):
        one, other = self.stream(), self.stream()
        if self.is_cuda:
            self.streams[other].wait_event(self.streams[one].record_event())

    def exchange(self):
        x = self.pick()
        y = self.pick(x)
        self.wait_for_all()  # a storage may be freed
        if self.choices.random() < 0.5:
            torch.utils.swap_tensors(x, y)
        elif x.is_leaf and not x.requires_grad and not x._is_view():
            x.data = y

    def copy(self):
        x, index, way = self.pick().detach(), self.stream(), self.choices.randrange(3)
        self.wait_for_all()
        with self.using(index, x):
            if way == 0:
                file = io.BytesIO()
                torch.save(x, file)
                file.seek(0)
                made = torch.load(file)
            elif way == 1:
                made = copy.deepcopy(x)
            else:
                made = torch.from_numpy(x.cpu().numpy() + 1).to(self.device)
        self.wait_for_all()
        self.keep(index, bounded(made))
        self.wait_for_all()


@contextlib.contextmanager
def evicting():
    """While the context is open, another thread evicts, again and again, all tensors that no operation uses."""
    ended = threading.Event()

    def evict():
        while not ended.is_set():
            spillway_torch.reclaim_inactive()
    thread = threading.Thread(target=evict)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


#: Ways to make tensors leave.
WAYS = ["evicted between steps", "evicted by a thread", "recomputed"]


def check_programs(device, way, seeds, limit):
    """Runs programs without support on the CPU, and with it on the device. Asserts that they compute the same, and returns how
    many bytes were swapped out."""
    limit_before = spillway_torch.get_limit_lms()
    before = spillway_torch.memory_stats()["swap_out_bytes"]
    spillway_torch.set_recompute(way == "recomputed")
    try:
        spillway_torch.set_enabled_lms(False)
        expected = {seed: Program(seed, "cpu").run() for seed in seeds}
        gc.collect()
        spillway_torch.set_limit_lms(limit)
        spillway_torch.set_enabled_lms(True)
        for seed in seeds:
            with evicting() if way == "evicted by a thread" else contextlib.nullcontext():
                results = Program(seed, device, evicts=True).run()
            assert results == expected[seed], f"the program of seed {seed}"
            gc.collect()
    finally:
        spillway_torch.set_recompute(False)
        spillway_torch.set_limit_lms(limit_before)
    return spillway_torch.memory_stats()["swap_out_bytes"] - before
