"""A server on a free port, whose event loop runs in a thread of its own; and sockets to it."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from compat.conformance import servers
from compat.conformance.certificates import Authority
from compat.conformance.wire import Connection, NotAReplyError, reply_at, request
from compat.waiting import WAIT_S_MAX, eventually
from resp_server import native
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.codec import packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import Store
from tests.builders import apply_epoch, put_value, value_state, write_log
from tests.server import socket_requests
from tests.server.commands import Command, Start
from tests.server.overlay import Overlay
from tests.server.redis_cluster import RedisCluster

NOW_MS = 1_700_000_000_000
KEYS = 20_000
LARGE_BYTES = 1 << 20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has epoll")
OWN_SOCKETS = pytest.param("own", marks=[pytest.mark.compiled, on_linux])

STATES = [
    StateDescriptor("temp", key="sensor", value="temp"),
    StateDescriptor("stats", key="sensor", value=("low", "high")),
    StateDescriptor("visits", key="page", value="count", field="user"),
]
CHANGES = [
    *(Change("temp", Op.PUT, b"job:temp:%d" % i, value=b"%d" % i) for i in range(KEYS)),
    Change("temp", Op.PUT, b"job:temp:large", value=b"x" * LARGE_BYTES),
    Change("stats", Op.PUT, b"job:stats:a", value=packed_map.pack([(b"low", b"1"), (b"high", b"9")])),
    Change("visits", Op.PUT, b"job:visits:/", value=packed_map.pack((b"u%d" % i, b"%d" % i) for i in range(5000))),
]


class Peer:
    """A client that sends bytes and reads bytes."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port), WAIT_S_MAX)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        """Read so many bytes, or up to the end."""
        data = b""
        while len(data) < size and (some := self.socket.recv(min(1 << 20, size - len(data)))):
            data += some
        return data

    def read_all(self) -> bytes:
        """Read until the server closes."""
        return self.read(1 << 40)

    def read_until(self, end: bytes) -> bytes:
        """Read until the input ends with these bytes."""
        data = b""
        while not data.endswith(end):
            some = self.socket.recv(1 << 16)
            assert some, f"the server closed after {data[-100:]!r}"
            data += some
        return data

    def expect_reply(self, data: bytes, expected: bytes) -> None:
        """Send requests and compare the replies."""
        self.send(data)
        self.expect(expected)

    def expect(self, expected: bytes) -> None:
        """Send nothing, and compare what the server sends: pushes, or replies to requests of before."""
        assert self.read(len(expected)) == expected

    def reply(self) -> Any:
        """Read the next reply; it is the last one that is pending."""
        data = b""
        while True:
            some = self.socket.recv(1 << 16)
            assert some, f"the server closed after {data[-100:]!r}"
            data += some
            with suppress(NotAReplyError):
                return reply_at(data, 0)[0].plain

    def ask(self, *words: bytes | str | int) -> Any:
        """Send one request and return its reply."""
        self.send(request(*words))
        return self.reply()

    def read_until_cut(self) -> bytes:
        """Read until the server closes with a reset, because it has not read all, or without one."""
        data = b""
        with suppress(ConnectionResetError):
            while some := self.socket.recv(1 << 20):
                data += some
        return data

    def expect_close(self) -> None:
        """Wait until the server closes, which sends nothing before."""
        assert self.read_all() == b""


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(WAIT_S_MAX)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop's thread, between its turns."""

        async def called() -> Any:
            return function()

        return self.run(called())

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Running(LoopThread):
    """A server and its loop."""

    def __init__(
        self,
        config: ServerConfig,
        keyspace: Keyspace,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> None:
        super().__init__(new_loop)
        self.server = Server(keyspace, config, pipeline_of_stores, clock=lambda: NOW_MS)
        self.run(self.server.start())
        self.peers: list[Peer] = []

    def connect(self, host: str = "127.0.0.1") -> Peer:
        self.peers.append(Peer(self.server.port, host))
        return self.peers[-1]

    def stop(self) -> None:
        for peer in self.peers:
            peer.socket.close()
        self.run(self.server.stop())
        super().stop()


class OtherWorkers:
    """Stands in for the other processes of a server: a test answers the server's queries to them."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._callbacks: list[Callable[[list[Any]], None]] = []
        running.call(lambda: setattr(running.server.context, "workers", self))

    def query(self, name: str, argument: Any, then: Callable[[list[Any]], None]) -> None:
        self._callbacks.append(then)

    def wait_for_queries(self, count: int = 1) -> None:
        """Wait until so many queries have no answer."""
        eventually(lambda: self._running.call(lambda: len(self._callbacks)), lambda found: found >= count)

    def answer(self, *answers: Any) -> None:
        """Answer the first query with the answers of these workers."""
        self.wait_for_queries()
        self._running.call(lambda: self._callbacks.pop(0)(list(answers)))


@pytest.fixture(params=[OWN_SOCKETS, "asyncio"])
def kind_of_sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have this process's servers use the core's own epoll, or asyncio's sockets, as without the core."""
    if request.param == "asyncio":
        monkeypatch.setattr(native, "sockets", None)
    return str(request.param)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start commands, which end with the test."""
    running: list[Command] = []

    def started(*arguments: object) -> Command:
        running.append(Command(*arguments))
        return running[-1]

    yield started
    for each in reversed(running):
        each.end()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of one job with one key."""
    write_log(tmp_path / "log", "job", [value_state("s")], [put_value("s", b"job:s:a", b"1")])
    return tmp_path / "log"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def store() -> MemoryStore:
    made = MemoryStore("g1")
    apply_epoch(made, STATES, CHANGES, 4, clock_ms=NOW_MS)
    return made


@pytest.fixture(scope="module")
def lmdb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LmdbStore]:
    """A store on disk with the values that `socket_requests` asks for."""
    store = LmdbStore(tmp_path_factory.mktemp("store"), "g1", map_bytes_max=1 << 28)
    apply_epoch(store, socket_requests.STATES, socket_requests.CHANGES, 4, clock_ms=NOW_MS)
    yield store
    store.close()


