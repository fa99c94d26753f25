"""Client-side caching: the invalidations of tracking clients, and their place among the replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.wire import requests
from compat.waiting import eventually
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job
from tests.builders import apply_epoch
from tests.server.socket_requests import bulk

pytestmark = pytest.mark.pure

STATES = [
    StateDescriptor("temp", key="k", value="v"),
    StateDescriptor("map", key="k", value="v", field="f"),
]
FIELDS = 3_000
OK, PONG, QUEUED = b"+OK\r\n", b"+PONG\r\n", b"+QUEUED\r\n"


def lines(*requests: str) -> bytes:
    return b"".join(b"%b\r\n" % each.encode() for each in requests)


def arrays(*texts: str) -> bytes:
    return requests([[word.encode() for word in text.split()] for text in texts])


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
        server.call(lambda: server.server.context.keyspace.put(job))

    def publish(self, *keys: str, size: int = 0, expire_at_ms: int | None = None) -> None:
        """Publish an epoch that changes these keys, and all fields of a map."""
        self.epoch += 1
        value = b"%d" % self.epoch
        changes = [
            Change("temp", Op.PUT, f"{self._name}:temp:{each}".encode(), value=value, expire_at_ms=expire_at_ms)
            for each in keys
        ]
        changes += [Change("map", Op.PUT, f"{self._name}:map:m".encode(), b"f%d" % each, value) for each in range(size)]
        apply_epoch(self.store, STATES, changes, self.epoch, clock_ms=self.epoch + 1)


@pytest.fixture
def server(serve: Callable[..., Any]) -> Any:
    return serve()


@pytest.fixture
def epochs(server: Any, tmp_path: Path) -> Iterator[Epochs]:
    made = Epochs(server, tmp_path / "job")
    yield made
    server.call(server.server.context.close)
    made.store.close()


@pytest.fixture
def client(server: Any, epochs: Epochs) -> Any:
    """A client that speaks RESP3."""
    return connect(server)


def connect(server: Any) -> Any:
    peer = server.connect()
    peer.send(lines("HELLO 3", "ECHO end"))
    peer.read_until(bulk(b"end"))
    return peer


PATHS = pytest.mark.parametrize("sent", [lines, arrays], ids=["general path (inline)", "compiled core (arrays)"])


@PATHS
def test_read_key_is_invalidated_before_new_value(client: Any, epochs: Epochs, sent: Callable[..., bytes]) -> None:
    client.expect_reply(lines("CLIENT TRACKING ON"), OK)
    client.expect_reply(sent("GET job:temp:a"), bulk(b"0"))
    epochs.publish("a", "b")
    client.expect_reply(sent("GET job:temp:b"), invalid("job:temp:a") + bulk(b"1"))


@PATHS
def test_key_is_invalidated_once_for_each_read(client: Any, epochs: Epochs, sent: Callable[..., bytes]) -> None:
    client.expect_reply(lines("CLIENT TRACKING ON"), OK)
    client.expect_reply(sent("GET job:temp:a"), bulk(b"0"))
    epochs.publish("a")
    client.expect(invalid("job:temp:a"))
    epochs.publish("a")
    client.expect_reply(sent("GET job:temp:b"), bulk(b"0"))


@PATHS
def test_keys_of_one_epoch_are_invalidated_by_slot(client: Any, epochs: Epochs, sent: Callable[..., bytes]) -> None:
    client.expect_reply(lines("CLIENT TRACKING ON"), OK)
    client.expect_reply(sent("MGET job:temp:a job:temp:b", "GET job:temp:c"), b"*2\r\n" + bulk(b"0") * 2 + bulk(b"0"))
    epochs.publish("a", "b", "c")
    client.expect(invalid("job:temp:a") + invalid("job:temp:c") + invalid("job:temp:b"))


def test_idle_client_is_invalidated(client: Any, epochs: Epochs) -> None:
    client.expect_reply(
        lines("CLIENT TRACKING ON", "MGET job:temp:a job:temp:missing"), OK + b"*2\r\n" + bulk(b"0") + b"_\r\n"
    )
    epochs.publish("missing")
    client.expect(invalid("job:temp:missing"))
    epochs.publish("a", "missing")
    client.expect(invalid("job:temp:a"))


def test_invalidations_come_before_or_after_transaction(client: Any, epochs: Epochs) -> None:
    client.expect_reply(lines("CLIENT TRACKING ON", "GET job:temp:a", "GET job:temp:b"), OK + bulk(b"0") * 2)
    epochs.publish("a")
    client.send(lines("MULTI", "GET job:temp:a", "GET job:temp:b", "EXEC"))
    queued, invalidation, done = OK + QUEUED * 2, invalid("job:temp:a"), b"*2\r\n" + bulk(b"1") + bulk(b"0")
    found = client.read(len(queued + invalidation + done))
    assert found in (queued + invalidation + done, invalidation + queued + done)  # the latter if this process was slow
    epochs.publish("b")
    client.expect(invalid("job:temp:b"))


def test_invalidations_come_before_or_after_reply_in_steps_never_within(
    client: Any, epochs: Epochs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resp_server.client.connection.TURN_NS_MAX", 0)
    client.expect_reply(lines("CLIENT TRACKING ON", "GET job:temp:a"), OK + bulk(b"0"))
    epochs.publish("a")
    client.send(lines("HGETALL job:map:m"))
    client.expect(invalid("job:temp:a") + b"%%%d\r\n" % FIELDS)
    epochs.publish("b", size=FIELDS)
    pairs = client.read(sum(len(bulk(b"f%d" % each)) + len(bulk(b"0")) for each in range(FIELDS)))
    assert pairs.count(b"\r\n$1\r\n0\r\n") == FIELDS
    assert b"invalidate" not in pairs
    client.expect(invalid("job:map:m"))


@pytest.mark.parametrize(("count", "keys"), [(1, 6_000), (10, 1)], ids=["an epoch is too large", "many epochs"])
def test_all_keys_are_invalidated_when_changed_ones_are_unknown(
    count: int, keys: int, server: Any, client: Any, epochs: Epochs
) -> None:
    client.expect_reply(lines("CLIENT TRACKING ON", "GET job:temp:a"), OK + bulk(b"0"))

    def publish() -> None:
        for _ in range(count):
            epochs.publish(*map(str, range(keys)))

    server.call(publish)  # between two looks
    client.expect(invalid())
    client.expect_reply(lines("GET job:temp:a"), bulk(b"0"))
    epochs.publish("a")
    client.expect(invalid("job:temp:a"))


def test_all_keys_are_invalidated_when_job_comes_or_goes(
    server: Any, client: Any, epochs: Epochs, tmp_path: Path
) -> None:
    client.expect_reply(lines("CLIENT TRACKING ON", "GET job:temp:a"), OK + bulk(b"0"))
    other = Epochs(server, tmp_path / "other", "other")
    client.expect(invalid())
    client.expect_reply(lines("GET job:temp:a"), bulk(b"0"))
    server.call(lambda: server.server.context.keyspace.remove("other"))
    client.expect(invalid())
    other.store.close()


def test_full_tracking_table_evicts_oldest_key_and_invalidates_it(client: Any, epochs: Epochs) -> None:
    client.expect_reply(lines("CONFIG SET tracking-table-max-keys 2", "CLIENT TRACKING ON"), OK * 2)
    client.expect_reply(
        lines("GET job:temp:a", "GET job:temp:b", "GET job:temp:c", "PING"),
        bulk(b"0") * 3 + invalid("job:temp:a") + PONG,
    )
    client.expect_reply(
        lines("MGET job:temp:a job:temp:b job:temp:c", "PING"),
        b"*3\r\n" + bulk(b"0") * 3 + invalid("job:temp:b") + PONG,
    )
    client.expect_reply(
        lines("CONFIG GET tracking-table-max-keys"), b"%1\r\n" + bulk(b"tracking-table-max-keys") + bulk(b"2")
    )
    epochs.publish("a", "b")
    client.expect(invalid("job:temp:a"))


def test_expired_key_is_invalidated_once_its_expiry_is_applied(server: Any, client: Any, epochs: Epochs) -> None:
    epochs.publish("soon", expire_at_ms=1)
    client.expect_reply(lines("CLIENT TRACKING ON", "EXISTS job:temp:soon"), OK + b":0\r\n")
    server.call(lambda: epochs.store.expire(2, 100))
    client.expect(invalid("job:temp:soon"))


def test_tracked_keys_are_counted_and_forgotten_with_client(server: Any, client: Any, epochs: Epochs) -> None:
    tracking = server.server.context.tracking
    client.expect_reply(lines("CLIENT TRACKING ON", "MGET job:temp:a job:temp:b"), OK + b"*2\r\n" + bulk(b"0") * 2)
    other = connect(server)
    other.expect_reply(lines("CLIENT TRACKING ON BCAST PREFIX x PREFIX y", "INFO clients"), OK)
    assert (len(tracking.clients), tracking.keys, tracking.items, tracking.prefixes) == (2, 2, 2, 2)
    client.expect_reply(lines("RESET"), b"+RESET\r\n")
    other.socket.close()
    eventually(lambda: not server.call(lambda: tracking.clients))
    assert (tracking.keys, tracking.items, tracking.prefixes, tracking.is_idle) == (0, 0, 0, True)


def test_tracking_clients_that_do_not_read_delay_no_client(server: Any, epochs: Epochs) -> None:
    """All that is owed is bounded, also for clients that do not listen; others are answered between."""
    deaf = [connect(server) for _ in range(40)]
    for each in deaf:
        each.send(lines("CLIENT TRACKING ON", "MGET " + " ".join(f"job:temp:{key}" for key in range(300))))
    reader = server.connect()
    for turn in range(12):
        epochs.publish(*map(str, range(300 if turn % 3 else 6_000)))
        reader.expect_reply(lines("GET job:temp:a"), b"$1\r\n0\r\n")
    tracking = server.server.context.tracking
    pending = server.call(
        lambda: [sum(each.bytes for each in (*client.pending, *client.resend)) for client in tracking.clients]
    )
    assert len(pending) == len(deaf)
    assert max(pending) <= 2 << 20
    assert tracking.keys <= 300


def test_invalidations_are_limited_to_readable_keys(server: Any, client: Any, epochs: Epochs) -> None:
    client.expect_reply(lines("ACL SETUSER tenant on nopass ~job:temp:a* +@all", "CLIENT TRACKING ON BCAST"), OK * 2)
    tenant = connect(server)
    tenant.expect_reply(lines("AUTH tenant x", "CLIENT TRACKING ON BCAST PREFIX job:"), OK * 2)
    epochs.publish("a", "ab", "b")
    client.expect(invalid("job:temp:a", "job:temp:ab", "job:temp:b"))
    tenant.expect(invalid("job:temp:a", "job:temp:ab"))
    epochs.publish("b")
    client.expect(invalid("job:temp:b"))
    tenant.expect_reply(lines("PING"), PONG)


def test_tracking_table_is_empty_after_last_client(server: Any, epochs: Epochs) -> None:
    tracking = server.server.context.tracking
    peer = connect(server)
    peer.expect_reply(lines("CLIENT TRACKING ON", "GET job:temp:a"), OK + bulk(b"0"))
    assert server.call(lambda: tracking.keys) == 1
    peer.socket.close()
    eventually(lambda: server.call(lambda: not tracking.clients and not tracking.is_freeing))
    assert server.call(lambda: (tracking.keys, tracking.is_freeing)) == (0, False)
