# SPDX-License-Identifier: Apache-2.0
"""Checks that scripts/figures.py runs the programs of the folder that it is given. Usage: figures_test.py <project root>"""
import os
import pathlib
import subprocess
import sys
import tempfile

figures = pathlib.Path(sys.argv[1]).resolve() / "scripts/figures.py"
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for place, word in (("given", "the right one"), ("elsewhere", "another one")):
        (folder / place).mkdir()
        for program in ("spillway-replay", "bench_overlap", "bench_eviction_quality"):
            path = folder / place / program
            path.write_text(f"#!/bin/sh\necho {word} >&2\nexit 9\n")
            path.chmod(0o755)
    for programs, start in ((".", folder / "given"), ("given", folder), (str(folder / "given"), pathlib.Path("/"))):
        done = subprocess.run([sys.executable, figures, "--check", "--programs", programs], cwd=start, capture_output=True,
                              text=True, env={**os.environ, "PATH": f"{folder / 'elsewhere'}:{os.environ['PATH']}"})
        assert done.returncode == 1 and "the right one" in done.stderr and "another one" not in done.stderr, (programs, done)
    done = subprocess.run([sys.executable, figures, "--check", "--programs", folder / "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("--programs\n") and done.stderr.count("\n") == 1, done
