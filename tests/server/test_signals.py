"""SIGHUP reloads files and ends nothing; SIGTERM and SIGINT end a program, also while it starts; the log says so."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from compat.conformance.wire import Connection
from compat.fork_server import STARTS
from compat.processes import children_of
from compat.waiting import WAIT_S_MAX, eventually
from spark_hooks.cli import ENDED_BY_SIGNALS
from tests.server.commands import Command, Start

ONE_USER = "user default on nopass ~* &* +@all\n"
TWO_USERS = ONE_USER + "user reader on >secret ~* +@read\n"
NOTHING_TO_READ = r"INFO sparkis\.server: SIGHUP: there is no ACL file to reload"


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start programs as users do: a fork takes signals a little later."""
    monkeypatch.setenv(STARTS, "yes")


def test_hangup_reloads_configuration_and_rewrite_keeps_its_text(start: Start, log: Path, tmp_path: Path) -> None:
    file = tmp_path / "sparkis.toml"
    file.write_text(f'# ours\nmaxclients = 100  # few\n[serve]\nlog = "{log}"\nport = 0\nworkers = 2\n')
    server = start("serve", "--config", file, "--store", tmp_path / "store")
    port = int(server.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1])

    def setting_of(name: str) -> bytes:
        with Connection(port) as connection:
            reply = connection.call("CONFIG", "GET", name).value
            assert isinstance(reply, list)
            return bytes(reply[1].value)

    assert setting_of("maxclients") == b"100"
    file.write_text(file.read_text().replace("100", "200").replace("port = 0", "port = 1"))
    server.hang_up()
    server.wait_for(rf"INFO sparkis\.server: SIGHUP: read {file}; changed: maxclients")
    server.wait_for(rf"WARNING sparkis\.server: SIGHUP: restart to apply what changed in {file}: port")
    eventually(lambda: [setting_of("maxclients") for _ in range(4)] == [b"200"] * 4)

    with Connection(port) as connection:
        assert connection.call("CONFIG", "SET", "timeout", "7", "slowlog-max-len", "5").value == b"OK"
        assert connection.call("CONFIG", "REWRITE").value == b"OK"
    assert file.read_text() == (
        f'# ours\nmaxclients = 200  # few\n[serve]\nlog = "{log}"\nport = 1\nworkers = 2\n'
        "slowlog-max-len = 5\ntimeout = 7\n"
    )

    file.write_text("maxclients = many")
    server.hang_up()
    server.wait_for(rf"ERROR sparkis\.server: SIGHUP: {file}: Invalid value .*; nothing changes")
    assert setting_of("maxclients") == b"200"


