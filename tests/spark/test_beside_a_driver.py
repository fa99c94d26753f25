"""What others have started by hand beside a driver: state servers that stay, and a registry that stands by."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import hiredis
import pytest
from pyspark.sql import SparkSession

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net import children
from resp_server.registry.registry_file import read_registry_file
from resp_server.registry.report import Report
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from state_backend.log.filesystems import open_filesystem
from tests.spark import placing
from tests.spark.micro_batches import Batches, local_session, start
from tests.spark.placing import is_running
from tests.spark.processes import Command
from tests.spark.processes import sparkis as command

TOKEN = "of-the-tests"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A cluster of two executors with a core each, and the token for all that is started here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(children.TOKEN_VARIABLE, TOKEN)
        session = local_session(
            "local-cluster[2,1,1024]",
            **{"spark.executor.memory": "512m", "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"]},
        )
        yield session
        session.stop()


class Scene:
    """A job on the cluster that a driver serves, and what is started by hand."""

    def __init__(self, spark: SparkSession, folder: Path, stack: ExitStack) -> None:
        self.log = folder / "log"
        self._folder, self._stack = folder, stack
        served = sparkis.serve(spark, log=self.log)
        assert isinstance(served, ExecutorsEndpoint)
        self.endpoint = served
        stack.callback(served.stop)
        self._rows = Batches(spark, folder / "input", "k string, v long")
        self.batches = 0
        writer = sparkis.queryable(placing.sums(self._rows.df), *placing.states(), wait_for_visibility=WAIT_S_MAX)
        self.query = start(writer, "job", folder / "checkpoint")
        stack.callback(self.query.stop)
        self.add()

    def add(self) -> None:
        """Let a micro-batch change every key."""
        self._rows.add(*placing.batch(self.batches))
        self.batches += 1
        self.query.processAllAvailable()

    def started(self, *words: object) -> Command:
        """Start something beside it, on a free port."""
        return self._stack.enter_context(command(*words, "--log", self.log, "--port", 0))

    def sum(self, key: int) -> str:
        """Return what the state `sum` of a key has to be."""
        return str(sum(key * 10 + number for number in range(self.batches)))

    def wait_for_answers(self, url: str) -> None:
        """Wait until every key is answered, with the newest batch."""
        expected = {f"job:sum:k{i}": self.sum(i) for i in range(placing.KEYS)}
        expected_facts = {f"job:facts:k{i}": {"sum": self.sum(i), "n": str(self.batches)} for i in range(placing.KEYS)}
        eventually(lambda: placing.values_or_error(url), lambda found: found == expected | expected_facts)

    def servers(self) -> list[int]:
        """Return the process ids of the servers beside executors, when both are there."""
        members = eventually(self._placed, lambda found: len(found) == 2)
        addresses = {str(each["address"]) for each in members}
        return [
            pid
            for (host, port), pid in zip(
                placing.addresses(self.endpoint), placing.server_pids(self.endpoint), strict=True
            )
            if f"{host}:{port}" in addresses
        ]

    def _placed(self) -> list[dict[str, Any]]:
        return [each for each in self.endpoint.members() if each["driver"] == self.endpoint.plan.id]


@pytest.fixture
def scene(spark: SparkSession, tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(spark, tmp_path, stack)


@pytest.mark.slow
def test_remaining_server_takes_over_before_servers_of_stopped_driver_end(scene: Scene, tmp_path: Path):
    staying = scene.started("state-server", "--compact", "--store", tmp_path / "store")
    port = staying.wait_for(r"started state server @ 127.0.0.1:([0-9]+)")[1]
    proxy = scene.started("proxy", "--server-timeout", 60_000)
    url = f"redis://127.0.0.1:{proxy.wait_for(r'started @ [0-9.]+:([0-9]+)')[1]}"
    processes = [*scene.endpoint.pids, *scene.servers()]
    eventually(lambda: len(_owners(scene)), lambda count: count == 3)
    scene.wait_for_answers(url)

    allowed = {f"job:sum:k{i}": {scene.sum(i)} for i in range(0, placing.KEYS, 40)}
    with placing.watched(url, allowed) as watchers:
        eventually(lambda: min(each.answers for each in watchers), lambda count: count > 0)
        scene.endpoint.stop()
        assert _owners(scene) == {f"127.0.0.1:{port}": "0-16383"}
        eventually(lambda: [pid for pid in processes if is_running(pid)], lambda left: left == [])
        scene.wait_for_answers(url)
    assert not [each.errors for each in watchers if each.errors]
    assert not [each.wrong for each in watchers if each.wrong]
    scene.add()
    scene.wait_for_answers(url)


def _owners(scene: Scene) -> dict[str, str]:
    record = read_registry_file(open_filesystem(scene.log))
    assert record is not None
    assert record.topology is not None
    return {node.address: str(node.slots) for node in record.topology.masters if node.slots}


@pytest.mark.slow
def test_replacing_registry_gets_epochs_and_is_awaited(scene: Scene, caplog: pytest.LogCaptureFixture):
    servers = scene.servers()
    standing = scene.started("registry", "--standby")
    standing.wait_for("standing by")
    own = scene.endpoint.pids[0]
    os.kill(own, signal.SIGSTOP)
    try:
        port = int(standing.wait_for(r"started registry @ 127.0.0.1:([0-9]+), term 2")[1])
    finally:
        os.kill(own, signal.SIGCONT)
    eventually(lambda: is_running(own), lambda is_there: not is_there)  # it is done without for good

    with closing(_member(port)) as member:
        caplog.clear()
        scene.add()
        assert _next_notice(member) == [b"notice", b"job", scene.batches - 1]
    assert "was not readable" not in caplog.text
    assert scene.endpoint.wait("job", scene.batches - 1, WAIT_S_MAX)
    scene.wait_for_answers(scene.endpoint.url)

    scene.query.stop()
    scene.endpoint.stop()
    eventually(lambda: [pid for pid in servers if is_running(pid)], lambda left: left == [])


def _member(port: int) -> socket.socket:
    """Be a server that wants nothing, and is told of epochs as all are."""
    made = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
    report = Report("f" * 40, "127.0.0.1", 1, is_draining=True)
    for words in (("AUTH", TOKEN), ("REPORT", report.to_json())):
        made.sendall(hiredis.pack_command(words))  # type: ignore[arg-type]
    return made


def _next_notice(member: socket.socket) -> list[Any]:
    reader = hiredis.Reader()
    while True:
        while (reply := reader.gets()) is False:
            received = member.recv(65_536)
            assert received, "the registry closed the connection"
            reader.feed(received)
        if isinstance(reply, hiredis.PushNotification) and reply[0] == b"notice":
            return list(reply)
