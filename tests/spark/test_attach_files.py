"""`sparkis attach` without Spark, beside running queries: what clients read is Spark's own result."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import merge
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from state_backend.attach.start import attach_files
from state_backend.codec import packed_list
from state_backend.log.change_log import ChangeLog
from state_backend.model.descriptor import Kind
from state_backend.model.records import Change, Op, changes_in
from state_backend.model.slots import hash_position
from tests.spark.attaching import SCHEMA, SEED, rocksdb, some_rows, text, values_of_job, whole
from tests.spark.micro_batches import Batches, Settings, start
from tests.spark.operators import OPERATORS, run
from tests.spark.processes import sparkis as command

pytestmark = pytest.mark.slow

Make = Callable[[str], Batches]
PROVIDERS = pytest.mark.parametrize("store", [{}, rocksdb(), rocksdb("2")], ids=["hdfs", "rocksdb", "format2"])


@PROVIDERS
def test_running_query_is_followed_and_served_by_another_process(
    spark: SparkSession, batches: Make, settings: Settings, tmp_path: Path, store: dict[str, str]
):
    settings(store)
    random = Random(SEED)
    rows, checkpoint = batches(SCHEMA), tmp_path / "checkpoint"
    windows = rows.df.withWatermark("t", "1 minute").groupBy(F.window("t", "1 minute"), "k")
    rows.add(*some_rows(random, 0), {"k": "k0", "n": 1, "v": 0.5, "t": "2026-01-01T00:00:01Z"})
    query = start(
        windows.agg(F.sum("n").alias("n"), F.max("v").alias("v")).writeStream.outputMode("append").format("noop"),
        "q",
        checkpoint,
    )
    with command(
        "attach", "--checkpoint", checkpoint, "--job", "q", "--log", tmp_path / "log", "--serve", "--port", 0
    ) as running:
        url = running.wait_for(r"redis-cli -u (\S+)")[1]
        with redis.Redis.from_url(url, decode_responses=True) as client:
            for minute in range(1, 8):
                rows.add(*some_rows(random, minute))
                query.processAllAvailable()
                last = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
                expected = in_spark(spark, checkpoint, last)
                eventually(lambda: values_of_job(client, "q"), lambda found, expected=expected: found == expected)
        assert running.end(signal.SIGTERM) == 0
    query.stop()


def in_spark(spark: SparkSession, checkpoint: Path, batch: int) -> dict[str, Any]:
    """Return the state of the windows as clients should read it, from Spark's own reader."""
    found = {}
    for row in whole(spark, checkpoint, batch):
        fields = {name: text(value) for name, value in zip(("sum", "max"), row.value, strict=True) if value is not None}
        if fields:
            found[f"q:aggregation:{text(row.key.window.start)}:{row.key.k}"] = fields
    return found


def typed(rows: DataFrame) -> DataFrame:
    """Return aggregates of many types: numbers, times, texts with special characters, and nested ones."""
    return rows.groupBy("k", F.to_date("t").alias("d"), (F.col("n") % 2 == 0).alias("even")).agg(
        F.count("*").alias("count"),
        F.sum("v").alias("total"),
        F.max(F.expr("v * 1e9")).alias("large"),
        F.min(F.expr("v / 1e9")).alias("small"),
        F.max("t").alias("newest"),
        F.max(F.expr("cast(n as decimal(20, 8)) / 1000000")).alias("exact"),
        F.first(F.expr("named_struct('k', k, 'v', v * 1e7, 't', t, 'd', date(t), 'n', null, 'f', float(v))")).alias(
            "s"
        ),
        F.first(F.expr("array(concat(k, '\"\\\\', char(10), char(1), 'é'), null)")).alias("texts"),
        F.first(F.expr("map('a', array(v, 1e-5D, 0D), k, null)")).alias("m"),
        F.first(F.expr("cast(n as decimal(12, 9)) / 10000000")).alias("decimal"),
        F.first(F.expr("encode(k, 'utf-8')")).alias("bytes"),
        F.first(F.expr("cast(t as timestamp_ntz)")).alias("local"),
    )


# The queries, and the modes of their output: each operator, and aggregates of many types.
QUERIES = {
    "types": (typed, "update"),
    **{name: (operator.query, operator.mode) for name, operator in OPERATORS.items()},
}


def test_offline_repartition_is_one_whole_epoch(spark: SparkSession, batches: Make, settings: Settings, tmp_path: Path):
    settings(rocksdb())
    manager = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        pytest.skip("Spark repartitions state since 4.2")
    rows, checkpoint, log = batches(SCHEMA), tmp_path / "checkpoint", tmp_path / "log"
    counts = rows.df.groupBy("k").count().writeStream.outputMode("update").format("noop")
    add = partial(rows.add, *({"k": f"k{number}"} for number in range(40)))

    def run() -> None:
        add()
        start(counts, "q", checkpoint).stop()

    run()
    with attach_files(str(checkpoint), job="q", log=str(log)) as attachment:
        for batch, count in ((1, 5), (3, 1)):  # from two partitions to five, and to one
            manager.repartition(str(checkpoint), count)
            run()
            assert attachment.wait(batch + 1, WAIT_S_MAX)
            expected = {
                f"q:aggregation:{row.key.k}": str(row.value["count"]) for row in whole(spark, checkpoint, batch)
            }
            for epoch in (batch, batch + 1):
                found = written(log)[epoch]
                assert len(found) == len({change.key for change in found}) == len(expected) == 40
            assert {change.key.decode(): (change.value or b"").decode() for change in written(log)[batch]} == expected
        assert list(written(log)) == [0, 1, 2, 3, 4]


