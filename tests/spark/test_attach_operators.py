"""`sparkis.attach` to each kind of state: after every batch, all that redis-py reads is what Spark's own reader shows.

Random inputs, one batch after the other; in between the query is started again each time, and the attachment is stopped
now and then while batches go on. SPARKIS_SEED gives other inputs, SPARKIS_KILL_ROUNDS more of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from compat.waiting import WAIT_S_MAX
from tests.spark.attaching import (
    SCHEMA,
    SEED,
    Attach,
    attached,
    epochs_of,
    generations_of,
    rocksdb,
    some_rows,
    values_of_job,
    whole,
)
from tests.spark.micro_batches import Batches, Settings
from tests.spark.operators import OPERATORS, Expiring, run

__all__ = ["attached"]

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.usefixtures("endpoint"), pytest.mark.kill]

# Comparisons of each kind of state.
ROUNDS = min(50, int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2))

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import this module


def alive(value: Any, now_ms: int) -> Any:
    """Return what of a value has not expired; None if nothing. A list expires with the last of its elements."""
    if isinstance(value, Expiring):
        return value.value if value.at_ms > now_ms else None
    if isinstance(value, dict):
        return {field: kept for field, each in value.items() if (kept := alive(each, now_ms)) is not None} or None
    if isinstance(value, list):
        return [getattr(each, "value", each) for each in value] if alive(value[-1], now_ms) is not None else None
    return value


def ends_of(value: Any) -> list[int]:
    """Return when a value, or what it holds, expires."""
    if isinstance(value, Expiring):
        return [value.at_ms]
    if isinstance(value, dict | list):
        return [end for each in (value.values() if isinstance(value, dict) else value) for end in ends_of(each)]
    return []


def read_all(client: redis.Redis, job: str) -> dict[str, Any]:
    """Return what clients see, without the job's name, and with JSON read."""
    return {key.removeprefix(f"{job}:"): _read_json(value) for key, value in values_of_job(client, job).items()}


def _read_json(value: Any) -> Any:
    is_json = isinstance(value, dict) and all(text.startswith("{") for text in value.values())
    return {field: json.loads(text) for field, text in value.items()} if is_json else value


def check(client: redis.Redis, job: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Compare all keys with Spark's, and when they expire; return what was read."""
    ends = sorted({end for value in expected.values() for end in ends_of(value)})
    while True:  # until nothing expires while it is read; ends do not come without end
        before_ms = time.time_ns() // 1_000_000
        found = read_all(client, job)
        after_ms = time.time_ns() // 1_000_000
        if not any(before_ms <= end <= after_ms for end in ends):
            break
    alive_now = {key: alive(value, after_ms) for key, value in expected.items()}
    assert found == {key: value for key, value in alive_now.items() if value is not None}
    for key, value in expected.items():
        if isinstance(value, Expiring | list) and (of_key := ends_of(value)):
            assert client.pexpiretime(f"{job}:{key}") in (max(of_key), -2), "-2 where it has just expired"
        if isinstance(value, dict) and ends_of(value):
            of_fields = client.hpexpiretime(f"{job}:{key}", *value) or [-2] * len(value)
            for each, end in zip(value.values(), of_fields, strict=True):
                assert end in (each.at_ms, -2)
    return found


@pytest.mark.parametrize(
    ("of", "store"),
    [
        # The golden checkpoints have all of them. What processors declare is followed in the same way, and tested
        # beside them.
        pytest.param(name, store, marks=[] if not number and name in ("windows", "join") else [pytest.mark.slow])
        for name, each in OPERATORS.items()
        for number, store in enumerate(each.stores)
    ],
)
def test_keys_equal_sparks_state_after_every_batch_despite_restarts(
    spark: SparkSession,
    client: redis.Redis,
    batches: Make,
    attached: Attach,
    tmp_path: Path,
    settings: Settings,
    of: str,
    store: str,
):
    operator = OPERATORS[of]
    random = Random(f"{SEED} {of} {store}")
    if store == "rocksdb":
        settings(rocksdb(random.choice("12")))
    rows = batches(SCHEMA)
    checkpoint = tmp_path / "checkpoint"
    job = f"{of}-{store}"
    made = operator.query(rows.df).writeStream.outputMode(operator.mode).format("noop").queryName(job)
    writer = made.option("checkpointLocation", str(checkpoint))
    rows.add(*some_rows(random, 0), {"k": "first", "n": 1, "v": 1.0, "t": "2026-01-01T00:00:00Z"})
    run(writer)
    attachment = attached(checkpoint=checkpoint, job=job)
    ever: set[str] = set()
    for minute in range(1, ROUNDS + 1):
        is_away = random.random() < 0.4
        if is_away:
            attachment.stop()
        for _ in range(random.choice((1, 1, 2))):
            rows.add(*some_rows(random, minute % 60))
            run(writer)
        if is_away:
            attachment = attached(checkpoint=checkpoint, job=job)
        assert attachment.wait(timeout_s=WAIT_S_MAX)
        expected = operator.expected(partial(whole, spark, checkpoint, attachment.batch))
        ever |= check(client, job, expected).keys()
    assert ever
    assert generations_of(attachment) == 1, "no gap, so the state is read whole once"
    numbers = epochs_of(attachment)
    assert numbers == list(range(numbers[0], attachment.batch + 1)), "one epoch for each batch"
