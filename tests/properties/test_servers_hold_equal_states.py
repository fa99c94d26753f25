"""Any servers of one log hold equal states at equal epochs, whatever their clocks say and whatever happens to them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compat.examples import examples
from state_backend.apply import snapshots
from state_backend.apply.applier import Applier
from state_backend.apply.compact import compact_log
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.log_writer import LogWriter
from state_backend.model.errors import KeyConflictError
from state_backend.model.records import Change, runs_of
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import EpochChanges
from tests.builders import apply_epoch
from tests.properties import stores

STATES = stores.STATES
NAMES = [state.name for state in STATES]
HOUR_MS = 3_600_000
HALF = SlotSet.parse("0-8191")


class Server:
    """An applier with a store, slots and a clock of its own."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder, self.log = folder, log
        self.off_ms = 0
        self.slots = ALL
        self.seen: dict[str, Any] = {}
        self.now_ms = 0
        self.applier = self.start()

    def start(self) -> Applier:
        clock = lambda: self.now_ms + self.off_ms  # noqa: E731
        self.applier = Applier(ChangeLog(self.log), "job", self.folder, self.seen.update, clock=clock, slots=self.slots)
        return self.applier


class ServersHoldEqualStates(RuleBasedStateMachine):
    """Three servers of one log; a memory store that got every epoch, and never expired anything, says what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        for name, value in {
            "model.records.RUN_ROWS_MAX": 3,
            "apply.slot_backfill.RUN_ROWS_MAX": 3,
            "apply.applier.LOADING_STEP_S": 0,
            "apply.applier.EXPIRED_KEYS_MAX": 4,
        }.items():
            self.patches.enter_context(patch(f"state_backend.{name}", value))
        self.folder = Path(tempfile.mkdtemp())
        self.now_ms = 1_000_000_000  # hours behind 1970, where clocks begin
        self.writer = LogWriter(self.folder / "log", "job", STATES, "q", sends_heartbeats=False)
        self.oracle = MemoryStore("q")
        self.states: list[set[Any]] = []
        self.servers = [Server(self.folder / name, self.folder / "log") for name in "abc"]

    def teardown(self) -> None:
        for server in self.servers:
            server.applier.close()
        shutil.rmtree(self.folder)
        self.patches.close()

    # -- the job ---------------------------------------------------------------------------------------------------

    @rule(data=st.data(), step=st.integers(0, 20), took=st.sampled_from((0, 5, 40)), is_back=st.booleans())
    def commit(self, data: Any, step: int, took: int, is_back: bool) -> None:
        """A batch that took a while from the reading of its clock; now and then that clock is set back."""
        self.now_ms += step
        clock_ms = self.now_ms - took - (HOUR_MS if is_back else 0)
        clock_ms = max(clock_ms, self.oracle.applied.clock_ms)
        makers = [stores.value_change, stores.whole_map_change, stores.field_change]
        makers += [stores.list_change, stores.folding_change, stores.folding_change, stores.set_change]
        each = st.one_of([make(clock_ms) for make in makers])
        changes: list[Change] = [change for group in data.draw(st.lists(each, max_size=6)) for change in group]
        replaces = frozenset(data.draw(st.sets(st.sampled_from(NAMES), max_size=1)))
        epoch = EpochChanges(
            len(self.states), self.writer.current.term, clock_ms, list(runs_of(changes, NAMES)), replaces
        )
        try:
            self.oracle.apply(epoch, STATES)
        except KeyConflictError:
            return
        with self.oracle.snapshot(clock_ms) as shown:
            self.states.append(as_a_set(shown.changes()))
        self.writer.publish(changes, replaces=replaces, clock_ms=clock_ms)

    @rule()
    def a_new_writer(self) -> None:
        self.writer = LogWriter(self.folder / "log", "job", STATES, "q", sends_heartbeats=False)

    @rule()
    def compact(self) -> None:
        if self.states:
            compact_log(str(self.folder / "log"), "job", retention_ms=0)

    # -- the servers -----------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 2), steps=st.integers(1, 4))
    def follow(self, which: int, steps: int) -> None:
        server = self.servers[which]
        server.now_ms = self.now_ms
        for _ in range(steps):
            server.applier.step()

    @rule(which=st.integers(0, 2), off_ms=st.sampled_from((0, -HOUR_MS, HOUR_MS, 30, -30, 10 * HOUR_MS)))
    def set_the_clock(self, which: int, off_ms: int) -> None:
        self.servers[which].off_ms = off_ms

    @rule(which=st.integers(0, 2), is_lost=st.booleans())
    def kill(self, which: int, is_lost: bool) -> None:
        server = self.servers[which]
        server.applier.close()
        if is_lost:
            shutil.rmtree(server.folder, ignore_errors=True)
        server.start()

    @rule(which=st.integers(0, 2))
    def write_a_snapshot(self, which: int) -> None:
        """As its compactor does, from what the server holds and at the server's own clock."""
        server = self.servers[which]
        log = ChangeLog(self.folder / "log").job("job")
        current, store = log.current(), server.applier.store
        if current is None or store is None or store.slot_ownership.owned != ALL or store.slot_ownership.loading:
            return
        if store.applied.epoch >= 0 and log.epoch(current, store.applied.epoch) is not None:
            with store.snapshot(self.now_ms + server.off_ms) as shown:
                snapshots.write(log, current, shown)

    @rule(which=st.integers(0, 2), slots=st.sampled_from((ALL, HALF, ALL - HALF)), steps=st.integers(0, 30))
    def move_slots(self, which: int, slots: SlotSet, steps: int) -> None:
        server = self.servers[which]
        server.slots = slots
        server.applier.set_desired_slots(slots)
        server.now_ms = self.now_ms
        for _ in range(steps):
            server.applier.step()

    # -- what is right ---------------------------------------------------------------------------------------------

    @invariant()
    def states_are_equal(self) -> None:
        for server in self.servers:
            assert not server.seen.get("error"), server.seen["error"]
            store = server.applier.store
            if store is not None and store.applied.epoch >= 0:
                owned = store.slot_ownership.owned
                expected = {each for each in self.states[store.applied.epoch] if slot_of(each[1]) in owned}
                assert held(store) == expected


def held(store: LmdbStore) -> set[Any]:
    """Return all that a store holds at the clock of its epoch, whatever any other clock says."""
    with store.snapshot(1 << 41) as shown:
        return as_a_set(shown.changes())


def as_a_set(changes: Any) -> set[Any]:
    """Return changes so that they can be compared: one large map may be told field by field, or as a whole."""
    store = MemoryStore("")
    apply_epoch(store, STATES, changes, 0, clock_ms=0)
    held = set()
    for key, each in store._keys.items():
        scores, fields = tuple(sorted(each.scores.items())), tuple(sorted(each.fields.items()))
        held.add((each.state, key, each.value, each.elements, scores, fields, each.expire_at_ms))
    return held


TestServersHoldEqualStates = ServersHoldEqualStates.TestCase
TestServersHoldEqualStates.settings = settings(
    max_examples=examples(5), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
