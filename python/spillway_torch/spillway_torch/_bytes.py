# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes, as programs give them."""
import re

_FACTORS = {"": 1} | {letter: 1000 ** (i + 1) for i, letter in enumerate("KMGT")} | {
    letter + "I": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}


def number_of_bytes(value, call, name):
    """The number that the argument `name` of `call` stands for: a whole number, or text such as "2GB" or "1.5 GiB"."""
    number = value
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*((?:[KMGT]I?)?)B?", value.strip().upper())
        number = int(float(match[1]) * _FACTORS[match[2]]) if match else -1
    try:
        if number >= 0 and number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):  # no number, not a number, infinite
        pass
    raise ValueError(f"{__package__}.{call}({name}={value!r}): bytes are a whole number, or text such as \"2GB\" or "
                     "\"512MiB\"")
