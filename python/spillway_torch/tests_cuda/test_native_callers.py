# SPDX-License-Identifier: Apache-2.0
"""What C++ code in PyTorch asks of the allocator: cuDNN, cuBLAS, NCCL, and code that looks for a segment."""
import ctypes
import os
import pathlib
import subprocess

import pytest
import torch
from torch.utils.cpp_extension import include_paths

MIB = 1 << 20
FOLDER = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    toolkits = [pathlib.Path(path).parent for path in include_paths(device_type="cuda")]
    packages = pathlib.Path(torch.__file__).parents[1] / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}"
    headers = [str(t / "include") for t in (packages, *toolkits, pathlib.Path("/usr/local/cuda"))]
    library = tmp_path_factory.mktemp("native") / "allocator_calls.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", str(FOLDER / "allocator_calls.cpp"),
               "-o", str(library), f"-L{pathlib.Path(torch.__file__).parent / 'lib'}", "-lc10_cuda", "-lc10"]
    for path in [*include_paths(), *(h for h in headers if os.path.exists(os.path.join(h, "cuda_runtime_api.h")))]:
        command += ["-isystem", path]
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = ctypes.CDLL(str(library))
    loaded.largest_piece.restype = loaded.base_of.restype = ctypes.c_size_t
    loaded.base_of.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
    loaded.tracked_allocations.restype = loaded.tracked_frees.restype = ctypes.c_size_t
    return loaded


def test_the_largest_piece_can_be_had_without_anything_leaving(native, lms, make):
    made = [make(4, seed)[0] for seed in range(3)]
    before = lms.stats()

    bytes_ = native.largest_piece(0)
    workspace = torch.cuda.caching_allocator_alloc(bytes_)

    assert bytes_ >= 16 * MIB  # of 32, where 12 are taken
    assert lms.stats()["reclaimed"] == before["reclaimed"]
    torch.cuda.caching_allocator_delete(workspace)
    del made


def test_the_largest_piece_is_small_when_memory_is_full(native, lms, make):
    made = [make(4, seed)[0] for seed in range(12)]  # 48 MiB in 32

    assert native.largest_piece(0) < 8 * MIB
    del made


def test_an_address_is_traced_to_its_segment(native, make):
    x, _ = make(4)
    size = ctypes.c_size_t()

    base = native.base_of(x.data_ptr() + 5, ctypes.byref(size))

    segments = {s["address"]: s["total_size"] for s in torch.cuda.memory_snapshot()}
    assert segments[base] == size.value and base <= x.data_ptr() < base + size.value


def test_trackers_hear_of_memory_that_comes_and_goes(native, lms, make):
    native.track()
    x, host = make(4)
    come, gone = native.tracked_allocations(), native.tracked_frees()
    assert come >= 1

    lms.evict()

    assert native.tracked_frees() > gone
    assert torch.equal(x.cpu(), host)
    assert native.tracked_allocations() > come
