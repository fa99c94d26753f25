"""Expressions over columns have Spark's results, and unsupported ones are refused."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from state_backend.attach.expressions import parse
from state_backend.codec.column_text import any_text
from state_backend.model.errors import DescriptorError

COLUMNS = {
    "n": pa.array([1, None, -4], pa.int64()),
    "v": pa.array([2.0, 0.0, None], pa.float64()),
    "k": pa.array(["a", None, "É"], pa.string()),
    "price": pa.array([None, None, None], pa.decimal128(9, 2)),
}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("n + 2 * 3", [7, None, 2]),
        ("-(n - 1)", [0, None, 5]),
        ("n / v", [0.5, None, None]),
        ("1 / v", [0.5, None, None]),
        ("coalesce(k, 'it''s none')", ["a", "it's none", "É"]),
        ("concat(k, '-', n)", ["a-1", None, "É--4"]),
        ("concat_ws('-', k, n)", ["a-1", "", "É--4"]),
        ("lower(`k`)", ["a", None, "é"]),
        ("abs(cast(n AS int))", [1, None, 4]),
        ("cast(v * 1.5 AS bigint)", [3, 0, None]),
        ("cast(price AS double)", [None, None, None]),
    ],
)
def test_results_of_functions_equal_documentation_of_spark(text: str, values: list[Any]):
    expression = parse(text)
    assert expression.values(COLUMNS, 3).to_pylist() == values
    assert (
        expression.kind({name: column.type for name, column in COLUMNS.items()}) == expression.values(COLUMNS, 3).type
    )


# Spark's documentation has these results.
T, D = datetime(2015, 3, 5, 9, 32, 5, 123456, UTC), date(2016, 7, 30)
TIMES = {
    "t": pa.array([T, None], pa.timestamp("us", "UTC")),
    "d": pa.array([D, None], pa.date32()),
    "sunday": pa.array([date(2019, 8, 4), None], pa.date32()),
    "before": pa.array([datetime(1969, 12, 31, 23, 59, 59, 500_000, UTC), None], pa.timestamp("us", "UTC")),
    "ntz": pa.array([datetime(2009, 7, 30, 12, 58, 59), None], pa.timestamp("us")),
    "v": pa.array([2.675, None], pa.float64()),
    "price": pa.array([Decimal("12.345"), None], pa.decimal128(9, 3)),
    "b": pa.array([True, None], pa.bool_()),
    "n": pa.array([70_000, None], pa.int64()),
}


def at(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("date_trunc('YEAR', t)", at(2015, 1, 1)),
        ("date_trunc('mm', t)", at(2015, 3, 1)),
        ("date_trunc('quarter', d)", at(2016, 7, 1)),
        ("date_trunc('WEEK', sunday)", at(2019, 7, 29)),
        ("date_trunc('DD', t)", at(2015, 3, 5)),
        ("date_trunc('HOUR', t)", at(2015, 3, 5, 9)),
        ("date_trunc('millisecond', t)", at(2015, 3, 5, 9, 32, 5, 123000)),
        ("date_trunc('second', before)", at(1969, 12, 31, 23, 59, 59)),
        ("date_format(d, 'y')", "2016"),
        ("date_format(t, 'yyyy-MM-dd''T''HH:mm:ss.SSS')", "2015-03-05T09:32:05.123"),
        ("date_format(ntz, 'EEE, d MMM yyyy hh:mm a')", "Thu, 30 Jul 2009 12:58 PM"),
        ("date_add(d, 1)", date(2016, 7, 31)),
        ("date_sub(d, 1)", date(2016, 7, 29)),
        ("datediff(date_add(d, 1), d)", 1),
        ("datediff(d, to_date(t))", 513),
        ("unix_timestamp(cast(d AS timestamp))", 1_469_836_800),
        ("unix_timestamp(before)", 0),
        ("year(d)", 2016),
        ("month(d) * 100 + day(d)", 730),
        ("hour(ntz)", 12),
        ("minute(ntz)", 58),
        ("second(t)", 5),
        ("to_date(before)", date(1969, 12, 31)),
        ("cast(ntz AS timestamp)", at(2009, 7, 30, 12, 58, 59)),
        ("cast(1460073600 AS timestamp)", at(2016, 4, 8)),
        ("cast(d AS date)", D),
        ("cast(v AS decimal(10,2))", Decimal("2.68")),
        ("cast(v AS decimal)", Decimal(3)),
        ("cast(price AS decimal(4, 1))", Decimal("12.3")),
        ("cast(price AS int)", 12),
        ("cast(v AS smallint)", 2),
        ("cast(b AS bigint)", 1),
        ("cast(price AS boolean)", True),
        ("cast(0.1 AS float)", 0.10000000149011612),
        ("cast(9007199254740993 AS double)", 9007199254740992.0),
    ],
)
def test_times_and_casts_equal_spark(text: str, value: Any):
    expression = parse(text)
    found = expression.values(TIMES, 2)
    assert found.to_pylist() == ([value, None] if expression.names else [value, value])
    assert expression.kind({name: column.type for name, column in TIMES.items()}) == found.type


@pytest.mark.parametrize(
    "text",
    [
        "year(v)",
        "date_add(t, 1)",
        "date_add(d, v)",
        "date_add(d, 3000000)",
        "unix_timestamp(d, 'yyyy')",
        "to_date(n)",
        "cast(n AS smallint)",
        "cast(n AS decimal(4,0))",
        "cast(v AS decimal(2,2))",
        "cast(t AS boolean)",
        "cast(d AS int)",
        "cast('2016-04-08' AS timestamp)",
    ],
)
def test_expression_with_other_result_in_spark_is_refused(text: str):
    with pytest.raises(DescriptorError, match=r"cannot compute .*reader='spark'"):
        parse(text).values(TIMES, 2)


def test_texts_that_are_not_utf8_are_their_bytes():
    """As in Spark, where only functions of characters decode them."""
    column = {"k": any_text(pa.array([b"\xe9a", None, b"b"], pa.binary()))}
    for text, values in (
        ("concat(k, '-')", [b"\xe9a-", None, b"b-"]),
        ("concat_ws('/', k, 'c')", [b"\xe9a/c", b"c", b"b/c"]),
        ("concat_ws('', k, 'c')", [b"\xe9ac", b"c", b"bc"]),
        ("coalesce(k, 'none')", [b"\xe9a", b"none", b"b"]),
        ("upper(k)", ["\ufffdA".encode(), None, b"B"]),
        ("lower(k)", ["\ufffda".encode(), None, b"b"]),
    ):
        assert parse(text).values(column, 3).cast(pa.binary()).to_pylist() == values


def test_year_that_sql_does_not_have_is_refused():
    times = pa.array([400_000_000_000_000_000], pa.int64()).cast(pa.timestamp("us", "UTC"))
    with pytest.raises(DescriptorError, match="a year is not one of 1 to 9999"):
        parse("year(t)").values({"t": times}, 1)


REFUSED = (
    "date_trunc('century', n)",
    "date_trunc(n, n)",
    "date_format(n, 'G')",
    "date_format(n, 'yyyy-[MM]')",
    "date_format(n, 'yyyyT')",
    "date_format(n, 'MMMMM')",
    "date_format(n, '')",
    "unix_timestamp()",
    "cast(n AS decimal(39,1))",
    "cast(n AS decimal(3,4))",
    "cast(n AS decimal(3.5))",
    "cast(n AS timestamp",
)


@pytest.mark.parametrize(
    "text", ["", "n +", "sqrt(n)", "n; drop", "n % 2", "cast(n AS date2)", "(n", "n n", "'open", *REFUSED]
)
def test_invalid_expression_is_refused(text: str):
    with pytest.raises(DescriptorError, match="--reader spark"):
        parse(text)


@pytest.mark.parametrize("text", ["k + 1", "price * 2", "concat(k, v)", "coalesce(k, n)", "cast(k AS int)"])
def test_types_that_do_not_fit_are_refused(text: str):
    with pytest.raises(DescriptorError, match="cannot compute"):
        parse(text).kind({name: column.type for name, column in COLUMNS.items()})
