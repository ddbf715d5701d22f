#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds a site with search from the pages of docs/. Fails if a link is broken.

    scripts/build-site.py FOLDER

Needs Python 3.10 and mkdocs-material (pip install mkdocs-material). Files outside of docs/ that a page links to become part
of the site. If Doxygen is found, the names in docs/api.md become links to pages that are made from the headers' comments.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import api_reference

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".hpp": "cpp", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".sh": "sh", ".txt": "cmake"}


def page_of(target: pathlib.Path) -> pathlib.PurePosixPath:
    """Returns the path in the site of a file of the project."""
    path = pathlib.PurePosixPath(target.relative_to(ROOT).as_posix())
    if path.parts[0] == "docs":
        return path.relative_to("docs")
    return "project" / path if path.suffix == ".md" else "project" / path.with_name(path.name + ".md")


def text_of(source: pathlib.Path, queue: list[pathlib.Path], has_reference: bool) -> str:
    """Returns the page for a file. Adds the files that it links to to the queue."""
    if source.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in source.iterdir())
        return f"# {source.name}\n\n" + "".join(f"- {name}\n" for name in names)
    text = source.read_text()
    if has_reference and source == ROOT / "docs" / "api.md":
        text = api_reference.linked(text)
    if source.suffix != ".md":
        title = source.relative_to(ROOT).as_posix()
        return (f"---\nsearch:\n  exclude: true\n---\n\n# {title}\n\n"
                f"````{LANGUAGES.get(source.suffix, 'text')}\n{text}````\n")

    def moved(link: re.Match) -> str:
        target = (source.parent / link.group(1)).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return link.group()  # mkdocs reports the broken link
        queue.append(target)
        there = os.path.relpath(page_of(target), page_of(source).parent)
        return there + (link.group(2) or "" if target.suffix == ".md" else "")

    return LINK.sub(moved, text)


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        shutil.copy(ROOT / "mkdocs.yml", folder)
        has_doxygen = shutil.which("doxygen") is not None
        if has_doxygen:
            if wrong := api_reference.write(folder / "docs", folder):
                sys.exit("\n".join(wrong))
        else:
            print("build-site.py: Doxygen was not found: the site has no reference made of the headers' comments")
        done, queue = set(), sorted((ROOT / "docs").glob("*.md"))
        while queue:
            source = queue.pop()
            if source in done:
                continue
            done.add(source)
            page = folder / "docs" / page_of(source)
            page.parent.mkdir(parents=True, exist_ok=True)
            if source.suffix in {".svg", ".png"}:
                shutil.copy(source, page)
            else:
                page.write_text(text_of(source, queue, has_doxygen))
        return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-f", folder / "mkdocs.yml",
                               "-d", pathlib.Path(sys.argv[1]).resolve()],
                              env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode


sys.exit(main())
