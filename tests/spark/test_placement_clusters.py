"""State servers on more of a cluster: a standalone one, and three executors without a Python daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from compat.waiting import eventually
from resp_server.net import children
from tests.spark import placing
from tests.spark.micro_batches import local_session
from tests.spark.placing import EXECUTORS, EXPECTED, ByHand, is_running, placed
from tests.spark.standalone import standalone

pytestmark = pytest.mark.cluster


# A driver that serves from two executors, says which processes there are, and waits to be killed.
DRIVER = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from tests.spark import placing
from tests.spark.placing import EXECUTORS, placed
from tests.spark.micro_batches import local_session
spark = local_session("local-cluster[2,1,1024]", **EXECUTORS)
with placed(spark, Path(sys.argv[1]), executors=2) as endpoint:
    executors = [placing.executor_of(placing.parent_of(pid)) for pid in placing.server_pids(endpoint)]
    print(json.dumps(placing.all_processes(endpoint) + executors), flush=True)
    sys.stdin.read()
"""


def test_standalone_cluster_answers_all_keys_and_ends_servers_with_executors(tmp_path: Path):
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


def test_three_executors_share_slots_with_python_for_each_task(tmp_path: Path):
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


def test_reachable_driver_has_servers_with_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.2")  # loopback as well, but nothing that is known for it
    address = {"spark.driver.host": "127.0.0.2", "spark.driver.bindAddress": "127.0.0.2"}
    spark = local_session("local[2]", **address, **{"spark.sparkis.placement": "executors"})
    try:
        with placed(spark, tmp_path, executors=1) as endpoint:
            host, port = placing.addresses(endpoint)[0]
            assert endpoint.registry is not None and endpoint.registry.startswith("127.0.0.2:")
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(host, port).get("job:sum:k1")
            assert redis.Redis(host, port, password=endpoint.password).get("job:sum:k1") == b"21"
    finally:
        spark.stop()


def test_killed_driver_leaves_nothing_behind(tmp_path: Path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": children.environment()["PYTHONPATH"]},
    )
    assert driver.stdout is not None and driver.stdin is not None
    processes = json.loads(driver.stdout.readline())
    assert len(processes) == 2 + 2 * 3 + 2
    assert all(map(is_running, processes))
    driver.kill()
    driver.wait()
    driver.stdin.close()
    driver.stdout.close()
    eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])
