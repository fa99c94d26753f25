"""A query with its log in an S3 bucket: the driver and its tasks write it, and a server of the driver serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.object_store import faulty_proxy, s3_server
from compat.object_store.faulty_proxy import FaultyProxy
from state_backend.log.change_files import INLINE_BYTES_MAX
from state_backend.log.change_log import ChangeLog
from state_backend.model.errors import LogUnavailableError
from tests.spark.micro_batches import Batches, local_session, start

BUCKET = "sparkis-query"
ROOT = f"s3a://{BUCKET}/logs"
ROWS = "sensor string, temp double, text string"
Make = Callable[[str], Batches]


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultyProxy]:
    """The way to an S3 server, for this driver and what it starts."""
    with s3_server.running(BUCKET) as port, faulty_proxy.running(port) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.environment(proxy.port).items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def spark(proxy: FaultyProxy) -> Iterator[SparkSession]:
    """A local Spark whose tasks find the server as those of a cluster would."""
    environment = s3_server.environment(proxy.port).items()
    session = local_session("local[2]", **{f"spark.executorEnv.{name}": value for name, value in environment})
    yield session
    session.stop()


@pytest.fixture(scope="module")
def endpoint(spark: SparkSession) -> Iterator[sparkis.ServedEndpoint]:
    """A server of a log in the bucket."""
    served = sparkis.serve(spark, log=ROOT)
    yield served
    served.stop()


def test_querys_log_may_lie_in_bucket(spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path) -> None:
    rows = batches(ROWS)
    rows.add(*({"sensor": f"s{number}", "temp": number, "text": "a"} for number in range(100)))
    rows.add({"sensor": "s1", "temp": 500.0, "text": "b"})
    # Each task has enough of it for a change file.
    rows.add(*({"sensor": f"t{number}", "temp": number, "text": "x" * INLINE_BYTES_MAX} for number in range(8)))
    last = rows.df.groupBy("sensor").agg(F.max("temp").alias("temp"), F.max("text").alias("text"))
    writer = sparkis.queryable(
        last, "last", key="sensor", value=["temp", "text"], mode="update", wait_for_visibility=True
    )
    query = start(writer, "bucket", tmp_path / "checkpoint")
    assert client.hget("bucket:last:s1", "temp") == "500"
    assert client.hget("bucket:last:s99", "temp") == "99"
    assert len(client.hget("bucket:last:t7", "text")) == INLINE_BYTES_MAX
    job = ChangeLog(ROOT).job("bucket")
    current = job.current()
    assert current is not None
    assert job.numbers(current.generation) == [0, 1, 2]
    assert len(job.filesystem.names(job.changes_folder(current.generation))) == 2
    rows.add({"sensor": "s1", "temp": 501.0, "text": "b"})
    query.processAllAvailable()
    assert client.hget("bucket:last:s1", "temp") == "501"


@pytest.mark.slow
def test_commit_with_lost_answer_is_commit(
    proxy: FaultyProxy, spark: SparkSession, client: redis.Redis, batches: Make, tmp_path: Path
) -> None:
    rows = batches(ROWS)
    rows.add({"sensor": "a", "temp": 1.0})
    count = rows.df.groupBy("sensor").count()
    writer = sparkis.queryable(count, "count", key="sensor", value="count", mode="update", wait_for_visibility=True)
    query = start(writer, "lossy", tmp_path / "checkpoint")
    for kind in ("lose", "late", "cut", "503"):
        fault = proxy.fail(kind, "PUT", "/epochs/")
        rows.add({"sensor": "a", "temp": 1.0})
        query.processAllAvailable()
        assert fault.times == 0
    assert client.get("lossy:count:a") == "5"
    assert ChangeLog(ROOT).job("lossy").filesystem.root == f"s3://{BUCKET}/logs"


def test_log_without_bucket_is_refused_before_query_starts(
    spark: SparkSession, endpoint: sparkis.ServedEndpoint, batches: Make
) -> None:
    rows = batches(ROWS)
    with pytest.raises(LogUnavailableError, match="NoSuchBucket"):
        sparkis.serve(spark, log="s3://no-such-bucket/logs")
    with pytest.raises(LogUnavailableError, match="write s3://bucket/logs"):
        sparkis.serve(spark, log="s3:/bucket/logs")
    with pytest.raises(LogUnavailableError, match="write s3://bucket/logs"):
        sparkis.queryable(
            rows.df, "last", key="sensor", value="temp", mode="append", order_by="temp", log="s3:bucket/logs"
        )
