"""`sparkis rename`: gives a job of a log another name, with all of its state.

By default a job has the name of its query, and keys begin with the job's name. So a renamed query needs new keys. The
command writes the full state as the first epoch of a new job. That epoch has the number, clock reading and digest of
the old job's last epoch, so that the query continues after it, and a replay of the last batch is recognized.

At any moment, also after a crash, the log has the complete old job, or the complete new one, or both. After an
interruption, run the command again: it finishes. A writer of the old job is fenced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from state_backend.apply.file_split import split_into_files
from state_backend.apply.temporary_store import temporary_store
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.epochs import ChangeFile, Epoch, entries_of
from state_backend.log.feed_mark import FeedMark
from state_backend.log.fencing import begin, claim, new_candidate, seal
from state_backend.log.filesystems import Filesystem
from state_backend.log.garbage_collector import sweep_job
from state_backend.log.terms import Description, Term, TermReason
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor, check_name
from state_backend.model.errors import DescriptorError, LogError, SparkisError
from state_backend.model.generations import folder_name
from state_backend.model.records import Change, runs_of
from state_backend.store.store import Snapshot

DESCRIPTION = """\
Rename a job of a log after its query was renamed: keys OLD:... become NEW:..., and the job OLD is removed. Stop the
query first, and start it under its new name afterwards. Needs no server and no Spark."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument("old", metavar="OLD", help="the job's present name")
    parser.add_argument("new", metavar="NEW", help="its new name")


def run(options: argparse.Namespace) -> int:
    """Rename; return the exit code."""
    try:
        print(rename(options.log, options.old, options.new))
    except SparkisError as error:
        print(f"sparkis rename: {error}", file=sys.stderr)
        return 1
    return 0


def rename(root: str | Path | Filesystem, old: str, new: str) -> str:
    """Rename a job and return one line about it; SparkisError if it is impossible, and the old job is unchanged.

    The command waits up to three intervals for a heartbeat of the old job's writer. The state is built in a temporary
    store on this machine's disk.
    """
    check_name("job", new)
    log = ChangeLog(root)
    before = log.job(old)
    current = before.visible()
    if current is None:
        dropped = before.dropped()
        if dropped is not None and dropped.renamed_to == new:
            sweep_job(before, now_ms())  # an earlier run may have crashed in the removal
            return f"job {old} is called {new} already"
        raise log.no_such_job(old)
    description = before.description(current.generation)
    _check_may_rename(before, current, description, new)
    copied = _earlier_copy(log, new, description, old)
    # From here on no writer of the old job can commit.
    claimed = claim(before.terms, new_candidate(description.query_id, "sparkis rename"))
    feed_after = before.feed_end(seal(before.terms, claimed))
    current = before.visible()
    last = before.end(current) if current is not None else None
    if current is None or last is None:
        raise LogError(f"job {old!r} was dropped, or started with a new checkpoint, during the renaming")
    _check_not_held_back(before, current)
    if not copied:
        _copy(log, before, current, last, new)
    elif copied.epoch != last.epoch:
        raise LogError(
            f"job {old!r} was renamed to {new!r} at epoch {copied.epoch}, and the log has both: {old!r} was written "
            f"again, up to epoch {last.epoch}. Drop the one that is not needed with sparkis drop"
        )
    dropped = Term(claimed.term, TermReason.DROP, claimed.writer, renamed_to=new, feed_after=feed_after)
    begin(before.terms, dropped, claimed)
    sweep_job(before, now_ms())
    return f"job {old} is now {new}, with {last.epoch} as its first epoch; start its query under the new name"


def _check_may_rename(before: JobLog, current: CurrentGeneration, description: Description, new: str) -> None:
    if new == before.job:
        raise DescriptorError(f"the job is called {new!r} already")
    if description.source is not None:
        raise DescriptorError(
            f"job {before.job!r} is attached or a published table, and needs no renaming: attach, or publish, with "
            f"job={new!r}, and drop {before.job!r} with sparkis drop"
        )
    if before.newest(current) is None:
        raise LogError(f"job {before.job!r} has no epoch yet; start its query under the new name")
    _check_not_held_back(before, current)


