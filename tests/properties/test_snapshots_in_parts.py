"""Owners of some slots write parts of snapshots and sweep: readers always get the state of the memory store."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import lmdb
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from compat.examples import examples
from state_backend.apply.applier import Applier
from state_backend.apply.compactor import Compactor, compact
from state_backend.apply.replay import read_snapshot
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog, JobLog
from state_backend.log.filesystems import LocalFilesystem
from state_backend.model.errors import LogCorruptError
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import Snapshot
from tests.properties import slots_moves as moves
from tests.properties import stores


class Died(Exception):
    """The writer of a part died."""


class Writing(Compactor):
    """Holds a store at the epoch of a part, as the process does, and writes it when the test says so."""

    def __init__(self, scene: SnapshotsInParts) -> None:
        super().__init__(str(scene.folder / "log"), "job", retention_ms=0)
        self._scene = scene
        self.held: Snapshot | None = None

    def run_if_due(self, log: JobLog, store: LmdbStore) -> None:
        pass  # a store of all slots is written by a rule

    @property
    def is_running(self) -> bool:
        return self.held is not None

    def _start_process(self) -> None:
        pass

    def _let_open(self, store: LmdbStore) -> None:
        if self.held is None:
            self.held = store.snapshot(store.applied.clock_ms)

    def finish(self) -> None:
        shown, self.held = self.held, None
        if shown is not None:
            # The store may have been closed or begun anew since, which here, in one process, ends what is held.
            # What is swept is no epoch to write any more.
            with suppress(lmdb.Error, LogCorruptError), shown:
                compact(self._scene.log, shown, self._retention_ms, self._scene.clock_ms)


class SnapshotsInParts(moves.SlotsMove):
    """As the slots move, beside whole snapshots. Marks are as close as the epochs of the test allow."""

    def __init__(self) -> None:
        self.writing: dict[int, Writing] = {}
        self.readers = 0
        super().__init__()
        for name, value in {"EPOCHS_MAX": 3, "LEAD_EPOCHS": 1, "CHANGES_BYTES_MIN": 4_000}.items():
            self.patches.enter_context(patch(f"state_backend.apply.compactor.{name}", value))

    def start(self, which: int, **more: Any) -> Applier:
        self.writing[which] = Writing(self)
        return super().start(which, compactor=self.writing[which], **more)

    @rule(which=st.integers(0, 1), operations=st.none() | st.integers(0, 12))
    def write(self, which: int, operations: int | None) -> None:
        """The writer of a part ends, or dies before it has done so many things to the log."""
        with ExitStack() as patches:
            if operations is not None:
                die_behind(operations, patches)
            with suppress(Died):
                self.writing[which].finish()

    @rule(
        data=st.data(),
        epochs=st.integers(1, 4),
        slots=moves.wanted_slots(),
        more=moves.wanted_slots(),
        is_slow=st.booleans(),
    )
    def both_write(self, data: Any, epochs: int, slots: SlotSet, more: SlotSet, is_slow: bool) -> None:
        """As most of the time: nobody misses a mark, and each slot is owned, or even twice."""
        self.want(0, slots | more, 0)
        self.want(1, ALL - slots, 0)
        last = epochs - 1 + 5 * is_slow
        for number in range(last + 1):
            self.publish_one(data)
            self.settle()
            if not is_slow or number == last:
                for writing in self.writing.values():
                    writing.finish()
        self.a_new_reader_finds_all(more)

    @rule(slots=moves.wanted_slots())
    def a_new_reader(self, slots: SlotSet) -> None:
        self.a_new_reader_finds_all(slots)

    def a_new_reader_finds_all(self, slots: SlotSet) -> None:
        """What the log has is all of the state, whoever reads it."""
        if len(self.held) == 1:
            return
        expected = MemoryStore("q")
        expected._keys = self.held[-1]
        with (
            expected.snapshot(self.clock_ms) as theirs,
            read_snapshot(self.folder / "log", "job", at_ms=self.clock_ms) as mine,
        ):
            assert mine.applied.epoch == len(self.held) - 2
            stores.assert_equal_answers(theirs, mine)
        self.readers += 1
        folder = self.folder / f"reader{self.readers}"
        reported: dict[str, Any] = {}
        reader = Applier(ChangeLog(self.folder / "log"), "job", folder, reported.update, clock=lambda: 0, slots=slots)
        while reader.step():
            pass
        assert not reported["error"]
        assert SlotSet.parse(reported["slots"]) == slots
        expected.own(slots)
        assert reader.store is not None
        with expected.snapshot(self.clock_ms) as theirs, reader.store.snapshot(self.clock_ms) as mine:
            stores.assert_equal_answers(theirs, mine)
        reader.close()
        shutil.rmtree(folder)


def die_behind(operations: int, patches: ExitStack) -> None:
    """Have who changes the log die before it does so once too often."""
    left = operations
    for name in ("create", "open_new", "replace", "make_folder", "remove"):
        change = getattr(LocalFilesystem, name)

        def counted(*arguments: Any, change: Any = change, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died
            return change(*arguments, **options)

        patches.enter_context(patch.object(LocalFilesystem, name, counted))


TestSnapshotsInParts = SnapshotsInParts.TestCase
TestSnapshotsInParts.settings = settings(
    max_examples=examples(2), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
