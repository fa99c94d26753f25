"""The JVM writer: what it sends of a query's rows, and what it does without a server, or with one that refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from compat.waiting import eventually
from spark_hooks.real_time.jvm_writer import JvmWriter
from spark_hooks.real_time.servers import Servers
from tests.spark.micro_batches import Batches, Settings
from tests.spark.real_time import SETTINGS, MemoryRows
from tests.spark.row_server import RowServer

ROOT = Path(__file__).parents[2]
JOB = "facts"
# A column of each type, with its value where `n` is 1. Elsewhere all are null.
TYPES: dict[str, tuple[str, Any]] = {
    "a_boolean": ("true", True),
    "a_byte": ("cast(-7 as byte)", -7),
    "a_short": ("cast(-700 as short)", -700),
    "an_int": ("-70000", -70000),
    "a_long": ("cast(1 as long) << 40", 1 << 40),
    "a_float": ("cast(0.5 as float)", 0.5),
    "a_double": ("cast('-0.1' as double)", -0.1),
    "a_decimal": ("cast('12.345' as decimal(10, 3))", Decimal("12.345")),
    "a_large_decimal": ("cast('-1234567890123456789012.5' as decimal(38, 1))", Decimal("-1234567890123456789012.5")),
    "a_string": ("'grün\\n'", "grün\n"),
    "a_binary": ("x'00ff'", b"\x00\xff"),
    "a_date": ("date'2026-11-28'", date(2026, 11, 28)),
    "a_timestamp": ("timestamp'2026-11-28 12:00:00.000001Z'", datetime(2026, 11, 28, 12, microsecond=1, tzinfo=UTC)),
    "a_local_time": ("timestamp_ntz'2026-11-28 12:00:00'", datetime(2026, 11, 28, 12)),
    "a_duration": ("interval '1 02:00:00.5' day to second", timedelta(days=1, hours=2, milliseconds=500)),
    "an_array": ("array(1, cast(null as int), 3)", [1, None, 3]),
    "a_map": ("map('a', 1.5d, 'b', cast(null as double))", [("a", 1.5), ("b", None)]),
    "a_struct": ("named_struct('x', 'y', 'inner', array(named_struct('z', 1)))", {"x": "y", "inner": [{"z": 1}]}),
}

Start = Callable[..., StreamingQuery]


@pytest.fixture
def server() -> Iterator[RowServer]:
    """A server that keeps rows."""
    made = RowServer()
    yield made
    made.end()


@pytest.fixture
def rows(batches: Callable[[str], Batches]) -> Batches:
    return batches("k string, n int")


@pytest.fixture
def start(spark: SparkSession, rows: Batches, tmp_path: Path) -> Start:
    """Start a query that sends its rows to servers, and let it process all files."""

    def run(servers: list[str], *, password: str = "", expressions: dict[str, str] | None = None) -> Any:
        df = rows.df.selectExpr("k", "n", *(f"{text} AS {name}" for name, text in (expressions or {}).items()))
        urls = [f"redis://:{password}@{server}" if password else f"redis://{server}" for server in servers]
        writer = JvmWriter(spark, JOB, df.schema.json(), Servers(urls))
        sink = df.writeStream.outputMode("update").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.set_on(sink)
        query = sink.start()
        query.processAllAvailable()
        return query, writer

    return run


def test_rows_of_all_types_arrive_as_they_are(rows: Batches, server: RowServer, start: Start) -> None:
    rows.add({"k": "a", "n": 1}, {"k": None, "n": 0})
    expressions = {name: f"if(n = 1, {text}, null)" for name, (text, _) in TYPES.items()}
    query, _ = start([server.address], expressions=expressions)
    eventually(lambda: server.closed(0), bool)
    filled, empty = sorted(server.rows(), key=lambda row: -row["n"])
    assert filled == {"k": "a", "n": 1} | {name: value for name, (_, value) in TYPES.items()}
    assert empty == {"k": None, "n": 0} | dict.fromkeys(TYPES)
    assert {(each.job, each.run) for each in server.sent} == {(JOB, str(query.runId))}
    assert sum(sent for sent, _ in server.closed(0).values()) == 2


def test_each_server_gets_all_rows_of_each_batch_in_order(rows: Batches, server: RowServer, start: Start) -> None:
    other = RowServer()
    for batch in range(3):
        rows.add(*({"k": "a", "n": 100 * batch + number} for number in range(100)))
    start([server.address, other.address], password="secret:%2F")
    for each in (server, other):
        eventually(lambda: each.closed(2), bool)  # noqa: B023
        assert [row["n"] for row in each.rows()] == list(range(300))
        assert [sum(sent for sent, _ in each.closed(batch).values()) for batch in range(3)] == [100, 100, 100]
        assert set(each.logins) == {b"secret:/"}
    other.end()


def test_server_that_was_away_gets_rows_when_it_is_back(rows: Batches, server: RowServer, start: Start) -> None:
    rows.add({"k": "a", "n": 0})
    query, _ = start([server.address])
    eventually(lambda: server.closed(0), bool)
    server.end()
    rows.add({"k": "a", "n": 1})
    query.processAllAvailable()  # no error reaches Spark
    server.begin()
    last = 1

    def one_more() -> list[int]:
        nonlocal last
        last += 1
        rows.add({"k": "a", "n": last})
        query.processAllAvailable()
        return [row["n"] for row in server.rows()]

    assert 1 not in eventually(one_more, lambda seen: len(seen) > 1)


def test_batch_after_refused_one_arrives(rows: Batches, server: RowServer, start: Start) -> None:
    server.error = "ERR no such job"
    rows.add({"k": "a", "n": 0})
    query, _ = start([server.address])
    eventually(lambda: server.refused, bool, awaited="a refusal")
    server.error = ""
    rows.add({"k": "a", "n": 1})
    query.processAllAvailable()
    eventually(lambda: server.closed(1), bool)
    assert [row["n"] for row in server.rows(batch=1)] == [1]


def test_rows_wait_for_server_that_does_not_know_job_yet(
    spark: SparkSession, settings: Settings, server: RowServer, tmp_path: Path
) -> None:
    settings(SETTINGS)
    source = MemoryRows(spark, "k string, n int")
    counts = source.df.groupBy("k").agg(F.max("n").alias("n"))
    sink = counts.writeStream.outputMode("update").option("checkpointLocation", str(tmp_path / "checkpoint"))
    JvmWriter(spark, JOB, counts.schema.json(), Servers([f"redis://{server.address}"])).set_on(sink)
    server.error = "ERR no such job"
    query = sink.trigger(realTime="10 minutes").start()
    try:
        for number in range(3):
            source.add({"k": "a", "n": number})
            refused = server.refused
            eventually(lambda: server.refused, lambda found: found > refused, awaited="another refusal")  # noqa: B023
        server.error = ""
        eventually(server.rows, lambda found: found == [{"k": "a", "n": number} for number in range(3)])
    finally:
        query.stop()


def test_next_batch_is_sent_to_set_servers(rows: Batches, server: RowServer, start: Start) -> None:
    other = RowServer()
    rows.add({"k": "a", "n": 0})
    query, writer = start([server.address])
    writer.set_servers(Servers([f"redis://{other.address}"]))
    rows.add({"k": "a", "n": 1})
    query.processAllAvailable()
    eventually(lambda: other.closed(1), bool)
    assert [row["n"] for row in server.rows()] == [0]
    assert [row["n"] for row in other.rows()] == [1]
    other.end()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["javac", "module", "janino"])
def test_each_compiler_makes_jar(compiler: str, tmp_path: Path) -> None:
    jar = tmp_path / "writer.jar"
    command = [sys.executable, ROOT / "scripts" / "writer_jar.py", "--compiler", compiler, "--jar", jar]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no Java" in done.stderr or "Module jdk.compiler not found" in done.stderr:
        pytest.skip("this JDK has no compiler")
    assert done.returncode == 0, done.stderr
    assert jar.exists()
