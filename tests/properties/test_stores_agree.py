"""All reads of the LMDB store equal those of the memory store, whatever happened before."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from compat.examples import examples
from state_backend.codec import keep_by_order
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges
from tests.properties.stores import (
    KEYS,
    MAPS,
    SHARED,
    STATES,
    StoresAgree,
    StoresAgreeOnSomeOfThreeSlots,
    StoresAgreeOnSomeSlots,
    StoresAgreeOnSomeSlotsWithSmallRuns,
    StoresAgreeWhenPositionsCollide,
    StoresAgreeWithSmallRuns,
)

SETTINGS = settings(
    max_examples=examples(4), stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)

TestStoresAgree = StoresAgree.TestCase
TestStoresAgree.settings = SETTINGS
TestStoresAgreeWithSmallRuns = pytest.mark.slow(StoresAgreeWithSmallRuns.TestCase)
TestStoresAgreeWithSmallRuns.settings = SETTINGS
TestStoresAgreeWhenPositionsCollide = StoresAgreeWhenPositionsCollide.TestCase
TestStoresAgreeWhenPositionsCollide.settings = SETTINGS
TestStoresAgreeOnSomeSlots = pytest.mark.slow(StoresAgreeOnSomeSlots.TestCase)
SETTINGS = settings(SETTINGS, max_examples=examples(6), stateful_step_count=30)
TestStoresAgreeOnSomeSlots.settings = SETTINGS
TestStoresAgreeOnSomeSlotsWithSmallRuns = StoresAgreeOnSomeSlotsWithSmallRuns.TestCase
TestStoresAgreeOnSomeSlotsWithSmallRuns.settings = SETTINGS
TestStoresAgreeOnSomeOfThreeSlots = pytest.mark.slow(StoresAgreeOnSomeOfThreeSlots.TestCase)
TestStoresAgreeOnSomeOfThreeSlots.settings = SETTINGS


@pytest.mark.parametrize("state", ["latest", "recent", "lowest", "timely"])
@pytest.mark.parametrize("map_state", MAPS)
def test_orders_survive_snapshot_beside_unordered_maps(state: str, map_state: str) -> None:
    """The machine found this once, with `--hypothesis-seed=100181339568872069074256363597117029118`."""
    machine = StoresAgreeWhenPositionsCollide()
    field = Change(map_state, Op.PUT, b"", b"f", b"v")
    row = Change(state, Op.FOLD, b"", None, keep_by_order.pack(b"500", b"v"))
    try:
        for change in (field, row):
            changes = [change._replace(key=key) for key in KEYS[change.state][len(SHARED) :]]
            runs = list(runs_of(changes, [state.name for state in STATES]))
            machine.take(EpochChanges(machine.epoch + 1, 1, machine.log_clock_ms(), runs))
        machine.begin_anew_from_a_snapshot()
    finally:
        machine.teardown()
