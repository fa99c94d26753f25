"""Applies one job's change log to its store, in a process of its own, so that no epoch delays a reader.

    python -m state_backend.apply.applier --log ROOT --job JOB --store FOLDER [--slots 0-8191]

The server that started the process writes lines to its standard input: `slots 0-8191,9000` sets the desired slots;
`events on` and `events off` switch the recording of events of keys (see `key_events`); `log json debug` sets the log's
format and levels; `epoch 5 17` announces epoch 17 of term 5; any other line means "poll now". An announcement is a
hint: the applier reads the epoch from the log before it serves it.
The process ends at the end of the input. It writes one JSON object per line to its standard output:

    {"event": "open", "path", "generation", "states", "renamed_from", "as_of_ms", "log_id", "term", "applied", ...}
        readers open this store from now on, and close the store of the job's former name; `log_id`: the identity of the
        log that filled it, empty if it has none
    {"event": "status", "committed", "committed_clock_ms", "term", "applied", "changes", "is_stale", "error", ...}
        when one of these changed; `applied` is the last visible epoch, `term` its writer's term, `digest` that of its
        file (null: it was not read), `changes` the number of its changes in all slots; `applied_epochs` and `apply_ns`:
        the epochs that this process applied, and the time in which it did; `is_full`: the error is a full store;
        `source_lag`: how far the visible epoch is behind the query's sources (see `source_lag`), null if unknown;
        `record_delays`: the times from records until they were readable (see `record_delays`), null if unknown;
        `state_bytes`: the bytes of each state in the newest snapshot (see `epochs`); `is_incomplete`, `slots` and the
        rest are as in "open"
    {"event": "damaged"}
        the store of the readers is damaged: they close it, and wait for another one
    {"event": "rest", "path", "generation", "log_term", "applied", "is_stale", "wake_at_ms", ...}
        the last line: there was nothing to do for --rest-after-s, and the process ends. The server restarts it when
        there is work (see `idle_job`), and at `wake_at_ms`, when a key expires

In "open" and "status", `slots` are the owned slots, and `loading` are desired slots that are not owned yet. `folders`
are the local folders in which a new file may be work: the server watches them, and writes a line when there is one.
`slots_lines` is the number of `slots` lines read so far: it tells the server which of its lines the report includes.

A store is a folder `<FOLDER>/<job>/<generation>.<n>`. Readers have one store open, the *readers' store*. If the log no
longer leads to its epoch (the log was rewound, or the store was lost), a new store is built in the next folder, and
replaces it once it has caught up. A new generation replaces the old one in the same way, once it has an epoch; so does
a copy without free pages, when a store has more free than used pages.

A store is verified when a process first opens it, after it was copied, and when a reader found damage in it. A damaged
store is deleted, and readers have no store until the next one has caught up.

Slots move as described in `store.slot_ownership`: a slot that is given up is no longer owned; a new slot is loaded in
batches between epochs (see `slot_backfill`), and owned when it has caught up. A new store is built with the desired
slots; meanwhile the readers' store gets no more slots.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from state_backend import log_lines
from state_backend.apply import snapshots
from state_backend.apply.compactor import Compactor
from state_backend.apply.epoch_source import EpochSource
from state_backend.apply.heartbeats import WriterHeartbeats
from state_backend.apply.log_status import LogStatus
from state_backend.apply.poll_schedule import PollSchedule
from state_backend.apply.record_delays import RecordDelays
from state_backend.apply.reports import DesiredSlots, Progress, Reports
from state_backend.apply.slot_backfill import Backfill
from state_backend.apply.store_copies import StoreCopies
from state_backend.apply.store_folder import StoreFolder
from state_backend.apply.store_log import StoreLog, claim_store
from state_backend.lmdb.store import MAP_BYTES_MAX, LmdbStore
from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch, EpochRef
from state_backend.log.garbage_collector import RETENTION_MS
from state_backend.log.terms import Description
from state_backend.log.time_travel import Moment, PastLog
from state_backend.model.clock import Clock, now_ms
from state_backend.model.errors import (
    LogCorruptError,
    LogUnavailableError,
    SlotSetError,
    SparkisError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.process_memory import release_free_memory
from state_backend.store.slot_ownership import Loading
from state_backend.store.store import AppliedEpoch, EpochChanges

logger = logging.getLogger("sparkis.applier")

# Bounds the time of one expiry transaction to tens of milliseconds (about 10 us a key).
EXPIRED_KEYS_MAX = 5_000
# Bounds the time of one transaction that removes keys of slots that were given up (about 10 us a key).
REMOVED_KEYS_MAX = 5_000
# Bounds the time of one transaction that deletes events (about 10 us a batch).
DELETED_BATCHES_MAX = 1_000
# Bounds the time for which new epochs wait while slots are being loaded; the last batch may exceed it.
LOADING_STEP_S = 0.05
# The longest line of slot ranges has 100 KB.
LINE_BYTES_MAX = 1 << 20
# Memory is released after so many changes; a change takes 0.1 KiB (measured).
TRIM_ABOVE_CHANGES = 50_000
# A job without changes for so long is idle, and the memory for writing its epochs is released (guess; a job with a
# micro-batch every ten seconds is not idle).
IDLE_AFTER_S = 30.0
# A process does not end if it would be restarted earlier than this.
REST_MS_MIN = 30_000
# The shortest time from one look at the log to the next. Each notice asks for a look; many cause no more than this.
LOOK_EVERY_S = 0.02
# The pause before a past moment is read again after an error.
PAST_RETRY_S = 1.0


class Applier:
    """Applies one job's epochs. `step` does all work that is possible now, and calls `report` with each event."""

    def __init__(
        self,
        log: ChangeLog,
        job: str,
        folder: str | Path,
        report: Callable[[dict[str, Any]], None],
        *,
        map_bytes_max: int = MAP_BYTES_MAX,
        clock: Clock = now_ms,
        compactor: Compactor | None = None,
        slots: SlotSet = ALL,
        as_of_ms: int | None = None,
        is_verified: bool = False,
    ) -> None:
        self._log = log.job(job)
        self._clock = clock
        self._compactor = compactor
        self._records_events = False
        self.before_epoch: Callable[[], None] = lambda: None  # called when an epoch was found
        self._stores = StoreFolder(Path(folder) / job, map_bytes_max, is_verified=is_verified)
        self._store: LmdbStore | None = None
        self._copies = StoreCopies()
        self._epochs = EpochSource(self._log)
        self._backfill = Backfill(self._log)
        self._heartbeats = WriterHeartbeats(self._log)
        self._desired = DesiredSlots(slots)
        self._log_status = LogStatus(self._log)
        self._reports = Reports(report, self._desired, self._log_status, as_of_ms)
        # A process with a verified store follows one that ended because the job rested: no epoch waited for a server.
        self._progress = Progress(RecordDelays(0 if is_verified else now_ms()))
        self._description: Description | None = None
        self._writer = ""  # the writer whose epochs are known to lead to the store's epoch
        self._changed = 0  # changes since free memory was released
        self._idle_from_s = 0.0
        self._busy_at_s = time.monotonic()

    def step(self) -> bool:
        """Apply all committed epochs, load and remove a batch, and report; True if there is more to do at once."""
        error = ""
        is_full = has_more = False
        changed, applied = self._changed, self.last_report.get("applied")
        postpones_checks, now_s = self._epochs.begin_step(), time.monotonic()
        if not postpones_checks:
            # Before epochs are read: this call finds out that the log was removed.
            self._heartbeats.poll(self._writer, now_s)
        try:
            if self._store is not None:
                self._stores.verify_if_suspect(self._store)
            self._give_up_slots()
            self._apply_epochs()
            has_more = self._load()
        except StoreDamagedError as damage:
            self._delete_damaged(damage)
            has_more = True
        except (SparkisError, OSError) as failed:
            error, is_full = str(failed), isinstance(failed, StoreFullError)
            if isinstance(failed, StoreError):
                self.close()  # an LMDB environment may be unusable after an error; the next step reopens it
        if self._changed != changed:
            self._idle_from_s = time.monotonic() + IDLE_AFTER_S
        is_stale = self._heartbeats.is_stale()
        if error and error != self.last_report.get("error"):
            logger.error("job %s: %s", self._log.job, error)
        self._report_status(is_stale, error, is_full)
        has_more |= self._clean_up()
        has_more |= postpones_checks and (self._epochs.is_check_due(now_s) or self._heartbeats.is_due(now_s))
        if error or has_more or self.last_report.get("applied") != applied:
            self._busy_at_s = time.monotonic()
        return has_more

    def rest(self, after_s: float) -> bool:
        """Report "rest" and return True, if there was nothing to do for `after_s` and there will be nothing soon.

        An error, a slot to load, a held-back epoch and a snapshot that is being written are work, too.
        """
        store, reports = self._store, self._reports
        if time.monotonic() - self._busy_at_s < after_s or store is None or store.path != reports.store:
            return False
        if reports.last.get("loading") or self._log_status.is_held_back:
            return False
        if self._compactor is not None and self._compactor.is_busy:
            return False
        wake_at_ms = store.next_expiry_ms()
        if wake_at_ms is not None and wake_at_ms < self._clock() + REST_MS_MIN:
            return False
        offsets = self._progress.source_lag.offsets
        reports.rest(store, wake_at_ms, offsets, records_events=self._records_events)
        return True

    def set_desired_slots(self, slots: SlotSet) -> None:
        """Set the slots to own. The next step gives up all others; missing ones are owned once they are loaded."""
        self._desired.set(slots)

    def record_events(self, is_on: bool) -> None:
        """Record events of keys from the next epoch on, or stop recording."""
        self._records_events = is_on

    def set_up_log(self, inherited: str) -> None:
        """Log as a value of `log_lines.CHILD_VARIABLE` says, and have the compactor's process do so."""
        log_lines.set_up_as(inherited)
        logger.debug("job %s: the log has other levels, or another format, from now on", self._log.job)
        if self._compactor is not None:
            self._compactor.set_up_log(inherited)

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    @property
    def log(self) -> JobLog:
        """The job's log."""
        return self._log

    @property
    def last_report(self) -> dict[str, Any]:
        """The last report."""
        return self._reports.last

    @property
    def applied_epochs(self) -> int:
        """The number of epochs that this process has applied."""
        return self._progress.applied_epochs

    @property
    def store(self) -> LmdbStore | None:
        """The store that is being written, if one is open."""
        return self._store

    def take_announcement(self, term: int, epoch: int) -> None:
        """Take an announcement. If it is not of an epoch of the known term, the next step also looks for a new writer.

        The term is 0 if an older driver announces, which does not send it. The epoch is -1 when a writer begins.
        """
        self._epochs.note_announcement(term, epoch)

    def check_all(self) -> None:
        """Have the next step look for a new writer and for missing epochs, not for the next epoch only."""
        self._epochs.check_all()

    def delete_all_stores(self) -> None:
        """Delete all stores, because a damaged one may have ended the previous applier."""
        for path in self._stores.stores():
            self._delete_damaged(StoreDamagedError("a signal ended the previous applier"), path)

    # Slots ----------------------------------------------------------------------------------------------------------

    def _slots(self) -> SlotSet | None:
        """Return the slots that epochs are applied to; None for all."""
        assert self._store is not None
        owned = self._store.slot_ownership.owned
        return None if owned == ALL else owned

    def _give_up_slots(self) -> None:
        """Give up slots that are not desired, and report that, before anything that may take long."""
        if self._store is not None:
            self._store.own(self._desired.slots)
            self._report_progress()

    def _load(self) -> bool:
        """Load batches of the missing slots for LOADING_STEP_S; True if there may be more."""
        until_s = time.monotonic() + LOADING_STEP_S
        while self._store is not None and (loading := self._store.own(self._desired.slots).loading) is not None:
            current = self._log.visible()
            if current is None or current.generation != self._store.generation or self._store.applied.epoch < 0:
                return False
            try:
                self._load_batch(self._store, current, loading)
            except LogCorruptError as damage:
                self._backfill.check_restart(current, loading, self._store.applied.epoch, damage)
                self._store.restart_loading()
            if time.monotonic() >= until_s:
                return True
        return False

    def _load_batch(self, store: LmdbStore, current: CurrentGeneration, loading: Loading) -> None:
        batch, progress = self._backfill.next(current, loading, store.applied.epoch)
        if self._description is None:  # otherwise the description is that of the store's epoch, or a newer one
            self._description = self._log.description(current.generation)
        self._changed += store.load(batch, self._description.all_states, progress)

    # Epochs ---------------------------------------------------------------------------------------------------------

    def _apply_epochs(self) -> None:
        while (current := self._current()) is not None:
            if self._store is None or self._store.generation != current.generation:
                self._open(current, is_new=False)
            epoch = self._next(current)
            if epoch is None:
                self._open_to_readers(current)
                has_written = self._compactor is not None and self._compactor.take_end()
                self._log_status.look(current, time.monotonic(), has_written_snapshot=has_written)
                return
            self._apply(current, epoch)
            self._report_progress()  # before the search for the next epoch, which may take long
        # The server ends the applier of a dropped job.
        if self._store is not None and self._log.dropped() is None:
            raise LogUnavailableError(
                f"job {self._log.job!r} is missing in the log {self._log.filesystem.root}: was it moved, or its "
                f"storage removed? Its last epoch is served until it is back. To remove it for good: sparkis drop"
            )

    def _current(self) -> CurrentGeneration | None:
        return self._epochs.current(time.monotonic(), has_error=bool(self.last_report.get("error")))

    def _next(self, current: CurrentGeneration) -> Epoch | None:
        """Return the epoch to apply now. If the log no longer leads to the store's epoch, open an empty store first."""
        assert self._store is not None
        applied = self._store.applied
        if current.term < applied.term:  # a newer writer has begun since `current` was read
            current = self._log.visible() or current
            if current.generation != self._store.generation:
                return None
        if applied.epoch >= 0 and not self._leads_to(current, applied):
            logger.warning(
                "job %s: the log no longer leads to epoch %d; the store is rebuilt", self._log.job, applied.epoch
            )
            return self._next_of_new_store(current)
        self._writer = current.writer
        if applied.epoch < 0:
            return self._first(current)
        return self._next_after(current, EpochRef(applied.epoch, applied.term))

    def _next_after(self, current: CurrentGeneration, applied: EpochRef) -> Epoch | None:
        """Return the epoch after the applied one; None if it is not committed yet."""
        number = applied.epoch + 1
        epoch = self._epochs.find(current, number, self._slots())
        if epoch is None and not self._epochs.is_checking:
            return None
        # Epochs are swept in their order, and looking for one file costs less than listing snapshots.
        is_behind = epoch is None and not self._log.has_file(current.generation, applied.epoch)
        if is_behind and snapshots.covers(self._log, current, number):
            logger.warning("job %s: epoch %d was swept from the log; starting from a snapshot", self._log.job, number)
            return self._next_of_new_store(current)
        if epoch is not None and epoch.previous != applied:
            self._writer = ""  # so that the next step checks whether the log still has the applied epoch
            raise LogCorruptError(
                f"job {self._log.job!r}: epoch {epoch.epoch} follows {epoch.previous}, but {applied} was applied; the "
                f"log was changed by hand, or had two writers: restore it from a copy"
            )
        return epoch

    def _next_of_new_store(self, current: CurrentGeneration) -> Epoch | None:
        """Open an empty store; return the epoch to apply to it."""
        self._open(current, is_new=True)
        return self._next(current)

    def _leads_to(self, current: CurrentGeneration, applied: AppliedEpoch) -> bool:
        """Return whether the log leads to an applied epoch. A writer whose epochs were applied is not checked again."""
        return current.term >= applied.term and (current.writer == self._writer or self._has_applied(current, applied))

    def _first(self, current: CurrentGeneration) -> Epoch | None:
        """Load an empty store from the newest snapshot, if there is one; return the epoch to apply then."""
        assert self._store is not None
        manifest = snapshots.newest(self._log, current)
        if manifest is None:
            first = self._log.first(current)
            if first is None or first.previous is None:
                return first
            manifest = snapshots.newest(self._log, current)  # the earlier epochs were swept since the first search
            if manifest is None:
                raise LogCorruptError(
                    f"job {self._log.job!r}: the log begins at epoch {first.epoch}, after {first.previous.epoch}, "
                    f"and has no snapshot of that; restore the missing epochs from a copy"
                )
        self._description = self._log.description(current.generation)
        changes = snapshots.changes(self._log, current.generation, manifest, self._slots())
        try:
            self._changed += self._store.apply(changes, self._description.all_states)
        except LogCorruptError as damage:
            snapshots.ignore_damaged(self._log, current, manifest.epoch, damage)
            return self._first(current)
        self._progress.source_lag.offsets = manifest.offsets
        return self._next(current)

    def _has_applied(self, current: CurrentGeneration, applied: AppliedEpoch) -> bool:
        """Return whether the log still has the applied epoch: the log may have been removed and written again."""
        if not self._is_of_this_log():
            logger.warning("job %s: the log %s was begun anew", self._log.job, self._log.filesystem.root)
            return False
        epoch = self._log.epoch(current, applied.epoch)
        if epoch is None:
            self._log.newest(current)  # raises an error if the epoch is missing, but was not swept
            return snapshots.covers(self._log, current, applied.epoch)
        is_same = (epoch.term, epoch.clock_ms) == (applied.term, applied.clock_ms)
        if is_same:
            self._progress.digest = epoch.ref, epoch.digest
            self._progress.source_lag.offsets = epoch.offsets
        return is_same

    def _apply(self, current: CurrentGeneration, epoch: Epoch) -> None:
        assert self._store is not None
        # A client that subscribed before the epoch was committed gets its events, also if the step began before.
        self.before_epoch()
        if self._description is None or self._description.version < epoch.description:
            self._description = self._log.description(current.generation)
        progress = self._progress
        progress.origin, progress.skipped_rows, progress.changes = epoch.origin, epoch.skipped_rows, epoch.rows
        progress.source_lag.offsets = epoch.offsets
        changes = EpochChanges(
            epoch.epoch,
            epoch.term,
            epoch.clock_ms,
            self._log.runs(current.generation, epoch, self._slots()),
            frozenset(epoch.replaces),
        )
        # Here, too, because `_clean_up` is not reached while epochs come faster than they are applied.
        self._store.clear_stale_readers()
        # A store that readers do not have yet records no events.
        self._store.records_events = self._records_events and self._store.path == self._reports.store
        began_ns = time.perf_counter_ns()
        self._changed += self._store.apply(changes, self._description.all_states)
        progress.note_applied(epoch, time.perf_counter_ns() - began_ns)
        if self._reports.store in (None, self._store.path):
            progress.record_delays.add(epoch, now_ms())
        if self._compactor is not None:
            self._compactor.note_applied(epoch)
            self._compactor.write_part_if_due(self._log, current, epoch, self._store)

    # Stores ---------------------------------------------------------------------------------------------------------

    def _open(self, current: CurrentGeneration, *, is_new: bool) -> None:
        """Open the newest store of a generation, or a new one.

        If the folder has only this store, and the store has epochs, it is the one that readers saw last. Then they get
        it before epochs are applied, because applying them may take long or fail.
        """
        self.close()
        self._store = self._open_store(current.generation, is_new=is_new)
        self._is_of_this_log()  # a store of a log that was begun anew is replaced once the log has an epoch
        self._store.own(self._desired.slots)
        self._description = None
        self._writer = ""
        self._epochs.forget_ahead()
        first = self._log.first(current)
        self._progress.origin = first.origin if first is not None else 0
        self._progress.skipped_rows = 0
        self._progress.source_lag.offsets = ()
        with suppress(SparkisError):  # the next step meets the same error
            end = self._log.end(current) if self._store.applied.epoch >= 0 else None
            self._progress.skipped_rows = end.skipped_rows if end is not None else 0
        if self._stores.stores() == [self._store.path] and self._store.applied.epoch >= 0:
            self._open_to_readers(current)

    def _is_of_this_log(self) -> bool:
        """Return whether this log filled the store; StoreError if another log did. An empty store is this log's."""
        assert self._store is not None
        return claim_store(self._log.filesystem, self._store.path, is_empty=self._store.applied.epoch < 0)

    def _open_store(self, generation: str, *, is_new: bool) -> LmdbStore:
        """Open a store of a generation: the newest one that is not damaged, or an empty one."""
        while True:
            path = self._stores.next(generation) if is_new else self._stores.newest(generation)
            try:
                return self._stores.open(path, generation)
            except StoreDamagedError as damage:
                self._delete_damaged(damage, path)

    def _delete_damaged(self, damage: StoreDamagedError, path: Path | None = None) -> None:
        """Report a damaged store, so that readers close it, and delete it. The next store is in another folder."""
        readers_store = self._reports.store
        path = path or (self._store.path if self._store is not None else readers_store)
        self.close()
        logger.error("job %s: the store %s is damaged and is rebuilt from the log: %s", self._log.job, path, damage)
        # If this process has reported no store yet, readers may have the store of the previous applier.
        if readers_store is None or path is None or readers_store.stem == path.stem:
            self._reports.report_damage()
        if path is not None:
            self._stores.delete(path)

    def _open_to_readers(self, current: CurrentGeneration) -> None:
        """Have readers open a store that has caught up, and delete the others."""
        store = self._store
        assert store is not None
        if store.applied.epoch < 0 and (self._reports.store is not None or self._log.first(current) is not None):
            return
        if not self._reports.is_news(store, self._description):
            return
        self._description = self._description or self._log.description(current.generation)
        self._reports.report_open(store, self._progress, self._description)
        self._stores.delete_others(store.path)

    # Reports --------------------------------------------------------------------------------------------------------

    def _report_status(self, is_stale: bool, error: str, is_full: bool) -> None:
        if self._store is not None and self._store.path == self._reports.store:
            self._reports.update(self._store, self._progress, self._description)
        self._reports.status(is_stale, error, is_full, self._progress.source_lag.of(self._heartbeats.last))

    def _report_progress(self) -> None:
        """Report the visible epoch and slots if they changed; the other fields stay as in the last report."""
        if self.last_report:
            self._report_status(*(self.last_report[name] for name in ("is_stale", "error", "is_full")))

    # Between epochs -------------------------------------------------------------------------------------------------

    def _clean_up(self) -> bool:
        """Remove expired keys and keys of given-up slots, and free unused pages and memory; True if more is to be done.

        Errors are ignored, except damage: the next epoch will raise them again.
        """
        store = self._store
        if store is None:
            return False
        has_more = False
        is_idle = time.monotonic() >= self._idle_from_s
        is_readers_store = store.path == self._reports.store
        try:
            has_more = store.remove_given_up(REMOVED_KEYS_MAX)
            store.records_events = self._records_events and is_readers_store
            has_more |= store.expire(self._clock(), EXPIRED_KEYS_MAX) >= EXPIRED_KEYS_MAX
            if not self._records_events:
                has_more |= not store.delete_events(DELETED_BATCHES_MAX)
            store.clear_stale_readers()
            if is_readers_store:
                self._copy_if_due(store, is_idle)
                self._compact_log_if_due()
            if self._changed > TRIM_ABOVE_CHANGES or (self._changed and is_idle):
                self._release_memory()
        except StoreDamagedError as damage:
            self._delete_damaged(damage)
            return True
        except (SparkisError, OSError):
            pass
        return has_more

    def _compact_log_if_due(self) -> None:
        if self._compactor is not None and self._store is not None and self._slots() is None:
            self._compactor.run_if_due(self._log, self._store)

    def _release_memory(self) -> None:
        """Release the memory of a large epoch's pages, which an open LMDB environment retains for the next epoch."""
        assert self._store is not None
        generation = self._store.generation
        self.close()
        self._store = self._open_store(generation, is_new=False)
        release_free_memory()
        self._changed = 0

    def _copy_if_due(self, store: LmdbStore, is_idle: bool) -> None:
        """Replace the store by a copy without free pages, if it has too many of them."""
        used, free = store.used_bytes()
        if not self._copies.is_due(used, free, time.monotonic(), is_idle=is_idle):
            return
        current = self._log.current()
        if current is None or current.generation != store.generation:
            return
        self._copies.begin(free, time.monotonic())
        try:
            store.copy_to(self._stores.next(store.generation))
        except StoreError as error:
            logger.warning(
                "job %s: the store keeps %d MB of free pages, because it cannot be copied: %s; the next try is in "
                "five minutes or later",
                self._log.job,
                free >> 20,
                error,
            )
            return
        self._copies.end()
        filled_from = StoreLog.of_store(store.path)
        self.close()
        self._store = self._open_store(current.generation, is_new=False)
        if filled_from is not None:
            filled_from.write(self._store.path)
        self._open_to_readers(current)
        logger.info("job %s: the store was copied without %d MB of free pages", self._log.job, free >> 20)


