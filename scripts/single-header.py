#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the library as one header, for Compiler Explorer and for trials without a checkout.

    scripts/single-header.py [HEADER] > spillway.hpp

The output replaces <HEADER>, by default <spillway/spillway.hpp>. Each header of the library is inserted where it is first
included; includes of other headers stay. A header that is included inside of an #if may include only headers that were
inserted before. The same tree gives the same output.
"""
import pathlib
import re
import sys

INCLUDE = pathlib.Path(__file__).resolve().parent.parent / "include"
OURS = re.compile(r"#\s*include <(spillway/[^>]+)>")
LICENCE = "// SPDX-License-Identifier: Apache-2.0"


def expand(header: str, seen: set[str]) -> list[str]:
    """Returns the lines of a header and of the headers that it includes, except those in `seen`."""
    lines = [f"// ---- {header}"]
    depth = 0  # of nested #if
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
    if len(sys.argv) > 2 or header.startswith("-"):
        raise SystemExit(__doc__)
    if not (INCLUDE / header).is_file():
        raise SystemExit(f"single-header.py: {INCLUDE / header}: there is no such header; name one as in an #include, such as "
                         "spillway/sim.hpp")
    text = "\n".join([LICENCE, f"// Made of {header} by scripts/single-header.py: do not edit.",
                      "#ifndef SPILLWAY_SINGLE_HEADER", "#define SPILLWAY_SINGLE_HEADER", "",
                      *expand(header, {header}), "", "#endif  // SPILLWAY_SINGLE_HEADER", ""])
    sys.stdout.write(re.sub(r"\n{3,}", "\n\n", text))


main()
