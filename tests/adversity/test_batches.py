"""What may go wrong around a micro-batch: its checkpoint, its tasks, its log."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pyarrow as pa
import pytest
import redis
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import eventually
from spark_hooks.publish import task as sink_task
from state_backend.log.checked_json import checked_object
from state_backend.log.log_writer import LogWriter
from tests.adversity import driver
from tests.adversity.driver import JOB, counts, states
from tests.adversity.scene import MARKERS, Scene
from tests.builders import current_of
from tests.spark.micro_batches import end_shared_session

pytestmark = pytest.mark.spark

BEAT = f"sparkis-heartbeat-{JOB}"
FIRST = f"{JOB}:n:{MARKERS[0]}"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A session whose tasks may fail three times."""
    end_shared_session()
    session = driver.session()
    yield session
    session.stop()


class Job:
    """The scene's job, run by this process: started and stopped at will."""

    def __init__(self, spark: SparkSession, scene: Scene) -> None:
        self.spark = spark
        self.scene = scene
        self.query: StreamingQuery | None = None

    def run(self, df: DataFrame | None = None, **options: Any) -> None:
        """Start the query and let it take all that is there."""
        rows = counts(self.spark, str(self.scene.input)) if df is None else df
        writer = sparkis.queryable(rows, *states(), mode="update", job=JOB, log=self.scene.log, **options)
        self.query = writer.option("checkpointLocation", str(self.scene.checkpoint)).start()
        self.query.processAllAvailable()

    def go_on(self) -> None:
        """Let the running query take what is new."""
        assert self.query is not None
        self.query.processAllAvailable()

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()

    def failure(self, **options: Any) -> str:
        """Run into an error and return what it says."""
        try:
            if self.query is not None and self.query.isActive:
                self.go_on()
            else:
                self.run(**options)
        except Exception as error:  # Spark's, around ours
            return str(error)
        raise AssertionError("nothing failed")

    def value(self, key: str = FIRST) -> str | None:
        """Read one key at the newest epoch of the log."""
        with sparkis.read_snapshot(self.scene.log, JOB) as snapshot:
            found = snapshot.value(key.encode())
            return None if found is None else found.decode()


@pytest.fixture
def job(spark: SparkSession, scene: Scene) -> Iterator[Job]:
    made = Job(spark, scene)
    yield made
    made.stop()


# The checkpoint -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_new_checkpoint_replaces_all_state_and_old_one_is_readable_until_then(job: Job, scene: Scene):
    scene.start_server()
    scene.add_files(2)
    job.run()
    scene.wait_for_all()
    job.stop()
    before, generation = scene.state(), scene.generation()

    shutil.rmtree(scene.checkpoint)
    for path in scene.input.iterdir():
        path.unlink()
    scene.forget()
    job.run()  # there is no input, so there is no epoch yet
    assert scene.generation() != generation
    assert scene.state() == before
    scene.add_files(1)
    job.go_on()
    scene.wait_for_all()
    assert scene.epochs() == [0]


# Replays --------------------------------------------------------------------------------------------------------------


def undo_sparks_commit(scene: Scene) -> int:
    """Make Spark forget that it has done the last micro-batch, as if its driver had died before it could say so."""
    commits = scene.checkpoint / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)
    return last


def test_replay_of_committed_batch_keeps_first_epoch(job: Job, scene: Scene, caplog: pytest.LogCaptureFixture):
    scene.add_files(3)
    job.run()
    job.stop()
    last = undo_sparks_commit(scene)
    first = scene.epoch(last)
    with caplog.at_level(logging.INFO, "sparkis.sink"):
        job.run()
    assert scene.epoch(last) == first
    assert [record for record in caplog.records if f"epoch {last} was committed before" in record.getMessage()]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (scene.checkpoint / "commits" / str(last)).exists()
    scene.add_files(3)
    job.go_on()
    assert scene.epochs() == list(range(6))
    assert job.value() == "6"


@pytest.mark.slow
def test_nondeterministic_replay_warns_and_leaves_first(job: Job, scene: Scene, caplog: pytest.LogCaptureFixture):
    scene.add_files(2)
    unsteady = counts(job.spark, str(scene.input)).withColumn("last", F.expr("reflect('java.lang.System', 'nanoTime')"))
    job.run(unsteady)
    job.stop()
    last = undo_sparks_commit(scene)
    first = scene.epoch(last)
    job.run(unsteady)
    assert scene.epoch(last) == first
    assert [record for record in caplog.records if "The query is not deterministic" in record.getMessage()]


# Tasks ----------------------------------------------------------------------------------------------------------------


class _FailsOnce(sink_task.Task):
    """A task of the sink that writes all it has to, and fails at its very end, the first time."""

    marker: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        results = list(super().__call__(batches))
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            raise OSError("this executor is lost")
        yield from results


