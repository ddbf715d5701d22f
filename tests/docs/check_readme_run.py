# SPDX-License-Identifier: Apache-2.0
"""Fails when the output of train_beyond_memory differs from the one that README.md shows.
Usage: check_readme_run.py <program> <project root>

The swapped bytes are the same in each run on the simulated device. The accuracy is not compared, since it may depend on
the compiler.
"""
import pathlib
import re
import subprocess
import sys

PROGRAM, ROOT = sys.argv[1:]


def table(text: str) -> list[dict[str, str]]:
    """Returns the rows of the table of limits, each as a dictionary by column."""
    lines = text[re.search(r"^ *capacity  swapping", text, re.MULTILINE).start():].splitlines()
    names = re.split(r"\s{2,}", lines[0].strip())
    rows = (re.split(r"\s{2,}", line.strip()) for line in lines[1:])
    return [dict(zip(names, row)) for row in rows if re.match(r"\d\.\d\dx = ", row[0])]


shown = table((pathlib.Path(ROOT) / "README.md").read_text())
assert len(shown) > 1 and all("swapped in" in row for row in shown if row["swapping"] == "yes"), shown
limits = dict.fromkeys(row["capacity"].split("x")[0] for row in shown)
options = [option for limit in limits for option in ("--capacity", limit)]
done = subprocess.run([PROGRAM, "--device", "sim", *options], capture_output=True, text=True)
assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
printed = table(done.stdout)
complaints = [f"README.md: {column} is {row[column]!r}, the program prints {now.get(column)!r}: {row}"
              for row, now in zip(shown, printed, strict=True) for column in row
              if column != "accuracy" and row[column] != now.get(column)]
print("\n".join(complaints))
sys.exit(bool(complaints))