@pytest.fixture
def serve(store: MemoryStore) -> Iterator[Callable[..., Running]]:
    """Start a server with these settings, which ends with the test; the job's store and states may be given."""
    running: list[Running] = []

    def started(store: Store = store, states: Sequence[StateDescriptor] = STATES, **settings: Any) -> Running:
        keyspace = Keyspace()
        keyspace.put(Job("job", "g1", states, store, committed_epoch=4, committed_clock_ms=NOW_MS, is_stale=False))
        config = ServerConfig(**{"port": 0, "hosts": ("127.0.0.1",), **settings})
        running.append(Running(config, keyspace))
        return running[-1]

    yield started
    for each in running:
        each.stop()


@pytest.fixture(scope="module")
def overlay(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    """A proxy with an upstream. A module may have OPTIONS for it, and RULES."""
    options, rules = getattr(request.module, "OPTIONS", ()), getattr(request.module, "RULES", None)
    with ExitStack() as stack:
        yield Overlay(tmp_path_factory.mktemp("overlay"), stack, *options, rules=rules)


@pytest.fixture
def direct(overlay: Overlay) -> Iterator[Connection]:
    """A connection to the upstream of the module's `overlay`, which is emptied first, and notifies of nothing."""
    with overlay.upstream.connect() as connection:
        connection.call("CONFIG", "SET", "notify-keyspace-events", "")
        connection.call("FLUSHALL")
        yield connection


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with ExitStack() as stack:
        yield RedisCluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture(scope="module")
def proxy(overlay: Overlay, cluster: RedisCluster) -> servers.Running:
    """A proxy before the module's `cluster`."""
    return overlay.start_before(cluster)


@pytest.fixture
def client(overlay: Overlay) -> Iterator[Connection]:
    """A client of the module's `overlay`."""
    with overlay.proxy.connect() as connection:
        yield connection
