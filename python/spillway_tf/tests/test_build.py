# SPDX-License-Identifier: Apache-2.0
"""What a source distribution holds."""
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

SETUP = pathlib.Path(__file__).resolve().parents[1] / "setup.py"


def test_a_source_distribution_carries_the_headers_and_all_of_the_package(tmp_path):
    root = SETUP.parents[2]
    copy = tmp_path / "python" / "spillway_tf"  # setuptools writes beside the sources
    shutil.copytree(SETUP.parent, copy)
    for name in ("include", "LICENSE"):
        (tmp_path / name).symlink_to(root / name)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_INCLUDE"}
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], cwd=copy, env=environment, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"LICENSE", "include/spillway/interop/tensorflow.hpp", "csrc/module.cpp", "csrc/gpu_module.cpp"} <= names
    assert {f"spillway_tf/{path.name}" for path in (SETUP.parent / "spillway_tf").glob("*.py")} <= names
