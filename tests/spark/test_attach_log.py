"""Attachments that cannot simply continue: gaps, rewound checkpoints, logs of other queries; errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from sparkis import Attachment, SparkisError
from state_backend.log.change_log import ChangeLog
from state_backend.model.errors import DescriptorError, FencedWriterError, LogUnavailableError
from tests.spark.attaching import SCHEMA, Attach, attached, current_of, epochs_of, generations_of, values_of_job
from tests.spark.micro_batches import Batches, Settings, start
from tests.spark.processes import served

__all__ = ["attached"]

Make = Callable[[str], Batches]

pytestmark = pytest.mark.usefixtures("endpoint")

RETAINED = "spark.sql.streaming.minBatchesToRetain"


@pytest.fixture
def two_batches_are_kept(settings: Settings) -> None:
    """Let queries that start in this test purge all but their last two batches."""
    settings({RETAINED: "2"})


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(F.count("*").alias("n"))


def run(df: DataFrame, name: str, checkpoint: Path) -> StreamingQuery:
    return start(df.writeStream.outputMode("update").format("noop"), name, checkpoint)


def first_epoch(attachment: Attachment) -> Any:
    epoch = ChangeLog(attachment.log).job(attachment.job).first(current_of(attachment))
    assert epoch is not None
    return epoch


@pytest.mark.slow
@pytest.mark.usefixtures("two_batches_are_kept")
def test_attachment_after_purge_reads_whole_state_in_one_epoch(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path
):
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    windows = rows.df.withWatermark("t", "0 seconds").groupBy(F.window("t", "1 minute"), "k").count()
    rows.add({"k": "old", "t": "2026-01-01T00:00:00Z"})
    query = run(windows, "late", checkpoint)
    attachment = attached(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert list(values_of_job(client, "late")) == ["late:aggregation:2026-01-01T00:00:00Z:old"]
    attachment.stop()
    for minute in range(1, 6):
        rows.add({"k": "new", "t": f"2026-01-01T00:{minute:02d}:00Z"})
    query.processAllAvailable()
    eventually(lambda: (checkpoint / f"commits/{attachment.batch + 1}").exists(), lambda is_there: not is_there)

    assert values_of_job(client, "late"), "the old state is readable until the new one is there"
    attachment = attached(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    eventually(
        lambda: values_of_job(client, "late"), lambda found: found == {"late:aggregation:2026-01-01T00:05:00Z:new": "1"}
    )
    assert generations_of(attachment) == 2
    assert (first_epoch(attachment).replaces, first_epoch(attachment).origin) == (("aggregation",), 0)
    rows.add({"k": "newer", "t": "2026-01-01T00:05:30Z"})
    query.processAllAvailable()
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.get("late:aggregation:2026-01-01T00:05:00Z:newer") == "1"
    assert len(epochs_of(attachment)) > 1, "and goes on with the changes"
    (job,) = (job for job in client.execute_command("STATE", "JOBS") if job["name"] == "late")
    assert job["incomplete"] == 0


@pytest.mark.slow
def test_rewound_checkpoint_is_read_anew(client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path):
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    rows.add({"k": "a"})
    run(counts(rows.df), "back", checkpoint).stop()
    shutil.copytree(checkpoint, tmp_path / "copy")

    def add_in_another_life(*keys: str) -> StreamingQuery:
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / "copy", checkpoint)
        for file in sorted(rows.folder.glob("*.json"))[1:]:
            file.unlink()
        for key in keys:
            rows.add({"k": key})
        return run(counts(rows.df), "back", checkpoint)

    query = add_in_another_life("b", "c")
    attachment = attached(query)
    assert attachment.wait(2, WAIT_S_MAX)
    query.stop()
    query = add_in_another_life("d")
    eventually(
        lambda: sorted(values_of_job(client, "back")), lambda keys: keys == [f"back:aggregation:{k}" for k in "ad"]
    )
    assert attachment.batch == 1
    attachment.stop()
    query.stop()
    query = add_in_another_life("e", "f", "g")  # further than the log is: only the batches' timestamps tell
    attachment = attached(query)
    assert attachment.wait(3, WAIT_S_MAX)
    eventually(
        lambda: sorted(values_of_job(client, "back")), lambda keys: keys == [f"back:aggregation:{k}" for k in "aefg"]
    )
    assert generations_of(attachment) == 3


@pytest.mark.slow
def test_other_checkpoint_or_form_replaces_state(client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a", "n": 2})
    query = run(counts(rows.df), "other", tmp_path / "first")
    attachment = attached(query)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert values_of_job(client, "other") == {"other:aggregation:a": "1"}

    newer = attached(query, columns={"twice": "_0 * 2"})
    assert newer.wait(timeout_s=WAIT_S_MAX)
    eventually(lambda: values_of_job(client, "other"), lambda found: found == {"other:aggregation:a": "2"})
    assert generations_of(newer) == 2
    rows.add({"k": "a", "n": 2})
    query.processAllAvailable()
    with pytest.raises(FencedWriterError, match="job 'other'"):
        attachment.wait(timeout_s=WAIT_S_MAX)
    assert isinstance(attachment.error, FencedWriterError)
    assert newer.wait(timeout_s=WAIT_S_MAX)
    assert client.get("other:aggregation:a") == "4"
    newer.stop()
    query.stop()

    again = run(counts(rows.df.where("n = 3")), "other", tmp_path / "second")
    rows.add({"k": "c", "n": 3})
    again.processAllAvailable()
    attachment = attached(again)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    eventually(lambda: values_of_job(client, "other"), lambda found: found == {"other:aggregation:c": "1"})
    assert current_of(attachment).generation.startswith(f"{again.id}.")


@pytest.mark.slow
def test_changed_operator_is_refused_unless_log_may_begin_anew(
    client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path
):
    rows = batches(SCHEMA)
    rows.add({"k": "a", "v": 1})
    first = run(counts(rows.df), "changed", tmp_path / "first")
    attachment = attached(first)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    attachment.stop()
    first.stop()
    other = run(rows.df.groupBy("n").agg(F.max("v")), "changed", tmp_path / "second")
    other.stop()
    shutil.copy(tmp_path / "first" / "metadata", tmp_path / "second" / "metadata")  # the same query, changed
    (tmp_path / "second" / ".metadata.crc").unlink(missing_ok=True)
    with pytest.raises(DescriptorError, match=r"'aggregation': operator 0 of the query has schema struct<key:struct<n"):
        attached(checkpoint=tmp_path / "second", job="changed")
    assert values_of_job(client, "changed") == {"changed:aggregation:a": "1"}
    columns = {"n": "coalesce(n, -1)"}
    replaced = attached(checkpoint=tmp_path / "second", job="changed", columns=columns, on_mismatch="replace")
    assert replaced.wait(timeout_s=WAIT_S_MAX)
    eventually(lambda: values_of_job(client, "changed"), lambda found: found == {"changed:aggregation:-1": "1"})


@pytest.mark.parametrize(
    "in_its_place", ["nothing", *(pytest.param(each, marks=pytest.mark.slow) for each in ("a file", "an empty folder"))]
)
def test_attachment_survives_unreachable_log(
    spark: SparkSession, batches: Make, attached: Attach, tmp_path: Path, in_its_place: str
):
    rows = batches(SCHEMA)
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"
    rows.add({"k": "a"})
    query = run(counts(rows.df), "away", checkpoint)
    attachment = attached(query, log=log)
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    with served("--log", log, "--store", tmp_path / "store") as url, redis.Redis.from_url(url) as client:
        eventually(lambda: answer(client, "away:aggregation:a"), lambda count: count == b"1")
        log.rename(tmp_path / "gone")
        if in_its_place == "a file":
            log.write_text("")
        elif in_its_place == "an empty folder":
            log.mkdir()
        for _ in range(3):
            rows.add({"k": "a"})
        query.processAllAvailable()
        failure = eventually(lambda: attachment.failure, bool)
        assert isinstance(failure, LogUnavailableError)
        assert str(log) in str(failure)
        assert attachment.error is None
        assert client.get("away:aggregation:a") == b"1", "servers go on"
        if in_its_place == "a file":
            log.unlink()
        elif in_its_place == "an empty folder":
            shutil.rmtree(log)
        (tmp_path / "gone").rename(log)
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        eventually(lambda: answer(client, "away:aggregation:a"), lambda count: count == b"4")
        eventually(lambda: attachment.failure, lambda failure: failure is None)
    assert epochs_of(attachment) == list(range(attachment.batch + 1)), "nothing is lost, nothing is there twice"
    assert generations_of(attachment) == 1


def test_attachment_survives_unreachable_checkpoint(batches: Make, attached: Attach, tmp_path: Path):
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    rows.add({"k": "a"})
    writer = counts(rows.df).writeStream.outputMode("update").format("noop")
    start(writer, "unreachable", checkpoint).stop()
    attachment = attached(checkpoint=checkpoint, job="unreachable")
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    checkpoint.rename(tmp_path / "gone")
    failure = eventually(lambda: attachment.failure, bool)
    assert "checkpoint were removed or are unreachable" in str(failure)
    (tmp_path / "gone").rename(checkpoint)
    rows.add({"k": "a"})
    start(writer, "unreachable", checkpoint).stop()
    assert attachment.wait(1, WAIT_S_MAX)
    assert attachment.error is None
    assert generations_of(attachment) == 1


def answer(client: redis.Redis, key: str) -> Any:
    """Return a key's value; nothing while the server is opening the job."""
    try:
        return client.get(key)
    except redis.ResponseError:
        return None


