"""Begins a generation with a copy of the epochs of another one: after a rewind, or when an earlier query returns.

The copied files (change files, epochs, snapshots) are never written again, so a copy is a hard link if the filesystem
has hard links. The source may be swept or removed meanwhile. So a copy is valid only if it is complete, and if the
removal of the source had not begun when the copy was complete.
"""

from __future__ import annotations

from typing import NamedTuple

from state_backend.log.change_log import CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch
from state_backend.model.errors import LogCorruptError


class _Plan(NamedTuple):
    """The copied part of a generation: the epochs before an end, and a snapshot if the first epochs were swept."""

    snapshot: int | None
    numbers: tuple[int, ...]


def reaches(log: JobLog, source: CurrentGeneration, end: int | None) -> bool:
    """Return whether a generation can be copied up to the epoch before `end`; None: up to its last epoch."""
    return _plan(log, source, end) is not None


def copy(log: JobLog, source: CurrentGeneration, target: str, end: int | None) -> bool:
    """Copy a generation up to the epoch before `end` (None: all epochs) into the folder of a new generation.

    False if the source no longer leads to that epoch, or if source or target is being removed. LogCorruptError if files
    of the source are missing, but were not swept. Cost: two operations per file.
    """
    failed: _Plan | None = None
    while (plan := _plan(log, source, end)) is not None:
        is_complete = _copy_plan(log, source, target, plan)
        # Read last: if the removal has not begun, the source was complete until now. The copy of a slow writer is swept
        # when a later writer is in charge.
        if log.terms.is_swept(source.generation) or log.terms.is_swept(target):
            return False
        if is_complete:
            return True
        if plan == failed:
            raise LogCorruptError(
                f"job {log.job!r}: files of generation {source.generation} are missing in the log "
                f"{log.filesystem.root}; restore them from a copy"
            )
        failed = plan  # the next plan differs if files were swept during the copy
    return False


def _plan(log: JobLog, source: CurrentGeneration, end: int | None) -> _Plan | None:
    snapshot = next((each for each in log.snapshots(source) if end is None or each.epoch < end), None)
    numbers = [number for number in log.numbers(source.generation) if end is None or number < end]
    if snapshot is not None:
        numbers = [number for number in numbers if number >= snapshot.epoch]
        needed = set(range(snapshot.epoch + 1, end if end is not None else max(numbers, default=0) + 1))
        return _Plan(snapshot.epoch, tuple(numbers)) if needed <= set(numbers) else None
    first = log.epoch(source, numbers[0]) if numbers else None
    if not numbers:
        return _Plan(None, ()) if end is None else None
    needed = set(range(numbers[0], end if end is not None else numbers[-1] + 1))
    if first is None or first.previous is not None or needed != set(numbers):
        return None
    return _Plan(None, tuple(numbers))


def _copy_plan(log: JobLog, source: CurrentGeneration, target: str, plan: _Plan) -> bool:
    """Copy the files of a plan, and each epoch after the files that it lists; True if no file was missing."""
    base = f"{log.job}/{target}"
    if plan.snapshot is not None:
        manifest = next((snapshot for snapshot in log.snapshots(source) if snapshot.epoch == plan.snapshot), None)
        folder = log.snapshot_folder(target, plan.snapshot)
        log.filesystem.make_folder(folder)
        if manifest is None or not _copy_files(
            log, manifest, log.snapshot_folder(source.generation, plan.snapshot), folder
        ):
            return False
        log.filesystem.create(f"{folder}/manifest.json", manifest.to_bytes())
        # An earlier try may have copied epochs that the source has swept since; the floor hides them.
        first = plan.numbers[0] if plan.numbers else plan.snapshot + 1
        log.filesystem.create(f"{base}/floor/{first}", b"")
    for number in plan.numbers:
        epoch = log.epoch(source, number)
        if epoch is None or not _copy_files(
            log, epoch, log.changes_folder(source.generation), log.changes_folder(target)
        ):
            return False
        log.filesystem.create(f"{base}/epochs/{number}.json", epoch.to_bytes())
    return True


def _copy_files(log: JobLog, listed: Epoch, source: str, target: str) -> bool:
    """Copy the files that an epoch or a manifest lists; True if no file was missing and the sizes agree."""
    return all(
        log.filesystem.copy(f"{source}/{file.name}", f"{target}/{file.name}")
        and log.filesystem.size(f"{target}/{file.name}") == file.size
        for file in listed.files
    )
