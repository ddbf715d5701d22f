# SPDX-License-Identifier: Apache-2.0
"""Fails when a source line is longer than .clang-format allows. Usage: columns.py <project root>

clang-format reflows code and leaves comments alone, so a long comment passes it. Lines that cannot be
broken are exempt: include directives, and comments that are nothing but a URL.
"""
import pathlib
import re
import sys

FOLDERS = ("include", "src", "tests", "bench", "examples", "python")
SUFFIXES = (".hpp", ".cpp", ".cu", ".cuh")
EXEMPT = re.compile(r"^\s*#\s*include\b|^\s*//+\s*<?https?://\S+$")

root = pathlib.Path(sys.argv[1])
limit = int(re.search(r"^ColumnLimit: (\d+)", (root / ".clang-format").read_text(), re.M).group(1))
sources = sorted(p for folder in FOLDERS for p in (root / folder).rglob("*")
                 if p.suffix in SUFFIXES and "build" not in p.relative_to(root).parts)
complaints = []
for source in sources:
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
        if len(line) > limit and not EXEMPT.search(line):
            name = source.relative_to(root)
            complaints.append(f"{name}:{number}: {len(line)} columns, {limit} are allowed")
print("\n".join(complaints))
sys.exit(1 if complaints else 0)
