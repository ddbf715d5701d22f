# SPDX-License-Identifier: Apache-2.0
"""Fails unless all places that name the project's version name the one in CMakeLists.txt. Usage: versions.py <project root>

Also the versions of PyTorch and TensorFlow that the modules are tested with, which scripts and pages name.
"""
import pathlib
import re
import subprocess
import sys

# A place is a file and the text around the version in it. {v} is the version, {minor} its first two numbers.
PLACES = [
    ("CMakeLists.txt", r"^  VERSION {v}$"),
    ("CITATION.cff", r"^version: {v}$"),
    ("CHANGELOG.md", r"\A# Changelog\n(?:(?!^## ).*\n)*## {v} \("),
    ("CONTRIBUTING.md", r'git tag -a v{v} -m "spillway {v}"'),
    ("README.md", r"`spillway/{v}`"),
    ("README.md", r"^{minor}, before its first release"),
    ("README.md", r"find_package\(spillway {minor} REQUIRED\)"),
    ("docs/api.md", r"\*\*Promise\.\*\* {minor} is before 1\.0"),
    ("cmake/spillwayConfig.cmake.in", r"find_package\(spillway {minor} \["),
    ("packaging/conan/test_package/CMakeLists.txt", r"find_package\(spillway {minor} REQUIRED\)"),
    ("packaging/vcpkg/spillway/vcpkg.json", r'"version": "{v}"'),
    ("python/spillway_torch/setup.py", r'^VERSION = "{v}"$'),
    ("python/spillway_tf/setup.py", r'^VERSION = "{v}"$'),
    ("tests/install/consumer/CMakeLists.txt", r"find_package\(spillway {minor} REQUIRED\)"),
]
# Where the version of a framework is defined, and the places that have to name the same version.
FRAMEWORKS = {
    "PyTorch": ("scripts/test-pytorch.sh", [("docs/platforms.md", r"^\| PyTorch, .*\b{v} \|$")]),
    "TensorFlow": ("scripts/test-tensorflow.sh", [("docs/platforms.md", r"^\| TensorFlow, .*\b{v} \|$")]),
}
OWN = {"tests/compile/versions.py"}


def stale(root: pathlib.Path, places, version: str) -> list[str]:
    """Returns the places that do not name the version."""
    words = {"v": re.escape(version), "minor": re.escape(".".join(version.split(".")[:2]))}
    return [f"{name}: does not name version {version} where it should: {pattern}" for name, pattern in places
            if not re.search(pattern.format(**words), (root / name).read_text(), re.MULTILINE)]


def unknown(root: pathlib.Path, version: str) -> list[str]:
    """Returns files that name the version but are not in the table, so that the next version would not be checked there."""
    found = subprocess.run(["git", "grep", "-lIF", version], cwd=root, capture_output=True, text=True).stdout.split()
    exact = re.compile(rf"(?<![\w.]){re.escape(version)}(?![\w.]*\d)")
    known = OWN | {name for name, _ in PLACES}
    return [f"{name}: names version {version}, and is not in the table of tests/compile/versions.py" for name in found
            if name not in known and exact.search((root / name).read_text())]


root = pathlib.Path(sys.argv[1]).resolve()
version = re.search(r"^project\(.*?VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text(), re.MULTILINE | re.DOTALL)[1]
complaints = stale(root, PLACES, version) + unknown(root, version)
for script, places in FRAMEWORKS.values():
    complaints += stale(root, places, re.search(r"^version=([\d.]+)$", (root / script).read_text(), re.MULTILINE)[1])
print("\n".join(complaints))
sys.exit(bool(complaints))
