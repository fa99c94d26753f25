"""The change log of a job: the ordered, durable record of every epoch, one writer, any number of readers.

    <job>/current.json                              generation, term and writer now in charge, and rewinds
    <job>/alive.json                                a counter that moves while the writer lives; not durable
    <job>/<generation>/job.json                     the query's id and its states, those given up included
    <job>/<generation>/changes/<epoch>-<uuid>.arrow change files; no name is ever written twice
    <job>/<generation>/epochs/<epoch>.json          the commit point of an epoch (see `epochs`)

A change file that no epoch lists does not exist for a reader. A writer takes the next term when it starts and looks
whether it is still its own before each commit; an epoch's file is created only if there is none, so of two writers one
commits it. A rewind (a checkpoint was set back, and the user asked to go on from there) is a line in `current.json`:
epochs of older terms from its epoch on are void, whether or not their files are still there.

Here is the reader's side; `log_writer` writes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pyarrow as pa

from state_backend.descriptor import Reduce, StateDescriptor, check_name
from state_backend.epochs import (
    FORMAT,
    FORMAT_WITH_FOLDS,
    FORMAT_WITH_SETS,
    ChangeFile,
    Epoch,
    EpochRef,
    check_format,
    rows_of_slots,
    runs_in,
)
from state_backend.errors import EpochHoleError, LogCorruptError, LogUnavailableError
from state_backend.filesystems import Filesystem, open_filesystem
from state_backend.key_groups import KeyGroups


class Rewind(NamedTuple):
    """From `before` on, epochs of terms below `term` are void."""

    term: int
    before: int

    def voids(self, ref: EpochRef) -> bool:
        """Tell whether an epoch is void by this rewind."""
        return ref.term < self.term and ref.epoch >= self.before


@dataclass(frozen=True)
class Current:
    """Who writes a job now."""

    generation: str
    term: int
    writer: str
    rewinds: tuple[Rewind, ...] = ()

    def is_void(self, ref: EpochRef) -> bool:
        """Tell whether an epoch no longer counts."""
        return any(rewind.voids(ref) for rewind in self.rewinds)


@dataclass(frozen=True)
class Description:
    """A generation's `job.json`. `version` goes up when the states change.

    dropped: states that earlier epochs name and the query keeps no more; the next epoch empties them.
    source: what an attachment reads the states from (see `spark_hooks.attach`); None if the query itself publishes.
    late: states that began in the middle of the query, and lack what did not change since.
    renamed_from: the job that this one was until it was renamed (see `rename`).
    """

    job: str
    query_id: str
    states: tuple[StateDescriptor, ...]
    version: int = 1
    dropped: tuple[StateDescriptor, ...] = ()
    source: Mapping[str, Any] | None = None
    late: tuple[str, ...] = ()
    renamed_from: str | None = None

    @property
    def known(self) -> tuple[StateDescriptor, ...]:
        """All states that an epoch of this generation may name."""
        return self.states + self.dropped

    @property
    def format(self) -> int:
        """Which version of the log's files a reader must know."""
        if any(state.member is not None for state in self.known):
            return FORMAT_WITH_SETS
        return FORMAT if all(state.reduce in (None, Reduce.LAST) for state in self.known) else FORMAT_WITH_FOLDS

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        content: dict[str, Any] = {
            "format": self.format,
            "job": self.job,
            "query_id": self.query_id,
            "version": self.version,
            "states": [state.to_json() for state in self.states],
            "dropped": [state.to_json() for state in self.dropped],
        }
        if self.source is not None:
            content["source"] = dict(self.source)
        if self.late:
            content["late"] = list(self.late)
        if self.renamed_from is not None:
            content["renamed_from"] = self.renamed_from
        return json.dumps(content, indent=1).encode() + b"\n"


def generation_name(query_id: str) -> str:
    """Return a query id if it can be a folder's name; DescriptorError otherwise."""
    return check_name("generation", query_id)


