"""TLS at a server of one process and of two: real clients, real certificates, and bytes that are no TLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from compat.conformance.certificates import Authority
from compat.conformance.servers import CONTROL_TOKEN, Running, sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.client import Client, ClientError
from resp_server.net.tls import TlsFiles, client_context
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

KEYS = 3000
LARGE = b"x" * (8 << 20)
CLIENTS_MAX = 8

Serve = Callable[..., Running]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tls") / "log"
    with LogWriter(root, "job", [StateDescriptor("n", key="k", value="v")], "first") as writer:
        changes = [Change("n", Op.PUT, b"job:n:%d" % number, value=b"%d" % number) for number in range(KEYS)]
        writer.publish([*changes, Change("n", Op.PUT, b"job:n:large", value=LARGE)], 0)
    return root


def start_server(
    stack: ExitStack, folder: Path, log: Path, authority: Authority, *options: str, workers: int = 1
) -> Running:
    """Start a server with these options; it has read its log when it is returned, and ends with the stack."""
    given = ("--workers", str(workers), "--loglevel", "debug", *options)
    server = stack.enter_context(sparkis_server(folder / "store", log, *given))
    showing: dict[str, Any] = {"ssl": True, "ssl_check_hostname": False, **authority.client("waiting")}
    with redis.Redis(port=server.port, **(showing if server.port == server.tls_port else {})) as client:
        eventually(lambda: can_ping(client), awaited="the server answers")
    return server


@pytest.fixture
def serve(tmp_path: Path, log: Path, authority: Authority) -> Iterator[Serve]:
    """Start a server with these options that ends with the test."""
    with ExitStack() as stack:
        yield partial(start_server, stack, tmp_path, log, authority)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, log: Path, authority: Authority) -> Iterator[Serve]:
    """Return the module's server with these options, for tests that only read: the first of them starts it."""
    with ExitStack() as stack:

        @cache
        def start(*options: str, workers: int = 1) -> Running:
            return start_server(stack, tmp_path_factory.mktemp("shared"), log, authority, *options, workers=workers)

        yield start


def connect(server: Running, **given: Any) -> Any:
    return redis.Redis(port=server.tls_port, ssl=True, retry=Retry(NoBackoff(), 0), **given)


def can_ping(client: Any) -> bool:
    with suppress(redis.RedisError):
        return bool(client.ping())
    return False


def shown_at(port: int, authority: Authority, connections: int) -> list[bytes | None]:
    """Return the certificates that a server shows to new connections, all open at a time: so each worker has some."""
    with ExitStack() as stack:
        shown = []
        for _ in range(connections):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S_MAX))
            wrapped = stack.enter_context(authority.context().wrap_socket(plain, server_hostname="127.0.0.1"))
            shown.append(wrapped.getpeercert(binary_form=True))
        return shown


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("protocol", [2, 3])
def test_client_reads_any_reply_over_tls(shared: Serve, authority: Authority, workers: int, protocol: int) -> None:
    server = shared(*authority.options(auth_clients="no"), workers=workers)
    assert server.port == server.tls_port
    with connect(server, protocol=protocol, **authority.client()) as client:
        assert client.get("job:n:7") == b"7"
        assert client.get("job:n:large") == LARGE
        assert len(client.keys("job:n:*")) == KEYS + 1
        pipeline = client.pipeline(transaction=False)
        for number in range(KEYS):
            pipeline.get(f"job:n:{number}")
        assert pipeline.execute() == [b"%d" % number for number in range(KEYS)]
        assert client.config_get("*port") == {"port": "0", "tls-port": str(server.tls_port)}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_plain_and_tls_are_side_by_side(serve: Serve, authority: Authority, workers: int) -> None:
    server = serve(*authority.options(auth_clients="no"), "--tls-port", "0", workers=workers)
    assert server.tls_port not in (0, server.port)
    with connect(server, **authority.client()) as encrypted, redis.Redis(port=server.port) as plain:
        assert encrypted.get("job:n:1") == plain.get("job:n:1") == b"1"
        assert plain.config_get("*port") == {"port": str(server.port), "tls-port": str(server.tls_port)}
        assert plain.info("clients")["connected_clients"] == 2


def test_asyncio_client_reads_over_tls(shared: Serve, authority: Authority) -> None:
    server = shared(*authority.options())

    async def read() -> list[Any]:
        given: dict[str, Any] = authority.client("reader")
        async with redis.asyncio.Redis(port=server.port, ssl=True, **given) as client:
            return list(await asyncio.gather(*(client.get(f"job:n:{number}") for number in range(20))))

    assert asyncio.run(read()) == [b"%d" % number for number in range(20)]


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli on the PATH")
def test_redis_cli_reads_over_tls(shared: Serve, authority: Authority) -> None:
    server = shared(*authority.options())
    cert, key = authority.issue("person")
    command = ["redis-cli", "--tls", "-p", str(server.port), "--cacert", str(authority.ca)]
    command += ["--cert", str(cert), "--key", str(key)]
    asked = b"get job:n:1\nget job:n:2\nstrlen job:n:large\n"
    done = subprocess.run(command, input=asked, capture_output=True, timeout=WAIT_S_MAX, check=False)
    if b"Unrecognized option" in done.stderr:
        pytest.skip("this redis-cli was built without TLS")
    assert done.stdout.split() == [b"1", b"2", b"%d" % len(LARGE)]


