# SPDX-License-Identifier: Apache-2.0
"""The contents of a source distribution."""
import pathlib

import source_distribution

PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def test_a_source_distribution_carries_the_headers_and_all_of_the_package(tmp_path):
    names = source_distribution.names_in(PACKAGE, tmp_path)
    assert {"LICENSE", "include/spillway/interop/tensorflow.hpp", "csrc/module.cpp", "csrc/gpu_module.cpp"} <= names
    assert {f"spillway_tf/{path.name}" for path in (PACKAGE / "spillway_tf").glob("*.py")} <= names
