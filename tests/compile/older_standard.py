# SPDX-License-Identifier: Apache-2.0
"""Fails unless a compiler in C++17 mode says first that C++20 is needed, and then stops.
Usage: older_standard.py <project root> <compiler>

Compiles only the headers directly in include/spillway/, which users include first. All other headers include
core/config.hpp in the same way.
"""
import pathlib
import subprocess
import sys

root, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
complaints = []
for header in sorted((root / "include/spillway").glob("*.hpp")):
    run = subprocess.run([compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-I", root / "include", "-"],
                         input=f"#include <spillway/{header.name}>\n", capture_output=True, text=True)
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    if run.returncode == 0 or len(errors) != 2 or "spillway needs C++20: compile with" not in errors[0]:
        complaints.append(f"{header.name} as C++17: {len(errors)} errors, the first of them: {errors[:1]}")

print("\n".join(complaints))
sys.exit(bool(complaints))
