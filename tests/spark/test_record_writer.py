"""`sparkis.queryable(..., freshness="record")`: what is refused, and how columns are matched with the checkpoint's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis
from spark_hooks.real_time import checks, jvm_writer
from spark_hooks.real_time.servers import Servers
from sparkis import DescriptorError
from tests.spark.attaching import SCHEMA
from tests.spark.micro_batches import Batches, Settings
from tests.spark.real_time import SETTINGS, MemoryRows

Fresh = Callable[..., Any]


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    return MemoryRows(spark, SCHEMA).df


@pytest.fixture
def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"), F.max("v").alias("top"))


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    """Make a writer of fresh values with a log of the test's own."""

    def make(df: DataFrame, *states: Any, **arguments: Any) -> Any:
        log = tmp_path / "log"
        log.mkdir(exist_ok=True)
        given = arguments if states else {"key": "k", "value": ["n", "top"], **arguments}
        return sparkis.queryable(df, *(states or ("facts",)), freshness="record", log=log, **given)

    return make


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "append"}, "mode='append': Real-Time Mode has the output mode 'update' alone"),
        ({"mode": "complete"}, "mode='complete': Real-Time Mode has the output mode 'update' alone"),
        ({"wait_for_visibility": True}, "wait_for_visibility= has no effect with freshness='record'"),
        ({"on_rewind": "truncate"}, "on_rewind= has no effect with freshness='record'"),
        ({"value": "n", "reduce": "max"}, "reduce= does not go with freshness='record'"),
        ({"value": "n", "last_by": "top"}, "last_by= does not go with freshness='record'"),
        ({"ttl": 10}, "ttl= does not go with freshness='record'"),
        ({"where": "n > 1"}, "where= does not go with freshness='record'"),
        ({"value": "n", "kind": "list"}, "kind='list': with freshness='record' a state is a value, or a hash"),
        ({"value": "n", "field": "top"}, "field=: with freshness='record' a state is a value, or a hash"),
        ({"value": (), "member": "n"}, "member= does not go with freshness='record'"),
    ],
)
def test_arguments_that_real_time_mode_lacks_are_refused(
    fresh: Fresh, counts: DataFrame, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(DescriptorError, match=re.escape(message)):
        fresh(counts, **arguments)


def test_queries_that_real_time_mode_does_not_run_are_refused(
    spark: SparkSession, fresh: Fresh, rows: DataFrame, counts: DataFrame
) -> None:
    with pytest.raises(DescriptorError, match="this one has no aggregation: use freshness='commit'"):
        fresh(rows, value="n")
    twice = rows.withWatermark("t", "1 second").groupBy("k", F.window("t", "1 minute")).count()
    twice = twice.groupBy(F.window(F.window_time("window"), "1 hour"), "k").agg(F.max("count").alias("n"))
    with pytest.raises(DescriptorError, match="this one has 2 aggregations"):
        fresh(twice, value="n")
    doubled = F.udf(lambda n: 2 * n, "long")
    with pytest.raises(DescriptorError, match=r"Real-Time Mode runs no Python.*plan has \w*Python"):
        fresh(counts.withColumn("n", doubled("n")))
    with pytest.raises(DescriptorError, match="does not run the operator GlobalLimit of the query's plan"):
        fresh(counts.limit(3))
    within = rows.withWatermark("t", "1 second").dropDuplicatesWithinWatermark(["k"])
    with pytest.raises(DescriptorError, match="does not run the operator DeduplicateWithinWatermark"):
        fresh(within.groupBy("k").agg(F.count("*").alias("n")), value="n")
    other = rows.select(F.col("k").alias("j"))
    with pytest.raises(DescriptorError, match="Real-Time Mode runs no joins of streams"):
        fresh(rows.join(other, rows.k == other.j).groupBy("k").agg(F.count("*").alias("n")), value="n")


def test_sources_that_real_time_mode_does_not_read_are_refused(
    spark: SparkSession, fresh: Fresh, batches: Callable[[str], Batches]
) -> None:
    rate = spark.readStream.format("rate").load().groupBy(F.col("value").alias("k")).agg(F.count("*").alias("n"))
    with pytest.raises(DescriptorError, match="Real-Time Mode does not read the source 'rate': read a topic of Kafka"):
        fresh(rate, value="n")
    files = batches(SCHEMA).df.groupBy("k").agg(F.count("*").alias("n"))
    with pytest.raises(DescriptorError, match=r"Real-Time Mode does not read the source 'FileSource\["):
        fresh(files, value="n")


def test_old_versions_of_spark_and_spark_connect_are_refused(
    fresh: Fresh, counts: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(checks, "SPARK_VERSION", (4, 2))
        with pytest.raises(DescriptorError, match=r"freshness='record' needs Spark 4\.3, the first with aggregations"):
            fresh(counts)
    with monkeypatch.context() as patched:
        patched.setattr(checks, "is_connect", lambda of: True)
        with pytest.raises(DescriptorError, match="which Spark Connect gives no access to"):
            fresh(counts)


def test_columns_need_fresh_values(counts: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(DescriptorError, match="columns= has an effect with freshness='record' alone"):
        sparkis.queryable(counts, "facts", key="k", value="n", log=tmp_path, columns={"n": "n"})
    with pytest.raises(DescriptorError, match="freshness= is 'commit' or 'record', not 'now'"):
        sparkis.queryable(counts, "facts", key="k", value="n", log=tmp_path, freshness="now")  # type: ignore[arg-type]


def test_columns_are_matched_with_those_of_checkpoint(fresh: Fresh, rows: DataFrame) -> None:
    computed = rows.groupBy(F.upper("k").alias("name"), F.window("t", "1 minute")).agg(F.avg("v").alias("mean"))
    computed = computed.withColumn("half", F.col("mean") / 2)
    writer = fresh(
        computed, "halves", key=["name", "window.start"], value=["mean", "half"], columns={"half": "mean / 2"}
    )
    (attached,) = writer._attached
    assert (attached.key, attached.value) == (("name", "start"), ("mean", "half"))
    assert attached.columns == {"half": "mean / 2", "name": "_groupingexpression"}
    with pytest.raises(DescriptorError, match=r"the column 'half' is computed after the aggregation.*columns=.*mean"):
        fresh(computed, "halves", key=["name", "window.start"], value=["half"])


def test_aggregation_is_found_among_operators_with_state(fresh: Fresh, rows: DataFrame) -> None:
    deduplicated = rows.withWatermark("t", "1 second").dropDuplicates(["k", "t"])
    counted = [each.groupBy("k").agg(F.count("*").alias("n")) for each in (rows, deduplicated)]
    ((plain,), (after,)) = (fresh(each, value="n")._attached for each in counted)
    assert (plain.operator, after.operator) == (0, 0)


def test_writer_needs_its_trigger_checkpoint_settings_and_server(
    fresh: Fresh, counts: DataFrame, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = fresh(counts).queryName("real")
    for call in (lambda: writer.trigger(processingTime="1 second"), writer.start):
        with pytest.raises(DescriptorError, match=r"give the query \.trigger\(realTime='5 minutes'\)"):
            call()
    for call in (lambda: writer.foreach(print), lambda: writer.format("console"), lambda: writer.outputMode("append")):
        with pytest.raises(DescriptorError, match=r"is the sink of this query|the mode is 'update'"):
            call()
    writer.trigger(realTime="2 seconds")
    with pytest.raises(DescriptorError, match=r"give the query \.option\('checkpointLocation'"):
        writer.start()
    writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(DescriptorError, match=r"providerClass=org.*RocksDB\w+, spark\S+checkpointFormatVersion=2$"):
        writer.start()
    settings(SETTINGS)
    with pytest.raises(DescriptorError, match=r"this driver has started none.*call sparkis\.serve\(spark\)"):
        writer.start()
    monkeypatch.setattr(jvm_writer, "JAR", tmp_path / "missing.jar")
    with pytest.raises(DescriptorError, match=r"needs missing\.jar, which this installation of sparkis lacks"):
        jvm_writer.JvmWriter(counts.sparkSession, "real", "{}", Servers([]))
