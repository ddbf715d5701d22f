# SPDX-License-Identifier: Apache-2.0
"""Lists the files in a source distribution of one of the packages."""
import os
import shutil
import subprocess
import sys
import tarfile


def names_in(package, scratch):
    """Makes a source distribution of `package`, a folder with a setup.py, in the empty folder `scratch`. Returns the
    names of its files.
    """
    copy = scratch / "python" / package.name  # a copy, since setuptools writes into the folder of the sources
    shutil.copytree(package, copy)
    for name in ("include", "LICENSE"):
        (scratch / name).symlink_to(package.parents[1] / name)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_INCLUDE"}
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", scratch], cwd=copy, env=environment, check=True)
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return {name.partition("/")[2] for name in files.getnames()}