class _RunsTwice(sink_task.Task):
    """A task that is run twice, as by speculation, with the same rows; one result counts."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(batches)
        list(super().__call__(iter(rows)))
        yield from super().__call__(iter(rows))


@pytest.mark.parametrize("task", [_FailsOnce, pytest.param(_RunsTwice, marks=pytest.mark.slow)])
def test_task_that_runs_more_than_once_leaves_each_change_once(
    job: Job, scene: Scene, monkeypatch: pytest.MonkeyPatch, task: type[sink_task.Task]
):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors cannot import a test
    monkeypatch.setattr(sink_task, "Task", with_files_only(task))
    marker = scene.folder / "failed"
    task.marker = str(marker)  # type: ignore[attr-defined]
    scene.add_files(3)
    job.run()
    assert marker.exists() == (task is _FailsOnce)
    changes = scene.log / JOB / scene.generation() / "changes"
    written = {path.name for path in changes.iterdir()}
    log, current = current_of(scene.log, JOB)
    epochs = [log.epoch(current, number) for number in scene.epochs()]
    listed = [file.name for epoch in epochs if epoch for file in epoch.files]
    assert len(listed) == len(set(listed))
    assert set(listed) < written  # what the thrown away attempts wrote is there, and listed by no epoch
    for epoch in epochs:
        assert epoch is not None
        assert epoch.rows == sum(file.rows for file in epoch.files)
    assert job.value() == "3"
    with sparkis.read_snapshot(scene.log, JOB) as snapshot:
        assert {f"{JOB}:n:{key}": job.value(f"{JOB}:n:{key}") for key in scene.counts} == {
            key: value for key, value in scene.expected().items() if isinstance(value, str)
        }
        assert snapshot.applied.key_count == len(scene.expected())


def with_files_only(task: type[sink_task.Task]) -> type[sink_task.Task]:
    """Return a task class whose workers write even the smallest result as a file."""

    class WithFilesOnly(task):  # type: ignore[misc,valid-type]
        def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from state_backend.log import change_files

            usual, change_files.INLINE_BYTES_MAX = change_files.INLINE_BYTES_MAX, 0
            try:
                yield from super().__call__(batches)
            finally:  # a worker lives longer than a test
                change_files.INLINE_BYTES_MAX = usual

    return WithFilesOnly


@pytest.mark.slow
def test_user_function_that_fails_at_first_leaves_each_change_once(job: Job, scene: Scene):
    marker = scene.folder / "failed"
    scene.add_files(2)

    def shaky(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if not marker.exists():
                marker.touch()
                raise OSError("a flaky look-up")

    rows = job.spark.readStream.schema("k string, file int").option("maxFilesPerTrigger", 1).json(str(scene.input))
    steady = rows.mapInArrow(shaky, rows.schema)
    job.run(steady.groupBy("k").agg(F.count("*").alias("n"), F.max("file").alias("last")))
    assert marker.exists()
    assert job.value() == "2"


# The log --------------------------------------------------------------------------------------------------------------


def errors_of(scene: Scene) -> str:
    with redis.Redis(port=scene.port, decode_responses=True) as client:
        (lag,) = client.execute_command("STATE", "LAG")
        return str(lag["error"])


def test_batches_fail_and_servers_answer_while_log_is_unreachable(job: Job, scene: Scene):
    scene.start_server()
    scene.add_files(2)
    job.run()
    scene.wait_for_all()
    before = scene.state()

    away = scene.folder / "away"
    scene.log.rename(away)
    scene.add_files(1)
    message = job.failure()
    assert f"job '{JOB}' is missing in the log {scene.log}: was it moved, or its storage removed?" in message
    assert "missing in the log" in eventually(lambda: errors_of(scene), bool)
    assert scene.state() == before

    away.rename(scene.log)
    job.run()
    scene.add_files(2)
    job.go_on()
    scene.wait_for_all()
    assert eventually(lambda: errors_of(scene), lambda error: not error) == ""


@pytest.mark.parametrize("size", [pytest.param(10, marks=pytest.mark.slow), 200_000])
def test_storage_that_refuses_fails_batch_with_its_reason(job: Job, scene: Scene, size: int):
    scene.add_files(1)
    wide = counts(job.spark, str(scene.input)).selectExpr("k", "n", f"rpad('', {size}, 'x') AS last")
    job.run(wide)
    generation = scene.log / JOB / scene.generation()
    for name in ("changes", "epochs"):  # a file in the folder's place: as root, no folder is read-only
        (generation / name).rename(generation / f"{name}-away")
        (generation / name).touch()
    scene.add_files(1)
    message = job.failure()
    assert f"in the log {scene.log}: Not a directory" in message
    assert len(message.splitlines()) == 1

    for name in ("changes", "epochs"):
        (generation / name).unlink()
        (generation / f"{name}-away").rename(generation / name)
    job.run(wide)
    assert job.value() == "2"
    assert scene.epochs() == [0, 1]


def test_fenced_writer_sends_no_heartbeats(job: Job, scene: Scene):
    scene.add_files(1)
    job.run()
    with LogWriter(scene.log, JOB, states(), takeover=True, sends_heartbeats=False) as newer:
        path = scene.log / JOB / "heartbeats" / f"{newer.current.term}.json"

        def heartbeat() -> Any:
            return checked_object(path.read_bytes())

        newer.send_heartbeat()
        threads = eventually(lambda: [each.name for each in enumerate_threads()], lambda names: BEAT not in names)
        assert BEAT not in threads
    job.stop()
    assert heartbeat() == {"writer": newer.current.writer, "count": 2, "interval_s": 1.0, "is_running": False}
