"""Machines of rules: two stores get the same epochs, snapshots and slots, and answer alike."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar
from unittest.mock import patch

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from state_backend import lmdb as lmdb_modules
from state_backend.codec import keep_by_order, packed_list, packed_map, packed_sorted
from state_backend.codec.checksums import checked, with_checksum
from state_backend.lmdb import ranks as lmdb_ranks
from state_backend.lmdb.ranks import ROOT, RankTree, _numbers, node_name
from state_backend.lmdb.record_format import (
    EXPIRING,
    FORM_AT,
    KEY_ENTRY,
    LARGE_MAP,
    LARGE_SET,
    LARGE_SORTED_SET,
    SCORE,
    SLOT_COUNT,
    LargeMap,
    LargeSet,
    Tables,
    expiry_entry,
    expiry_of,
    field_expiry_name,
    id_of,
    name_of,
    payload_of,
    read_meta,
    state_number_of,
)
from state_backend.lmdb.store import LmdbStore
from state_backend.log.epochs import rows_of_slots
from state_backend.model import slots
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import KeyConflictError, WrongKindError
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import POSITION_BYTES
from state_backend.store.memory_store import MemoryStore
from state_backend.store.slot_ownership import Loading
from state_backend.store.store import EpochChanges, Snapshot, as_bytes

Answer = TypeVar("Answer")

STATES = (
    StateDescriptor("temp", key="k", value="v", ttl=1).for_job("job"),
    StateDescriptor("mode", key="k", value="v").for_job("job"),
    StateDescriptor("trip", key="k", value=("a", "b")).for_job("job"),
    StateDescriptor("city", key="k", field="f", value="v").for_job("job"),
    StateDescriptor("news", key="k", value="v", kind="list").for_job("job"),
    StateDescriptor("last", key="k", value="v", kind="list", length_max=130).for_job("job"),
    StateDescriptor("total", key="k", value="v", reduce="sum", columns={"v": "bigint"}).for_job("job"),
    StateDescriptor("least", key="k", value="v", reduce="min", columns={"v": "string"}).for_job("job"),
    StateDescriptor("hits", key="k", field="f", reduce="count").for_job("job"),
    StateDescriptor("tags", key="k", member="m").for_job("job"),
    StateDescriptor("best", key="k", member="m", score="s").for_job("job"),
    StateDescriptor("latest", key="k", value="v", last_by="t").for_job("job"),
    StateDescriptor("peak", key="k", value=("a", "b"), max_by="t").for_job("job"),
    StateDescriptor("opening", key="k", field="f", value="v", first_by="t").for_job("job"),
    StateDescriptor("recent", key="k", value="v", kind="list", last_by="t", length_max=130).for_job("job"),
    StateDescriptor("lowest", key="k", value="v", kind="list", min_by="t", length_max=3).for_job("job"),
    StateDescriptor("timely", key="k", value="v", kind="list", max_by="t", length_max=4, late="drop").for_job("job"),
)
VALUES, MAPS, LISTS, SETS = ("temp", "mode"), ("trip", "city"), ("news", "last"), ("tags", "best")
FOLDED = ("total", "least", "hits")
SELECTED = ("latest", "peak", "opening", "recent", "lowest", "timely")

# A key that two states may make, an empty one, some that are no text, one with a hash tag, and one that is long.
SHARED = (b"", b"\xff\xfe", b"{tag}1")
KEYS = {
    state.name: (*SHARED, *(f"job:{state.name}:{number}".encode() for number in range(4)), state.name.encode() * 300)
    for state in STATES
}
MEMBERS = (b"", b"\xff", b"$1\r\na\r\n", b"m000", b"m0", b"m0990", b"long" * 100, b"long" * 100 + b"er")
FIELDS = (b"", b"\xff", b"$1\r\na\r\n", *(b"f%d" % number for number in range(5)))
TEXTS = st.sampled_from((b"", b"1", b"2", b"\x00\xff", b"$2\r\nf1\r\n", b"long" * 500))
# Past both borders between a small and a large map, and just below.
SIZES = st.sampled_from((0, 1, 3, packed_map.FIELDS_MAX - 1, packed_map.FIELDS_MAX, packed_map.FIELDS_MAX + 1, 150))
DELAYS = st.none() | st.integers(-3, 30)


# The limits of the LMDB store that stand between a text or a map of this size and the next way of treating it.
SMALL = {"PIECE_BYTES": 700, "RUN_ROWS_MAX": 140, "VISITS_MAX": 7, "VISITED_BYTES_MAX": 3000}
# Of the trees of sorted sets, so that they have several levels.
SMALL_TREE = {"NODE_ENTRIES_MAX": 6, "NODE_BYTES_MAX": 300, "CHILDREN_MIN": 2}


def expiry(clock_ms: int, delay: int | None) -> int | None:
    return None if delay is None else clock_ms + delay


def value_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(state: str, number: int, op: Op, value: bytes, delay: int | None) -> list[Change]:
        key = KEYS[state][number]
        return [
            Change(state, op, key, None, value, expiry(clock_ms, delay)) if op is Op.PUT else Change(state, op, key)
        ]

    return st.builds(
        changes_of,
        st.sampled_from(VALUES),
        st.integers(0, 7),
        st.sampled_from((Op.PUT, Op.PUT, Op.DELETE)),
        TEXTS,
        DELAYS,
    )


def whole_map_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(state: str, number: int, op: Op, size: int, value: bytes, delay: int | None) -> list[Change]:
        key = KEYS[state][number]
        if op is not Op.PUT:
            return [Change(state, op, key)]
        packed = packed_map.pack((b"f%d" % each, value) for each in range(size))
        return [Change(state, op, key, None, packed, expiry(clock_ms, delay))]

    ops = st.sampled_from((Op.PUT, Op.PUT, Op.PUT, Op.DELETE, Op.CLEAR))
    return st.builds(changes_of, st.sampled_from(MAPS), st.integers(0, 7), ops, SIZES, TEXTS, DELAYS)


def field_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(
        state: str, number: int, op: Op, field: bytes, more: int, value: bytes, delay: int | None
    ) -> list[Change]:
        key = KEYS[state][number]
        names = [field, *(b"f%d" % each for each in range(more))]
        if op is not Op.PUT:
            return [Change(state, op, key, name) for name in names]
        return [Change(state, op, key, name, value, expiry(clock_ms, delay)) for name in names]

    more = st.sampled_from((0, 0, 0, 0, 2, packed_map.FIELDS_MAX + 1))
    ops = st.sampled_from((Op.PUT, Op.PUT, Op.DELETE))
    return st.builds(
        changes_of, st.sampled_from(MAPS), st.integers(0, 7), ops, st.sampled_from(FIELDS), more, TEXTS, DELAYS
    )


def list_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(state: str, number: int, op: Op, size: int, value: bytes, delay: int | None) -> list[Change]:
        key, at_ms = KEYS[state][number], expiry(clock_ms, delay)
        elements = [value + b"%d" % each for each in range(size)]
        if op is Op.PUT:
            return [Change(state, op, key, None, packed_list.pack(elements), at_ms)]
        if op is Op.APPEND:
            return [Change(state, op, key, None, element, at_ms) for element in elements]
        return [Change(state, op, key)]

    ops = st.sampled_from((Op.APPEND, Op.APPEND, Op.APPEND, Op.PUT, Op.DELETE, Op.CLEAR))
    return st.builds(changes_of, st.sampled_from(LISTS), st.integers(0, 7), ops, SIZES, TEXTS, DELAYS)


def folding_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(
        state: str, number: int, op: Op, field: bytes, more: int, value: int, copies: int, delay: int | None
    ) -> list[Change]:
        key, at_ms = KEYS[state][number], expiry(clock_ms, delay)
        # As a text, some of these numbers are longer than a piece of the store.
        text = b"%d" % value if state != "least" else b"%d" % value * copies
        names = [field, *(b"f%d" % each for each in range(more))] if state == "hits" else [None]
        if op is Op.PUT and state == "hits" and more % 2:
            return [Change(state, op, key, None, packed_map.pack([(b"f1", text), (b"f2", text)]), at_ms)]
        if op in (Op.PUT, Op.FOLD):
            return [Change(state, op, key, name, text, at_ms) for name in names]
        return [Change(state, op, key, None if op is Op.CLEAR else name) for name in names]

    return st.builds(
        changes_of,
        st.sampled_from(FOLDED),
        st.integers(0, 7),
        st.sampled_from((Op.FOLD, Op.FOLD, Op.FOLD, Op.PUT, Op.DELETE, Op.CLEAR)),
        st.sampled_from(FIELDS),
        st.sampled_from((0, 0, 0, 1, 2, packed_map.FIELDS_MAX + 1)),
        st.sampled_from((-1, 0, 1, 10**20)),
        st.sampled_from((1, 1, 500)),
        DELAYS,
    )


def ordered_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(
        state: str, number: int, op: Op, field: bytes, more: int, order: int, step: int, value: bytes, delay: int | None
    ) -> list[Change]:
        key, at_ms = KEYS[state][number], expiry(clock_ms, delay)
        names = [field, *(b"f%d" % each for each in range(more))] if state == "opening" else [None] * (more + 1)
        if op is not Op.FOLD:
            return [Change(state, op, key, None if op is Op.CLEAR else names[0])]
        orders = [b"%03d" % (500 + order + step * each) for each in range(len(names))]
        value = packed_map.pack((b"f%d" % each, value) for each in range(more)) if state == "peak" else value
        return [
            Change(state, op, key, name, keep_by_order.pack(order, value), at_ms)
            for name, order in zip(names, orders, strict=True)
        ]

    return st.builds(
        changes_of,
        st.sampled_from(SELECTED),
        st.integers(0, 7),
        st.sampled_from((Op.FOLD, Op.FOLD, Op.FOLD, Op.FOLD, Op.DELETE, Op.CLEAR)),
        st.sampled_from(FIELDS),
        st.sampled_from((0, 0, 0, 1, 2, packed_list.ELEMENTS_MAX + 1)),
        st.integers(-3, 3),
        st.sampled_from((0, 1, -1)),
        TEXTS,
        DELAYS,
    )


def set_change(clock_ms: int) -> st.SearchStrategy[list[Change]]:
    def changes_of(
        state: str,
        number: int,
        op: Op,
        member: bytes,
        more: int,
        first: int,
        score: float,
        step: float,
        delay: int | None,
    ) -> list[Change]:
        key, at_ms = KEYS[state][number], expiry(clock_ms, delay)
        members = [member, *(b"m%03d" % each for each in range(first, first + more))]
        scores = [score, *(score + step * each for each in range(more))]
        if op is Op.APPEND:  # which is for others: here, a packed one
            texts = members[: more if more != 3 else 0]
            packed = (
                packed_sorted.pack_members(zip(texts, scores, strict=False))
                if state == "best"
                else packed_list.pack(texts)
            )
            return [Change(state, Op.PUT, key, None, packed, at_ms)]
        if op is Op.PUT:
            texts = [packed_sorted.score_text(each) if state == "best" else b"" for each in scores]
            return [Change(state, op, key, *each, at_ms) for each in zip(members, texts, strict=True)]
        return [Change(state, op, key, each) for each in members] if op is Op.DELETE else [Change(state, Op.CLEAR, key)]

    return st.builds(
        changes_of,
        st.sampled_from(SETS),
        st.integers(0, 7),
        st.sampled_from((Op.PUT, Op.PUT, Op.PUT, Op.PUT, Op.DELETE, Op.DELETE, Op.APPEND, Op.CLEAR)),
        st.sampled_from(MEMBERS),
        st.sampled_from((0, 0, 1, 3, 20, packed_list.ELEMENTS_MAX + 1)),
        st.sampled_from((0, 0, 50)),
        st.sampled_from((0.0, 1.0, -2.5, float("inf"), 7.0)),
        st.sampled_from((0.0, 0.0, 1.0, -0.25)),
        DELAYS,
    )


def folds_of(snapshot: Snapshot) -> list[Change]:
    """Return the changes that build the ordered states; those of a list in the order of its elements."""
    found = [_with_sorted_fields(change) for change in snapshot.changes() if change.op == Op.FOLD]
    return sorted(found, key=lambda change: (change.state, change.key, change.field or b""))


def _with_sorted_fields(change: Change) -> Change:
    """Return a change of a map with its fields sorted: each store has them in an order of its own."""
    if change.state != "peak":
        return change
    order, packed = keep_by_order.unpack(change)
    return change._replace(value=keep_by_order.pack(order, packed_map.pack(sorted(packed_map.pairs(packed)))))


class StoresAgree(RuleBasedStateMachine):
    """Both stores get the same epochs; after each step they are asked everything."""

    rows_of_a_run = 1 << 16

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(patch("state_backend.model.records.RUN_ROWS_MAX", self.rows_of_a_run))
        for name, value in SMALL.items():
            for module in iter_modules(lmdb_modules.__path__, "state_backend.lmdb."):
                if hasattr(import_module(module.name), name):
                    self.patches.enter_context(patch(f"{module.name}.{name}", value))
        for name, value in SMALL_TREE.items():
            self.patches.enter_context(patch(f"state_backend.lmdb.ranks.{name}", value))
        self.patch_positions()
        self.folder = Path(tempfile.mkdtemp())
        self.memory = MemoryStore("g")
        self.lmdb = LmdbStore(self.folder, "g")
        self.epoch = -1
        self.clock_ms = 1_000
        self.behind_ms = 0

    def patch_positions(self) -> None:
        pass

    def teardown(self) -> None:
        self.lmdb.close()
        shutil.rmtree(self.folder)
        self.patches.close()

    @initialize()
    def empty(self) -> None:
        assert self.lmdb.applied == self.memory.applied

    def draw_epoch(self, data: Any) -> EpochChanges:
        makers = (
            value_change,
            whole_map_change,
            field_change,
            list_change,
            folding_change,
            set_change,
            set_change,
            ordered_change,
            ordered_change,
        )
        each = st.one_of([make(self.clock_ms) for make in makers])
        changes = [change for group in data.draw(st.lists(each, max_size=8)) for change in group]
        runs = list(runs_of(changes, [state.name for state in STATES]))
        replaces = data.draw(st.sets(st.sampled_from([state.name for state in STATES]), max_size=1))
        return EpochChanges(self.epoch + 1, 1, self.log_clock_ms(), runs, frozenset(replaces))

    def log_clock_ms(self) -> int:
        """Read the clock for an epoch: never below the last one's, and sometimes behind the servers' own."""
        return max(self.memory.applied.clock_ms, self.clock_ms - self.behind_ms)

    @rule(behind_ms=st.sampled_from((0, 0, 5, 40)))
    def fall_behind(self, behind_ms: int) -> None:
        """Batches take so long from the reading of their clock to their commit."""
        self.behind_ms = behind_ms

    @rule(data=st.data())
    def apply(self, data: Any) -> None:
        self.take(self.draw_epoch(data))

    @rule(state=st.sampled_from(VALUES), rows=st.lists(st.tuples(st.integers(0, 7), TEXTS), max_size=8))
    def put_values(self, state: str, rows: list[tuple[int, bytes]]) -> None:
        """Apply an epoch of the kind that has a shorter way."""
        changes = [Change(state, Op.PUT, KEYS[state][number], None, value) for number, value in rows]
        runs = list(runs_of(changes, [state.name for state in STATES]))
        self.take(EpochChanges(self.epoch + 1, 1, self.log_clock_ms(), runs))

    @rule(state=st.sampled_from(("total", "least")), rows=st.lists(st.tuples(st.integers(0, 7), st.integers(-2, 2))))
    def fold_values(self, state: str, rows: list[tuple[int, int]]) -> None:
        """Apply an epoch as the sink makes them: changes that fold, and nothing else."""
        changes = [Change(state, Op.FOLD, KEYS[state][number], None, b"%d" % value) for number, value in rows]
        self.take(
            EpochChanges(
                self.epoch + 1, 1, self.log_clock_ms(), list(runs_of(changes, [state.name for state in STATES]))
            )
        )

    @rule(rows=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), TEXTS), max_size=8))
    def select_values(self, rows: list[tuple[int, int, bytes]]) -> None:
        """Apply an epoch as the sink makes them of rows with an order."""
        changes = [
            Change("latest", Op.FOLD, KEYS["latest"][number], None, keep_by_order.pack(b"%d" % order, value))
            for number, order, value in rows
        ]
        runs = list(runs_of(changes, [state.name for state in STATES]))
        self.take(EpochChanges(self.epoch + 1, 1, self.log_clock_ms(), runs))

    def take(self, epoch: EpochChanges) -> None:
        before = self.lmdb.applied
        try:
            self.memory.apply(epoch, STATES)
        except KeyConflictError:
            try:
                self.lmdb.apply(epoch, STATES)
            except KeyConflictError:
                assert self.lmdb.applied == before
                return
            raise AssertionError("only the memory store saw the conflict") from None
        self.lmdb.apply(self.of_lmdb(epoch), STATES)
        self.epoch += 1

    def of_lmdb(self, epoch: EpochChanges) -> EpochChanges:
        """Return what the LMDB store gets of an epoch."""
        return epoch

    @rule()
    def apply_again_what_is_there(self) -> None:
        """An epoch that puts what stands there already makes no difference."""
        snapshot = self.memory.snapshot(self.clock_ms)
        changes = []
        for state in VALUES:
            for key in KEYS[state]:
                entry = snapshot.key_info(key)
                if entry is not None and entry.state == state:
                    changes.append(Change(state, Op.PUT, key, None, snapshot.value(key), entry.expire_at_ms))
        runs = list(runs_of(changes, VALUES))
        self.epoch += 1
        epoch = EpochChanges(self.epoch, 1, self.log_clock_ms(), runs)
        assert (self.memory.apply(epoch, STATES), self.lmdb.apply(self.of_lmdb(epoch), STATES)) == (0, 0)

    @rule(step=st.integers(-2, 20))
    def move_clock(self, step: int) -> None:
        self.clock_ms += step

    @rule()
    def expire(self) -> None:
        before = self.memory.applied.expiry_batches, self.lmdb.applied.expiry_batches
        self.memory.expire(self.clock_ms, 1 << 30)
        self.lmdb.expire(self.clock_ms, 1 << 30)
        with self.memory.snapshot(self.clock_ms) as memory, self.lmdb.snapshot(self.clock_ms) as lmdb:
            expired = memory.expired_since(before[0]), lmdb.expired_since(before[1])
        assert None not in expired
        # The LMDB store notes some later that came when the clock had passed them: it looks at lines, not at times.
        assert set(expired[0] or ()) <= set(expired[1] or ())
        theirs, mine = self.memory.applied, self.lmdb.applied
        assert (mine.keys, mine.expiring, mine.expiring_maps) == (theirs.keys, theirs.expiring, theirs.expiring_maps)
        assert self.lmdb.expire(self.clock_ms, 1) == 0
        self.counts_are_of_what_a_reader_sees()

    def counts_are_of_what_a_reader_sees(self) -> None:
        """Maps all of whose fields have expired are counted until the log is past them."""
        with self.lmdb.snapshot(self.clock_ms) as shown:
            seen = Counter(
                entry.state for key in scanned(lambda at: shown.scan(at, 3)) if (entry := shown.key_info(key))
            )
        counted = Counter(self.lmdb.applied.keys)
        assert not seen - counted
        assert (counted - seen).keys() <= {*MAPS, *FOLDED, *SELECTED}

    @rule(most=st.integers(1, 3))
    def remove_some_expired(self, most: int) -> None:
        """A bounded removal changes nothing that can be read now."""
        self.lmdb.expire(self.clock_ms, most)
        while self.lmdb.expire(self.clock_ms, most) >= most:
            pass
        self.memory.expire(self.clock_ms, 1 << 30)

    @rule()
    def begin_anew_from_a_snapshot(self) -> None:
        """What a store says of itself makes the same state out of nothing."""
        with self.memory.snapshot(self.clock_ms) as memory, self.lmdb.snapshot(self.clock_ms) as lmdb:
            for shown in (memory, lmdb):
                runs = list(shown.runs([state.name for state in STATES]))
                copy = MemoryStore("g")
                copy.apply(EpochChanges(self.epoch, 1, self.memory.applied.clock_ms, runs), STATES)
                assert folds_of(copy.snapshot(self.clock_ms)) == folds_of(memory)  # their orders are no answers
                for now_ms in (self.clock_ms, self.clock_ms + 5):
                    lmdb.renew(now_ms)
                    assert_equal_answers(copy.snapshot(now_ms), lmdb)
                lmdb.renew(self.clock_ms)

    @rule(data=st.data(), runs=st.integers(0, 6), is_kept=st.booleans())
    def kill_a_writer(self, data: Any, runs: int, is_kept: bool) -> None:
        """A process that is killed while it writes, or has just written, leaves the epoch before, or the whole one."""
        epoch = self.draw_epoch(data)
        mine = self.of_lmdb(epoch)
        self.lmdb.close()
        child = os.fork()
        if not child:
            with suppress(KeyConflictError):
                store = LmdbStore(self.folder, "g")
                store.apply(mine if is_kept else mine._replace(runs=killed_after(mine.runs, runs)), STATES)
            os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        self.lmdb = LmdbStore(self.folder, "g")
        if self.lmdb.applied.epoch > self.epoch:
            assert is_kept
            self.memory.apply(epoch, STATES)
            self.epoch += 1

    @rule()
    def reopen(self) -> None:
        before = self.lmdb.applied
        self.lmdb.close()
        self.lmdb = LmdbStore(self.folder, "g")
        assert self.lmdb.applied == before

    @invariant()
    def nothing_lies_around(self) -> None:
        assert_tables_fit(self.lmdb)

    @invariant()
    def agree(self) -> None:
        theirs, mine = self.memory.applied, self.lmdb.applied
        assert (mine.generation, mine.epoch, mine.term, mine.clock_ms) == (
            theirs.generation,
            theirs.epoch,
            theirs.term,
            theirs.clock_ms,
        )
        for now_ms in (self.clock_ms, self.clock_ms + 5, self.clock_ms + 1_000):
            with self.memory.snapshot(now_ms) as memory, self.lmdb.snapshot(now_ms) as lmdb:
                assert_equal_answers(memory, lmdb)


def killed_after(runs: Iterable[pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
    """Yield so many runs, if there are as many, and kill this process."""
    yield from islice(runs, count)
    os.kill(os.getpid(), signal.SIGKILL)


def answer(ask: Callable[[], Answer]) -> Answer | str:
    try:
        return ask()
    except WrongKindError:
        return "wrong kind"


def pairs_of(snapshot: Snapshot, key: bytes) -> dict[bytes, bytes]:
    pairs = list(snapshot.map_pairs(key))
    assert len(dict(pairs)) == len(pairs) == snapshot.map_size(key)
    return dict(pairs)


def scanned(step: Callable[[int], tuple[int, list[Any]]]) -> Iterator[Any]:
    """Return all that a scan returns, and check that its cursors rise."""
    cursor, found = step(0)
    while True:
        yield from found
        if not cursor:
            return
        last = cursor
        cursor, found = step(cursor)
        assert not cursor or cursor > last


def assert_equal_answers(memory: Snapshot, lmdb: Snapshot) -> None:
    """Ask for every key that the LMDB store owns, and for all that it has."""
    live = []
    for key in {key for keys in KEYS.values() for key in keys} | {b"nothing"}:
        if slots.slot_of(key) not in lmdb.owned_slots:
            continue
        entry = memory.key_info(key)
        assert lmdb.key_info(key) == entry
        if entry is None:
            assert_nothing_is_at(lmdb, key)
            continue
        live.append(entry)
        assert answer(lambda key=key: lmdb.value(key)) == answer(lambda key=key: memory.value(key))
        pairs = answer(lambda key=key: pairs_of(memory, key))
        assert answer(lambda key=key: pairs_of(lmdb, key)) == pairs
        assert_equal_lists(memory, lmdb, key)
        assert_equal_sets(memory, lmdb, key)
        assert_equal_sorted_sets(memory, lmdb, key)
        names = [*FIELDS, b"f130", b"nothing"]
        asked = answer(lambda key=key, names=names: memory.fields(key, names))
        assert answer(lambda key=key, names=names: lmdb.fields(key, names)) == asked
        expiries = answer(lambda key=key, names=names: memory.field_expiries(key, names))
        assert answer(lambda key=key, names=names: lmdb.field_expiries(key, names)) == expiries
        assert answer(lambda key=key: lmdb.field(key, b"f1")) == answer(lambda key=key: memory.field(key, b"f1"))
        if isinstance(pairs, dict):
            packed = lmdb.packed_map(key)
            assert packed is None or dict(packed_map.pairs(packed)) == pairs
            for count in (1, 10, 1000):
                for snapshot in (memory, lmdb):
                    found = list(scanned(lambda at, s=snapshot, k=key, c=count: s.scan_map(k, at, c)))
                    assert len(found) == len(pairs)
                    assert {name: as_bytes(text) for name, text in found} == pairs
    for count in (1, 3, 1000):
        for snapshot in (memory, lmdb):
            found = list(scanned(lambda at, s=snapshot, c=count: s.scan(at, c)))
            assert sorted(found) == sorted(entry.key for entry in live)
            found = list(scanned(lambda at, s=snapshot, c=count: s.scan(at, c, only_expiring=True)))
            assert sorted(found) == sorted(entry.key for entry in live if entry.expire_at_ms is not None)
            for kind in Kind:
                found = list(scanned(lambda at, s=snapshot, c=count, k=kind: s.scan(at, c, (k,))))
                assert sorted(found) == sorted(entry.key for entry in live if entry.kind is kind)
    assert any(key is not None for key in lmdb.random_keys()) == bool(live)


def counted_records(store: LmdbStore) -> list[tuple[bytes, bytes]]:
    """Return (place, record) of all keys of which it was not announced that they expired."""
    with store.begin() as txn:
        announced = read_meta(txn, store.tables, store.generation).announced
        found = list(txn.cursor(db=store.tables.keys))
    return [
        (at, record)
        for at, record in found
        if not expiry_of(record) or expiry_entry(expiry_of(record), KEY_ENTRY, at[:POSITION_BYTES]) > announced
    ]


def assert_tables_fit(store: LmdbStore) -> None:
    """All that lies outside of a key's record belongs to a key, or has a line that says that it is to go."""
    with store.begin() as txn:
        announced = read_meta(txn, store.tables, "g").announced
        tables = {name: list(txn.cursor(db=getattr(store.tables, name))) for name in Tables._fields if name != "meta"}
    lines = {name for name, _ in tables["expiry"]}
    dropped = {line[9:] for line in lines if line[8:9] == b"d"}
    assert all(line[:8] == bytes(8) for line in lines if line[8:9] == b"d")
    keys = [(at[:6], record) for at, record in tables["keys"]]
    fields = [(at[:14], record) for at, record in tables["fields"]]
    owned = {id_of(record) for _, record in (*keys, *fields) if id_of(record)}
    assert not owned & dropped
    for name in ("fields", "field_expiry", "blocks"):
        assert {at[:8] for at, _ in tables[name]} <= owned | dropped
    larges = [(record, LargeMap.of(payload_of(record))) for _, record in keys if record[FORM_AT] == LARGE_MAP]
    assert {large.prefix: with_checksum(name_of(record)) for record, large in larges}.items() <= dict(
        tables["maps"]
    ).items()
    entries_of_keys = {expiry_entry(expiry_of(record), b"k", at) for at, record in keys if expiry_of(record)}
    lines_of_maps = {
        expiry_entry(large.next_expiry_ms, b"m", large.prefix) for _, large in larges if large.next_expiry_ms
    }
    assert {line for line in lines if line[8:9] in b"km"} == entries_of_keys | lines_of_maps
    notes = [line for line in lines if line[8:9] == b"n"]
    assert all(line > announced for line in notes)
    live = [(at, record) for at, record in fields if at[:8] not in dropped]
    field_expiry = {field_expiry_name(at[:8], expiry_of(record), at[8:]) for at, record in live if expiry_of(record)}
    assert {name for name, _ in tables["field_expiry"] if name[:8] not in dropped} == field_expiry
    assert_trees_fit(store, keys, fields, tables["blocks"])
    for _, large in larges:
        mine = [expiry_of(record) for at, record in fields if at[:8] == large.prefix]
        expiring = [at_ms for at_ms in mine if at_ms]
        assert (large.size, large.expiring, bool(large.next_expiry_ms)) == (len(mine), len(expiring), bool(expiring))
        assert large.next_expiry_ms <= min(expiring, default=0)
        later = [at_ms for at_ms in expiring if at_ms > int.from_bytes(announced[:8], "big")]
        if later and expiry_entry(large.next_expiry_ms, b"m", large.prefix) <= announced:
            assert any(line[9:] == large.prefix and int.from_bytes(line[:8], "big") <= min(later) for line in notes)


