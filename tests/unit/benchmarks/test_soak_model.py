"""What `make soak` expects of each epoch is what the stores make of it."""

from __future__ import annotations

import pytest

from benchmarks import soak_model
from benchmarks.soak_model import JOB, STATES, Model, Plan, StoredValue
from benchmarks.soak_readers import MismatchError, _compare
from state_backend.model.records import runs_of
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import EpochChanges

PLAN = Plan(seed=7, started_ms=1_000_000, period_ms=100)
KNOWN = tuple(state.for_job(JOB) for state in STATES)


def test_model_equals_store_after_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    for state in soak_model.SIZES:
        monkeypatch.setitem(soak_model.SIZES, state, 20)
    store, model = MemoryStore("generation"), Model(PLAN)
    for number in range(240):
        epoch = PLAN.epoch(number)
        clock_ms = PLAN.clock_ms(number)
        runs = runs_of(epoch.changes, [state.name for state in STATES])
        store.apply(EpochChanges(number, 1, clock_ms, runs, frozenset(epoch.replaces)), KNOWN)
        model.advance(number)
        found = Model()
        found.apply(store.snapshot(clock_ms).changes())
        shown = {key: stored.expected(clock_ms) for key, stored in found.values.items()}
        expected = {key: stored.expected(clock_ms) for key, stored in model.values.items()}
        assert {key: value for key, value in shown.items() if value} == {
            key: value for key, value in expected.items() if value
        }


def test_every_process_makes_same_epochs() -> None:
    again = Plan(PLAN.seed, PLAN.started_ms, PLAN.period_ms)
    assert [PLAN.epoch(number) for number in (0, 39, 199)] == [again.epoch(number) for number in (0, 39, 199)]
    assert PLAN.epoch(39).replaces
    assert set(PLAN.epoch(199).replaces) == set(soak_model.SIZES)


def test_another_value_is_wrong_unless_clock_may_have_made_it() -> None:
    stored = StoredValue("value", value=b"5", expire_at_ms=2_000)
    assert _compare(b"k", b"5", stored, 1, 1_000, 1_000)
    assert _compare(b"k", None, stored, 1, 3_000, 3_000)
    assert not _compare(b"k", None, stored, 1, 1_990, 1_995)
    with pytest.raises(MismatchError, match="at epoch 1 is b'4' instead of b'5'"):
        _compare(b"k", b"4", stored, 1, 1_000, 1_000)
    with pytest.raises(MismatchError, match="is b'5' instead of None"):
        _compare(b"k", b"5", stored, 1, 3_000, 3_000)
    with pytest.raises(MismatchError, match="instead of None"):
        _compare(b"k", b"5", None, 1, 1_000, 1_000)
