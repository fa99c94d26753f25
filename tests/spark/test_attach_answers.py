"""What is served of an aggregation equals the query's own output, for each function, over random rows with nulls."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from spark_hooks.attach.plans import functions_of
from state_backend.apply.replay import read_snapshot
from state_backend.attach.attachment import Attachment
from state_backend.attach.start import attach_files
from state_backend.attach.states import AttachedState
from state_backend.model.descriptor import Kind
from tests.spark.attaching import SEED
from tests.spark.micro_batches import Batches, start

pytestmark = pytest.mark.slow

Make = Callable[[str], Batches]
SCHEMA = "k string, n bigint, v double, w double, s string, b binary, d7 decimal(7,2), d decimal(12,4), e decimal(30,6)"
# The functions as people name them in columns=. The query has them without the types of arguments.
FUNCTIONS = {
    "rows": "count(*)",
    "some": "count_if(n > 2)",
    "mean": "avg(v)",
    "mean_n": "mean(n)",
    "mean_d7": "avg(d7::decimal(7,2))",
    "mean_d": "avg(d)",
    "mean_e": "avg(e)",
    "tried": "try_avg(w)",
    "sum": "sum(v)",
    "sum_n": "sum(n)",
    "sum_d7": "sum(d7::decimal(7,2))",
    "sum_d": "sum(d)",
    "tried_n": "try_sum(n)",
    "least": "min(s)",
    "most": "max(d)",
    "all": "bool_and(n > -4)",
    "any": "bool_or(n > 7)",
    "first": "first(s)",
    "present": "first(v, true)",
    "last": "last(n)",
    "at_most": "max_by(s, v)",
    "at_least": "min_by(n, v)",
    "bits": "bit_xor(n)",
    "stddev": "stddev(v)",
    "stddev_pop": "stddev_pop(v)",
    "variance": "variance(v)",
    "var_pop": "var_pop(v)",
    "skewness": "skewness(v)",
    "kurtosis": "kurtosis(v)",
    "corr": "corr(v, w)",
    "covar": "covar_samp(v, w)",
    "covar_pop": "covar_pop(v, w)",
    "regr_count": "regr_count(v, w)",
    "regr_avgx": "regr_avgx(v, w)",
    "list": "collect_list(d::decimal(12,4))",
    "set": "collect_set(s::string)",
    "byte_set": "collect_set(b::binary)",
    "structs": "collect_list(t::struct<v:double,a:array<string>>)",
    "distinct": "approx_count_distinct(n)",
    "roughly": "approx_count_distinct(v, 0.2)",
    "median": "median(v::double)",
    "tenth": "percentile(n::bigint, array(0.1, 0.9))",
    "about": "percentile_approx(n::bigint, 0.3)",
    "abouts": "approx_percentile(v::double, array(0.0, 0.5, 1.0), 50)",
}
DECLARED_TYPE = re.compile(r"::(\w+\([^)]*\)|\w+<.*>|\w+)")


def some_rows(random: Random, count: int) -> list[dict[str, Any]]:
    """Return rows of keys with many, few, one, and only null values."""
    rows = []
    for _ in range(count):
        digits = random.randrange(-(10**12), 10**12)
        row = {
            "n": random.randrange(-5, 10_000 if random.random() < 0.5 else 10),
            "v": random.choice([random.gauss(3.0, 100.0), random.randrange(-8, 9) / 4]),
            "w": random.uniform(0.5, 1.5),
            "s": random.choice(["a", "b", "ünï", 'q"\\', ""]),
            "b": random.choice(["AAEC", "/w==", ""]),
            "d7": f"{random.randrange(-99_999, 99_999) / 100:.2f}",
            "d": f"{Decimal(random.randrange(-(10**8), 10**8)) / 10_000:f}",
            "e": f"{Decimal(digits) * 10**9 + Decimal(digits) / 10**6:f}",
        }
        kept = {name: each for name, each in row.items() if random.random() < 0.8}
        rows.append(kept | {"k": random.choices(["many", "few", "none"], [0.9, 0.08, 0.02])[0]})
        if rows[-1]["k"] == "none":
            rows[-1] = {"k": "none"}
    return [*rows, {"k": "one", "n": 1, "v": 0.5, "w": 1.0, "s": "a", "d7": "0.05", "d": "1.00005"}]


def equal(found: bytes | None, expected: Any) -> bool:
    """Return whether a served value is the one that Spark shows."""
    if found is None or expected is None:
        return found is None and expected is None
    text = found.decode()
    if isinstance(expected, bool):
        return text == str(expected).lower()
    if isinstance(expected, float):
        return math.isnan(expected) if text == "nan" else float(text) == expected
    if isinstance(expected, Decimal):
        return text == format(expected, "f")
    return text == str(expected)


def plain(value: Any) -> Any:
    """Return a collected value as its JSON has it."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bytearray | bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple):
        return {name: plain(each) for name, each in value.asDict().items()}  # type: ignore[attr-defined]
    return [plain(each) for each in value] if isinstance(value, list) else value


