"""The sink and the server under Spark Connect: foreachBatch functions run in a Python worker of the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.children import TOKEN_VARIABLE
from spark_hooks.serving.endpoints import ANNOUNCE_SETTING
from sparkis import StateDescriptor
from state_backend.log.change_log import ChangeLog
from state_backend.model.errors import DescriptorError
from tests.server.announced import TOKEN, listening
from tests.spark.micro_batches import Batches, end_shared_session, failure_of, start

pytestmark = pytest.mark.slow

Make = Callable[[str], Batches]

STATE = StateDescriptor("s", key="k", value="v")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session of Spark Connect, and its server in a JVM of this process, on a free port."""
    end_shared_session()
    names = ("PYSPARK_PYTHON", "PYTHONPATH", "SPARK_TESTING", TOKEN_VARIABLE)
    set_before = {name: os.environ.get(name) for name in names}
    # The server's Python workers are to find what this process runs.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [set_before["PYTHONPATH"]])])
    os.environ["SPARK_TESTING"] = "1"  # a free port instead of 15002
    os.environ[TOKEN_VARIABLE] = TOKEN
    session = (
        SparkSession.builder.remote("local[2]")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    os.environ.pop(TOKEN_VARIABLE)  # the server's Python workers announce epochs, this process does not
    yield session
    session.stop()
    for name, value in set_before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def lag(client: redis.Redis, job: str) -> dict[str, Any]:
    (found,) = (each for each in client.execute_command("STATE", "LAG") if each["job"] == job)
    return dict(found)


def test_query_of_connect_session_publishes_its_state(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v double, t timestamp")
    rows.add({"k": "a", "v": 1.5, "t": "2020-01-01T00:00:00Z"}, {"k": "b", "v": 2, "t": "2020-01-01T00:00:00Z"})
    rows.add({"k": "a", "v": 3.5, "t": "2020-01-01T00:01:00Z"})
    grouped = rows.df.groupBy("k").agg(F.max("v").alias("v"), F.max("t").alias("t"))
    writer = sparkis.queryable(
        grouped,
        StateDescriptor("max", key="k", value="v"),
        StateDescriptor("last", key="k", value=["v", "t"], where="v > 2"),
        mode="update",
        wait_for_visibility=True,
    )
    query = start(writer, "connected", tmp_path / "checkpoint")
    assert client.mget("connected:max:a", "connected:max:b") == ["3.5", "2"]
    assert client.hgetall("connected:last:a") == {"v": "3.5", "t": "2020-01-01T00:01:00Z"}
    assert client.exists("connected:last:b") == 0
    assert eventually(lambda: lag(client, "connected"), lambda report: not report["stale"])["applied"] == 1
    query.stop()
    eventually(lambda: lag(client, "connected"), lambda report: bool(report["stale"]))


def test_epochs_are_announced_to_addresses_in_sessions_settings(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    with listening() as (port, receiver):
        spark.conf.set(ANNOUNCE_SETTING, f"127.0.0.1:{port}")
        try:
            query = start(sparkis.queryable(rows.df, STATE, log=tmp_path / "log"), "announced", tmp_path / "checkpoint")
            query.stop()
        finally:
            spark.conf.unset(ANNOUNCE_SETTING)
        eventually(lambda: ("announced", 1, 0) in receiver.noticed, awaited="the announcement of the epoch")


def test_function_of_users_own_publishes_with_job_and_checkpoint(
    client: redis.Redis, endpoint: sparkis.ServedEndpoint, batches: Make, tmp_path: Path
):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    rows.add({"k": "a", "v": 3})
    checkpoint, seen = str(tmp_path / "checkpoint"), tmp_path / "seen"

    def function(batch: DataFrame, batch_id: int) -> None:
        with seen.open("a") as file:
            file.write(f"{batch_id}:{batch.count()} ")
        sparkis.publish(batch, batch_id, STATE, job="own", checkpoint=checkpoint, wait_for_visibility=True)

    def run() -> None:
        writer = rows.df.writeStream.foreachBatch(function).option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(60)

    run()
    assert client.mget("own:s:a", "own:s:b") == ["3", "2"]
    rows.add({"k": "b", "v": 4})
    run()
    assert client.mget("own:s:a", "own:s:b") == ["3", "4"]
    assert seen.read_text() == "0:2 1:1 2:1 "
    assert lag(client, "own")["applied"] == 2
    log = ChangeLog(endpoint.log).job("own")
    current = log.current()
    assert current is not None and current.term == 2  # one writer for each run, and one generation for both
    assert log.numbers(current.generation) == [0, 1, 2]


def test_replayed_batch_is_left_out_and_checkpoint_that_was_set_back_is_refused(batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    rows.add({"k": "a", "v": 2})

    def begin(log: Path) -> Any:
        writer = sparkis.queryable(rows.df, STATE, mode="append", log=log)
        return start(writer, "again", tmp_path / "checkpoint")

    begin(tmp_path / "log").stop()
    commits = tmp_path / "checkpoint" / "commits"
    (commits / "1").unlink()
    (commits / ".1.crc").unlink()
    begin(tmp_path / "log").stop()
    with sparkis.read_snapshot(tmp_path / "log", "again") as snapshot:
        assert (snapshot.value(b"again:s:a"), snapshot.applied.epoch) == (b"2", 1)
    for name in ("commits/0", "commits/.0.crc", "commits/1", "commits/.1.crc", "offsets/1", "offsets/.1.crc"):
        (tmp_path / "checkpoint" / name).unlink()
    writer = sparkis.queryable(rows.df, STATE, mode="append", log=tmp_path / "log").queryName("again")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert "epoch 0 was published again, but the log" in (message := failure_of(query))
    assert "pass on_rewind='truncate'" in message


def test_impossible_rows_or_log_fail_micro_batch_with_reason(batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": None, "v": 1})
    file = tmp_path / "file"
    file.touch()
    for number, (log, complaint) in enumerate(
        ((tmp_path / "log", "batch 0: state 's': the key column 'k' is null in 1 row(s)"), (file, str(file)))
    ):
        writer = sparkis.queryable(rows.df, STATE, mode="append", log=log).queryName(f"wrong{number}")
        query = writer.option("checkpointLocation", str(tmp_path / f"checkpoint{number}")).start()
        assert complaint in failure_of(query)


def test_wrong_call_is_refused_in_client(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    with pytest.raises(DescriptorError, match=r"value= names the column 'nope'"):
        sparkis.queryable(rows.df, "s", key="k", value="nope", log=tmp_path / "log")
    with pytest.raises(DescriptorError, match=r"state 's': where='v \+' is not a condition"):
        sparkis.queryable(rows.df, "s", key="k", value="v", where="v +", log=tmp_path / "log")
    with pytest.raises(DescriptorError, match="takes a streaming DataFrame"):
        sparkis.queryable(spark.range(3), "s", key="id", value="id", log=tmp_path / "log")
    with pytest.raises(DescriptorError, match="progress=True: under Spark Connect"):
        sparkis.queryable(rows.df, STATE, log=tmp_path / "log", progress=True)
    writer = sparkis.queryable(rows.df, STATE, mode="append", log=tmp_path / "log")
    with pytest.raises(DescriptorError, match="the query has no name"):
        writer.start()
    with pytest.raises(DescriptorError, match=r"under Spark Connect.*\.option\('checkpointLocation', \.\.\.\)"):
        writer.queryName("nowhere").start()
    with pytest.raises(DescriptorError, match=r"trigger\(continuous=\.\.\.\) has no micro-batches"):
        writer.trigger(continuous="1 second")
    with pytest.raises(DescriptorError, match=r"is the sink of this query.*sparkis\.publish"):
        writer.foreachBatch(print)


def test_publish_names_its_missing_argument(spark: SparkSession, batches: Make, tmp_path: Path):
    with pytest.raises(DescriptorError, match=r"outside of a streaming query's foreachBatch.*LogWriter"):
        sparkis.publish(spark.range(1), 0, "s", key="id", value="id", job="j", checkpoint=tmp_path)
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1})
    elsewhere = str(tmp_path / "elsewhere")
    for number, (given, complaint) in enumerate(
        (
            ({"job": "j"}, "learns it from the checkpoint: pass checkpoint= to sparkis.publish"),
            ({"checkpoint": elsewhere}, "does not know the query's name: pass job="),
            ({"job": "j", "checkpoint": elsewhere}, f"is '{elsewhere}' this query's checkpoint?"),
        )
    ):

        def function(batch: DataFrame, batch_id: int, given: dict[str, str] = given) -> None:
            sparkis.publish(batch, batch_id, STATE, log=elsewhere + "-log", **given)  # type: ignore[arg-type]

        writer = rows.df.writeStream.foreachBatch(function)
        query = writer.option("checkpointLocation", str(tmp_path / f"checkpoint{number}")).start()
        assert complaint in failure_of(query)


def test_state_of_query_is_attached_to_by_its_checkpoint(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    counted = rows.df.groupBy("k").agg(F.sum("v").alias("v"))
    writer = counted.writeStream.format("noop").outputMode("update")
    query = start(writer, "plain", tmp_path / "checkpoint")

    def attach() -> sparkis.Attachment:
        return sparkis.attach(
            checkpoint=tmp_path / "checkpoint", job="attached", state="s", columns={"twice": "2 * sum"}
        )

    with attach() as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert client.mget("attached:s:a", "attached:s:b") == ["2", "4"]
        rows.add({"k": "a", "v": 5}, {"k": "c", "v": 3})
        query.processAllAvailable()
        assert attachment.wait(1)
        assert client.mget("attached:s:a", "attached:s:b", "attached:s:c") == ["12", "4", "6"]
    rows.add({"k": "b", "v": 5})
    query.processAllAvailable()
    query.stop()
    with attach() as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        assert client.mget("attached:s:a", "attached:s:b", "attached:s:c") == ["12", "14", "6"]


def test_declared_processor_runs_and_is_attached_to_by_its_checkpoint(
    spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Last(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.last = handle.getValueState("last", "v int")

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            for row in rows:
                self.last.update((row.v,))
            yield Row(k=key[0])

    store = "spark.sql.streaming.stateStore."
    settings = {
        store + "providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        store + "rocksdb.changelogCheckpointing.enabled": "true",
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    processor = sparkis.queryable_processor(Last(), states={"s": "last"})
    df = rows.df.groupBy("k").transformWithState(processor, "k string", "append", "none")
    start(df.writeStream.format("noop").outputMode("append"), "declared", tmp_path / "checkpoint").stop()
    for name in settings:
        spark.conf.unset(name)
    assert "under Spark Connect what a processor declares is not attached to by itself" in caplog.text
    states = [sparkis.AttachedState("s", variable="last")]
    with sparkis.attach(checkpoint=tmp_path / "checkpoint", job="declared", states=states) as attachment:
        assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.mget("declared:s:a", "declared:s:b") == ["1", "2"]


def test_query_cannot_be_attached_to_by_its_handle(batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    writer = rows.df.groupBy("k").count().writeStream.format("noop").outputMode("update")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(DescriptorError, match="Spark Connect does not give access to a query"):
        sparkis.attach(query)


def test_checkpoint_with_name_that_spark_does_not_find_is_refused(spark: SparkSession, tmp_path: Path):
    with pytest.raises(DescriptorError, match="give the path of a symbolic link"):
        sparkis.attach(checkpoint=tmp_path / "with a space", job="odd", reader="spark")


def test_table_is_published_by_client(spark: SparkSession, client: redis.Redis):
    table = spark.createDataFrame([("a", 1), ("b", 2)], "k string, v int")
    sparkis.publish_table(table, "limits", field="k", value="v", job="rules")
    assert client.hgetall("rules:limits") == {"a": "1", "b": "2"}


def test_totals_are_not_added_up(spark: SparkSession, batches: Make, tmp_path: Path):
    rows = batches("k string, v int")
    totals = rows.df.groupBy("k").agg(F.sum("v").alias("v"))
    with pytest.raises(DescriptorError, match=r"reduce='sum' adds up the rows of all micro-batches.*Aggregate in the"):
        sparkis.queryable(totals, "s", key="k", value="v", reduce="sum", log=tmp_path / "log")
    sparkis.queryable(rows.df, "s", key="k", value="v", reduce="sum", log=tmp_path / "log")
