#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the library as one header, for Compiler Explorer and for trials without a checkout.

    scripts/single-header.py [HEADER] > spillway.hpp

HEADER is what the result stands for: <spillway/spillway.hpp> if none is named, or <spillway/cuda.hpp> and others.
Each header of ours is put in the place where it is included first; other includes stay. One that is included under a
condition may include only headers that are there by then. The same tree gives the same bytes.
"""
import pathlib
import re
import sys

INCLUDE = pathlib.Path(__file__).resolve().parent.parent / "include"
OURS = re.compile(r"#\s*include <(spillway/[^>]+)>")
LICENCE = "// SPDX-License-Identifier: Apache-2.0"


def expand(header: str, seen: set[str]) -> list[str]:
    """The lines of a header and of those that it includes and that are not in `seen`."""
    lines = [f"// ---- {header}"]
    depth = 0  # of #if: what is included there is included under a condition
    for line in (INCLUDE / header).read_text().splitlines():
        depth += re.match(r"\s*#\s*if", line) is not None
        depth -= re.match(r"\s*#\s*endif", line) is not None
        found = OURS.match(line)
        if found and depth:
            inner = {found.group(1)}
            lines += expand(found.group(1), inner := inner | seen)
            if inner - seen != {found.group(1)}:
                raise SystemExit(f"{header} includes {found.group(1)} under a condition, and that others which may be needed without")
        elif found and found.group(1) not in seen:
            seen.add(found.group(1))
            lines += expand(found.group(1), seen)
        elif not found and line not in ("#pragma once", LICENCE):
            lines.append(line)
    return lines


def main() -> None:
    header = sys.argv[1] if len(sys.argv) > 1 else "spillway/spillway.hpp"
    if len(sys.argv) > 2 or not (INCLUDE / header).is_file():
        raise SystemExit(__doc__)
    text = "\n".join([LICENCE, f"// Made of {header} by scripts/single-header.py: do not edit.",
                      "#ifndef SPILLWAY_SINGLE_HEADER", "#define SPILLWAY_SINGLE_HEADER", "",
                      *expand(header, {header}), "", "#endif  // SPILLWAY_SINGLE_HEADER", ""])
    sys.stdout.write(re.sub(r"\n{3,}", "\n\n", text))


main()
