"""The server of a driver outlives a driver that is killed, is taken over by the next one, and ends when it should."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from compat.conformance.servers import redis_server
from compat.processes import children_of
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net import children
from resp_server.programs.executor_supervisor import start_of
from resp_server.serving.server_file import ServerFile
from tests.builders import put_value, value_state, write_log

# A driver without Spark: it ensures that there is a server, prints its address, and ends with `stop` or `leave`.
DRIVER = """
import json, sys
from resp_server.net import children
from spark_hooks.serving.detached_server import DetachedServer
from state_backend.model.errors import SparkisError
options = json.loads(sys.argv[1])
command = [sys.executable, "-m", "resp_server.programs.serve", "--log", options["log"], "--bind", "127.0.0.1"]
command += ["--loglevel", "warning", "--role", options["role"], *options["more"]]
try:
    server = DetachedServer(command, children.environment(), log=options["log"], port=options["port"], store=None,
                           tls=None, linger_s=options["linger_s"])
except SparkisError as error:
    print(json.dumps({"error": str(error)}), flush=True)
    sys.exit(1)
taken = server.is_taken_over
print(json.dumps({"port": server.record.port, "pid": server.record.pid, "is_taken_over": taken}), flush=True)
for line in sys.stdin:
    getattr(server, line.strip())()
    break
