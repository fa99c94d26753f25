"""What programs tell systemd (`sd_notify(3)`), read at a socket as systemd has one."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from compat.conformance.servers import free_port
from compat.processes import children_of
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net import children
from tests.builders import put_value, value_state, write_log
from tests.server.commands import Command, Start

WATCHDOG_S = 0.4


class Systemd:
    """The socket that NOTIFY_SOCKET names."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(WAIT_S_MAX)

    def wait_for(self, assignment: str) -> Mapping[str, str]:
        """Return the next message with an assignment; the others are dropped."""
        while True:
            message = self._socket.recv(4096).decode()
            if assignment in message.splitlines():
                return dict(line.split("=", 1) for line in message.splitlines())

    def is_silent_for(self, seconds: float) -> bool:
        """Drop what has arrived, and return whether nothing else comes in this time."""
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while self._socket.recv(4096):
                pass
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(4096)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(WAIT_S_MAX)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    manager = Systemd(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1_000_000)))
    yield manager
    manager.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("log")
    write_log(root, "job", [value_state("s")], [put_value("s", b"job:s:a", b"1")])
    return root


def serving(log: Path, tmp_path: Path, *options: object) -> tuple[object, ...]:
    return ("serve", "--log", log, "--store", tmp_path / "store", "--compact", "no", "--port", 0, *options)


def stop(process: int) -> None:
    """Stop a process as a hung one is; return when it is."""
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: ") T " in Path(f"/proc/{process}/stat").read_text())


@pytest.mark.parametrize("workers", [1, 2])
def test_server_reports_readiness_watchdog_and_end_to_systemd(
    log: Path, tmp_path: Path, systemd: Systemd, start: Start, workers: int
) -> None:
    server = start(*serving(log, tmp_path, "--workers", workers))
    ready = systemd.wait_for("READY=1")
    port = int(server.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1])
    assert ready["STATUS"].startswith(f"Serving 127.0.0.1:{port}")
    with socket.create_connection(("127.0.0.1", port), WAIT_S_MAX) as client:
        client.sendall(b"GET job:s:a\r\n")
        assert client.recv(64) == b"$1\r\n1\r\n"
    systemd.wait_for("WATCHDOG=1")
    before_us = time.monotonic_ns() // 1000
    server.process.send_signal(signal.SIGHUP)
    reloading = systemd.wait_for("RELOADING=1")
    assert before_us <= int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    assert systemd.wait_for("READY=1") == ready
    server.process.terminate()
    systemd.wait_for("STOPPING=1")
    assert server.process.wait(WAIT_S_MAX) == 0


@pytest.mark.parametrize("workers", [pytest.param(1, id="server"), pytest.param(2, id="worker")])
def test_hung_loop_feeds_no_watchdog(log: Path, tmp_path: Path, systemd: Systemd, start: Start, workers: int) -> None:
    server = start(*serving(log, tmp_path, "--workers", workers))
    systemd.wait_for("READY=1")
    hung = _event_loops(server)[-1]
    stop(hung)
    assert systemd.is_silent_for(3 * WATCHDOG_S)
    os.kill(hung, signal.SIGCONT)
    systemd.wait_for("WATCHDOG=1")


def _event_loops(server: Command) -> list[int]:
    """Return the processes that answer clients: the child of a supervisor, or the workers."""
    return [each for each, words in children_of(server.process.pid).items() if b"applier" not in words]


@pytest.mark.parametrize("program", ["registry", "standby", "state-server", "proxy"])
def test_other_programs_report_ready(log: Path, tmp_path: Path, systemd: Systemd, start: Start, program: str) -> None:
    words: dict[str, Callable[[], tuple[object, ...]]] = {
        "registry": lambda: ("registry", "--log", tmp_path / "empty", "--port", free_port()),
        "standby": lambda: ("registry", "--log", tmp_path / "empty", "--standby"),
        "state-server": lambda: ("state-server", "--log", log, "--store", tmp_path / "state", "--port", 0),
        "proxy": lambda: ("proxy", "--log", log, "--port", 0),
    }
    started = start(*words[program]())
    status = systemd.wait_for("READY=1")["STATUS"]
    assert status.startswith({"registry": "Assigning slots at", "standby": "Standing by"}.get(program, "Serving 127"))
    systemd.wait_for("WATCHDOG=1")
    started.process.terminate()
    systemd.wait_for("STOPPING=1")
    # A second signal, in the last moments of a process, would end it with another code.
    assert started.process.wait(WAIT_S_MAX) == 0


def test_start_that_continues_asks_for_more_time(log: Path, tmp_path: Path, systemd: Systemd, start: Start) -> None:
    # A process that shares its port listens when it can answer; this one waits for the registry of an empty log.
    start("proxy", "--log", log, "--port", free_port(), "--reuse-port", "yes")
    assert "READY" not in systemd.wait_for("EXTEND_TIMEOUT_USEC=60000000")


def test_processes_that_program_starts_report_nothing(systemd: Systemd) -> None:
    assert not children.environment().keys() & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


def test_watchdog_of_another_process_is_not_fed(
    log: Path, tmp_path: Path, systemd: Systemd, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")
    start("proxy", "--log", log, "--port", 0)
    systemd.wait_for("READY=1")
    assert systemd.is_silent_for(3 * WATCHDOG_S)
