"""A small static DataFrame is readable as one hash, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import eventually
from spark_hooks.publish import table
from state_backend.log.fencing import HEARTBEATS_MISSED_MAX
from state_backend.model.errors import DescriptorError, FencedWriterError
from tests.spark.micro_batches import Batches, start

Make = Callable[[str], Batches]

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("endpoint")]


@pytest.fixture(autouse=True)
def other_drivers() -> Iterator[None]:
    """Begin each test as a driver that has published nothing."""
    table._writers.clear()
    yield
    table._writers.clear()


def job_row(client: redis.Redis, job: str) -> dict[str, object]:
    rows = client.execute_command("STATE", "JOBS")
    return next(row for row in rows if row["name"] == job)


def test_table_is_hash_that_next_call_replaces_whole(spark: SparkSession, client: redis.Redis):
    limits = spark.createDataFrame([("s1", 20.5), ("s2", 1e30), ("s3", None)], "sensor string, limit double")
    assert sparkis.publish_table(limits, "thresholds", field="sensor", value="limit", job="rules") == 0
    assert client.hgetall("rules:thresholds") == {"s1": "20.5", "s2": "1e+30"}
    assert (client.type("rules:thresholds"), client.hlen("rules:thresholds")) == ("hash", 2)
    assert list(client.scan_iter("rules:*")) == ["rules:thresholds"]
    assert list(client.hscan_iter("rules:thresholds", match="s1")) == [("s1", "20.5")]

    others = spark.createDataFrame([("s2", 7.0)], "sensor string, limit double")
    assert sparkis.publish_table(others, "thresholds", field="sensor", value="limit", job="rules") == 1
    assert client.hgetall("rules:thresholds") == {"s2": "7"}
    nothing = others.where("false")
    sparkis.publish_table(nothing, "thresholds", field="sensor", value="limit", job="rules")
    assert client.exists("rules:thresholds") == 0


def test_table_of_members_is_set_and_one_with_scores_sorted_set(spark: SparkSession, client: redis.Redis):
    users = spark.createDataFrame([("ann", 2), ("bob", 1), ("cid", None)], "user string, rank int")
    sparkis.publish_table(users, "banned", member="user", job="lists")
    sparkis.publish_table(users, "ranked", member="user", score="rank", job="lists")
    assert (client.type("lists:banned"), client.type("lists:ranked")) == ("set", "zset")
    with pytest.raises(DescriptorError, match="several rows have the member b'ann' in the column 'user'"):
        sparkis.publish_table(users.union(users), "banned", member="user", job="lists")
    with pytest.raises(DescriptorError, match="give field= or member="):
        sparkis.publish_table(users, "banned", value="rank", job="lists")


def test_several_value_columns_are_object_and_several_tables_share_job(spark: SparkSession, client: redis.Redis):
    rules = spark.createDataFrame([(1, "a", 2.5), (2, None, None)], "id int, name string, factor double")
    sparkis.publish_table(rules, "first", field="id", value=("name", "factor"), job="shared")
    sparkis.publish_table(rules, "second", field="id", value="name", job="shared")
    assert json.loads(client.hget("shared:first", "1")) == {"name": "a", "factor": 2.5}
    assert client.hgetall("shared:second") == {"1": "a"}
    more = rules.withColumn("name", F.lit("b"))
    sparkis.publish_table(more, "first", field="id", value="name", job="shared")
    assert client.hgetall("shared:first") == {"1": "b", "2": "b"}
    assert client.hgetall("shared:second") == {"1": "a"}


def test_large_table_is_written_into_file_of_log(spark: SparkSession, client: redis.Redis):
    rows = spark.range(table.ROWS_MAX).select("id", F.repeat(F.lit("x"), 20).alias("text"))
    sparkis.publish_table(rows, "large", field="id", value="text", job="many")
    assert client.hlen("many:large") == table.ROWS_MAX
    assert client.hget("many:large", "99999") == "x" * 20


def test_table_is_not_stale_without_writer(spark: SparkSession, client: redis.Redis):
    sparkis.publish_table(spark.range(3), "ids", field="id", value="id", job="still")
    eventually(lambda: job_row(client, "still")["stale"], lambda stale: stale == 0)
    server_s = client.info("server")["uptime_in_seconds"]
    eventually(
        lambda: client.info("server")["uptime_in_seconds"], lambda now_s: now_s > server_s + HEARTBEATS_MISSED_MAX
    )
    assert job_row(client, "still")["stale"] == 0
    assert job_row(client, "still")["incomplete"] == 0


def test_restarted_driver_continues_and_fenced_one_gets_error(spark: SparkSession, client: redis.Redis):
    rows = spark.range(2)

    def publish(end: int, name: str = "ids") -> int:
        return sparkis.publish_table(rows.where(f"id < {end}"), name, field="id", value="id", job="moved")

    assert publish(2) == 0
    overtaken = dict(table._writers)
    table._writers.clear()  # as a driver does that starts again
    assert publish(1) == 1
    assert client.hgetall("moved:ids") == {"0": "0"}
    table._writers.update(overtaken)  # the first one is still there
    for name in ("ids", "others"):
        with pytest.raises(
            FencedWriterError, match=f"table '{name}': another driver publishes the tables of job 'moved'"
        ):
            publish(2, name)
    assert client.hgetall("moved:ids") == {"0": "0"}


def test_impossible_table_is_refused_by_name(spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path):
    stream = batches("k string, v int")
    stream.add({"k": "a", "v": 1})
    start(sparkis.queryable(stream.df, "s", key="k", value="v"), "busy", tmp_path / "checkpoint")
    rows = spark.createDataFrame([("a", 1), ("a", 2)], "k string, v int")
    null = spark.createDataFrame([(None, 1)], "k string, v int")
    for df, name, job, reason in (
        (stream.df, "t", "tables", "takes a static DataFrame"),
        (rows, "t", "tables", r"table 't': several rows have the field b'a' in the column 'k'"),
        (null, "t", "tables", r"state 't': the field column 'k' is null"),
        (rows, "_t", "tables", "'_t' begins with _"),
        (rows, "a:b", "tables", "state name 'a:b'"),
        (rows.limit(1), "t", "busy", r"job 'busy'.* is written by a query; give the tables another job="),
        (spark.range(table.ROWS_MAX + 1).selectExpr("id k", "id v"), "t", "tables", "more than 100000 rows"),
    ):
        with pytest.raises(sparkis.SparkisError, match=reason):
            sparkis.publish_table(df, name, field="k", value="v", job=job)
    with pytest.raises(sparkis.SparkisError, match="'w', which the DataFrame does not have"):
        sparkis.publish_table(rows, "t", field="k", value="w", job="tables")
    assert client.exists("tables:t") == 0
