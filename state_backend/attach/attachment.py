"""`Attachment` follows a query's checkpoint: a snapshot of the state first, then the changes of each committed batch.

    sparkis.attach(query, ...)                 a query of this driver
    sparkis.attach(checkpoint=..., job=...)    any query, running or stopped

Each batch becomes one epoch, with the batch's number and timestamp. So the log records the attachment's progress:
after the attachment or the query has stopped, a new attachment resumes from the log. If changes are missing (they were
purged, or the checkpoint was set back), the attachment reads a new snapshot into a new generation of the log; readers
keep the old generation until the new one is complete.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from state_backend.checkpoint.states import stable_name
from state_backend.codec.row_encoding import RowError
from state_backend.folder_watch import FolderWatch
from state_backend.log.catch_up import CatchUp
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.change_log import ChangeLog
from state_backend.log.epochs import Epoch, EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import (
    CheckpointError,
    DescriptorError,
    EpochHoleError,
    FencedWriterError,
    LogCorruptError,
    UnsupportedStateError,
)

logger = logging.getLogger("sparkis.attach")

OnMismatch = Literal["refuse", "replace"]

# All commits are listed at intervals, to see whether the checkpoint was set back. Between two listings, checks look for
# one file, the next commit. On an object store each check costs money, so there are pauses between checks. A pause ends
# early if the query runs in this driver and reports progress.
LISTING_INTERVAL_LOCAL_S = 1.0
POLL_INTERVAL_REMOTE_S = 1.0
PROGRESS_INTERVAL_S = 0.1
CHECKS_PER_LISTING_REMOTE = 10
HEARTBEAT_INTERVAL_S = 1.0
# A failed read is retried after pauses that double from the first to the longest (guess).
RETRY_PAUSE_S = 1.0
RETRY_PAUSE_S_MAX = 10.0
STOP_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 60.0

# Errors that a retry does not fix.
PERMANENT_ERRORS = (
    DescriptorError,
    RowError,
    FencedWriterError,
    LogCorruptError,
    EpochHoleError,
    UnsupportedStateError,
)


class FollowedCheckpoint(Protocol):
    """A checkpoint whose commits an attachment follows. Each call reads the files again."""

    location: str

    @property
    def is_local(self) -> bool:
        """Whether the checkpoint is on a local disk, where a check takes microseconds."""

    def query_id(self) -> str:
        """Return the query's id; CheckpointError if this is not a checkpoint."""

    def is_committed(self, batch: int) -> bool:
        """Return whether a batch is committed, and not purged. Checks one file."""

    def newest(self) -> int | None:
        """Return the number of the last committed batch, or None."""

    def batch_time_ms(self, batch: int) -> int | None:
        """Return the timestamp at which Spark planned a batch; None if the batch is purged."""


class ChangeFiles(Protocol):
    """A folder of a log that change files are written into: a `LogWriter`, as a reader sees it."""

    @property
    def root(self) -> str:
        """The root of the change log."""

    @property
    def folder(self) -> str:
        """The folder, relative to the root."""

    def change_files(self, epoch: int) -> ChangeFileWriter:
        """Return a writer of change files for an epoch."""


class StateReader(ABC):
    """Reads the rows of some states from a checkpoint, and writes them as change files.

    Attributes:
        identities: By state name, the source of the state as plain JSON, with `operator_id`, `operator`, `variable` and
            `schema`. If the source changes, the log needs a new generation.
        batches_max: The largest number of batches that one call of `changes` reads.
    """

    descriptors: tuple[StateDescriptor, ...]
    identities: Mapping[str, Mapping[str, Any]]
    batches_max: int

    @abstractmethod
    def snapshot(self, writer: ChangeFiles, batch: int) -> EpochContent:
        """Write the whole state as of a batch."""

    @abstractmethod
    def changes(self, writer: ChangeFiles, first: int, last: int) -> Iterator[tuple[int, EpochContent]]:
        """Write the changes of some batches, and yield them in order. The caller commits each before the next."""

    def read_ahead(self, writer: ChangeFiles, batch: int) -> None:  # noqa: B027  # not all readers do it
        """Begin to read the changes of the next batch before its commit; called repeatedly, until it is committed."""

    def pause_s(self, read_s: float) -> float:
        """Return the pause after a read that took `read_s` seconds."""
        return 0.0

    def has_ended(self) -> bool:
        """Return whether the reader has ended for good, without an error; the attachment then ends, too."""
        return False

    def close(self) -> None:  # noqa: B027  # most readers have nothing to end
        """End a read that runs in another process, and that process; called when the attachment ends."""

    def describe(self, error: Exception) -> str:
        """Return an error's first line."""
        return str(error).partition("\n")[0]


