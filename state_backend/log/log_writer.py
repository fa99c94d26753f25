"""Writes a job's change log (see `change_log`): executors write change files, the driver commits epochs."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from zlib import crc32

import pyarrow as pa

from state_backend.codec import keep_by_order, packed_sorted
from state_backend.codec.reductions import check_change, reduction_of
from state_backend.log import promotion, rewind
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.change_log import ChangeLog, current_of
from state_backend.log.descriptions import check_description, check_not_renamed, next_description
from state_backend.log.epochs import NO_CHANGES, Epoch, EpochContent, entries_of, runs_in
from state_backend.log.feed_mark import FeedId, FeedMark
from state_backend.log.fencing import begin, check_in_charge, claim, new_candidate, seal, succeed
from state_backend.log.filesystems import Filesystem
from state_backend.log.heartbeat_writer import HeartbeatWriter
from state_backend.log.terms import Description, Term, TermReason
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor, check_name, check_states
from state_backend.model.errors import (
    DescriptorError,
    EpochHoleError,
    LogUnavailableError,
    RewoundCheckpointError,
)
from state_backend.model.generations import first_term, folder_name
from state_backend.model.records import Change, runs_of, schema

logger = logging.getLogger("sparkis.log")

# Above this size of all tasks' inline changes, the writer moves them to a change file; an epoch's file stays small
# (guess).
EPOCH_INLINE_BYTES_MAX = 1 << 20

OnRewind = Literal["refuse", "truncate"]


class LogWriter:
    """The one writer of a job's change log. Any Python program can publish with it; no Spark is needed.

    A new writer fences the one before. A LogWriter is a context manager, which calls `close` at the end. Only one
    thread may use it, except for `send_heartbeat`, `promote` and `poll_promotion`, which are thread-safe. Until
    `close`, a thread of its own writes heartbeats, by which readers learn that the job is live.

    Args:
        root: The root of the change log.
        job: The job's name; default keys begin with it.
        states: All states of the job.
        query_id: The query that owns the state. Default: the query in the log, else a new one. A live writer of another
            query is taken over only with `takeover`.
        on_rewind: `truncate` lets `publish` go back to an earlier epoch; `refuse` raises RewoundCheckpointError.
        source: The source of the states, as JSON, stored in the log; `STATE DESCRIBE` shows it.
        siblings: The writers of other jobs that the same run of the query publishes.
        rewrites_states: An epoch has the full content of each state that it changes; no old keys remain.
        starts_empty: Begin with an empty state, even if the log has state of the query.
        checkpoint: The location of the query's checkpoint, by which the next writer of the same query is recognized.
        sends_heartbeats: True: a thread writes a heartbeat once a second, until `close`, the end of the process, or
            another writer. False: the caller calls `send_heartbeat` once a second.
        takeover: Take the job over from a live writer of another query.
        announce: Called with (job, term, epoch) after each commit, with epoch -1 when the writer begins. It must return
            at once, as `announce` of `sparkis.Announcer` does.
        holds_back: If readers see another query's state, they continue to see it until `promote` is called.

    Raises:
        DescriptorError: The states are not compatible with those in the log.
        JobInUseError: A live writer of another query has the job.
        LogUnavailableError: The log cannot be written.

    Examples:
        >>> states = [sparkis.StateDescriptor("price", key="ticker", value="price")]
        >>> with sparkis.LogWriter(path, "market", states) as writer:
        ...     writer.publish([sparkis.Change("price", sparkis.Op.PUT, b"market:price:ACME", value=b"12.5")])
        ...     writer.publish([sparkis.Change("price", sparkis.Op.DELETE, b"market:price:ACME")])
        0
        1
    """

    def __init__(
        self,
        root: str | Path | Filesystem,
        job: str,
        states: Sequence[StateDescriptor],
        query_id: str | None = None,
        on_rewind: OnRewind = "refuse",
        source: Mapping[str, object] | None = None,
        siblings: Collection[str] = (),
        *,
        rewrites_states: bool = False,
        starts_empty: bool = False,
        checkpoint: str = "",
        sends_heartbeats: bool = True,
        takeover: bool = False,
        holds_back: bool = False,
        announce: Callable[[str, int, int], object] | None = None,
    ) -> None:
        check_name("job", job)
        check_states(job, states)
        self.log = ChangeLog(root).job(job)
        self._filesystem = self.log.filesystem
        self._on_rewind = on_rewind
        self._rewrites_states = rewrites_states
        self._holds_back = holds_back
        self.states = tuple(state.for_job(job) for state in states)
        self._reductions = {state.name: (state, reduction_of(state)) for state in self.states}
        self.query_id = check_name("generation", query_id or self._query_in_charge() or uuid.uuid4().hex)
        before = None if starts_empty else self.log.terms.last_of(self.query_id)
        if query_id is not None and source is None:
            check_not_renamed(self.log, before, self.query_id, siblings)
        self._declared = Description(job, self.query_id, self.states, source=source)
        if before is not None and before.description is not None:  # checked before another writer is fenced
            check_description(before.description, self._declared, rewrites_states=rewrites_states)
        candidate = new_candidate(self.query_id, checkpoint, self._filesystem.heartbeat_interval_s)
        self._claim = claim(self.log.terms, candidate, is_forced=takeover)
        self._heartbeats = HeartbeatWriter(self.log.terms, self._claim)
        self._begin(seal(self.log.terms, self._claim), starts_empty=starts_empty)
        if self.last is not None and self.last.origin > 0:
            self._warn_of_missing_keys(self.last.origin)
        self._announce = announce
        if announce is not None:
            announce(job, self.current.term, -1)
        if sends_heartbeats:
            self._heartbeats.start_thread()

    def _query_in_charge(self) -> str | None:
        current = self.log.current()
        return current.description.query_id if current is not None and current.description is not None else None

    def _begin(self, last: Term | None, *, starts_empty: bool) -> None:
        """Begin the claimed term: continue the query's generation, or begin another one."""
        term = self._claim.term
        base = None if starts_empty else self.log.terms.last_of(self.query_id)
        self._stay_final(last)
        is_held_back = self._is_to_be_held_back(base)
        if base is not None and last is not None and base.generation == last.generation:
            generation, reason = base.generation, TermReason.RESTART
        else:
            generation, reason = self._new_folder(term), TermReason.START
            if base is not None and rewind.copy(self.log, current_of(base), generation, None):
                reason = TermReason.RETURN
            elif base is not None:  # the base was swept meanwhile; some of its files may have been copied
                self._filesystem.remove(f"{self.job}/{generation}")
                self._new_folder(term)
                base = None
        description = next_description(self.log, base, self._declared, rewrites_states=self._rewrites_states)
        begun = Term(term, reason, self._claim.writer, generation, description, is_held_back=is_held_back)
        self._put_in_charge(replace(begun, feed_after=self.log.feed_end(last)))

    def _is_to_be_held_back(self, base: Term | None) -> bool:
        """Return whether to hold the generation back. That of a query that continues stays as it was before."""
        if base is not None:
            return not self.log.is_visible(base)
        visible = self.log.visible()
        return self._holds_back and visible is not None and self.log.end(visible) is not None

    def _stay_final(self, last: Term | None) -> None:
        """Mark the state as final if the last writer did, so that the state is not stale during the takeover."""
        if last is not None and self.log.terms.heartbeat(last.term).get("is_final"):
            self.mark_final()

    def _new_folder(self, term: int) -> str:
        generation = folder_name(self.query_id, term)
        for folder in ("changes", "epochs", "floor", "snapshots"):
            self._filesystem.make_folder(f"{self.job}/{generation}/{folder}")
        return generation

    def _put_in_charge(self, term: Term) -> None:
        begin(self.log.terms, term, self._claim)
        self._heartbeats.mark_begun()
        assert term.description is not None
        self._description = term.description
        self.current = current_of(term)
        self.last = self.log.end(self.current)
        self._feed_after = term.feed_after
        self.held_back = promotion.held_back(self.log)

    def promote(self, reason: str) -> bool:
        """Make the held-back generation visible to readers; False if it was visible before. Thread-safe."""
        is_new = promotion.make_visible(self.log, self.current, reason)
        self.held_back = None
        return is_new

    def poll_promotion(self) -> bool:
        """Return True, once, after another process has made the held-back generation visible. Thread-safe."""
        if self.held_back is not None and promotion.held_back(self.log) is None:
            self.held_back = None
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Mark the job as ended: readers learn that this writer publishes no more epochs."""
        self._heartbeats.close()

    @property
    def job(self) -> str:
        """The job's name."""
        return self.log.job

    @property
    def root(self) -> str:
        """The root of the change log."""
        return self._filesystem.root

    @property
    def generation(self) -> str:
        """The name of the current generation's folder; a rewind changes it."""
        return self.current.generation

    @property
    def folder(self) -> str:
        """The folder for change files of the next epoch, relative to the log's root (see `start`)."""
        return self.log.changes_folder(self.generation)

    def change_files(self, epoch: int) -> ChangeFileWriter:
        """Return a writer of change files for an epoch. It can be sent to any machine with access to the log."""
        return ChangeFileWriter(self._filesystem, self.folder, epoch)

    def publish(
        self,
        changes: Iterable[Change],
        epoch: int | None = None,
        *,
        replaces: Iterable[str] = (),
        clock_ms: int | None = None,
    ) -> int:
        """Write changes, commit them as one epoch, and return its number.

        There may be any number of changes: they are written in batches. If an error is raised, there is no epoch.

        Args:
            changes: The changes; those of one key take effect in this order.
            epoch: The epoch's number. Default: one more than the last.
            replaces: The names of states whose full content these changes are.
            clock_ms: The epoch's time in milliseconds since 1970 UTC, by which keys expire. Default: now.

        Raises:
            DescriptorError: A change names a state that the job does not have.
            ChangeError: A key, field or value is too long, or of the wrong kind for its state.
            FencedWriterError: Another writer has taken the job over.
        """
        number = epoch if epoch is not None else self.last.epoch + 1 if self.last else 0
        names = [state.name for state in self.states]
        replaces = tuple(replaces)
        if unknown := set(replaces) - set(names):
            raise DescriptorError(f"job {self.job!r} has no state {sorted(unknown)}; it has {names}")
        rows = digest = 0

        def runs() -> Iterator[pa.RecordBatch]:
            nonlocal rows, digest
            for run in runs_of(map(self._checked, changes), names):
                rows += run.num_rows
                digest += _digest(run)
                yield run

        self.start(number)
        try:
            file, inline = self.change_files(number).write(runs())
        except KeyError as error:
            raise DescriptorError(f"job {self.job!r} has no state {error}; it has {names}") from None
        self.commit(
            number,
            EpochContent(
                files=[file] if file else [],
                inline=[inline] if inline else [],
                rows=rows,
                digest=digest & 0xFFFF_FFFF_FFFF_FFFF,
                replaces=replaces,
            ),
            clock_ms=self.clock_ms() if clock_ms is None else clock_ms,
        )
        return number

    def _checked(self, change: Change) -> Change:
        state, reduction = self._reductions[change.state]
        if state.member is not None:
            packed_sorted.check_change(change, state.kind)
        elif state.by is not None:
            keep_by_order.check_change(change, state)
        else:
            check_change(change, state, reduction)
        return change

    def clock_ms(self) -> int:
        """Return the clock reading of the next epoch: never below the last one's, so that expired keys stay expired."""
        return max(now_ms(), self.last.clock_ms if self.last else 0)

    def start(self, number: int) -> None:
        """Prepare for an epoch. To be called before its change files are written, because it may change `folder`.

        A number below the last epoch's means that the query's checkpoint was set back. With `on_rewind="truncate"` a
        new generation begins with the epochs before that number; otherwise RewoundCheckpointError is raised.
        """
        if self.last is not None and number < self.last.epoch:
            self.check_in_charge()
            self._rewind(number)

    def commit(
        self,
        number: int,
        content: EpochContent = NO_CHANGES,
        *,
        clock_ms: int,
        offsets: tuple[str, ...] = (),
    ) -> bool:
        """Make an epoch visible; False if it was committed before.

        Called on the driver once per micro-batch, after all tasks succeeded. After a restart Spark calls it again for
        the same batch: the committed epoch stays unchanged, and a warning is logged if the replay differs.
        FencedWriterError if a newer writer has the job; then the epoch may or may not be committed.
        """
        self.check_in_charge()
        self.start(number)
        if self.last is not None and number == self.last.epoch:
            self._compare_replay(self.last, content.rows, content.digest)
            return False
        previous = self.last.ref if self.last else None
        if previous is not None and number != previous.epoch + 1:
            raise EpochHoleError(
                f"job {self.job!r}: epoch {number} does not follow {previous.epoch}, the last one in the log "
                f"{self._filesystem.root}; every micro-batch must be published. To start again from an empty state, "
                f"remove the job's folder from the log or give the query another log"
            )
        epoch = Epoch(
            epoch=number,
            term=self.current.term,
            previous=previous,
            clock_ms=max(clock_ms, self.last.clock_ms) if self.last else clock_ms,
            rows=content.rows,
            digest=content.digest,
            replaces=(*content.replaces, *self._states_to_empty()),
            description=self._description.version,
            origin=self._origin(number, content.replaces),
            files=tuple(content.files),
            inline=tuple(content.inline),
            format=self._description.format,
            offsets=offsets,
            skipped_rows=content.skipped_rows + (self.last.skipped_rows if self.last else 0),
            record_ages=content.record_ages,
        )
        self._check_files(epoch)
        epoch = self._move_inline(replace(epoch, feed=self._feed_mark(epoch)))
        before_bytes = self.last.log_bytes if self.last else 0
        epoch = replace(epoch, log_bytes=before_bytes + epoch.change_bytes)
        self._create(epoch)
        if self.last is None and epoch.origin > 0:
            self._warn_of_missing_keys(epoch.origin)
        self.last = replace(epoch, inline=())
        if self._announce is not None:
            self._announce(self.job, epoch.term, epoch.epoch)
        return True

    def send_heartbeat(
        self, *, is_running: bool = True, is_final: bool = False, sources: Mapping[str, Any] | None = None
    ) -> bool:
        """Write a heartbeat; if a newer writer has claimed the job, write none and return False. Thread-safe.

        With `sends_heartbeats=False` to be called once a second while the job is live. Readers poll the heartbeat's
        counter. In storage where each request costs money, the counter changes less often, and most calls do nothing.

        Args:
            sources: The newest offsets of the query's sources, if the caller knows them (see `source_lag`).
        """
        return self._heartbeats.send(is_running=is_running, is_final=is_final, sources=sources)

    def mark_final(self) -> None:
        """Mark the state as final: it is not stale, although no more epochs are written."""
        self.send_heartbeat(is_running=False, is_final=True)

    def _origin(self, number: int, replaces: tuple[str, ...]) -> int:
        """Return the origin of an epoch (see `epochs`); 0 if the epoch has the full content of all states."""
        user_states = {state.name for state in self.states if not state.name.startswith("_")}
        if user_states <= set(replaces):
            return 0
        return number if self.last is None else self.last.origin

    def _warn_of_missing_keys(self, origin: int) -> None:
        logger.warning(
            "job %s: the log %s begins at epoch %d of its query, so keys that have not changed since are missing in "
            "it: the query's checkpoint is older than the log. Give the query the log that it had, or start it with a "
            "new checkpoint to have all keys",
            self.job,
            self._filesystem.root,
            origin,
        )

    def _states_to_empty(self) -> tuple[str, ...]:
        """Return the dropped states if the next epoch is the first without them: other states may make their keys."""
        if self.last is None or self.last.description < self._description.version:
            return tuple(state.name for state in self._description.dropped)
        return ()

    def check_in_charge(self) -> None:
        """Raise FencedWriterError if another writer has the job, LogUnavailableError if the job's folder is missing."""
        check_in_charge(self.log.terms, self._claim)
        mine = self.log.terms.claim(self._claim.term)
        if mine is None or mine.writer != self._claim.writer:
            raise LogUnavailableError(
                f"job {self.job!r} is missing in the log {self._filesystem.root}: was it moved, or its storage "
                f"removed? Put it back and start the query again; or start the query with a new checkpoint"
            )

    def _feed_mark(self, epoch: Epoch) -> FeedMark:
        """Return the place of an epoch in the change feed; its inline changes must not have been moved yet."""
        before, reset = None if self.last is None else self.last.feed, self._reset_reason()
        entries = entries_of(epoch, reset)
        total = entries if before is None else before.total + entries
        return FeedMark.of(epoch.clock_ms, self._feed_end(), entries, total, reset)

    def _feed_end(self) -> FeedId:
        """Return the last entry of the change feed, in any generation."""
        before = None if self.last is None else self.last.feed
        return self._feed_after if before is None else max(self._feed_after, before.end)

    def _reset_reason(self) -> str | None:
        """Return why the next epoch begins a generation; None if it begins none, or the job's first."""
        begun = first_term(self.generation)
        if begun is None or (self.last is not None and self.last.term >= begun):
            return None
        term = None if self.log.terms.last_before(begun) is None else self.log.terms.read(begun)
        return None if term is None else term.reason

    def _compare_replay(self, first: Epoch, rows: int, digest: int) -> None:
        if (first.rows, first.digest) != (rows, digest):
            logger.warning(
                "job %s: the replay of epoch %d made other changes (%d rows instead of %d); the first ones are kept. "
                "The query is not deterministic: look for current_timestamp, rand, or unordered duplicates",
                self.job,
                first.epoch,
                rows,
                first.rows,
            )

    def _rewind(self, number: int) -> None:
        """Begin a generation with the epochs before `number`; RewoundCheckpointError without `on_rewind="truncate"`."""
        last = self.last.epoch if self.last else -1
        if self._on_rewind != "truncate":
            raise RewoundCheckpointError(
                f"job {self.job!r}: epoch {number} was published again, but the log {self._filesystem.root} already "
                f"ends at epoch {last}: the query's checkpoint was set back. Restore the newer checkpoint, or pass "
                f"on_rewind='truncate' to drop the epochs from {number} on and continue from there"
            )
        first = self.log.first(self.current)
        is_at_start = first is not None and first.previous is None and number <= first.epoch
        origin = self.last.origin if self.last else 0
        has_before = number > origin and not is_at_start
        if has_before and not rewind.reaches(self.log, self.current, number):
            raise self._not_reached(number)
        logger.warning("job %s: the checkpoint was set back; epochs %d to %d are dropped", self.job, number, last)
        feed_after = self._feed_end()
        self._claim = succeed(self.log.terms, self._claim)
        self._heartbeats.use_claim(self._claim)
        generation = self._new_folder(self._claim.term)
        if has_before and not rewind.copy(self.log, self.current, generation, number):
            self.check_in_charge()
            raise self._not_reached(number)
        seal(self.log.terms, self._claim)
        term = Term(self._claim.term, TermReason.REWIND, self._claim.writer, generation, self._description)
        self._put_in_charge(replace(term, is_held_back=self.held_back is not None, feed_after=feed_after))

    def _not_reached(self, number: int) -> RewoundCheckpointError:
        return RewoundCheckpointError(
            f"job {self.job!r}: the checkpoint was set back to epoch {number}, and the log {self._filesystem.root} no "
            f"longer has the epoch before it; restore a newer checkpoint, or start the query with a new one"
        )

    def _check_files(self, epoch: Epoch) -> None:
        """Refuse an epoch that lists missing or incomplete files: it could never be read."""
        for file in epoch.files:
            path = f"{self.folder}/{file.name}"
            size = self._filesystem.size(path)
            if size != file.size:
                raise LogUnavailableError(
                    f"job {self.job!r}: epoch {epoch.epoch} is not committed, because its change file {path} in the "
                    f"log {self._filesystem.root} {'is missing' if size is None else f'has {size} bytes'}, and "
                    f"{file.size} were written; start the query again"
                )

    def _move_inline(self, epoch: Epoch) -> Epoch:
        """Move the inline changes of all tasks to one change file, if they are too large for the epoch's file."""
        if sum(map(len, epoch.inline)) <= EPOCH_INLINE_BYTES_MAX:
            return epoch
        runs = pa.Table.from_batches((run for stream in epoch.inline for run in runs_in(stream)), schema())
        # A file has one dictionary of states, and each task's stream has its own.
        file, inline = self.change_files(epoch.epoch).write(runs.unify_dictionaries().to_batches())
        return replace(epoch, files=(*epoch.files, file) if file else epoch.files, inline=(inline,) if inline else ())

    def _create(self, epoch: Epoch) -> None:
        path = f"{self.job}/{self.generation}/epochs/{epoch.epoch}.json"
        is_new = self._filesystem.create(path, epoch.to_bytes())
        # Checked after the epoch is created: a newer writer that claims the job later finds the epoch.
        self.check_in_charge()
        if not is_new:
            raise LogUnavailableError(
                f"job {self.job!r}: the log {self._filesystem.root} got another epoch {epoch.epoch} during the commit; "
                f"start the query again"
            )


def _digest(run: pa.RecordBatch) -> int:
    """Return a sum over a run's rows, whatever their order. Expiry is left out, because it depends on the clock."""
    columns = [run.column(name).to_pylist() for name in ("state", "op", "key", "field", "value")]
    return sum(crc32(repr(row).encode()) for row in zip(*columns, strict=True))