def assert_trees_fit(
    store: LmdbStore,
    keys: list[tuple[bytes, bytes]],
    fields: list[tuple[bytes, bytes]],
    blocks: list[tuple[bytes, bytes]],
) -> None:
    """The members of large sets are counted, and the tree of a sorted one holds them in order and nothing else."""
    for record in (record for _, record in keys if record[FORM_AT] in (LARGE_SET, LARGE_SORTED_SET)):
        large = LargeSet.of(payload_of(record))
        members = {name_of(each): payload_of(each) for at, each in fields if at[:8] == large.prefix}
        assert len(members) == large.size > 0
        nodes = {name: checked(node) for name, node in blocks if name[:8] == large.prefix}
        if record[FORM_AT] == LARGE_SET:
            assert not nodes
            assert set(members.values()) == {b""}
            continue
        with store.begin() as txn:
            leaves = list(RankTree(txn, store.tables.blocks, large.prefix).leaves(0, large.size, is_reversed=False))
        ranking = [(score, member) for leaf in leaves for member, score in leaf]
        assert ranking == sorted((SCORE.unpack(score)[0], member) for member, score in members.items())
        assert max(map(len, leaves)) <= lmdb_ranks.NODE_ENTRIES_MAX
        inner = [node for node in nodes.values() if node[-1]]
        children = [number for node in inner for number in _numbers(node)]
        assert sorted([ROOT, *children]) == sorted(int.from_bytes(name[8:], "big") for name in nodes)
        assert max(children, default=0) < large.next_node
        root = nodes[node_name(large.prefix, ROOT)]
        assert not root[-1] or packed_sorted.count(root) > 1


