# SPDX-License-Identifier: Apache-2.0
"""Random programs compute the same with support and without it (random_programs.py)."""
import pytest

from random_programs import WAYS, check_programs

MIB = 1 << 20


@pytest.mark.parametrize("way", WAYS)
def test_random_programs_compute_the_same(way):
    assert check_programs(way, [100, 103], limit=16 * MIB) > 16 * MIB