class JobLog:
    """One job's part of a log, to read."""

    def __init__(self, filesystem: Filesystem, job: str) -> None:
        self.filesystem = filesystem
        self.job = job

    def current(self) -> Current | None:
        """Return who writes the job, or None if nobody ever did."""
        stored = self._json(f"{self.job}/current.json")
        if stored is None:
            return None
        with self._whole(f"{self.job}/current.json"):
            rewinds = tuple(Rewind(*rewind) for rewind in stored["rewinds"])
            return Current(stored["generation"], stored["term"], stored["writer"], rewinds)

    def description(self, generation: str) -> Description:
        """Return the states of a generation."""
        path = f"{self.job}/{generation}/job.json"
        stored = self._json(path)
        if stored is None:
            raise LogCorruptError(f"{path} is missing in the log {self.filesystem.root}; restore it from a copy")
        check_format(stored.get("format", FORMAT), f"{self.filesystem.root}/{path}")
        with self._whole(path):
            states = tuple(map(StateDescriptor.from_json, stored["states"]))
            dropped = tuple(map(StateDescriptor.from_json, stored.get("dropped", ())))
            return Description(
                stored["job"],
                stored["query_id"],
                states,
                stored["version"],
                dropped,
                stored.get("source"),
                tuple(stored.get("late", ())),
                stored.get("renamed_from"),
            )

    def alive(self) -> dict[str, Any]:
        """Return the writer's last sign of life (see `log_writer.LogWriter.beat`); empty if there is none."""
        try:
            return self._json(f"{self.job}/alive.json") or {}
        except LogCorruptError:  # not durable: a crash of the machine may leave half of it
            return {}

    def epoch(self, current: Current, number: int) -> Epoch | None:
        """Return one epoch, or None if it is not committed or void."""
        path = f"{self.job}/{current.generation}/epochs/{number}.json"
        stored = self.filesystem.read(path)
        if stored is None:
            return None
        epoch = Epoch.from_bytes(stored, f"{self.filesystem.root}/{path}")
        return None if current.is_void(epoch.ref) else epoch

    def has_file(self, generation: str, number: int) -> bool:
        """Tell whether an epoch's file is there, whether or not it counts; nothing is read."""
        return self.filesystem.size(f"{self.job}/{generation}/epochs/{number}.json") is not None

    def numbers(self, generation: str) -> list[int]:
        """Return the numbers of the epoch files of a generation, sorted; void ones included."""
        names = self.filesystem.names(f"{self.job}/{generation}/epochs")
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())

    def newest(self, current: Current) -> Epoch | None:
        """Return the last committed epoch; EpochHoleError if one before it is missing."""
        numbers = self.numbers(current.generation)
        while numbers and (epoch := self.epoch(current, numbers[-1])) is None:
            numbers.pop()  # void: a rewind that did not finish its clean-up
        if not numbers:
            return None
        if numbers[-1] - numbers[0] + 1 != len(numbers):
            if self.numbers(current.generation)[:1] != numbers[:1]:
                return self.newest(current)  # listed while the oldest were being swept
            missing = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
            raise EpochHoleError(
                f"job {self.job!r}: epochs {missing[:5]} are missing in the log {self.filesystem.root}; "
                f"restore them from a copy, or begin a new log"
            )
        return epoch

    def first(self, current: Current) -> Epoch | None:
        """Return the first epoch of a generation, or None if there is none yet."""
        numbers = self.numbers(current.generation)
        return self.epoch(current, numbers[0]) if numbers else None

    def snapshots(self, current: Current) -> Iterator[Epoch]:
        """Iterate over the manifests of whole snapshots that are not void, the newest first (see `snapshots`)."""
        names = self.filesystem.names(f"{self.job}/{current.generation}/snapshots")
        for number in sorted((int(name) for name in names if name.isdigit()), reverse=True):
            path = f"{self.snapshot_folder(current.generation, number)}/manifest.json"
            stored = self.filesystem.read(path)
            if stored is not None:
                manifest = Epoch.from_bytes(stored, f"{self.filesystem.root}/{path}")
                if not current.is_void(manifest.ref):
                    yield manifest

    def snapshot_folder(self, generation: str, epoch: int) -> str:
        """Return where a snapshot of an epoch lies, relative to the log's root."""
        return f"{self.job}/{generation}/snapshots/{epoch}"

    def changes_folder(self, generation: str) -> str:
        """Return where the change files of a generation lie, relative to the log's root."""
        return f"{self.job}/{generation}/changes"

    def runs(self, generation: str, epoch: Epoch, slots: KeyGroups | None = None) -> Iterator[pa.RecordBatch]:
        """Read an epoch's runs; of some slots only, if they are given. See `runs_in_folder` and `runs_of_slots`."""
        folder = self.changes_folder(generation)
        if slots is None:
            return self.runs_in_folder(folder, epoch)
        return (run for _, run in self.runs_of_slots(folder, epoch, slots))

    def runs_in_folder(self, folder: str, epoch: Epoch) -> Iterator[pa.RecordBatch]:
        """Read what an epoch or a manifest lists; LogCorruptError before the first run of a file that is not so."""
        for file in epoch.files:
            reader = self._open(folder, epoch, file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        for stream in epoch.inline:
            yield from runs_in(stream)

    def runs_of_slots(
        self, folder: str, epoch: Epoch, slots: KeyGroups, done: int = 0
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read the changes of some slots that an epoch or a manifest lists, after its first `done` runs.

        Returns (how many runs are done with this one, its rows of these slots); a run without any is left out. Files
        that have none are not opened; a file is checked as a whole where it is, as `runs_in_folder` does.
        """
        end = 0
        for file in epoch.files:
            start, end = end, end + len(file.runs)
            wanted = [
                index
                for index, (first, last, _) in enumerate(file.runs)
                if start + index >= done and slots.meets(first, last)
            ]
            if not wanted:
                continue
            reader = self._open(folder, epoch, file)
            if reader.num_record_batches != len(file.runs):
                raise LogCorruptError(
                    f"{self.filesystem.root}/{folder}/{file.name} has {reader.num_record_batches} runs, and epoch "
                    f"{epoch.epoch} lists {len(file.runs)} of it; restore the log from a copy"
                )
            for index in wanted:
                rows = rows_of_slots(reader.get_batch(index), slots)
                if rows.num_rows:
                    yield start + index + 1, rows
        for stream in epoch.inline:
            for run in runs_in(stream):
                end += 1
                rows = rows_of_slots(run, slots) if end > done else run.slice(0, 0)
                if rows.num_rows:
                    yield end, rows

    def _open(self, folder: str, epoch: Epoch, file: ChangeFile) -> pa.RecordBatchFileReader:
        """Open a change file; LogCorruptError if it is not the one that was listed."""
        path = f"{folder}/{file.name}"
        content = self.filesystem.open_input(path)
        where = f"{self.filesystem.root}/{path}, listed by epoch {epoch.epoch}"
        if content is None:
            raise LogCorruptError(f"{where}, is missing")
        if content.size != file.size:
            raise LogCorruptError(f"{where}, has {content.size} bytes instead of {file.size}")
        if crc32(content) != file.checksum:
            raise LogCorruptError(f"{where}, does not match its checksum")
        return pa.ipc.open_file(content)

    def _json(self, path: str) -> dict[str, Any] | None:
        stored = self.filesystem.read(path)
        if stored is None:
            return None
        with self._whole(path):
            return dict(json.loads(stored))

    @contextmanager
    def _whole(self, path: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError):
            raise LogCorruptError(
                f"{self.filesystem.root}/{path} is not what a writer wrote; restore it from a copy of the log"
            ) from None


class ChangeLog:
    """A log root: the jobs below it."""

    def __init__(self, root: str | Path | Filesystem) -> None:
        self.filesystem = root if isinstance(root, Filesystem) else open_filesystem(root)

    def job(self, name: str) -> JobLog:
        """Return one job's part of the log, whether or not it is there."""
        return JobLog(self.filesystem, name)

    def jobs(self) -> list[str]:
        """Return the names of the jobs that were ever written, sorted."""
        names = self.filesystem.names("")
        return sorted(name for name in names if self.filesystem.read(f"{name}/current.json") is not None)


def check_writable(root: str | Path | Filesystem) -> None:
    """Raise LogUnavailableError, before any work is done, if a log root cannot be written.

    Neither can one whose storage lets two writers have one name: a mount without exclusive creation, or an object
    store that does not heed the condition of a PUT.
    """
    filesystem = root if isinstance(root, Filesystem) else open_filesystem(root)
    filesystem.make_folder("")
    probe = f".{uuid.uuid4().hex}.probe"
    try:
        is_exclusive = filesystem.create(probe, b"first") and not filesystem.create(probe, b"second")
    finally:
        with suppress(LogUnavailableError):
            filesystem.remove(probe)
    if not is_exclusive:
        raise LogUnavailableError(
            f"the log {filesystem.root} cannot be written: its storage overwrites a file that is there although it is "
            f"told not to, so that of two writers none would notice the other; use another store, or a newer version"
        )