def assert_equal_lists(memory: Snapshot, lmdb: Snapshot, key: bytes) -> None:
    size = answer(lambda: memory.list_size(key))
    assert answer(lambda: lmdb.list_size(key)) == size
    if not isinstance(size, int):
        return
    for start, stop in (
        (0, size),
        (0, min(size, 1)),
        (size // 2, min(size, size // 2 + 100)),
        (max(0, size - 2), size),
    ):
        elements = list(memory.list_elements(key, start, stop))
        assert list(lmdb.list_elements(key, start, stop)) == elements
        assert b"".join(lmdb.list_bulk_strings(key, start, stop)) == b"".join(
            memory.list_bulk_strings(key, start, stop)
        )


def assert_nothing_is_at(lmdb: Snapshot, key: bytes) -> None:
    """Ask for a missing key whatever may be asked; the memory store has nothing there."""
    assert (lmdb.value(key), lmdb.packed_map(key), lmdb.packed_set(key), lmdb.packed_sorted(key)) == (None,) * 4
    assert [lmdb.map_size(key), lmdb.list_size(key), lmdb.set_size(key), lmdb.sorted_size(key)] == [0] * 4
    assert lmdb.fields(key, [b""]) == lmdb.field_expiries(key, [b""]) == lmdb.scores(key, [b""]) == [None]
    assert lmdb.are_members(key, [b""]) == [False]
    assert lmdb.ranks(key, [b""]) == [None]
    assert lmdb.rank_of_score(key, 0.0, True) == lmdb.rank_of_member(key, b"", True) == 0
    assert lmdb.scan_map(key, 0, 10) == lmdb.scan_set(key, 0, 10) == lmdb.scan_sorted(key, 0, 10) == (0, [])
    parts = (lmdb.map_pairs(key), lmdb.list_elements(key, 0, 0), lmdb.list_bulk_strings(key, 0, 0), lmdb.members(key))
    assert [list(each) for each in (*parts, lmdb.sorted_members(key, 0, 0))] == [[]] * 5


def assert_equal_sets(memory: Snapshot, lmdb: Snapshot, key: bytes) -> None:
    size = answer(lambda: memory.set_size(key))
    assert answer(lambda: lmdb.set_size(key)) == size
    if not isinstance(size, int):
        for shown in (memory, lmdb):
            assert answer(lambda shown=shown: shown.members(key)) == size
            assert answer(lambda shown=shown: shown.packed_set(key)) == size
        return
    members = list(memory.members(key))
    asked = [*MEMBERS, b"nothing", *members[:: max(1, size // 5)]]
    assert memory.are_members(key, asked) == lmdb.are_members(key, asked)
    assert sorted(lmdb.members(key)) == members
    packed = lmdb.packed_set(key)
    assert packed is None or packed_list.elements(packed) == members
    for snapshot, count in ((memory, 100), (lmdb, 10), (lmdb, 1000)):
        found = list(scanned(lambda at, s=snapshot, c=count: s.scan_set(key, at, c)))
        assert sorted(found) == members


def assert_equal_sorted_sets(memory: Snapshot, lmdb: Snapshot, key: bytes) -> None:
    size = answer(lambda: memory.sorted_size(key))
    assert answer(lambda: lmdb.sorted_size(key)) == size
    if not isinstance(size, int):
        assert answer(lambda: lmdb.scores(key, [b"m000"])) == answer(lambda: memory.scores(key, [b"m000"]))
        return
    ranking = list(memory.sorted_members(key, 0, size))
    assert list(lmdb.sorted_members(key, 0, size)) == ranking
    assert list(lmdb.sorted_members(key, 0, size, is_reversed=True)) == ranking[::-1]
    for start in {0, size // 3, max(0, size - 2)}:
        for stop in {size // 3, min(size, size // 3 + 10), size}:
            part = list(memory.sorted_members(key, start, stop))
            assert list(lmdb.sorted_members(key, start, stop)) == part
            assert list(lmdb.sorted_members(key, start, stop, is_reversed=True)) == part[::-1]
    members = [*MEMBERS, b"nothing", *(member for member, _ in ranking[:: max(1, size // 5)])]
    assert lmdb.scores(key, members) == memory.scores(key, members)
    assert lmdb.ranks(key, members) == memory.ranks(key, members)
    for is_after in (False, True):
        for score in {-0.0, 1.0, 0.9, float("inf"), float("-inf"), ranking[size // 2][1]}:
            assert lmdb.rank_of_score(key, score, is_after) == memory.rank_of_score(key, score, is_after)
        for member in members[::2]:
            assert lmdb.rank_of_member(key, member, is_after) == memory.rank_of_member(key, member, is_after)
    packed = lmdb.packed_sorted(key)
    assert packed is None or packed_sorted.members(packed, 0, size) == ranking
    for snapshot, count in ((memory, 100), (lmdb, 10)):
        found = list(scanned(lambda at, s=snapshot, c=count: s.scan_sorted(key, at, c)))
        assert sorted(found) == sorted(ranking)


class StoresAgreeWithSmallRuns(StoresAgree):
    """The changes of one key lie in several runs."""

    rows_of_a_run = 3


class StoresAgreeWhenPositionsCollide(StoresAgree):
    """All keys share three positions, and so do the fields of a map: the chains behind a position are right."""

    rows_of_a_run = 5

    def patch_positions(self) -> None:
        def crc_hqx(text: bytes, start: int) -> int:
            return sum(text) % 3

        for module in ("model.slots", "lmdb.record_format"):
            self.patches.enter_context(patch(f"state_backend.{module}.crc_hqx", crc_hqx))
            self.patches.enter_context(patch(f"state_backend.{module}.crc32", lambda text: 7))


class StoresAgreeOnSomeSlots(StoresAgree):
    """The LMDB store gains and loses slots; the memory store has all, and shows those that the other one owns."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[EpochChanges] = []

    @rule(step=st.integers(0, 20))
    def move_clock(self, step: int) -> None:
        """What is loaded goes through the epochs again: an earlier clock after a removal would show it less of them."""
        self.clock_ms += step

    def take(self, epoch: EpochChanges) -> None:
        before = self.memory.applied
        try:
            self.memory.apply(epoch, STATES)
        except KeyConflictError:  # which the other store may not see
            assert self.memory.applied == before
            return
        self.lmdb.apply(self.of_lmdb(epoch), STATES)
        self.epoch += 1
        self.history.append(epoch)
        self.show()

    def of_lmdb(self, epoch: EpochChanges) -> EpochChanges:
        return self.of_slots(epoch, self.lmdb.slot_ownership.owned)

    @staticmethod
    def of_slots(epoch: EpochChanges, slots: SlotSet) -> EpochChanges:
        return epoch._replace(runs=[rows_of_slots(run, slots) for run in epoch.runs])

    def show(self) -> None:
        self.memory.own(self.lmdb.slot_ownership.owned)

    apply_again_what_is_there = None  # it makes a difference where it is loaded
    kill_a_writer = None  # the machine of appliers does that (`test_slots_move`)

    @rule()
    def expire(self) -> None:
        self.memory.expire(self.clock_ms, 1 << 30)
        self.lmdb.expire(self.clock_ms, 1 << 30)
        if self.lmdb.slot_ownership.loading is None:
            theirs, mine = self.memory.applied, self.lmdb.applied
            assert (mine.keys, mine.expiring, mine.expiring_maps) == (
                theirs.keys,
                theirs.expiring,
                theirs.expiring_maps,
            )
            assert self.lmdb.expire(self.clock_ms, 1) == 0

    @rule(
        numbers=st.sets(st.integers(0, 30)),
        more=st.sampled_from((NONE, NONE, SlotSet.parse("0-8191"), SlotSet.parse("8192-16383"), ALL)),
        most=st.integers(1, 5),
        times=st.sampled_from((0, 1, 2, 5, 20, 100)),
        epochs=st.sampled_from((0, 1, 2, 5, 100)),
    )
    def hold(self, numbers: set[int], more: SlotSet, most: int, times: int, epochs: int) -> None:
        """Go some of the way towards other slots; the next time goes on from there, or elsewhere."""
        there = sorted({slots.slot_of(key) for keys in KEYS.values() for key in keys})
        wanted = SlotSet.of((there[each % len(there)],) * 2 for each in numbers) | more
        assert self.lmdb.own(wanted).owned - wanted == NONE
        self.show()
        self.what_is_nobodys_is_empty()
        for _ in range(times):
            self.lmdb.remove_given_up(most)
        self.what_is_nobodys_is_empty()
        self.lmdb.own(wanted)
        self.load(epochs)
        self.show()

    @rule()
    def begin_to_load_anew(self) -> None:
        self.lmdb.restart_loading()

    def load(self, epochs: int) -> None:
        """Load epochs, the last one's runs one by one where that may be."""
        for left in reversed(range(epochs)):
            loading = self.lmdb.slot_ownership.loading
            if loading is None or self.epoch < 0:
                return
            epoch = self.of_slots(self.history[loading.epoch + 1], loading.slots)
            then = Loading(loading.slots, epoch.epoch, epoch.term, epoch.clock_ms)
            if left or epoch.replaces or loading.runs:
                runs = list(epoch.runs)[loading.runs :]
                self.lmdb.load(epoch._replace(runs=runs), STATES, then)
            else:
                part = epoch._replace(runs=list(epoch.runs)[:1])
                self.lmdb.load(part, STATES, replace(loading, runs=1))

    @invariant()
    def what_is_nobodys_is_empty(self) -> None:
        ownership = self.lmdb.slot_ownership
        held = ownership.owned | ownership.removing | (ownership.loading.slots if ownership.loading else NONE)
        with self.lmdb.begin() as txn:
            places = [at for at, _ in txn.cursor(db=self.lmdb.tables.keys)]
            counted = [
                (name[4:], sum(count for number, count in SLOT_COUNT.iter_unpack(checked(stored)) if number < EXPIRING))
                for name, stored in txn.cursor(db=self.lmdb.tables.meta)
                if name.startswith(b"slot")
            ]
        assert all(int.from_bytes(at[:2], "big") in held for at in places)
        if held != ALL or counted:
            assert {slot: count for slot, count in counted if count} == Counter(
                at[:2] for at, _ in counted_records(self.lmdb)
            )

    @invariant()
    def counts_are_of_what_is_owned(self) -> None:
        owned = self.lmdb.slot_ownership.owned
        with self.lmdb.begin() as txn:
            names = read_meta(txn, self.lmdb.tables, "g").names()
        found = [record for at, record in counted_records(self.lmdb) if int.from_bytes(at[:2], "big") in owned]
        assert Counter(names[state_number_of(record)] for record in found) == dict(self.lmdb.applied.keys)
        assert sum(expiry_of(record) > 0 for record in found) == self.lmdb.applied.expiring


class StoresAgreeOnSomeSlotsWithSmallRuns(StoresAgreeOnSomeSlots):
    """The changes of one key lie in several runs."""

    rows_of_a_run = 3


class StoresAgreeOnSomeOfThreeSlots(StoresAgreeOnSomeSlots, StoresAgreeWhenPositionsCollide):
    """All keys share three positions, each in a slot of its own."""
