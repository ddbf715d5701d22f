# SPDX-License-Identifier: Apache-2.0
"""Checks what bench/gpu_check.sh prints when its time is over, its build fails or it is terminated.

Usage: gpu_check_test.py <project root>

Nothing is built, since a script that fails replaces cmake. Another script replaces nvidia-smi, so that no GPU is needed.
"""
import os
import pathlib
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
