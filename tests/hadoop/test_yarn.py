"""State servers in YARN's containers: beside executors of a driver outside, and of a driver in a container."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import redis

from compat.waiting import eventually
from resp_server.net import children
from tests.hadoop.daemons import Yarn
from tests.spark import placing
from tests.spark.micro_batches import local_session
from tests.spark.placing import EXECUTORS, EXPECTED, is_running, watched

KEY = "job:sum:k1"

# A driver in a container, which tells where it serves and the processes there, and waits to be killed.
DRIVER = """
import json, sys, threading
from pathlib import Path
from tests.spark import placing
from tests.spark.micro_batches import local_session
from tests.spark.placing import placed
spark = local_session("yarn")
folder = Path(sys.argv[1])
with placed(spark, folder, executors=2) as endpoint:
    told = {"url": endpoint.url, "pids": placing.all_processes(endpoint)}
    (folder / "told.new").write_text(json.dumps(told))
    (folder / "told.new").rename(folder / "told")
    threading.Event().wait()
"""


def test_killed_container_is_replaced_with_its_server_while_its_keys_are_read(cluster: Yarn, tmp_path: Path) -> None:
    spark = local_session("yarn", **EXECUTORS, **cluster.spark_settings)
    try:
        with placing.placed_job(spark, tmp_path, replicas=1) as job:
            job.add()
            job.wait_for_servers(2)
            servers, processes = placing.server_pids(job.endpoint), placing.all_processes(job.endpoint)
            executors = [placing.executor_of(placing.parent_of(server)) for server in servers]
            assert len({os.getsid(executor) for executor in executors}) == 2  # a container is a session
            with watched(job.endpoint.url, {KEY: {job.sum(1)}}) as (watcher,):
                os.kill(executors[0], signal.SIGKILL)
                eventually(lambda: is_running(servers[0]), lambda found: not found, awaited="the end of its server")
                before = watcher.answers
                eventually(lambda: watcher.answers > before, awaited="a reply of the replica")
            assert not watcher.wrong and not watcher.errors
            eventually(lambda: len(placing.executor_ids(spark)), lambda count: count == 2, awaited="its successor")
            # The tasks of a micro-batch place a server beside it.
            eventually(lambda: (job.add(), len(placing.addresses(job.endpoint)))[1], lambda count: count == 2)
            job.wait_for_servers(2)
            processes += placing.all_processes(job.endpoint)
        eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])
    finally:
        spark.stop()


def test_killed_application_leaves_no_process(cluster: Yarn, tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(DRIVER)
    driver = {
        "spark.driver.memory": "512m",
        "spark.yarn.appMasterEnv.PYTHONPATH": children.environment()["PYTHONPATH"],
    }
    settings = EXECUTORS | cluster.spark_settings | driver
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit = Path(sys.executable).with_name("spark-submit")
    submitted = subprocess.Popen(
        [submit, "--master", "yarn", "--deploy-mode", "cluster", *options, program, tmp_path],
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "submit.log").open("wb"),
    )
    told = tmp_path / "told"
    eventually(told.exists, awaited=(tmp_path / "submit.log").read_text, processes=[submitted])
    said = json.loads(told.read_text())
    with redis.Redis.from_url(said["url"], decode_responses=True) as client:
        assert client.get(KEY) == EXPECTED[KEY]
    (application,) = cluster.running()
    cluster.kill(application)
    eventually(lambda: [pid for pid in said["pids"] if is_running(pid)], lambda left: left == [])
    assert submitted.wait() != 0
