# SPDX-License-Identifier: Apache-2.0
"""PyTorch's operators give the same results and errors as without support (opinfo.py). With `--all-samples` the test uses
all samples and data types instead of a few."""
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
    """If recomputation is on, a tensor that an operator only reads keeps its copy on the host. If an operator wrote it
    nevertheless, the change would be lost. PyTorch's samples themselves are too small to be recomputed."""
    takes_all = request.config.getoption("--all-samples")
    spillway_torch.set_recompute(True)
    try:
        differences, checks = differences_of(operators()[::1 if takes_all else 2 * SHARDS], "cpu", takes_all)
    finally:
        spillway_torch.set_recompute(False)
    assert not differences, "\n".join(map(str, differences))
    assert checks > 100
