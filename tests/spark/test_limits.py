"""The longest keys, fields and values, and the largest maps, from Spark to a client; longer ones are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from pyspark.sql import DataFrame

import sparkis
from compat.waiting import WAIT_S_MAX
from state_backend.model.records import KEY_BYTES_MAX, VALUE_BYTES_MAX
from tests.spark.micro_batches import Batches, failure_of, start

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.usefixtures("endpoint"), pytest.mark.slow]


def texts(batches: Make, *lengths: tuple[int, int, int]) -> DataFrame:
    """Return a stream of rows whose key, field and value have the given lengths."""
    rows = batches("k int, f int, v int")
    for k, f, v in lengths:
        rows.add({"k": k, "f": f, "v": v})
    return rows.df.selectExpr("repeat('k', k) AS k", "repeat('f', f) AS f", "repeat('v', v) AS v")


def test_longest_key_field_and_value_are_readable(client: redis.Redis, batches: Make, tmp_path: Path):
    key = "l:s:" + "k" * (KEY_BYTES_MAX - len("l:s:"))
    rows = texts(batches, (len(key) - len("l:s:"), KEY_BYTES_MAX, VALUE_BYTES_MAX))
    writer = sparkis.queryable(
        rows,
        sparkis.StateDescriptor("s", key="k", value="v"),
        sparkis.StateDescriptor("m", key="k", field="f", value="k"),
        mode="append",
        wait_for_visibility=WAIT_S_MAX,
    )
    start(writer, "l", tmp_path / "checkpoint")
    assert client.strlen(key) == VALUE_BYTES_MAX
    assert client.get(key) == "v" * VALUE_BYTES_MAX
    assert client.hkeys(key.replace("l:s:", "l:m:")) == ["f" * KEY_BYTES_MAX]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            (KEY_BYTES_MAX, 1, 1),
            f"state 's': a key made of the column 'k' has {KEY_BYTES_MAX + 4} bytes; the limit is {KEY_BYTES_MAX};",
        ),
        (
            (1, KEY_BYTES_MAX + 1, 1),
            f"state 's': a field made of the column 'f' has {KEY_BYTES_MAX + 1} bytes; the limit is {KEY_BYTES_MAX};",
        ),
        (
            (1, 1, VALUE_BYTES_MAX + 1),
            f"state 's': a value made of the column 'v' has {VALUE_BYTES_MAX + 1} bytes; the limit",
        ),
    ],
    ids=["key", "field", "value"],
)
def test_too_long_text_fails_its_batch_and_earlier_epochs_stay(
    client: redis.Redis,
    batches: Make,
    tmp_path: Path,
    lengths: tuple[int, int, int],
    message: str,
):
    rows = texts(batches, (1, 1, 1), lengths)
    writer = sparkis.queryable(rows, "s", key="k", field="f", value="v", mode="append", job="o")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert f"job 'o', batch 1: {message}" in failure_of(query)
    with pytest.raises(sparkis.SparkisError, match=f"^job 'o', batch 1: .*{re.escape(message)}[^\n]*$"):
        query.awaitTermination()
    assert client.hgetall("o:s:k") == {"f": "v"}


def test_map_grows_to_a_million_fields(client: redis.Redis, batches: Make, tmp_path: Path):
    rows = batches("first int")
    rows.add({"first": 0}, {"first": 500_000})
    rows.add()
    fields = rows.df.selectExpr("'k' AS k", "explode(sequence(first, first + 499999)) AS f").selectExpr(
        "k", "f", "2 * f AS v"
    )
    writer = sparkis.queryable(
        fields, "m", key="k", field="f", value="v", mode="append", wait_for_visibility=WAIT_S_MAX
    )
    start(writer, "million", tmp_path / "checkpoint")
    assert client.hlen("million:m:k") == 1_000_000
    asked = range(0, 1_000_000, 9_973)
    assert client.hmget("million:m:k", list(asked)) == [str(2 * field) for field in asked]
