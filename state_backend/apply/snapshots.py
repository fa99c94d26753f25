"""Snapshots: a job's full state as of an epoch, in the log, so that older change files can be removed.

    <job>/<generation>/snapshots/<epoch>/<first slot>-<uuid>.arrow   runs of changes that build the state
    <job>/<generation>/snapshots/<epoch>/manifest.json               written last: the snapshot exists from then on
    <job>/<generation>/snapshots/<epoch>/part-<term>-<slots>.claim   a server writes this part: some slots
    <job>/<generation>/snapshots/<epoch>/part-<term>-<slots>.json    that part's manifest, written last

The manifest has the format of an epoch's file (see `epochs`); its files are in the same folder. Several servers may
write snapshots of one epoch: file names are unique, and the first manifest is valid. Files that a snapshot covers are
swept after the retention time; a reader that misses a change file starts from the newest snapshot.

If each server owns some slots, each writes a part of the snapshot, at the same epochs (see `compactor`). A part has its
own manifest, with its slots. A server that has written a part checks whether all parts together have all slots. If so,
it writes the snapshot's manifest from the manifests of the parts. Readers ignore parts, and read the snapshot like any
other. If several servers own the same slots, the first one that claims the part writes it. If that server dies, or if
no server owns a slot at that epoch, the epoch gets no snapshot; a later epoch will.

    newest     the newest complete snapshot
    changes    the changes of a snapshot, for an empty store
    write      write a snapshot, or a part of one, from a store

`garbage_collector` removes the files that the newest snapshot covers. Readers use only the two newest complete ones.
So no reader begins with a snapshot that is being removed, nor with one that took so long to write that some of its
files are removed already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import chain

import pyarrow as pa

from state_backend.apply.file_split import split_into_files
from state_backend.apply.state_bytes import StateBytes
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.change_log import CurrentGeneration, JobLog
from state_backend.log.epochs import ChangeFile, Epoch, EpochRef, slots_of_run
from state_backend.model.errors import LogCorruptError
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.store.store import EpochChanges, Snapshot

logger = logging.getLogger("sparkis.applier")


def newest(log: JobLog, current: CurrentGeneration) -> Epoch | None:
    """Return the manifest of the newest complete snapshot that is not damaged, or None."""
    return next(log.snapshots(current), None)


def covers(log: JobLog, current: CurrentGeneration, number: int) -> bool:
    """Return whether the newest snapshot covers an epoch, so that the epoch may have been swept."""
    manifest = newest(log, current)
    return manifest is not None and manifest.epoch >= number


def ignore_damaged(log: JobLog, current: CurrentGeneration, number: int, damage: LogCorruptError) -> None:
    """Ignore a damaged snapshot if the state can be built without it; otherwise raise the error."""
    log.damaged_snapshots.add(number)
    before = next((snapshot for snapshot in log.snapshots(current) if snapshot.epoch < number), None)
    first = log.first(current)
    is_begun = first is not None and first.previous is None
    if not is_begun and (before is None or log.epoch(current, before.epoch + 1) is None):
        log.damaged_snapshots.discard(number)  # it may be restored from a copy
        raise damage
    logger.warning("job %s: the snapshot of epoch %d is ignored: %s", log.job, number, damage)


def changes(log: JobLog, generation: str, manifest: Epoch, slots: SlotSet | None = None) -> EpochChanges:
    """Return the changes of a snapshot, or of some slots of it, for an empty store."""
    folder = log.snapshot_folder(generation, manifest.epoch)
    if slots is None:
        runs = log.runs_in_folder(folder, manifest)
    else:
        runs = (run for _, run in log.runs_of_slots(folder, manifest, slots))
    return EpochChanges(manifest.epoch, manifest.term, manifest.clock_ms, runs)


def write(log: JobLog, current: CurrentGeneration, snapshot: Snapshot) -> Epoch | None:
    """Write the slots that a store owns; return the manifest of the snapshot, if it is complete.

    The manifest may be that of another writer that finished first. None if other parts are still missing, or if another
    server writes the same slots.
    """
    applied, slots = snapshot.applied, snapshot.owned_slots
    epoch = log.epoch(current, applied.epoch)
    if epoch is None or epoch.ref != EpochRef(applied.epoch, applied.term):
        raise LogCorruptError(f"job {log.job!r}: epoch {applied.epoch} is no longer in the log, so it gets no snapshot")
    folder = log.snapshot_folder(current.generation, applied.epoch)
    log.filesystem.make_folder(folder)
    # A list of slots may be too long for a file name, so the name has its hash.
    part = f"{folder}/part-{applied.term}-{sha256(str(slots).encode()).hexdigest()[:32]}"
    if slots != ALL and not log.filesystem.create(f"{part}.claim", b""):
        return None
    names = [state.name for state in log.description(current.generation).all_states]
    state_bytes = StateBytes()
    files = tuple(_write_files(log, folder, state_bytes.counted(snapshot.runs(names))))
    manifest = Epoch(
        epoch=applied.epoch,
        term=applied.term,
        previous=None,
        clock_ms=applied.clock_ms,
        rows=sum(file.rows for file in files),
        description=epoch.description,
        origin=epoch.origin,
        files=files,
        log_bytes=epoch.log_bytes,
        skipped_rows=epoch.skipped_rows,
        offsets=epoch.offsets,
        slots=slots,
        state_bytes=state_bytes.counts,
    )
    if slots == ALL:
        return _finish(log, current, folder, manifest, files)
    log.filesystem.create(f"{part}.json", manifest.to_bytes())
    return _join(log, current, folder, manifest)


def _join(log: JobLog, current: CurrentGeneration, folder: str, part: Epoch) -> Epoch | None:
    """Build a snapshot from the parts, if they have all slots; each slot is taken from one part."""
    names = [name for name in log.filesystem.names(folder) if name.startswith("part-") and name.endswith(".json")]
    read = [(name, log.filesystem.read(f"{folder}/{name}")) for name in sorted(names)]
    parts = [Epoch.from_bytes(stored, f"{folder}/{name}") for name, stored in read if stored is not None]
    missing, used = ALL, []
    for each in sorted(parts, key=lambda each: -len(each.slots)):
        slots = each.slots & missing
        if each.ref == part.ref and slots:
            used.append((each, slots))
            missing -= slots
    if missing:
        return None
    files: list[ChangeFile] = []
    rewritten: list[ChangeFile] = []
    state_bytes = StateBytes()
    for each, slots in used:
        if slots == each.slots:
            files += each.files
            state_bytes.add(each.state_bytes)
        else:  # another part has some of its slots, which two servers owned during a move
            runs = (run for _, run in log.runs_of_slots(folder, each, slots))
            rewritten += _write_files(log, folder, state_bytes.counted(runs))
    files = sorted(files + rewritten, key=lambda file: file.runs[0])
    rows = sum(file.rows for file in files)
    whole = replace(part, slots=ALL, rows=rows, files=tuple(files), state_bytes=state_bytes.counts)
    return _finish(log, current, folder, whole, rewritten)


def _finish(
    log: JobLog, current: CurrentGeneration, folder: str, manifest: Epoch, written: Iterable[ChangeFile]
) -> Epoch | None:
    """Create the manifest. If another writer was first, remove the `written` files, and return the newest manifest."""
    if log.filesystem.create(f"{folder}/manifest.json", manifest.to_bytes()):
        return manifest
    for file in written:
        log.filesystem.remove(f"{folder}/{file.name}")
    return newest(log, current)


def _write_files(log: JobLog, folder: str, runs: Iterator[pa.RecordBatch]) -> Iterator[ChangeFile]:
    """Write runs in slot order to files of bounded size; no slot is in two files, so a server reads only its slots'."""
    for runs_of_file in split_into_files(runs, lambda run: run.nbytes, lambda run: slots_of_run(run)[:2]):
        first = next(runs_of_file)
        writer = ChangeFileWriter(log.filesystem, folder, slots_of_run(first)[0])
        yield writer.write_file(chain([first], runs_of_file))
