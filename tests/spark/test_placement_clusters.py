"""State servers on more of a cluster: a standalone one, and three executors without a Python daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import placing
import pytest
import redis
from micro_batches import Batches, eventually, local_session, start
from placing import ByHand, is_running
from pyspark.sql import SparkSession
from standalone import standalone

import sparkis
from resp_server import children
from spark_hooks.placed import PlacedEndpoint
from spark_hooks.sessions import is_stopped

pytestmark = pytest.mark.cluster

EXECUTORS = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"],
}
EXPECTED = {f"job:sum:k{i}": str(2 * i * 10 + 1) for i in range(placing.KEYS)} | {
    f"job:facts:k{i}": {"sum": str(2 * i * 10 + 1), "n": "2"} for i in range(placing.KEYS)
}


@contextmanager
def placed(spark: SparkSession, folder: Path, executors: int, **options: Any) -> Iterator[PlacedEndpoint]:
    """Run a job of two micro-batches and serve it from so many executors, to the end of a block."""
    endpoint = sparkis.serve(spark, log=folder / "log", **options)
    assert isinstance(endpoint, PlacedEndpoint)
    rows = Batches(spark, folder / "input", "k string, v long")
    rows.add(*placing.batch(0))
    writer = sparkis.queryable(placing.sums(rows.df), *placing.states(), wait_for_visibility=60.0)
    query = start(writer, "job", folder / "checkpoint")
    eventually(lambda: len(placing.addresses(endpoint)), lambda count: count == executors)
    rows.add(*placing.batch(1))
    query.processAllAvailable()
    eventually(lambda: placing.answers(endpoint.url), lambda answers: answers == EXPECTED)
    yield endpoint
    if not is_stopped(spark):
        query.stop()
    endpoint.stop()


def test_on_a_standalone_cluster_every_key_is_answered_and_each_server_ends_with_its_executor(tmp_path: Path):
    with standalone(tmp_path, workers=2) as master:
        spark = local_session(master, **EXECUTORS)
        with placed(spark, tmp_path, executors=2, replicas=1, password="secret pass") as endpoint:
            processes = placing.all_processes(endpoint)
            servers = placing.server_pids(endpoint)
            assert len({placing.executor_of(placing.parent_of(pid)) for pid in servers}) == 2
            for port in (endpoint.port, *(port for _, port in placing.addresses(endpoint))):
                with pytest.raises(redis.AuthenticationError):
                    redis.Redis("127.0.0.1", port).get("job:sum:k1")
            for query in spark.streams.active:
                query.stop()
            spark.stop()  # nobody has called endpoint.stop()
            eventually(lambda: [pid for pid in processes[2:] if is_running(pid)], lambda left: left == [])
        eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])


def test_three_executors_share_the_slots_also_where_spark_starts_a_python_for_each_task(tmp_path: Path):
    spark = local_session("local-cluster[3,1,1024]", **EXECUTORS | {"spark.python.use.daemon": "false"})
    try:
        with placed(spark, tmp_path, executors=3) as endpoint:
            for first in placing.addresses(endpoint):
                client = ByHand(first)
                sums = {key: value for key, value in EXPECTED.items() if ":sum:" in key}
                assert {key: client.ask("GET", key) for key in sums} == sums
                assert client.moved > placing.KEYS / 2  # two thirds are elsewhere
                client.close()
            processes = placing.all_processes(endpoint)
        eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])
    finally:
        spark.stop()
