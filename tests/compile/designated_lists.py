# SPDX-License-Identifier: Apache-2.0
"""Fails when a header assigns a designated list without its type. Usage: designated_lists.py <project root>

In a template nvcc 13.0 takes `x = {.a = n, .c = n};` for `x = {n, n};`, if `n` depends on a template
parameter: members are skipped in silence. `x = T{.a = n, .c = n};` is right everywhere.
"""
import pathlib
import re
import sys

from header_table import header_files

# A declaration has a type before the name, so nothing but the name itself may stand left of the sign.
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
