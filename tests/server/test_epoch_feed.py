"""STATE FOLLOW: an epoch is pushed before the first reply from it, and never within a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resp_server.cluster.topology import Topology
from state_backend.codec import packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import Store
from tests.builders import apply_epoch

STATES = [StateDescriptor("temp", key="k", value="v"), StateDescriptor("map", key="k", value="v", field="f")]
KEY = b"job:temp:a"
GET = b"*2\r\n$3\r\nGET\r\n$10\r\njob:temp:a\r\n"
HGETALL = b"*2\r\n$7\r\nHGETALL\r\n$9\r\njob:map:a\r\n"
FOLLOW = b"*2\r\n$5\r\nSTATE\r\n$6\r\nFOLLOW\r\n"
FIELDS = 1500  # three steps of a reply
EPOCHS = 30


def publish(store: Store, epoch: int, *, term: int = 1) -> None:
    text = b"%d" % epoch
    fields = packed_map.pack(
        (b"%d" % each, text) for each in range(FIELDS)
    )  # as one change: the memory store copies a map
    changes = [Change("temp", Op.PUT, KEY, value=text), Change("map", Op.PUT, b"job:map:a", value=fields)]
    apply_epoch(store, STATES, changes, epoch, term=term, clock_ms=epoch + 1)


def epoch_push(epoch: int, term: int = 1) -> bytes:
    return b">4\r\n$5\r\nepoch\r\n$3\r\njob\r\n:%d\r\n:%d\r\n" % (term, epoch)


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore("g1")
    publish(made, 4)
    return made


@pytest.fixture
def running(store: MemoryStore, serve: Callable[..., Any]) -> Any:
    return serve(store=store, states=STATES)


@pytest.mark.parametrize("greeting", [b"", b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n"], ids=["RESP2", "RESP3"])
def test_readable_epochs_follow_ok_of_follow(running: Any, greeting: bytes) -> None:
    peer = running.connect()
    if greeting:
        peer.send(greeting)
        assert peer.read(1) == b"%"
        peer.send(b"*1\r\n$4\r\nPING\r\n")
        while peer.read(1) != b"+":
            pass
        assert peer.read(6) == b"PONG\r\n"
    peer.expect_reply(FOLLOW + GET, b"+OK\r\n" + epoch_push(4) + b"$1\r\n4\r\n")


@pytest.mark.parametrize("asked, answer", [(GET, b"$1\r\n5\r\n"), (GET + GET, b"$1\r\n5\r\n$1\r\n5\r\n")])
def test_epoch_is_pushed_before_first_reply_from_it(running: Any, store: Any, asked: bytes, answer: bytes) -> None:
    peer, other = running.connect(), running.connect()
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(4))
    running.call(lambda: publish(store, 5))
    peer.expect_reply(asked, epoch_push(5) + answer)
    peer.expect_reply(asked, answer)
    other.expect_reply(asked, answer)


def test_epoch_is_pushed_to_idle_followers(running: Any, store: Any) -> None:
    peer = running.connect()
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(4))
    running.call(lambda: publish(store, 5, term=2))
    assert peer.read(len(epoch_push(5, 2))) == epoch_push(5, 2)


def test_unreadable_job_is_pushed(running: Any) -> None:
    peer = running.connect()
    running.call(lambda: running.server.context.keyspace.remove("job"))
    running.call(lambda: running.server.context.keyspace.refuse("job", "its log is damaged"))
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(-1, 0))


def test_job_that_is_no_longer_shown_is_pushed(running: Any) -> None:
    peer = running.connect()
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(4))
    running.call(lambda: running.server.context.keyspace.remove("job"))
    assert peer.read(len(epoch_push(-1, -1))) == epoch_push(-1, -1)


def test_topology_is_pushed_by_its_version_and_shown_as_json(running: Any) -> None:
    peer = running.connect()
    topology = Topology.of_json(
        {"version": 7, "nodes": [{"host": "127.0.0.1", "port": running.server.port, "slots": "0-16383"}]}
    )
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(4))
    peer.send(b"STATE TOPOLOGY\r\n")
    assert peer.read(len(b"-ERR This instance has cluster support disabled\r\n")).startswith(b"-ERR This instance")
    running.call(lambda: running.server.set_topology(topology, topology.nodes[0].id))
    expected = b">2\r\n$8\r\ntopology\r\n:7\r\n"
    assert peer.read(len(expected)) == expected
    text = json.dumps(topology.to_json()).encode()
    peer.expect_reply(b"STATE TOPOLOGY\r\n", b"$%d\r\n%b\r\n" % (len(text), text))


def test_reset_ends_feed_of_epochs(running: Any, store: Any) -> None:
    peer = running.connect()
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(4))
    peer.expect_reply(b"RESET\r\n", b"+RESET\r\n")
    running.call(lambda: publish(store, 5))
    peer.expect_reply(GET, b"$1\r\n5\r\n")
    peer.expect_reply(FOLLOW, b"+OK\r\n" + epoch_push(5))


def frames(file: Any) -> Iterator[Any]:
    """Iterate over what a server sends: numbers, texts, and lists whose first item is their mark."""
    while line := file.readline():
        mark, number = line[:1], line[1:-2]
        if mark == b"$":
            yield file.read(int(number) + 2)[:-2]
        elif mark in b"*>%":
            items = frames(file)
            count = int(number) * (2 if mark == b"%" else 1)
            yield [mark, *(next(items) for _ in range(count))]
        else:
            yield int(number) if mark == b":" else number


def test_replies_are_of_epoch_pushed_last_while_epochs_are_published(tmp_path: Path, serve: Callable[..., Any]) -> None:
    store = LmdbStore(tmp_path / "store", "g1")
    publish(store, 0)
    server = serve(store=store, states=STATES)

    def read(asked: bytes, replies: int) -> set[int]:
        peer = server.connect().socket
        found = frames(peer.makefile("rb"))
        peer.sendall(FOLLOW)
        reached, is_sliced = -1, HGETALL in asked
        seen: set[int] = set()
        while len(seen) < 3 or reached < EPOCHS - 1:
            peer.sendall(asked)
            missing, since = replies, reached
            while missing:
                frame = next(found)
                if isinstance(frame, list) and frame[0] == b">":
                    assert frame[1:4] == [b"epoch", b"job", 1]
                    assert frame[4] > reached
                    reached = frame[4]
                elif frame != b"OK":
                    missing -= 1
                    values = {int(each) for each in frame[2::2]} if isinstance(frame, list) else {int(frame)}
                    assert len(values) == 1
                    # A reply that is made in steps may be of an earlier epoch, but of one that was told before it.
                    assert all((since if is_sliced else reached) <= each <= reached for each in values)
                    assert not isinstance(frame, list) or len(frame) == 1 + 2 * FIELDS
                    seen |= values
        return seen

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, *asked) for asked in ((GET, 1), (GET * 7, 7), (GET + HGETALL + GET, 3))]
        for epoch in range(1, EPOCHS):
            publish(store, epoch)
        for reader in readers:
            assert len(reader.result()) >= 3
    store.close()
