# SPDX-License-Identifier: Apache-2.0
"""Fails unless a compiler that lacks what a header needs says that first, and then stops.
Usage: language_mode.py <project root> <compiler>

Compiles the headers directly in include/spillway/, which users include first, in C++17 mode and without exceptions.
All other headers include core/config.hpp in the same way. Compiles interop/mdspan.hpp in C++20 mode, where few compilers
find an mdspan.
"""
import pathlib
import subprocess
import sys

root, compiler = pathlib.Path(sys.argv[1]), sys.argv[2]
complaints = []


def check(header, options, message, may_succeed=False):
    run = subprocess.run([compiler, *options, "-fsyntax-only", "-x", "c++", "-I", root / "include", "-"],
                         input=f"#include <spillway/{header}>\n", capture_output=True, text=True)
    errors = [line for line in run.stderr.splitlines() if "error:" in line]
    if may_succeed and run.returncode == 0:
        return
    if run.returncode == 0 or len(errors) != 2 or message not in errors[0]:
        complaints.append(f"{header} with {options}: {len(errors)} errors, the first of them: {errors[:1]}")


for header in sorted((root / "include/spillway").glob("*.hpp")):
    check(header.name, ["-std=c++17"], "spillway needs C++20: compile with")
    check(header.name, ["-std=c++20", "-fno-exceptions"], "spillway needs exceptions: compile without")
check("interop/mdspan.hpp", ["-std=c++20"], "no mdspan here", may_succeed=True)

print("\n".join(complaints))
sys.exit(bool(complaints))
