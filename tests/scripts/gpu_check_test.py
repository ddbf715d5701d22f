# SPDX-License-Identifier: Apache-2.0
"""Checks what bench/gpu_check.sh prints when its time is over, its build fails or it is terminated, and that the tests exist
which it names.

Usage: gpu_check_test.py <project root>

Nothing is built, since a script that fails replaces cmake. Another script replaces nvidia-smi, so that no GPU is needed.
"""
import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

root = pathlib.Path(sys.argv[1])
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "bin").mkdir()
for name, status in {"nvidia-smi": 0, "nvcc": 0, "cmake": 3}.items():
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\necho {name} ran\nexit {status}\n")
    program.chmod(0o755)


def run(part, during=lambda script: None, **environment):
    """Runs the script, and `during` while it runs."""
    results = folder / "results"
    script = subprocess.Popen(["bash", root / "bench/gpu_check.sh", part, results], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder),
                                   **environment})
    during(script)
    out = script.communicate(timeout=60)[0]
    left = sorted(path.name for path in results.iterdir())
    assert left == ["results.tgz"], left
    return script.returncode, out, tarfile.open(results / "results.tgz").getnames()


status, out, packed = run("core")
table = out[out.rindex("measured"):]
assert status == 1, out
assert "step configure" in table and "FAILED with 3" in table, table
assert "bandwidth not run: configure failed" in out and table.count("NOT RUN") >= 5, out
assert "./configure.txt" in packed and "./gpu.txt" in packed, packed

status, out, packed = run("core", SPILLWAY_GPU_SECONDS="0")
table = out[out.rindex("measured"):]
assert status == 1 and "configure skipped: it needs 10 s" in out, out
assert "NO TIME LEFT" in table and "FAILED" not in table, table

# The script is terminated while a program runs, alone or in the background.
started = folder / "started"
os.mkfifo(started)


def terminate(script):
    started.read_text()  # returns when a program has opened and closed the file
    script.terminate()


for blocking, other in [("ctest", "compute-sanitizer"), ("compute-sanitizer", "ctest")]:
    (folder / "bin" / blocking).write_text(f"#!/bin/sh\n(: >{started}) & exec sleep 90\n")
    (folder / "bin" / other).write_text("#!/bin/sh\n")
    for name in (blocking, other):
        (folder / "bin" / name).chmod(0o755)
    status, out, packed = run("core", terminate, SPILLWAY_GPU_BUILT="1")
    table = out[out.rindex("measured"):]
    assert status == 1 and "FAILED with 143" in table, out
    assert not [name for name in packed if "running" in name or "ending" in name], packed

wrong = subprocess.run(["bash", root / "bench/gpu_check.sh", "all", folder], capture_output=True, text=True, check=False)
assert wrong.returncode == 2 and "core|torch RESULTS" in wrong.stderr, wrong

# gpu_table.py shows the rows of a step that there is.
(folder / "steps.txt").write_text("configure 0 3\n")
table = subprocess.run([sys.executable, root / "bench/gpu_table.py", folder, "misspelt"], capture_output=True, text=True)
assert table.returncode == 1 and "no step misspelt" in table.stderr, table

# A filter that matches no test would leave nothing out, and doctest calls a run of no tests a success.
sources = [*root.glob("tests/gpu/*_test.cu"), *root.glob("tests/support/*_load.hpp")]
titles = re.findall(r'(?:SUBCASE|TEST_CASE\w*)\([^"]*"([^"]*)"', "".join(path.read_text() for path in sources))
filters = re.findall(r"-[st]ce?='([^']*)'", (root / "bench/gpu_check.sh").read_text())
assert len(filters) >= 3, filters
for one in ",".join(filters).split(","):
    assert fnmatch.filter(titles, one), one
