"""Long values and large maps out of the real store: every command that can return them, a bounded piece at a time."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from resp_server.client.connection import TURN_BYTES_MAX
from resp_server.client.output import ClientOutput
from resp_server.protocol.replies import encode
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.store import as_bytes
from tests.builders import apply_epoch

NOW_MS = 1_700_000_000_000  # the clock of the servers of these tests
STATES = [
    StateDescriptor("v", key="k", value="v"),
    StateDescriptor("m", key="k", field="f", value="v"),
    StateDescriptor("l", key="k", value="v", kind="list"),
]
LENGTH = (3 << 20) + 17
LONG = (b"%07d " * (LENGTH // 8 + 1) % tuple(range(LENGTH // 8 + 1)))[:LENGTH]
MIDDLE = LONG[: 300 << 10]
FIELDS = {b"long": LONG, b"middle": MIDDLE, **{b"f%d" % number: b"%d" % number for number in range(3000)}}


def at(name: bytes) -> bytes:
    return b"job:" + name


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path, "g1")
    due_ms = NOW_MS - 1
    changes = [
        Change("v", Op.PUT, at(b"v:long"), None, LONG),
        Change("v", Op.PUT, at(b"v:middle"), None, MIDDLE),
        *(Change("v", Op.PUT, at(b"v:%d" % number), None, MIDDLE[:60_000]) for number in range(100)),
        *(Change("m", Op.PUT, at(b"m:1"), name, value) for name, value in FIELDS.items()),
        *(Change("m", Op.PUT, at(b"m:due"), b"%d" % number, b"", due_ms) for number in range(5000)),
        Change("m", Op.PUT, at(b"m:due"), b"left", b"x"),
        *(Change("l", Op.APPEND, at(b"l:1"), None, MIDDLE[:60_000]) for _ in range(100)),
    ]
    apply_epoch(store, STATES, changes, 0, clock_ms=due_ms - 1)
    yield store
    store.close()


@pytest.fixture
def running(store: LmdbStore, serve: Callable[..., Any]) -> Any:
    return serve(store, STATES)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each turn sent."""
    sizes: list[int] = []
    send = ClientOutput.send

    def noted(self: ClientOutput, out: Sequence[bytes]) -> None:
        sizes.append(sum(map(len, out)))
        send(self, out)

    monkeypatch.setattr(ClientOutput, "send", noted)
    return sizes


PART = LONG[-(2 << 20) :]
HUNDRED = [at(b"v:%d" % number) for number in range(100)]
CASES: list[tuple[tuple[bytes, ...], Any]] = [
    ((b"GET", at(b"v:long")), LONG),
    ((b"GET", at(b"v:middle")), MIDDLE),
    ((b"STRLEN", at(b"v:long")), LENGTH),
    ((b"GETRANGE", at(b"v:long"), b"65515", b"65530"), LONG[65515:65531]),
    ((b"GETRANGE", at(b"v:long"), b"-%d" % len(PART), b"-1"), PART),
    ((b"GETRANGE", at(b"v:long"), b"0", b"-1"), LONG),
    ((b"GETRANGE", at(b"v:long"), b"%d" % LENGTH, b"-1"), b""),
    ((b"SUBSTR", at(b"v:long"), b"1", b"-2"), LONG[1:-1]),
    ((b"MGET", at(b"v:long"), at(b"m:1"), at(b"v:middle"), at(b"none")), [LONG, None, MIDDLE, None]),
    ((b"MGET", *HUNDRED), [MIDDLE[:60_000]] * 100),
    ((b"MGET", *HUNDRED, *[at(b"none")] * 1000), [MIDDLE[:60_000]] * 100 + [None] * 1000),
    ((b"HGET", at(b"m:1"), b"long"), LONG),
    ((b"HGET", at(b"m:1"), b"middle"), MIDDLE),
    ((b"HSTRLEN", at(b"m:1"), b"long"), LENGTH),
    ((b"HEXISTS", at(b"m:1"), b"long"), 1),
    ((b"HMGET", at(b"m:1"), b"f1", b"long", b"none"), [b"1", LONG, None]),
    ((b"HMGET", at(b"m:1"), b"f1", b"middle"), [b"1", MIDDLE]),
    ((b"HLEN", at(b"m:1")), len(FIELDS)),
    ((b"HLEN", at(b"m:due")), 1),
    ((b"HGETALL", at(b"m:due")), {b"left": b"x"}),
    ((b"LRANGE", at(b"l:1"), b"0", b"-1"), [MIDDLE[:60_000]] * 100),
    ((b"TYPE", at(b"m:due")), "hash"),
]


@pytest.mark.parametrize(("request_words", "expected"), CASES)
def test_long_reply_is_whole_and_no_turn_sends_much_of_it(
    running: Any, turns: list[int], request_words: tuple[bytes, ...], expected: Any
) -> None:
    peer = running.connect()
    peer.expect_reply(encode(list(request_words), 2) + b"PING\r\n", encode(expected, 2) + b"+PONG\r\n")
    assert max(turns) <= TURN_BYTES_MAX + (1 << 20) + 100


@pytest.mark.parametrize("name", [b"HGETALL", b"HVALS", b"HKEYS"])
def test_all_of_map_with_long_values_is_sent(store: LmdbStore, running: Any, turns: list[int], name: bytes) -> None:
    with store.snapshot(NOW_MS) as snapshot:
        pairs = list(snapshot.map_pairs(at(b"m:1")))
    expected: Any = dict(pairs) if name == b"HGETALL" else [pair[name == b"HVALS"] for pair in pairs]
    running.connect().expect_reply(encode([name, at(b"m:1")], 2), encode(expected, 2))
    assert max(turns) <= TURN_BYTES_MAX + (1 << 20) + 100


def test_iteration_over_map_with_long_values_is_sent(store: LmdbStore, running: Any) -> None:
    peer = running.connect()
    cursor, found = 0, {}
    while True:
        with store.snapshot(NOW_MS) as snapshot:
            after, pairs = snapshot.scan_map(at(b"m:1"), cursor, 500)
            texts = [as_bytes(each) for pair in pairs for each in pair]
        request = [b"HSCAN", at(b"m:1"), b"%d" % cursor, b"COUNT", b"500"]
        peer.expect_reply(encode(request, 2), encode([b"%d" % after, texts], 2))
        found.update(zip(texts[::2], texts[1::2], strict=True))
        if not after:
            break
        cursor = after
    assert found == FIELDS


def test_long_value_is_read_at_one_epoch_while_others_are_committed(store: LmdbStore, running: Any) -> None:
    peer = running.connect()
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    peer.send(encode([b"GET", at(b"v:long")], 2))
    assert peer.read(10) == b"$%d\r\n" % LENGTH
    changes = [Change("v", Op.PUT, at(b"v:long"), None, b"-" * LENGTH)]
    for epoch in (1, 2, 3):
        running.call(lambda epoch=epoch: apply_epoch(store, STATES, changes, epoch))
        running.call(lambda: store.expire(1, 1000))
    assert peer.read(LENGTH + 2) == LONG + b"\r\n"
    peer.expect_reply(encode([b"GET", at(b"v:long")], 2), encode(b"-" * LENGTH, 2))
    assert not running.call(lambda: [each for each in running.server._connections.values() if each.reply.stream])