def follow_until_end(
    applier: Applier, input_file: int, probe_interval_s: float | None, rest_after_s: float = math.inf
) -> None:
    """Call `step` at each line of the input (a file descriptor), and by itself (see `poll_schedule`), until the input
    ends.

    It also ends once the applier rests. Two steps without work are LOOK_EVERY_S apart, however many lines there are.
    """
    commands, filesystem = ServerCommands(applier, input_file), applier.log.filesystem
    applier.before_epoch = commands.execute_available
    first_s = filesystem.probe_interval_s if probe_interval_s is None else probe_interval_s
    schedule = PollSchedule(first_s, filesystem.probe_interval_s_max, filesystem.probe_interval_s_min)
    is_notified = False
    while True:
        before, epochs, began_s = applier.last_report, applier.applied_epochs, time.monotonic()
        has_more = applier.step()
        has_more |= (had_commands := commands.pop_had_commands())
        now_s = time.monotonic()
        schedule.note_look(
            now_s,
            has_news=applier.last_report != before,
            epochs=applier.applied_epochs - epochs,
            was_announced=is_notified,
        )
        is_notified = commands.wait(0 if has_more else schedule.pause_s(now_s))
        if not is_notified:
            is_notified = had_commands
            if applier.rest(rest_after_s):
                return
            if not has_more:
                schedule.note_pause()
            continue
        if not has_more:
            time.sleep(max(0.0, began_s + LOOK_EVERY_S - time.monotonic()))
        if not commands.execute():
            return


