"""Real clients and real servers: programs to start them, and a server that can be restarted."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.assigned import Assigned
from compat.conformance.dataset import Dataset
from compat.conformance.servers import CONTROL_TOKEN, Running, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX

HERE = Path(__file__).parent


class Restartable:
    """A server of the data set that can be stopped and started again on its port."""

    def __init__(self, folder: Path, log: Path, keys: int) -> None:
        self._folder, self._log, self._keys = folder, log, keys
        self._stack = ExitStack()
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start, on the same port as before."""
        server = self._stack.enter_context(sparkis_server(self._folder, self._log, port=self.port))
        wait_for_keys(server, self._keys)
        self.port = server.port

    def stop(self) -> None:
        """Stop; clients lose their connections."""
        self._stack.close()

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()


@pytest.fixture
def restartable(tmp_path: Path, dataset_log: Path, dataset: Dataset) -> Iterator[Restartable]:
    """A server for one test."""
    server = Restartable(tmp_path, dataset_log, len(dataset.keys))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def several_workers(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Running]:
    """A server whose clients are spread over two processes."""
    with sparkis_server(tmp_path_factory.mktemp("store"), dataset_log, "--workers", "2") as server:
        wait_for_keys(server, len(dataset.keys))
        yield server


Script = Callable[..., Any]


@pytest.fixture(scope="session")
def run_script() -> Script:
    """Return a function that runs a scenario of a JavaScript file against a server and returns what it prints, as JSON.

    meanwhile: called once the script says that it waits.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on the PATH")
    if not (HERE / "node_modules").is_dir():
        pytest.skip("the JavaScript clients are not installed (npm ci in tests/clients)")

    def run(script: str, scenario: str, server: Running | Restartable, *arguments: str, meanwhile: Any = None) -> Any:
        command = [node, str(HERE / script), scenario, str(server.port), *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE
        )
        try:
            if meanwhile is not None:
                assert process.stdout is not None
                assert process.stdout.readline() == "waiting\n"
                meanwhile()
            out, errors = process.communicate("go on\n", timeout=WAIT_S_MAX)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, errors
        return json.loads(out)

    return run


class Cluster:
    """Three servers with the complete data set each; a topology assigns their slots."""

    def __init__(self, servers: list[Running]) -> None:
        self.servers = servers
        self._version = 0

    def port(self, at: int) -> int:
        """Return where a server is."""
        return self.servers[at].port

    def show(self, *parts: str) -> None:
        """Give all running servers a new topology: slots of each server, or `replica of` a number."""
        self._version += 1
        nodes: list[dict[str, Any]] = []
        for server, part in zip(self.servers, parts, strict=True):
            row: dict[str, Any] = {"host": "127.0.0.1", "port": server.port}
            if part.startswith("replica of "):
                row["replica_of"] = f"127.0.0.1:{self.port(int(part.removeprefix('replica of ')))}"
            elif part == "gone":
                row["health"] = "fail"
            else:
                row["slots"] = part
            nodes.append(row)
        text = json.dumps({"version": self._version, "nodes": nodes})
        for server in self.servers:
            if server.process.poll() is None:
                with Connection(server.control_port) as control:
                    control.call("AUTH", CONTROL_TOKEN)
                    assert control.call("TOPOLOGY", f"127.0.0.1:{server.port}", text).value == b"OK"

    def kill(self, at: int) -> None:
        """Kill a server."""
        self.servers[at].process.kill()
        self.servers[at].process.wait()


@contextmanager
def _cluster(factory: pytest.TempPathFactory, log: Path, keys: int) -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(sparkis_server(factory.mktemp("store"), log, *options))
            for options in ((), ("--workers", "2"), ())
        ]
        for server in servers:
            wait_for_keys(server, keys)
        made = Cluster(servers)
        made.show("0-8191", "8192-16383", "replica of 0")
        yield made


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Cluster]:
    """Two servers with half of the slots each, one of them with two workers, and a replica of the first."""
    with _cluster(tmp_path_factory, dataset_log, len(dataset.keys)) as made:
        yield made


@pytest.fixture(scope="module")
def still_cluster(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Cluster]:
    """The same, for tests that do not change the topology."""
    with _cluster(tmp_path_factory, dataset_log, len(dataset.keys)) as made:
        yield made


@pytest.fixture
def assigned(tmp_path: Path, dataset_log: Path) -> Iterator[Callable[[int], Assigned]]:
    """Return a function that starts a registry and servers with so many replicas, which end with the test."""
    with ExitStack() as stack:
        yield lambda replicas: Assigned(tmp_path, dataset_log, replicas, stack)
