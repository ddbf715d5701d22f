# SPDX-License-Identifier: Apache-2.0
import gc
import os

import pytest
import torch

import spillway_torch
from spillway_torch import _chosen as _C

from program_server import ProgramServer
from random_programs import evicting

torch.set_num_threads(1)
spillway_torch.install(device="cpu", limit=256 << 20, least_bytes=1)
spillway_torch.set_enabled_lms(True)


def pytest_addoption(parser):
    parser.addoption("--all-samples", action="store_true", help="take all of PyTorch's samples for its operators")


@pytest.fixture(autouse=True)
def clean():
    """Enables support before each test. After it no frame, and so no lease, may be left."""
    spillway_torch.set_enabled_lms(True)
    torch.manual_seed(7)
    yield
    gc.collect()
    assert spillway_torch.memory_stats()["active_frames"] == 0


class Lms:
    """Short names of functions that tests call often."""

    evict = staticmethod(spillway_torch.reclaim_inactive)
    evicting = staticmethod(evicting)

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
    """A function that evicts the given tensors and returns copies of their values as Python numbers."""
    def make(*tensors):
        spillway_torch.set_enabled_lms(True)
        copies = [outside(t) for t in tensors]
        spillway_torch.reclaim_inactive()
        for t in tensors:
            assert Lms.is_away(t)
        return copies
    return make


def outside(tensor):
    """Returns the values as Python numbers, which are not in memory of the library."""
    return tensor.tolist()


@pytest.fixture(scope="session")
def program_server():
    server = ProgramServer("torch")
    yield server
    server.close()


@pytest.fixture
def script(program_server, tmp_path):
    """A function that runs Python code in a new process and returns its output."""
    def run(code, timeout=300, **environment):
        done = program_server.run(code, tmp_path, timeout, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    return run


# Ends a program whose collectives have ended. A thread of gloo may still hold their tensors, and takes the interpreter's lock
# to let them go. If the interpreter is ending by then, Python unwinds that thread, and the C++ runtime ends the process with
# std::terminate, with this library and without it, even after `destroy_process_group`. So the interpreter does not end.
LEAVE = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def run_together(commands, folder, **environment):
    """Runs programs that communicate with each other and returns the output of each."""
    import subprocess
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
                                env={**os.environ, "OMP_NUM_THREADS": "1", **environment}) for command in commands]
    ended = [one.communicate(timeout=300) for one in started]
    codes = [one.returncode for one in started]
    assert not any(codes), "\n".join([f"exit codes {codes}", *(error[-3000:] for _, error in ended)])
    return [out for out, _ in ended]
