"""Whoever holds replies and drops what changed reads what the store holds now, whatever epochs come in between."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resp_server.commands import command_table
from resp_server.config import ServerConfig
from resp_server.dispatcher import Dispatcher
from resp_server.instance import Call, Instance
from resp_server.protocol.replies import Pending, Sliced, SlicedEncoder
from resp_server.protocol.requests import RequestParser
from resp_server.protocol.session import Session
from state_backend import changed_keys, packed_map
from state_backend.changed_keys import EPOCHS_KEPT
from state_backend.descriptor import Kind, StateDescriptor
from state_backend.errors import KeyConflictError
from state_backend.keyspace import Job, Keyspace
from state_backend.lmdb_store import LmdbStore
from state_backend.memory_store import MemoryStore
from state_backend.records import Change, Op, runs_of
from state_backend.store import EpochChanges, Store

STATES = (
    StateDescriptor("value", value="v", key_format="<k>"),
    StateDescriptor("other", value="v", key_format="<k>"),
    StateDescriptor("map", field="f", value="v", key_format="<k>"),
    StateDescriptor("list", value="v", kind="list", key_format="<k>"),
)
NAMES = [state.name for state in STATES]
JOBS = ("a", "b")
KEYS = {job: [b"%s:%d" % (job.encode(), number) for number in range(5)] for job in JOBS}
ALL_KEYS = [*KEYS["a"], *KEYS["b"], b"c:0", b""]
# Never of another kind, so that short cuts are not given up for them.
VALUE_KEYS = [*KEYS["a"][:2], *KEYS["b"][:2], b"c:0", b""]
FIELDS_PAST_SMALL = packed_map.FIELDS_MAX + 1


@st.composite
def change(draw: Any, job: str, epoch: int, clock_ms: int) -> list[Change]:
    state = draw(st.sampled_from(("value", *NAMES)))
    # Mostly a key of the state's own, and one that all states share: an epoch in which two of them make it is refused.
    key = KEYS[job][draw(st.sampled_from((NAMES.index(state),) * 3 + (4,)))]
    expire_at_ms = draw(st.sampled_from((None, None, clock_ms + 3, clock_ms - 1)))
    if draw(st.integers(0, 3)) == 0:
        return [Change(state, Op.DELETE, key)]
    value = draw(st.sampled_from((b"same", b"%d" % epoch, b"x" * 2_000, b"x" * 20_000)))
    if state == "map":
        fields = range(draw(st.sampled_from((1, 2, FIELDS_PAST_SMALL))))
        return [Change(state, Op.PUT, key, b"f%d" % field, value[:9], expire_at_ms) for field in fields]
    return [Change(state, Op.APPEND if state == "list" else Op.PUT, key, None, value, expire_at_ms)]


class RepliesHeld(RuleBasedStateMachine):
    """Jobs get epochs, are removed, replaced and rebuilt; a client with ready replies and one without ask the same."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock_ms = 1_000
        self.keyspace = Keyspace()
        self.epochs: dict[str, int] = {}
        self.generations = 0
        table = command_table()

        def connected(reply_cache_bytes: int) -> tuple[Dispatcher, Call]:
            config = ServerConfig(reply_cache_bytes=reply_cache_bytes)
            instance = Instance(config, self.keyspace, table, clock=lambda: self.clock_ms)
            return Dispatcher(instance), Call(Session(1, "", "", instance.users.default, 0), instance)

        self.with_replies, self.small, self.without = connected(1 << 20), connected(1_000), connected(0)

    def teardown(self) -> None:
        for _, call in (self.with_replies, self.small, self.without):
            call.instance.close()
        for job in self.keyspace.jobs.values():
            job.store.close()
        shutil.rmtree(self.folder)

    @initialize()
    def one_job(self) -> None:
        self.replace("a", is_lmdb=True)

    @rule(job=st.sampled_from(JOBS), is_lmdb=st.booleans())
    def replace(self, job: str, is_lmdb: bool) -> None:
        """A job comes, or is taken over in a new generation or a rebuilt store."""
        self.generations += 1
        path = self.folder / str(self.generations)
        store: Store = LmdbStore(path, "g") if is_lmdb else MemoryStore("g")
        before = self.keyspace.jobs.get(job)
        self.keyspace.put(Job(job, "g", [StateDescriptor("value", value="v", key_format=f"{job}:<k>")], store))
        self.epochs[job] = -1
        self._close_left(before)

    @precondition(lambda self: len(self.keyspace.jobs) > 1)
    @rule(job=st.sampled_from(JOBS))
    def remove(self, job: str) -> None:
        before = self.keyspace.jobs[job]
        self.keyspace.remove(job)
        self._close_left(before)

    def _close_left(self, before: Job | None) -> None:
        for _, call in (self.with_replies, self.small, self.without):
            call.instance.renew()
        if before is not None:
            before.store.close()

    @rule(data=st.data(), job=st.sampled_from(JOBS), count=st.sampled_from((1, 1, 2, EPOCHS_KEPT, EPOCHS_KEPT + 1)))
    def apply(self, data: Any, job: str, count: int) -> None:
        if job not in self.keyspace.jobs:
            return
        for _ in range(count):
            epoch = self.epochs[job] + 1 + (self.epochs[job] < 0) * data.draw(st.sampled_from((0, 5)))
            changes = [
                each for group in data.draw(st.lists(change(job, epoch, self.clock_ms), max_size=4)) for each in group
            ]
            replaces = frozenset(data.draw(st.sampled_from(((), (), ("value",)))))
            runs = list(runs_of(changes, NAMES))
            store = self.keyspace.jobs[job].store
            before = self._content(store)
            try:
                store.apply(EpochChanges(epoch, 1, self.clock_ms, runs, replaces), STATES)
            except KeyConflictError:
                continue
            after = self._content(store)
            with store.snapshot(self.clock_ms) as snapshot:
                changed = snapshot.changed_since(self.epochs[job])
                assert changed is None or {key for key in ALL_KEYS if before[key] != after[key]} <= set(changed)
                assert changed is None or len(changed) <= len(changes) + len(ALL_KEYS) * bool(replaces)
            self.epochs[job] = epoch

    def _content(self, store: Store) -> dict[bytes, Any]:
        with store.snapshot(self.clock_ms) as snapshot:
            entries = {key: snapshot.entry(key) for key in ALL_KEYS}
            read: dict[Kind, Callable[[bytes], Any]] = {
                Kind.VALUE: snapshot.value,
                Kind.MAP: lambda key: dict(snapshot.map_pairs(key)),
                Kind.LIST: lambda key: list(snapshot.list_elements(key, 0, snapshot.list_size(key))),
            }
            return {key: entry and (entry, read[entry.kind](key)) for key, entry in entries.items()}

    @rule(job=st.sampled_from(JOBS))
    def expire(self, job: str) -> None:
        if job in self.keyspace.jobs:
            self.keyspace.jobs[job].store.expire(self.clock_ms, 100)

    @rule(step=st.sampled_from((-2, 1, 4)))
    def move_clock(self, step: int) -> None:
        self.clock_ms += step

    @invariant()
    def ask_for_values(self) -> None:
        self.ask(VALUE_KEYS, 2)

    @rule(keys=st.lists(st.sampled_from(ALL_KEYS), min_size=1), protocol=st.sampled_from((2, 3)))
    def ask(self, keys: list[bytes], protocol: int) -> None:
        expected = self._answers(*self.without, keys, protocol, has_short_cut=False)
        for dispatcher, call in (self.with_replies, self.small, self.without):
            assert self._answers(dispatcher, call, keys, protocol, has_short_cut=True) == expected
            for cache in call.instance.replies.values():
                assert cache.used_bytes <= call.instance.config.reply_cache_bytes

    def _answers(
        self, dispatcher: Dispatcher, call: Call, keys: list[bytes], protocol: int, *, has_short_cut: bool
    ) -> tuple[Any, ...]:
        """Return what is answered to reads of these keys, and what was counted for it."""
        call.session.protocol = protocol
        call.instance.renew()
        before = self._counted(call)
        several = [[b"GET", key] for key in keys] + [[b"HGETALL", key] for key in keys]
        ranges = [[b"LRANGE", key, b"0", b"%d" % (at % 3 - 1)] for at, key in enumerate(keys)]
        buffers = [several, [[b"MGET", *keys]], ranges, [[b"HGET", key, b"f0"] for key in keys], several[::2]]
        out = [self._answer(dispatcher, call, buffer, has_short_cut) for buffer in buffers]
        return out, [now - then for now, then in zip(self._counted(call), before, strict=True)]

    @staticmethod
    def _counted(call: Call) -> list[int]:
        stats = call.instance.stats
        calls = [stats.tally(name).calls for name in ("get", "mget", "hget", "hgetall", "lrange")]
        return [stats.hits, stats.misses, *calls]

    @staticmethod
    def _answer(dispatcher: Dispatcher, call: Call, requests: list[list[bytes]], has_short_cut: bool) -> bytes:
        reply = b""
        if has_short_cut:
            data = b"".join(map(packed, requests))
            reply, rest = dispatcher.short_ways[call.session.protocol].answer(call.session, data)
            requests = [list(request) for request in RequestParser().feed(rest)]
        replies = [dispatcher.reply_to(call, request) for request in requests]
        return reply + b"".join(each if isinstance(each, bytes) else in_steps(each, call) for each in replies)


def packed(request: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(request) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in request)


def in_steps(sliced: Sliced | Pending, call: Call) -> bytes:
    """Take all steps of a reply at once."""
    assert isinstance(sliced, Sliced)
    encoder = SlicedEncoder(sliced, call.session.protocol)
    parts = []
    while not encoder.is_done:
        parts.append(encoder.step())
    encoder.close()
    return b"".join(parts)


class RepliesHeldWhenFewChangesAreKept(RepliesHeld):
    """Most epochs change more keys than are kept, so that readers are told that anything may have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.room = patch.object(changed_keys, "ROOM_BYTES", 120)
        self.room.start()

    def teardown(self) -> None:
        self.room.stop()
        super().teardown()


SETTINGS = settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))

TestRepliesHeld = RepliesHeld.TestCase
TestRepliesHeld.settings = SETTINGS
TestRepliesHeldWhenFewChangesAreKept = RepliesHeldWhenFewChangesAreKept.TestCase
TestRepliesHeldWhenFewChangesAreKept.settings = SETTINGS