def apply_past(applier: Applier, input_file: int, epoch: int) -> None:
    """Apply the epochs up to a past one, and then wait until the input ends: the log is not followed."""
    commands, is_open = ServerCommands(applier, input_file), True
    while is_open and (applier.step() or applier.last_report.get("applied") != epoch):
        if commands.wait(PAST_RETRY_S if applier.last_report.get("error") else 0):
            is_open = commands.execute()
    while is_open:
        is_open = commands.execute()


class ServerCommands:
    """The commands that the server sends to an applier, one a line.

    Args:
        descriptor: The file from which they are read.
    """

    def __init__(self, applier: Applier, descriptor: int) -> None:
        self._applier, self._descriptor = applier, descriptor
        self._rest = b""
        self._had_commands = False

    def wait(self, seconds: float) -> bool:
        """Wait for lines, for at most so long; return whether there are any, or the input has ended."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def execute(self) -> bool:
        """Read lines and execute their commands; return False at the end of the input."""
        read = os.read(self._descriptor, 65536)
        if not read:
            return False
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[:LINE_BYTES_MAX]
        for line in lines:
            _execute(self._applier, line)
        return True

    def execute_available(self) -> None:
        """Execute the commands that are there, between a step's search for an epoch and its application."""
        self._had_commands |= self.wait(0) and self.execute()

    def pop_had_commands(self) -> bool:
        """Return whether the last step has executed commands, of which some are for the next step."""
        had_commands, self._had_commands = self._had_commands, False
        return had_commands