def started_with_levels(start: Start, file: Path, log: Path, workers: int) -> tuple[Command, int]:
    """Start a server whose configuration file has levels of the log; return it and its port."""
    file.write_text('loglevel = "warning,sparkis.server=info"\n')
    options = ("--log", log, "--store", file.parent / "store", "--port", 0, "--workers", workers)
    server = start("serve", "--config", file, *options)
    return server, int(server.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1])


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hangup_changes_log_level_and_format_in_workers(start: Start, log: Path, tmp_path: Path, workers: int) -> None:
    file = tmp_path / "sparkis.toml"
    server, port = started_with_levels(start, file, log, workers)
    file.write_text('loglevel = "warning,sparkis.clients=info"\nlog-format = "json"\n')
    server.hang_up()

    def closed_with_a_line() -> bool:
        with socket.create_connection(("127.0.0.1", port), WAIT_S_MAX) as client:
            client.sendall(b"*1\r\n$x\r\n")
            assert client.recv(4096).startswith(b"-ERR Protocol error")
        server.read_for(0.1)
        return "closed" in server.logged

    eventually(closed_with_a_line)
    [line] = re.findall(r".*closed.*", server.logged)[:1]
    fields = json.loads(line)
    assert (fields["level"], fields["part"]) == ("info", "sparkis.clients")
    assert fields.get("process", "").startswith("sparkis.worker.") == (workers > 1)
    assert "invalid bulk length" in fields["message"]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_log_level_is_set_in_all_processes_and_in_file(start: Start, log: Path, tmp_path: Path, workers: int) -> None:
    file = tmp_path / "sparkis.toml"
    server, port = started_with_levels(start, file, log, workers)

    def levels() -> set[bytes]:
        found = set()
        for _ in range(2 * workers):  # each worker has some of the connections
            with Connection(port) as client:
                found.add(client.call("CONFIG", "GET", "loglevel").value[1].value)
        return found

    assert levels() == {b"warning,sparkis.server=notice"}
    with Connection(port) as client:
        assert client.call("CONFIG", "SET", "loglevel", "debug").value == b"OK"
        server.wait_for(r"DEBUG sparkis\.applier: job job: the log has other levels")
        client.send(b"*1\r\n$x\r\n")
        assert client.read().value.startswith(b"ERR Protocol error")
    server.wait_for(r"INFO sparkis\.%s.*invalid bulk length" % ("clients" if workers == 1 else "worker"))
    assert levels() == {b"debug"}
    with Connection(port) as client:
        refused = client.call("CONFIG", "SET", "loglevel", "chatty").value
        assert refused.endswith(b"must be one of the following: debug, verbose, notice, warning, nothing")
        assert client.call("CONFIG", "SET", "loglevel", "notice,sparkis.tls=debug").value == b"OK"
        assert client.call("CONFIG", "REWRITE").value == b"OK"
    assert levels() == {b"notice,sparkis.tls=debug"}
    assert file.read_text().endswith('[serve]\nloglevel = "info,sparkis.tls=debug"\n')
    file.write_text('loglevel = "error"\n')
    server.hang_up()
    eventually(lambda: levels() == {b"warning"})


def test_level_of_log_is_set_in_server_of_past_moment(start: Start, log: Path, tmp_path: Path) -> None:
    server = start("serve", "--log", log, "--store", tmp_path / "store", "--port", 0, "--as-of", 0)
    port = int(server.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1])
    with Connection(port) as client:
        assert client.call("GET", "job:s:a").value == b"1"
        assert client.call("CONFIG", "SET", "loglevel", "debug").value == b"OK"
    server.wait_for(r"DEBUG sparkis\.applier: job job: the log has other levels")


def end_while_it_reads(program: Command, file: Path, number: signal.Signals) -> None:
    """Send a signal while a program reads a named pipe, of which nobody has written anything."""
    with file.open("w"):  # returns once the program reads the file
        program.process.send_signal(number)
        program.wait_for(rf"{number.name}: ends before it has started")
    assert program.process.wait(WAIT_S_MAX) == 0
    program.read_to_end()
    assert "Traceback" not in program.logged and program.logged.count("\n") <= 1, program.logged


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(ENDED_BY_SIGNALS))
def test_signal_while_options_are_read_ends_program_with_line(
    start: Start, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    os.mkfifo(file := tmp_path / "sparkis.toml")
    end_while_it_reads(start(name, "--config", file), file, number)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["serve", "state-server", "proxy", "registry"])
