"""The sink on executors that are processes of their own, and state servers beside them; every key is read.

Tests share the job `placed`: each leaves it with two servers, and the last one ends it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import sparkis
from compat.waiting import eventually
from resp_server.net import children
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from tests.spark import placing
from tests.spark.micro_batches import Batches, local_session, start
from tests.spark.placing import ByHand, Placed, is_running, values_by_key
from tests.spark.processes import served


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A cluster of two executors with a core each."""
    session = local_session(
        "local-cluster[2,1,1024]",
        **{"spark.executor.memory": "512m", "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"]},
    )
    yield session
    session.stop()


@pytest.fixture(scope="module")
def placed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placed]:
    with placing.placed_job(spark, tmp_path_factory.mktemp("placed")) as made:
        yield made


@pytest.mark.slow
def test_executors_write_epochs_that_driver_commits_and_server_serves_them(spark: SparkSession, tmp_path: Path):
    endpoint = sparkis.serve(spark, log=tmp_path / "log", placement="driver")
    rows = Batches(spark, tmp_path / "input", "k string, v long, pad string")
    for number in range(2):
        rows.add(*({"k": f"k{i % 300}", "v": i * number, "pad": "x" * 600} for i in range(900)))
    sums = rows.df.groupBy("k").agg(F.sum("v").alias("sum"), F.max("pad").alias("pad"), F.count("*").alias("n"))
    writer = sparkis.queryable(
        sums,
        sparkis.StateDescriptor("sum", key="k", value="sum"),
        sparkis.StateDescriptor("pad", key="k", value=["pad", "n"]),
        wait_for_visibility=True,
    )
    query = start(writer, "job", tmp_path / "checkpoint")

    files = list((tmp_path / "log" / "job" / f"{query.id}.1" / "changes").iterdir())
    assert len(files) == 2 * 2  # two micro-batches, two executors: the maps do not fit into the epoch
    table = rows.as_table().groupBy("k").agg(F.sum("v").alias("sum"), F.count("*").alias("n")).collect()
    with redis.Redis.from_url(endpoint.url, decode_responses=True) as client:
        assert client.dbsize() == 2 * len(table) == 600
        assert {row.k: client.get(f"job:sum:{row.k}") for row in table} == {row.k: str(row.sum) for row in table}
        assert client.hgetall("job:pad:k7") == {"pad": "x" * 600, "n": "6"}
    query.stop()
    endpoint.stop()


@pytest.mark.versions
def test_every_key_is_answered_as_by_one_server_beside_driver(placed: Placed, tmp_path: Path):
    placed.wait_for_servers(2)
    for _ in range(2):
        placed.add()
    with served("--log", placed.log, "--store", tmp_path / "store") as url:
        embedded = eventually(
            lambda: placing.values_or_error(url), lambda answers: isinstance(answers, dict)
        )  # not LOADING
    assert embedded == placed.expected
    assert values_by_key(placed.endpoint.url) == embedded


@pytest.mark.versions
def test_client_that_follows_moved_finds_every_key(placed: Placed):
    placed.wait_for_servers(2)
    for first in placing.addresses(placed.endpoint):
        client = ByHand(first)
        found = {key: client.ask("GET", key) for key in placed.expected if ":sum:" in key}
        assert found == {key: value for key, value in placed.expected.items() if key in found}
        assert placing.KEYS // 4 < client.moved < placing.KEYS * 3 // 4  # each has about half of the slots
        client.close()


@pytest.mark.versions
def test_executor_of_many_tasks_has_one_server(placed: Placed):
    placed.wait_for_servers(2)
    servers = placing.server_pids(placed.endpoint)
    watched = [placing.executor_of(placing.parent_of(pid)) for pid in servers]
    placed.add()
    assert placing.server_pids(placed.endpoint) == servers
    assert len(set(watched)) == 2
    assert all("CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_text() for pid in watched)


def test_no_secret_stands_on_command_line(placed: Placed):
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in placing.all_processes(placed.endpoint)]
    assert all(placed.endpoint.plan.token not in line for line in lines)
    assert placed.endpoint.plan.token not in repr(placed.endpoint.plan)


def test_killed_executor_is_replaced_with_its_server_and_no_answer_is_wrong(placed: Placed):
    placed.wait_for_servers(2)
    server = placing.server_pids(placed.endpoint)[0]
    supervisor = placing.parent_of(server)
    allowed = {f"job:sum:k{i}": {placed.sum(i)} for i in range(0, placing.KEYS, 40)}
    with placing.watched(placed.endpoint.url, allowed) as watchers:
        os.kill(placing.executor_of(supervisor), signal.SIGKILL)
        eventually(lambda: is_running(server) or is_running(supervisor), lambda running: not running)
        eventually(lambda: placing.values_or_error(placed.endpoint.url), lambda answers: answers == placed.expected)
        before = [each.answers for each in watchers]
        eventually(lambda: [each.answers for each in watchers], lambda now: all(map(int.__gt__, now, before)))
    assert not [each.wrong for each in watchers if each.wrong]
    placed.add()  # its tasks place a server beside the executor that came instead
    eventually(lambda: len(placing.executor_ids(placed.rows.df.sparkSession)), lambda count: count == 2)
    placed.add_until_servers(2)


@pytest.mark.slow  # tests/adversity/test_state_servers.py has the same of servers, without Spark
def test_leaving_executor_hands_over_and_new_one_joins(placed: Placed, spark: SparkSession):
    placed.wait_for_servers(2)
    context: Any = spark.sparkContext._jsc
    allowed = {f"job:sum:k{i}": {placed.sum(i)} for i in range(0, placing.KEYS, 40)}
    with placing.watched(placed.endpoint.url, allowed) as watchers:
        context.sc().killExecutor(placing.executor_ids(spark)[0])
        eventually(lambda: len(placing.addresses(placed.endpoint)), lambda count: count == 1)
        placed.wait_for_servers(1)
    assert not [each.wrong for each in watchers if each.wrong]
    context.sc().requestExecutors(2)  # by its count Spark has none: it counts those asked for, less those killed
    eventually(lambda: len(placing.executor_ids(spark)), lambda count: count == 2)
    placed.add_until_servers(2)


@pytest.mark.parametrize("which", [0, 1], ids=["registry", "proxy"])
def test_registry_and_proxy_restart_on_their_port(placed: Placed, which: int):
    placed.wait_for_servers(2)
    killed = placed.endpoint.pids[which]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: placed.endpoint.pids[which], lambda pid: pid != killed)
    placed.add()
    placed.wait_for_servers(2)


def test_after_stop_no_process_is_left_and_serving_begins_again(placed: Placed, spark: SparkSession):
    placed.wait_for_servers(2)
    processes = placing.all_processes(placed.endpoint)
    assert len(set(processes)) == 2 + 2 * 3
    placed.endpoint.stop()
    eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])
    placed.query.stop()
    with sparkis.serve(spark, log=placed.log) as again:
        assert isinstance(again, ExecutorsEndpoint)
        eventually(lambda: placing.values_or_error(again.url), lambda answers: answers == placed.expected)
        processes = placing.all_processes(again)
    eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])