def _execute(applier: Applier, line: bytes) -> None:
    if line.startswith(b"events"):
        applier.record_events(line.endswith(b"on"))
    elif line.startswith(b"slots"):
        _set_slots(applier, line[len(b"slots") :].decode("ascii", "replace"))
    elif line.startswith(b"log "):
        applier.set_up_log(line[len(b"log ") :].decode())
    elif announced := re.fullmatch(rb"epoch (\d+) (-?\d+)", line):
        applier.take_announcement(int(announced[1]), int(announced[2]))
    else:
        applier.check_all()


def _set_slots(applier: Applier, text: str) -> None:
    try:
        applier.set_desired_slots(SlotSet.parse(text))
    except SlotSetError as error:
        logger.error("a line with invalid slots is ignored: %s", error)


def _slots(text: str) -> SlotSet:
    try:
        return SlotSet.parse(text)
    except SlotSetError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m state_backend.apply.applier", description=__doc__)
    parser.add_argument("--log", required=True, help="the log root")
    parser.add_argument("--job", required=True, help="the job to apply")
    parser.add_argument("--store", required=True, help="the folder of the stores")
    parser.add_argument("--slots", type=_slots, default=ALL, help="the slots to own, as 0-5460,9000; all by default")
    parser.add_argument(
        "--compact", action="store_true", help="write snapshots, or parts of them, into the log, and sweep it"
    )
    parser.add_argument("--delete-stores", action="store_true", help="delete all stores first")
    parser.add_argument("--events", action="store_true", help="record events of keys")
    parser.add_argument("--verified", action="store_true", help="the store was verified, and closed by an applier")
    parser.add_argument("--rest-after-s", type=float, default=math.inf, help="end after this long without work")
    parser.add_argument("--retention-ms", type=int, default=RETENTION_MS, help="how long --compact retains epochs")
    parser.add_argument("--moment", nargs=3, metavar=("GENERATION", "EPOCH", "MS"), help="serve this past moment only")
    parser.add_argument(
        "--probe-interval-s", type=float, help="the first interval between polls, instead of the filesystem's"
    )
    return parser