@pytest.mark.parametrize("workers", [1, 2])
def test_clients_need_certificate_with_ca(shared: Serve, authority: Authority, tmp_path: Path, workers: int) -> None:
    server = shared(*authority.options(), workers=workers)
    with connect(server, **authority.client("client")) as known:
        assert known.get("job:n:1") == b"1"
    stranger = Authority(tmp_path / "other").client("stranger") | authority.client()
    for given in (authority.client(), stranger):
        with connect(server, **given) as client, pytest.raises(redis.ConnectionError):
            client.get("job:n:1")


def test_optional_certificate_is_checked_if_shown(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    server = serve(*authority.options(auth_clients="optional"))
    for given in (authority.client("client"), authority.client()):
        with connect(server, **given) as client:
            assert client.get("job:n:1") == b"1"
    stranger = Authority(tmp_path / "other").client("stranger") | authority.client()
    with connect(server, **stranger) as client, pytest.raises(redis.ConnectionError):
        client.get("job:n:1")


def test_client_refuses_server_of_another_ca(shared: Serve, authority: Authority, tmp_path: Path) -> None:
    server = shared(*authority.options(auth_clients="no"))
    other = Authority(tmp_path / "other")
    with connect(server, **other.client()) as client, pytest.raises(redis.ConnectionError, match="certificate"):
        client.get("job:n:1")
    with pytest.raises(ClientError, match="its certificate is refused"):
        Client.from_url(f"rediss://127.0.0.1:{server.port}", tls=TlsFiles(ca=str(other.ca)))


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_client_without_tls_is_closed_and_takes_no_clients_place(
    serve: Serve, authority: Authority, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    server = serve(*authority.options(auth_clients="no"), "--maxclients", str(CLIENTS_MAX), workers=workers)
    for _ in range(3 * CLIENTS_MAX):
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S_MAX) as plain:
            plain.sendall(b"PING\r\nGET job:n:1\r\n")
            said = b""
            with suppress(ConnectionError):
                while some := plain.recv(4096):
                    said += some
            assert b"PONG" not in said
        socket.create_connection(("127.0.0.1", server.port), WAIT_S_MAX).close()

    def is_all_there() -> bool:
        with ExitStack() as stack:
            try:
                clients = [stack.enter_context(connect(server, **authority.client())) for _ in range(CLIENTS_MAX)]
                return [client.ping() for client in clients] == [True] * CLIENTS_MAX
            except redis.ConnectionError:
                return False  # the master hears of the last ones in a moment

    eventually(is_all_there, awaited="the places of closed connections are free")
    said = capfd.readouterr().err
    assert "a client's TLS handshake failed: it does not speak TLS" in said
    assert "Traceback" not in said


def test_clients_beyond_limit_are_closed(serve: Serve, authority: Authority) -> None:
    server = serve(*authority.options(auth_clients="no"), "--maxclients", "1")
    with connect(server, **authority.client()) as first, connect(server, **authority.client()) as second:
        eventually(lambda: can_ping(first), awaited="the place of who came before is free")
        with pytest.raises(redis.ConnectionError):
            second.ping()
        assert first.info("stats")["rejected_connections"] >= 1


@pytest.mark.parametrize("workers", [1, 2])
def test_new_certificate_is_shown_to_new_connections(
    serve: Serve, authority: Authority, tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    authority.issue("changing")
    server = serve(*authority.options("changing", auth_clients="no"), workers=workers)
    (before,) = set(shown_at(server.port, authority, 2 * workers))
    with connect(server, single_connection_client=True, **authority.client()) as client:
        assert client.ping()
        authority.issue("changing")
        after = shown_at(server.port, authority, 2 * workers)
        assert before not in after and len(set(after)) == 1
        assert client.get("job:n:1") == b"1"

    (authority.folder / "changing.crt").write_text("no certificate")
    assert shown_at(server.port, authority, 2 * workers) == after
    eventually(lambda: "the earlier files stay in use" in capfd.readouterr().err, awaited="a report of the wrong file")
    authority.issue("changing")
    assert set(shown_at(server.port, authority, 2 * workers)).isdisjoint({before, *after})


def test_another_ca_counts_for_new_clients(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    other, ca = Authority(tmp_path / "other"), tmp_path / "ca.crt"
    ca.write_bytes(authority.ca.read_bytes())
    cert, key = authority.issue("server")
    given = ("--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca))
    server = serve(*given)
    late = other.client("late") | authority.client()
    with connect(server, **late) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    ca.write_bytes(other.ca.read_bytes())
    with connect(server, **late) as client:
        assert client.ping()
    with connect(server, **authority.client("client")) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_client_that_reads_no_replies_delays_no_other(shared: Serve, authority: Authority) -> None:
    server = shared(*authority.options(auth_clients="no"))
    asked = 40
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S_MAX) as plain:
        lazy = authority.context().wrap_socket(plain, server_hostname="127.0.0.1")
        lazy.sendall(b"GET job:n:large\r\n" * asked)
        with connect(server, **authority.client()) as client:
            assert client.get("job:n:1") == b"1"
        expected = (b"$%d\r\n" % len(LARGE) + LARGE + b"\r\n") * 2
        read = bytearray()
        while len(read) < len(expected):
            read += lazy.recv(1 << 20)
        assert bytes(read[: len(expected)]) == expected


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_server_ends_while_clients_are_there(serve: Serve, authority: Authority, workers: int) -> None:
    server = serve(*authority.options(auth_clients="no"), workers=workers)
    with connect(server, **authority.client()) as client:
        assert client.ping()
        server.process.terminate()
        assert server.process.wait(WAIT_S_MAX) == 0
        with pytest.raises(redis.ConnectionError):
            client.ping()


@pytest.mark.parametrize("with_ca", [True, False])
def test_control_listener_speaks_tls_as_well(shared: Serve, authority: Authority, with_ca: bool) -> None:
    server = shared(*authority.options(with_ca=with_ca))
    files = TlsFiles(
        str(authority.folder / "server.crt"),
        str(authority.folder / "server.key"),
        str(authority.ca) if with_ca else None,
    )
    at = ("127.0.0.1", server.control_port)
    with Client(*at, password=CONTROL_TOKEN, tls=client_context(files), timeout_s=WAIT_S_MAX) as client:
        assert client.call("WAIT", "job", "0", "5000") == 1
    with pytest.raises(ClientError):
        Client(*at, password=CONTROL_TOKEN)
    cert, key = authority.issue("another")
    alone = TlsFiles(str(cert), str(key))  # trusts nobody but itself
    with pytest.raises(ClientError, match="its certificate is refused"):
        Client(*at, password=CONTROL_TOKEN, tls=client_context(alone))


def test_status_is_shown_over_tls(shared: Serve, authority: Authority) -> None:
    server = shared(*authority.options())
    cert, key = authority.issue("person")
    command = [sys.executable, "-m", "sparkis", "status", "--url", f"rediss://127.0.0.1:{server.port}"]
    trusting = [*command, "--tls-ca-cert-file", str(authority.ca)]
    showing = [*trusting, "--tls-cert-file", str(cert), "--tls-key-file", str(key), "-v"]
    assert "job  n" in subprocess.run(showing, capture_output=True, text=True, check=True).stdout
    for wrong in (command, trusting, [*command[:-1], f"redis://127.0.0.1:{server.port}"]):
        done = subprocess.run(wrong, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stderr.startswith("sparkis status: ") and "Traceback" not in done.stderr


def test_certificate_of_another_name_is_refused_if_server_is_named(serve: Serve, authority: Authority) -> None:
    authority.issue("elsewhere", "elsewhere.example")
    server = serve(*authority.options("elsewhere", auth_clients="no"))
    with pytest.raises(ClientError, match="not valid for"):
        Client.from_url(f"rediss://127.0.0.1:{server.port}", tls=TlsFiles(ca=str(authority.ca)))


def test_server_does_not_start_with_files_of_no_use(tmp_path: Path, log: Path, authority: Authority) -> None:
    command = [
        sys.executable,
        "-m",
        "resp_server.programs.serve",
        "--log",
        str(log),
        "--store",
        str(tmp_path),
        "--port",
        "0",
    ]
    cert, key = authority.issue("server")
    other_key = authority.issue("other")[1]
    for options, error in (
        (
            ["--tls-cert-file", str(cert), "--tls-key-file", str(other_key)],
            f"--tls-key-file {other_key} does not match",
        ),
        (["--tls-cert-file", "/nowhere", "--tls-key-file", str(key)], "--tls-cert-file /nowhere: No such file"),
        (["--tls-port", "0"], "--tls-port needs a certificate"),
    ):
        for workers in ("1", "2"):
            given = [*command, *options, "--workers", workers]
            done = subprocess.run(given, capture_output=True, text=True, env=dict(os.environ), check=False)
            assert done.returncode == 1
            assert done.stderr.startswith("sparkis serve: ") and error in done.stderr and "Traceback" not in done.stderr


def test_plain_server_stays_as_it_was(serve: Serve) -> None:
    server = serve()
    assert server.tls_port == 0
    with Connection(server.port) as connection:
        assert connection.call("GET", "job:n:1").value == b"1"