def test_signal_before_event_loop_ends_program_with_line(
    start: Start, log: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    os.mkfifo(secret := tmp_path / "secret")
    store = () if name in ("proxy", "registry") else ("--store", tmp_path / "store")
    option = "--token-file" if name == "registry" else "--requirepass-file"
    end_while_it_reads(start(name, "--log", log, *store, "--port", 0, option, secret), secret, number)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_signal_during_loading_ends_program_with_line(start: Start, log: Path, tmp_path: Path, workers: int) -> None:
    (folder := tmp_path / "store" / "job").mkdir(parents=True)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another server that reads the store, so the applier waits
        options = ("--log", log, "--store", tmp_path / "store", "--port", 0, "--workers", workers)
        server = start("serve", *options, "--reuse-port", "yes", "--loglevel", "debug", "--metrics", 0)
        server.wait_for("INFO sparkis.metrics")
        eventually(lambda: "state_backend.apply.applier" in running_below(server.process.pid))
        server.process.terminate()
        server.wait_for("INFO sparkis.server: ends before it has started")
        assert server.process.wait(WAIT_S_MAX) == 0


def test_hangup_ends_no_process_that_just_starts(start: Start, log: Path, tmp_path: Path) -> None:
    server = start("serve", "--log", log, "--store", tmp_path / "store", "--port", 0, "--workers", 2)
    eventually(lambda: "state_backend.apply.applier" in running_below(server.process.pid), interval_s=0)
    processes = server.children()
    server.hang_up()
    server.wait_for(r"started @ 127\.0\.0\.1:")
    assert server.children() >= processes


def running_below(pid: int) -> str:
    """Return the command lines of a process's descendants."""
    return "".join(line.decode() + running_below(child) for child, line in children_of(pid).items())


def test_hangup_changes_log_level_of_registry(start: Start, log: Path, tmp_path: Path) -> None:
    file = tmp_path / "sparkis.toml"
    file.write_text("replicas = 0\n")
    registry = start("registry", "--config", file, "--log", log, "--port", 0)
    registry.wait_for("started registry")
    file.write_text('replicas = 1\nlog-format = "json"\n')
    registry.hang_up()
    said = json.loads(registry.wait_for(rf"\{{.*SIGHUP: read {file}.*\n")[0])
    assert said["message"].endswith("changed: log-format")
    registry.wait_for(rf"SIGHUP: restart to apply what changed in {file}: replicas")


def can_log_in(port: int, user: str) -> bool:
    with Connection(port) as connection:
        return bool(connection.call("AUTH", user, "secret").value == b"OK")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hangup_reloads_users_and_ends_no_process(start: Start, log: Path, tmp_path: Path, workers: int) -> None:
    acl_file = tmp_path / "users.acl"
    acl_file.write_text(ONE_USER)
    store = ("--store", tmp_path / "store")
    server = start("serve", "--log", log, *store, "--port", 0, "--aclfile", acl_file, "--workers", workers)
    port = int(server.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1])
    processes = server.children()
    assert len(processes) == (1 if workers == 1 else 3)
    assert not can_log_in(port, "reader")

    acl_file.write_text(TWO_USERS)
    server.hang_up()
    server.wait_for(rf"INFO sparkis\.server: SIGHUP: read 2 users from {acl_file}")
    eventually(lambda: all(can_log_in(port, "reader") for _ in range(2 * workers)))  # with workers: in each, in turn

    acl_file.write_text("user\n")
    server.hang_up()
    server.wait_for(rf"ERROR sparkis\.server: SIGHUP: {acl_file}:1 should start with user keyword")
    assert can_log_in(port, "reader")
    with Connection(port) as connection:
        assert connection.call("GET", "job:s:a").value == b"1"
    assert server.children() == processes


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_hangup_without_file_of_users_is_logged_to_change_nothing(start: Start, log: Path, tmp_path: Path) -> None:
    registry_port = free_port()
    registry = start("registry", "--log", log, "--port", registry_port)
    registry.wait_for("started")
    store = ("--store", tmp_path / "store")
    state_server = start("state-server", "--log", log, *store, "--port", 0, "--registry", f"127.0.0.1:{registry_port}")
    state_server.wait_for("started state server @")
    proxy = start("proxy", "--registry", f"127.0.0.1:{registry_port}", "--port", 0)
    proxy.wait_for("started @")
    for each in (registry, state_server, proxy):
        each.hang_up()
        each.wait_for(NOTHING_TO_READ)


def test_hangup_while_server_starts_does_not_end_it(start: Start, log: Path, tmp_path: Path) -> None:
    server = start("serve", "--log", log, "--store", tmp_path / "store", "--port", 0)
    eventually(server.children, awaited="the supervisor has started the server")
    while "started @" not in server.logged:
        os.kill(server.process.pid, signal.SIGHUP)
        server.read_for(0.01)
        assert "SIGHUP; starting it again" not in server.logged
