"""Many changes at once are notified in batches: reads continue meanwhile, and each queue has a limit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resp_server.settings.server import OUTPUT_LIMITS
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.key_events import EVENTS_BYTES_MAX, KeyEvent, pack, unpack
from state_backend.store.keyspace import Job
from tests.builders import apply_epoch

STATES = [StateDescriptor("v", key="k", value="v")]
KEYS = 8_000
PAUSE_BYTES = 32 << 10
PSUBSCRIBE = b"*2\r\n$10\r\nPSUBSCRIBE\r\n$16\r\n__keyspace@0__:*\r\n"
SUBSCRIBED = b"*3\r\n$10\r\npsubscribe\r\n$16\r\n__keyspace@0__:*\r\n:1\r\n"
GET = b"*2\r\n$3\r\nGET\r\n$9\r\njob:v:000\r\n"


def message(key: bytes, event: bytes = b"set") -> bytes:
    channel = b"__keyspace@0__:" + key
    parts = b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(channel), channel, len(event), event)
    return b"*4\r\n$8\r\npmessage\r\n$16\r\n__keyspace@0__:*\r\n" + parts


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    made = LmdbStore(tmp_path / "store", "g1")
    made.records_events = True
    made.event_batch_bytes = 1 << 10
    yield made


@pytest.fixture
def running(store: LmdbStore, serve: Callable[..., Any]) -> Any:
    return serve(
        store=store,
        states=STATES,
        notify_keyspace_events="K$",
        output_pause_bytes=PAUSE_BYTES,
        client_output_buffer_limit=OUTPUT_LIMITS | {"pubsub": (1 << 20, 8 << 20, 60)},
    )


def publish(store: LmdbStore, epoch: int, count: int, job: str = "job") -> None:
    keys = [b"%b:v:%03d" % (job.encode(), each) for each in range(count)]
    changes = [Change("v", Op.PUT, key, value=b"%d" % epoch) for key in keys]
    apply_epoch(store, STATES, changes, epoch, clock_ms=epoch + 1)


def test_reads_are_answered_between_chunks_of_flood(running: Any, store: LmdbStore) -> None:
    publish(store, 0, 1)
    listener, reader = running.connect(), running.connect()
    listener.expect_reply(PSUBSCRIBE, SUBSCRIBED)
    running.call(lambda: publish(store, 1, KEYS))
    received, answered, most_waiting = b"", 0, 0
    size = sum(len(message(b"job:v:%03d" % each)) for each in range(KEYS))
    while len(received) < size:
        received += listener.read(min(64 << 10, size - len(received)))
        most_waiting = max(most_waiting, running.call(lambda: running.server.output_bytes(1)))
        reader.expect_reply(GET, b"$1\r\n1\r\n")
        answered += 1
    assert answered > 5
    assert most_waiting < PAUSE_BYTES + (256 << 10)  # a slice of messages may come on top of what makes it pause
    assert sorted(received.split(b"*4\r\n$8\r\npmessage")[1:]) == sorted(
        message(b"job:v:%03d" % each).removeprefix(b"*4\r\n$8\r\npmessage") for each in range(KEYS)
    )


def test_unread_subscriber_is_cut_and_others_get_all(running: Any, store: LmdbStore) -> None:
    publish(store, 0, 1)
    stuck, listener = running.connect(), running.connect()
    stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for each in (stuck, listener):
        each.expect_reply(PSUBSCRIBE, SUBSCRIBED)
    waiting = running.server.output_bytes
    size = sum(len(message(b"job:v:%03d" % each)) for each in range(KEYS))
    epoch = 0
    while 1 in running.server.context.sessions:  # the system takes some megabytes for it first
        epoch += 1
        assert epoch < 50
        running.call(partial(publish, store, epoch, KEYS))
        assert len(listener.read(size)) == size
        assert running.call(lambda: waiting(1)) <= (1 << 20) + (256 << 10)
    assert 2 in running.server.context.sessions


def test_subscriber_behind_kept_events_is_disconnected(running: Any, store: LmdbStore) -> None:
    store.events_bytes_max = 8 << 10
    publish(store, 0, 1)
    listener, other = running.connect(), running.connect()
    listener.expect_reply(PSUBSCRIBE, SUBSCRIBED)
    other.expect_reply(b"*2\r\n$9\r\nSUBSCRIBE\r\n$1\r\nx\r\n", b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n")
    running.call(lambda: publish(store, 1, KEYS))  # in one transaction, of which the store keeps the end
    listener.expect_close()
    other.expect_reply(b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$4\r\npong\r\n$0\r\n\r\n")


def test_removed_job_does_not_stop_notifications_of_others(running: Any, store: LmdbStore, tmp_path: Path) -> None:
    other = LmdbStore(tmp_path / "other", "g1")
    other.records_events = True
    publish(store, 0, 1)
    publish(other, 0, 1, "other")
    server = running.server.context
    running.call(lambda: server.keyspace.put(Job("other", "g1", STATES, other)))
    listener = running.connect()
    listener.expect_reply(PSUBSCRIBE, SUBSCRIBED)
    tell_batch = server.notifications._publish_batch

    async def received(batch: Any) -> None:
        server.keyspace.remove("job")
        server.renew_all()  # as any request does
        await tell_batch(batch)

    server.notifications._publish_batch = received
    running.call(lambda: publish(store, 1, KEYS))  # in many batches, of which one is told
    running.call(lambda: publish(other, 1, 1, "other"))
    listener.read_until(message(b"other:v:000"))


def test_kept_events_are_bounded_and_removed_without_subscribers(store: LmdbStore) -> None:
    store.events_bytes_max = 16 << 10
    for epoch in range(5):
        publish(store, epoch, 1_000)
        with store.snapshot(0) as snapshot:
            kept = snapshot.stored_event_batches()
            assert kept is not None
            batches = [snapshot.events(serial) for serial in range(kept.first, kept.next)]
            assert None not in batches
            assert kept.first == 0 or snapshot.events(kept.first - 1) is None
            assert kept.bytes <= 16 << 10
            assert batches[-1].epoch == epoch  # type: ignore[union-attr]
    store.records_events = False
    publish(store, 5, 10)
    steps = 0
    while not store.delete_events(3):
        steps += 1
    assert steps > 2
    with store.snapshot(0) as snapshot:
        assert snapshot.stored_event_batches() is None
        assert snapshot.events(kept.next - 1) is None


def test_chunk_reads_back_as_it_was_packed() -> None:
    events = [(b"", bytes((KeyEvent.NEW, KeyEvent.SET))), (b"a" * 300, bytes((KeyEvent.DELETED,))), (b"\x00\xff", b"")]
    keys, whats = zip(*events, strict=True)
    batch = unpack(pack(7, 2, keys, whats))
    assert (batch.epoch, batch.term, batch.events) == (7, 2, events)
    assert unpack(pack(0, 0, [], [])).events == []
    assert EVENTS_BYTES_MAX > 1 << 20
