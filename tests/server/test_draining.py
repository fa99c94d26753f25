"""SIGTERM: a server takes no more clients, answers what has arrived, and ends; the next one takes over its clients."""

from __future__ import annotations

import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from time import sleep

import pytest

from compat.conformance.servers import free_port, redis_server
from compat.conformance.wire import request
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.programs.draining import SAME_SIGNAL_S
from resp_server.registry.registry_file import read_registry_file
from state_backend.log.filesystems import open_filesystem
from tests.builders import put_value, value_state, write_log
from tests.server.commands import Start
from tests.server.restarts import GET, VALUE, Readers, activated, socket_unit

READS = 2_000
LARGE = b"x" * 1_000_000
STARTED = r"started @ 127\.0\.0\.1:(\d+)"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("log")
    write_log(
        root, "job", [value_state("s")], [put_value("s", b"job:s:a", b"1"), put_value("s", b"job:s:large", LARGE)]
    )
    return root


class Served:
    """One server, and connections to it."""

    def __init__(self, start: Start, *arguments: object) -> None:
        self.command = start(*arguments)
        self.port = int(self.command.wait_for(STARTED)[1])
        # On a busy machine it listens before its jobs are loaded.
        eventually(self._value, lambda found: found == VALUE, "a server to be loaded")

    def _value(self) -> bytes:
        with self.connect() as client:
            client.sendall(GET)
            return client.recv(100)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S_MAX)

    def terminate(self) -> None:
        self.command.process.terminate()

    def terminate_again(self) -> None:
        sleep(2 * SAME_SIGNAL_S)  # signals that come sooner count as one
        self.terminate()

    def wait(self) -> int:
        return self.command.process.wait(WAIT_S_MAX)


def serving(log: Path, store: Path, *options: object) -> tuple[object, ...]:
    return ("serve", "--log", log, "--store", store, "--port", 0, "--bind", "127.0.0.1", *options)


def read_to_end(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


@pytest.mark.pure
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_drain_answers_received_requests_then_closes(start: Start, log: Path, tmp_path: Path, workers: int) -> None:
    served = Served(start, *serving(log, tmp_path, "--workers", workers))
    with served.connect() as slow, served.connect() as idle, served.connect() as multi:
        for each in (slow, idle, multi):
            each.sendall(GET)
            assert each.recv(100) == VALUE
        large = 20  # more than the sockets buffer: the server waits for the client, which does not read yet
        slow.sendall(request("GET", "job:s:large") * large + GET)
        multi.sendall(request("MULTI") + GET)
        assert multi.recv(100).startswith(b"+OK")
        served.terminate()
        served.command.wait_for("draining for at most 10 s")
        multi.sendall(request("EXEC"))
        assert read_to_end(multi).endswith(b"*1\r\n" + VALUE)
        assert read_to_end(idle) == b""
        eventually(lambda: _is_refused(served.port), awaited="new clients are refused")
        assert read_to_end(slow) == (b"$%d\r\n%b\r\n" % (len(LARGE), LARGE)) * large + VALUE
    assert served.wait() == 0


def _is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), WAIT_S_MAX).close()
    except ConnectionRefusedError:
        return True
    return False


def test_second_signal_ends_drain_at_once(start: Start, log: Path, tmp_path: Path) -> None:
    served = Served(start, *serving(log, tmp_path, "--drain-timeout", 1000))
    with served.connect() as slow:
        slow.sendall(request("GET", "job:s:large") * 20)
        assert slow.recv(1)
        served.terminate()
        served.command.wait_for("draining for at most 1000 s")
        served.terminate_again()
        served.command.wait_for("a second signal came")
        assert served.wait() == 0


@pytest.mark.parametrize("program", ["serve", "registry"])
def test_late_signals_do_not_change_exit_code(start: Start, log: Path, tmp_path: Path, program: str) -> None:
    options = ("--store", tmp_path) if program == "serve" else ()
    command = start(program, "--log", log, "--port", 0, *options)
    command.wait_for("started")
    while command.process.poll() is None:
        command.process.terminate()
    assert command.process.returncode == 0


def test_drain_cuts_connections_after_its_time(start: Start, log: Path, tmp_path: Path) -> None:
    served = Served(start, *serving(log, tmp_path, "--drain-timeout", 0.1))
    with served.connect() as slow:
        slow.sendall(request("GET", "job:s:large") * 20)
        assert slow.recv(1)
        served.terminate()
        assert served.wait() == 0
    served.command.wait_for("cut the connection of .*: the server stops")


