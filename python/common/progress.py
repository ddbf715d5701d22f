# SPDX-License-Identifier: Apache-2.0
"""A progress bar, on a terminal and if tqdm is installed. It writes nothing into a log."""
import sys

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


def progress(these, **options):
    """Iterates over a sequence with a progress bar."""
    return tqdm(these, leave=False, disable=None, **options) if tqdm else these


def say(line):
    """Prints a line, above the bar if there is one."""
    if tqdm:
        tqdm.write(line)
    else:
        print(line)
    sys.stdout.flush()
