"""Expressions without Spark have the types and the values that Spark computes, over random and extreme values."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from state_backend.attach.expressions import parse
from state_backend.attach.time_functions import UNITS
from state_backend.model.errors import DescriptorError
from tests.spark.attaching import SEED

pytestmark = pytest.mark.slow

ROWS = 500
EPOCH = datetime(1970, 1, 1)
PATTERNS = (
    "yyyy-MM-dd",
    "yyyy-MM-dd HH:mm:ss",
    "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "yyyyMMdd",
    "yyyy",
    "y-M-d H:m:s.S",
    "dd/MM/yyyy hh:mm a",
    "h 'o''clock' a",
    "EEE, d MMM yyyy",
    "EEEE, dd. MMMM",
    "E",
    "HH:mm:ss.SSS",
    "ss.SSSSSSSSS",
    "MM ''yyyy",
    "mm, ss",
)
TIMES = ("t", "ntz", "d")
EXPRESSIONS = [
    *(
        f"{name}({time})"
        for name in ("year", "month", "day", "dayofmonth", "hour", "minute", "second", "to_date", "unix_timestamp")
        for time in TIMES
    ),
    *(f"date_trunc('{unit}', {time})" for unit in (*UNITS, "Hour", "WEEK") for time in TIMES),
    *("date_format({}, '{}')".format(time, pattern.replace("'", "''")) for pattern in PATTERNS for time in TIMES),
    "date_add(d, 1)",
    "date_add(d, i)",
    "date_sub(d, s)",
    "date_sub(to_date(d), -30)",
    "date_add(d, NULL)",
    "datediff(d, to_date(t))",
    "datediff(to_date(ntz), d)",
    *(f"cast({time} AS {kind})" for time in TIMES for kind in ("date", "timestamp")),
    *(
        f"cast({column} AS {kind})"
        for column in ("s", "i", "n", "f", "v", "small", "wide", "b")
        for kind in ("float", "double", "boolean", "bigint", "decimal(38,6)")
        if (column, kind) != ("b", "decimal(38,6)")
    ),
    *(f"cast({column} AS int)" for column in ("s", "i", "f", "v", "small", "b")),
    *(f"cast({column} AS smallint)" for column in ("s", "small", "b")),
    *(f"cast({column} AS timestamp)" for column in ("s", "i", "n", "v", "f")),
    *(f"cast({column} AS decimal(20,{scale}))" for column in ("f", "v", "small", "i") for scale in (0, 1, 3, 9)),
    "cast(v AS decimal(38,20))",
    "cast(wide AS decimal(38,0))",
    "cast(s AS decimal)",
    "cast(s AS decimal(5))",
    "cast(NULL AS timestamp)",
    "cast(special AS float)",
    "cast(special AS boolean)",
    "cast(special AS decimal(10,2))",
]


def columns(random: Random) -> dict[str, pa.Array]:
    """Return columns of each type, with nulls."""

    def some(make: Any, kind: pa.DataType, *first: Any) -> pa.Array:
        made = [*first, *(make() for _ in range(ROWS - len(first)))]
        return pa.array([None if random.random() < 0.1 else each for each in made], kind)

    def moment() -> datetime:
        near = random.random() < 0.5
        return EPOCH + timedelta(microseconds=random.randrange(-(10**15), 10**15) * (1 if near else 50))

    def double() -> float:
        return random.choice([random.gauss(0, 1000), random.randrange(-999, 999) / 8, random.randrange(10**6) / 1000])

    edges = [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999), EPOCH, EPOCH - timedelta(microseconds=1)]
    return {
        "t": some(
            lambda: moment().replace(tzinfo=UTC), pa.timestamp("us", "UTC"), *(e.replace(tzinfo=UTC) for e in edges)
        ),
        "ntz": some(moment, pa.timestamp("us"), *edges),
        "d": some(lambda: date(random.randrange(1000, 3000), 1, 1) + timedelta(random.randrange(366)), pa.date32()),
        "s": some(lambda: random.randrange(-(2**15), 2**15), pa.int16(), -(2**15), 2**15 - 1),
        "i": some(lambda: random.randrange(-300_000, 300_000), pa.int32()),
        "n": some(lambda: random.randrange(-(2**40), 2**40), pa.int64(), 2**42 + 1),
        "f": some(double, pa.float32(), 0.1, -0.0),
        "v": some(double, pa.float64(), 0.5, 1.5, 2.5, -2.5, 1.005, 0.045, -0.0, 1e-7),
        "special": some(double, pa.float64(), float("nan"), float("inf"), -float("inf")),
        "small": some(lambda: Decimal(random.randrange(-99_999, 99_999)) / 1000, pa.decimal128(9, 3), Decimal("2.500")),
        "wide": some(
            lambda: Decimal(random.randrange(-(10**24), 10**24)) / 10**6,
            pa.decimal128(38, 10),
            Decimal("9007199254740993"),
        ),
        "b": some(lambda: random.random() < 0.5, pa.bool_()),
    }


@pytest.fixture(scope="module")
def given() -> dict[str, pa.Array]:
    return columns(Random(SEED))


def in_frame(spark: SparkSession, given: dict[str, pa.Array]) -> DataFrame:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    return spark.createDataFrame(pa.table(given)).withColumn("ntz", F.expr("cast(ntz AS timestamp_ntz)"))


def plain(values: pa.Array) -> list[Any]:
    """Return values as Python's; dates and times as numbers, because Python has none after the year 9999."""
    if pa.types.is_date(values.type):
        values = values.cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    return list(values.to_pylist())


def test_each_expression_has_type_and_values_of_spark(spark: SparkSession, given: dict[str, pa.Array]):
    in_spark = (
        in_frame(spark, given)
        .select(*(F.expr(text).alias(f"c{index}") for index, text in enumerate(EXPRESSIONS)))
        .toArrow()
    )
    wrong = []
    for index, text in enumerate(EXPRESSIONS):
        expected = in_spark.column(f"c{index}").combine_chunks()
        found = parse(text).values(given, ROWS)
        if found.type != expected.type:
            wrong.append((text, found.type, expected.type))
        pairs = zip(plain(found), plain(expected), strict=True)
        wrong += [(text, *pair) for pair in pairs if repr(pair[0]) != repr(pair[1])][:2]
    assert not wrong


@pytest.mark.parametrize(
    "text",
    [
        "cast(n AS smallint)",
        "cast(n AS int)",
        "cast(v AS decimal(3,1))",
        "cast(i AS decimal(4,0))",
        "cast(small AS decimal(4,3))",
        "cast(special AS bigint)",
        "date_format(d, 'qqqqq')",
        "date_add(d, v)",
        "cast(t AS boolean)",
        "cast(d AS decimal(10,2))",
    ],
)
def test_expression_that_spark_refuses_is_refused(spark: SparkSession, given: dict[str, pa.Array], text: str):
    with pytest.raises(PySparkException):
        in_frame(spark, given).select(F.expr(text)).toArrow()
    with pytest.raises(DescriptorError, match="reader spark"):
        parse(text).values(given, ROWS)
