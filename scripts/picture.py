# SPDX-License-Identifier: Apache-2.0
"""Functions of the drawing scripts: an SVG with a title, which is readable on a light and on a dark page."""
import argparse
import pathlib
import sys

FIGURES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "figures"
MARGIN = 24

# The picture has a background, so that it is readable even if the page's colour scheme differs from the system's.
LIGHT = """
  text { font-family: system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif; font-size: 14px; fill: #1f2937 }
  .page { fill: #ffffff }
  .title { font-size: 20px; font-weight: 600 }
  .note { font-size: 13px; fill: #4b5563 }"""
DARK = """
    text { fill: #e5e7eb }
    .page { fill: #1e2129 }
    .note { fill: #9ca3af }"""


def svg(width, height, title, body, light="", dark=""):
    """Returns the text of an SVG. `light` and `dark` are lines of CSS in addition to those of all pictures."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{LIGHT}{light}\n  @media (prefers-color-scheme: dark) {{{DARK}{dark}\n  }}\n</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>', *body, "</svg>"]) + "\n"


def heading(name, note):
    return [f'<text class="title" x="{MARGIN}" y="30">{name}</text>', f'<text class="note" x="{MARGIN}" y="50">{note}</text>']


def parser(doc):
    made = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    made.add_argument("--check", action="store_true", help="write nothing, fail if a picture in the tree is out of date")
    return made


def put(pictures, check):
    """Writes the pictures, a dictionary from file names to texts. With `check`, fails instead if one differs from its file."""
    stale = [name for name, text in pictures.items()
             if not (FIGURES / name).exists() or (FIGURES / name).read_text() != text]
    if check and stale:
        sys.exit(f"{', '.join(stale)}: not what {pathlib.Path(sys.argv[0]).name} draws: run it")
    if not check:
        for name, text in pictures.items():
            (FIGURES / name).write_text(text)