def test_computed_grouping_column_has_name_that_spark_gives_it(batches: Make, tmp_path: Path):
    rows, checkpoint, log = batches(SCHEMA), tmp_path / "checkpoint", tmp_path / "log"
    rows.add({"k": "a"}, {"k": "b"}, {"k": "A"})
    counts = rows.df.groupBy(F.upper("k").alias("name")).count()
    start(counts.writeStream.outputMode("update").format("noop"), "q", checkpoint).stop()
    state = sparkis.AttachedState("count", key_format="count/<_groupingexpression>")
    with attach_files(str(checkpoint), [state], job="q", log=str(log)) as attachment:
        assert attachment.wait(0, WAIT_S_MAX)
    assert {change.key: change.value for change in written(log)[0]} == {b"count/A": b"2", b"count/B": b"1"}


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    yield tmp_path / "spark", tmp_path / "files"


STORES = {"hdfs": {}, "rocksdb": rocksdb(), "format2": rocksdb("2")}
# transformWithState needs RocksDB. Spark's reader does not find the files of a join in checkpoint format 2.
NOT_IN_SPARK = (("transformWithState", "hdfs"), ("join", "format2"))
IN_STORES = [(name, store) for name in QUERIES for store in STORES if (name, store) not in NOT_IN_SPARK]


@pytest.mark.parametrize(("name", "store"), IN_STORES, ids=["-".join(each) for each in IN_STORES])
def test_both_readers_write_same_records_and_descriptions(
    batches: Make, settings: Settings, tmp_path: Path, logs: tuple[Path, Path], name: str, store: str
):
    settings(STORES[store])
    random = Random(SEED)
    make, mode = QUERIES[name]
    rows, checkpoint = batches(SCHEMA), tmp_path / "checkpoint"
    rows.add({"k": "k0", "n": 1, "v": 0.5, "t": "2026-01-01T00:00:01.123456Z"})
    writer = make(rows.df).writeStream.outputMode(mode).format("noop").option("checkpointLocation", str(checkpoint))
    run(writer)
    by_spark = sparkis.attach(checkpoint=checkpoint, job="q", log=logs[0], reader="spark")
    by_files = sparkis.attach(checkpoint=checkpoint, job="q", log=logs[1])
    try:
        for minute in range(1, 5):
            rows.add(*some_rows(random, minute), {"k": "k1", "n": 2, "v": 1e8, "t": f"2026-01-01T00:0{minute}:00Z"})
            run(writer)
        assert by_spark.wait(timeout_s=WAIT_S_MAX)
        assert by_files.wait(timeout_s=WAIT_S_MAX)
    finally:
        by_spark.stop()
        by_files.stop()
    assert by_files.states == by_spark.states
    one, other = (written(log) for log in logs)
    assert sum(map(len, one.values())) > len(one) > 1
    lists = {state.name for state in by_files.states if state.kind is Kind.LIST}
    assert {epoch: by_element(records, lists) for epoch, records in other.items()} == {
        epoch: by_element(records, lists) for epoch, records in one.items()
    }
    # A log goes on with the other reader, in the same generation.
    again = sparkis.attach(checkpoint=checkpoint, job="q", log=logs[0])
    assert again.wait(timeout_s=WAIT_S_MAX)
    again.stop()
    assert written(logs[0]) == one


def by_element(records: list[Change], lists: set[str]) -> list[Change]:
    """Return records with one for each element of a list.

    In a whole state, a list is one record without Spark, and a record for each element by Spark.
    """
    elements: list[Change] = []
    for change in records:
        if change.state in lists and change.op == Op.PUT and change.value is not None:
            elements += [change._replace(op=Op.APPEND, value=each) for each in packed_list.elements(change.value)]
        else:
            elements.append(change)
    return elements


def position(change: Change) -> int:
    return hash_position(change.key)


def fields_in_order(records: Iterable[Change]) -> list[Change]:
    """Return records with adjacent fields of one key in order: Spark sorts them by their columns, and the order of
    different fields means nothing. What is done to one field, or to the whole key, keeps its place.
    """
    return [
        change
        for _, group in groupby(records, key=lambda change: (change.state, change.key, change.field is None))
        for change in sorted(group, key=lambda change: change.field or b"")
    ]


def written(log: Path) -> dict[int, list[Change]]:
    """Return the records of each epoch of the job's current generation, in the order of a store.

    Each run is in this order. A reader may write several runs: they are merged, as a store merges them.
    """
    found = ChangeLog(str(log)).job("q")
    current = found.current()
    assert current is not None
    records = {}
    for number in found.numbers(current.generation):
        epoch = found.epoch(current, number)
        assert epoch is not None
        runs = [list(changes_in(run)) for run in found.runs(current.generation, epoch)]
        assert all(run == sorted(run, key=position) for run in runs)
        records[number] = fields_in_order(merge(*runs, key=position))
    return records
