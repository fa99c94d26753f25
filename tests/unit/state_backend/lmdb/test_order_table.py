"""The orders of ordered states' values: what builds a store anew carries them, so that an older row stays older."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from pathlib import Path

import pytest

from state_backend.codec import keep_by_order, packed_map
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slots import store_key_of
from state_backend.store.store import EpochChanges, Snapshot
from tests.builders import apply_epoch
from tests.unit.state_backend.lmdb.collisions import names_at_one_position

LENGTH_MAX = 200
STATES = [
    StateDescriptor("latest", key="k", value="v", last_by="t").for_job("job"),
    StateDescriptor("pair", key="k", value=("a", "b"), last_by="t").for_job("job"),
    StateDescriptor("fields", key="k", field="f", value="v", last_by="t").for_job("job"),
    StateDescriptor("recent", key="k", value="v", kind="list", last_by="t", length_max=LENGTH_MAX).for_job("job"),
    StateDescriptor("plain", key="k", field="f", value="v").for_job("job"),
]
NAMES = [state.name for state in STATES]
# A map is kept in one record, or in a record for each field.
SMALL, LARGE = 2, 2 * packed_map.FIELDS_MAX
KEYS = {state.name: b"job:%b:1" % state.name.encode() for state in STATES}


def row(state: str, order: int, value: bytes, field: bytes | None = None) -> Change:
    return Change(state, Op.FOLD, KEYS[state], field, keep_by_order.pack(b"%03d" % order, value))


def rows(order: int, size: int) -> Iterator[Change]:
    """Yield what a batch has for all states: `size` fields and elements, of this order."""
    value = b"of %d" % order
    yield row("latest", order, value)
    yield row("pair", order, packed_map.pack([(b"a", value), (b"b", value)]))
    for at in range(size):
        yield row("fields", order, value, b"f%d" % at)
        yield row("recent", order, b"%b, %d" % (value, at))


def apply(
    store: LmdbStore, epoch: int, changes: list[Change], replaces: Iterable[str] = (), clock_ms: int | None = None
) -> None:
    runs = runs_of(changes, NAMES)
    store.apply(EpochChanges(epoch, epoch, clock_ms or 1_000 + epoch, runs, frozenset(replaces)), STATES)


def built_from(store: LmdbStore, folder: Path) -> LmdbStore:
    """Build a store from the changes that another's snapshot has."""
    with store.snapshot(2_000) as snapshot:
        copy = LmdbStore(folder, "g")
        apply_epoch(copy, STATES, snapshot.changes(), 0, term=0, clock_ms=1_000)
    return copy


def elements_of(snapshot: Snapshot) -> list[bytes]:
    return list(snapshot.list_elements(KEYS["recent"], 0, snapshot.list_size(KEYS["recent"])))


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_store_built_from_snapshot_knows_orders(tmp_path: Path, size: int) -> None:
    store = LmdbStore(tmp_path / "first", "g")
    apply(store, 0, list(rows(500, size)))
    copy = built_from(store, tmp_path / "second")
    for each in (store, copy):
        apply(each, 1, list(rows(400, size)))  # older
        with each.snapshot(2_000) as snapshot:
            assert snapshot.value(KEYS["latest"]) == b"of 500"
            assert dict(snapshot.map_pairs(KEYS["pair"])) == {b"a": b"of 500", b"b": b"of 500"}
            assert set(dict(snapshot.map_pairs(KEYS["fields"])).values()) == {b"of 500"}
            elements = [b"of %d, %d" % (order, at) for order in (400, 500) for at in range(size)]
            assert elements_of(snapshot) == elements[-LENGTH_MAX:]
        apply(each, 2, list(rows(600, size)))  # newer
        with each.snapshot(2_000) as snapshot:
            assert snapshot.value(KEYS["latest"]) == b"of 600"
            assert set(dict(snapshot.map_pairs(KEYS["fields"])).values()) == {b"of 600"}
        each.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_replaced_state_has_only_rows_of_its_epoch(tmp_path: Path, size: int) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    apply(store, 0, list(rows(500, size)))
    apply(store, 1, list(rows(400, 1)), replaces=NAMES)  # older
    with store.snapshot(2_000) as snapshot:
        assert snapshot.value(KEYS["latest"]) == b"of 400"
        assert dict(snapshot.map_pairs(KEYS["pair"])) == {b"a": b"of 400", b"b": b"of 400"}
        assert dict(snapshot.map_pairs(KEYS["fields"])) == {b"f0": b"of 400"}
        assert elements_of(snapshot) == [b"of 400, 0"]
    store.close()