def _check_not_held_back(before: JobLog, current: CurrentGeneration) -> None:
    """Refuse a job with two generations: one that is visible to readers, and one that the query continues."""
    if current.held_back is not None:
        raise LogError(
            f"job {before.job!r} started with a new checkpoint, and its new state is held back until its query has "
            f"caught up: wait for that, or run sparkis promote --log {before.filesystem.root} {before.job}; then "
            f"rename it"
        )


def _earlier_copy(log: ChangeLog, new: str, description: Description, old: str) -> Epoch | None:
    """Return the first epoch of the new job if an earlier run of the command wrote it; refuse any other job's name."""
    job = log.job(new)
    existing = job.current()
    if existing is None:
        return None
    found = job.description(existing.generation)
    if (found.query_id, found.renamed_from) == (description.query_id, old):
        return job.first(existing)
    raise DescriptorError(
        f"the log {log.filesystem.root} has a job {new!r} already; take another name, or drop it with sparkis drop"
    )


def _copy(log: ChangeLog, before: JobLog, current: CurrentGeneration, last: Epoch, new: str) -> None:
    """Write the new job: its first epoch, with the full state, and at last the term that begins it."""
    files, after, description = log.filesystem, log.job(new), before.description(current.generation)
    states = tuple(_renamed(state, before.job, new) for state in description.states)
    names = tuple(state.name for state in states)
    incomplete = names if last.origin > 0 else description.incomplete
    claimed = claim(after.terms, new_candidate(description.query_id, "sparkis rename"))
    earlier = seal(after.terms, claimed)
    feed_after = after.feed_end(earlier)
    generation = folder_name(description.query_id, claimed.term)
    for folder in ("changes", "epochs", "floor", "snapshots"):
        files.make_folder(f"{new}/{generation}/{folder}")
    new_description = Description(new, description.query_id, states, incomplete=incomplete, renamed_from=before.job)
    with temporary_store(log, before.job) as store:
        assert store is not None
        with store.snapshot(last.clock_ms) as snapshot:
            writer = ChangeFileWriter(files, after.changes_folder(generation), last.epoch)
            written = tuple(_write_files(writer, _changes(snapshot, names, before.job, new), names))
    newest = before.end(current)
    if newest is None or newest.ref != last.ref:
        raise LogError(f"job {before.job!r} was written while it was copied; stop its query, and run this again")
    # Rows and digest are those that the query wrote: they recognize a replay of the last batch.
    first = Epoch(
        epoch=last.epoch,
        term=claimed.term,
        previous=None,
        clock_ms=last.clock_ms,
        rows=last.rows,
        digest=last.digest,
        skipped_rows=last.skipped_rows,
        offsets=last.offsets,
        replaces=names,
        files=written,
        format=new_description.format,
    )
    reset = None if earlier is None else str(TermReason.RENAME)
    entries = entries_of(first, reset)
    feed = FeedMark.of(last.clock_ms, feed_after, entries, entries, reset)
    files.create(f"{new}/{generation}/epochs/{last.epoch}.json", replace(first, feed=feed).to_bytes())
    term = Term(claimed.term, TermReason.RENAME, claimed.writer, generation, new_description, feed_after=feed_after)
    begin(after.terms, term, claimed)


def _changes(snapshot: Snapshot, names: Collection[str], old: str, new: str) -> Iterator[Change]:
    """Iterate over a job's full state as changes with the new keys."""
    before, now = f"{old}:".encode(), f"{new}:".encode()
    for change in snapshot.changes():
        if change.state in names:  # dropped states are not copied: the next epoch would empty them
            has_name = change.key.startswith(before)
            yield change._replace(key=now + change.key.removeprefix(before)) if has_name else change


def _size(change: Change) -> int:
    return len(change.key) + len(change.field or b"") + len(change.value or b"")


def _write_files(writer: ChangeFileWriter, changes: Iterator[Change], names: Sequence[str]) -> Iterator[ChangeFile]:
    """Write changes to files of bounded size; all changes of a key are in one file."""
    for changes_of_file in split_into_files(changes, _size, lambda change: (change.key, change.key)):
        yield writer.write_file(runs_of(changes_of_file, names))


def _renamed(state: StateDescriptor, old: str, new: str) -> StateDescriptor:
    form = state.key_format or ""
    return replace(state, key_format=new + form.removeprefix(old)) if form.startswith(f"{old}:") else state
