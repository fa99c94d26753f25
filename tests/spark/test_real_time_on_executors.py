"""Values before their commit, at state servers beside executors: each gets all rows, and keeps those of its slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.conformance.certificates import Authority
from compat.waiting import eventually
from resp_server.net import children
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from tests.spark.micro_batches import local_session
from tests.spark.real_time import SETTINGS, MemoryRows, tls_of

KEYS = 50


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A cluster of two executors with a core each."""
    session = local_session(
        "local-cluster[2,1,1024]",
        **{"spark.executor.memory": "512m", "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"]},
        **SETTINGS,
    )
    yield session
    session.stop()


@pytest.mark.slow
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_every_key_is_readable_before_its_commit_through_proxy(
    spark: SparkSession, tmp_path: Path, *, has_tls: bool
) -> None:
    authority = Authority(tmp_path / "authority")
    tls = tls_of(authority) if has_tls else sparkis.Tls()
    certificates = authority.client("reader") if has_tls else {}
    with (
        sparkis.serve(spark, log=tmp_path / "log", tls=tls) as endpoint,
        redis.Redis.from_url(endpoint.url, **certificates) as client,
    ):
        assert isinstance(endpoint, ExecutorsEndpoint)
        eventually(lambda: len(endpoint.members()), (2).__eq__)
        rows = MemoryRows(spark, "k int, n int")
        counts = rows.df.groupBy("k").agg(F.count("*").alias("n"))
        writer = sparkis.queryable(counts, "counts", key="k", value="n", freshness="record")
        writer = writer.queryName("real").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(realTime="10 seconds").start()
        sent = 0
        names = [f"real:counts:{key}" for key in range(KEYS)]

        def read(*, is_transaction: bool) -> set[bytes | None]:
            """Return the values of all keys; none while a server opens the job, or while the proxy cannot reach it."""
            try:
                with client.pipeline(transaction=is_transaction) as pipe:
                    for name in names:
                        pipe.get(name)
                    return set(pipe.execute())
            except (redis.ResponseError, redis.BusyLoadingError):
                return set()

        def one_more() -> bool:
            """Add a row for each key; return whether all were readable before their commit."""
            nonlocal sent
            sent += 1
            rows.add(*({"k": key, "n": 1} for key in range(KEYS)))
            expected = {str(sent).encode()}
            eventually(lambda: read(is_transaction=False), expected.__eq__)
            return eventually(lambda: read(is_transaction=True), len) != expected

        try:
            eventually(one_more, bool)
            eventually(lambda: read(is_transaction=True), {str(sent).encode()}.__eq__)
        finally:
            query.stop()
