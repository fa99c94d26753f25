"""Removes files from a job's log that no reader needs any more.

A sweep can pause at any point, for an hour or for ever, and several sweeps can run at the same time. So a file is
removed only for a reason that stays true (the proof is in `docs/design/0004-sweeping.md`):

    an epoch                 it is below the floor, which only rises
    a change file            its epoch is below the floor; or its epoch is committed, not the last, and does not list it
    a snapshot               it is neither of the two newest complete ones, and not needed to read the past
    a generation             its term is older than the visible generation's, or is void
    a temporary file         its final file exists, or could be removed, too
"""

from __future__ import annotations

from state_backend.log.change_log import SNAPSHOTS_RETAINED, CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch
from state_backend.model.generations import first_term

# How far back a log can be read: past states, and a reader that is behind (guess).
RETENTION_MS = 3_600_000
# Retained snapshots, except the two newest, are at least this part of the retention apart. So a log with frequent
# snapshots retains few of them, and its past reaches back by up to one more part (guess).
PARTS_OF_RETENTION = 2


def sweep(log: JobLog, current: CurrentGeneration, at_ms: int, retention_ms: int = RETENTION_MS) -> int:
    """Remove files that readers do not need any more; return the number of files and folders removed.

    The state as of the retention time ago can still be read: the newest snapshot of that time or before, and all epochs
    after it, remain. In the generation: older epochs, except the last one; the files of these epochs; snapshots that
    are not needed; files that no epoch lists. In the job: replaced generations, once the visible generation has an
    epoch older than the retention time.
    """
    removed = 0
    last = log.newest(current)
    if last is not None:
        snapshots = list(log.complete_snapshots(current))[::-1]
        spaced = _spaced(snapshots, retention_ms // PARTS_OF_RETENTION)
        base = max((each.epoch for each in spaced if each.clock_ms <= at_ms - retention_ms), default=-1)
        floor = _raised_floor(log, current, min(base + 1, last.epoch))
        removed += _sweep_changes(log, current, floor, last)
        removed += _sweep_epochs(log, current, floor, last)
        needed = {each.epoch for each in spaced if each.epoch >= base}
        removed += _sweep_snapshots(log, current, needed, snapshots[-SNAPSHOTS_RETAINED:])
    return removed + sweep_job(log, at_ms - retention_ms)


def _spaced(snapshots: list[Epoch], apart_ms: int) -> list[Epoch]:
    """Return the oldest snapshot, then each one that is at least `apart_ms` younger than the last one returned.

    A call after a sweep has removed other snapshots, or older ones, returns the rest of the same snapshots.
    """
    spaced: list[Epoch] = []
    for snapshot in snapshots:
        if not spaced or snapshot.clock_ms - spaced[-1].clock_ms >= apart_ms:
            spaced.append(snapshot)
    return spaced


def _raised_floor(log: JobLog, current: CurrentGeneration, needed: int) -> int:
    """Raise the floor to the first epoch that is still needed, and return it.

    The floor is written before an epoch is removed, so that a reader that misses an epoch can find the reason.
    """
    floor = log.floor(current.generation)
    folder = f"{log.job}/{current.generation}/floor"
    if needed > floor:
        floor = needed
        log.filesystem.create(f"{folder}/{floor}", b"")
    _remove(log, folder, [name for name in log.filesystem.names(folder) if _number(name) < floor])
    return floor


def _sweep_changes(log: JobLog, current: CurrentGeneration, floor: int, last: Epoch) -> int:
    folder = log.changes_folder(current.generation)
    names = log.filesystem.names(folder)
    listed: dict[int, set[str]] = {}
    for number in log.numbers(current.generation):
        epoch = log.epoch(current, number) if number < last.epoch else None
        if epoch is not None:
            listed[number] = {file.name for file in epoch.files}

    def is_removable(name: str) -> bool:
        number = _number(name)
        return 0 <= number < floor or (number in listed and name not in listed[number])

    return _remove(log, folder, list(filter(is_removable, names)))


def _sweep_epochs(log: JobLog, current: CurrentGeneration, floor: int, last: Epoch) -> int:
    folder = f"{log.job}/{current.generation}/epochs"

    def is_removable(name: str) -> bool:
        number = _number(name)
        return 0 <= number < floor or (name.startswith(".") and 0 <= number <= last.epoch)

    return _remove(log, folder, list(filter(is_removable, log.filesystem.names(folder))))


def _sweep_snapshots(log: JobLog, current: CurrentGeneration, needed: set[int], newest: list[Epoch]) -> int:
    if len(newest) < SNAPSHOTS_RETAINED:
        return 0
    folder = f"{log.job}/{current.generation}/snapshots"
    # Incomplete ones, too. A snapshot between the two newest may still be being written.
    names = [name for name in log.filesystem.names(folder) if name.isdecimal()]
    old = [name for name in names if int(name) < newest[0].epoch and int(name) not in needed]
    for name in old:
        log.filesystem.remove(f"{folder}/{name}")
    return len(old)


def sweep_job(log: JobLog, until_ms: int) -> int:
    """Remove replaced generations, and heartbeats of older writers; return how many."""
    term = log.terms.newest()
    if term is None:
        return 0
    removed = 0
    current = log.visible()
    is_old = current is None or _has_epoch_until(log, current, until_ms)
    in_charge = term.term if current is None else first_term(current.generation)
    assert in_charge is not None
    for name in log.filesystem.names(log.job):
        began = first_term(name)
        if began is not None and began != in_charge and (_is_void(log, began) or (is_old and began < in_charge)):
            log.filesystem.create(log.terms.swept_path(name), b"")  # before any of its files is missing
            log.filesystem.remove(f"{log.job}/{name}")
            removed += 1
    for folder in ("heartbeats", "terms"):
        for name in log.filesystem.names(f"{log.job}/{folder}"):
            is_removable = folder == "heartbeats" or name.startswith(".")
            if is_removable and 0 <= _number(name) < term.term:
                log.filesystem.remove(f"{log.job}/{folder}/{name}")
                removed += 1
    return removed


def _is_void(log: JobLog, number: int) -> bool:
    term = log.terms.read(number)
    return term is not None and term.is_void


def _has_epoch_until(log: JobLog, current: CurrentGeneration, until_ms: int) -> bool:
    """Return whether a generation has an epoch or snapshot up to a time."""
    oldest = [log.first(current), *log.snapshots(current)]
    return any(epoch is not None and epoch.clock_ms <= until_ms for epoch in oldest)


def _remove(log: JobLog, folder: str, names: list[str]) -> int:
    """Remove files of a folder; return their number."""
    log.filesystem.remove_files([f"{folder}/{name}" for name in names])
    return len(names)


def _number(name: str) -> int:
    """Return the number at the beginning of a file's name, also of a temporary file's; -1 if there is none."""
    digits = name.removeprefix(".").partition(".")[0].partition("-")[0]
    return int(digits) if digits.isdecimal() else -1
