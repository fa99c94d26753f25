"""Functions of dates and times in expressions, with Spark's results in a session whose time zone is UTC.

    year, month, day (dayofmonth), hour, minute, second      an int
    to_date(time), date_add(date, days), date_sub            a date
    datediff(end, start)                                     an int
    unix_timestamp(time)                                     seconds since 1970, a bigint
    date_trunc('unit', time)                                 a timestamp
    date_format(time, 'pattern')                             a text; NUMBERS and NAMES have the letters

A time is a date, a timestamp, or a timestamp without a zone. Texts are not parsed. Years are those of SQL, 1 to 9999;
another one is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc

from state_backend.attach.casts import MICROS, TIMESTAMP, cast

DAY_MICROS = 86_400 * MICROS
EPOCH_DAY = date(1970, 1, 1).toordinal()
DAYS_MIN, DAYS_MAX = date.min.toordinal() - EPOCH_DAY, date.max.toordinal() - EPOCH_DAY
NAIVE = pa.timestamp("us")
# The units of date_trunc; Spark accepts them in any case.
UNITS = {
    **dict.fromkeys(("year", "yyyy", "yy"), "year"),
    "quarter": "quarter",
    **dict.fromkeys(("month", "mon", "mm"), "month"),
    "week": "week",
    **dict.fromkeys(("day", "dd"), "day"),
    "hour": "hour",
    "minute": "minute",
    "second": "second",
    "millisecond": "millisecond",
    "microsecond": "microsecond",
}
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
# The parts of a pattern: a quoted text, two quotes, a run of one letter, or another character.
PART = re.compile(r"'(?P<quoted>(?:[^']|'')+)'|(?P<quote>'')|(?P<letters>([A-Za-z])\4*)|(?P<other>[^A-Za-z'\[\]{}#])")


def naive(values: pa.Array) -> pa.Array:
    """Return times as timestamps without a zone, in UTC; TypeError if they are no times."""
    if not (pa.types.is_temporal(values.type) or pa.types.is_null(values.type)):
        raise TypeError(f"{values.type} is no date and no timestamp")
    found = cast(values, TIMESTAMP).cast(NAIVE)
    _check_range(found.cast(pa.int64()), DAYS_MIN * DAY_MICROS, (DAYS_MAX + 1) * DAY_MICROS - 1)
    return found


def _check_range(counts: pa.Array, least: int, most: int) -> None:
    bounds = pc.min_max(counts).as_py()
    if bounds["min"] is not None and not least <= bounds["min"] <= bounds["max"] <= most:
        raise TypeError("a year is not one of 1 to 9999")


def _part(function: Callable[[pa.Array], pa.Array]) -> Callable[[Sequence[pa.Array]], pa.Array]:
    def call(arguments: Sequence[pa.Array]) -> pa.Array:
        (values,) = arguments
        return function(naive(values)).cast(pa.int32())

    return call


def _to_date(arguments: Sequence[pa.Array]) -> pa.Array:
    (values,) = arguments
    return cast(values, pa.date32())


def _shifted(add: Callable[[pa.Array, pa.Array], pa.Array]) -> Callable[[Sequence[pa.Array]], pa.Array]:
    def call(arguments: Sequence[pa.Array]) -> pa.Array:
        dates, days = arguments
        if not (pa.types.is_integer(days.type) or pa.types.is_null(days.type)):
            raise TypeError(f"the number of days is an integer, not {days.type}")
        found = add(_days(dates), days.cast(pa.int32()))
        _check_range(found, DAYS_MIN, DAYS_MAX)
        return found.cast(pa.date32())

    return call


def _days(values: pa.Array) -> pa.Array:
    """Return dates as days since 1970."""
    if not pa.types.is_null(values.type) and not pa.types.is_date(values.type):
        raise TypeError(f"{values.type} is no date; write to_date(..)")
    return cast(values, pa.date32()).cast(pa.int32())


def _datediff(arguments: Sequence[pa.Array]) -> pa.Array:
    end, start = arguments
    return pc.subtract_checked(_days(end), _days(start))


def _unix_timestamp(arguments: Sequence[pa.Array]) -> pa.Array:
    (values,) = arguments
    return pc.divide(naive(values).cast(pa.int64()), MICROS)


FUNCTIONS: Mapping[str, Callable[[Sequence[pa.Array]], pa.Array]] = {
    "year": _part(lambda values: pc.year(values)),
    "month": _part(lambda values: pc.month(values)),
    "day": _part(lambda values: pc.day(values)),
    "dayofmonth": _part(lambda values: pc.day(values)),
    "hour": _part(lambda values: pc.hour(values)),
    "minute": _part(lambda values: pc.minute(values)),
    "second": _part(lambda values: pc.second(values)),
    "to_date": _to_date,
    "date_add": _shifted(lambda dates, days: pc.add_checked(dates, days)),
    "date_sub": _shifted(lambda dates, days: pc.subtract_checked(dates, days)),
    "datediff": _datediff,
    "unix_timestamp": _unix_timestamp,
}


def truncated_to(unit: str) -> Callable[[pa.Array], pa.Array] | None:
    """Return the function that truncates times to a unit; None if there is no such unit."""
    known = UNITS.get(unit.lower())
    if known is None:
        return None
    return lambda values: pc.floor_temporal(naive(values), 1, known).cast(pa.int64()).cast(TIMESTAMP)


def formatted_as(pattern: str) -> Callable[[pa.Array], pa.Array] | None:
    """Return the function that writes times in a pattern; None if sparkis does not support the pattern."""
    parts: list[Callable[[pa.Array], pa.Array]] = []
    at = 0
    while at < len(pattern):
        found = PART.match(pattern, at)
        if found is None:
            return None
        at = found.end()
        if found["letters"] is None:
            parts.append(_constant((found["quoted"] or found["other"] or "'").replace("''", "'")))
        elif (part := _letters(found["letters"])) is not None:
            parts.append(part)
        else:
            return None
    if not parts:
        return None

    def call(values: pa.Array) -> pa.Array:
        times = naive(values)
        return pc.binary_join_element_wise(*(part(times) for part in parts), "")

    return call


def _constant(text: str) -> Callable[[pa.Array], pa.Array]:
    return lambda times: pa.repeat(pa.scalar(text), len(times))


def _letters(letters: str) -> Callable[[pa.Array], pa.Array] | None:
    """Return the function for a run of one letter in a pattern; None if sparkis does not support it."""
    letter, count = letters[0], len(letters)
    if letter in NUMBERS and count in NUMBERS[letter][0]:
        number = NUMBERS[letter][1]
        return lambda times: pc.utf8_lpad(number(times).cast(pa.string()), count, "0")
    if letter == "S" and count <= 9:
        return lambda times: pc.utf8_slice_codeunits(_nanoseconds(times), 0, count)
    if letter in NAMES and (names := NAMES[letter][0].get(count)) is not None:
        texts, index_in = pa.array(names), NAMES[letter][1]
        return lambda times: texts.take(index_in(times))
    return None


def _nanoseconds(times: pa.Array) -> pa.Array:
    """Return the fractions of seconds, as nine digits."""
    fraction = pc.subtract(times.cast(pa.int64()), pc.floor_temporal(times, 1, "second").cast(pa.int64()))
    return pc.utf8_lpad(pc.multiply(fraction, 1000).cast(pa.string()), 9, "0")


def _hour_of_twelve(times: pa.Array) -> pa.Array:
    hour = pc.hour(times)
    twelve = pc.subtract(hour, pc.multiply(pc.divide(hour, 12), 12))
    return pc.if_else(pc.equal(twelve, 0), 12, twelve)


# By letter: how often it may be repeated, and the function that gives the number. It has at least as many digits as the
# letter has repetitions.
NUMBERS: Mapping[str, tuple[tuple[int, ...], Callable[[pa.Array], pa.Array]]] = {
    "y": ((1, 4), lambda times: pc.year(times)),
    "M": ((1, 2), lambda times: pc.month(times)),
    "d": ((1, 2), lambda times: pc.day(times)),
    "H": ((1, 2), lambda times: pc.hour(times)),
    "h": ((1, 2), _hour_of_twelve),
    "m": ((1, 2), lambda times: pc.minute(times)),
    "s": ((1, 2), lambda times: pc.second(times)),
}
SHORT_MONTHS, SHORT_DAYS = [name[:3] for name in MONTHS], [name[:3] for name in DAYS]
# By letter: the names by the length of its run, and the function that gives the index of the name.
NAMES: Mapping[str, tuple[Mapping[int, Sequence[str]], Callable[[pa.Array], pa.Array]]] = {
    "M": ({3: SHORT_MONTHS, 4: MONTHS}, lambda times: pc.subtract(pc.month(times), 1)),
    "E": ({1: SHORT_DAYS, 2: SHORT_DAYS, 3: SHORT_DAYS, 4: DAYS}, lambda times: pc.day_of_week(times)),
    "a": ({1: ("AM", "PM")}, lambda times: pc.divide(pc.hour(times), 12)),
}
