"""Plain values in an LMDB store: many at a time, with the same outcome as one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from state_backend.codec import keep_by_order
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import StoreError
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges
from tests.builders import put_value

STATES = (
    StateDescriptor("temp", key="k", value="v").for_job("job"),
    StateDescriptor("total", key="k", value="v", reduce="sum", columns={"v": "bigint"}).for_job("job"),
    StateDescriptor("latest", key="k", value="v", last_by="t").for_job("job"),
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    opened = LmdbStore(tmp_path / "store", "g")
    yield opened
    opened.close()


def apply(store: LmdbStore, *changes: Change) -> int:
    runs = list(runs_of(changes, [state.name for state in STATES]))
    return store.apply(EpochChanges(store.applied.epoch + 1, 1, 1, runs), STATES)


put = partial(put_value, "temp")


def fold(key: bytes, value: bytes) -> Change:
    return Change("total", Op.FOLD, key, None, value)


def ordered(key: bytes, order: int) -> Change:
    return Change("latest", Op.FOLD, key, None, keep_by_order.pack(b"%03d" % order, b"of %d" % order))


def test_many_values_are_put_counted_and_changed(store: LmdbStore) -> None:
    keys = [b"k%d" % number for number in range(1000)]
    assert apply(store, *(put(key, b"1") for key in keys)) == 1000
    assert apply(store, *(put(key, b"1") for key in keys)) == 0
    assert apply(store, *(put(key, b"2") for key in keys[:10]), put(b"new", b"x" * 100_000)) == 11
    assert store.applied.keys == {"temp": 1001}
    with store.snapshot(1) as snapshot:
        assert snapshot.changed_since(1) is not None
        assert sorted(snapshot.changed_since(1) or ()) == sorted([*keys[:10], b"new"])
        assert [snapshot.value(key) for key in keys] == [b"2"] * 10 + [b"1"] * 990
        assert snapshot.value(b"new") == b"x" * 100_000


def test_many_folds_go_into_values_that_are_there(store: LmdbStore) -> None:
    keys = [b"t%d" % number for number in range(300)]
    apply(store, *(fold(key, b"5") for key in keys))
    apply(store, *(fold(key, b"%d" % number) for number, key in enumerate(keys)), fold(keys[0], b"100"))
    with store.snapshot(1) as snapshot:
        assert [snapshot.value(key) for key in keys] == [b"105", *(b"%d" % (5 + n) for n in range(1, 300))]
    assert store.applied.keys == {"total": 300}


def test_many_rows_with_order_leave_value_of_last_one(store: LmdbStore) -> None:
    keys = [b"l%d" % number for number in range(300)]
    apply(store, *(ordered(key, 500) for key in keys))
    assert apply(store, *(ordered(key, 350 + number) for number, key in enumerate(keys))) == 149
    assert apply(store, *(ordered(key, 499) for key in keys)) == 0
    with store.snapshot(1) as snapshot:
        assert [snapshot.value(key) for key in keys] == [b"of %d" % max(500, 350 + n) for n in range(300)]
    assert store.applied.keys == {"latest": 300}


def test_unfoldable_value_is_error_with_state_and_key(store: LmdbStore) -> None:
    apply(store, fold(b"a", b"5"), fold(b"b", b"5"))
    with pytest.raises(StoreError, match=r"total.*b'b'"):
        apply(store, fold(b"a", b"1"), fold(b"b", b"many"))
    with store.snapshot(1) as snapshot:
        assert snapshot.value(b"a") == snapshot.value(b"b") == b"5"
