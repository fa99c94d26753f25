"""Shared by tests of `sparkis.attach`: Spark's view of a state, the clients' view, and inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis
from pyspark.sql import Row, SparkSession

import sparkis
from sparkis import Attachment
from state_backend.log.change_log import ChangeLog, CurrentGeneration

Attach = Callable[..., Attachment]

STORE = "spark.sql.streaming.stateStore."
CHANGELOG = STORE + "rocksdb.changelogCheckpointing.enabled"
ROCKSDB = {STORE + "providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"}

# Another number gives other inputs and other moments of restarts.
SEED = int(os.environ.get("SPARKIS_SEED") or 1)
SCHEMA = "k string, n int, v double, t timestamp"


def text(value: Any) -> str:
    """Return a value as clients see it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(value)


def whole(spark: SparkSession, checkpoint: Path, batch: int, **options: str) -> list[Row]:
    """Return the rows of Spark's state reader for a batch."""
    reader = spark.read.format("statestore").options(batchId=str(batch), **options)
    return reader.load(str(checkpoint)).collect()


def values_of_job(client: redis.Redis, job: str) -> dict[str, Any]:
    """Return all keys of a job with their values."""
    keys = list(client.scan_iter(match=f"{job}:*", count=1000))
    with client.pipeline(transaction=False) as asked:
        for key in keys:
            asked.type(key)
        kinds = asked.execute()
        for key, kind in zip(keys, kinds, strict=True):
            if kind == "hash":
                asked.hgetall(key)
            elif kind == "list":
                asked.lrange(key, 0, -1)
            else:
                asked.get(key)
        return dict(zip(keys, asked.execute(), strict=True))


def some_rows(random: Random, minute: int) -> list[dict[str, Any]]:
    """Return rows of few keys around one minute, so that batches change, repeat and expire rows of other batches."""
    return [
        {
            "k": f"k{random.randrange(12)}",
            "n": random.randrange(-5, 5),
            "v": random.randrange(-8, 9) / 4,
            "t": f"2026-01-01T00:{minute:02d}:{random.randrange(60):02d}Z",
        }
        for _ in range(random.randrange(12))
    ]


def current_of(attachment: Attachment) -> CurrentGeneration:
    """Return the current writer of an attachment's log."""
    current = ChangeLog(attachment.log).job(attachment.job).current()
    assert current is not None
    return current


def epochs_of(attachment: Attachment) -> list[int]:
    """Return the numbers of the epochs of an attachment's generation."""
    return ChangeLog(attachment.log).job(attachment.job).numbers(current_of(attachment).generation)


def generations_of(attachment: Attachment) -> int:
    """Return the number of generations of an attachment's job."""
    terms = ChangeLog(attachment.log).job(attachment.job).terms
    return len({term.generation for term in terms.down_from(current_of(attachment).term) if not term.is_void})


def rocksdb(format_version: str = "1") -> dict[str, str]:
    """Return the settings of a query with state in RocksDB that can be attached."""
    return {**ROCKSDB, CHANGELOG: "true", STORE + "checkpointFormatVersion": format_version}


@pytest.fixture
def attached() -> Iterator[Attach]:
    """Attach while the block runs."""
    made: list[Attachment] = []

    def attach(*given: Any, **more: Any) -> Attachment:
        made.append(sparkis.attach(*given, **more))
        return made[-1]

    yield attach
    for attachment in made:
        attachment.stop()
