"""A keyspace with one job, and a pipeline with clients; no sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.commands import command_table
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.replies import Sliced, SlicedEncoder
from resp_server.protocol.request_parser import Request, RequestParser
from resp_server.session.session import Session
from resp_server.settings.server import ServerConfig
from state_backend.codec import packed_map
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import EpochChanges

NOW_MS = 1_700_000_000_000
TABLE = command_table()
LARGE = 1500

STATES = [
    StateDescriptor("temp", key="sensor", value="temp", ttl=3600, columns={"sensor": "string", "temp": "int"}),
    StateDescriptor("stats", key="sensor", value=("low", "high")),
    StateDescriptor("visits", key="page", value="count", field="user"),
    StateDescriptor("news", key="topic", value="line", kind="list"),
]
CHANGES = [
    *(Change("temp", Op.PUT, b"job:temp:%d" % i, value=b"%d" % i) for i in range(20)),
    Change("temp", Op.PUT, b"job:temp:soon", value=b"hello", expire_at_ms=NOW_MS + 2500),
    Change("temp", Op.PUT, b"job:temp:gone", value=b"x", expire_at_ms=NOW_MS),
    Change("stats", Op.PUT, b"job:stats:a", value=packed_map.pack([(b"low", b"1"), (b"high", b"9")])),
    Change("visits", Op.PUT, b"job:visits:ttl", field=b"on", value=b"1", expire_at_ms=NOW_MS + 2500),
    Change("visits", Op.PUT, b"job:visits:ttl", field=b"off", value=b"1"),
    *(Change("news", Op.APPEND, b"job:news:a", value=each) for each in (b"x", b"y", b"x", b"z", b"x")),
    *(Change("news", Op.APPEND, b"job:news:long", value=b"%d" % (i % 700)) for i in range(LARGE)),
    *(Change("visits", Op.PUT, b"job:visits:/", field=b"u%d" % i, value=b"%d" % i) for i in range(LARGE)),
]


class Client:
    """Speaks to a pipeline as a connection does, without one."""

    def __init__(self, server: ServerContext) -> None:
        self.server = server
        self.pipeline = pipeline_of_stores(server)
        self.session = Session(7, "127.0.0.1:5000", "127.0.0.1:6379", server.users.default, NOW_MS)
        server.sessions[7] = self.session
        self.call = CommandContext(self.session, server)

    def send(self, *requests: list[bytes]) -> bytes:
        """Send requests in one buffer and return the replies."""
        waiting: list[Request] = list(requests)
        out: list[bytes] = []
        while (sliced := self.pipeline.answer(self.call, waiting, out)) is not None:
            out.append(self.drain(sliced))
        return b"".join(out)

    def send_buffer(self, *requests: list[bytes]) -> bytes:
        """Send a buffer, as to a connection without the compiled core."""
        data = b"".join(
            b"*%d\r\n" % len(request) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in request)
            for request in requests
        )
        return self.send(*map(list, RequestParser().feed(data)))

    def general(self, request: list[bytes]) -> bytes:
        """Answer a request by the general path."""
        reply = self.pipeline.reply_to(self.call, request)
        return self.drain(reply) if isinstance(reply, Sliced) else reply

    def drain(self, sliced: Sliced) -> bytes:
        """Take all steps of a reply at once."""
        encoder = SlicedEncoder(sliced, self.session.protocol)
        parts = []
        while not encoder.is_done:
            parts.append(encoder.step())
        encoder.close()
        return b"".join(parts)

    def ask(self, line: str) -> bytes:
        """Send one request as words and return its reply."""
        return self.send([word.encode() for word in line.split()])


@pytest.fixture(scope="session")
def store() -> MemoryStore:
    """The job's state, which no test changes."""
    made = MemoryStore("g1")
    runs = list(runs_of(CHANGES, [state.name for state in STATES]))
    made.apply(EpochChanges(4, 1, NOW_MS - 1000, runs), STATES)
    return made


@pytest.fixture
def keyspace(store: MemoryStore) -> Keyspace:
    found = Keyspace()
    job = Job("job", "g1", STATES, store, committed_epoch=6, committed_clock_ms=NOW_MS + 500, is_stale=False)
    job.state_bytes = {"temp": 440, "stats": 100, "visits": 30}
    job.recent_epochs = [(NOW_MS - 90_000, 5), (NOW_MS - 40_000, 10), (NOW_MS - 1_000, 20)]
    found.put(job)
    return found


@pytest.fixture
def connect(keyspace: Keyspace) -> Callable[..., Client]:
    """Make a client of a server with these settings."""

    def made(**settings: object) -> Client:
        config = ServerConfig(**settings)  # type: ignore[arg-type]
        return Client(ServerContext(config, keyspace, TABLE, clock=lambda: NOW_MS))

    return made


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    return connect()
