"""A task makes sure that there is one state server beside its executor, and never fails for it."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pytest

from compat.waiting import eventually
from resp_server.programs.executor_supervisor import start_of
from spark_hooks.attach.task import BatchesTask
from spark_hooks.publish.task import Task as SinkTask
from spark_hooks.serving import placement
from spark_hooks.serving.placement import ServerPlan, ensure_state_server

PLAN = ServerPlan("1f", ("127.0.0.1", 7399), "/log", "7400-7500", token="the token", password="the password")

# A server that writes down its process id and what it was given, and ends with its input.
SERVER = """
import json, os, sys
with open(os.path.join(sys.argv[1], "servers"), "a") as servers:
    servers.write(f"{os.getpid()}\\n")
with open(os.path.join(sys.argv[1], "environment"), "w") as file:
    json.dump(dict(os.environ), file)
print(json.dumps({"host": "127.0.0.1", "port": 7401}), flush=True)
sys.stdin.read()
"""


class Executor:
    """A process that stands for an executor's JVM, and what a Python worker of it finds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.jvm = subprocess.Popen(["sleep", "600"])
        self.local = folder / "blockmgr"
        self.local.mkdir()
        monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{self.local},/another")
        monkeypatch.setattr(placement, "_jvm", lambda: (self.jvm.pid, start_of(self.jvm.pid)))
        monkeypatch.setattr(placement, "_server", lambda plan, folder: [sys.executable, "-c", SERVER, str(self.folder)])
        monkeypatch.setattr(placement, "_reported", set())

    @property
    def servers(self) -> list[int]:
        path = self.folder / "servers"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def shared(self) -> Path:
        return self.local / "sparkis-1f"

    def close(self) -> None:
        self.jvm.kill()
        self.jvm.wait()
        eventually(lambda: not [pid for pid in self.servers if start_of(pid) is not None])


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    made = Executor(tmp_path, monkeypatch)
    yield made
    made.close()


def supervisor_of(server: int) -> int:
    return int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])


def test_tasks_that_begin_together_start_one_server(executor: Executor):
    with ProcessPoolExecutor(8, mp_context=get_context("fork")) as workers:
        assert list(workers.map(ensure_state_server, [PLAN] * 32)) == [None] * 32
    eventually(lambda: bool(executor.servers))
    assert ensure_state_server(PLAN) is None
    assert len(executor.servers) == 1
    assert executor.shared.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["sink", "attachment", "placing"])
def test_every_task_makes_sure_of_server_also_one_without_rows(executor: Executor, tmp_path: Path, kind: str):
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = {
        "sink": SinkTask(str(tmp_path / "log"), "job/1", 0, (), PLAN),
        "attachment": BatchesTask(str(tmp_path / "log"), "job/1", (), PLAN),
        "placing": placement.PlacementTask(PLAN),
    }[kind]
    results = [row for batch in task(iter(())) for row in batch.to_pylist()]
    eventually(lambda: len(executor.servers) == 1)
    assert [row.get("error") or row.get("failure") for row in results] == [None] * len(results)


def test_server_gets_only_its_own_secrets_by_environment(executor: Executor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "spark's own")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    ensure_state_server(PLAN)
    eventually((executor.folder / "environment").exists)
    eventually(lambda: "}" in (executor.folder / "environment").read_text())
    environment = (executor.folder / "environment").read_text()
    assert '"SPARKIS_CONTROL_TOKEN": "the token"' in environment
    assert '"SPARKIS_PASSWORD": "the password"' in environment
    assert "spark's own" not in environment
    assert "PYTHONHASHSEED" not in environment
    line = Path(f"/proc/{supervisor_of(executor.servers[0])}/cmdline").read_text()
    assert "the token" not in line and "the password" not in line


def test_next_task_starts_another_supervisor_where_one_was_killed(executor: Executor):
    ensure_state_server(PLAN)
    eventually(lambda: bool(executor.servers))
    os.kill(supervisor_of(executor.servers[0]), signal.SIGKILL)
    eventually(lambda: start_of(executor.servers[0]) is None)
    assert ensure_state_server(PLAN) is None
    eventually(lambda: len(executor.servers) == 2)


def test_stopped_server_is_not_started_again(executor: Executor):
    executor.shared.mkdir(0o700)
    (executor.shared / "ended").touch()
    assert ensure_state_server(PLAN) is None
    assert executor.servers == []


def test_failed_start_of_supervisor_is_logged_and_tried_once(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with monkeypatch.context() as missing:
        missing.setattr(sys, "executable", "/nowhere/python")
        error = ensure_state_server(PLAN)
    assert error is not None and "/nowhere/python" in error
    assert [ensure_state_server(PLAN) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert executor.servers == []
    monkeypatch.setattr(placement, "RETRY_S", 0.0)
    assert ensure_state_server(PLAN) is None
    eventually(lambda: bool(executor.servers))


def test_limit_of_workers_memory_is_named(executor: Executor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda of: (1 << 30, 2 << 30))
    error = ensure_state_server(PLAN)
    assert error is not None and "limited to 2048 MiB" in error and "spark.executor.pyspark.memory" in error


def test_error_of_supervisor_reaches_one_task(executor: Executor):
    ensure_state_server(PLAN)
    eventually(lambda: bool(executor.servers))
    (executor.shared / "failed").write_text("no port is free")
    error = ensure_state_server(PLAN)
    assert error is not None and error.endswith("no port is free")
    assert ensure_state_server(PLAN) is None


def test_process_that_is_no_spark_worker_is_warned_once(executor: Executor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    error = ensure_state_server(PLAN)
    assert error is not None and "SPARK_LOCAL_DIRS is not set" in error
    assert ensure_state_server(PLAN) is None
    assert ensure_state_server(None) is None


def test_process_without_parent_jvm_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(placement, "_is_jvm", lambda pid: False)
    error = ensure_state_server(PLAN)
    assert error is not None and "the executor's JVM was not found among the ancestors of process" in error


def test_plan_can_be_pickled_and_does_not_show_its_secrets():
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert "the token" not in repr(PLAN) and "the password" not in repr(PLAN)


def test_server_listens_on_address_that_reaches_driver_by_default(monkeypatch: pytest.MonkeyPatch):
    def options(**given: str) -> dict[str, str]:
        words = placement._server(ServerPlan("1f", ("127.0.0.1", 7399), "/log", "7400-7500", **given), "/folder")
        words.remove("--compact")
        return dict(zip(words[4::2], words[5::2], strict=True))

    usual = {
        "--registry": "127.0.0.1:7399",
        "--log": "/log",
        "--store": "/folder/store",
        "--ports": "7400-7500",
        "--bind": "127.0.0.1",
        "--advertise": "127.0.0.1",
        "--loglevel": "warning",
    }
    assert usual.items() <= options().items()
    wide = options(bind="0.0.0.0")
    assert (wide["--bind"], wide["--advertise"]) == ("0.0.0.0", "127.0.0.1")
    monkeypatch.setenv("NODE_IP", "10.0.0.7")
    assert options(advertise="$NODE_IP")["--advertise"] == "10.0.0.7"
    with pytest.raises(
        placement.PlacementError, match=r"\$NO_SUCH_NAME'\) names an environment variable that is not set"
    ):
        options(advertise="$NO_SUCH_NAME")
