"""The units: start, health, restarts, reload, watchdog, sockets, a cluster with its proxy, a proxy with an upstream."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from compat.conformance.wire import request
from compat.waiting import eventually
from tests.server.restarts import GET, VALUE, Readers
from tests.systemd.machine import Machine

SERVER, PROXY = "sparkis.service", "sparkis-proxy"
PORT = 7379
# A server starts in seconds, but may share its processors with much else.
START_S_MAX = 120.0


def replies(machine: Machine, *requests: bytes, port: int = PORT) -> bytes:
    """Return what a new connection replies to requests; nothing if there is none."""
    answered = b""
    with machine.network(), suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as client:
        client.settimeout(10)
        client.sendall(b"".join(requests) + request("QUIT"))
        while data := client.recv(4096):
            answered += data
    return answered


def wait_for_value(machine: Machine, *, port: int = PORT) -> None:
    eventually(lambda: VALUE in replies(machine, GET, port=port), awaited="a value", timeout_s=START_S_MAX)


@pytest.fixture
def open_server(machine: Machine) -> Iterator[Machine]:
    """The machine with a server that has no password."""
    machine.run(f": >/etc/sparkis/serve.env; systemctl restart {SERVER}")
    yield machine
    machine.set_up(SERVER)
    machine.run("systemctl stop sparkis.socket sparkis.service 2>/dev/null || true; systemctl reset-failed")


def test_server_of_page_is_ready_and_healthy_once_it_is_started(machine: Machine) -> None:
    assert machine.property(SERVER, "ActiveState") == "active"
    assert machine.property(SERVER, "StatusText") == f"Serving 127.0.0.1:{PORT}"
    assert "+OK" in replies(machine, request("AUTH", "change-me"), GET).decode()
    assert b"NOAUTH" in replies(machine, GET)
    machine.run("/opt/sparkis/bin/sparkis health --metrics 127.0.0.1:9379")
    assert machine.run(f"systemctl show --value --property User {SERVER}").strip() == "sparkis"


@pytest.mark.parametrize("killed", ["server", "supervisor"])
def test_killed_server_is_started_again(open_server: Machine, killed: str) -> None:
    wait_for_value(open_server)
    main, loop = _main(open_server), open_server.event_loop_of(SERVER)
    open_server.run(f"kill -9 {main if killed == 'supervisor' else loop}")
    eventually(lambda: not _runs(open_server, loop), awaited="the server has ended", timeout_s=START_S_MAX)
    wait_for_value(open_server)
    assert (_main(open_server) == main) == (killed == "server")


def _runs(machine: Machine, process: int) -> bool:
    return "yes" in machine.run(f"test ! -e /proc/{process} || echo yes")


def _main(machine: Machine) -> int:
    return int(machine.property(SERVER, "MainPID"))


@pytest.mark.parametrize("kind", ["notify", "notify-reload"])
def test_reload_reads_users_again_and_service_stays_active(open_server: Machine, kind: str) -> None:
    open_server.run("echo 'user default on nopass +@all ~*' >/etc/sparkis/users.acl; chmod 644 /etc/sparkis/users.acl")
    command = open_server.run("systemctl cat sparkis | sed -n 's/^ExecStart=//p'").strip()
    reload = ["ExecReload="] if kind == "notify-reload" else []
    open_server.set_up(
        SERVER, f"Type={kind}", *reload, "ExecStart=", f"ExecStart={command} --aclfile /etc/sparkis/users.acl"
    )
    open_server.run(f"systemctl restart {SERVER}")
    assert b"WRONGPASS" in replies(open_server, request("AUTH", "reader", "secret"))
    open_server.run("echo 'user reader on >secret +@all ~*' >>/etc/sparkis/users.acl")
    open_server.run(f"systemctl reload {SERVER}")
    if kind == "notify":  # systemctl does not wait for what the signal does
        eventually(lambda: replies(open_server, request("AUTH", "reader", "secret")).startswith(b"+OK"))
    assert replies(open_server, request("AUTH", "reader", "secret"), GET).startswith(b"+OK\r\n" + VALUE)
    assert open_server.property(SERVER, "ActiveState") == "active"
    assert open_server.property(SERVER, "StatusText") == f"Serving 127.0.0.1:{PORT}"


@pytest.mark.parametrize("workers", [1, 2])
def test_server_whose_event_loop_hangs_is_started_again(open_server: Machine, workers: int) -> None:
    command = open_server.run("systemctl cat sparkis | sed -n 's/^ExecStart=//p'").strip()
    open_server.set_up(SERVER, "WatchdogSec=3", "ExecStart=", f"ExecStart={command} --workers {workers}")
    open_server.run(f"systemctl restart {SERVER}")
    main = _main(open_server)
    hung = main if workers > 1 else open_server.event_loop_of(SERVER)
    open_server.run(f"kill -STOP {hung}")
    eventually(lambda: _main(open_server) not in (0, main), awaited="another main process", timeout_s=START_S_MAX)
    wait_for_value(open_server)
    assert "atchdog" in open_server.run(f"journalctl --unit {SERVER} | tail -n 100")


def test_successive_restarts_lose_no_read_with_socket_unit(open_server: Machine) -> None:
    open_server.run("cp deploy/systemd/*.socket /etc/systemd/system/; systemctl daemon-reload")
    open_server.run(f"systemctl stop {SERVER}; systemctl start sparkis.socket")
    with open_server.network():
        readers = Readers(PORT)
    try:
        eventually(lambda: readers.read > 100, timeout_s=START_S_MAX)
        for _ in range(3):
            open_server.run(f"systemctl restart {SERVER}")
        before = readers.read
        eventually(lambda: readers.read > before + 100, timeout_s=START_S_MAX)
    finally:
        failed = readers.end()
    assert failed == {}


def test_socket_unit_starts_its_service_at_first_connection(open_server: Machine) -> None:
    open_server.run("cp deploy/systemd/*.socket /etc/systemd/system/; systemctl daemon-reload")
    open_server.run(f"systemctl stop {SERVER}; systemctl start sparkis.socket")
    assert open_server.property(SERVER, "ActiveState") == "inactive"
    wait_for_value(open_server)
    assert open_server.property(SERVER, "ActiveState") == "active"


def test_cluster_answers_through_its_proxy_and_comes_back_after_kills(machine: Machine) -> None:
    machine.run("systemctl stop sparkis.socket sparkis.service || true")
    machine.run("install -D -m 600 deploy/systemd/cluster.env.example /etc/sparkis/cluster.env")
    machine.run("install -D -m 600 deploy/systemd/proxy.env.example /etc/sparkis/proxy.env")
    units = ["sparkis-registry", "sparkis-state-server@1", "sparkis-state-server@2", "sparkis-proxy"]
    machine.run(f"systemctl start {' '.join(units)}")
    login = request("AUTH", "change-me")
    for port in (9377, 9401, 9402, 9378):
        eventually(lambda port=port: _is_healthy(machine, port), awaited=f"health at {port}", timeout_s=START_S_MAX)  # type: ignore[misc]
    eventually(lambda: VALUE in replies(machine, login, GET), awaited="a value", timeout_s=START_S_MAX)
    assert machine.property("sparkis-registry", "StatusText").startswith("Assigning slots at 127.0.0.1:7377, term ")
    for unit in units:
        before = machine.property(unit, "MainPID")
        machine.run(f"kill -9 {before}")
        eventually(
            lambda unit=unit, before=before: machine.property(unit, "MainPID") not in ("0", before),  # type: ignore[misc]
            timeout_s=START_S_MAX,
        )
        eventually(lambda: VALUE in replies(machine, login, GET), awaited="a value", timeout_s=START_S_MAX)
    machine.run(f"systemctl stop {' '.join(reversed(units))}")
    assert [machine.property(unit, "Result") for unit in units] == ["success"] * len(units)


def test_proxy_of_drop_in_answers_for_states_and_for_redis_behind_it(machine: Machine) -> None:
    units = ["sparkis-registry", "sparkis-state-server@1", PROXY]
    folder = f"/etc/systemd/system/{PROXY}.service.d"
    machine.run("systemctl stop sparkis.socket sparkis.service || true")
    machine.run(f"install -D -m 644 deploy/systemd/sparkis-proxy-upstream.conf {folder}/upstream.conf")
    machine.run("install -D -m 600 deploy/systemd/cluster.env.example /etc/sparkis/cluster.env")
    machine.run("install -D -m 600 deploy/systemd/proxy.env.example /etc/sparkis/proxy.env")
    # The line of the example, with another host.
    machine.run("sed -i 's/^# \\(SPARKIS_UPSTREAM=.*\\)@cache/\\1@127.0.0.1/' /etc/sparkis/proxy.env")
    machine.run("systemctl daemon-reload")
    login, read = request("AUTH", "change-me"), request("GET", "plain")
    with _redis(machine, "change-me"):
        machine.run(f"systemctl start {' '.join(units)}")
        eventually(lambda: VALUE in replies(machine, login, GET), awaited="a state's value", timeout_s=START_S_MAX)
        assert replies(machine, login, request("SET", "plain", "2"), read).endswith(b"$1\r\n2\r\n+OK\r\n")
        # The owners of keys are known at once after a restart: they are in a file.
        machine.run(f"systemctl stop sparkis-registry sparkis-state-server@1; systemctl restart {PROXY}")
        assert replies(machine, login, read).endswith(b"$1\r\n2\r\n+OK\r\n")
        assert machine.run("ls /var/lib/sparkis/proxy/owners.json")
        machine.run(f"systemctl stop {PROXY}")
        assert machine.property(PROXY, "Result") == "success"
    machine.run(f"rm -r {folder}; systemctl daemon-reload")


@contextmanager
def _redis(machine: Machine, password: str) -> Iterator[None]:
    """Run a redis-server of this machine in the network of another one."""
    with machine.network():
        process = subprocess.Popen(
            ["redis-server", "--port", "6379", "--requirepass", password, "--save", ""], stdout=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _is_healthy(machine: Machine, port: int) -> bool:
    return "yes" in machine.run(f"/opt/sparkis/bin/sparkis health --metrics 127.0.0.1:{port} && echo yes || true")
