"""The change log of a job: the ordered, durable record of every epoch, one writer, any number of readers.

    <job>/terms/<term>.json                         the generation and the writer in charge (see `terms`)
    <job>/heartbeats/<term>.json                    the heartbeat of the term's writer, a counter; not durable
    <job>/<generation>/changes/<epoch>-<uuid>.arrow change files; each name is written once
    <job>/<generation>/epochs/<epoch>.json          the commit point of an epoch (see `epochs`)
    <job>/<generation>/visible.json                 makes a held-back generation visible (see `promotion`)
    <job>/<generation>/floor/<epoch>                epochs below the highest of these are removed
    <job>/<generation>/snapshots/<epoch>/...        the full state as of an epoch (see `snapshots`)

A generation is a folder with one chain of epochs. Its name is `<query id>.<term>`. Once another generation is in
charge, it is never in charge again. Readers ignore change files that no epoch lists, and epochs below the floor. An
epoch's file is created only if it does not exist, so only one of two writers commits the epoch.

This module reads; `log_writer` writes, `garbage_collector` removes.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from state_backend.log.epochs import ChangeFile, Epoch, rows_of_slots, runs_in
from state_backend.log.feed_mark import NO_ENTRY, FeedId
from state_backend.log.filesystems import Filesystem, open_filesystem
from state_backend.log.terms import Description, Term, Terms
from state_backend.model.clock import now_ms
from state_backend.model.errors import EpochHoleError, LogCorruptError, LogError, LogUnavailableError, NewerFormatError
from state_backend.model.slot_set import SlotSet

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("sparkis.log")

# So many complete snapshots are retained: a reader may be reading the second newest, or the newest may be damaged.
SNAPSHOTS_RETAINED = 2
# Bytes of change files that are read before they are needed (guess: some epochs of usual size).
PREFETCHED_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class CurrentGeneration:
    """A generation of a job that is being written, or visible, and its writer.

    Args:
        held_back: In the visible generation, the newer generation that is being written, but is not visible yet.
    """

    generation: str
    term: int
    writer: str = ""
    description: Description | None = field(default=None, compare=False)
    held_back: str | None = field(default=None, compare=False)


class JobLog:
    """Reads the log of one job."""

    def __init__(self, filesystem: Filesystem, job: str) -> None:
        self.filesystem = filesystem
        self.job = job
        self.terms = Terms(filesystem, job)
        self.damaged_snapshots: set[int] = set()  # their epochs; readers use the snapshot before
        self._prefetched: dict[str, pa.Buffer | None] = {}  # change files by path

    def current(self) -> CurrentGeneration | None:
        """Return the generation that is being written; None if the job was never written, or was dropped."""
        term = self.terms.newest()
        return None if term is None or term.is_dropped else current_of(term)

    def visible(self) -> CurrentGeneration | None:
        """Return the visible generation: the one that is being written, unless it is held back; then the one before.

        A visible generation is never held back again, so readers never return to an older generation.
        """
        newest = self.terms.newest()
        if newest is None or newest.is_dropped:
            return None
        if self.is_visible(newest):
            return current_of(newest)
        for term in self.terms.down_from(newest.term - 1):
            if term.is_dropped:
                break
            if term.generation and term.generation != newest.generation and self.is_visible(term):
                return replace(current_of(term), held_back=newest.generation)
        return current_of(newest)

    def is_visible(self, term: Term) -> bool:
        """Return whether a term's generation was never held back, or is no longer."""
        return not term.is_held_back or self.filesystem.size(self.promotion_path(term.generation)) is not None

    def folders_to_watch(self, current: CurrentGeneration) -> list[str]:
        """Return the local folders in which readers of a generation find new files; none if the log is elsewhere."""
        paths = [f"{self.job}/terms", f"{self.job}/{current.generation}/epochs"]
        if current.held_back is not None:
            paths.append(f"{self.job}/{current.held_back}")
        folders = [self.filesystem.local_folder(path) for path in paths]
        return [folder for folder in folders if folder is not None]

    def promotion_path(self, generation: str) -> str:
        """Return the path of the file that makes a held-back generation visible, relative to the log's root."""
        return f"{self.job}/{generation}/visible.json"

    def dropped(self) -> Term | None:
        """Return the term that dropped the job; None if the job was not dropped, or if its folder is missing."""
        term = self.terms.newest()
        return term if term is not None and term.is_dropped else None

    def description(self, generation: str) -> Description:
        """Return the description of a generation, with its states."""
        newest = self.terms.newest()
        for term in self.terms.down_from(newest.term if newest else 0):
            if term.generation == generation and term.description is not None:
                return term.description
        raise LogCorruptError(
            f"job {self.job!r}: no term of the log {self.filesystem.root} begins generation {generation}; "
            f"restore the job's folder `terms` from a copy"
        )

    def heartbeat(self) -> dict[str, Any]:
        """Return the last heartbeat of the writer in charge; empty if there is none."""
        term = self.terms.newest()
        heartbeat = self.terms.heartbeat(term.term) if term is not None else {}
        if not heartbeat:
            self.terms.drop_cache_if_removed()  # the folder of the job may have been removed
        return heartbeat

    def epoch(self, current: CurrentGeneration, number: int) -> Epoch | None:
        """Return an epoch; None if it is not committed, or was swept."""
        path = f"{self.job}/{current.generation}/epochs/{number}.json"
        stored = self.filesystem.read(path)
        if stored is None:
            return None
        epoch = Epoch.from_bytes(stored, f"{self.filesystem.root}/{path}", number)
        return epoch if self._is_in_chain(current, epoch, self.terms.newest()) else None

    def _is_in_chain(self, current: CurrentGeneration, epoch: Epoch, newest: Term | None) -> bool:
        """Return whether an epoch was not swept. The newest term must have been read after the epoch.

        A paused writer may create the file again after a newer writer committed the epoch and a sweep removed it. An
        epoch of the newest term is no such file.
        """
        is_of_newest = newest is not None and newest.term == epoch.term
        return is_of_newest or epoch.epoch >= self.floor(current.generation)

    def next_epochs(
        self, current: CurrentGeneration, number: int, count: int, slots: SlotSet | None = None
    ) -> list[Epoch]:
        """Return the epochs from a number on, at most `count`; empty if that one is not committed, or was swept.

        In an object store all are read at once; then their change files of some slots, for the next calls of `runs`.
        """
        numbers = range(number, number + count)
        paths = [f"{self.job}/{current.generation}/epochs/{each}.json" for each in numbers]
        found: list[Epoch] = []
        contents = self.filesystem.at_once([partial(self.filesystem.read, path) for path in paths])
        for each, path, stored in zip(numbers, paths, contents, strict=True):
            if stored is None:
                break
            try:
                found.append(Epoch.from_bytes(stored, f"{self.filesystem.root}/{path}", each))
            except LogCorruptError:
                if not found:
                    raise
                break  # the epochs before it are good
        if not found:
            return []
        files = self._files_to_prefetch(current.generation, found, slots)
        opening = [partial(self.filesystem.open_input, path) for path in files]
        newest, *contents = self.filesystem.at_once([self.terms.newest, *opening])
        self._prefetched = dict(zip(files, contents, strict=True))
        return list(takewhile(lambda epoch: self._is_in_chain(current, epoch, newest), found))

    def _files_to_prefetch(self, generation: str, epochs: Iterable[Epoch], slots: SlotSet | None) -> list[str]:
        """Return the change files to read at once, up to PREFETCHED_BYTES_MAX; none where reads take no time."""
        paths: list[str] = []
        left_bytes = PREFETCHED_BYTES_MAX if self.filesystem.reads_at_a_time > 1 else 0
        for file in (file for epoch in epochs for file in epoch.files if file.has_slots(slots)):
            left_bytes -= file.size
            if left_bytes < 0:
                break
            paths.append(f"{self.changes_folder(generation)}/{file.name}")
        return paths

    def floor(self, generation: str) -> int:
        """Return the number of the first epoch that was not swept."""
        names = self.filesystem.names(f"{self.job}/{generation}/floor")
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def has_file(self, generation: str, number: int) -> bool:
        """Return whether an epoch's file exists, even below the floor; the file is not read."""
        return self.filesystem.size(f"{self.job}/{generation}/epochs/{number}.json") is not None

    def numbers(self, generation: str) -> list[int]:
        """Return the numbers of the epochs of a generation, sorted."""
        names = self.filesystem.names(f"{self.job}/{generation}/epochs")
        floor = self.floor(generation)  # read last: epochs removed during the listing are below it
        numbers = (int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())
        return sorted(number for number in numbers if number >= floor)

    def newest(self, current: CurrentGeneration) -> Epoch | None:
        """Return the last committed epoch; EpochHoleError if an epoch before it is missing."""
        numbers = self.numbers(current.generation)
        if not numbers:
            return None
        if numbers[-1] - numbers[0] + 1 != len(numbers):
            missing = sorted(set(range(numbers[0], numbers[-1])) - set(numbers))
            raise EpochHoleError(
                f"job {self.job!r}: epochs {missing[:5]} are missing in the log {self.filesystem.root}; "
                f"restore them from a copy, or begin a new log"
            )
        epoch = self.epoch(current, numbers[-1])
        return epoch if epoch is not None else self.newest(current)  # the epoch was swept meanwhile

    def first(self, current: CurrentGeneration) -> Epoch | None:
        """Return the first epoch of a generation that was not swept; None if there is no epoch yet."""
        while numbers := self.numbers(current.generation):
            if (epoch := self.epoch(current, numbers[0])) is not None:
                return epoch
        return None

    def snapshots(self, current: CurrentGeneration) -> Iterator[Epoch]:
        """Iterate over the manifests of the newest SNAPSHOTS_RETAINED complete snapshots, the newest first.

        Readers use no others, because older ones may be being removed. See `complete_snapshots`.
        """
        return islice(self.complete_snapshots(current), SNAPSHOTS_RETAINED)

    def complete_snapshots(self, current: CurrentGeneration) -> Iterator[Epoch]:
        """Iterate over the manifests of all complete snapshots, the newest first.

        Snapshots in `damaged_snapshots` are skipped. See `snapshots`.
        """
        for number in reversed(self.snapshot_numbers(current.generation)):
            path = f"{self.snapshot_folder(current.generation, number)}/manifest.json"
            stored = self.filesystem.read(path)
            if stored is not None and number not in self.damaged_snapshots:
                try:
                    manifest = Epoch.from_bytes(stored, f"{self.filesystem.root}/{path}", number)
                except LogCorruptError as error:
                    self.damaged_snapshots.add(number)
                    logger.warning("job %s: %s; the snapshot before it is used", self.job, error)
                    continue
                yield manifest

    def snapshot_numbers(self, generation: str) -> list[int]:
        """Return the epochs of a generation's snapshots, sorted; incomplete snapshots, too."""
        names = self.filesystem.names(f"{self.job}/{generation}/snapshots")
        return sorted(int(name) for name in names if name.isdecimal())

    def end(self, current: CurrentGeneration) -> Epoch | None:
        """Return the epoch before the next one: the last epoch, or the newest snapshot if no epoch remains."""
        return self.newest(current) or next(self.snapshots(current), None)

    def feed_end(self, last: Term | None) -> FeedId:
        """Return the last entry of the change feed, in any generation, once `last` is the last term that has begun."""
        if last is None:
            return NO_ENTRY
        try:
            epoch = self.end(current_of(last)) if last.generation else None
        except LogUnavailableError:
            raise
        except LogError:
            # The generation is damaged, and another one may replace it: the ids go on from the clock.
            return max(last.feed_after, FeedId(now_ms(), 0))
        return last.feed_after if epoch is None or epoch.feed is None else max(last.feed_after, epoch.feed.end)

    def snapshot_folder(self, generation: str, epoch: int) -> str:
        """Return the folder of a snapshot of an epoch, relative to the log's root."""
        return f"{self.job}/{generation}/snapshots/{epoch}"

    def changes_folder(self, generation: str) -> str:
        """Return the folder of a generation's change files, relative to the log's root."""
        return f"{self.job}/{generation}/changes"

    def runs(self, generation: str, epoch: Epoch, slots: SlotSet | None = None) -> Iterator[pa.RecordBatch]:
        """Read an epoch's runs, of all slots or of some. See `runs_in_folder` and `runs_of_slots`."""
        folder = self.changes_folder(generation)
        if slots is None:
            return self.runs_in_folder(folder, epoch)
        return (run for _, run in self.runs_of_slots(folder, epoch, slots))

    def runs_in_folder(self, folder: str, epoch: Epoch) -> Iterator[pa.RecordBatch]:
        """Read the runs that an epoch or a manifest lists; LogCorruptError before the first run of a damaged file."""
        for file in epoch.files:
            reader = self.open_changes(folder, epoch, file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
        for stream in epoch.inline:
            yield from runs_in(stream)

    def runs_of_slots(
        self, folder: str, epoch: Epoch, slots: SlotSet, done: int = 0
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read the changes of some slots that an epoch or a manifest lists, after its first `done` runs.

        Iterates over (number of runs up to this one, the run's rows of these slots); runs without such rows are left
        out. Files without such runs are not opened. An opened file is checked as in `runs_in_folder`.
        """
        end = 0
        for file in epoch.files:
            start, end = end, end + len(file.runs)
            indices = [
                index
                for index, (first, last, _) in enumerate(file.runs)
                if start + index >= done and slots.intersects(first, last)
            ]
            if not indices:
                continue
            reader = self.open_changes(folder, epoch, file)
            if reader.num_record_batches != len(file.runs):
                raise LogCorruptError(
                    f"{self.filesystem.root}/{folder}/{file.name} has {reader.num_record_batches} runs, and epoch "
                    f"{epoch.epoch} lists {len(file.runs)} of it; restore the log from a copy"
                )
            for index in indices:
                rows = rows_of_slots(reader.get_batch(index), slots)
                if rows.num_rows:
                    yield start + index + 1, rows
        for stream in epoch.inline:
            for run in runs_in(stream):
                end += 1
                rows = rows_of_slots(run, slots) if end > done else run.slice(0, 0)
                if rows.num_rows:
                    yield end, rows

    def open_changes(self, folder: str, epoch: Epoch, file: ChangeFile) -> pa.RecordBatchFileReader:
        """Open a change file; LogCorruptError if it is not the listed one."""
        path = f"{folder}/{file.name}"
        content = self._prefetched.pop(path, None) or self.filesystem.open_input(path)
        where = f"{self.filesystem.root}/{path}, listed by epoch {epoch.epoch}"
        if content is None:
            raise LogCorruptError(f"{where}, is missing")
        if content.size != file.size:
            raise LogCorruptError(f"{where}, has {content.size} bytes instead of {file.size}")
        if crc32(content) != file.checksum:
            raise LogCorruptError(f"{where}, does not match its checksum")
        import pyarrow as pa

        return pa.ipc.open_file(content)


def current_of(term: Term) -> CurrentGeneration:
    """Return the generation of a term that has begun."""
    return CurrentGeneration(term.generation, term.term, term.writer, term.description)


class ChangeLog:
    """The jobs below a log root."""

    def __init__(self, root: str | Path | Filesystem) -> None:
        self.filesystem = root if isinstance(root, Filesystem) else open_filesystem(root)
        self._jobs: dict[str, JobLog] = {}  # each caches its newest term

    def job(self, name: str) -> JobLog:
        """Return the log of one job, whether or not the job exists."""
        return self._jobs.setdefault(name, JobLog(self.filesystem, name))

    def jobs(self) -> list[str]:
        """Return the sorted names of all jobs that are not dropped; damaged jobs, too."""
        return sorted(name for name in self.filesystem.names("") if not name.startswith(".") and self._is_job(name))

    def folders_of_new_jobs(self, jobs: Collection[str]) -> list[str]:
        """Return the local folders in which a new job begins: the root, and the folders of jobs that have not begun.

        A job has begun with the first file in its folder `terms`. There are no such folders if the log is elsewhere. A
        folder that cannot be listed is left out, as it may be anything.
        """
        root = self.filesystem.local_folder("")
        if root is None:
            return []
        folders = [root]
        for name in self.filesystem.names(""):
            if name.startswith(".") or name in jobs:
                continue
            path = f"{root}/{name}"
            try:
                names = self.filesystem.names(name)
            except LogUnavailableError:
                continue
            if "terms" in names:
                folders.append(f"{path}/terms")
            elif not names and os.path.isdir(path):
                folders.append(path)
        return folders

    def _is_job(self, name: str) -> bool:
        try:
            return self.job(name).current() is not None
        except (LogCorruptError, NewerFormatError):  # opening the job raises the error
            return True

    def no_such_job(self, name: str) -> LogError:
        """Return the error for a name that no job has."""
        return LogError(f"the log {self.filesystem.root} has no job {name!r}; jobs: {', '.join(self.jobs()) or 'none'}")


def check_writable(root: str | Path | Filesystem) -> None:
    """Raise LogUnavailableError, before any work is done, if a log root cannot be written.

    Also raised for storage that cannot exclude a second writer; `Filesystem.create` checks that.
    """
    filesystem = root if isinstance(root, Filesystem) else open_filesystem(root)
    filesystem.make_folder("")
    probe = f".{uuid.uuid4().hex}.probe"
    filesystem.create(probe, b"")
    filesystem.remove(probe)
