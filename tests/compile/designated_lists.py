# SPDX-License-Identifier: Apache-2.0
"""Fails when a header assigns a designated list without its type. Usage: designated_lists.py <project root>

In a template nvcc 13.0 compiles `x = {.a = n, .c = n};` as `x = {n, n};` if `n` depends on a template
parameter, and so sets the wrong members without a warning. `x = T{.a = n, .c = n};` works everywhere.
"""
import pathlib
import re
import sys

from header_table import header_files

# Matches assignments only: in a declaration a type stands before the name.
ASSIGNMENT = re.compile(r"^[ \t]*[\w(*][\w.\[\]()>*-]*\s*=\s*\{\s*\.\w", re.MULTILINE)

root = pathlib.Path(sys.argv[1])
complaints = []
for header in header_files(root):
    text = (root / "include" / header).read_text()
    for match in ASSIGNMENT.finditer(text):
        line = text.count("\n", 0, match.start()) + match.group().lstrip("\n").count("\n") + 1
        complaints.append(f"include/{header}:{line}: name the type before the list: nvcc skips members")
print("\n".join(complaints))
sys.exit(1 if complaints else 0)
