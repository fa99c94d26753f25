"""The text of Arrow columns, as clients read it.

integer     decimal digits
float       the shortest text that reads back the same; no exponent from 1e-7 up to 1e21 (as JavaScript and Redis)
decimal     plain digits, never an exponent
date        ISO 8601
timestamp   ISO 8601 in UTC with a Z, or without a zone for timestamp_ntz; a fraction only if it is not zero
time        ISO 8601 without a zone: 10:00:00.25
interval    ISO 8601: P1Y2M3DT4H5M6.5S, without the parts that are zero, each with its own sign; PT0S for zero
string      its bytes: Spark does not check that they are UTF-8, so an array of texts may have any bytes

A year after 9999 has a sign, as in ISO 8601 and in Spark: +10000-01-01.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backend.native import change_records

# Texts with an exponent, which Arrow and Java write for some numbers, are rewritten one by one.
EXPONENT = "[eE]"
EXPONENTS = (b"e", b"E")
# The days between which Arrow writes years as Spark does.
FIRST_DAY, LAST_DAY = (int(np.datetime64(day, "D").astype(np.int64)) for day in ("-32767-01-01", "9999-12-31"))
DAY_US = 86_400_000_000
WIDE_YEAR = "^[+-]"
# An interval of days and seconds: its days, hours, minutes and seconds.
DAYS_AND_SECONDS = re.compile(r"P(?!$)(?:(-?\d+)D)?(?:T(?!$)(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?\d+(?:\.\d{1,6})?)S)?)?")
# The forms of numbers.
NUMBERS = (
    (pa.types.is_integer, "integer"),
    (pa.types.is_floating, "float"),
    (pa.types.is_decimal, "decimal"),
)
# Intervals of years and months: Arrow for Python has no such type. This one has 32 bits, too, and is no type of Spark.
YEAR_MONTH = pa.time32("s")
# How Python decodes bytes that are not UTF-8, and the bytes of a surrogate, whole or not, which is no character.
REPLACED = "sparkis.replaced"
SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def as_bytes(column: pa.Array, form: str) -> pa.Array:
    """Return a column's values as the bytes that clients read; null stays null."""
    if form == "float":
        column = _float_text(column)
    elif form == "integer":
        column = _integer_text(column)
    elif form == "decimal":
        column = _rewrite(column.cast(pa.string()), lambda text: format(Decimal(text), "f"))
    elif form.startswith("timestamp"):
        column = _timestamp_text(column, zone="Z" if form == "timestamp" else "")
    elif form == "interval":
        column = interval_text(column)
    return column.cast(pa.binary())


def date_text(column: pa.Array) -> pa.Array:
    """Return dates as ISO 8601."""
    days = column.cast(pa.int32())
    return _with_wide_years(column.cast(pa.string()), days, FIRST_DAY, LAST_DAY, _date_of)


def time_text(column: pa.Array) -> pa.Array:
    """Return times of a day as ISO 8601."""
    return pc.ascii_rtrim(pc.ascii_rtrim(column.cast(pa.string()), "0"), ".")  # Arrow writes all digits of the fraction


def is_interval(kind: pa.DataType) -> bool:
    """Return whether a type is an interval of Spark's: of days and seconds, of years and months, or of a calendar."""
    return bool(pa.types.is_duration(kind) or pa.types.is_interval(kind) or kind == YEAR_MONTH)