def test_readyz_fails_in_shutdown_delay_and_new_clients_are_served(start: Start, log: Path, tmp_path: Path) -> None:
    metrics = free_port()
    served = Served(start, *serving(log, tmp_path, "--metrics", metrics, "--drain-delay", 1000))
    assert _readyz(metrics) == (200, "ok\n")
    served.terminate()
    served.command.wait_for("ending in 1000 s")
    assert _readyz(metrics) == (503, "draining\n")
    with served.connect() as client:
        client.sendall(GET)
        assert client.recv(100) == VALUE
    served.terminate_again()
    assert served.wait() == 0


def _readyz(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# -- restarts ---------------------------------------------------------------------------------------------------------


def next_to(start: Start, arguments: tuple[object, ...], another: tuple[object, ...], reads: int) -> None:
    """Start a server, and another one that takes over its port, while clients read; no read may fail."""
    first = Served(start, *arguments)
    readers = Readers(first.port)
    eventually(lambda: readers.read > reads // 3)
    second = start(*another, "--port", first.port)
    second.wait_for(STARTED)
    first.terminate()
    assert first.wait() == 0
    before = readers.read
    eventually(lambda: readers.read > max(reads, before + reads // 3))
    assert readers.end() == {}
    print(f"{readers.read:,} reads, {readers.counts['reconnected']:,} of them on a new connection: none failed")


SHARED = ("--reuse-port", "yes")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_next_server_takes_over_port_and_no_read_fails(start: Start, log: Path, tmp_path: Path, workers: int) -> None:
    first, second = (serving(log, tmp_path / name, *SHARED, "--workers", workers) for name in "ab")
    next_to(start, first, second, READS)


@pytest.mark.slow
def test_no_read_of_100_000_fails_during_takeover_of_port(start: Start, log: Path, tmp_path: Path) -> None:
    first, second = (serving(log, tmp_path / name, *SHARED) for name in "ab")
    next_to(start, first, second, 100_000)


@pytest.mark.slow
def test_next_overlay_takes_over_port_without_failed_reads(start: Start, log: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as upstream:
        first, second = (
            serving(
                log,
                tmp_path / name,
                *SHARED,
                *("--upstream", f"redis://127.0.0.1:{upstream.port}", "--ownership", tmp_path / f"{name}.json"),
            )
            for name in "ab"
        )
        next_to(start, first, second, READS)


def test_next_proxy_takes_over_port_without_failed_reads(start: Start, log: Path, tmp_path: Path) -> None:
    registry = start("registry", "--log", log, "--port", 0)
    registry.wait_for("started registry")
    state_servers = []
    for name in "ab":
        server = start("state-server", "--log", log, "--store", tmp_path / name, "--port", 0)
        server.wait_for("started state server")
        state_servers.append(server)
    filesystem = open_filesystem(str(log))
    eventually(lambda: _servers_with_slots(filesystem) == 2, awaited="both servers have slots")
    proxy = ("proxy", "--log", log, "--bind", "127.0.0.1", *SHARED)
    readers_of = Served(start, *proxy, "--port", 0)
    readers = Readers(readers_of.port)
    eventually(lambda: readers.read > READS // 3)
    second = start(*proxy, "--port", readers_of.port)
    second.wait_for(STARTED)
    readers_of.terminate()
    state_servers[0].process.terminate()
    assert readers_of.wait() == 0
    assert state_servers[0].process.wait(WAIT_S_MAX) == 0
    before = readers.read
    eventually(lambda: readers.read > before + READS // 3)
    assert readers.end() == {}
    assert _servers_with_slots(filesystem) == 1


def _servers_with_slots(filesystem: object) -> int:
    record = read_registry_file(filesystem)  # type: ignore[arg-type]
    return 0 if record is None or record.topology is None else sum(bool(node.slots) for node in record.topology.nodes)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_socket_of_systemd_keeps_clients_during_restart(log: Path, tmp_path: Path, workers: int) -> None:
    with socket_unit() as listener:
        port = listener.getsockname()[1]
        words = [*map(str, serving(log, tmp_path, "--workers", workers)), "--port", str(port)]
        first = activated(listener, words)
        readers = Readers(port)
        try:
            eventually(lambda: readers.read > READS // 3)
            os.kill(first, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0
            before = readers.read
            second = activated(listener, words)
            eventually(lambda: readers.read > before + READS // 3)
            assert readers.end() == {}
        finally:
            readers.end()
        os.kill(second, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 0


def test_socket_of_systemd_at_other_port_is_refused(
    log: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket_unit() as listener:
        port = listener.getsockname()[1]
        process = activated(listener, list(map(str, serving(log, tmp_path))))
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert f"systemd passed a socket of port {port}, but no option names that port" in capfd.readouterr().err
