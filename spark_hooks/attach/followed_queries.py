"""The attachments of `sparkis attach`: to single checkpoints, and to all queries below folders. Imports no Spark.

A folder is looked through again and again: a new query is attached, a full refresh of a flow takes the place of the
flow's checkpoint before, and the attachment of a removed checkpoint ends. What goes wrong with one query is logged, and
does not end the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from spark_hooks.attach.queries import Source, check_free, check_jobs
from state_backend.attach.attachment import Attachment
from state_backend.checkpoint.discovery import FoundQuery, has_commit
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.attach")

# The times between two looks through a folder. In an object store, a look costs a request for each folder (guess).
LOOK_INTERVAL_LOCAL_S = 2.0
LOOK_INTERVAL_REMOTE_S = 60.0
# When a query is tried again that could not be attached (guess).
RETRY_INTERVAL_S = 30.0

# Makes the attachment of a checkpoint and a job's name.
Attach = Callable[[str, str], Attachment]
# A source's number, and the query's path in it.
Key = tuple[int, str]


class Attached(NamedTuple):
    """A query's attachment, and the location of the checkpoint that it follows."""

    checkpoint: str
    attachment: Attachment


@dataclass
class AttachFailure:
    """Why a query could not be attached."""

    checkpoint: str
    error: str
    retried_at_s: float


class FollowedQueries:
    """The attachments to all queries of a command. A context manager, which stops them at its end; for one thread."""

    def __init__(self, sources: Sequence[Source], attach: Attach) -> None:
        self._sources = sources
        self._attach = attach
        self._attached: dict[Key, Attached] = {}
        self._failures: dict[Key, AttachFailure] = {}
        self._waiting: set[Key] = set()  # for their first committed micro-batch
        self._next_look_s = dict.fromkeys((source.number for source in sources), 0.0)
        self._look_errors: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as stack:
            for each in self._attached.values():
                stack.callback(each.attachment.stop)

    def start(self) -> list[Attachment]:
        """Attach to all queries that have a committed micro-batch, and return the attachments.

        SparkisError if one of the single checkpoints cannot be attached, two queries would be one job, or there is no
        query that can be attached, and none that waits for its first micro-batch.
        """
        check_jobs(self._sources)
        for source in self._sources:
            if source.is_single:
                (query,) = source.queries()
                checkpoint = source.checkpoint_of(query)
                attachment = self._attach(checkpoint, source.job_of(query))
                self._attached[source.number, query.path] = Attached(checkpoint, attachment)
        singles = [each.attachment for each in self._attached.values()]
        attachments = singles + list(self.look())
        if not attachments and not self._waiting and self._failures:
            raise SparkisError(next(iter(self._failures.values())).error)
        if self._waiting:
            logger.info("%d queries have no committed micro-batch yet", len(self._waiting))
        return attachments

    def look(self) -> Iterator[Attachment]:
        """Look through the folders, if it is time to; yield the new attachments."""
        for source in self._sources:
            if source.is_single or time.monotonic() < self._next_look_s[source.number]:
                continue
            try:
                found = source.queries()
            except SparkisError as error:
                self._warn(source, str(error))
            else:
                self._look_errors.pop(source.number, None)
                self._end_removed(source, found)
                yield from self._attach_all(source, found)
            is_remote = "://" in source.folder.location
            interval_s = LOOK_INTERVAL_REMOTE_S if is_remote else LOOK_INTERVAL_LOCAL_S
            self._next_look_s[source.number] = time.monotonic() + interval_s

    def check(self) -> None:
        """Raise SparkisError if all attachments have ended with errors, and no query waits for its first batch."""
        errors = [each.attachment.error for each in self._attached.values()]
        if errors and all(errors) and not self._waiting:
            raise SparkisError(str(errors[0]))

    def _warn(self, source: Source, error: str) -> None:
        if self._look_errors.get(source.number) != error:
            logger.warning("%s: cannot look for queries: %s", source.location, error)
        self._look_errors[source.number] = error

    def _end_removed(self, source: Source, found: Sequence[FoundQuery]) -> None:
        paths = {query.path for query in found}
        for key in [key for key in self._attached if key[0] == source.number and key[1] not in paths]:
            attached = self._attached.pop(key)
            attached.attachment.stop()
            logger.warning(
                "job %s: %s was removed; the state in the log stays readable",
                attached.attachment.job,
                attached.checkpoint,
            )

    def _attach_all(self, source: Source, found: Sequence[FoundQuery]) -> Iterator[Attachment]:
        self._waiting = {key for key in self._waiting if key[0] != source.number}
        for query in found:
            key, checkpoint = (source.number, query.path), source.checkpoint_of(query)
            attached, failure = self._attached.get(key), self._failures.get(key)
            if attached is not None and attached.checkpoint == checkpoint:
                continue
            if failure is not None and failure.checkpoint == checkpoint and time.monotonic() < failure.retried_at_s:
                continue
            try:
                if not has_commit(source.folder, query):
                    self._waiting.add(key)
                    continue
                yield self._attach_one(key, checkpoint, source.job_of(query))
                self._failures.pop(key, None)
            except SparkisError as error:
                self._fail(key, checkpoint, str(error))

    def _attach_one(self, key: Key, checkpoint: str, job: str) -> Attachment:
        before = self._attached.pop(key, None)
        if before is not None:
            before.attachment.stop()
            logger.warning("job %s: a full refresh has begun %s; it is followed from now on", job, checkpoint)
        check_free(job, checkpoint, {each.attachment.job: each.checkpoint for each in self._attached.values()})
        attachment = self._attach(checkpoint, job)
        self._attached[key] = Attached(checkpoint, attachment)
        return attachment

    def _fail(self, key: Key, checkpoint: str, error: str) -> None:
        before = self._failures.get(key)
        if before is None or (before.checkpoint, before.error) != (checkpoint, error):
            logger.warning("%s is left out: %s", checkpoint, error)
        self._failures[key] = AttachFailure(checkpoint, error, time.monotonic() + RETRY_INTERVAL_S)
