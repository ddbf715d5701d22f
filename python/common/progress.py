# SPDX-License-Identifier: Apache-2.0
"""A bar for what people wait for: on a terminal, where tqdm is installed. Into a log it writes nothing."""
import sys

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


def progress(these, **options):
    """Iterates over `these`, which have a length."""
    return tqdm(these, leave=False, disable=None, **options) if tqdm else these


def say(line):
    """Prints a line, above the bar if there is one."""
    if tqdm:
        tqdm.write(line)
    else:
        print(line)
    sys.stdout.flush()
