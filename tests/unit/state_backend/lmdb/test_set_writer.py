"""Sets and sorted sets in a log and in a store, by examples; tests/properties has random ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from state_backend.apply.replay import read_snapshot
from state_backend.codec import packed_list, packed_sorted
from state_backend.lmdb import ranks as lmdb_ranks
from state_backend.lmdb.store import LmdbStore
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import ChangeError, StoreError, WrongKindError
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges, Snapshot
from tests.builders import put_field

TAGS = StateDescriptor("tags", key="k", member="m").for_job("job")
TOP = StateDescriptor("top", key="k", member="m", score="s").for_job("job")
STATES = (TAGS, TOP)
KEY, OTHER = b"job:top:a", b"job:tags:a"


put = partial(put_field, "top", KEY)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    opened = LmdbStore(tmp_path / "store", "g")
    yield opened
    opened.close()


def apply(store: LmdbStore, *changes: Change, replaces: frozenset[str] = frozenset()) -> int:
    runs = list(runs_of(changes, [state.name for state in STATES]))
    return store.apply(EpochChanges(store.applied.epoch + 1, 1, 1_000, runs, replaces), STATES)


def ranking(shown: Snapshot, key: bytes = KEY) -> list[tuple[bytes, float]]:
    return list(shown.sorted_members(key, 0, shown.sorted_size(key)))


def test_log_with_set_has_format_that_older_versions_refuse(tmp_path: Path) -> None:
    with LogWriter(tmp_path, "job", STATES) as writer:
        writer.publish([put(b"ann", b"1.5"), put(b"bob", b"inf"), Change("tags", Op.PUT, OTHER, b"x", b"")])
        writer.publish([Change("top", Op.DELETE, KEY, b"ann")])
    generation = tmp_path / "job" / writer.generation
    assert json.loads((generation.parent / "terms" / "1.json").read_text())["format"] == 3
    assert json.loads((generation / "epochs" / "0.json").read_text())["format"] == 3
    with read_snapshot(tmp_path, "job", 0) as shown:
        assert ranking(shown) == [(b"ann", 1.5), (b"bob", float("inf"))]
        assert list(shown.members(OTHER)) == [b"x"]
    with read_snapshot(tmp_path, "job", 1) as shown:
        assert ranking(shown) == [(b"bob", float("inf"))]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (put(b"ann", b"nan"), r"state 'top', key b'job:top:a': b'nan' is no score"),
        (put(b"ann", b""), "is no score"),
        (Change("top", Op.PUT, KEY, None, packed_sorted.pack([(float("nan"), b"x")])), "a score is NaN"),
        (Change("top", Op.PUT, KEY, None, b"\xff\xff\xff\xff"), "no packed sorted set"),
        (Change("top", Op.APPEND, KEY, None, b"1"), "APPEND is for other kinds of state"),
        (Change("top", Op.FOLD, KEY, b"ann", b"1"), "FOLD is for other kinds of state"),
        (Change("top", Op.CLEAR, KEY, b"ann"), "CLEAR is for other kinds of state"),
        (Change("tags", Op.PUT, OTHER, b"x", b"1"), "a member of a set has no value"),
    ],
)
def test_change_unfit_for_set_is_refused_without_epoch(tmp_path: Path, change: Change, complaint: str) -> None:
    with LogWriter(tmp_path, "job", STATES) as writer:
        with pytest.raises(ChangeError, match=complaint):
            writer.publish([change])
        assert writer.last is None


def test_member_that_is_put_with_score_it_has_is_no_change(store: LmdbStore) -> None:
    members = [put(b"%04d" % number, b"%d" % number) for number in range(1000)]
    assert apply(store, *members) > 0
    assert apply(store, *members) == 0
    assert apply(store, put(b"0007", b"7.0")) == 0
    with store.snapshot(1_000) as shown:
        assert shown.changed_since(0) == []
    assert apply(store, put(b"0007", b"7.5")) > 0
    with store.snapshot(1_000) as shown:
        assert shown.changed_since(1) == [KEY]
        assert shown.ranks(KEY, [b"0007"]) == [7]


def test_set_expires_at_time_of_its_last_put(store: LmdbStore) -> None:
    apply(store, put(b"ann", b"1", 2_000), put(b"bob", b"2", 3_000), Change("top", Op.DELETE, KEY, b"ann"))
    with store.snapshot(2_999) as shown:
        entry = shown.key_info(KEY)
        assert entry is not None
        assert entry.expire_at_ms == 3_000
        shown.renew(3_000)
        assert shown.sorted_size(KEY) == 0
    apply(store, put(b"cid", b"3"))
    with store.snapshot(1 << 40) as shown:
        assert ranking(shown) == [(b"bob", 2.0), (b"cid", 3.0)]


def test_replaced_large_set_keeps_records_of_remaining_members(store: LmdbStore) -> None:
    apply(store, *(put(b"%04d" % number, b"%d" % number) for number in range(500)))
    before = store.used_bytes()[0]
    kept = [put(b"%04d" % number, b"%d" % number) for number in range(1, 501)]
    apply(store, *kept, replaces=frozenset({"top"}))
    with store.snapshot(1_000) as shown:
        assert ranking(shown) == [(b"%04d" % number, number) for number in range(1, 501)]
    assert store.expire(1_000, 10) == 0  # nothing was left behind to be removed
    assert store.used_bytes()[0] <= before + 8 * 4096


def test_reads_of_set_of_another_kind_are_wrongtype(store: LmdbStore) -> None:
    apply(store, put(b"ann", b"1"), Change("tags", Op.PUT, OTHER, None, packed_list.pack([b"x"])))
    with store.snapshot(1_000) as shown:
        with pytest.raises(WrongKindError, match=r"holds a set, not a sorted-set"):
            shown.scores(OTHER, [b"x"])
        with pytest.raises(WrongKindError, match=r"holds a sorted-set, not a set"):
            shown.are_members(KEY, [b"ann"])
        with pytest.raises(WrongKindError):
            shown.value(KEY)


def test_members_as_long_as_may_be_make_tree_that_splits_and_joins(store: LmdbStore) -> None:
    members = [b"x" * 65_000 + b"%03d" % number for number in range(40)]
    apply(store, *(put(member, b"1") for member in members))
    with store.snapshot(1_000) as shown:
        assert ranking(shown) == [(member, 1.0) for member in members]
        assert shown.ranks(KEY, members) == list(range(40))
        assert shown.rank_of_member(KEY, members[20], is_after=True) == 21
    apply(store, *(Change("top", Op.DELETE, KEY, member) for member in members[1:]))
    with store.snapshot(1_000) as shown:
        assert ranking(shown) == [(members[0], 1.0)]


def test_inconsistent_tree_is_error(store: LmdbStore) -> None:
    apply(store, *(put(b"%04d" % number, b"%d" % number) for number in range(500)))
    with store._write_transaction() as txn, txn.cursor(db=store.tables.blocks) as cursor:
        names = [name for name, _ in cursor]
        txn.delete(names[1], db=store.tables.blocks)
    with store.snapshot(1_000) as shown, pytest.raises(StoreError, match="rebuilt"):
        ranking(shown)


def test_member_before_first_of_pruned_tree_is_found(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_ranks, "NODE_ENTRIES_MAX", 8)
    apply(store, *(put(b"%04d" % each, b"%d" % each) for each in range(2_000)))
    # The first nodes of each level go, so that those that are first now know of no lower place than their own.
    apply(store, *(Change("top", Op.DELETE, KEY, b"%04d" % each) for each in range(1_900)))
    with store.snapshot(0) as shown:
        assert [shown.rank_of_score(KEY, score, is_after=True) for score in (-1.0, 5.0, 1_900.0)] == [0, 0, 1]
        assert shown.ranks(KEY, [b"1900", b"1999", b"0000"]) == [0, 99, None]
    apply(store, put(b"low", b"-5"))
    with store.snapshot(0) as shown:
        assert shown.ranks(KEY, [b"low", b"1900", b"1999"]) == [0, 1, 100]


def test_rank_and_member_at_rank_touch_few_blocks(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_ranks, "NODE_ENTRIES_MAX", 16)
    count = 5_000
    apply(store, *(put(b"%05d" % number, b"%d" % (number * 7919 % count)) for number in range(count)))
    read = 0
    node = lmdb_ranks.RankTree._node

    def counted(ranks: lmdb_ranks.RankTree, number: int) -> bytes:
        nonlocal read
        read += 1
        return node(ranks, number)

    monkeypatch.setattr(lmdb_ranks.RankTree, "_node", counted)
    with store.snapshot(1_000) as shown:
        for rank in (0, count // 2, count - 10):
            read = 0
            found = list(shown.sorted_members(KEY, rank, rank + 10, is_reversed=True))
            assert [score for _, score in found] == [float(each) for each in reversed(range(rank, rank + 10))]
            assert read <= 8
            read = 0
            assert shown.ranks(KEY, [found[-1][0]]) == [rank]
            assert shown.rank_of_score(KEY, rank + 0.5, is_after=False) == rank + 1
            assert read <= 2 * 5


def test_nothing_is_before_member_of_missing_set(store: LmdbStore) -> None:
    with store.snapshot(1_000) as shown:
        assert shown.rank_of_member(KEY, b"a", is_after=True) == 0
        assert shown.scan_sorted(KEY, 0, 10) == (0, [])


@pytest.mark.parametrize("count", [3, 500])
def test_scan_of_sorted_set_has_each_member_once(store: LmdbStore, count: int) -> None:
    apply(store, *(put(b"%04d" % number, b"%d" % number) for number in range(count)))
    with store.snapshot(1_000) as shown:
        cursor, found = shown.scan_sorted(KEY, 0, 20)
        while cursor:
            cursor, some = shown.scan_sorted(KEY, cursor, 20)
            found += some
    assert sorted(found) == [(b"%04d" % number, float(number)) for number in range(count)]
