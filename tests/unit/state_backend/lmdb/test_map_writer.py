"""Maps in an LMDB store, small and large: fields that expire, are deleted or replaced, and what a change counts as."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.codec import packed_map
from state_backend.lmdb.record_format import PIECE_BYTES
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges
from tests.unit.state_backend.lmdb.collisions import names_at_one_position

CITY = StateDescriptor("city", key="k", field="f", value="v").for_job("job")
HITS = StateDescriptor("hits", key="k", field="f", reduce="count").for_job("job")
STATES = (CITY, HITS)
LARGE = packed_map.FIELDS_MAX + 72
NOW_MS = 1000


class Maps:
    """A store with maps."""

    def __init__(self, path: Path) -> None:
        self.store = LmdbStore(path, "g")

    def apply(self, *changes: Change, clock_ms: int = NOW_MS, replaces: frozenset[str] = frozenset()) -> int:
        runs = list(runs_of(changes, [state.name for state in STATES]))
        epoch = EpochChanges(self.store.applied.epoch + 1, 1, clock_ms, runs, replaces)
        return self.store.apply(epoch, STATES)

    def read(self, key: bytes = b"k", now_ms: int = NOW_MS) -> dict[bytes, bytes]:
        """Return a map, as every way to read it gives it."""
        with self.store.snapshot(now_ms) as snapshot:
            found = dict(snapshot.map_pairs(key))
            names = [*found, b"none"]
            assert snapshot.fields(key, names) == [*found.values(), None]
            assert [each is None for each in snapshot.field_expiries(key, names)] == [False] * len(found) + [True]
            assert sum(snapshot.map_sizes(key)) == len(found)
            cursor, scanned = snapshot.scan_map(key, 0, 10)
            while cursor:
                cursor, some = snapshot.scan_map(key, cursor, 10)
                assert len(some) < 30
                scanned += some
            assert len(scanned) == len(found) and {name for name, _ in scanned} == set(found)
            assert (snapshot.key_info(key) is None) is (not found)
        return found

    def expiry(self, key: bytes = b"k") -> int | None:
        with self.store.snapshot(NOW_MS) as snapshot:
            info = snapshot.key_info(key)
            assert info is not None
            return info.expire_at_ms

    def rows(self, table: str) -> int:
        with self.store.begin() as txn:
            return int(txn.stat(getattr(self.store.tables, table))["entries"])


@pytest.fixture
def maps(tmp_path: Path) -> Iterator[Maps]:
    made = Maps(tmp_path / "store")
    yield made
    made.store.close()


def field(name: bytes, value: bytes = b"v", expire_at_ms: int | None = None) -> Change:
    return Change("city", Op.PUT, b"k", name, value, expire_at_ms)


def without(name: bytes | None = None) -> Change:
    return Change("city", Op.DELETE, b"k", name)


def whole(fields: dict[bytes, bytes], expire_at_ms: int | None = None) -> Change:
    return Change("city", Op.PUT, b"k", None, packed_map.pack(fields.items()), expire_at_ms)


def many(count: int = LARGE) -> dict[bytes, bytes]:
    return {b"f%d" % number: b"%d" % number for number in range(count)}


@pytest.mark.parametrize("count", [2, packed_map.FIELDS_MAX, packed_map.FIELDS_MAX + 1, 1000])
def test_map_of_any_size_is_put_changed_and_deleted(maps: Maps, count: int) -> None:
    fields = many(count)
    assert maps.apply(*(field(name, value) for name, value in fields.items())) == count
    assert maps.read() == fields
    with maps.store.snapshot(NOW_MS) as snapshot:  # a small map is sent as it is stored
        packed = snapshot.packed_map(b"k")
        assert (dict(packed_map.pairs(packed)) if packed else None) == (fields if count <= 128 else None)
        assert snapshot.packed_map(b"none") is None
    assert maps.apply(field(b"f1", b"new"), without(b"f0"), without(b"none"), field(b"more")) == 3
    fields = {**fields, b"f1": b"new", b"more": b"v"}
    del fields[b"f0"]
    assert maps.read() == fields
    assert maps.apply(*(field(name, value) for name, value in fields.items())) == 0
    assert maps.apply(*(without(name) for name in fields)) == count
    assert maps.read() == {} and maps.store.applied.key_count == 0


@pytest.mark.parametrize("before", [2, LARGE])
@pytest.mark.parametrize("after", [0, 2, LARGE])
@pytest.mark.parametrize("expire_at_ms", [None, 5000])
def test_map_put_whole_has_no_other_fields(maps: Maps, before: int, after: int, expire_at_ms: int | None) -> None:
    maps.apply(whole(many(before) | {b"other": b"x"}, 9000))
    assert maps.expiry() == 9000
    maps.apply(whole(many(after), expire_at_ms))
    assert maps.read() == many(after)
    if after:
        assert maps.expiry() == expire_at_ms
        assert maps.apply(whole(many(after), expire_at_ms)) == 0
        assert maps.apply(whole({**many(after), b"f1": b"x"}, expire_at_ms)) == 1


@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.parametrize("expire_at_ms", [None, 5000])
def test_replaced_state_has_only_fields_of_its_epoch(maps: Maps, count: int, expire_at_ms: int | None) -> None:
    maps.apply(whole(many(count), expire_at_ms))
    maps.apply(field(b"f1", b"1"), field(b"new"), replaces=frozenset({"city"}))
    assert maps.read() == {b"f1": b"1", b"new": b"v"}
    maps.apply(without(b"new"), replaces=frozenset({"city"}))
    assert maps.read() == {}


def test_map_that_becomes_empty_loses_its_expiry(maps: Maps) -> None:
    maps.apply(whole({b"a": b"1"}, 5000))
    maps.apply(without(b"a"), field(b"b"))
    assert maps.read() == {b"b": b"v"} and maps.expiry() is None
    maps.apply(whole({b"a": b"1"}, 5000))
    maps.apply(field(b"b"), without(b"a"))
    assert maps.read() == {b"b": b"v"} and maps.expiry() == 5000


def test_put_after_last_change_of_whole_map_counts(maps: Maps) -> None:
    maps.apply(field(b"a"), whole({b"b": b"1"}, 5000), field(b"c"), without(b"b"))
    assert maps.read() == {b"c": b"v"} and maps.expiry() == 5000
    maps.apply(field(b"x"), without(), field(b"y"))
    assert maps.read() == {b"y": b"v"} and maps.expiry() is None
    maps.apply(whole({b"b": b"1"}, NOW_MS), field(b"z"))  # the map had expired when it was put
    assert maps.read() == {b"z": b"v"} and maps.expiry() is None


def test_fields_expire_one_by_one_and_last_takes_map_with_it(maps: Maps) -> None:
    maps.apply(*(field(b"f%d" % n, b"%d" % n, 2000 + n) for n in range(200)), field(b"last", b"x", 3000))
    for now_ms, left in ((1999, 201), (2000, 200), (2100, 100), (2199, 1), (3000, 0)):
        assert len(maps.read(now_ms=now_ms)) == left
    with maps.store.snapshot(2100) as snapshot:
        assert snapshot.field_expiries(b"k", [b"f100", b"f101", b"last"]) == [None, 2101, 3000]
    while maps.store.expire(2100, 7):
        pass
    assert maps.rows("fields") == 201  # an epoch of an earlier clock may still change them
    maps.apply(clock_ms=2100)
    while maps.store.expire(2100, 7):
        pass
    assert maps.rows("fields") == maps.rows("field_expiry") == 100
    assert maps.store.applied.expired_fields == 101
    assert len(maps.read(now_ms=2100)) == 100
    maps.apply(field(b"last", b"x"), *(without(b"f%d" % n) for n in range(100, 200)), clock_ms=2100)
    assert maps.read(now_ms=9000) == {b"last": b"x"}
    assert maps.rows("field_expiry") == 0
    maps.apply(field(b"last", b"x", 4000), clock_ms=2100)
    maps.apply(clock_ms=4000)
    while maps.store.expire(4000, 7):
        pass
    assert maps.rows("fields") == maps.rows("keys") == maps.rows("maps") == maps.rows("expiry") == 0
    assert maps.store.applied.key_count == maps.store.applied.expiring_maps == 0
    assert maps.store.applied.expired_keys == 1


@pytest.mark.parametrize("expired", [1, 7, 20])
def test_fields_of_one_position_expire_alone(maps: Maps, expired: int) -> None:
    names = names_at_one_position(20)
    maps.apply(*(field(name, name, 2000 if at < expired else 3000) for at, name in enumerate(names)))
    left = {name: name for name in names[expired:]}
    assert maps.read(now_ms=1999) == {name: name for name in names}
    assert maps.read(now_ms=2000) == left
    maps.apply(clock_ms=2000)
    with maps.store.snapshot(2000) as snapshot:
        assert {change.field for change in snapshot.changes()} == set(left)
    while maps.store.expire(2000, 3):
        pass
    assert maps.rows("fields") == len(left)
    assert maps.rows("field_expiry") == min(len(left), 1)  # an entry for all fields of one position and time
    assert maps.read(now_ms=2000) == left


def test_keys_of_one_position_expire_alone(maps: Maps) -> None:
    names = names_at_one_position(20)
    for at, name in enumerate(names):
        maps.apply(Change("city", Op.PUT, name, None, packed_map.pack([(b"f", name)]), 2000 if at % 3 else 3000))
    maps.apply(clock_ms=2000)
    while maps.store.expire(2000, 3):
        pass
    assert maps.rows("keys") == maps.store.applied.key_count == 7
    assert maps.rows("expiry") == 1  # for all keys of one position and time
    for at, name in enumerate(names):
        assert maps.read(name, now_ms=2000) == ({} if at % 3 else {b"f": name})


def test_deleted_key_leaves_expiry_of_others_at_its_position(maps: Maps) -> None:
    names = names_at_one_position(3)
    packed = packed_map.pack([(b"f", b"v")])
    maps.apply(*(Change("city", Op.PUT, name, None, packed, 2000) for name in names))
    maps.apply(Change("city", Op.DELETE, names[0]), clock_ms=2000)
    while maps.store.expire(2000, 3):
        pass
    assert maps.rows("keys") == maps.rows("expiry") == 0


def test_deleted_field_leaves_expiry_of_others_at_its_position(maps: Maps) -> None:
    names = names_at_one_position(3)
    maps.apply(*(field(name, expire_at_ms=2000) for name in names), field(b"other"))
    maps.apply(without(names[0]))
    maps.apply(clock_ms=2000)
    while maps.store.expire(2000, 3):
        pass
    assert maps.rows("fields") == 1
    assert maps.rows("field_expiry") == maps.rows("expiry") == 0


@pytest.mark.parametrize("change", [field(b"long", b"short"), field(b"long", bytes(PIECE_BYTES + 1)), without(b"long")])
def test_chunks_of_long_value_go_with_it(maps: Maps, change: Change) -> None:
    maps.apply(field(b"long", b"x" * (PIECE_BYTES + 1)), field(b"other", expire_at_ms=5000))
    assert maps.rows("blocks") == 2
    maps.apply(change)
    while maps.store.expire(NOW_MS, 3):
        pass
    assert maps.rows("blocks") == (2 if len(change.value or b"") > PIECE_BYTES else 0)


def test_map_with_expired_fields_that_are_not_removed_yet_begins_anew(maps: Maps) -> None:
    maps.apply(field(b"a", b"1", 2000))
    maps.apply(field(b"b"), clock_ms=2500)
    assert maps.read(now_ms=2500) == {b"b": b"v"}
    maps.apply(field(b"b", b"1", 3000), field(b"c", b"1", 9000), clock_ms=2500)
    maps.apply(field(b"b", b"2"), clock_ms=3500)
    assert maps.read(now_ms=3500) == {b"b": b"2", b"c": b"1"}


@pytest.mark.parametrize("count", [1, 3, 6, LARGE])
def test_folds_go_into_fields_that_are_there(maps: Maps, count: int) -> None:
    def fold(name: bytes) -> Change:
        return Change("hits", Op.FOLD, b"h", name, b"1")

    names = list(many(count))
    maps.apply(*(fold(name) for name in names))
    maps.apply(*(fold(name) for name in names for _ in range(2)))
    assert maps.read(b"h") == dict.fromkeys(names, b"3")
    maps.apply(Change("hits", Op.DELETE, b"h", names[0]), fold(names[0]), *(fold(name) for name in names[1:]))
    assert maps.read(b"h") == dict.fromkeys(names, b"4") | {names[0]: b"1"}
    maps.apply(Change("hits", Op.DELETE, b"h"), *(fold(name) for name in names))
    assert maps.read(b"h") == dict.fromkeys(names, b"1")
    put = Change("hits", Op.PUT, b"h", None, packed_map.pack([(names[0], b"40")]))
    maps.apply(put, *(fold(name) for name in names))
    assert maps.read(b"h") == dict.fromkeys(names, b"1") | {names[0]: b"41"}
    maps.apply(Change("hits", Op.PUT, b"h", names[0], b"7", NOW_MS), *(fold(name) for name in names))
    assert maps.read(b"h") == dict.fromkeys(names, b"2") | {names[0]: b"1"}