def test_field_that_is_deleted_or_put_has_no_order(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    apply(store, 0, list(rows(500, 2)))
    put = Change("fields", Op.PUT, KEYS["fields"], b"f1", b"put")
    apply(store, 1, [Change("fields", Op.DELETE, KEYS["fields"], b"f0"), put])
    with store.begin() as txn:
        assert txn.stat(store.tables.orders)["entries"] == 3  # of a value, a pair, and a list
    apply(store, 2, list(rows(400, 2)))  # older
    with store.snapshot(2_000) as snapshot:
        assert dict(snapshot.map_pairs(KEYS["fields"])) == {b"f0": b"of 400", b"f1": b"of 400"}
    store.close()


def test_order_of_expired_field_is_removed(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store", "g")
    changes = [row("fields", 500, b"v", b"f%d" % at)._replace(expire_at_ms=3_000 + at) for at in range(3)]
    apply(store, 0, changes)
    apply(store, 1, [], clock_ms=3_001)
    while store.expire(3_001, 10):
        pass
    with store.begin() as txn:
        assert txn.stat(store.tables.orders)["entries"] == 1
    store.close()


def test_unordered_map_keeps_expiry_beside_ordered_key(tmp_path: Path) -> None:
    ordered, plain = names_at_one_position(2)
    store = LmdbStore(tmp_path / "first", "g")
    put = Change("plain", Op.PUT, plain, None, packed_map.pack([(b"f", b"v")]), 5_000)
    apply(store, 0, [row("latest", 500, b"v")._replace(key=ordered), put])
    copy = built_from(store, tmp_path / "second")
    for each in (store, copy):
        with each.snapshot(2_000) as snapshot:
            found = snapshot.key_info(plain)
            assert found is not None and found.expire_at_ms == 5_000
        each.close()


def test_snapshot_has_orders_of_all_keys_of_position(tmp_path: Path) -> None:
    """Keys of all states share a position, in each order: a map without an order is the first, in between, or last."""
    value = b"at the position"
    made = {
        "latest": (value, None),
        "pair": (packed_map.pack([(b"a", value)]), None),
        "fields": (value, b"f"),
        "recent": (value, None),
    }
    names = names_at_one_position(len(STATES))
    store = LmdbStore(tmp_path / "first", "g")
    for epoch, states in enumerate(permutations(NAMES)):
        keys = dict(zip(states, names, strict=True))
        changes = [
            Change(state, Op.FOLD, keys[state], field, keep_by_order.pack(b"500", content))
            for state, (content, field) in made.items()
        ]
        changes.append(Change("plain", Op.PUT, keys["plain"], b"f", value))
        # One epoch for each key: the rows of a position lie in the order in which their keys came.
        changes.sort(key=lambda change: names.index(change.key))
        for change in changes:
            apply(store, 6 * epoch + names.index(change.key), [change], NAMES if change is changes[0] else ())
        later = next(b"%d" % number for number in range(1_000) if store_key_of(b"%d" % number) > store_key_of(names[0]))
        apply(store, 6 * epoch + 5, [row("latest", 500, value)._replace(key=later)])
        with store.snapshot(2_000) as snapshot:
            found = {change.key: change.op for change in snapshot.changes()}
        assert found == {later: Op.FOLD} | {key: Op.PUT if state == "plain" else Op.FOLD for state, key in keys.items()}
    store.close()


@pytest.mark.parametrize("expire_at_ms", [None, 1])
def test_unstored_value_leaves_no_order(tmp_path: Path, expire_at_ms: int | None) -> None:
    """A map without fields is no value, nor is one that has expired when it comes."""
    store = LmdbStore(tmp_path / "first", "g")
    empty = row("pair", 500, packed_map.pack([] if expire_at_ms is None else [(b"a", b"v")]))
    apply(store, 0, [empty._replace(key=b"k", expire_at_ms=expire_at_ms)])
    plain = Change("plain", Op.PUT, b"k", None, packed_map.pack([(b"f", b"v")]))
    apply(store, 1, [plain])
    with store.snapshot(2_000) as snapshot:
        assert list(snapshot.changes()) == [plain]
    store.close()
