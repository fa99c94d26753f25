"""Replies of the compiled core about sorted sets, small ones and trees of several levels, follow from their members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from compat.conformance.wire import requests
from compat.examples import examples
from compat.fuzz.subject import RecordingTransport
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.client.connection import Connection
from resp_server.protocol.doubles import double_text
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.codec import packed_sorted
from state_backend.codec.packed_sorted import score_text
from state_backend.lmdb import ranks as lmdb_ranks
from state_backend.lmdb.store import DATA, LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from state_backend.store.keyspace import Job, Keyspace
from tests.builders import apply_epoch
from tests.server.socket_requests import bulk

pytestmark = pytest.mark.compiled

STATE, KEY, NOW_MS = StateDescriptor("z", key="k", member="m", score="s"), b"j:z:a", 1_700_000_000_000
# So that a few members make a tree of several levels.
SMALL_TREE: Any = {"NODE_ENTRIES_MAX": 6, "NODE_BYTES_MAX": 300, "CHILDREN_MIN": 2}

# Where the text of a number takes another form, and what is at the ends.
EDGES = [0.0, -0.0, float("inf"), float("-inf"), 1.0, -1.0, 0.5, 0.001, 0.0009, 9999.5, 1e4, 10000.5, 2.0**53, 2.0**62]
EDGES += [2.0**63, -(2.0**63), 1e22, 5e-324, 1.7976931348623157e308, 0.1, 1 / 3]
scores = st.one_of(st.sampled_from(EDGES), st.floats(allow_nan=False))
members = st.one_of(
    st.binary(max_size=2), st.sampled_from([b"", b"\r\n", b"$1\r\na\r\n", b"long" * 60, b"long" * 60 + b"er"])
)
places = st.one_of(st.integers(-90, 90), st.sampled_from([10**17, -(10**17)]))


@contextmanager
def small_trees() -> Iterator[None]:
    with patch.multiple(lmdb_ranks, **SMALL_TREE), patch.object(packed_sorted, "MEMBERS_MAX", 8):
        yield


def publish(store: LmdbStore, changes: list[Change]) -> None:
    apply_epoch(store, [STATE], changes, clock_ms=NOW_MS)


def with_server(store: LmdbStore, talk: Callable[[Server, Connection, RecordingTransport], None]) -> None:
    """Let a client talk to a server of a store, whose caches are empty."""

    async def run() -> None:
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", [STATE], store))
        server = Server(keyspace, ServerConfig(), pipeline_of_stores, clock=lambda: NOW_MS)
        wire, connection = RecordingTransport(), Connection(server)
        connection.connection_made(wire)  # type: ignore[arg-type]
        talk(server, connection, wire)
        server.context.close()

    asyncio.run(run())


class Expected:
    """The expected replies about a sorted set with these members."""

    def __init__(self, held: dict[bytes, float], protocol: int) -> None:
        self.held, self.is_resp3 = held, protocol == 3
        self.ranking = sorted((score + 0.0, member) for member, score in held.items())
        self.ranks = {member: rank for rank, (_, member) in enumerate(self.ranking)}

    def score(self, number: float) -> bytes:
        return b",%b\r\n" % double_text(number) if self.is_resp3 else bulk(double_text(number))

    def reply_to(self, words: list[bytes]) -> bytes:
        name = words[0].upper()
        if name in (b"ZRANGE", b"ZREVRANGE"):
            return self.range(int(words[2]), int(words[3]), name == b"ZREVRANGE", len(words) > 4)
        rank = self.ranks.get(words[2])
        if rank is None:
            return b"_\r\n" if self.is_resp3 else b"$-1\r\n"
        if name == b"ZSCORE":
            return self.score(self.ranking[rank][0])
        return b":%d\r\n" % (rank if name == b"ZRANK" else len(self.ranking) - 1 - rank)

    def range(self, first: int, last: int, is_reversed: bool, has_scores: bool) -> bytes:
        ranking, count = self.ranking[::-1] if is_reversed else self.ranking, len(self.ranking)
        first, last = max(first + count if first < 0 else first, 0), last + count if last < 0 else last
        found = ranking[first : max(last + 1, 0)]
        pair = b"*2\r\n" if has_scores and self.is_resp3 else b""
        items = [pair + bulk(member) + (self.score(score) if has_scores else b"") for score, member in found]
        return b"*%d\r\n" % (len(items) * (2 if has_scores and not self.is_resp3 else 1)) + b"".join(items)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.dictionaries(members, scores, min_size=1, max_size=80),
    st.dictionaries(members, scores | st.none(), max_size=20),
    st.lists(st.tuples(places, places), max_size=12),
    st.sampled_from([2, 3]),
)
def test_ranks_scores_and_ranges_are_those_of_members(
    first: dict[bytes, float], then: dict[bytes, float | None], asked: list[tuple[int, int]], protocol: int
) -> None:
    words = [[name, KEY, each] for each in [*first, *then, b"nobody"] for name in (b"ZRANK", b"zrevrank", b"ZSCORE")]
    for start, stop in [(0, -1), (0, 9), *asked]:
        for name in (b"ZRANGE", b"zrevrange"):
            words.append([name, KEY, b"%d" % start, b"%d" % stop])
            words.append([*words[-1], b"WithScores"])
    held = {**first, b"left": 1.0}
    epochs = [[Change("z", Op.PUT, KEY, member, score_text(score)) for member, score in held.items()]]
    epochs.append(
        [
            Change("z", Op.DELETE, KEY, each) if score is None else Change("z", Op.PUT, KEY, each, score_text(score))
            for each, score in then.items()
        ]
    )
    with small_trees(), TemporaryDirectory() as folder:
        store = LmdbStore(folder, "g", map_bytes_max=1 << 26)

        def talk(server: Server, connection: Connection, wire: RecordingTransport) -> None:
            compiled: Any = server.pipeline.compiled
            connection.session.protocol = protocol
            for epoch in epochs:
                publish(store, epoch)
                for change in epoch:
                    assert change.field is not None
                    held.pop(change.field, None)
                    if change.value is not None:
                        held[change.field] = float(change.value)
                server.context.renew()
                replies, left, rest = compiled.answer(connection.session, requests(words))
                assert (left, rest) == ([], b"")
                expected = Expected(held, protocol)
                assert replies == b"".join(map(expected.reply_to, words))

        try:
            with_server(store, talk)
        finally:
            store.close()


MANY = {b"m%d" % number: float(number // 3) for number in range(200)}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bit_in_sorted_set_is_error_and_never_another_answer(tmp_path: Path, seed: int) -> None:
    dice = Random(seed)
    words = [[name, KEY, each] for each in MANY for name in (b"ZRANK", b"ZSCORE")]
    for start in range(0, len(MANY), 7):
        words += [[name, KEY, b"%d" % start, b"%d" % (start + 7), b"WITHSCORES"] for name in (b"ZRANGE", b"ZREVRANGE")]
    expected = [Expected(MANY, 2).reply_to(each) for each in words]
    with small_trees():
        store = LmdbStore(tmp_path, "g", map_bytes_max=1 << 26)
        publish(store, [Change("z", Op.PUT, KEY, member, b"%d" % score) for member, score in MANY.items()])
    with store.begin() as txn:
        nodes = [node for _, node in txn.cursor(db=store.tables.blocks)]
        some = [row for _, row in txn.cursor(db=store.tables.fields)]
    data = store.path / DATA
    stored = data.read_bytes()
    assert len(nodes) > 40
    for value in [*nodes, *dice.sample(some, 10)]:
        byte = dice.randrange(len(value))
        flipped = bytearray(value)
        flipped[byte] ^= 1 << dice.randrange(8)

        def talk(server: Server, connection: Connection, wire: RecordingTransport) -> None:
            replies = []
            for each in words:
                connection.data_received(requests([each]))
                server.write_queue.flush()
                replies.append(b"".join(wire.sent))
                wire.sent.clear()
            errors = sum(reply.startswith(b"-") for reply in replies)
            assert errors
            assert sum(map(bytes.__eq__, replies, expected)) == len(words) - errors

        with data.open("r+b") as file:
            file.write(stored.replace(value, flipped))  # with what lies in free pages and is the same
        with_server(store, talk)
    store.close()
