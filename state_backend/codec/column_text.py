"""The text of Arrow columns, as clients read it.

integer     decimal digits
float       the shortest text that reads back the same; no exponent from 1e-7 up to 1e21 (as JavaScript and Redis)
decimal     plain digits, never an exponent
timestamp   ISO 8601 in UTC with a Z, or without a zone for timestamp_ntz; a fraction only if it is not zero
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Texts with an exponent, which Arrow and Java write for some numbers, are rewritten one by one.
EXPONENT = "[eE]"
EXPONENTS = (b"e", b"E")
# The first character of the text that Arrow writes for a time whose year does not fit into 16 bits.
YEAR_TOO_LARGE = "<"


def as_bytes(column: pa.Array, form: str) -> pa.Array:
    """Return a column's values as the bytes that clients read; null stays null."""
    if form == "float":
        column = _float_text(column)
    elif form == "integer":
        column = column.cast(pa.string())
    elif form == "decimal":
        column = _rewrite(column.cast(pa.string()), lambda text: format(Decimal(text), "f"))
    elif form.startswith("timestamp"):
        column = _timestamp_text(column, zone="Z" if form == "timestamp" else "")
    return column.cast(pa.binary())


def _float_text(column: pa.Array) -> pa.Array:
    scalar = np.float32 if column.type == pa.float32() else np.float64
    return _rewrite(column.cast(pa.string()), lambda text: numpy_float_text(scalar(text)))


def numpy_float_text(number: np.floating[Any]) -> str:
    """Return the shortest text of a number, for numbers that Arrow writes with an exponent."""
    if number == 0 or 1e-7 <= abs(number) < 1e21:
        return np.format_float_positional(number, unique=True, trim="-")
    return np.format_float_scientific(number, unique=True, trim="-", exp_digits=1)


def _rewrite(texts: pa.Array, rewrite: Any) -> pa.Array:
    """Rewrite the texts that have an exponent, which is rare; the others stay unchanged."""
    content = texts.buffers()[2]
    if content is None or not any(letter in content.to_pybytes() for letter in EXPONENTS):
        return texts
    has_exponent = pc.fill_null(pc.match_substring_regex(texts, EXPONENT), False)
    if not pc.any(has_exponent).as_py():
        return texts
    rewritten = [rewrite(text) for text in texts.filter(has_exponent).to_pylist()]
    return pc.replace_with_mask(texts, has_exponent, pa.array(rewritten, pa.string()))


def _timestamp_text(column: pa.Array, zone: str) -> pa.Array:
    instants = column.cast(pa.timestamp("us"))  # the time in UTC, without its zone
    try:
        texts = instants.cast(pa.timestamp("s")).cast(pa.string())  # 2013-07-04 10:00:00
    except pa.ArrowInvalid:  # there are fractions, which take twice as long
        texts = pc.ascii_rtrim(pc.ascii_rtrim(instants.cast(pa.string()), "0"), ".")
    texts = pc.replace_substring(texts, " ", "T", max_replacements=1)
    has_large_year = pc.fill_null(pc.starts_with(texts, YEAR_TOO_LARGE), False)
    if pc.any(has_large_year).as_py():
        counts = instants.filter(has_large_year).cast(pa.int64()).to_pylist()
        texts = pc.replace_with_mask(texts, has_large_year, pa.array(map(_large_year_text, counts), pa.string()))
    return pc.binary_join_element_wise(texts, zone, "")


def _large_year_text(micros: int) -> str:
    """Return the text of a time whose year Arrow cannot write."""
    seconds, fraction = divmod(micros, 1_000_000)
    return f"{np.datetime64(seconds, 's')}.{fraction:06d}".rstrip("0").rstrip(".")