def test_log_written_by_query_is_left_alone(client: redis.Redis, batches: Make, attached: Attach, tmp_path: Path):
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    query = start(sparkis.queryable(counts(rows.df), "n", key="k", value="n"), "own", tmp_path / "checkpoint")
    with pytest.raises(DescriptorError, match=r"the query itself writes job 'own'"):
        attached(query)
    attachment = attached(query, job="own-attached", state="n")
    assert attachment.wait(timeout_s=WAIT_S_MAX)
    assert client.get("own:n:a") == client.get("own-attached:n:a") == "1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"key": "k"}, "keys that differ only in 'window'"),
        ({"key": ["window", "k", "max"]}, "'max' is a part of the value"),
        ({"key": ["window", "nobody"]}, r"has no column 'nobody'; it has .*end, k, max, max\(v\), start, window"),
        ({"value": "min"}, "has no column 'min'"),
        ({"columns": {"twice": "max * "}}, r"the expression 'max \* ', which sparkis does not read.*reader='spark'"),
        (
            {"columns": {"twice": "power(max, 2)"}},
            r"'power\(max, 2\)'.*use Spark's reader: reader='spark'",
        ),
        ({"columns": {"twice": "min * 2"}}, "columns= makes 'twice' of 'min', and there is no such column"),
        ({"columns": {"k": "cast(max as int)"}}, r"a part of the key, by 'cast\(max as int\)'; it may use only"),
        ({"columns": {"twice": "max * "}, "reader": "spark"}, "columns= cannot make 'twice' of 'max \\* '"),
        ({"columns": {"twice": "min * 2"}, "reader": "spark"}, "columns= cannot make 'twice' of 'min \\* 2'"),
        ({"columns": {"k": "concat(k, max)"}, "reader": "spark"}, "a part of the key, by 'concat\\(k, max\\)'; it may"),
        ({"operator": 1}, r"no state with operator=1.*operator 0 \(stateStoreSave\)"),
        ({"fields": "k"}, "fields: not an argument of an attached state"),
        ({"states": [sparkis.AttachedState("a")], "state": "b"}, "without states="),
        ({"on_mismatch": "ignore"}, "on_mismatch= is 'refuse' or 'replace'"),
        ({"reader": "state"}, "reader= is 'files' or 'spark', not 'state'"),
        ({"checkpoint": "somewhere"}, "a query or checkpoint="),
        ({"job": "a job"}, "the job name 'a job'"),
    ],
)
def test_impossible_arguments_are_refused(
    refusing: StreamingQuery, attached: Attach, given: dict[str, Any], message: str
):
    with pytest.raises(SparkisError, match=message):
        attached(refusing, **given)