@dataclass(frozen=True)
class QueryHooks:
    """Callbacks of an attachment to the query, and to the servers that this process started.

    ends_of         returns the end offset of each source in a batch; () if unknown
    is_active       tells whether the query runs
    sources         returns the newest offsets of the query's sources for a heartbeat (see `source_lag`), or None
    is_idle         tells whether the query looked for input after a batch, and found none
    progress        returns a text that changes after each batch, cheaper than a look at the checkpoint
    extra_states    states that the attachment publishes with those of the checkpoint
    extra_changes   returns their changes, inline
    announce        tells servers that an epoch of a job is committed, by the writer of a term
    wait            waits until an epoch of a job can be read at these servers; False after a timeout
    """

    ends_of: Callable[[int], tuple[str, ...]] = lambda batch: ()
    is_active: Callable[[], bool] = lambda: True
    is_idle: Callable[[int], bool] = lambda batch: False
    sources: Callable[[], Mapping[str, Any] | None] = lambda: None
    progress: Callable[[], str] | None = None
    extra_states: tuple[StateDescriptor, ...] = ()
    extra_changes: Callable[[], bytes | None] | None = None
    announce: Callable[[str, int, int], None] = lambda job, epoch, term: None
    wait: Callable[[str, int, float], bool] = lambda job, epoch, timeout_s: True


