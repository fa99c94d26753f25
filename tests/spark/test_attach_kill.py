"""`sparkis attach`, and the query that it follows, may be killed at any moment: each batch is one epoch, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from time import sleep

import pytest
import redis
from pyspark.sql import SparkSession

from compat.waiting import WAIT_S_MAX, eventually
from state_backend.apply.replay import read_snapshot
from state_backend.attach.start import attach_files
from state_backend.log.change_log import ChangeLog
from tests.spark.attaching import SCHEMA, SEED, rocksdb, some_rows, values_of_job, whole
from tests.spark.micro_batches import Batches, Settings
from tests.spark.processes import Command, served
from tests.spark.processes import sparkis as command

pytestmark = [pytest.mark.kill, pytest.mark.slow]

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)
FILES_PER_ROUND = 6
JOB = "killed"

# A JVM starts, and reads its first batch, with everything still to be compiled.


class Scene:
    """A query in a process of its own, and `sparkis attach` in another."""

    def __init__(self, rows: Batches, folder: Path, random: Random) -> None:
        self.files = 0
        self.checkpoint, self.log = folder / "checkpoint", folder / "log"
        self._rows = rows
        self._random = random
        self._job = ChangeLog(self.log).job(JOB)

    def add_files(self, count: int) -> None:
        """Let files arrive, each a micro-batch."""
        for _ in range(count):
            self._rows.add(*some_rows(self._random, 0), {"k": "each", "n": 1, "v": 1.0})
        self.files += count

    @contextmanager
    def query(self) -> Iterator[subprocess.Popen[str]]:
        """Run the query; its JVM ends with it, as if the machine had lost its power."""
        driver = Path(__file__).with_name("untouched.py")
        process = subprocess.Popen(
            [sys.executable, driver, self._rows.folder, self.checkpoint],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process
            finally:
                os.killpg(process.pid, signal.SIGKILL)

    @contextmanager
    def attachment(self) -> Iterator[Command]:
        """Run `sparkis attach`."""
        with command("attach", "--checkpoint", self.checkpoint, "--job", JOB, "--log", self.log) as running:
            try:
                yield running
            finally:
                running.process.kill()
                running.process.wait()

    def newest(self) -> int:
        """Return the query's last committed batch."""
        return max((int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*")), default=-1)

    def files_read(self) -> int:
        """Return the number of files of all committed batches.

        It may be more than the batches: a query that is killed between its list of files and the batch's plan reads
        the listed file in one batch with the next one.
        """
        batch = self.newest()
        if batch < 0:
            return 0
        offset = (self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1]
        return int(json.loads(offset)["logOffset"]) + 1

    def generation(self) -> str:
        """Return which one of the log's is in charge."""
        current = self._job.current()
        return "" if current is None else current.generation

    def epochs(self) -> list[int]:
        """Return which batches are in the log."""
        generation = self.generation()
        return self._job.numbers(generation) if generation else []

    def last_epoch(self) -> int:
        """Return the last batch in the log."""
        return max(self.epochs(), default=-1)


def test_query_or_attachment_killed_at_random_moments_loses_no_batch(
    spark: SparkSession, batches: Callable[[str], Batches], tmp_path: Path
):
    random = Random(SEED)
    scene = Scene(batches(SCHEMA), tmp_path, random)
    with ExitStack() as queries, ExitStack() as attachments:
        queries.enter_context(scene.query())
        scene.add_files(1)
        eventually(scene.newest, lambda batch: batch >= 0)
        attachments.enter_context(scene.attachment())
        for number in range(ROUNDS):
            before = scene.last_epoch()
            scene.add_files(FILES_PER_ROUND)
            eventually(scene.last_epoch, lambda epoch, before=before: epoch > before)
            sleep(random.random())
            if number % 2:
                attachments.close()
                attachments.enter_context(scene.attachment())
            else:
                queries.close()
                queries.enter_context(scene.query())
        scene.add_files(1)
        eventually(scene.files_read, lambda count: count == scene.files)
        newest = scene.newest()
        eventually(scene.epochs, lambda epochs: newest in epochs)
    assert scene.epochs() == list(range(scene.epochs()[0], newest + 1))
    query_id = json.loads((scene.checkpoint / "metadata").read_text())["id"]
    assert scene.generation() == f"{query_id}.1", "the state was read whole once"
    expected = {
        f"{JOB}:aggregation:{row.key.k}": str(row.value["count"]) for row in whole(spark, scene.checkpoint, newest)
    }
    assert expected[f"{JOB}:aggregation:each"] == str(scene.files)
    with (
        served("--log", scene.log, "--store", tmp_path / "store") as url,
        redis.Redis.from_url(url, decode_responses=True) as client,
    ):
        eventually(lambda: seen_by(client), lambda found: found == expected)


LAST_BATCH = 2
NO_BATCH = -1


@contextmanager
def dying(
    rows: Batches, checkpoint: Path, run: int, dies_at: int, settings: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a query that kills itself between the state and the commit of a batch."""
    driver = Path(__file__).with_name("dying.py")
    arguments = [rows.folder, checkpoint, str(run), str(dies_at), json.dumps(settings)]
    with subprocess.Popen(
        [sys.executable, driver, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def values_in(log: Path) -> dict[str, tuple[int, int]]:
    """Return the count and the greatest run of each key, as clients read them."""
    with read_snapshot(str(log), JOB) as snapshot:
        fields = {change.key.decode(): dict(snapshot.map_pairs(change.key)) for change in snapshot.changes()}
    return {key: (int(found[b"count"]), int(found[b"max"])) for key, found in fields.items()}


@pytest.mark.parametrize("store", [{}, rocksdb(), rocksdb("2")], ids=["hdfs", "rocksdb", "format2"])
def test_query_may_die_between_state_and_commit_of_batch(
    spark: SparkSession, batches: Callable[[str], Batches], settings: Settings, tmp_path: Path, store: dict[str, str]
):
    settings(store)
    rows, checkpoint, log = batches(SCHEMA), tmp_path / "checkpoint", tmp_path / "log"
    for batch in range(LAST_BATCH + 1):
        rows.add({"k": "each", "n": batch}, {"k": f"of {batch}", "n": batch})
    files = list[Path]()
    with ExitStack() as running:
        process = running.enter_context(dying(rows, checkpoint, 1, LAST_BATCH, store))
        eventually(lambda: (checkpoint / "commits/0").exists())
        attachment = running.enter_context(attach_files(str(checkpoint), job=JOB, log=str(log)))
        assert process.wait(WAIT_S_MAX) == -signal.SIGKILL
        assert not (checkpoint / f"commits/{LAST_BATCH}").exists()
        for partition in (0, 1):
            files += (checkpoint / f"state/0/{partition}").glob(f"{LAST_BATCH + 1}[._]*")
        assert {path.parent.name for path in files} == {"0", "1"}, "each task has written its state"
        assert attachment.wait(LAST_BATCH - 1, WAIT_S_MAX)
        committed = {"killed:aggregation:each": (2, 1)} | {f"killed:aggregation:of {each}": (1, 1) for each in (0, 1)}
        assert (attachment.batch, values_in(log)) == (LAST_BATCH - 1, committed)
        # The same batch again: its state differs from that of the try that died.
        rows.add({"k": "last", "n": 3})
        running.enter_context(dying(rows, checkpoint, 2, NO_BATCH, store))
        eventually(lambda: (checkpoint / f"commits/{LAST_BATCH + 1}").exists())
        assert attachment.wait(LAST_BATCH + 1, WAIT_S_MAX)
        expected = {
            f"killed:aggregation:{row.key.k}": (row.value["count"], row.value["max"])
            for row in whole(spark, checkpoint, LAST_BATCH + 1)
        }
        assert values_in(log) == expected
        assert expected == committed | {
            "killed:aggregation:each": (3, 2),
            f"killed:aggregation:of {LAST_BATCH}": (1, 2),
            "killed:aggregation:last": (1, 2),
        }
    found = ChangeLog(str(log)).job(JOB)
    current = found.current()
    assert current is not None
    numbers = found.numbers(current.generation)
    assert numbers == list(range(numbers[0], LAST_BATCH + 2)), "each batch is one epoch of one generation"


def seen_by(client: redis.Redis) -> dict[str, str]:
    """Return what a server shows; nothing while it is opening the job."""
    try:
        return values_of_job(client, JOB)
    except redis.RedisError:
        return {}