def check(spark: SparkSession, log: Path, table: str) -> None:
    """Compare the served state with the query's output."""
    expected = {row.k: row for row in spark.table(table).collect()}
    assert set(expected) >= {"many", "few", "one"}
    wrong = []
    with read_snapshot(str(log), "q") as snapshot:
        for key, row in expected.items():
            found = dict(snapshot.map_pairs(f"q:aggregation:{key}".encode()))
            for name in FUNCTIONS:
                value, given = row[name], found.get(name.encode())
                if isinstance(value, list):
                    served = json.loads(given or "null")
                    is_set = name.endswith("set")
                    same = (sorted(served) == sorted(plain(value))) if is_set else served == plain(value)
                else:
                    same = equal(given, value)
                if not same:
                    wrong.append((key, name, given, value))
    assert not wrong


def test_results_are_those_of_query(spark: SparkSession, batches: Make, tmp_path: Path):
    random = Random(SEED)
    rows, checkpoint = batches(SCHEMA), tmp_path / "checkpoint"
    rows.add(*some_rows(random, 300))
    given = rows.df.withColumn("t", F.struct("v", F.array("s").alias("a")))
    output = given.groupBy("k").agg(
        *(F.expr(DECLARED_TYPE.sub("", text)).alias(name) for name, text in FUNCTIONS.items())
    )
    query = start(output.writeStream.outputMode("complete").format("memory"), "q", checkpoint)
    declared = AttachedState(columns=FUNCTIONS)
    with (
        attach_files(str(checkpoint), [declared], job="q", log=str(tmp_path / "declared")) as by_columns,
        sparkis.attach(query, log=tmp_path / "planned") as by_plan,
        sparkis.attach(query, log=tmp_path / "spark", reader="spark") as by_spark,
    ):
        for count in (20, 5000):
            rows.add(*some_rows(random, count))
            query.processAllAvailable()
            for attachment in (by_columns, by_plan, by_spark):
                assert attachment.wait()
                check(spark, Path(attachment.log), "q")
    query.stop()


def read(attachment: Attachment) -> dict[bytes, Any]:
    """Return the keys of an attachment's job with their values."""
    kinds = {state.name: state.kind for state in attachment.states}
    with read_snapshot(attachment.log, attachment.job) as snapshot:
        return {
            change.key: dict(snapshot.map_pairs(change.key))
            if kinds[change.state] is Kind.MAP
            else snapshot.value(change.key)
            for change in snapshot.changes()
        }


def test_sessions_have_functions_of_plan(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v double, t timestamp")
    given = rows.df.withWatermark("t", "1 minute").groupBy(F.session_window("t", "10 seconds"), "k")
    sessions = given.agg(F.avg("v").alias("mean"), F.stddev("v"))
    rows.add(*({"k": "k", "v": each, "t": f"2026-01-01T00:00:0{each}Z"} for each in (1, 3)))
    query = start(sessions.writeStream.outputMode("append").format("noop"), "q", tmp_path / "checkpoint")
    with (
        attach_files(
            str(tmp_path / "checkpoint"), job="q", log=str(tmp_path / "log"), functions=functions_of(query)
        ) as by_files,
        sparkis.attach(query, log=tmp_path / "spark", reader="spark") as by_spark,
    ):
        assert by_files.wait() and by_spark.wait()
        fields = {b"session_window_end": b"2026-01-01T00:00:13Z", b"mean": b"2", b"stddev(v)": b"1.4142135623730951"}
        assert read(by_files) == read(by_spark) == {b"q:sessions:k:2026-01-01T00:00:01Z": fields}
    query.stop()


def test_each_of_several_aggregations_has_its_functions(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v double, t timestamp")
    inner = rows.df.withWatermark("t", "1 minute").groupBy(F.window("t", "5 seconds"), "k")
    means = inner.agg(F.avg("v").alias("mean"), (F.sum("v") / F.count("*")).alias("unused"))
    output = means.groupBy(F.window(F.window_time("window"), "1 minute")).agg(F.variance("mean").alias("spread"))
    checkpoint, log = tmp_path / "checkpoint", str(tmp_path / "log")
    rows.add(*({"k": "k", "v": each, "t": f"2026-01-01T00:00:0{each}Z"} for each in (1, 2, 7)))
    query = start(output.writeStream.outputMode("append").format("noop"), "q", checkpoint)
    by_start = AttachedState("means", operator=1, key="k", field="start")
    rows.add({"k": "late", "v": 5, "t": "2026-01-01T00:01:15Z"})
    query.processAllAvailable()
    with (
        attach_files(str(checkpoint), job="q", log=log, functions=functions_of(query)) as by_files,
        attach_files(str(checkpoint), [by_start], job="m", log=log, functions=functions_of(query)) as by_window,
        sparkis.attach(query, log=tmp_path / "spark", reader="spark") as by_spark,
    ):
        assert by_files.wait() and by_spark.wait() and by_window.wait()
        assert read(by_files) == read(by_spark)
        assert read(by_files) == {
            b"q:aggregation1:2026-01-01T00:01:15Z:late": b"5",
            b"q:aggregation0:2026-01-01T00:00:00Z": b"15.125",
        }
        assert read(by_window) == {b"m:means:late": {b"2026-01-01T00:01:15Z": b"5"}}
    query.stop()
