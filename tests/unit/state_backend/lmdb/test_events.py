"""Events of keys in an LMDB store: which events a change makes, in which order, and how many batches are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from state_backend.codec import packed_list, packed_map, packed_sorted
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.key_events import KeyEvent
from state_backend.store.store import EpochChanges
from tests.builders import put_value

STATES = (
    StateDescriptor("temp", key="k", value="v").for_job("job"),
    StateDescriptor("total", key="k", value="v", reduce="sum", columns={"v": "bigint"}).for_job("job"),
    StateDescriptor("city", key="k", field="f", value="v").for_job("job"),
    StateDescriptor("news", key="k", value="v", kind="list").for_job("job"),
    StateDescriptor("last", key="k", value="v", kind="list", length_max=2).for_job("job"),
    StateDescriptor("tags", key="k", member="m").for_job("job"),
    StateDescriptor("best", key="k", member="m", score="s").for_job("job"),
)
NAMES = [state.name for state in STATES]
MANY = 200  # items of a large map, set or list
NOW_MS = 1000


put = partial(put_value, "temp", b"k")


def put_item(state: str, name: bytes, value: bytes = b"", expire_at_ms: int | None = None) -> Change:
    return Change(state, Op.PUT, b"k", name, value, expire_at_ms)


def delete(state: str, name: bytes | None = None) -> Change:
    return Change(state, Op.DELETE, b"k", name)


def append(element: bytes, state: str = "news", expire_at_ms: int | None = None) -> Change:
    return Change(state, Op.APPEND, b"k", None, element, expire_at_ms)


def fold(value: bytes) -> Change:
    return Change("total", Op.FOLD, b"k", None, value)


def packed(**fields: bytes) -> bytes:
    return packed_map.pack((name.encode(), value) for name, value in fields.items())


def many(state: str) -> list[Change]:
    if state == "news":
        return [append(b"%d" % n) for n in range(MANY)]
    return [put_item(state, b"%d" % n, b"%d" % n if state != "tags" else b"") for n in range(MANY)]


class Recorded:
    """A store that records events."""

    def __init__(self, path: Path) -> None:
        self.store = LmdbStore(path, "g")
        self.store.records_events = True
        self._read = 0

    def apply(self, changes: Iterable[Change], clock_ms: int = NOW_MS, replaces: frozenset[str] = frozenset()) -> None:
        runs = list(runs_of(changes, NAMES))
        self.store.apply(EpochChanges(self.store.applied.epoch + 1, 1, clock_ms, runs, replaces), STATES)

    def events(self) -> list[tuple[bytes, str]]:
        """Return the events since the last call: each key with the names of its events."""
        with self.store.snapshot(NOW_MS) as snapshot:
            stored = snapshot.stored_event_batches()
            assert stored is not None
            found = []
            for serial in range(self._read, stored.next):
                batch = snapshot.events(serial)
                assert batch is not None
                found += batch.events
            self._read = stored.next
        return [(key, " ".join(KeyEvent(each).name for each in events)) for key, events in found]

    def events_of(self, *changes: Change, **other: Any) -> str:
        """Apply changes of one key, and return its events."""
        self.apply(changes, **other)
        found = self.events()
        assert [key for key, _ in found] == [b"k"] * len(found)
        return " | ".join(text for _, text in found)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded(tmp_path / "store")
    yield made
    made.store.close()


CASES: list[tuple[list[Change], list[Change], str]] = [
    # values
    ([], [put(b"1")], "NEW SET"),
    ([], [put(b"1", 5000)], "NEW SET EXPIRY_SET"),
    ([put(b"1")], [put(b"1")], ""),
    ([put(b"1")], [put(b"2")], "SET"),
    ([put(b"1", 5000)], [put(b"1", 6000)], "SET EXPIRY_SET"),
    ([put(b"1", 5000)], [put(b"1")], "SET"),
    ([put(b"1")], [delete("temp")], "DELETED"),
    ([], [delete("temp")], ""),
    # the difference that all changes make
    ([], [put(b"1"), put(b"2")], "NEW SET"),
    ([], [put(b"1"), put(b"2", 5000)], "NEW SET EXPIRY_SET"),
    ([], [put(b"1"), delete("temp")], ""),
    ([put(b"1")], [put(b"2"), put(b"1")], ""),
    ([put(b"1")], [put(b"2"), delete("temp")], "DELETED"),
    ([put(b"1")], [delete("temp"), put(b"2")], "SET"),
    ([put_value("total", b"k", b"1")], [fold(b"2"), fold(b"3")], "SET"),
    ([put_value("total", b"k", b"1")], [fold(b"2"), fold(b"-2")], ""),
    ([], [put(b"x" * 100_000)], "NEW SET"),
    ([put(b"x" * 100_000)], [put(b"x" * 100_000)], ""),
    ([put_value("total", b"k", b"1")], [fold(b"2")], "SET"),
    # maps
    ([], [put_item("city", b"a", b"1")], "NEW FIELDS_SET"),
    ([], [put_value("city", b"k", packed(a=b"1", b=b"2"))], "NEW FIELDS_SET"),
    ([put_item("city", b"a", b"1")], [put_item("city", b"a", b"1")], ""),
    ([put_item("city", b"a", b"1")], [put_item("city", b"a", b"2")], "FIELDS_SET"),
    ([put_item("city", b"a", b"1")], [put_item("city", b"b", b"1")], "FIELDS_SET"),
    ([put_item("city", b"a", b"1")], [put_item("city", b"a", b"1", 5000)], "FIELDS_SET FIELD_EXPIRY_SET"),
    ([put_item("city", b"a", b"1", 5000)], [put_item("city", b"a", b"1", 5000)], ""),
    ([put_item("city", b"a", b"1", 5000)], [put_item("city", b"a", b"1")], "FIELDS_SET"),
    ([put_value("city", b"k", packed(a=b"1", b=b"2"))], [delete("city", b"a")], "FIELDS_DELETED"),
    ([put_value("city", b"k", packed(a=b"1"))], [delete("city", b"b")], ""),
    ([put_value("city", b"k", packed(a=b"1"))], [delete("city", b"a")], "FIELDS_DELETED DELETED"),
    ([put_value("city", b"k", packed(a=b"1"))], [delete("city")], "DELETED"),
    ([put_value("city", b"k", packed(a=b"1"))], [delete("city", b"a"), put_item("city", b"b", b"1")],
     "FIELDS_SET FIELDS_DELETED"),
    ([put_value("city", b"k", packed(a=b"1"))], [put_value("city", b"k", packed(a=b"1")), put_item("city", b"b", b"1")],
     "FIELDS_SET"),
    ([put_value("city", b"k", packed(a=b"1", b=b"2"))], [put_value("city", b"k", packed(a=b"1"))], "FIELDS_DELETED"),
    ([put_value("city", b"k", packed(a=b"1", b=b"2"))], [put_value("city", b"k", packed(a=b"1", c=b"2"))],
     "FIELDS_SET FIELDS_DELETED"),
    ([put_value("city", b"k", packed(a=b"1"))], [put_value("city", b"k", packed(a=b"1"), 5000)], "EXPIRY_SET"),
    ([put_value("city", b"k", packed(a=b"1"), 5000)], [put_value("city", b"k", packed(a=b"1"))], "EXPIRY_REMOVED"),
    ([put_value("city", b"k", packed(a=b"1"), 5000)], [put_value("city", b"k", packed(a=b"2"), 5000)], "FIELDS_SET"),
    (many("city"), [put_item("city", b"7", b"x")], "FIELDS_SET"),
    (many("city"), [put_item("city", b"7", b"7")], ""),
    (many("city"), [delete("city", b"7")], "FIELDS_DELETED"),
    (many("city"), [delete("city", b"x")], ""),
    (many("city"), [put_value("city", b"k", packed(a=b"1"))], "FIELDS_SET FIELDS_DELETED"),
    (many("city"), [delete("city")], "DELETED"),
    # sets
    ([], [put_item("tags", b"a")], "NEW MEMBERS_ADDED"),
    ([put_item("tags", b"a")], [put_item("tags", b"a")], ""),
    ([put_item("tags", b"a")], [put_item("tags", b"b")], "MEMBERS_ADDED"),
    ([put_item("tags", b"a")], [delete("tags", b"a")], "MEMBERS_REMOVED DELETED"),
    ([put_value("tags", b"k", packed_list.pack([b"a", b"b"]))],
     [put_value("tags", b"k", packed_list.pack([b"b", b"c"]))],
     "MEMBERS_ADDED MEMBERS_REMOVED"),
    ([put_item("tags", b"a")], [put_item("tags", b"a", b"", 5000)], "EXPIRY_SET"),
    (many("tags"), [put_item("tags", b"x"), delete("tags", b"7")], "MEMBERS_ADDED MEMBERS_REMOVED"),
    # sorted sets
    ([], [put_item("best", b"a", b"1")], "NEW SCORES_SET"),
    ([put_item("best", b"a", b"1")], [put_item("best", b"a", b"1.0")], ""),
    ([put_item("best", b"a", b"1")], [put_item("best", b"a", b"2")], "SCORES_SET"),
    ([put_item("best", b"a", b"1"), put_item("best", b"b", b"1")], [delete("best", b"a")], "SCORES_REMOVED"),
    ([put_item("best", b"a", b"1")], [delete("best", b"a")], "SCORES_REMOVED DELETED"),
    ([put_item("best", b"a", b"1")], [put_value("best", b"k", packed_sorted.pack_members([(b"b", 1.0)]))],
     "SCORES_SET SCORES_REMOVED"),
    (many("best"), [put_item("best", b"7", b"7")], ""),
    (many("best"), [put_item("best", b"7", b"8")], "SCORES_SET"),
    # lists
    ([], [append(b"1"), append(b"2")], "NEW APPENDED"),
    ([append(b"1")], [append(b"2")], "APPENDED"),
    ([append(b"1")], [append(b"2", expire_at_ms=5000)], "APPENDED EXPIRY_SET"),
    ([append(b"1")], [put_value("news", b"k", packed_list.pack([b"1"]))], ""),
    ([append(b"1")], [put_value("news", b"k", packed_list.pack([b"2"]))], "DELETED NEW APPENDED"),
    ([append(b"1")], [delete("news")], "DELETED"),
    ([append(b"1")], [delete("news"), append(b"2")], "DELETED NEW APPENDED"),
    ([append(b"1"), append(b"2")], [put_value("news", b"k", packed_list.pack([]))], "DELETED"),
    (many("news"), [append(b"x")], "APPENDED"),
    ([append(b"1", "last"), append(b"2", "last")], [append(b"3", "last")], "APPENDED TRIMMED"),
    ([append(b"1", "last")], [append(b"2", "last")], "APPENDED"),
    ([], [append(b"%d" % n, "last") for n in range(3)], "NEW APPENDED TRIMMED"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "changes", "events"), CASES)
def test_change_makes_events_of_commands_that_would_make_it(
    recorded: Recorded, before: list[Change], changes: list[Change], events: str
) -> None:
    recorded.apply(before)
    recorded.events()
    assert recorded.events_of(*changes) == events


def test_key_that_expires_is_announced_once(recorded: Recorded) -> None:
    recorded.apply([put(b"1", NOW_MS + 10)])
    recorded.events()
    assert recorded.store.expire(NOW_MS + 9, 100) == 0
    recorded.store.expire(NOW_MS + 10, 100)
    assert recorded.events() == [(b"k", "EXPIRED")]
    assert recorded.events_of(put(b"2"), clock_ms=NOW_MS + 20) == "NEW SET"


def test_expired_key_put_before_its_event_has_both_events(recorded: Recorded) -> None:
    recorded.apply([put(b"1", NOW_MS + 10)])
    recorded.events()
    assert recorded.events_of(put(b"2"), clock_ms=NOW_MS + 20) == "EXPIRED NEW SET"
    recorded.store.expire(NOW_MS + 30, 100)
    assert recorded.events() == []


@pytest.mark.parametrize("expire_at_ms", [NOW_MS + 50, 0])
def test_key_that_is_put_after_its_time_is_announced_at_once(recorded: Recorded, expire_at_ms: int) -> None:
    """The server's clock is ahead of the log's, which decides what an epoch may still change."""
    recorded.apply([Change("temp", Op.PUT, b"other", None, b"1", NOW_MS + 10)])
    recorded.store.expire(NOW_MS + 100, 100)
    recorded.events()
    assert recorded.events_of(put(b"1", expire_at_ms)) == "NEW SET EXPIRY_SET EXPIRED"
    late_field = put_item("city", b"a", b"1", expire_at_ms)
    recorded.apply([late_field._replace(key=b"map")])
    assert recorded.events() == [(b"map", "NEW FIELDS_SET FIELD_EXPIRY_SET FIELDS_EXPIRED")]


def test_fields_that_expire_are_announced_and_last_one_deletes_its_map(recorded: Recorded) -> None:
    fields = [put_item("city", b"a", b"1", NOW_MS + 10), put_item("city", b"b", b"1", NOW_MS + 20)]
    recorded.apply(fields)
    recorded.events()
    recorded.store.expire(NOW_MS + 10, 100)
    assert recorded.events() == [(b"k", "FIELDS_EXPIRED")]
    recorded.store.expire(NOW_MS + 20, 100)
    assert recorded.events() == [(b"k", "FIELDS_EXPIRED DELETED")]


def test_expired_map_is_deleted_by_epoch_putting_it(recorded: Recorded) -> None:
    recorded.apply([put_item("city", b"a", b"1", NOW_MS + 10)])
    recorded.events()
    assert recorded.events_of(put_item("city", b"b", b"1"), clock_ms=NOW_MS + 20) == (
        "FIELDS_EXPIRED DELETED NEW FIELDS_SET"
    )


def test_keys_that_replaced_state_no_longer_has_are_deleted(recorded: Recorded) -> None:
    recorded.apply([put(b"1"), put(b"1")._replace(key=b"gone"), put(b"1")._replace(key=b"same")])
    recorded.events()
    recorded.apply([put(b"2"), put(b"1")._replace(key=b"same")], replaces=frozenset({"temp"}))
    assert sorted(recorded.events()) == [(b"gone", "DELETED"), (b"k", "SET")]


def test_key_that_moves_to_another_replaced_state_is_deleted_and_new(recorded: Recorded) -> None:
    recorded.apply([put(b"1")])
    recorded.events()
    both = frozenset({"temp", "city"})
    assert recorded.events_of(put_value("city", b"k", packed(a=b"1")), replaces=both) == "DELETED NEW FIELDS_SET"


def test_events_are_stored_in_batches_of_bounded_size(recorded: Recorded) -> None:
    recorded.store.event_batch_bytes = 100
    recorded.apply([put(b"1")._replace(key=b"key:%03d" % n) for n in range(50)])
    with recorded.store.snapshot(NOW_MS) as snapshot:
        stored = snapshot.stored_event_batches()
        assert stored is not None
        batches = [snapshot.events(serial) for serial in range(stored.next)]
    assert stored.first == 0 and len(stored.id) == 8
    assert [len(each.events) for each in batches if each is not None] == [8] * 6 + [2]  # of 13 bytes each
    assert {(each.epoch, each.term) for each in batches if each is not None} == {(0, 1)}
    assert sorted(recorded.events()) == [(b"key:%03d" % n, "NEW SET") for n in range(50)]
    id_before = stored.id
    recorded.apply([put(b"1")])
    with recorded.store.snapshot(NOW_MS) as snapshot:
        stored = snapshot.stored_event_batches()
        assert stored is not None and (stored.id, stored.next) == (id_before, 8)
        last = snapshot.events(7)
        assert last is not None and last.epoch == 1


def test_oldest_chunks_are_deleted_if_all_are_too_large(recorded: Recorded) -> None:
    recorded.store.event_batch_bytes, recorded.store.events_bytes_max = 1, 300
    recorded.apply([put(b"1")._replace(key=b"key:%03d" % n) for n in range(50)])
    with recorded.store.snapshot(NOW_MS) as snapshot:
        stored = snapshot.stored_event_batches()
        assert stored is not None and stored.next == 50
        sizes = [snapshot.events(serial) is not None for serial in range(50)]
    assert sizes == [False] * stored.first + [True] * (50 - stored.first)
    assert 0 < stored.bytes <= 300
    assert stored.bytes % (50 - stored.first) == 0 and stored.bytes + stored.bytes // (50 - stored.first) > 300


def test_last_batch_of_events_stays_at_any_size(recorded: Recorded) -> None:
    recorded.store.events_bytes_max = 1
    for number in range(3):
        recorded.apply([put(b"%d" % number)])
    with recorded.store.snapshot(NOW_MS) as snapshot:
        stored = snapshot.stored_event_batches()
        assert stored is not None and (stored.first, stored.next) == (2, 3)
        assert snapshot.events(1) is None and snapshot.events(2) is not None


def test_events_are_deleted_in_batches_without_subscribers(recorded: Recorded) -> None:
    recorded.store.event_batch_bytes = 1
    recorded.apply([put(b"1")._replace(key=b"key:%03d" % n) for n in range(5)])
    recorded.store.records_events = False
    recorded.apply([put(b"1")])
    for first in (2, 4):
        assert not recorded.store.delete_events(2)
        with recorded.store.snapshot(NOW_MS) as snapshot:
            stored = snapshot.stored_event_batches()
            assert stored is not None and (stored.first, stored.next) == (first, 5)
            assert snapshot.events(first - 1) is None and snapshot.events(first) is not None
    assert recorded.store.delete_events(2)
    assert recorded.store.delete_events(2)  # there are none
    with recorded.store.snapshot(NOW_MS) as snapshot:
        assert snapshot.stored_event_batches() is None and snapshot.events(4) is None
