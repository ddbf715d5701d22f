# SPDX-License-Identifier: Apache-2.0
"""Results and errors of PyTorch's operators are those of a run without support (opinfo.py). `--all-samples` takes every
sample and data type in the place of a few."""
import pytest

import spillway_torch

pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")

from opinfo import differences_of, operators

SHARDS = 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_operators(shard, request):
    differences, checks = differences_of(operators()[shard::SHARDS], "cpu", request.config.getoption("--all-samples"))
    assert not differences, "\n".join(map(str, differences))
    assert checks > 300


@pytest.mark.filterwarnings("ignore")
def test_operators_whose_operands_are_leased_for_reading(request):
    """With recomputing on, a tensor that an operator only reads keeps its copy on the host: one that is written after all
    would come back as it was. PyTorch's samples are too small to be recomputed themselves."""
    takes_all = request.config.getoption("--all-samples")
    spillway_torch.set_recompute(True)
    try:
        differences, checks = differences_of(operators()[::1 if takes_all else 2 * SHARDS], "cpu", takes_all)
    finally:
        spillway_torch.set_recompute(False)
    assert not differences, "\n".join(map(str, differences))
    assert checks > 100
