# SPDX-License-Identifier: Apache-2.0
"""Fails when a page of ours says what the tree does not. Usage: check_docs.py <project root>

- A link to a file of this project leads to a file, and to a heading that is there.
- Code under `<!-- region FILE NAME -->` is, letter for letter, what FILE holds between the lines
  `// [NAME]` and `// [NAME end]`.
"""
import pathlib
import re
import sys
import textwrap

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REGION = re.compile(r"<!-- region (\S+) (\S+) -->\n+```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Every page of the tree; build folders and hidden ones hold what is not ours."""
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


def stale_regions(root: pathlib.Path, page: pathlib.Path) -> list[str]:
    found = []
    for name, region, shown in REGION.findall(page.read_text()):
        source = root / name
        text = source.read_text() if source.exists() else ""
        match = re.search(rf"^ *// \[{region}\]\n(.*?)^ *// \[{region} end\]", text,
                          re.MULTILINE | re.DOTALL)
        if not match:
            found.append(f"{page.relative_to(root)}: no region [{region}] in {name}")
        elif textwrap.dedent(match.group(1)) != shown:
            found.append(f"{page.relative_to(root)}: the code shown is not region [{region}] of {name}")
    return found


root = pathlib.Path(sys.argv[1]).resolve()
complaints = []
for page in pages(root):
    complaints += broken_links(root, page) + stale_regions(root, page)
print("\n".join(complaints))
sys.exit(bool(complaints))
