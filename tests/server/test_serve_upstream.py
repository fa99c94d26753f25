"""`sparkis serve --upstream`: a proxy and a state server behind it, as one program at one address."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.certificates import Authority
from compat.conformance.servers import (
    CONTROL_TOKEN,
    Running,
    child_environment,
    sparkis_program,
)
from compat.conformance.wire import Connection, request, scanned
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.client import Client, ClientError
from resp_server.net.tls import TlsFiles, client_context
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from tests.server.commands import Command
from tests.server.overlay import ABSENT, OLD, STATES, VALUES, sparkis
from tests.server.served_upstream import PROGRAM, Scene, children, state_server_of, wait_until_ready


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal."""
    found = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return bool(int(found[1], 16) >> (number - 1) & 1)


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("scene"), stack)


@pytest.fixture(scope="module", params=["1", "2"], ids=["one worker", "two workers"])
def server(scene: Scene, request: pytest.FixtureRequest) -> Running:
    return scene.start(f"workers{request.param}", "--workers", request.param)


@pytest.fixture
def client(server: Running) -> Iterator[Connection]:
    with server.connect() as connection:
        wait_until_ready(connection)
        yield connection


# Of a socket in /proc/<pid>/fdinfo: the core's epoll is edge-triggered, that of the event loop is not.
EDGE_TRIGGERED = 1 << 31


