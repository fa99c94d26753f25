"""Doubles as Redis reads them (C's strtod) and writes them (fpconv, from 7.2 on)."""

from __future__ import annotations

import re
from math import inf, isinf
from typing import NamedTuple

# The texts that strtod parses completely, except NaN, which all commands refuse.
DOUBLE = re.compile(
    rb"""[\t-\r ]*[+-]?(?:
        (?P<inf>inf(?:inity)?)
      | 0x(?P<hex>[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?
      | (?P<digits>[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?
    )""",
    re.IGNORECASE | re.VERBOSE,
)
# Smaller numbers lose digits; strtod sets ERANGE for them.
NORMAL_MIN = 2.0**-1022
# Integers up to this one are written with all their digits.
INTEGER_MAX = 2.0**62


class Double(NamedTuple):
    """A parsed number.

    Args:
        is_out_of_range: Too large or too small for a double; `value` is the nearest double.
    """

    value: float
    is_out_of_range: bool


def read_double(argument: bytes) -> Double | None:
    """Parse a number as strtod does, if the whole text is a number; else None.

    A text ends at a zero byte; an empty text is 0.
    """
    text = argument.partition(b"\0")[0]
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


def strict_double(argument: bytes) -> float | None:
    """Parse a number as string2d of Redis does, which also refuses spaces and zero bytes; None if it is no number."""
    found = read_double(argument)
    if found is None or not argument or b"\0" in argument or argument[:1].isspace():
        return None
    return None if found.is_out_of_range and (isinf(found.value) or not found.value) else found.value


def double_text(number: float) -> bytes:
    """Return the shortest text that parses to the same number; integers in full: `3`, `1.5`, `-inf`, `1e+30`."""
    if -INTEGER_MAX <= number <= INTEGER_MAX and number == (whole := int(number)) and whole:
        return b"%d" % whole
    text = repr(number)
    if "n" in text or 1e-3 <= abs(number) < 1e4:
        return text.encode()  # infinite, or in a range where both layouts are equal
    return _fpconv_text(text)


def _fpconv_text(text: str) -> bytes:
    """Write the shortest digits in fpconv's layout, which switches to an exponent at other numbers than Python."""
    sign, text = ("-", text[1:]) if text[0] == "-" else ("", text)
    mantissa, _, exponent = text.partition("e")
    before, _, after = mantissa.partition(".")
    digits = (before + after).lstrip("0")  # without zeros at the end: no integer comes here but 0
    if not digits:
        return f"{sign}0".encode()
    scale = int(exponent or 0) - len(after)
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
