# SPDX-License-Identifier: Apache-2.0
"""Converts numbers of bytes from arguments and for output. Both packages have this file, by a link."""
import os
import re

_FACTORS = {"": 1} | {letter: 1000 ** (i + 1) for i, letter in enumerate("KMGT")} | {
    letter + "I": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}


def number_of_bytes(value, call, name):
    """Returns the bytes that the argument `name` of the function `call` stands for: a whole number, or text such as
    "2GB" or "1.5 GiB". Raises ValueError for anything else.
    """
    try:
        number = _number_of_text(value) if isinstance(value, str) else value
        whole = int(number)
        if whole == number and 0 <= whole < 2 ** 64:
            return whole
    except (TypeError, ValueError, OverflowError):  # not convertible, NaN, or infinite
        pass
    raise ValueError(f"{__package__}.{call}({name}={value!r}): bytes are a whole number, or text such as \"2GB\" or "
                     "\"512MiB\"")


def _number_of_text(text):
    """Converts text. A fraction of a byte is rounded down, but not to 0, which would mean that there is no limit."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*((?:[KMGT]I?)?)B?", text.strip().upper())
    if not match:
        raise ValueError(text)
    number = float(match[1]) * _FACTORS[match[2]]
    return int(number) if match[2] and number >= 1 else number


def numbers_of_bytes(call, **values):
    """Does the same for several arguments of one function; None becomes 0."""
    return [number_of_bytes(0 if value is None else value, call, name) for name, value in values.items()]


def file_tier(folder, limit):
    """Returns the argument `file_tier` of `install` as text, which is empty if there is none, and the most bytes to put
    there: `limit`, or if that is 0 half of what is free. Raises ValueError for what is no folder.
    """
    if not folder:
        return "", limit
    try:
        path = os.fsdecode(folder)
        status = os.statvfs(path)
    except (TypeError, ValueError, OSError) as error:
        raise ValueError(f"{__package__}.install(file_tier={folder!r}): expected a folder ({error})") from None
    return path, limit or status.f_bavail * status.f_frsize // 2


def text_of(n):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.1f} {unit}" if unit != "B" else f"{n} B"
        n /= 1024


def summary(rows, *counts):
    """Returns the lines of a table: rows of a name and a number of bytes, and a line with four counts: failed
    requests for memory, and prefetches that were in time, late and wasted.
    """
    width = max(len(name) for name, _ in rows)
    return [f"{__package__} memory"] + [f"  {name:<{width}}  {text_of(n):>12}" for name, n in rows] + [
        "  out of memory: {}, prefetched in time: {}, late: {}, for nothing: {}".format(*counts)]