"""


class Driver:
    """A driver in a process of its own."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=children.environment(),
            text=True,
        )
        assert self.process.stdout is not None
        self.output: dict[str, Any] = json.loads(self.process.stdout.readline())

    def end(self, how: str) -> None:
        """End with `stop` or `leave` of the server."""
        self.process.communicate(how + "\n", timeout=WAIT_S_MAX)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """Start a driver of a log with one key; its records are this test's own, and no server stays after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_log(tmp_path / "log", "job", [value_state("s")], [put_value("s", b"job:s:a", b"v")])
    drivers: list[Driver] = []
    with ExitStack() as stack:

        def started(**options: Any) -> Driver:
            given = {"log": str(tmp_path / "log"), "port": 0, "linger_s": 600.0, "role": "master", "more": []} | options
            drivers.append(Driver(**given))
            stack.callback(_end, drivers[-1])
            return drivers[-1]

        stack.callback(_end_server_in, tmp_path / "cache")
        yield started


def _end(driver: Driver) -> None:
    if driver.process.poll() is None:
        driver.kill()


def _end_server_in(cache: Path) -> None:
    """End the last server, whoever started it; any before it has ended, else it could not have started."""
    record = record_in(cache)
    if record is not None and start_of(record.pid) == record.start:
        os.kill(record.pid, signal.SIGTERM)
        eventually(lambda: start_of(record.pid) != record.start)


def record_in(cache: Path) -> ServerFile | None:
    (folder,) = (cache / "sparkis").iterdir()
    return ServerFile.read(folder)


def read(driver: Driver) -> str:
    with redis.Redis(port=driver.output["port"], decode_responses=True) as client:
        try:
            return str(client.get("job:s:a"))
        except redis.ResponseError as error:
            return str(error)


def wait_for_end_of_server(driver: Driver) -> None:
    eventually(lambda: start_of(driver.output["pid"]), lambda start: start is None)


def test_server_of_killed_driver_is_taken_over_by_next_driver(drive: Callable[..., Driver], tmp_path: Path) -> None:
    first = drive()
    with redis.Redis(port=first.output["port"], decode_responses=True) as reader:
        assert reader.get("job:s:a") == "v"
        first.kill()
        assert reader.get("job:s:a") == "v"
        second = drive()
        assert second.output == first.output | {"is_taken_over": True}
        assert reader.get("job:s:a") == "v"  # on the same connection
        os.kill(second.output["pid"], signal.SIGKILL)
    # Its new driver starts it again, at its port.
    eventually(lambda: getattr(record_in(tmp_path / "cache"), "pid", None) not in (None, first.output["pid"]))
    assert read(second) == "v"
    second.kill()
    third = drive()
    assert third.output["is_taken_over"]
    assert third.output["pid"] != first.output["pid"]
    third.end("stop")
    wait_for_end_of_server(third)


def test_server_without_linger_ends_with_driver_and_frees_port(drive: Callable[..., Driver], tmp_path: Path) -> None:
    first = drive(linger_s=0.0)
    first.kill()
    second = drive(linger_s=0.0)  # perhaps while the first server is about to end
    assert second.output["port"] == first.output["port"]
    assert not second.output["is_taken_over"]
    second.end("leave")
    wait_for_end_of_server(second)
    (folder,) = (tmp_path / "cache" / "sparkis").iterdir()
    assert {path.name for path in folder.iterdir()} == {"lock", "port", "server.log"}


def test_driverless_server_with_other_options_is_replaced(drive: Callable[..., Driver]) -> None:
    first = drive()
    refused = drive(role="slave")
    assert f"is served with other options at port {first.output['port']}, for another driver" in refused.output["error"]
    assert "sparkis stop --log" in refused.output["error"]
    assert read(first) == "v"
    first.kill()
    other = drive(role="slave")
    assert not other.output["is_taken_over"]
    assert other.output["port"] == first.output["port"]
    wait_for_end_of_server(first)


def test_server_with_two_drivers_ends_with_last_or_with_command(drive: Callable[..., Driver], tmp_path: Path) -> None:
    first, second = drive(), drive()
    assert second.output["is_taken_over"]
    second.end("stop")
    assert read(first) == "v"
    command = [sys.executable, "-m", "sparkis", "stop", "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    wait_for_end_of_server(first)
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    assert done.returncode == 1
    assert "has a server for" in done.stderr


def test_failed_start_gives_its_reason_in_error(drive: Callable[..., Driver]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        refused = drive(port=port)
    assert "the sparkis server did not start: " in refused.output["error"]
    assert str(port) in refused.output["error"]


def test_status_asks_server_of_log(drive: Callable[..., Driver], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sparkis", "status", "--json", "--log", str(tmp_path / "log")]
    driver = drive()
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    assert done.stderr == ""
    assert [job["name"] for job in json.loads(done.stdout)] == ["job"]
    driver.end("stop")
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)
    assert done.returncode == 1
    assert "has a server for" in done.stderr


def test_server_with_upstream_outlives_driver_and_ends_with_proxy(
    drive: Callable[..., Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "upstream").mkdir()
    with redis_server(tmp_path / "upstream") as upstream:
        monkeypatch.setenv("SPARKIS_UPSTREAM", f"redis://127.0.0.1:{upstream.port}")
        more = ["--ownership", str(tmp_path / "owners.json")]
        first = drive(more=more)
        with redis.Redis(port=first.output["port"], decode_responses=True) as client:
            assert client.set("session:1", "ada")
            eventually(lambda: read(first), lambda value: value == "v")
            first.kill()
            assert client.mget("session:1", "job:s:a") == ["ada", "v"]
            second = drive(more=more)
            assert second.output == first.output | {"is_taken_over": True}
            # The state server dies alone: its proxy starts it again, and the driver takes a lease of it.
            os.kill(child_of(second.output["pid"]), signal.SIGKILL)
            eventually(lambda: read(second), lambda value: value == "v")
            assert client.get("session:1") == "ada"
        second.end("stop")
        wait_for_end_of_server(second)
        (folder,) = (tmp_path / "cache" / "sparkis").iterdir()
        assert {path.name for path in folder.iterdir()} == {"lock", "port", "server.log"}

        third = drive(more=more, linger_s=0.0)
        state_server = child_of(third.output["pid"])
        third.kill()
        wait_for_end_of_server(third)
        eventually(lambda: start_of(state_server), lambda start: start is None)
        assert record_in(tmp_path / "cache") is None


def child_of(pid: int) -> int:
    """Return the process id of a proxy's state server."""
    (child,) = children_of(pid)
    return child
