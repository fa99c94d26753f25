"""The reports of an applier to its server (see `applier` for their format), and the store that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from state_backend.apply.log_status import LogStatus
from state_backend.apply.record_delays import RecordDelays
from state_backend.apply.store_log import StoreLog
from state_backend.lmdb.store import LmdbStore
from state_backend.log.epochs import Epoch, EpochRef
from state_backend.log.source_lag import Lag, SourceLag
from state_backend.log.terms import Description
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.store.store import AppliedEpoch


@dataclass
class DesiredSlots:
    """The slots that the server wants its store to own."""

    slots: SlotSet = ALL
    lines: int = 0  # how often the server has set them

    def set(self, slots: SlotSet) -> None:
        """Replace the slots."""
        self.slots = slots
        self.lines += 1


@dataclass
class Progress:
    """The last epoch of the store that is being written, and the work of this process."""

    record_delays: RecordDelays  # of this process
    origin: int = 0  # the origin of the store's epochs (see `epochs`)
    skipped_rows: int = 0  # up to the last epoch
    changes: int = 0  # of the last epoch, in all slots
    source_lag: SourceLag = field(default_factory=SourceLag)  # of the last epoch
    # The last epoch whose file was read and fits the store, with its digest.
    digest: tuple[EpochRef, int] | None = None
    applied_epochs: int = 0
    apply_ns: int = 0

    def note_applied(self, epoch: Epoch, apply_ns: int) -> None:
        """Record that an epoch was applied, and the time that this took."""
        self.digest = epoch.ref, epoch.digest
        self.applied_epochs += 1
        self.apply_ns += apply_ns


class VisibleStore(NamedTuple):
    """The store that readers have, or are about to open, as reports describe it."""

    applied: AppliedEpoch = AppliedEpoch("")
    digest: int | None = None
    slots: SlotSet = NONE
    changes: int = 0
    applied_epochs: int = 0
    apply_ns: int = 0
    skipped_rows: int = 0
    record_delays: Mapping[str, Any] | None = None
    is_incomplete: bool = False


class Reports:
    """The reports to the server. A report is sent only if it differs from the last one.

    Args:
        as_of_ms: The time of the past moment that is served; None if the job is followed.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        desired: DesiredSlots,
        log_status: LogStatus,
        as_of_ms: int | None,
    ) -> None:
        self._send = send
        self._desired = desired
        self._log_status = log_status
        self._as_of_ms = as_of_ms
        self._version = 0  # of the description that readers know
        self._visible = VisibleStore()
        self.store: Path | None = None  # the store that readers have
        self.last: dict[str, Any] = {}

    def is_news(self, store: LmdbStore, description: Description | None) -> bool:
        """Return whether readers have another store, or know an older version of its states."""
        return store.path != self.store or (description is not None and description.version > self._version)

    def report_open(self, store: LmdbStore, progress: Progress, description: Description) -> None:
        """Have readers open a store."""
        self.update(store, progress, description)
        filled_from = StoreLog.of_store(store.path)
        self._send(
            {
                "event": "open",
                "path": str(store.path),
                "generation": store.generation,
                "states": [state.to_json() for state in description.states],
                "renamed_from": description.renamed_from,
                "as_of_ms": self._as_of_ms,
                "log_id": filled_from.id if filled_from is not None else "",
                **self._visible_fields(),
            }
        )
        self.store, self._version, self.last = store.path, description.version, {}

    def report_damage(self) -> None:
        """Have readers close their store, and wait for another one."""
        self._send({"event": "damaged"})
        self.store, self._version, self.last = None, 0, {}
        self._visible = self._visible._replace(applied=AppliedEpoch(""))

    def update(self, store: LmdbStore, progress: Progress, description: Description | None) -> None:
        """Describe the store that readers have, or are about to open, in the next reports."""
        applied = store.applied
        digest_of, digest = progress.digest or (None, None)
        is_incomplete = self._visible.is_incomplete
        if description is not None:  # at first it is None: readers may get a store before the log has an epoch
            is_incomplete = bool(description.incomplete) or progress.origin > 0
        self._visible = VisibleStore(
            applied=applied,
            digest=digest if digest_of == (applied.epoch, applied.term) else None,
            slots=store.slot_ownership.owned,
            changes=progress.changes,
            applied_epochs=progress.applied_epochs,
            apply_ns=progress.apply_ns,
            skipped_rows=progress.skipped_rows,
            record_delays=progress.record_delays.report(),
            is_incomplete=is_incomplete,
        )

    def status(self, is_stale: bool, error: str, is_full: bool, source_lag: Lag | None) -> None:
        """Report the status if it changed; a store that is being built is not visible yet."""
        if self.store is None and not error and not self.last:
            return
        visible = self._visible
        last_committed = self._log_status.last_number() if error else -1
        report = {
            "event": "status",
            "version": self._version,
            "committed": max(visible.applied.epoch, last_committed),
            "committed_clock_ms": visible.applied.clock_ms,
            "changes": visible.changes,
            "applied_epochs": visible.applied_epochs,
            "apply_ns": visible.apply_ns,
            "is_stale": is_stale,
            "error": error,
            "is_full": is_full,
            "state_bytes": self._log_status.state_bytes,
            "source_lag": source_lag,
            "record_delays": visible.record_delays,
            **self._visible_fields(),
        }
        if report != self.last:
            self.last = report
            self._send(report)

    def rest(
        self, store: LmdbStore, wake_at_ms: int | None, source_offsets: Sequence[str], *, records_events: bool
    ) -> None:
        """Report that the process ends, because there is nothing to do."""
        self._send(
            {
                "event": "rest",
                "path": str(store.path),
                "generation": store.generation,
                "log_term": self._log_status.term,
                "applied": store.applied.epoch,
                "is_stale": self.last["is_stale"],
                "slots_lines": self._desired.lines,
                "records_events": records_events,
                "source_offsets": source_offsets,
                "source_lag": self.last["source_lag"],
                "wake_at_ms": wake_at_ms,
            }
        )

    def _visible_fields(self) -> dict[str, Any]:
        visible, desired = self._visible, self._desired
        slots = visible.slots & desired.slots
        return {
            "term": visible.applied.term,
            "applied": visible.applied.epoch,
            "digest": visible.digest,
            **self._log_status.held_back,
            "is_incomplete": visible.is_incomplete,
            "skipped_rows": visible.skipped_rows,
            "folders": self._log_status.folders,
            "slots": str(slots),
            "loading": str(desired.slots - slots),
            "slots_lines": desired.lines,
        }
