"""Expired keys of a store: how they are counted, notified and hidden, by the log's clock and the server's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.key_events import KeyEvent
from state_backend.store.store import EpochChanges

TTL = timedelta(seconds=1)
TOTAL = StateDescriptor("total", value="v", reduce="sum", columns={"v": "bigint"}, key_format="total:<k>", ttl=TTL)
RECENT = StateDescriptor("recent", member="m", key_format="recent:<k>", ttl=TTL)
COUNTS = StateDescriptor("counts", field="f", reduce="count", key_format="counts:<k>", ttl=TTL)
STATES = (TOTAL, RECENT, COUNTS)


def total(number: int, clock_ms: int) -> list[Change]:
    return [Change("total", Op.FOLD, b"total:a", None, (b"100", b"1")[number], clock_ms + 1000)]


def members(number: int, clock_ms: int) -> list[Change]:
    names = ([b"m%d" % each for each in range(5)], [b"new"])[number]
    return [Change("recent", Op.PUT, b"recent:a", name, b"", clock_ms + 1000) for name in names]


def recorded_events(store: LmdbStore) -> list[tuple[bytes, list[KeyEvent]]]:
    """Return the events that a store keeps."""
    with store.snapshot(0) as view:
        kept = view.stored_event_batches()
        assert kept is not None
        batches = [view.events(serial) for serial in range(kept.first, kept.next)]
        return [(key, list(map(KeyEvent, what))) for batch in batches if batch for key, what in batch.events]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path / "store", "g")
    store.records_events = True
    yield store
    store.close()


def apply(store: LmdbStore, clock_ms: int, *changes: Change) -> None:
    runs = list(runs_of(changes, [state.name for state in STATES]))
    store.apply(EpochChanges(store.applied.epoch + 1, 1, clock_ms, runs), STATES)


def records(store: LmdbStore) -> int:
    with store.begin() as txn:
        return int(txn.stat(store.tables.keys)["entries"])


def test_expired_keys_of_stopped_job_are_not_counted_and_notified_once(store: LmdbStore) -> None:
    apply(store, 0, *total(0, 0), *members(0, 500))
    for now_ms in (1_000, 1_200):
        store.expire(now_ms, 100)
    assert (store.applied.keys, store.applied.expiring, store.applied.expired_keys) == ({"recent": 1}, 1, 1)
    assert records(store) == 2  # an epoch whose clock was read before may still come
    assert [key for key, what in recorded_events(store) if KeyEvent.EXPIRED in what] == [b"total:a"]
    apply(store, 1_000)
    store.expire(1_200, 100)
    assert (store.applied.keys, store.applied.expired_keys, records(store)) == ({"recent": 1}, 1, 1)
    assert [key for key, what in recorded_events(store) if KeyEvent.EXPIRED in what] == [b"total:a"]


def test_changed_expired_key_is_notified_again_and_counted_if_live(store: LmdbStore) -> None:
    apply(store, 0, *total(0, 0))
    store.expire(1_500, 100)
    assert store.applied.keys == {}
    apply(store, 900, *total(1, 900))  # the epoch's clock was read before the key's time
    assert (store.applied.keys, store.applied.expiring) == ({"total": 1}, 1)
    store.expire(1_900, 100)
    assert (store.applied.keys, recorded_events(store)[-1]) == ({}, (b"total:a", [KeyEvent.EXPIRED]))
    apply(store, 950, Change("total", Op.FOLD, b"total:a", None, b"1", 1_850))
    assert store.applied.keys == {}  # it came when its time had passed
    assert recorded_events(store)[-1][1][-1] is KeyEvent.EXPIRED


def test_clock_set_back_by_hours_restores_counts(store: LmdbStore) -> None:
    apply(store, 0, *total(0, 0), *members(0, 100_000))
    for now_ms, expected in ((3_600_000, {}), (50_000, {"recent": 1}), (101_000, {}), (100_000, {})):
        while store.expire(now_ms, 1) >= 1:
            pass
        assert store.applied.keys == expected
    apply(store, 200_000)
    while store.expire(0, 1) >= 1:  # the log is ahead of this server's clock
        pass
    assert (store.applied.keys, store.applied.expiring, records(store)) == ({}, 0, 0)


def test_each_expired_field_is_notified(store: LmdbStore) -> None:
    fields = [Change("counts", Op.FOLD, b"counts:a", b"%d" % at_ms, b"1", at_ms) for at_ms in (100, 200, 300)]
    apply(store, 0, *fields)
    for now_ms in (150, 160, 250, 350):
        store.expire(now_ms, 100)
    expired = [what for _, what in recorded_events(store)[1:]]
    assert expired == [
        [KeyEvent.FIELDS_EXPIRED],
        [KeyEvent.FIELDS_EXPIRED],
        [KeyEvent.FIELDS_EXPIRED, KeyEvent.DELETED],
    ]
    apply(store, 400)
    store.expire(400, 100)
    assert (store.applied.expired_fields, records(store), len(recorded_events(store))) == (3, 0, 4)


def test_readers_see_no_key_expired_by_log_clock(store: LmdbStore) -> None:
    apply(store, 0, *total(0, 0))
    apply(store, 5_000)
    with store.snapshot(10) as view:
        assert (view.value(b"total:a"), view.scan(0, 10)) == (None, (0, []))