def _report(event: dict[str, Any]) -> None:
    """Write an event to the server that started this process."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> None:
    """Run an applier until its standard input ends."""
    options = _parser().parse_args(arguments)
    log_lines.set_up_child()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # only the server ends this process, not a closed terminal

    folder = Path(options.store) / options.job
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "wb")  # noqa: SIM115  # locked to the end of the process
    fcntl.flock(lock, fcntl.LOCK_EX)  # wait for the applier of a dead server, which may be writing its last epoch

    compactor = Compactor(options.log, options.job, options.retention_ms) if options.compact else None
    log = ChangeLog(options.log)
    moment, clock = None, now_ms
    if options.moment is not None:
        moment = Moment(options.moment[0], int(options.moment[1]), int(options.moment[2]))
        log, clock = PastLog(log, {options.job: moment}), partial(int, moment.clock_ms)
    applier = Applier(
        log,
        options.job,
        options.store,
        _report,
        clock=clock,
        compactor=compactor,
        slots=options.slots,
        as_of_ms=None if moment is None else moment.clock_ms,
        is_verified=options.verified,
    )
    applier.record_events(options.events)
    if options.delete_stores:
        applier.delete_all_stores()
    with suppress(KeyboardInterrupt, BrokenPipeError):
        if moment is not None:
            apply_past(applier, sys.stdin.fileno(), moment.epoch)
        else:
            follow_until_end(applier, sys.stdin.fileno(), options.probe_interval_s, options.rest_after_s)
    applier.close()
    if compactor is not None:
        compactor.close()


if __name__ == "__main__":
    main()
