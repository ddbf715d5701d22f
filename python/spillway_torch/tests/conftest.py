# SPDX-License-Identifier: Apache-2.0
import contextlib
import gc
import os
import threading

import pytest
import torch

import spillway_torch
from spillway_torch import _chosen as _C

torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=256 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)


def pytest_addoption(parser):
    parser.addoption("--all-samples", action="store_true", help="take all of PyTorch's samples for its operators")


@pytest.fixture(autouse=True)
def clean():
    """Every test begins with support on and ends without a frame or a lease left over."""
    spillway_torch.set_enabled_lms(True)
    torch.manual_seed(7)
    yield
    gc.collect()
    assert spillway_torch.memory_stats()["active_frames"] == 0


class Lms:
    """Shorthands for what tests ask about one tensor."""

    evict = staticmethod(spillway_torch.reclaim_inactive)

    @staticmethod
    @contextlib.contextmanager
    def evicting():
        """Everything that nothing uses leaves again and again, on another thread."""
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

    @staticmethod
    def view(tensor):
        return _C.view(tensor)

    @staticmethod
    def is_away(tensor):
        seen = _C.view(tensor)
        return seen["ours"] and not seen["resident"] and not seen["has_address"]

    @staticmethod
    def is_ours(tensor):
        return _C.view(tensor)["ours"]

    stats = staticmethod(spillway_torch.memory_stats)


@pytest.fixture
def lms():
    return Lms


@pytest.fixture
def evicted():
    """Makes tensors, sends them away, and hands them out with clones that stayed outside."""
    def make(*tensors):
        spillway_torch.set_enabled_lms(True)
        copies = [outside(t) for t in tensors]
        spillway_torch.reclaim_inactive()
        for t in tensors:
            assert Lms.is_away(t)
        return copies
    return make


def outside(tensor):
    """The same values as Python numbers: no tensor, so nothing of the library's."""
    return tensor.tolist()


@pytest.fixture
def script(tmp_path):
    """Runs Python code in a process of its own and returns what it printed."""
    import subprocess
    import sys

    def run(code, timeout=300, **environment):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout,
                              cwd=tmp_path, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    return run


def free_port():
    """A port of the loopback interface that nobody listens on just now."""
    import socket
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])
