"""Begins a generation with what another one holds: after a rewind, or when a query comes back.

What is copied is never written again (change files, epochs, snapshots), so a copy is a second name where the
filesystem has links. The source may be swept meanwhile, or removed as a whole: a copy counts only once all that it
needs is there, and the source's removal had not begun by then.
"""

from __future__ import annotations

from typing import NamedTuple

from state_backend.log.change_log import Current, JobLog
from state_backend.log.epochs import Epoch
from state_backend.model.errors import LogCorruptError


class _Plan(NamedTuple):
    """What leads to an end: a snapshot if the first epochs are gone, and the epochs from there on."""

    snapshot: int | None
    numbers: tuple[int, ...]


def reaches(log: JobLog, source: Current, end: int | None) -> bool:
    """Tell whether a generation leads to the epoch before `end` (its last one if None), and a copy would be whole."""
    return _plan(log, source, end) is not None


def copy(log: JobLog, source: Current, target: str, end: int | None) -> bool:
    """Copy what leads to the epoch before `end` into the folder of a generation that has not begun.

    Everything if `end` is None. False if the source does not lead there any more, or is being removed; LogCorruptError
    if files of it are missing that nobody swept. Cost: two operations a file.
    """
    before: _Plan | None = None
    while (plan := _plan(log, source, end)) is not None:
        is_whole = _copied(log, source, target, plan)
        if log.terms.is_swept(source.generation):  # looked up last: then all that was copied was there
            return False
        if is_whole:
            return True
        if plan == before:
            raise LogCorruptError(
                f"job {log.job!r}: files of generation {source.generation} are missing in the log "
                f"{log.filesystem.root}; restore them from a copy"
            )
        before = plan  # swept while it was copied: what is left may do
    return False


def _plan(log: JobLog, source: Current, end: int | None) -> _Plan | None:
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


def _copied(log: JobLog, source: Current, target: str, plan: _Plan) -> bool:
    """Copy what a plan says, what an epoch lists before itself; True if all of it was there."""
    base = f"{log.job}/{target}"
    if plan.snapshot is not None:
        manifest = next((each for each in log.snapshots(source) if each.epoch == plan.snapshot), None)
        folder = log.snapshot_folder(target, plan.snapshot)
        log.filesystem.make_folder(folder)
        if manifest is None or not _copied_files(
            log, manifest, log.snapshot_folder(source.generation, plan.snapshot), folder
        ):
            return False
        log.filesystem.create(f"{folder}/manifest.json", manifest.to_bytes())
        # An earlier try may have copied epochs that are swept in the source by now, and not all that followed.
        first = plan.numbers[0] if plan.numbers else plan.snapshot + 1
        log.filesystem.create(f"{base}/floor/{first}", b"")
    for number in plan.numbers:
        epoch = log.epoch(source, number)
        if epoch is None or not _copied_files(
            log, epoch, log.changes_folder(source.generation), log.changes_folder(target)
        ):
            return False
        log.filesystem.create(f"{base}/epochs/{number}.json", epoch.to_bytes())
    return True


def _copied_files(log: JobLog, listed: Epoch, source: str, target: str) -> bool:
    """Copy the files that an epoch or a manifest lists; True if each was there and the copy has its size."""
    return all(
        log.filesystem.copy(f"{source}/{file.name}", f"{target}/{file.name}")
        and log.filesystem.size(f"{target}/{file.name}") == file.size
        for file in listed.files
    )