@pytest.fixture(scope="module")
def refusing(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> StreamingQuery:
    """A query over windows that ran."""
    folder = tmp_path_factory.mktemp("refusing")
    rows = Batches(spark, folder / "input", SCHEMA)
    rows.add({"k": "a", "v": 1.5, "t": "2026-01-01T00:00:00Z"})
    windows = rows.df.withWatermark("t", "1 minute").groupBy(F.window("t", "1 minute"), "k").agg(F.max("v"))
    query = run(windows, "refusing", folder / "checkpoint")
    query.stop()
    return query


def test_refused_checkpoint_names_reason(batches: Make, attached: Attach, tmp_path: Path):
    with pytest.raises(SparkisError, match="nothing is not the checkpoint of a query"):
        attached(checkpoint=tmp_path / "nothing", job="j")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metadata").write_text('{"id": "a"}')
    with pytest.raises(SparkisError, match="no committed micro-batch after 0 s"):
        attached(checkpoint=tmp_path / "begun", job="j", timeout_s=0)
    with pytest.raises(SparkisError, match="pass job="):
        attached(checkpoint=tmp_path / "nothing")
    with pytest.raises(SparkisError, match="such as a space"):
        attached(checkpoint=tmp_path / "a space", job="j", reader="spark")
    rows = batches(SCHEMA)
    rows.add({"k": "a"})
    plain = start(rows.df.writeStream.format("noop"), "plain", tmp_path / "plain")
    with pytest.raises(SparkisError, match="has no state"):
        attached(plain)
