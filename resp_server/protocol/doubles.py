"""Doubles as Redis reads them (C's strtod) and writes them (fpconv, from 7.2 on)."""

from __future__ import annotations

import re
from math import inf, isinf
from typing import NamedTuple

# What strtod takes as a whole. It also takes NaN, which no command does.
DOUBLE = re.compile(
    rb"""[\t-\r ]*[+-]?(?:
        (?P<inf>inf(?:inity)?)
      | 0x(?P<hex>[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?
      | (?P<digits>[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?
    )""",
    re.IGNORECASE | re.VERBOSE,
)
# Below it numbers lose digits, which strtod says by ERANGE.
NORMAL_MIN = 2.0**-1022
# Whole numbers up to it are written with all their digits.
WHOLE_MAX = 2.0**62


class Double(NamedTuple):
    """A number that was read; is_off: it is too large or too small for a double, and `value` is what is nearest."""

    value: float
    is_out_of_range: bool


def read_double(word: bytes) -> Double | None:
    """Read a number as strtod does where all of a text has to be one; None if it is none.

    A text ends at a zero byte, and an empty one is 0.
    """
    text = word.partition(b"\0")[0]
    if not text:
        return Double(0.0, False)
    found = DOUBLE.fullmatch(text)
    if found is None:
        return None
    if found["inf"]:
        return Double(float(text), False)
    digits = found["digits"] or found["hex"]
    try:
        value = float(text) if found["digits"] else float.fromhex(text.decode().strip())
    except OverflowError:
        value = -inf if b"-" in text[: found.start("hex")] else inf
    is_zero = not digits.strip(b"0.")
    return Double(value, isinf(value) or (abs(value) < NORMAL_MIN and not is_zero))


def strict_double(word: bytes) -> float | None:
    """Read a number where nothing but a number may stand, as string2d of Redis does; None if it is none."""
    found = read_double(word)
    if found is None or not word or b"\0" in word or word[:1].isspace():
        return None
    return None if found.is_out_of_range and (isinf(found.value) or not found.value) else found.value


def double_text(number: float) -> bytes:
    """Return a text that reads back the same, the shortest but for whole numbers: `3`, `1.5`, `-inf`, `1e+30`."""
    if -WHOLE_MAX <= number <= WHOLE_MAX and number == (whole := int(number)) and whole:
        return b"%d" % whole
    text = repr(number)
    if "n" in text or 1e-3 <= abs(number) < 1e4:
        return text.encode()  # infinite, or where the layout is the same
    return _laid_out(text)


def _laid_out(text: str) -> bytes:
    """Lay out the shortest digits as fpconv does, which takes to an exponent at other places than Python."""
    sign, text = ("-", text[1:]) if text[0] == "-" else ("", text)
    mantissa, _, exponent = text.partition("e")
    before, _, after = mantissa.partition(".")
    written = (before + after).lstrip("0")
    digits = written.rstrip("0")
    if not digits:
        return f"{sign}0".encode()
    scale = int(exponent or 0) - len(after) + len(written) - len(digits)
    power = scale + len(digits) - 1  # of the first digit
    if scale >= 0 and power < len(digits) + 7:
        return f"{sign}{digits}{'0' * scale}".encode()
    if scale < 0 and (scale > -7 or abs(power) < 4):
        point = len(digits) + scale
        if point <= 0:
            return f"{sign}0.{'0' * -point}{digits}".encode()
        return f"{sign}{digits[:point]}.{digits[point:]}".encode()
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{power:+d}".encode()
