# SPDX-License-Identifier: Apache-2.0
"""Fails unless a compiler in C++17 mode, or without exceptions, says first what is needed, and then stops.
Usage: language_mode.py <project root> <compiler>

Compiles only the headers directly in include/spillway/, which users include first. All other headers include
core/config.hpp in the same way.
"""
import pathlib
import subprocess
import sys

root, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
modes = [(["-std=c++17"], "spillway needs C++20: compile with"),
         (["-std=c++20", "-fno-exceptions"], "spillway needs exceptions: compile without")]
complaints = []
for header in sorted((root / "include/spillway").glob("*.hpp")):
    for options, message in modes:
        run = subprocess.run([compiler, *options, "-fsyntax-only", "-x", "c++", "-I", root / "include", "-"],
                             input=f"#include <spillway/{header.name}>\n", capture_output=True, text=True)
        errors = [line for line in run.stderr.splitlines() if "error:" in line]
        if run.returncode == 0 or len(errors) != 2 or message not in errors[0]:
            complaints.append(f"{header.name} with {options}: {len(errors)} errors, the first of them: {errors[:1]}")

print("\n".join(complaints))
sys.exit(bool(complaints))
