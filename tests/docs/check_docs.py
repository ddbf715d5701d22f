# SPDX-License-Identifier: Apache-2.0
"""Fails when a page of the documentation contradicts the source tree. Usage: check_docs.py <project root>

- Each link to a file of this project leads to a file and a heading that exist.
- Each name in a table of docs/api.md is declared in the header beside it. Each public name of the headers is in such
  a table: the names in namespace `spillway`, except those of the frameworks' adapters.
- Each member function that docs/one-acquire.md or docs/architecture.md names (`Class::function`) is in the header
  beside it, or in any header if none is named.
- C++ code stands under `<!-- region FILE NAME -->`, and equals the lines of FILE between `// [NAME]` and
  `// [NAME end]` (in CMake files `# [NAME]`). FILE is an example or a test, so that the code compiles and runs.
"""
import pathlib
import re
import sys
import textwrap

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REGION = re.compile(r"<!-- region (\S+) (\S+) -->\n+```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)

API_ROW = re.compile(r"^\| (`[^|]*) \| \[[^\]]*\]\(\.\./include/spillway/([^)]*)\) \|", re.MULTILINE)
DECLARATION = re.compile(r"(?:class|struct|enum class|concept|using) (\w+)(?!;)\b(?!;)")
MEMBER = re.compile(r"`(\w+)::(\w+)`(?: \| `([\w/.]+)`)?")
PUBLIC = {"spillway", "spillway::dlpack"}


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns every page of the project. Build folders and hidden folders are skipped."""
    found = []
    for page in sorted(root.rglob("*.md")):
        top = page.relative_to(root).parts[0]
        if not top.startswith((".", "build")):
            found.append(page)
    return found


def anchors(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken_links(root: pathlib.Path, page: pathlib.Path) -> list[str]:
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{page.relative_to(root)}: no such file: {link}")
        elif anchor and anchor not in anchors(target):
            found.append(f"{page.relative_to(root)}: no such heading: {link}")
    return found


def loose_code(root: pathlib.Path, page: pathlib.Path) -> list[str]:
    """Returns C++ code of a page that is no region of a file, so that nothing compiles it."""
    text = page.read_text()
    shown = re.findall(r"^```(?:cpp|c\+\+|cuda)\n(.*)$", REGION.sub("", text), re.MULTILINE)
    foreign = [name for name, _, _ in REGION.findall(text) if not name.startswith(("examples/", "tests/"))]
    return ([f"{page.relative_to(root)}: C++ that is no region of an example or a test: {line}" for line in shown] +
            [f"{page.relative_to(root)}: {name} is neither an example nor a test" for name in foreign])


def stale_regions(root: pathlib.Path, page: pathlib.Path) -> list[str]:
    found = []
    for name, region, shown in REGION.findall(page.read_text()):
        source = root / name
        text = source.read_text() if source.exists() else ""
        match = re.search(rf"^ *(?://|#) \[{region}\]\n(.*?)^ *(?://|#) \[{region} end\]", text,
                          re.MULTILINE | re.DOTALL)
        if not match:
            found.append(f"{page.relative_to(root)}: no region [{region}] in {name}")
        elif textwrap.dedent(match.group(1)) != shown:
            found.append(f"{page.relative_to(root)}: the code shown is not region [{region}] of {name}")
    return found


def public_names(header: pathlib.Path) -> set[str]:
    """Returns the types and concepts that a header declares in `spillway` or one of its public namespaces."""
    names, namespaces, is_lazy = set(), [], False
    for line in header.read_text().splitlines():
        if opened := re.match(r"(?:inline )?namespace ([\w:]+) \{", line):
            namespaces += [opened.group(1)]
        elif re.match(r"\}  // namespace", line):
            namespaces.pop()
        elif (found := DECLARATION.match(line)) and "::".join(namespaces) in PUBLIC:
            # Programs know a lazily compiled class `BasicName` by its alias `Name`.
            names.add(found.group(1).removeprefix("Basic") if is_lazy else found.group(1))
        is_lazy = line == "template <class = detail::Lazily>"
    return names


def stale_api(root: pathlib.Path) -> list[str]:
    include, page = root / "include" / "spillway", root / "docs" / "api.md"
    listed, found = {}, []
    for names, header in API_ROW.findall(page.read_text()):
        text = (include / header).read_text() if (include / header).exists() else ""
        for name in re.findall(r"`(\w+)`", names):
            listed.setdefault(header, set()).add(name)
            if not re.search(rf"\b{name}\b", text):
                found.append(f"docs/api.md: {header} declares no {name}")
    for path in sorted(include.rglob("*.hpp")):
        header = path.relative_to(include).as_posix()
        for name in sorted(public_names(path) - listed.get(header, set())):
            found.append(f"docs/api.md: {name} of {header} is public and is not listed")
    return found


def stale_members(root: pathlib.Path) -> list[str]:
    include, found = root / "include" / "spillway", []
    headers = {path.relative_to(include).as_posix(): path.read_text() for path in include.rglob("*.hpp")}
    for page in ("one-acquire.md", "architecture.md"):
        for owner, name, header in MEMBER.findall((root / "docs" / page).read_text()):
            texts = [headers.get(header, "")] if header else headers.values()
            if not any(re.search(rf"\b(?:Basic)?{owner}\b", t) and re.search(rf"\b{name}\b", t) for t in texts):
                found.append(f"docs/{page}: {header or 'no header'} has no {owner}::{name}")
    return found


root = pathlib.Path(sys.argv[1]).resolve()
complaints = stale_api(root) + stale_members(root)
for page in pages(root):
    complaints += broken_links(root, page) + loose_code(root, page) + stale_regions(root, page)
print("\n".join(complaints))
sys.exit(bool(complaints))
