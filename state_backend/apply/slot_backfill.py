"""Reads new slots of a store from the log, in batches: the newest snapshot, then the epochs after it.

Each batch is applied in one transaction that also records the progress (`slot_ownership.Loading`). A process that was
killed continues after the last batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from state_backend.apply.snapshots import ignore_damaged
from state_backend.log.change_log import CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch, EpochRef
from state_backend.model.errors import LogCorruptError
from state_backend.model.records import RUN_ROWS_MAX
from state_backend.store.slot_ownership import Loading
from state_backend.store.store import EpochChanges

logger = logging.getLogger("sparkis.applier")


class Backfill:
    """The batches that a store still lacks, read where the last one ended."""

    def __init__(self, log: JobLog) -> None:
        self._log = log
        self._batches: Iterator[tuple[EpochChanges, Loading]] = iter(())
        self._loading: Loading | None = None  # the progress after the last of `_batches`

    def next(self, current: CurrentGeneration, loading: Loading, applied_epoch: int) -> tuple[EpochChanges, Loading]:
        """Return the next batch of the slots that a store loads, and the progress after it; see `batches`."""
        if loading != self._loading:
            self._batches = batches(self._log, current, loading, applied_epoch)
        batch, self._loading = next(self._batches)
        return batch, self._loading

    def check_restart(
        self, current: CurrentGeneration, loading: Loading, applied_epoch: int, damage: LogCorruptError
    ) -> None:
        """Return if loading may restart from other files after a damage; otherwise raise the error."""
        self._loading = None
        if not is_superseded(self._log, current, loading, applied_epoch):
            snapshot = snapshot_of(self._log, current, loading, applied_epoch)
            if snapshot is None:
                raise damage
            ignore_damaged(self._log, current, snapshot, damage)
        logger.warning(
            "job %s: the log no longer has the files that slots %s are being loaded from, or they are damaged; "
            "loading restarts",
            self._log.job,
            loading.slots,
        )


def batches(
    log: JobLog, current: CurrentGeneration, loading: Loading, applied_epoch: int
) -> Iterator[tuple[EpochChanges, Loading]]:
    """Iterate over (changes to apply, progress after them) without an end: the caller stops at the store's epoch.

    LogCorruptError if the next epoch or the snapshot is missing in the log.
    """
    if loading.epoch < 0 and loading.snapshot < 0 and not loading.runs:
        snapshot = _newest(log, current, applied_epoch)
        loading = replace(loading, snapshot=-1 if snapshot is None else snapshot.epoch)
    if loading.snapshot >= 0:
        manifest = next((each for each in log.snapshots(current) if each.epoch == loading.snapshot), None)
        if manifest is None:
            raise LogCorruptError(
                f"job {log.job!r}: the snapshot of epoch {loading.snapshot} is not in the log any more"
            )
        yield from _runs(log, log.snapshot_folder(current.generation, manifest.epoch), manifest, loading)
        loading = _loaded(loading, manifest)
        yield _changes(manifest), loading
    while True:
        epoch = _next(log, current, loading)
        folder = log.changes_folder(current.generation)
        # An epoch that replaces states must be one transaction. A small epoch need not be several.
        if epoch.replaces or (epoch.rows <= RUN_ROWS_MAX and not loading.runs):
            runs = [run for _, run in log.runs_of_slots(folder, epoch, loading.slots)]
            loading = _loaded(loading, epoch)
            yield _changes(epoch)._replace(runs=runs), loading
            continue
        yield from _runs(log, folder, epoch, loading)
        loading = _loaded(loading, epoch)
        yield _changes(epoch), loading


def is_superseded(log: JobLog, current: CurrentGeneration, loading: Loading, applied_epoch: int) -> bool:
    """Return whether the log has a newer snapshot, up to the store's epoch, than the snapshot or epoch being read."""
    newest = _newest(log, current, applied_epoch)
    return newest is not None and newest.epoch > max(loading.epoch, loading.snapshot)


def snapshot_of(log: JobLog, current: CurrentGeneration, loading: Loading, applied_epoch: int) -> int | None:
    """Return the epoch of the snapshot that is being read; None while an epoch is being read."""
    if loading.snapshot >= 0:
        return loading.snapshot
    newest = _newest(log, current, applied_epoch) if loading.epoch < 0 else None
    return None if newest is None else newest.epoch


def _newest(log: JobLog, current: CurrentGeneration, applied_epoch: int) -> Epoch | None:
    return next((snapshot for snapshot in log.snapshots(current) if snapshot.epoch <= applied_epoch), None)


def _runs(log: JobLog, folder: str, listed: Epoch, loading: Loading) -> Iterator[tuple[EpochChanges, Loading]]:
    for done, run in log.runs_of_slots(folder, listed, loading.slots, loading.runs):
        yield _changes(listed)._replace(runs=[run]), replace(loading, runs=done)


def _changes(epoch: Epoch) -> EpochChanges:
    return EpochChanges(epoch.epoch, epoch.term, epoch.clock_ms, (), frozenset(epoch.replaces))


def _loaded(loading: Loading, epoch: Epoch) -> Loading:
    """Return the progress after an epoch or a snapshot was loaded in full."""
    return Loading(loading.slots, epoch.epoch, epoch.term, epoch.clock_ms)


def _next(log: JobLog, current: CurrentGeneration, loading: Loading) -> Epoch:
    """Return the epoch after the last one that is loaded in full."""
    at = EpochRef(loading.epoch, loading.term)
    epoch = log.first(current) if loading.epoch < 0 else log.epoch(current, loading.epoch + 1)
    if epoch is None:
        raise LogCorruptError(
            f"job {log.job!r}: epoch {loading.epoch + 1} is missing in the log {log.filesystem.root}, and the slots "
            f"{loading.slots} cannot be loaded without it; restore it from a copy"
        )
    if epoch.previous != (None if loading.epoch < 0 else at):
        raise LogCorruptError(
            f"job {log.job!r}: epoch {epoch.epoch} follows {epoch.previous}, and not {at}, up to which the slots "
            f"{loading.slots} are loaded; restore the missing epochs from a copy"
        )
    return epoch
