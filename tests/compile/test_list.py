# SPDX-License-Identifier: Apache-2.0
"""Fails when a test is never built. Usage: test_list.py <project root>

Every tests/**/NAME_test.{cpp,cu} must be named in a CMakeLists.txt of tests/: either the file, or NAME, if a
function there appends the rest of the file's name.
"""
import pathlib
import sys

tests = pathlib.Path(sys.argv[1]) / "tests"
lists = "".join(p.read_text() for p in tests.rglob("CMakeLists.txt"))
forgotten = []
for source in sorted(p for p in tests.rglob("*_test.*") if p.suffix in {".cpp", ".cu"}):
    name = source.stem.removesuffix("_test")
    if source.name not in lists and f"_test({name})" not in lists and f"_test({name} " not in lists:
        forgotten.append(f"{source.relative_to(tests.parent)} is in no CMakeLists.txt: it is never run")

print("\n".join(forgotten))
sys.exit(bool(forgotten))
