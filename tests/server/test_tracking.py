"""Client-side caching: what clients that track are told, and where it stands among the replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from state_backend.descriptor import StateDescriptor
from state_backend.keyspace import Job
from state_backend.lmdb_store import LmdbStore
from state_backend.records import Change, Op, runs_of
from state_backend.store import EpochChanges

STATES = [
    StateDescriptor("temp", key="k", value="v"),
    StateDescriptor("map", key="k", value="v", field="f"),
]
FIELDS = 3_000
OK, PONG, QUEUED = b"+OK\r\n", b"+PONG\r\n", b"+QUEUED\r\n"


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def lines(*requests: str) -> bytes:
    return b"".join(b"%b\r\n" % each.encode() for each in requests)


def invalid(*keys: str) -> bytes:
    """The frame in which RESP3 tells that keys are invalid; without keys, all are."""
    head = b">2\r\n$10\r\ninvalidate\r\n"
    return head + (b"*%d\r\n" % len(keys) + b"".join(bulk(key.encode()) for key in keys) if keys else b"_\r\n")


class Epochs:
    """A job whose values say which epoch they are of."""

    def __init__(self, server: Any, path: Path, name: str = "job") -> None:
        self._server, self._name = server, name
        self.store = LmdbStore(path, "g2")
        self.epoch = -1
        self.publish("a", "b", "c", size=FIELDS)
        job = Job(name, "g2", STATES, self.store)
        server.call(lambda: server.server.instance.keyspace.put(job))

    def publish(self, *keys: str, size: int = 0, expire_at_ms: int | None = None) -> None:
        """Publish an epoch that changes these keys, and all fields of a map."""
        self.epoch += 1
        value = b"%d" % self.epoch
        changes = [
            Change("temp", Op.PUT, f"{self._name}:temp:{each}".encode(), value=value, expire_at_ms=expire_at_ms)
            for each in keys
        ]
        changes += [Change("map", Op.PUT, f"{self._name}:map:m".encode(), b"f%d" % each, value) for each in range(size)]
        runs = list(runs_of(changes, [state.name for state in STATES]))
        self.store.apply(EpochChanges(self.epoch, 1, self.epoch + 1, runs), STATES)


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def epochs(server: Any, tmp_path: Path) -> Iterator[Epochs]:
    made = Epochs(server, tmp_path / "job")
    yield made
    server.call(server.server.instance.close)
    made.store.close()


@pytest.fixture
def client(server: Any, epochs: Epochs) -> Any:
    """A client that speaks RESP3."""
    return connect(server)


def connect(server: Any) -> Any:
    peer = server.connect()
    peer.send(lines("HELLO 3"))
    while peer.read(1) != b"%":
        pass
    peer.send(lines("ECHO end"))
    text = b""
    while not text.endswith(bulk(b"end")):
        text += peer.read(1)
    return peer


def test_a_key_that_was_read_is_told_once_and_before_its_new_value(client: Any, epochs: Epochs) -> None:
    client.answers(lines("CLIENT TRACKING ON", "GET job:temp:a"), OK + bulk(b"0"))
    epochs.publish("a", "b")
    client.answers(lines("GET job:temp:b"), invalid("job:temp:a") + bulk(b"1"))
    epochs.publish("a")
    client.answers(lines("GET job:temp:b"), bulk(b"1"))


def test_who_asks_nothing_is_told_too(client: Any, epochs: Epochs) -> None:
    client.answers(
        lines("CLIENT TRACKING ON", "MGET job:temp:a job:temp:missing"), OK + b"*2\r\n" + bulk(b"0") + b"_\r\n"
    )
    epochs.publish("missing")
    client.answers(b"", invalid("job:temp:missing"))
    epochs.publish("a", "missing")
    client.answers(b"", invalid("job:temp:a"))
