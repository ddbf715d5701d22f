# SPDX-License-Identifier: Apache-2.0
"""Support in programs in C++, which are compiled and run in processes of their own."""
import os
import pathlib
import re
import subprocess

import torch
from torch.utils.cpp_extension import include_paths

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIBRARIES = pathlib.Path(torch.__file__).parent / "lib"

def compiled(source, program, *flags):
    """Compiles C++ code that calls PyTorch."""
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-Werror", f"-I{ROOT / 'include'}",
               *(f"-isystem{path}" for path in include_paths()), *flags, str(source), "-o", str(program),
               f"-L{LIBRARIES}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{LIBRARIES}", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def output_of(program, *arguments, **environment):
    """Returns what a program prints to standard output and to standard error."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def swapped_out_mib(text):
    return int(re.search(r"(\d+) MiB were swapped out", text).group(1))


def test_each_function_does_what_it_says(tmp_path):
    program = compiled(HERE / "libtorch_checks.cpp", tmp_path / "checks")
    assert output_of(program, tmp_path)[0] == "all checks passed\n"


def test_the_example_trains_to_the_same_losses_with_a_third_of_the_memory(tmp_path):
    program = compiled(ROOT / "examples" / "libtorch" / "main.cpp", tmp_path / "example")
    whole, capped = output_of(program)[0], output_of(program, 20)[0]
    assert whole.count("loss") == 6 and swapped_out_mib(whole) == 0
    assert int(re.search(r"at most (\d+) of 60 MiB", capped).group(1)) <= 20 and swapped_out_mib(capped) > 0
    assert whole.splitlines()[:6] == capped.splitlines()[:6]
    too_small = subprocess.run([program, "1"], capture_output=True, text=True, timeout=600)
    assert too_small.returncode != 0 and "OutOfMemoryError" in too_small.stderr and "capacity 1048576" in too_small.stderr


def test_a_program_that_was_compiled_before_runs_with_the_preloaded_library(tmp_path):
    program = compiled(HERE / "libtorch_program.cpp", tmp_path / "program")
    library = compiled(ROOT / "examples" / "libtorch" / "preload.cpp", tmp_path / "preload.so", "-shared", "-fPIC")
    alone, nothing = output_of(program)
    assert alone.count("\n") == 13 and "error" not in alone and nothing == ""
    for environment in ({"SPILLWAY_RECLAIM_MS": "1"}, {"SPILLWAY_LIMIT_MIB": "8"}):
        printed, statistics = output_of(program, LD_PRELOAD=str(library), SPILLWAY_LEAST_BYTES="1", **environment)
        assert printed == alone
        assert swapped_out_mib(statistics) > 0
    for variable, text in (("SPILLWAY_LIMIT_MIB", "4GiB"), ("SPILLWAY_LEAST_BYTES", "-1"), ("SPILLWAY_RECLAIM_MS", "1e3")):
        refused = subprocess.run([program], capture_output=True, text=True, timeout=600,
                                 env={**os.environ, "LD_PRELOAD": str(library), variable: text})
        assert refused.returncode == 1 and refused.stdout == "" and refused.stderr.startswith(
            f"spillway: {variable} is '{text}': set it to a whole number up to "), refused
