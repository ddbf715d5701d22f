# SPDX-License-Identifier: Apache-2.0
"""Recomputation: CUDA tensors are dropped without a copy, and the operations that made them make bitwise the same again."""
import json
import os
import pathlib
import sys

import pytest

import kernels

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

from recompute_samples import OPERATIONS  # noqa: E402

#: Operations that are never recomputed, since their kernel uses the default generator by itself.
NEVER = ["native_dropout"]

#: The begin of a program with a link so slow that each result is recomputed rather than copied, if possible.
RECOMPUTE = """
import gc, json, sys
import torch, torch.nn.functional as F
import kernels
import spillway_torch
from spillway_torch import _chosen as _C
spillway_torch.install(device="cuda", limit=64 << 20, host_limit=256 << 20, link_bytes_per_second=1_000_000)
kernels.install(waits=True)
spillway_torch.set_enabled_lms(True)
spillway_torch.set_recompute(True)
torch.set_default_device("cuda")
out = {}

def bytes_of(tensor):
    return tensor.detach().as_strided((tensor.numel(),), (1,), 0).cpu().view(torch.uint8).tolist()

def leave():
    spillway_torch.reclaim_inactive()

def again():
    return spillway_torch.memory_stats()["recomputations"]

def measured(make):
    '''Of a result whose like has been measured.'''
    for _ in range(3):
        make()
        torch.cuda.synchronize()
    return make()
"""


@pytest.fixture
def recompute(script):
    def run(code):
        path = os.pathsep.join([str(pathlib.Path(kernels.__file__).parent), *sys.path])
        return json.loads(script(RECOMPUTE + code + "\nprint(json.dumps(out))", PYTHONPATH=path).splitlines()[-1])
    return run


def test_each_operation_runs_again_with_the_same_bits(recompute):
    out = recompute(OPERATIONS + f"never = {NEVER!r}\n" + """
out["listed"] = sorted(name.removeprefix("aten::") for name in _C.recomputable())
out["wrong"], out["never"], out["unexpected"] = [], [], []
stock = {}
for name, make in samples.items():
    stock[name] = [bytes_of(result) for result in seeded(make)], torch.cuda.get_rng_state().tolist()
leave()
for name, make in samples.items():
    measured(make)
    results = seeded(make)
    if torch.cuda.get_rng_state().tolist() != stock[name][1]:
        out["wrong"].append([name, "leaves another state of the generator"])
    statistics = bytes_of(mean)
    first = _C.recomputed().get("aten::" + name, {"count": 0})["count"]
    leave()
    for i, result in enumerate(results):
        if bytes_of(result) != stock[name][0][i] or bytes_of(mean) != statistics:
            out["wrong"].append([name, i])
    if torch.cuda.get_rng_state().tolist() != stock[name][1]:
        out["wrong"].append([name, "changes the state of the generator when it runs again"])
    count = _C.recomputed().get("aten::" + name, {"count": 0})["count"] - first
    if name in never and count > 0:
        out["unexpected"].append(name)
    if name not in never and count < len(results):
        out["never"].append([name, count, len(results)])
out["samples"] = sorted(samples)
""")
    assert out["samples"] == out["listed"]
    assert out["wrong"] == [] and out["never"] == [] and out["unexpected"] == []


def test_a_result_is_made_again_on_the_stream_that_uses_it(recompute):
    out = recompute("""
x = torch.randn(64, 128)
leave()
y = measured(lambda: F.gelu(x))
expected = bytes_of(y)
out["same"] = []
side = torch.cuda.Stream()
for stream in (side, torch.cuda.current_stream(), side):
    leave()
    before = again()
    with torch.cuda.stream(stream):
        z = y * 1
        out["same"].append([bytes_of(z) == expected, again() - before])
out["current"] = torch.cuda.current_stream() == torch.cuda.default_stream()
""")
    assert out["same"] == [[True, 1]] * 3 and out["current"]


def test_small_operands_count_and_their_changes_are_seen(recompute):
    out = recompute("""
x, weight = torch.randn(64, 128), torch.randn(128)
leave()
y = measured(lambda: x * weight)
expected = bytes_of(y)
leave()
before = again()
out["same"] = bytes_of(y) == expected
out["again"] = again() - before
leave()
weight.add_(1)
out["after a change"] = bytes_of(y) == expected
leave()
before = again()
out["then"] = bytes_of(y) == expected
out["then again"] = again() - before
""")
    assert out == {"same": True, "again": 1, "after a change": True, "then": True, "then again": 0}


def test_threads_that_draw_from_one_generator_draw_other_numbers(recompute):
    out = recompute("""
import threading
leave()
drawn = [[], []]
def draw(mine):
    with torch.device("cuda"):
        for i in range(40):
            mine.append(torch.empty(16, 256, dtype=torch.int64).random_() if i % 3 else torch.randn(64, 128))
            if i % 10 == 0:
                leave()
threads = [threading.Thread(target=draw, args=(one,)) for one in drawn]
for one in threads:
    one.start()
for one in threads:
    one.join()
results = drawn[0] + drawn[1]
firsts = [bytes_of(one)[:4] for one in results]
out["apart"] = len(set(map(str, firsts)))
leave()
before = again()
out["same"] = [bytes_of(one)[:4] for one in results] == firsts
out["again"] = again() - before
""")
    assert out["apart"] == 80 and out["same"] and out["again"] > 0