def _with_stable_names(source: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the source in a log with stable operator names; earlier versions of sparkis wrote Spark's names."""
    if source is None:
        return None
    states = {name: {**each, "operator": stable_name(each["operator"])} for name, each in source["states"].items()}
    return {**source, "states": states}


class Attachment:
    """A thread that follows a query's checkpoint and publishes its state; `attach` returns it.

    An attachment is a context manager that calls `stop` at its end.

    Attributes:
        job: The name that keys begin with.
        log: The root of the change log.
        error: The error that ended the attachment, or None.
        failure: The error of the last read, or None; the attachment retries.
    """

    def __init__(
        self,
        checkpoint: FollowedCheckpoint,
        reader: StateReader,
        *,
        job: str,
        log: str,
        on_mismatch: OnMismatch,
        takeover: bool,
        catch_up_timeout_s: float | None,
        hooks: QueryHooks,
    ) -> None:
        self.job = job
        self.log = log
        self.error: Exception | None = None
        self.failure: Exception | None = None
        self._checkpoint = checkpoint
        self._reader = reader
        self._takeover = takeover
        self._catch_up_timeout_s = catch_up_timeout_s
        self._hooks = hooks
        self._stopping = threading.Event()
        self._watch = FolderWatch()
        self._batch_committed = threading.Condition()
        self._check_source(on_mismatch)
        self._writer = self._open()
        self._announce()
        self._thread = threading.Thread(target=self._run, name=f"sparkis-attach-{job}", daemon=True)
        self._thread.start()
        name = f"sparkis-attach-heartbeat-{job}"
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, name=name, daemon=True)
        self._heartbeat_thread.start()

    def __repr__(self) -> str:
        return f"Attachment(job={self.job!r}, checkpoint={self._checkpoint.location!r}, batch={self.batch})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def states(self) -> tuple[StateDescriptor, ...]:
        """The states' descriptors in the log."""
        return self._writer.states

    @property
    def batch(self) -> int:
        """The number of the last micro-batch in the log; -1 before the first."""
        last = self._writer.last
        return -1 if last is None else last.epoch

    def wait(self, batch: int | None = None, timeout_s: float = WAIT_TIMEOUT_S) -> bool:
        """Wait until a micro-batch is readable; False if it is not after `timeout_s`.

        A batch is readable once it is in the log, and on the servers that this driver started.

        Args:
            batch: The micro-batch's number. Default: the last one that the query has committed.
            timeout_s: The longest wait, in seconds.

        Raises:
            Exception: The `error` that ended the attachment.
        """
        deadline = time.monotonic() + timeout_s
        if batch is None:
            batch = self._checkpoint.newest()
        if batch is None:
            return True
        with self._batch_committed:
            self._batch_committed.wait_for(
                lambda: self.error or self.batch >= batch, max(0.0, deadline - time.monotonic())
            )
        if self.error is not None:
            raise self.error
        remaining_s = max(0.0, deadline - time.monotonic())
        return self.batch >= batch and self._hooks.wait(self.job, batch, remaining_s)

    def stop(self) -> None:
        """Stop following the checkpoint, after the current read. The state in the log stays readable."""
        self._stopping.set()
        self._watch.wake()
        self._reader.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)
            self._heartbeat_thread.join(STOP_TIMEOUT_S)  # it writes nothing into the log after this

    # -- the log -------------------------------------------------------------------------------------------------------

    @property
    def _descriptors(self) -> list[StateDescriptor]:
        return [*self._reader.descriptors, *self._hooks.extra_states]

    @property
    def _source(self) -> dict[str, Any]:
        return {"states": dict(self._reader.identities)}

    def _check_source(self, on_mismatch: OnMismatch) -> None:
        """Raise DescriptorError if the job's states in the log come from a sink, or from another operator or schema."""
        log = ChangeLog(self.log).job(self.job)
        current = log.current()
        if current is None:
            return
        described = log.description(current.generation)
        identity = _with_stable_names(described.source)
        if identity is None:
            raise DescriptorError(
                f"the query itself writes job {self.job!r} in the log {self.log} (sparkis.queryable or "
                f"sparkis.publish), and a job has one writer: give the attachment another name with job="
            )
        if on_mismatch == "replace" or described.query_id != self._checkpoint.query_id():
            return
        for name, expected in self._reader.identities.items():
            stored = identity["states"].get(name, expected)
            for part in ("operator", "variable", "schema"):
                if stored[part] != expected[part]:
                    raise DescriptorError(
                        f"job {self.job!r}, state {name!r}: operator {expected['operator_id']} of the query has {part} "
                        f"{expected[part]}, and the log was written from {part} {stored[part]}: the query's plan has "
                        f"changed. Choose the operator with operator= (sparkis attach --list lists them), "
                        f"or pass on_mismatch='replace' to start with a new snapshot"
                    )

    def _open(self, *, starts_empty: bool = False) -> LogWriter:
        """Open the query's generation of the log, or a new one if the sources of the states have changed.

        If readers see another query's generation, a new one is held back until this query has caught up. A new
        generation of the same query starts with a snapshot, and is visible at once.
        """
        query_id = self._checkpoint.query_id()
        log = ChangeLog(self.log).job(self.job)
        visible = log.visible()
        is_other_query = visible is not None and log.description(visible.generation).query_id != query_id
        writer = LogWriter(
            self.log,
            self.job,
            self._descriptors,
            query_id,
            source=self._source,
            starts_empty=starts_empty or not self._is_same_source(query_id),
            checkpoint=self._checkpoint.location,
            sends_heartbeats=False,
            takeover=self._takeover or starts_empty,  # with `starts_empty` it replaces this attachment's own writer
            holds_back=is_other_query and self._catch_up_timeout_s != 0,
        )
        self._catch_up = CatchUp(writer, self._catch_up_timeout_s, self._hooks.is_idle)
        return writer

    def _is_same_source(self, query_id: str) -> bool:
        term = ChangeLog(self.log).job(self.job).terms.last_of(query_id)
        if term is None or term.description is None:
            return True
        current = tuple(state.for_job(self.job) for state in self._descriptors)
        return (term.description.states, _with_stable_names(term.description.source)) == (current, self._source)

    def _announce(self) -> None:
        self._hooks.announce(self.job, self.batch, self._writer.current.term)

    def _send_heartbeats(self) -> None:
        """Write a heartbeat once a second; it says "not running" while reads fail or the query does not run."""
        is_running = True
        while is_running:
            is_running = not self._stopping.wait(HEARTBEAT_INTERVAL_S) and self.error is None
            writer = self._writer
            try:
                is_live = is_running and self.failure is None and self._hooks.is_active()
                writer.send_heartbeat(is_running=is_live, sources=self._hooks.sources() if is_live else None)
                if not self._catch_up.is_done:
                    self._catch_up.check(is_behind=self.batch != self._checkpoint.newest())
            except Exception as error:  # from the log, or from a stopped Spark; the reading thread gets the same error
                logger.debug("no heartbeat for job %s: %s", self.job, error)

    # -- the checkpoint ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            self._stopping.set()
            self._reader.close()

    def _follow(self) -> None:
        pause_s = RETRY_PAUSE_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                if self._read_next():
                    self.failure = None
                    self._stopping.wait(self._reader.pause_s(time.monotonic() - started_s))
                else:
                    self.failure = None
                    if self._reader.has_ended():
                        return
                    self._wait_for_commit()
                pause_s = RETRY_PAUSE_S
            except Exception as error:
                if self._reader.has_ended():
                    return
                if isinstance(error, PERMANENT_ERRORS):
                    self._end(error)
                    return
                self.failure = error
                last = self.batch
                logger.warning(
                    "job %s: stays at batch %d; retried in %g s: %s",
                    self.job,
                    last,
                    pause_s,
                    self._reader.describe(error),
                )
                self._stopping.wait(pause_s)
                pause_s = min(RETRY_PAUSE_S_MAX, 2 * pause_s)

    def _wait_for_commit(self) -> None:
        """Wait until the next batch is committed, or until it is time to list all commits."""
        last = self._writer.last
        batch = 0 if last is None else last.epoch + 1
        if last is not None:
            self._reader.read_ahead(self._writer, batch)
        if self._checkpoint.is_local:
            self._wait_for_file(batch)
            return
        for _ in range(CHECKS_PER_LISTING_REMOTE):
            self._wait_for_progress(POLL_INTERVAL_REMOTE_S)
            if self._stopping.is_set() or self._checkpoint.is_committed(batch):
                return

    def _wait_for_file(self, batch: int) -> None:
        """Wait for the commit of a batch on a local disk."""
        self._watch.watch(f"{self._checkpoint.location.removeprefix('file:')}/commits")
        if self._checkpoint.is_committed(batch):
            return
        ends_s = time.monotonic() + LISTING_INTERVAL_LOCAL_S
        while not self._stopping.is_set() and (remaining_s := ends_s - time.monotonic()) > 0:
            self._watch.wait(remaining_s)
            if self._checkpoint.is_committed(batch):
                self._watch.found()
                return

    def _wait_for_progress(self, timeout_s: float) -> None:
        """Wait for a time; end earlier when the query reports progress, if it runs in this driver."""
        progress = self._hooks.progress
        if progress is None:
            self._stopping.wait(timeout_s)
            return
        ends_s, before = time.monotonic() + timeout_s, progress()
        while time.monotonic() < ends_s and not self._stopping.wait(PROGRESS_INTERVAL_S):
            if progress() != before:
                return

    def _end(self, error: Exception) -> None:
        logger.error("job %s: the attachment has ended: %s", self.job, self._reader.describe(error))
        with self._batch_committed:
            self.error = error
            self._batch_committed.notify_all()

    def _read_next(self) -> bool:
        """Read the batches that were committed since the last read; True if there may be more."""
        last = self._writer.last
        newest = self._checkpoint.newest()
        if newest is None:
            if last is None:
                return False
            raise CheckpointError(
                f"the committed batches of {self._checkpoint.location} were removed or are unreachable"
            )
        if last is None:
            self._read_snapshot(newest)
        elif reason := self._gap_after(last, newest):
            logger.warning("job %s: %s; reading a new snapshot of the state", self.job, reason)
            self._writer.check_in_charge()
            self._writer = self._open(starts_empty=True)
        elif newest > last.epoch:
            self._read_changes(last.epoch + 1, min(newest, last.epoch + self._reader.batches_max))
        else:
            return False
        return True

    def _gap_after(self, last: Epoch, newest: int) -> str:
        """Return why changes after an epoch are missing in the checkpoint; an empty text if none are missing."""
        query_id = self._checkpoint.query_id()
        if self._writer.query_id != query_id:
            return f"the checkpoint belongs to another query now, {query_id}"
        batch_time_ms = self._checkpoint.batch_time_ms(last.epoch)
        if newest < last.epoch or batch_time_ms not in (None, last.clock_ms):
            return f"the checkpoint was set back to before batch {last.epoch}"
        if batch_time_ms is None or (newest > last.epoch and not self._checkpoint.is_committed(last.epoch + 1)):
            return f"batch {last.epoch + 1} is purged already (to retain more: spark.sql.streaming.minBatchesToRetain)"
        return ""

    def _read_snapshot(self, batch: int) -> None:
        batch_time_ms = self._batch_time_ms(batch)
        self._commit(batch, batch_time_ms, self._reader.snapshot(self._writer, batch))
        self._announce()

    def _read_changes(self, first: int, last: int) -> None:
        times_ms = {batch: self._batch_time_ms(batch) for batch in range(first, last + 1)}
        try:
            for batch, changes in self._reader.changes(self._writer, first, last):
                self._commit(batch, times_ms[batch], changes)
        except PERMANENT_ERRORS:
            raise
        except Exception:
            if not self._checkpoint.is_committed(self.batch + 1):
                return  # the batches were purged meanwhile: the next read finds the gap
            raise
        self._announce()

    def _batch_time_ms(self, batch: int) -> int:
        batch_time_ms = self._checkpoint.batch_time_ms(batch)
        if batch_time_ms is None:
            raise CheckpointError(f"batch {batch} of {self._checkpoint.location} was purged while it was read")
        return batch_time_ms

    def _commit(self, batch: int, batch_time_ms: int, changes: EpochContent) -> None:
        if self._checkpoint.batch_time_ms(batch) != batch_time_ms:
            raise CheckpointError(f"{self._checkpoint.location} was set back while batch {batch} was read")
        extra = None if self._hooks.extra_changes is None else self._hooks.extra_changes()
        offsets = self._hooks.ends_of(batch)
        self._writer.commit(batch, changes.with_inline(extra), clock_ms=batch_time_ms, offsets=offsets)
        self._catch_up.on_commit(offsets)
        with self._batch_committed:
            self._batch_committed.notify_all()
