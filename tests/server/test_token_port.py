"""A client with the token gets in at a registry's port and at a server's control port, despite many without it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import EVENT_WRITE, DefaultSelector
from typing import Any

import pytest
import uvloop

from compat.conformance.certificates import Authority
from compat.conformance.servers import CONTROL_TOKEN, sparkis_server
from compat.conformance.wire import request
from compat.waiting import WAIT_S_MAX, eventually, eventually_async
from resp_server.net.client import Client
from resp_server.net.tls import Certificates, TlsFiles
from resp_server.protocol.request_parser import Request
from resp_server.serving import token_port
from resp_server.serving.token_port import UNAUTHENTICATED_MAX, TokenPort
from tests.builders import value_state, write_log

FLOOD = 1_500
# Connections that asyncio takes before it looks at those that it has: as many as may wait (the default of its servers).
TAKEN_IN_A_TURN = 100
BIG = 600
# What strangers may cost beside what is there without them. It was 650 MB.
STRANGERS_BYTES_MAX = 100 << 20
AUTH, PING = request("AUTH", CONTROL_TOKEN), request("PING")


@pytest.fixture(params=["registry", "server"])
def port_of_process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Run a registry, or a server; return the port where the token is asked for, and the process."""
    with ExitStack() as stack:
        if request.param == "server":
            write_log(tmp_path / "log", "job", [value_state("n")], [])
            server = stack.enter_context(sparkis_server(tmp_path / "store", tmp_path / "log"))
            yield server.control_port, server.process.pid
            return
        process = stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "resp_server.programs.registry",
                    "--port",
                    "0",
                    "--log",
                    str(tmp_path),
                    "--child",
                ],
                env=os.environ | {"SPARKIS_CONTROL_TOKEN": CONTROL_TOKEN},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert process.stdout is not None and process.stdin is not None
        yield json.loads(process.stdout.readline())["port"], process.pid
        process.stdin.close()
        process.wait(WAIT_S_MAX)


