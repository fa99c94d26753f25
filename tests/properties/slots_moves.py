"""A machine of rules: slots move between stores, whatever happens meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from state_backend.apply import snapshots
from state_backend.apply.applier import Applier
from state_backend.lmdb.record_format import read_meta, state_number_of
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.garbage_collector import sweep
from state_backend.log.log_writer import LogWriter
from state_backend.model.errors import KeyConflictError
from state_backend.model.records import Change, runs_of
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import SLOTS, slot_of
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import EpochChanges
from tests.properties import stores

# As they stand in an epoch of the log; the key formats of these are not those of the keys, which nobody looks at here.
STATES = stores.STATES
NAMES = [state.name for state in STATES]


def wanted_slots() -> st.SearchStrategy[SlotSet]:
    there = sorted({slot_of(key) for keys in stores.KEYS.values() for key in keys})
    some = st.sets(st.sampled_from(there)).map(lambda slots: SlotSet.of((slot, slot) for slot in slots))
    halves = st.integers(0, SLOTS - 2).map(lambda at: SlotSet(((0, at),)))
    return st.one_of(some, halves, halves.map(lambda slots: ALL - slots), st.sampled_from((ALL, NONE)))


class SlotsMove(RuleBasedStateMachine):
    """The oracle is a memory store that got every epoch; it is kept as it was after each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        # Portions of a few rows, one at a step; the store's own limits as small as its own test has them.
        for name, value in {
            "model.records.RUN_ROWS_MAX": 3,
            "apply.slot_backfill.RUN_ROWS_MAX": 3,
            "log.change_files.INLINE_BYTES_MAX": 500,
            "apply.file_split.STATE_FILE_BYTES_MAX": 2_000,
            "apply.applier.LOADING_STEP_S": 0,
            "apply.applier.REMOVED_KEYS_MAX": 3,
            "apply.applier.EXPIRED_KEYS_MAX": 5,
        }.items():
            self.patches.enter_context(patch(f"state_backend.{name}", value))
        self.folder = Path(tempfile.mkdtemp())
        self.clock_ms = 1_000
        self.writer = LogWriter(self.folder / "log", "job", STATES, "q", sends_heartbeats=False)
        self.log = ChangeLog(self.folder / "log").job("job")
        self.oracle = MemoryStore("q")
        self.held = [self.oracle._keys]  # after each epoch, from before the first on
        self.events: list[dict[str, Any]] = [{}, {}]
        self.wanted = [SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")]
        self.appliers = [self.start(0), self.start(1)]

    def teardown(self) -> None:
        for applier in self.appliers:
            applier.close()
        self.patches.close()
        shutil.rmtree(self.folder)

    def start(self, which: int, **more: Any) -> Applier:
        return Applier(
            ChangeLog(self.folder / "log"),
            "job",
            self.folder / f"store{which}",
            self.events[which].update,
            clock=lambda: self.clock_ms,
            slots=self.wanted[which],
            **more,
        )

    # What happens ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), step=st.integers(0, 20), epochs=st.integers(1, 4))
    def publish(self, data: Any, step: int, epochs: int) -> None:
        for _ in range(epochs):
            self.clock_ms += step
            self.publish_one(data)

    def publish_one(self, data: Any) -> None:
        makers = (
            stores.value_change,
            stores.whole_map_change,
            stores.field_change,
            stores.list_change,
            stores.folding_change,
            stores.set_change,
        )
        each = st.one_of([make(self.clock_ms) for make in makers])
        changes: list[Change] = [change for group in data.draw(st.lists(each, max_size=6)) for change in group]
        replaces = frozenset(data.draw(st.sets(st.sampled_from(NAMES), max_size=1)))
        number = len(self.held) - 1
        runs = list(runs_of(changes, NAMES))
        try:
            self.oracle.apply(EpochChanges(number, self.writer.current.term, self.clock_ms, runs, replaces), STATES)
        except KeyConflictError:
            return
        self.held.append(self.oracle._keys)
        self.writer.publish(changes, replaces=replaces, clock_ms=self.clock_ms)

    @rule()
    def a_new_writer(self) -> None:
        self.writer = LogWriter(self.folder / "log", "job", STATES, "q", sends_heartbeats=False)

    @rule(is_swept=st.booleans())
    def snapshot(self, is_swept: bool) -> None:
        current = self.log.current()
        assert current is not None
        if len(self.held) == 1:
            return
        with self.oracle.snapshot(self.clock_ms) as shown:
            snapshots.write(self.log, current, shown)
        if is_swept:
            sweep(self.log, current, self.clock_ms, retention_ms=0)

    @rule(which=st.integers(0, 1), slots=wanted_slots(), times=st.sampled_from((0, 1, 2, 3, 10, 50)))
    def want(self, which: int, slots: SlotSet, times: int) -> None:
        self.wanted[which] = slots
        self.appliers[which].set_desired_slots(slots)
        self.step(which, times)

    @rule(slots=wanted_slots())
    def hand_over(self, slots: SlotSet) -> None:
        """The one that gains owns them before the other lets go."""
        for which, mine in ((0, slots), (1, ALL - slots)):
            self.want(which, mine | self.wanted[which], 0)
        self.settle()
        for which, mine in ((0, slots), (1, ALL - slots)):
            self.want(which, mine, 1)

    @rule(which=st.integers(0, 1), times=st.integers(1, 6))
    def step(self, which: int, times: int) -> None:
        for _ in range(times):
            self.appliers[which].step()
            self.check_reports(which)

    def check_reports(self, which: int) -> None:
        reported, store = self.events[which], self.appliers[which].store
        if "slots" in reported:
            assert not reported["error"]
            assert store is not None
            assert (
                SlotSet.parse(reported["slots"])
                == store.slot_ownership.owned & self.wanted[which]
                == store.slot_ownership.owned
            )
            assert SlotSet.parse(reported["loading"]) == self.wanted[which] - store.slot_ownership.owned

    @rule(
        which=st.integers(0, 1),
        slots=st.none() | wanted_slots(),
        transactions=st.integers(0, 12),
        is_committed=st.booleans(),
    )
    def kill(self, which: int, slots: SlotSet | None, transactions: int, is_committed: bool) -> None:
        """An applier is killed while it writes, at some transaction from now on, or has just written."""
        self.appliers[which].close()
        self.wanted[which] = self.wanted[which] if slots is None else slots
        child = os.fork()
        if not child:
            die_after(transactions, is_committed=is_committed)
            applier = self.start(which)
            for _ in range(100):
                applier.step()
            os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        self.events[which].clear()
        self.appliers[which] = self.start(which)

    @rule()
    def settle(self) -> None:
        """Once nothing is left to do, both are at the last epoch and own what they are to own."""
        for which, applier in enumerate(self.appliers):
            for _ in range(2_000):
                if not applier.step():
                    break
            assert not applier.step()
            self.check_reports(which)
            if len(self.held) > 1:
                assert applier.store is not None
                ownership = applier.store.slot_ownership
                assert (ownership.owned, ownership.loading, ownership.removing) == (
                    self.wanted[which],
                    None,
                    NONE,
                )
                assert applier.store.applied.epoch == len(self.held) - 2

    # What holds --------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_owned_is_what_the_log_says(self) -> None:
        for applier in self.appliers:
            if applier.store is None:
                continue
            ownership, applied = applier.store.slot_ownership, applier.store.applied
            expected = MemoryStore("q")
            expected._keys = self.held[applied.epoch + 1]
            expected.own(ownership.owned)
            stores.assert_tables_fit(applier.store)
            for now_ms in (self.clock_ms, self.clock_ms + 5, self.clock_ms + 1_000):
                with expected.snapshot(now_ms) as theirs, applier.store.snapshot(now_ms) as mine:
                    assert mine.owned_slots == ownership.owned
                    stores.assert_equal_answers(theirs, mine)
            with applier.store.begin() as txn:
                names = read_meta(txn, applier.store.tables, "q").names()
            counted = [
                names[state_number_of(record)]
                for at, record in stores.counted_records(applier.store)
                if int.from_bytes(at[:2], "big") in ownership.owned
            ]
            assert dict(applied.keys) == Counter(counted)


def die_after(transactions: int, *, is_committed: bool) -> None:
    """Have this process killed in its transaction of that number: before it commits, or right after."""
    writing = LmdbStore._write_transaction
    left = transactions

    def counted(store: LmdbStore) -> Any:
        return Dying(writing(store))

    class Dying:
        def __init__(self, block: Any) -> None:
            self.block = block

        def __enter__(self) -> Any:
            return self.block.__enter__()

        def __exit__(self, *error: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and not is_committed:
                os.kill(os.getpid(), signal.SIGKILL)
            done = self.block.__exit__(*error)
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

    LmdbStore._write_transaction = counted  # type: ignore[method-assign,assignment]
