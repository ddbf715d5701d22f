# SPDX-License-Identifier: Apache-2.0
"""Support for CUDA tensors in programs in C++."""
import os
import subprocess

import kernels


def test_each_function_does_what_it_says(tmp_path):
    include = kernels.FOLDER.parents[2] / "include"
    program = tmp_path / "checks"
    kernels.build(program, f"-I{include}", kernels.FOLDER / "libtorch_checks.cpp", kernels.FOLDER / "kernels.cpp")
    on_stand_in = ["stand-in"] if kernels.is_stand_in() else []
    done = subprocess.run([program, *on_stand_in], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "all checks passed\n"
