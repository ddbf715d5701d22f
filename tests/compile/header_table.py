# SPDX-License-Identifier: Apache-2.0
"""Functions that several checks of the headers use: the listed headers, and what each of them includes."""
import pathlib
import re


def listed_headers(root: pathlib.Path) -> dict[str, list[str]]:
    """Returns the header sets of cmake/SpillwayHeaders.cmake, by variable name."""
    text = re.sub(r"#.*", "", (root / "cmake/SpillwayHeaders.cmake").read_text())
    return {name: body.split() for name, body in re.findall(r"set\((SPILLWAY_\w*HEADERS)([^)]*)\)", text)}


def header_files(root: pathlib.Path) -> list[str]:
    """Returns every header under include/, as it is written in an #include."""
    include = root / "include"
    return sorted(str(p.relative_to(include)) for p in include.rglob("*") if p.is_file())


def includes_of(root: pathlib.Path, header: str) -> list[str]:
    """Returns the headers that `header` includes, in their brackets or quotes."""
    text = (root / "include" / header).read_text()
    return re.findall(r'^\s*#\s*include\s+([<"][^>"]+[>"])', text, re.MULTILINE)
