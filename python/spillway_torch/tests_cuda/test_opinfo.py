# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators give the same results and errors as without support (tests/opinfo.py). With `--all-samples` the test
uses all operators, samples and data types instead of a few."""
import json
import os
import pathlib
import sys

import pytest

pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")

TESTS = str(pathlib.Path(__file__).resolve().parents[1] / "tests")

#: A separate program, since some samples are larger than the limit of the other tests.
PROGRAM = """
import json, warnings
import torch
import kernels, spillway_torch
spillway_torch.install(device="cuda", limit=192 << 20, host_limit=1 << 30, least_bytes=1)
kernels.install()
from opinfo import differences_of, operators
warnings.simplefilter("ignore")
torch.use_deterministic_algorithms(True, warn_only=True)
spillway_torch.set_enabled_lms(True)
spillway_torch.set_recompute(recomputes)
chosen = operators() if takes_all else operators()[recomputes::8]
print(json.dumps(differences_of(chosen, "cuda", takes_all, kernels.failure)))
"""


@pytest.mark.parametrize("recomputes", [0, 1])
def test_operators(recomputes, request, script):
    takes_all = request.config.getoption("--all-samples")
    out = script(f"recomputes, takes_all = {recomputes}, {takes_all}\n{PROGRAM}", timeout=10_000 if takes_all else 300,
                 PYTHONPATH=os.pathsep.join([TESTS, *sys.path]))
    differences, checks = json.loads(out.splitlines()[-1])
    assert not differences, "\n".join(map(str, differences))
    assert checks > 300
