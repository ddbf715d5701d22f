# SPDX-License-Identifier: Apache-2.0
"""Random programs on several streams compute under a low limit what they compute on the CPU, where PyTorch's own allocator
serves them (tests/random_programs.py)."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
from random_programs import WAYS, check_programs

MIB = 1 << 20


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
@pytest.mark.parametrize("way", WAYS)
def test_random_programs_compute_the_same(way):
    assert check_programs("cuda", way, range(6), limit=8 * MIB) > 32 * MIB