def events_by_port(pid: int) -> dict[int, list[int]]:
    """Return the events for which a process' epoll instances watch its connections, by the port of the other end."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {f"socket:[{row[9]}]": int(row[2].rpartition(":")[2], 16) for row in rows}
    found: dict[int, list[int]] = {}
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            for descriptor, events in re.findall(r"tfd:\s+(\d+) events:\s+([0-9a-f]+)", info.read_text()):
                port = ports.get(os.readlink(f"/proc/{pid}/fd/{descriptor}"), 0)
                found.setdefault(port, []).append(int(events, 16))
    return found


@pytest.mark.compiled
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="the system does not list connections")
def test_connections_of_start_are_on_epoll_of_clients(scene: Scene, server: Running, client: Connection) -> None:
    info = client.call("INFO", "proxy").plain.decode()
    state_server = int(info.partition("server0:addr=127.0.0.1:")[2].partition(",")[0])
    events = events_by_port(server.process.pid)
    for port in (scene.port, state_server):
        assert events[port]
        assert all(each & EDGE_TRIGGERED for each in events[port]), (port, events[port])


def test_keys_of_both_backends_are_answered_from_start(scene: Scene) -> None:
    with scene.start("new").connect() as connection:  # without a file of owners
        assert connection.call("GET", "job:speed:1").plain == b"10"
        assert connection.call("GET", "nobody's").plain is None


def test_only_possible_state_keys_wait_for_reports_of_servers(scene: Scene, tmp_path: Path) -> None:
    """No server of this log is known to a registry, so none ever reports its jobs."""
    options = ("--log", str(scene.log), "--upstream", f"redis://127.0.0.1:{scene.port}")
    program = ("-m", "resp_server.programs.proxy")
    with sparkis_program(program, "--port", "0", *options, "--ownership", str(tmp_path / "owners.json")) as proxy:
        with proxy.connect() as client:
            eventually(lambda: client.call("SET", "mine", "0").plain == b"OK")
            assert client.call_each("GET mine", "SELECT 1", "GET mine") == [b"0", b"OK", None]
            client.call("SELECT", "0")
            assert client.call("DEL", "mine").plain == 1
            for key in (*VALUES, ABSENT):
                assert client.call("GET", key).is_error  # not the upstream's old copy
                assert b"is owned by state job:" in client.call("SET", key, "x").plain
            assert client.call("STATE", "OWNER", "mine").plain.startswith(b"LOADING ")
        done = sparkis(proxy, "health")
        assert done.returncode == 1 and "the state servers have not reported their jobs yet" in done.stderr


def test_all_keys_wait_for_reports_of_servers_if_log_is_unreadable(scene: Scene, tmp_path: Path) -> None:
    shutil.copytree(scene.log, tmp_path / "log")
    newest = max((tmp_path / "log" / "job" / "terms").glob("*.json"), key=lambda path: int(path.stem))
    newest.write_bytes(newest.read_bytes()[:-9])
    options = ("--log", str(tmp_path / "log"), "--upstream", f"redis://127.0.0.1:{scene.port}")
    program = ("-m", "resp_server.programs.proxy")
    started = sparkis_program(program, "--port", "0", *options, "--ownership", str(tmp_path / "owners.json"))
    with started as proxy, proxy.connect() as client:
        for _ in range(50):  # long enough to read a log that small
            assert client.call("GET", "mine").plain.startswith(b"LOADING ")


def test_one_address_answers_keys_of_both_backends(client: Connection) -> None:
    assert client.call("GET", ABSENT).plain is None
    assert client.call("SET", "cart", "7").plain == b"OK"
    assert client.call("MGET", "cart", "job:speed:2", "dash/7/apdex").plain == [b"7", b"20", b"0.9"]
    assert client.call("SET", "job:speed:2", "x").plain == b"ERR key 'job:speed:2' is owned by state job:speed"
    for words in (("MULTI",), ("GET", "job:speed:3"), ("INCR", "cart"), ("GET", "dash/7/apdex")):
        client.call(*words)
    assert client.call("EXEC").plain == [b"30", 8, b"0.9"]
    assert sorted(client.call("KEYS", "*").plain) == sorted([*VALUES, b"cart"])
    assert client.call("DEL", "cart").plain == 1


@pytest.fixture
def own_keys(scene: Scene) -> Iterator[set[bytes]]:
    names = {b"own:%d" % number for number in range(40)}
    with scene.upstream.connect() as upstream:
        upstream.call("MSET", *(word for name in names for word in (name, "1")))
        yield names
        upstream.call("DEL", *names)


def calls_at(upstream: Connection, command: str) -> int:
    found = re.search(rb"cmdstat_%b:calls=(\d+)" % command.encode(), upstream.call("INFO", "commandstats").value)
    return 0 if found is None else int(found[1])


def test_requests_about_all_keys_keep_their_order_in_pipeline(client: Connection, own_keys: set[bytes]) -> None:
    everything = own_keys | VALUES.keys()
    lines = [
        ("DBSIZE",),
        ("GET", "job:speed:2"),
        ("KEYS", "*"),
        ("RANDOMKEY",),
        ("GET", "own:1"),
        ("KEYS", "job:*"),
        ("SCAN", 0),
    ]
    client.send(b"".join(request(*line) for line in lines) * 20)
    for _ in range(20):
        count, of_states, keys, drawn, own, some, page = [client.read().plain for _ in lines]
        # Copies of states' keys at the upstream are counted, but not listed.
        assert (count, of_states, own) == (len(everything) + len(VALUES) + 1, b"20", b"1")
        assert sorted(keys) == sorted(everything) and drawn in everything
        assert sorted(some) == sorted(key for key in VALUES if key.startswith(b"job:"))
        assert set(page[1]) <= own_keys


def test_scan_walks_states_and_upstream_with_any_options(client: Connection, own_keys: set[bytes]) -> None:
    everything = own_keys | VALUES.keys()
    for options in ((), ("COUNT", 1), ("COUNT", 1000), ("MATCH", "*"), ("TYPE", "string", "count", 3)):
        assert set(scanned(client, *options)) == everything
    assert set(scanned(client, "MATCH", "job:*", "COUNT", 4)) == {key for key in VALUES if key.startswith(b"job:")}
    assert scanned(client, "TYPE", "hash") == []


@pytest.mark.compiled
def test_upstream_draws_one_key_for_random_key(scene: Scene, server: Running, own_keys: set[bytes]) -> None:
    with server.connect() as client, scene.upstream.connect() as upstream:
        wait_until_ready(client)
        before = calls_at(upstream, "randomkey"), calls_at(upstream, "dbsize")
        client.send(request("RANDOMKEY") * 200)
        found = {client.read().plain for _ in range(200)}
        assert found <= own_keys | VALUES.keys() and found & own_keys and found & VALUES.keys()
        assert calls_at(upstream, "randomkey") - before[0] == 200
        assert calls_at(upstream, "dbsize") - before[1] <= 200


def test_listing_replies_match_general_path(client: Connection, server: Running, own_keys: set[bytes]) -> None:
    """Its requests take the general path."""
    with server.connect() as tracking:
        tracking.call("HELLO", 3)
        tracking.call("CLIENT", "TRACKING", "ON")
        client.call("HELLO", 3)
        for line in (
            ("DBSIZE",),
            ("dbsize", "x"),
            ("SCAN",),
            ("SCAN", "x"),
            ("SCAN", "-1"),
            ("SCAN", "0", "COUNT", "0"),
            ("SCAN", "0", "TYPE"),
            ("SCAN", "1", "COUNT", "0"),
            ("SCAN", "1", "COUNT", "3"),
            ("SCAN", "1", "TYPE", "hash"),
            ("SCAN", "99999999999999999999999"),
            ("SCAN", str(2**64 - 2)),
            ("SCAN", "0", "COUNT", "1000"),
            ("SCAN", "1", "MATCH", "job:speed:[12]", "COUNT", "100"),
            ("KEYS",),
            ("KEYS", "none"),
            ("KEYS", "own:7"),
            ("KEYS", "*", "x"),
            ("RANDOMKEY", "x"),
        ):
            assert client.call(*line).raw == tracking.call(*line).raw, line


def publish(scene: Scene, **values: str | None) -> None:
    """Publish an epoch with values of the state `speed`; None: the key is deleted."""
    with LogWriter(scene.log, "job", STATES, "first") as writer:
        rows = [(b"job:speed:%b" % name.encode(), value) for name, value in values.items()]
        writer.publish(
            [
                Change("speed", Op.DELETE if value is None else Op.PUT, key, value=(value or "").encode())
                for key, value in rows
            ]
        )


@pytest.mark.compiled
def test_watch_of_states_keys_asks_no_state_server(server: Running, client: Connection) -> None:
    state_server = state_server_of(server.process.pid)
    stopped = [state_server, *children(state_server)]  # with workers and appliers
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        replies = client.call_each("WATCH job:speed:1 job:speed:2", "MULTI", "GET job:speed:1", "EXEC")
        assert replies == [b"OK", b"OK", b"QUEUED", [b"10"]]
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_exec_at_upstream_compares_watched_state_keys(scene: Scene, server: Running, client: Connection) -> None:
    watches = "WATCH job:speed:1 job:speed:w", "WATCH job:speed:new"
    try:
        publish(scene, w="1", other="1")
        eventually(lambda: client.call("GET", "job:speed:w").plain, lambda value: value == b"1")
        assert client.call_each(*watches, "MULTI", "SET n 1", "GET job:speed:w", "EXEC")[-1] == [b"OK", b"1"]
        changes: list[tuple[dict[str, str | None], str, bytes | None, bool]] = [
            ({"other": "2"}, "other", b"2", False),
            ({"w": "2"}, "w", b"2", True),
            ({"w": None}, "w", None, True),
            ({"new": "1"}, "new", b"1", True),
        ]
        for values, name, value, is_changed in changes:
            assert client.call_each(*watches) == [b"OK", b"OK"]
            publish(scene, **values)
            with server.connect() as other:
                eventually(lambda: other.call("GET", f"job:speed:{name}").plain, lambda found: found == value)  # noqa: B023
            replies = client.call_each("MULTI", "SET n 2", "GET job:speed:1", "EXEC")
            assert replies[-1] == (None if is_changed else [b"OK", b"10"]), values
    finally:
        publish(scene, w=None, other=None, new=None)
        client.call("DEL", "n")


def test_exec_of_states_keys_compares_watched_ones(scene: Scene, server: Running, client: Connection) -> None:
    try:
        publish(scene, w="1")
        eventually(lambda: client.call("GET", "job:speed:w").plain, lambda value: value == b"1")
        assert client.call_each("WATCH job:speed:w", "GET job:speed:w") == [b"OK", b"1"]
        publish(scene, w="2")
        with server.connect() as other:
            eventually(lambda: other.call("GET", "job:speed:w").plain, lambda value: value == b"2")
        assert client.call_each("MULTI", "GET job:speed:w", "EXEC")[-1] is None
        assert client.call_each("MULTI", "GET job:speed:w", "EXEC")[-1] == [b"2"]
    finally:
        publish(scene, w=None)


def test_state_server_is_private(client: Connection, server: Running) -> None:
    found = re.search(r"127\.0\.0\.1:(\d+)", client.call("INFO", "proxy").plain.decode())
    assert found is not None
    with Connection(int(found[1])) as stranger:
        assert stranger.call("GET", "job:speed:1").plain.startswith(b"NOAUTH")


def test_wait_of_driver_is_answered_by_state_server(server: Running) -> None:
    with Client("127.0.0.1", server.control_port, password=CONTROL_TOKEN) as driver:
        assert driver.call("WAIT", "job", "0", "60000") == 1


def test_killed_state_server_is_restarted_beside_working_upstream(client: Connection, server: Running) -> None:
    before = state_server_of(server.process.pid)
    os.kill(before, signal.SIGKILL)
    assert client.call("SET", "cart", "8").plain == b"OK"
    eventually(lambda: children(server.process.pid), lambda found: found and before not in found)
    eventually(lambda: client.call("GET", "job:speed:1").plain, lambda found: found == b"10")
    assert client.call("GET", "cart").plain == b"8"
    assert client.call("GET", ABSENT).plain is None
    with Client("127.0.0.1", server.control_port, password=CONTROL_TOKEN) as driver:
        assert driver.call("WAIT", "job", "0", "60000") == 1
    client.call("DEL", "cart")


@pytest.mark.slow
def test_chosen_ports_survive_restarts(scene: Scene) -> None:
    command = Command("serve", "--port", 0, *scene.options("ports"), "--announcements", 0, "--metrics", 0)

    def ports() -> tuple[str, ...]:
        return tuple(command.wait_for(rf"{what} @ (\S+\d)")[1] for what in ("announcements", "metrics", "started"))

    before = ports()
    (proxy,) = children(command.process.pid)
    os.kill(state_server_of(proxy), signal.SIGKILL)
    assert command.wait_for(r"announcements @ (\S+)")[1] == before[0]
    os.kill(proxy, signal.SIGKILL)
    assert ports() == before
    command.end()


def test_states_are_answered_while_upstream_is_unreachable(scene: Scene, client: Connection) -> None:
    scene.upstream.process.kill()
    scene.upstream.process.wait()
    eventually(lambda: client.call("GET", "cart").is_error)
    assert client.call("GET", "job:speed:4").plain == b"40"
    scene.start_upstream()
    eventually(lambda: client.call("SET", "cart", "1").plain == b"OK")
    assert client.call("GET", "job:speed:1").plain == b"10"
    client.call("DEL", "cart")


def test_killed_workers_are_restarted_and_upstreams_keys_never_fail(scene: Scene) -> None:
    server = scene.start("killed", "--workers", "2")
    with server.connect() as client:
        wait_until_ready(client)
        (master,) = children(server.process.pid)
        for each in children(master):
            if b"programs.worker" in Path(f"/proc/{each}/cmdline").read_bytes():
                os.kill(each, signal.SIGKILL)
        for _ in range(20):
            assert client.call("GET", "nobody's").plain is None
        eventually(lambda: client.call("GET", "job:speed:4").plain, lambda found: found == b"40")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_both_processes_end_together(scene: Scene, number: signal.Signals) -> None:
    server = scene.start(f"ended{number}")
    with server.connect() as client:
        assert client.call("CLIENT", "ID").plain >= 1  # from here on it handles signals
    state_server = state_server_of(server.process.pid)
    appliers = children(state_server)
    assert appliers
    server.process.send_signal(number)
    assert server.process.wait(WAIT_S_MAX) == (0 if number is signal.SIGTERM else -number)
    eventually(lambda: not any(map(is_running, [state_server, *appliers])))


def test_command_restarts_both_reloads_rules_and_ends_both(scene: Scene) -> None:
    routes = scene.folder / "routes.toml"
    routes.write_text("")
    (file := scene.folder / "sparkis.toml").write_text("")
    command = Command("serve", "--config", file, "--port", 0, *scene.options("command"), "--routes", routes)
    port = int(command.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1])
    assert " started @ " not in command.logged  # one address is logged, the clients'
    (proxy,) = children(command.process.pid)
    state_server = state_server_of(proxy)
    os.kill(proxy, signal.SIGKILL)
    command.wait_for("the server was ended by SIGKILL; starting it again")
    assert int(command.wait_for(r"started @ 127\.0\.0\.1:(\d+)")[1]) == port
    eventually(lambda: not is_running(state_server))
    with Connection(port) as client:
        wait_until_ready(client)
        (proxy,) = children(command.process.pid)
        # The server reads the store of the former one, also before its own applier has started.
        eventually(lambda: [ignores(each, signal.SIGHUP) for each in children(state_server_of(proxy))] == [True])
        routes.write_text('[[rule]]\nkeys = "job:speed:1"\nowner = "upstream"\n')
        command.hang_up()
        eventually(lambda: client.call("GET", "job:speed:1").plain == OLD)
    file.write_text('loglevel = "debug"')
    command.hang_up()
    command.wait_for(r"DEBUG sparkis\.applier: job job: the log has other levels")  # of the state server
    command.end()


def test_failed_state_server_ends_command_with_reason(scene: Scene) -> None:
    (scene.folder / "file").touch()
    done = run("--child", *scene.options("file"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"sparkis serve: --store {scene.folder / 'file'}: File exists")
    assert "Traceback" not in done.stderr


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkis", "serve", "--port", "0", *options]
    given = child_environment() | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False)


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    routes = tmp_path / "routes.toml"
    routes.write_text('[[rule]]\nkeys = "a"\nowner = "x"\n')
    done = run(
        *("--log", str(tmp_path / "nowhere"), "--upstream", "http://cache", "--routes", str(routes)),
        *("--cluster", "c.json", "--cluster-node", "127.0.0.1:1", "--role", "slave", "--tls-key-file", "k"),
        *("--upstream-tls-cert-file", "c", "--upstream-auth", "client", "--requirepass", "secret"),
    )
    assert done.returncode == 1
    said = [line.removeprefix("sparkis serve: ") for line in done.stderr.splitlines()]
    expected = [
        "--upstream cannot be combined with --cluster; start the nodes without it, and `sparkis proxy --upstream`",
        "--role slave has no effect with --upstream",
        f"--log {tmp_path / 'nowhere'} is not a folder",
        "--tls-key-file needs --tls-cert-file",
        "--upstream: ",
        "--upstream-tls-cert-file needs --upstream-tls-key-file",
        "with --upstream-auth client the upstream has the users",
        "--upstream needs --ownership FILE",
        f"{routes} has 1 mistake: rule 1 'a' (line 1): owner is 'x'",
    ]
    assert len(said) == len(expected), done.stderr
    for line, begins in zip(said, expected, strict=True):
        assert line.startswith(begins)


def test_options_about_upstream_are_mistakes_without_one(tmp_path: Path) -> None:
    done = run("--log", str(tmp_path), "--new-jobs", "take", "--transactions=strict", "--upstream-pinned", "7")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"sparkis serve: {option} has no use without --upstream"
        for option in ("--new-jobs", "--upstream-pinned", "--transactions")
    ]


def test_upstream_of_environment_is_named_by_its_variable(tmp_path: Path) -> None:
    done = run("--log", str(tmp_path), SPARKIS_UPSTREAM="redis://cache")
    assert done.returncode == 1
    assert done.stderr.startswith("sparkis serve: --upstream (SPARKIS_UPSTREAM in the environment) needs --ownership")


def test_proxy_has_certificates_and_users(scene: Scene, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key = authority.issue("node")
    users = tmp_path / "users.acl"
    users.write_text("user default off\nuser app on >secret ~cart* ~job:speed:1 +@all\n")
    server = scene.start("tls", *authority.options("node", auth_clients="yes"), "--aclfile", str(users))
    with pytest.raises(ClientError), Client("127.0.0.1", server.port) as plain:
        plain.call("PING")
    tls = client_context(TlsFiles(str(cert), str(key), str(authority.ca)))
    with Client("127.0.0.1", server.port, tls=tls) as client:
        assert client.call("AUTH", "app", "secret") == "OK"
        eventually(lambda: value_of(client, "job:speed:1") == "10")
        assert "NOPERM" in value_of(client, "job:speed:2")
        assert client.call("SET", "cart:1", "7") == "OK"
        assert "NOPERM" in value_of(client, "session:1")


def value_of(client: Client, key: str) -> str:
    try:
        return str(client.call("GET", key))
    except ClientError as error:
        return str(error)


def test_serve_with_upstream_takes_commands_of_proxy(scene: Scene, client: Connection, server: Running) -> None:
    upstream = f"redis://127.0.0.1:{scene.port}"
    proxy = f"redis://127.0.0.1:{server.port}"
    assert "owned" in sparkis(server, "owners").stdout
    sparkis(server, "release", "job")
    assert client.call("GET", "job:speed:1").plain == OLD
    sparkis(server, "confirm", "job")
    assert client.call("GET", "job:speed:1").plain == b"10"
    assert "speed" in sparkis(server, "status", "-v").stdout
    command = [sys.executable, "-m", "sparkis", "swap-check", "--upstream", upstream, "--delete-copies", "--yes"]
    done = subprocess.run(
        [*command, "--proxy", proxy],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=True,
    )
    assert "10 copies deleted" in done.stdout
    with scene.upstream.connect() as connection:
        assert connection.call("DBSIZE").plain == 0
        connection.call("MSET", *(word for key in [*VALUES, ABSENT] for word in (key, OLD)))


@pytest.mark.parametrize("workers", [1, 2])
def test_rules_are_reloaded_and_shadow_is_compared_at_it(scene: Scene, workers: int) -> None:
    routes = scene.folder / f"shadow{workers}.toml"
    routes.write_text("")
    server = scene.start(f"shadow{workers}", "--workers", str(workers), "--routes", str(routes))
    with server.connect() as client, scene.upstream.connect() as upstream:
        wait_until_ready(client)
        assert sparkis(server, "shadow").stdout == 'no rule has owner = "shadow"\n'
        routes.write_text('[[rule]]\nname = "speeds"\nkeys = "job:speed:<car>"\nowner = "shadow"\n')
        assert sparkis(server, "reload").stdout == "1 rule\n"
        upstream.call("SET", "job:speed:1", "10")
        assert [client.call("GET", f"job:speed:{car}").plain for car in (1, 2)] == [b"10", OLD]
        eventually(lambda: shadow(server)["different"] == 1)
        found = shadow(server)
        assert (found["rule"], found["compared"], found["equal"]) == ("speeds", 2, 1)
        assert [sample["key"] for sample in found["samples"]] == ["job:speed:2"]
        routes.write_text('[[rule]]\nkeys = "job:speed:<car>"\nowner = "nobody"\n')
        failed = sparkis(server, "reload")
        assert failed.returncode == 1 and "has 1 mistake" in failed.stderr
        assert client.call("GET", "job:speed:2").plain == OLD
        routes.write_text('[[rule]]\nkeys = "job:speed:<car>"\nowner = "state"\n')
        assert sparkis(server, "reload").returncode == 0
        assert client.call("GET", "job:speed:2").plain == b"20"
        upstream.call("SET", "job:speed:1", OLD)


def shadow(server: Running) -> dict[str, Any]:
    (row,) = json.loads(sparkis(server, "shadow", "--json").stdout)
    return dict(row)


@pytest.mark.parametrize("has_upstream", [False, True], ids=["alone", "with an upstream"])
@pytest.mark.parametrize("damaged", ["first.1/epochs/0.json", pytest.param("terms/1.json", marks=pytest.mark.slow)])
def test_keys_of_job_with_unreadable_first_epoch_are_errors(tmp_path: Path, damaged: str, has_upstream: bool) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        file = scene.log / "job" / damaged
        whole = file.read_bytes()
        file.write_bytes(whole.replace(b"first", b"FIRST", 1) if b"first" in whole else whole[:-2])
        alone = ("--log", str(scene.log), "--store", str(tmp_path / "alone"))
        options = scene.options("store") if has_upstream else alone
        server = stack.enter_context(sparkis_program(PROGRAM, "--port", "0", *options))
        with server.connect() as client:
            for key in VALUES:
                assert client.call("GET", key).is_error
            for listing in (("DBSIZE",), ("KEYS", "*"), ("RANDOMKEY",)):
                assert client.call(*listing).is_error
            with scene.upstream.connect() as upstream:
                upstream.call("DEL", *VALUES)
            assert [key for key in VALUES if not client.call("GET", key).is_error] == []
            file.write_bytes(whole)
            wait_until_ready(client)
