"""`sparkis attach` may be killed at any moment: the next one goes on where the log ends, each batch once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import sleep

import pytest
import redis
from attaching import SCHEMA, SEED, shown, some_rows, whole
from micro_batches import Batches, eventually, start
from processes import served
from processes import sparkis as command
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from state_backend.change_log import ChangeLog

pytestmark = pytest.mark.kill

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)

# A JVM starts, and reads its first batch, with everything still to be compiled.
START_S_MAX = 180.0


def test_kills_at_random_moments(spark: SparkSession, batches: Callable[[str], Batches], tmp_path: Path):
    random = Random(SEED)
    rows = batches(SCHEMA)
    rows.add(*some_rows(random, 0))
    counted = rows.df.groupBy("k").agg(F.count("*").alias("n"))
    query = start(counted.writeStream.outputMode("update").format("noop"), "killed", tmp_path / "checkpoint")
    job = ChangeLog(tmp_path / "log").job("killed")

    def epochs() -> list[int]:
        current = job.current()
        return [] if current is None else job.numbers(current.generation)

    def last() -> int:
        return max(epochs(), default=-1)

    attach = ("attach", "--checkpoint", tmp_path / "checkpoint", "--job", "killed", "--log", tmp_path / "log")
    for _ in range(ROUNDS):
        before = last()
        with command(*attach) as running:
            running.wait_for("attached: ", timeout_s=START_S_MAX)
            for _ in range(6):
                rows.add(*some_rows(random, 0))
            eventually(last, lambda epoch, before=before: epoch > before, START_S_MAX)
            sleep(random.random())
            running.process.kill()
            running.process.wait()
    query.processAllAvailable()
    newest = query.lastProgress.batchId
    with command(*attach) as running, served("--log", tmp_path / "log", "--store", tmp_path / "store") as url:
        running.wait_for("attached: ", timeout_s=START_S_MAX)
        eventually(last, lambda epoch: epoch == newest, START_S_MAX)
        assert epochs() == list(range(epochs()[0], newest + 1))
        current = job.current()
        assert current is not None
        assert current.generation == f"{query.id}-0", "the state was read whole once"
        expected = {
            f"killed:aggregation:{row.key.k}": str(row.value["count"])
            for row in whole(spark, tmp_path / "checkpoint", newest)
        }
        with redis.Redis.from_url(url, decode_responses=True) as client:
            eventually(lambda: seen_by(client), lambda found: found == expected)


def seen_by(client: redis.Redis) -> dict[str, str]:
    """Return what a server shows; nothing while it is opening the job."""
    try:
        return shown(client, "killed")
    except redis.RedisError:
        return {}
