"""Keys of slots that a store does not own are errors, never missing; a view sees changed slots at its next renewal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import SlotLoadingError
from state_backend.model.records import Change, Op, runs_of
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.keyspace import Job, Keyspace, KeyspaceView
from state_backend.store.slot_ownership import Loading
from state_backend.store.store import EpochChanges

NOW_MS = 1_000
LOW, HIGH = SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")
STATE = StateDescriptor("s", key="k", value="v")
# A key that no store has, in HIGH.
ABSENT_KEY = next(key for key in (b"a:s:none%d" % number for number in range(100)) if slot_of(key) in HIGH)


class Part:
    """One job and a store of it that owns some slots, in each of which every key has one value."""

    def __init__(self, folder: Path, name: str, owned: SlotSet) -> None:
        self.keys = [b"%b:s:%d" % (name.encode(), number) for number in range(100)]
        self.store = LmdbStore(folder / name, "g")
        self.job = Job(name, "g", [STATE], self.store)
        self.store.own(owned)
        self.publish(0, b"0")

    def _changes(self, epoch: int, slots: SlotSet, value: bytes) -> EpochChanges:
        changes = [Change("s", Op.PUT, key, None, value) for key in self.keys_in(slots)]
        return EpochChanges(epoch, 1, NOW_MS, list(runs_of(changes, ["s"])))

    def keys_in(self, slots: SlotSet) -> list[bytes]:
        return [key for key in self.keys if slot_of(key) in slots]

    def publish(self, epoch: int, value: bytes) -> None:
        self.store.apply(self._changes(epoch, self.store.slot_ownership.owned, value), [STATE])

    def lose(self, slots: SlotSet) -> None:
        self.store.own(self.store.slot_ownership.owned - slots)

    def gain(self, slots: SlotSet, value: bytes) -> None:
        while self.store.remove_given_up(1000):
            pass
        self.store.own(self.store.slot_ownership.owned | slots)
        applied = self.store.applied
        then = Loading(slots, applied.epoch, applied.term, applied.clock_ms)
        self.store.load(self._changes(applied.epoch, slots, value), [STATE], then)


@pytest.fixture
def part(tmp_path: Path) -> Callable[..., Part]:
    return lambda name="a", owned=LOW: Part(tmp_path, name, owned)


def keyspace_of(*parts: Part) -> Keyspace:
    keyspace = Keyspace()
    for each in parts:
        keyspace.put(each.job)
    return keyspace


def read(view: KeyspaceView, keys: Sequence[bytes]) -> set[bytes | None]:
    return {view.at(key).value(key) for key in keys}


def is_refused(view: KeyspaceView, keys: Sequence[bytes]) -> bool:
    for key in keys:
        with pytest.raises(SlotLoadingError, match=f"slot {slot_of(key)} of job '.' is not loaded here yet"):
            view.at(key)
    return True


def test_key_of_unowned_slot_is_error_until_it_is_owned(part: Callable[..., Part]) -> None:
    a = part()
    view = keyspace_of(a).view(NOW_MS)
    assert read(view, a.keys_in(LOW)) == {b"0"}
    assert is_refused(view, [*a.keys_in(HIGH), ABSENT_KEY])
    a.gain(HIGH, b"0")
    assert is_refused(view, a.keys_in(HIGH))
    view.renew(NOW_MS)
    assert read(view, a.keys) == {b"0"}
    assert read(view, [ABSENT_KEY]) == {None}
    a.lose(LOW)
    assert read(view, a.keys) == {b"0"}
    view.renew(NOW_MS)
    assert read(view, a.keys_in(HIGH)) == {b"0"}
    assert is_refused(view, a.keys_in(LOW))


def test_another_jobs_keys_of_same_slots_are_read(part: Callable[..., Part]) -> None:
    a, b = part("a", LOW), part("b", ALL)
    keyspace = keyspace_of(a, b)
    view = keyspace.view(NOW_MS)
    assert read(view, b.keys) == read(view, a.keys_in(LOW)) == {b"0"}
    assert is_refused(view, a.keys_in(HIGH))
    assert read(view, [b"nobody:s:%d" % number for number in range(100)]) == {None}
    keyspace.remove("a")
    view.renew(NOW_MS)
    assert read(view, [*a.keys]) == {None}
    assert view.key_count() == 100


@pytest.mark.parametrize(
    "ask",
    [
        KeyspaceView.key_count,
        lambda view: view.scan(0, 10),
        lambda view: next(view.random_keys()),
        KeyspaceView.check_complete,
    ],
)
def test_store_with_missing_slots_lists_nothing(
    part: Callable[..., Part], ask: Callable[[KeyspaceView], object]
) -> None:
    a, b = part("a", LOW), part("b", ALL)
    view = keyspace_of(b, a).view(NOW_MS)
    with pytest.raises(SlotLoadingError, match="8192 slots of job 'a' are not loaded here yet"):
        ask(view)
    a.gain(HIGH, b"0")
    view.renew(NOW_MS)
    ask(view)
    assert view.key_count() == 200


def test_store_that_owns_nothing_answers_nothing(part: Callable[..., Part]) -> None:
    a = part("a", NONE)
    view = keyspace_of(a).view(NOW_MS)
    assert is_refused(view, a.keys)
    with pytest.raises(SlotLoadingError):
        view.key_count()


def test_new_store_of_job_reports_its_own_slots(part: Callable[..., Part], tmp_path: Path) -> None:
    a = part("a", LOW)
    keyspace = keyspace_of(a)
    view = keyspace.view(NOW_MS)
    assert is_refused(view, a.keys_in(HIGH))
    (tmp_path / "new").mkdir()
    whole = Part(tmp_path / "new", "a", ALL)
    keyspace.put(whole.job)
    view.renew(NOW_MS)
    assert read(view, whole.keys) == {b"0"}
    keyspace.put(a.job)
    view.renew(NOW_MS)
    assert is_refused(view, a.keys_in(HIGH))


def test_held_answers_are_void_when_slots_change_within_epoch(part: Callable[..., Part]) -> None:
    reported: list[Sequence[bytes] | None] = []
    a = part("a", ALL)
    view = keyspace_of(a).view(NOW_MS, reported.append)
    assert read(view, a.keys) == {b"0"}
    reported.clear()
    a.lose(HIGH)
    view.renew(NOW_MS)
    assert read(view, a.keys_in(LOW)) == {b"0"}
    assert reported == [None]
