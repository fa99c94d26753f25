"""What differs between versions of Spark: attachments, processors, and what an older version does not have.

`make test-versions` runs this file and the other tests marked `versions` with each supported version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import redis
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import WAIT_S_MAX
from spark_hooks.sessions import SPARK_VERSION
from tests.spark.attaching import Attach, attached, rocksdb, values_of_job
from tests.spark.micro_batches import Batches, Settings, start

__all__ = ["attached"]

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("endpoint")]
since_4_0 = pytest.mark.expected_skip(SPARK_VERSION < (4, 0), reason="needs Spark 4.0")
until_3_5 = pytest.mark.expected_skip(SPARK_VERSION >= (4, 0), reason="Spark 4.0 has it")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module


@pytest.mark.slow
@pytest.mark.parametrize("store", [{}, rocksdb()], ids=["hdfs", "rocksdb"])
def test_state_of_running_query_is_readable_from_its_checkpoint(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path, settings: Settings, store: dict[str, str]
):
    settings(store)
    job = "rocksdb" if store else "hdfs"
    rows = batches("k string, n int")
    rows.add({"k": "a", "n": 1}, {"k": "b", "n": 2})
    sums = rows.df.groupBy("k").agg(F.sum("n").alias("sum"))
    query = start(sums.writeStream.outputMode("update").format("noop"), job, tmp_path / "checkpoint")
    attachment = attached(query, state="sums", progress=True)
    rows.add({"k": "a", "n": 10})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    found = values_of_job(client, job)
    assert {key: found[key] for key in (f"{job}:sums:a", f"{job}:sums:b")} == {
        f"{job}:sums:a": "11",
        f"{job}:sums:b": "2",
    }
    assert found[f"{job}:_progress"]["state_rows"] == "2"


def last_values() -> Any:
    """Return a processor that keeps the last value of each key. Its class needs Spark 4.0."""
    from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

    class Last(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.last = handle.getValueState("last", "n int")

        def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
            for frame in rows:
                self.last.update((int(frame["n"].iloc[-1]),))
            yield pd.DataFrame({"k": [key[0]]})

        def close(self) -> None:
            pass

    return Last()


@pytest.mark.slow
@since_4_0
def test_declared_states_of_processor_are_readable_without_another_call(
    client: redis.Redis, batches: Make, tmp_path: Path, settings: Settings
):
    settings(rocksdb())
    rows = batches("k string, n int")
    rows.add({"k": "a", "n": 1}, {"k": "b", "n": 2})
    rows.add({"k": "a", "n": 3})
    processor = sparkis.queryable_processor(last_values(), states={"lastN": "last"})
    df = rows.df.groupBy("k").transformWithStateInPandas(processor, "k string", "Append", "none")
    query = start(df.writeStream.format("noop"), "declared", tmp_path / "checkpoint")
    assert sparkis.attach(query).wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "declared") == {"declared:lastN:a": "3", "declared:lastN:b": "2"}


@until_3_5
def test_feature_missing_in_spark_3_5_names_needed_version(batches: Make, tmp_path: Path, spark: SparkSession):
    rows = batches("k string, n int")
    rows.add({"k": "a", "n": 1})
    query = start(
        rows.df.groupBy("k").count().writeStream.outputMode("update").format("noop"), "old", tmp_path / "checkpoint"
    )
    with pytest.raises(
        sparkis.DescriptorError, match=r"reader='spark' needs Spark 4.0 or later, and this is Spark 3.5"
    ):
        sparkis.attach(query, reader="spark")
    with pytest.raises(
        ImportError, match=r"sparkis.queryable_processor needs Spark 4.0 or later, and this is Spark 3.5"
    ):
        sparkis.queryable_processor  # noqa: B018  # the name is imported here
    remote = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})()
    with pytest.raises(sparkis.DescriptorError, match=r"sparkis under Spark Connect needs Spark 4.0 or later"):
        sparkis.queryable(remote, "s", key="k", value="n")


def test_querys_progress_is_published_by_its_sink(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, n int")
    rows.add({"k": "a", "n": 1}, {"k": "b", "n": 2})
    rows.add({"k": "a", "n": 3})
    writer = sparkis.queryable(
        rows.df, "s", key="k", value="n", mode="append", progress=True, wait_for_visibility=WAIT_S_MAX
    )
    start(writer, "progress", tmp_path / "checkpoint")
    assert client.hmget("progress:_progress", "batch", "input_rows") == ["0", "2"]