def interval_text(column: pa.Array) -> pa.Array:
    """Return intervals as ISO 8601."""
    if pa.types.is_duration(column.type):
        parts: Any = (
            None if each is None else (0, *_divided(each, DAY_US))
            for each in column.cast(pa.duration("us")).cast(pa.int64()).to_pylist()
        )
    elif pa.types.is_interval(column.type):
        parts = (None if each is None else (each[0], each[1], each[2] // 1000) for each in column.to_pylist())
    else:
        parts = (None if each is None else (each, 0, 0) for each in column.cast(pa.int32()).to_pylist())
    return pa.array([None if part is None else _interval(*part) for part in parts], pa.string())


def _divided(number: int, divisor: int) -> tuple[int, int]:
    """Return the quotient and the rest, both with the sign of the number."""
    quotient, rest = divmod(abs(number), divisor)
    return (quotient, rest) if number >= 0 else (-quotient, -rest)


def _interval(months: int, days: int, micros: int) -> str:
    years, months = _divided(months, 12)
    minutes, micros = _divided(micros, 60_000_000)
    hours, minutes = _divided(minutes, 60)
    seconds = f"{'-' if micros < 0 else ''}{abs(micros) // 1_000_000}.{abs(micros) % 1_000_000:06d}"
    time = [(hours, "H"), (minutes, "M"), (seconds.rstrip("0").rstrip(".") if micros else 0, "S")]
    date = "".join(f"{count}{unit}" for count, unit in ((years, "Y"), (months, "M"), (days, "D")) if count)
    clock = "".join(f"{count}{unit}" for count, unit in time if count)
    return f"P{date}{'T' if clock else ''}{clock}" if date or clock else "PT0S"


def _with_wide_years(
    texts: pa.Array, counts: pa.Array, first: int, last: int, text_of: Callable[[int], str]
) -> pa.Array:
    """Rewrite the texts of times that are not from `first` to `last`, which is rare."""
    bounds = pc.min_max(counts).as_py()
    if bounds["min"] is None or (first <= bounds["min"] and bounds["max"] <= last):
        return texts
    is_wide = pc.fill_null(pc.or_(pc.less(counts, first), pc.greater(counts, last)), False)
    rewritten = [text_of(count) for count in counts.filter(is_wide).to_pylist()]
    return pc.replace_with_mask(texts, is_wide, pa.array(rewritten, pa.string()))


def _date_of(days: int) -> str:
    text = str(np.datetime64(days, "D"))
    return text if days < 0 else f"+{text}"


def _time_of(micros: int) -> str:
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{np.datetime64(seconds, 's')}.{fraction:06d}".rstrip("0").rstrip(".")
    return text if micros < 0 else f"+{text}"


def times_of(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse the texts of dates, timestamps or intervals of days and seconds; ArrowInvalid for another text.

    This is the inverse of `as_bytes`, `date_text` and `interval_text`.
    """
    if pa.types.is_duration(kind):
        return _counts_of(texts, _micros_of).cast(pa.duration("us")).cast(kind)
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if not pc.any(pc.match_substring_regex(texts, WIDE_YEAR)).as_py():
            raise
    unit: Literal["D", "us"] = "D" if pa.types.is_date(kind) else "us"
    counts = _counts_of(texts, lambda text: _count_of(text, unit))
    return counts.cast(pa.int32() if unit == "D" else pa.int64()).cast(kind)


def _counts_of(texts: pa.Array, count_of: Callable[[str], int]) -> pa.Array:
    try:
        return pa.array([None if each is None else count_of(each) for each in texts.to_pylist()], pa.int64())
    except (ValueError, OverflowError) as error:
        raise pa.ArrowInvalid(str(error)) from None


def _micros_of(text: str) -> int:
    parts = DAYS_AND_SECONDS.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is not an interval of days and seconds")
    days, hours, minutes, seconds = (Decimal(group or 0) for group in parts.groups())
    return int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000_000)


def _count_of(text: str, unit: Literal["D", "us"]) -> int:
    bare = text.removeprefix("+").removesuffix("Z")
    time = np.datetime64(bare, "D") if unit == "D" else np.datetime64(bare, "us")
    return int(time.astype(np.int64))


def any_text(content: pa.Array) -> pa.Array:
    """Return bytes as texts, UTF-8 or not."""
    return content.cast(options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))


def readable_text(texts: pa.Array) -> pa.Array:
    """Return texts with U+FFFD in place of bytes that are not UTF-8, as Java decodes them; other types as they are."""
    if not pa.types.is_string(texts.type):
        return texts
    content = texts.cast(pa.binary())
    try:
        content.cast(pa.string())
    except pa.ArrowInvalid:
        decoded = [None if each is None else each.decode(errors=REPLACED) for each in content.to_pylist()]
        return pa.array(decoded, pa.string())
    return texts


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of bytes that are not UTF-8, and where the text goes on: for Java, a surrogate is one."""
    assert isinstance(error, UnicodeDecodeError)
    surrogate = SURROGATE.match(error.object, error.start)
    return "\ufffd", error.end if surrogate is None else surrogate.end()


codecs.register_error(REPLACED, _replaced)


def _integer_text(column: pa.Array) -> pa.Array:
    if change_records is None or not len(column):
        return column.cast(pa.string())
    numbers = column if column.type == pa.int64() else column.cast(pa.int64())
    values = np.frombuffer(numbers.buffers()[1], np.int64)[numbers.offset : numbers.offset + len(numbers)]
    validity = validity_of(numbers)
    ends, content = change_records.integer_texts(values, validity)
    bits = None if validity is None else pa.py_buffer(np.packbits(validity, bitorder="little"))
    return bytes_of(ends, content, bits)


def validity_of(column: pa.Array) -> npt.NDArray[np.uint8] | None:
    """Return a byte for each row, which is 0 for null; None if there is no null."""
    if not column.null_count:
        return None
    is_valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    return is_valid.view(np.uint8)


def bytes_of(ends: bytes, content: bytes, validity: pa.Buffer | None = None) -> pa.Array:
    """Return the texts that the compiled core made as an array.

    Args:
        ends: Where they begin and end, as i32.
    """
    used = int.from_bytes(ends[-4:], sys.byteorder)
    buffers = [validity, pa.py_buffer(ends), pa.py_buffer(content).slice(0, used)]
    return pa.Array.from_buffers(pa.binary(), len(ends) // 4 - 1, buffers)


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
    written = b"" if content is None else content.to_pybytes()
    if not any(letter in written for letter in EXPONENTS):
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
    counts, end = instants.cast(pa.int64()), (LAST_DAY + 1) * DAY_US
    texts = _with_wide_years(texts, counts, FIRST_DAY * DAY_US, end - 1, _time_of)
    return pc.binary_join_element_wise(texts, zone, "")
