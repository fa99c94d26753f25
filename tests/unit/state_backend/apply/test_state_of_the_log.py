"""Two servers of one log hold the same state, whenever each of them tidies up and whatever its clock says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.key_events import KeyEvent
from state_backend.store.store import EpochChanges, Snapshot
from tests.builders import current_of

TTL = timedelta(seconds=1)
TOTAL = StateDescriptor("total", value="v", reduce="sum", columns={"v": "bigint"}, key_format="total:<k>", ttl=TTL)
RECENT = StateDescriptor("recent", member="m", key_format="recent:<k>", ttl=TTL)
LAST = StateDescriptor("last", value="v", kind="list", key_format="last:<k>", ttl=TTL)
COUNTS = StateDescriptor("counts", field="f", reduce="count", key_format="counts:<k>", ttl=TTL)
STATES = (TOTAL, RECENT, LAST, COUNTS)


class Server:
    """An applier with a clock of its own."""

    def __init__(self, folder: Path, name: str, now_ms: int) -> None:
        self.now_ms = now_ms
        self.applier = Applier(
            ChangeLog(folder / "log"), "job", folder / name, lambda event: None, clock=lambda: self.now_ms
        )
        self.step()

    def step(self) -> None:
        while self.applier.step():
            pass

    @property
    def store(self) -> LmdbStore:
        assert self.applier.store is not None
        return self.applier.store


Write = Callable[[int, int], list[Change]]


def total(number: int, clock_ms: int) -> list[Change]:
    return [Change("total", Op.FOLD, b"total:a", None, (b"100", b"1")[number], clock_ms + 1000)]


def members(number: int, clock_ms: int) -> list[Change]:
    names = ([b"m%d" % each for each in range(5)], [b"new"])[number]
    return [Change("recent", Op.PUT, b"recent:a", name, b"", clock_ms + 1000) for name in names]


def elements(number: int, clock_ms: int) -> list[Change]:
    return [Change("last", Op.APPEND, b"last:a", None, b"%d" % number, clock_ms + 1000)]


def counted(number: int, clock_ms: int) -> list[Change]:
    return [Change("counts", Op.FOLD, b"counts:a", b"f", b"10", clock_ms + 1000)]


READS: dict[Write, Callable[[Snapshot], object]] = {
    total: lambda shown: shown.value(b"total:a"),
    members: lambda shown: set(shown.members(b"recent:a")),
    elements: lambda shown: list(shown.list_elements(b"last:a", 0, shown.list_size(b"last:a"))),
    counted: lambda shown: shown.fields(b"counts:a", [b"f"]),
}
EXPECTED: dict[Write, object] = {
    total: b"101",
    members: {b"m0", b"m1", b"m2", b"m3", b"m4", b"new"},
    elements: [b"0", b"1"],
    counted: [b"20"],
}


@pytest.mark.parametrize("write", [total, members, elements, counted])
@pytest.mark.parametrize("way", ["live", "snapshot", "reader ahead"])
def test_key_expiring_during_batch_is_present_on_all_servers(tmp_path: Path, write: Write, way: str) -> None:
    """The batch's clock was read at 900, before the key's time at 1000; the servers look at 1500 and later."""
    writer = LogWriter(tmp_path / "log", "job", STATES, "q")
    writer.publish(write(0, 0), clock_ms=0)
    live = Server(tmp_path, "live", 0)
    live.now_ms = 1_500 if way == "live" else 10_000_000
    live.step()
    if way == "snapshot":
        compact_log(str(tmp_path / "log"), "job", retention_ms=0)
    writer.publish(write(1, 900), clock_ms=900)
    live.step()
    late = Server(tmp_path, "late", 1_600)
    for server in (live, late):
        with server.store.snapshot(1_600) as shown:
            assert READS[write](shown) == EXPECTED[write]
        server.applier.close()


def test_clock_of_epochs_never_goes_back(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", "job", STATES, "q")
    writer.publish([], clock_ms=5_000)
    writer.publish([], clock_ms=4_000)
    LogWriter(tmp_path / "log", "job", STATES, "q").publish([], clock_ms=3_000)
    log, current = current_of(tmp_path / "log")
    epochs = [log.epoch(current, number) for number in range(3)]
    assert [each.clock_ms for each in epochs if each is not None] == [5_000, 5_000, 5_000]


# What a server shows and tells by its own clock -----------------------------------------------------------------------


def recorded_events(store: LmdbStore) -> list[tuple[bytes, list[KeyEvent]]]:
    """Return the events that a store keeps."""
    with store.snapshot(0) as shown:
        kept = shown.stored_event_batches()
        assert kept is not None
        batches = [shown.events(serial) for serial in range(kept.first, kept.next)]
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


def test_expired_keys_of_a_stopped_job_are_not_counted_and_notified_once(store: LmdbStore) -> None:
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
    with store.snapshot(10) as shown:
        assert (shown.value(b"total:a"), shown.scan(0, 10)) == (None, (0, []))
