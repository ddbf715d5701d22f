# SPDX-License-Identifier: Apache-2.0
"""Tests of CUDA tensors, on a GPU or on a stand-in for the CUDA runtime that runs no kernels itself (see kernels.py)."""
import ctypes
import gc
import os
import subprocess
import sys
import threading

# Workspaces of cuBLAS count against the limit and never leave. On an H100 they have 32 MiB for each thread and stream by
# default. Set before PyTorch is imported, and inherited by the processes that tests start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # eight of 16 KiB
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")

import pytest
import torch

import kernels

LIMIT = 32 << 20
IS_STAND_IN = kernels.is_stand_in()
IS_THERE = torch.cuda.is_available()
IS_GPU = IS_THERE and not IS_STAND_IN

if os.environ.get("SPILLWAY_REQUIRE_GPU") == "1" and not IS_GPU:
    raise pytest.UsageError("SPILLWAY_REQUIRE_GPU=1, and PyTorch finds no GPU")

if IS_THERE:
    import spillway_torch
    from spillway_torch import _chosen as _C
    spillway_torch.install(device="cuda", limit=LIMIT, host_limit=256 << 20)
    kernels.install()
    spillway_torch.set_enabled_lms(True)


def pytest_addoption(parser):
    parser.addoption("--all-samples", action="store_true", help="take all of PyTorch's samples for its operators")


def pytest_collection_modifyitems(items):
    for item in items:
        if not IS_THERE:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        elif not IS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="the stand-in for the CUDA runtime has no cores: needs a GPU"))
        elif not IS_STAND_IN and item.get_closest_marker("stand_in"):
            item.add_marker(pytest.mark.skip(reason="asks the stand-in for the CUDA runtime"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU, the stand-in will not do")
    config.addinivalue_line("markers", "alone: looks at the free memory of the device, which no other test may use meanwhile")
    config.addinivalue_line("markers", "stand_in: asks the stand-in how it was used")


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_sep("*", f"{len(skipped)} CUDA TESTS WERE SKIPPED")
        for reason in sorted({report.longrepr[2] for report in skipped}):
            terminalreporter.write_line(reason)


@pytest.fixture(autouse=True)
def clean():
    """Before each test support is on and nothing is allocated. After it no frame may be left."""
    if IS_THERE:
        gc.collect()
        spillway_torch.set_enabled_lms(True)
        torch.cuda.synchronize()
        torch.manual_seed(7)
    yield
    if IS_THERE:
        gc.collect()
        torch.cuda.synchronize()
        assert spillway_torch.memory_stats()["active_frames"] == 0
        assert not kernels.failure()


class Lms:
    evict = staticmethod(lambda: spillway_torch.reclaim_inactive())
    stats = staticmethod(lambda: spillway_torch.memory_stats())
    view = staticmethod(lambda tensor: _C.view(tensor))
    lend = staticmethod(lambda tensor: _C.Lent(tensor))

    @staticmethod
    def is_away(tensor):
        seen = _C.view(tensor)
        return seen["ours"] and not seen["resident"] and not seen["has_address"]


@pytest.fixture
def lms():
    return Lms


@pytest.fixture
def make():
    """A function that makes a CUDA tensor of some MiB with random numbers, and the same tensor on the host."""
    def one(mib=1, seed=0):
        generator = torch.Generator().manual_seed(seed)
        host = torch.randint(0, 1 << 30, (int(mib * (1 << 18)),), dtype=torch.int32, generator=generator)
        return torch.empty_like(host, device="cuda").copy_(host), host
    return one


@pytest.fixture
def script(tmp_path):
    """A function that runs Python code in a new process and returns its output."""
    def run(code, timeout=300, **environment):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    return run


@pytest.fixture
def stand_in():
    """The stand-in's own functions, for tests that control or ask it."""
    library = ctypes.CDLL(None)
    library.spillway_fake_calls.restype = ctypes.c_size_t
    library.spillway_fake_begin_capture.argtypes = [ctypes.c_void_p]
    library.spillway_fake_end_capture.argtypes = [ctypes.c_void_p]
    library.spillway_fake_stall.argtypes = [ctypes.c_void_p]
    yield library
    library.spillway_fake_resume()


@pytest.fixture
def takes_the_place_early(stand_in):
    """A function that allocates and writes 20 MiB while the stream `side` is stalled. Returns whether the write ends before
    the stream is resumed: after a while, or with `waits` as late as needed, so that a busy machine changes nothing."""
    def ask(side, waits=False):
        host = torch.zeros(20 << 18, dtype=torch.int32).pin_memory()
        z = torch.empty_like(host, device="cuda")
        z.copy_(host, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        if waits:
            gives_up = threading.Timer(100, stand_in.spillway_fake_resume)
            gives_up.start()
            done.synchronize()
            is_early = gives_up.is_alive()
            gives_up.cancel()
        else:
            is_early = any(done.query() for _ in range(200_000))
        stand_in.spillway_fake_resume()
        side.synchronize()
        return is_early
    return ask


@pytest.fixture(scope="session")
def native(tmp_path_factory):
    """The compiled library of allocator_calls.cpp."""
    loaded = kernels.compiled("allocator_calls.cpp", tmp_path_factory.mktemp("native") / "allocator_calls.so")
    loaded.largest_piece.restype = loaded.base_of.restype = loaded.address_of.restype = ctypes.c_size_t
    loaded.address_of.argtypes = loaded.refuses_address.argtypes = [ctypes.c_void_p]
    loaded.refuses_address.restype = ctypes.c_bool
    loaded.base_of.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    loaded.add_on_stream.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_void_p]
    loaded.keep_workspace.argtypes = [ctypes.c_size_t]
    loaded.tracked_allocations.restype = loaded.tracked_frees.restype = ctypes.c_size_t
    return loaded