@contextmanager
def many_files() -> Iterator[None]:
    """Let this process have as many open files as the system allows, and a flood as large as that allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Flood:
    """Connections that send a little again and again, and come back when they are cut."""

    def __init__(self, port: int, count: int, data: bytes) -> None:
        self._address = ("127.0.0.1", port)
        self._data = data
        self._count = count
        self._is_over = threading.Event()
        self.has_come = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        selector = DefaultSelector()
        for _ in range(self._count):
            self._connect(selector)
        came = 0
        while not self._is_over.is_set():
            for key, _ in selector.select(0.1):
                client = key.fileobj
                assert isinstance(client, socket.socket)
                try:
                    client.send(self._data)
                    came += 1
                except OSError:
                    selector.unregister(client)
                    client.close()
                    self._connect(selector)
            if came >= self._count:
                self.has_come.set()
            self._is_over.wait(0.05)
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        selector.close()

    def _connect(self, selector: DefaultSelector) -> None:
        client = socket.socket()
        client.setblocking(False)
        with suppress(BlockingIOError):
            client.connect(self._address)
        selector.register(client, EVENT_WRITE)


def memory_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def call(port: int) -> None:
    """Get in, and be answered."""
    with Client("127.0.0.1", port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX) as client:
        assert client.call("NOTICE", "job", "0") == "OK"


def test_token_gets_in_through_many_that_send_byte_now_and_then(port_of_process: tuple[int, int]) -> None:
    port, pid = port_of_process
    call(port)
    before_bytes, before_files = memory_of(pid), len(os.listdir(f"/proc/{pid}/fd"))
    with many_files():
        flood = Flood(port, min(FLOOD, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500), b"*")
        try:
            assert flood.has_come.wait(WAIT_S_MAX)
            with Client("127.0.0.1", port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX) as inside:
                for _ in range(20):
                    call(port)
                    assert inside.call("NOTICE", "job", "0") == "OK"
            assert len(os.listdir(f"/proc/{pid}/fd")) < before_files + UNAUTHENTICATED_MAX + TAKEN_IN_A_TURN + 20
            assert memory_of(pid) - before_bytes < STRANGERS_BYTES_MAX
        finally:
            flood.stop()
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")), lambda files: files <= before_files)
    call(port)


def test_requests_without_token_take_little_memory(port_of_process: tuple[int, int]) -> None:
    port, pid = port_of_process
    call(port)
    before_bytes = memory_of(pid)
    strangers = []
    with many_files():
        for _ in range(BIG):
            stranger = socket.create_connection(("127.0.0.1", port), WAIT_S_MAX)
            with suppress(OSError):
                stranger.sendall(b"*2\r\n$4\r\nAUTH\r\n$1000000\r\n" + bytes(900_000))
            strangers.append(stranger)
        call(port)
        assert memory_of(pid) - before_bytes < STRANGERS_BYTES_MAX
        for stranger in strangers:
            stranger.close()


# -- in this process --------------------------------------------------------------------------------------------------


class Echo:
    """A peer that says how many words a request has, or raises."""

    def __init__(self) -> None:
        self.is_lost = False

    async def answer(self, request: Request) -> bytes:
        if request[0] == b"RAISE":
            raise ZeroDivisionError
        return b":%d\r\n" % len(request)

    def connection_ended(self) -> None:
        self.is_lost = True


def played(
    play: Callable[[TokenPort, int, list[Echo]], Any], peers_max: int = 10, certificates: Certificates | None = None
) -> None:
    """Play a scene at a port of this process."""

    async def run() -> None:
        peers: list[Echo] = []

        def make_connection(writer: asyncio.StreamWriter) -> Echo:
            peers.append(Echo())
            return peers[-1]

        port = TokenPort(
            "the test", CONTROL_TOKEN, make_connection, peers_max=peers_max, protocol=2, certificates=certificates
        )
        listener = socket.create_server(("127.0.0.1", 0))
        number = listener.getsockname()[1]
        port.start(listener)
        async with asyncio.timeout(WAIT_S_MAX):
            await play(port, number, peers)
        port.close()

    uvloop.run(run())


def test_time_to_authenticate_is_not_extended_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_port, "AUTH_S_MAX", 0.3)

    async def play(port: TokenPort, number: int, peers: list[Echo]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        ended = asyncio.create_task(reader.read())
        while not ended.done():  # a byte every now and then for as long as it is listened to
            writer.write(b" ")
            await asyncio.sleep(0.01)
        writer.close()
        assert port.counts == (0, 0)

    played(play)


def test_authenticated_client_stays_after_time_to_authenticate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_port, "AUTH_S_MAX", 0.2)

    async def play(port: TokenPort, number: int, peers: list[Echo]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(AUTH + PING)  # what comes with the token is answered as well
        assert await reader.readexactly(9) == b"+OK\r\n:1\r\n"
        stranger, other = await asyncio.open_connection("127.0.0.1", number)
        assert await stranger.read() == b""  # its time is over, which began later
        writer.write(PING + request("ECHO", "x" * 100_000))
        assert await reader.readexactly(8) == b":1\r\n:2\r\n"
        other.close()
        writer.close()
        await eventually_async(lambda: peers[0].is_lost)
        assert port.counts == (0, 0)

    played(play)


@pytest.mark.parametrize(
    "data", [PING, request("AUTH", "guessed"), request("AUTH"), b"*11\r\n", bytes(20_000), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_other_request_before_token_ends_connection(data: bytes) -> None:
    async def play(port: TokenPort, number: int, peers: list[Echo]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(data + AUTH)
        assert await reader.read() == b"-ERR AUTH with the test's token must be the first request\r\n"
        writer.close()
        assert not peers

    played(play)


def test_unauthenticated_connections_take_no_place_of_authenticated_ones() -> None:
    async def play(port: TokenPort, number: int, peers: list[Echo]) -> None:
        strangers = [await asyncio.open_connection("127.0.0.1", number) for _ in range(20)]
        inside = [await asyncio.open_connection("127.0.0.1", number) for _ in range(3)]
        for at, (reader, writer) in enumerate(inside):
            writer.write(AUTH)
            expected = b"+OK\r\n" if at < 2 else b"-ERR the test has reached its limit of connections\r\n"
            assert await reader.readexactly(len(expected)) == expected
        assert port.counts[1] == 2
        for _, writer in [*strangers, *inside]:
            writer.close()
        await eventually_async(lambda: port.counts, lambda counts: counts == (0, 0))

    played(play, peers_max=2)


def test_exception_of_request_is_its_error_reply() -> None:
    async def play(port: TokenPort, number: int, peers: list[Echo]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(AUTH + PING + request("RAISE") + PING)
        assert await reader.readexactly(9) == b"+OK\r\n:1\r\n"
        assert (await reader.readline()).startswith(b"-ERR internal error ")
        assert await reader.readexactly(4) == b":1\r\n"
        writer.close()

    played(play)


def test_unfinished_handshakes_keep_no_client_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token_port, "UNAUTHENTICATED_MAX", 32)
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    certificates = Certificates(TlsFiles(str(cert), str(key)))

    async def play(port: TokenPort, number: int, peers: list[Echo]) -> None:
        strangers = [await asyncio.open_connection("127.0.0.1", number) for _ in range(200)]
        for _, writer in strangers[::2]:
            writer.write(b"\x16\x03\x01")  # the beginning of a handshake
        reader, writer = await asyncio.open_connection("127.0.0.1", number, ssl=authority.context())
        writer.write(AUTH + PING)
        assert await reader.readexactly(9) == b"+OK\r\n:1\r\n"
        assert port.counts[0] <= 32
        writer.close()
        for _, each in strangers:
            each.close()
        await eventually_async(lambda: port.counts, lambda counts: counts == (0, 0))

    played(play, certificates=certificates)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="the system does not list the timers of connections")
def test_connections_that_are_silent_for_hours_have_keepalive(port_of_process: tuple[int, int]) -> None:
    port, _ = port_of_process

    def timer_of(client: socket.socket) -> int:
        """Return the kind of timer of the connection's other end: 2 is a keepalive."""
        ends = f":{port:04X}", f":{client.getsockname()[1]:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return next(int(row[5][:2], 16) for row in rows if (row[1][-5:], row[2][-5:]) == ends)

    with socket.create_connection(("127.0.0.1", port), WAIT_S_MAX) as client:
        client.sendall(AUTH)
        assert client.recv(100) == b"+OK\r\n"
        eventually(lambda: timer_of(client), lambda timer: timer == 2)  # at first that of the reply
