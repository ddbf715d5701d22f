# SPDX-License-Identifier: Apache-2.0
"""The example program runs and prints what is expected."""
import csv
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "examples" / "tensorflow"


def test_a_larger_image_trains_with_support(tmp_path):
    table = tmp_path / "steps.csv"
    done = subprocess.run([sys.executable, FOLDER / "many_models.py", "residual", "--limit-mib", "24", "--least", "128",
                           "--most", "160", "--csv", table],
                          capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| residual")]
    largest = {row[2].strip(): 0 if row[3].strip() == "none" else int(row[3]) for row in rows}
    assert largest["on"] > largest["off"]
    steps = list(csv.DictReader(table.open()))
    assert any(row["ok"] == "True" and float(row["swapped_out_mib"]) > 0 for row in steps)
    assert any(row["ok"] == "False" for row in steps)
