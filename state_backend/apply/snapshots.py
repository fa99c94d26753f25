"""Snapshots: a job's whole state as of an epoch, in the log, so that its change files need not be kept for ever.

    <job>/<generation>/snapshots/<epoch>/<first slot>-<uuid>.arrow   runs of changes that make the state out of nothing
    <job>/<generation>/snapshots/<epoch>/manifest.json               written last: the snapshot exists from then on
    <job>/<generation>/snapshots/<epoch>/part-<term>-<slots>.claim   somebody writes a part: certain slots
    <job>/<generation>/snapshots/<epoch>/part-<term>-<slots>.json    that part's manifest, written last

The manifest has the form of an epoch's file (see `epochs`); its files lie beside it. Any number of servers may write
snapshots of one epoch: names are never used twice, and the first manifest stands. What a snapshot covers is swept once
the retention time has passed; a reader that comes too late for a change file starts from the newest snapshot.

Where each server owns some slots, each writes a part, all of them at the same epochs (see `compactor`). A part has a
manifest of its own, with its slots. Whoever finds, having written one, that the parts hold all slots makes the
snapshot's manifest of theirs. To readers the parts are nothing, and the snapshot is like any other. Of servers that own
the same slots one writes: the first that claims them. If it dies, or a slot is nobody's at that epoch, there is no
snapshot of that epoch; there will be one of a later one.

    newest     the newest one that counts
    changes    what an empty store applies to begin with it
    write      write one, or a part, from what a store shows

`sweep` removes what the newest one makes superfluous. Only the two newest whole ones count, so that nobody relies on
one that is being removed, or that was so long in the writing that files of it are removed already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256

import pyarrow as pa

from state_backend.log.change_log import Current, JobLog
from state_backend.log.epochs import ChangeFile, Epoch, EpochRef, slots_of_run
from state_backend.log.log_writer import ChangeFileWriter
from state_backend.model.errors import LogCorruptError
from state_backend.model.key_groups import ALL, KeyGroups
from state_backend.store.store import EpochChanges, Snapshot

# A file of a snapshot ends at the first slot that starts behind so many bytes: one server reads its slots alone.
FILE_BYTES_MAX = 256 << 20


def newest(log: JobLog, current: Current) -> Epoch | None:
    """Return the manifest of the newest whole snapshot that counts, or None."""
    return next(log.snapshots(current), None)


def changes(log: JobLog, generation: str, manifest: Epoch, slots: KeyGroups | None = None) -> EpochChanges:
    """Return a snapshot, or some slots of it, as what an empty store applies."""
    folder = log.snapshot_folder(generation, manifest.epoch)
    if slots is None:
        runs = log.runs_in_folder(folder, manifest)
    else:
        runs = (run for _, run in log.runs_of_slots(folder, manifest, slots))
    return EpochChanges(manifest.epoch, manifest.term, manifest.clock_ms, runs)


def write(log: JobLog, current: Current, shown: Snapshot) -> Epoch | None:
    """Write what a store shows of the slots that it owns; return the manifest of the snapshot that has all of them.

    It may be another one, whose writer finished first. None while there is none, because the store owns some slots
    only and other parts are missing, or because another store writes the same slots.
    """
    applied, slots = shown.applied, shown.key_groups
    at = log.epoch(current, applied.epoch)
    if at is None or at.ref != EpochRef(applied.epoch, applied.term):
        raise LogCorruptError(f"job {log.job!r}: epoch {applied.epoch} is no longer in the log, so it gets no snapshot")
    folder = log.snapshot_folder(current.generation, applied.epoch)
    log.filesystem.make_folder(folder)
    # Slots may be too many for a name.
    part = f"{folder}/part-{applied.term}-{sha256(str(slots).encode()).hexdigest()[:32]}"
    if slots != ALL and not log.filesystem.create(f"{part}.claim", b""):
        return None
    names = [state.name for state in log.description(current.generation).known]
    files = tuple(_write_files(log, folder, shown.runs(names)))
    manifest = Epoch(
        epoch=applied.epoch,
        term=applied.term,
        previous=None,
        clock_ms=applied.clock_ms,
        rows=sum(file.rows for file in files),
        description=at.description,
        origin=at.origin,
        files=files,
        log_bytes=at.log_bytes,
        slots=slots,
    )
    if slots == ALL:
        return _finish(log, current, folder, manifest, files)
    log.filesystem.create(f"{part}.json", manifest.to_bytes())
    return _join(log, current, folder, manifest)


def _join(log: JobLog, current: Current, folder: str, part: Epoch) -> Epoch | None:
    """Make a snapshot of the parts that are there, if they hold all slots, each slot from one of them."""
    names = [name for name in log.filesystem.names(folder) if name.startswith("part-") and name.endswith(".json")]
    read = [(name, log.filesystem.read(f"{folder}/{name}")) for name in sorted(names)]
    parts = [Epoch.from_bytes(stored, f"{folder}/{name}") for name, stored in read if stored is not None]
    left, taken = ALL, []
    for each in sorted(parts, key=lambda each: -len(each.slots)):
        take = each.slots & left
        if each.ref == part.ref and take:
            taken.append((each, take))
            left -= take
    if left:
        return None
    files: list[ChangeFile] = []
    cut: list[ChangeFile] = []
    for each, take in taken:
        if take == each.slots:
            files += each.files
        else:  # owned twice while slots were moved: what another part has as well is left out
            cut += _write_files(log, folder, (run for _, run in log.runs_of_slots(folder, each, take)))
    files = sorted(files + cut, key=lambda file: file.runs[0])
    rows = sum(file.rows for file in files)
    return _finish(log, current, folder, replace(part, slots=ALL, rows=rows, files=tuple(files)), cut)


def _finish(log: JobLog, current: Current, folder: str, manifest: Epoch, written: Iterable[ChangeFile]) -> Epoch | None:
    """Create a manifest. If another was first, remove what was written for this one, and return the newest."""
    if log.filesystem.create(f"{folder}/manifest.json", manifest.to_bytes()):
        return manifest
    for file in written:
        log.filesystem.remove(f"{folder}/{file.name}")
    return newest(log, current)


def _write_files(log: JobLog, folder: str, runs: Iterator[pa.RecordBatch]) -> Iterator[ChangeFile]:
    """Write runs in slot order to files of bounded size, none of which ends inside a slot."""
    head = next(runs, None)
    while head is not None:
        part = _Part(head, runs)
        yield ChangeFileWriter(log.filesystem, folder, slots_of_run(head)[0]).write_file(part)
        head = part.rest


class _Part:
    """Runs for one file: up to the first slot that begins behind `FILE_BYTES_MAX`. That run is `rest` then."""

    def __init__(self, head: pa.RecordBatch, runs: Iterator[pa.RecordBatch]) -> None:
        self._head = head
        self._runs = runs
        self.rest: pa.RecordBatch | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        yield self._head
        size, last_slot = self._head.nbytes, slots_of_run(self._head)[1]
        for run in self._runs:
            first, last, _ = slots_of_run(run)
            if size > FILE_BYTES_MAX and first > last_slot:
                self.rest = run
                return
            yield run
            size, last_slot = size + run.nbytes, last
