"""Terms: the writer and the generation in charge of a job, in files that are created once and never changed.

    <job>/terms/<term>.claim   a process claims to be the one writer from now on: its query, host, process and time
    <job>/terms/<term>.json    the outcome of the claim: the term has begun, with a generation and its states;
                               or it is void and never begins; or it drops the job
    <job>/terms/<term>.swept   the generation that the term began was replaced, and is being removed
    <job>/heartbeats/<term>.json    the heartbeat of the term's writer; the only file that is replaced; not durable

For readers, the newest term that has begun is in charge. For writers, the newest claim is: it fences all older writers.
Terms are claimed one after another, and when a term begins, all older terms have begun or are void. So a reader of the
newest term finds the next one by reading one file (the proof is in `docs/design/0004-sweeping.md`).

This module reads; `fencing` claims, voids and begins.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.epochs import FORMAT, FORMAT_WITH_FOLDS, FORMAT_WITH_ORDERS, FORMAT_WITH_SETS, NEWEST_FORMAT
from state_backend.log.feed_mark import NO_ENTRY, FeedId
from state_backend.log.filesystems import Filesystem
from state_backend.model.descriptor import Reduce, StateDescriptor
from state_backend.model.errors import LogCorruptError
from state_backend.model.formats import WRITER, check_format
from state_backend.model.generations import first_term

logger = logging.getLogger("sparkis.log")


@dataclass(frozen=True)
class Description:
    """The description of a generation in a term. `version` increases when the states change.

    Args:
        dropped: States of earlier epochs that the query no longer has; the next epoch empties them.
        source: Where an attachment reads the states (see `spark_hooks.attach`); None if the query itself publishes.
        incomplete: States that began in the middle of the query, and lack keys that have not changed since.
        renamed_from: The job's name before `sparkis rename`.
    """

    job: str
    query_id: str
    states: tuple[StateDescriptor, ...]
    version: int = 1
    dropped: tuple[StateDescriptor, ...] = ()
    source: Mapping[str, Any] | None = None
    incomplete: tuple[str, ...] = ()
    renamed_from: str | None = None

    @property
    def all_states(self) -> tuple[StateDescriptor, ...]:
        """All states that an epoch of this generation may name."""
        return self.states + self.dropped

    @property
    def format(self) -> int:
        """The lowest format of epoch files that can have the changes of these states (see `epochs`)."""
        if any(state.by is not None for state in self.all_states):
            return FORMAT_WITH_ORDERS
        if any(state.member is not None for state in self.all_states):
            return FORMAT_WITH_SETS
        return FORMAT if all(state.reduce in (None, Reduce.LAST) for state in self.all_states) else FORMAT_WITH_FOLDS

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object for the term's file."""
        content: dict[str, Any] = {
            "job": self.job,
            "query_id": self.query_id,
            "version": self.version,
            "states": [state.to_json() for state in self.states],
            "dropped": [state.to_json() for state in self.dropped],
        }
        if self.source is not None:
            content["source"] = dict(self.source)
        if self.incomplete:
            content["incomplete"] = list(self.incomplete)
        if self.renamed_from is not None:
            content["renamed_from"] = self.renamed_from
        return content

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Description:
        """Read a JSON object of `to_json`."""
        return cls(
            stored["job"],
            stored["query_id"],
            tuple(map(StateDescriptor.from_json, stored["states"])),
            stored["version"],
            tuple(map(StateDescriptor.from_json, stored["dropped"])),
            stored.get("source"),
            tuple(stored.get("incomplete", ())),
            stored.get("renamed_from"),
        )


@dataclass(frozen=True)
class Claim:
    """A writer's claim to a job, from a term on.

    Args:
        checkpoint: The location of the query's checkpoint; empty if the writer does not know it.
        heartbeat_interval_s: The interval of the writer's heartbeats; 0 if it sends none.
    """

    term: int
    writer: str
    query_id: str
    checkpoint: str
    host: str
    pid: int
    since_ms: int
    heartbeat_interval_s: float = 0.0

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return with_checksum({"format": FORMAT, **WRITER} | asdict(self))


class TermReason(StrEnum):
    """Why a term began, or that it never does, as its file says it."""

    START = "start"  # a new query
    RESTART = "restart"  # the same query
    RETURN = "return"  # an earlier query
    REWIND = "rewind"  # to an earlier epoch
    RENAME = "rename"  # of the job
    DROP = "drop"  # the job
    VOID = "void"


@dataclass(frozen=True)
class Term:
    """The outcome of a claim.

    Args:
        reason: A `TermReason`, or the word of a newer version.
        generation: The name of its folder; empty if the term is void or drops the job.
        renamed_to: The new name of a job that was dropped by a rename.
        is_held_back: Readers continue to see the generation before, until this one is made visible (see `promotion`).
        feed_after: The last entry of the change feed before this term, in any generation.
    """

    term: int
    reason: str
    writer: str
    generation: str = ""
    description: Description | None = None
    renamed_to: str | None = None
    is_held_back: bool = False
    feed_after: FeedId = NO_ENTRY

    @property
    def is_void(self) -> bool:
        """Return whether the term never begins."""
        return self.reason == TermReason.VOID

    @property
    def is_dropped(self) -> bool:
        """Return whether the term drops the job."""
        return self.reason == TermReason.DROP

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        number = FORMAT if self.description is None else self.description.format
        content: dict[str, Any] = {"format": number, **WRITER, "term": self.term, "reason": self.reason}
        content["writer"] = self.writer
        if self.description is not None:
            content["generation"] = self.generation
            content |= self.description.to_json()
        if self.is_held_back:
            content["is_held_back"] = True
        if self.feed_after != NO_ENTRY:
            content["feed_after"] = list(self.feed_after)
        if self.renamed_to is not None:
            content["renamed_to"] = self.renamed_to
        return with_checksum(content, indent=1)


class Terms:
    """Reads the terms of one job. Caches the newest one; thread-safe."""

    def __init__(self, filesystem: Filesystem, job: str) -> None:
        self.filesystem = filesystem
        self.job = job
        self._cached: tuple[int, Term | None] = (0, None)  # the last term read, and the newest begun one
        self._damaged_heartbeat = 0  # the term whose heartbeat was reported as damaged

    def claim_path(self, term: int) -> str:
        """Return the path of a claim, relative to the log's root."""
        return f"{self.job}/terms/{term}.claim"

    def path(self, term: int) -> str:
        """Return the path of the outcome of a claim, relative to the log's root."""
        return f"{self.job}/terms/{term}.json"

    def heartbeat_path(self, term: int) -> str:
        """Return the path of the heartbeat of a term's writer, relative to the log's root."""
        return f"{self.job}/heartbeats/{term}.json"

    def newest(self) -> Term | None:
        """Return the newest term that has begun, or that dropped the job; None if there is none.

        Reads one file if there is no new term since the last call.
        """
        last, begun = self._cached
        if not last:
            last, begun = self._search()
        while (term := self.read(last + 1)) is not None:
            last, begun = term.term, begun if term.is_void else term
        self._cached = last, begun
        return begun

    def _search(self) -> tuple[int, Term | None]:
        if self.filesystem.read(self.path(1)) is None:  # no job: the listing is saved
            return 0, None
        last = max(self.numbers(".json"), default=0)
        return last, self.last_before(last + 1)

    def last_before(self, end: int) -> Term | None:
        """Return the newest term below `end` that has begun, or None."""
        return next((term for term in self.down_from(end - 1) if not term.is_void), None)

    def down_from(self, number: int) -> Iterator[Term]:
        """Iterate over terms that have begun or are void, the newest first."""
        for each in range(number, 0, -1):
            if (term := self.read(each)) is not None:
                yield term

    def last_of(self, query_id: str) -> Term | None:
        """Return the newest term that a query has begun; None if there is none since the job was dropped."""
        newest = self.newest()
        if newest is None or newest.is_dropped:
            return None
        if newest.description is not None and newest.description.query_id == query_id:
            return newest
        folders = [name for name in self.filesystem.names(self.job) if name.startswith(f"{query_id}.")]
        if not any(first_term(name) for name in folders):  # a new query reads no old terms
            return None
        for term in self.down_from(newest.term):
            if term.is_dropped:
                return None
            if term.description is not None and term.description.query_id == query_id:
                return term
        return None

    def drop_cache_if_removed(self) -> None:
        """Check that the newest term still exists; if not, drop the cache, so that `newest` reads all terms again."""
        begun = self._cached[1]
        if begun is not None and self.read(begun.term) != begun:
            self._cached = (0, None)

    def numbers(self, suffix: str) -> list[int]:
        """Return the numbers of the terms that have a file with a suffix (`.claim` or `.json`), unordered."""
        names = self.filesystem.names(f"{self.job}/terms")
        stems = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
        return [int(stem) for stem in stems if stem.isdecimal()]

    def read(self, number: int) -> Term | None:
        """Return the outcome of a claim; None if there is none yet."""
        path = self.path(number)
        stored = read_json(self.filesystem, path)
        if stored is None:
            return None
        check_format(stored, NEWEST_FORMAT, f"{self.filesystem.root}/{path}")
        with _damage_reported(self.filesystem, path):
            _check_number(stored["term"], number)
            has_states = "generation" in stored
            return Term(
                stored["term"],
                stored["reason"],
                stored["writer"],
                stored["generation"] if has_states else "",
                Description.from_json(stored) if has_states else None,
                stored.get("renamed_to"),
                stored.get("is_held_back", False),
                FeedId(*stored.get("feed_after", NO_ENTRY)),
            )

    def claim(self, number: int) -> Claim | None:
        """Return the claim of a term; None if there is none."""
        path = self.claim_path(number)
        stored = read_json(self.filesystem, path)
        if stored is None:
            return None
        check_format(stored, NEWEST_FORMAT, f"{self.filesystem.root}/{path}")
        known = {field.name for field in fields(Claim)}
        with _damage_reported(self.filesystem, path):
            _check_number(stored["term"], number)
            return Claim(**({name: value for name, value in stored.items() if name in known} | {"term": number}))

    def last_claim(self) -> Claim | None:
        """Return the newest claim; None if there is none. The call lists the folder of terms."""
        number = max(self.numbers(".claim"), default=0)
        return self.claim(number) if number else None

    def swept_path(self, generation: str) -> str:
        """Return the path of the file that marks a generation as being removed, relative to the log's root."""
        return f"{self.job}/terms/{first_term(generation)}.swept"

    def is_swept(self, generation: str) -> bool:
        """Return whether a generation's removal has begun."""
        return self.filesystem.size(self.swept_path(generation)) is not None

    def heartbeat(self, number: int) -> dict[str, Any]:
        """Return the last heartbeat of a term's writer (see `LogWriter.send_heartbeat`); empty if there is none.

        A damaged one counts as none, so readers see the job as stale: a crash of the machine may truncate the file.
        """
        try:
            return read_json(self.filesystem, self.heartbeat_path(number)) or {}
        except LogCorruptError as damage:
            if number != self._damaged_heartbeat:
                logger.warning("job %s: %s; until the next heartbeat its writer counts as stopped", self.job, damage)
            self._damaged_heartbeat = number
            return {}


def read_json(filesystem: Filesystem, path: str) -> dict[str, Any] | None:
    """Return a file's JSON object without its checksum, or None if there is no such file; LogCorruptError."""
    stored = filesystem.read(path)
    if stored is None:
        return None
    with _damage_reported(filesystem, path):
        return checked_object(stored)


def _check_number(stored: int, number: int) -> None:
    """Raise ValueError if the number in a file is not the one in its name."""
    if stored != number:
        raise ValueError(f"is the file of number {stored}")


@contextmanager
def _damage_reported(filesystem: Filesystem, path: str) -> Iterator[None]:
    """Raise LogCorruptError, with the file's path, if the block fails because of damaged content."""
    try:
        yield
    except ValueError as damage:
        raise LogCorruptError(f"{filesystem.root}/{path} {damage}; restore it from a copy of the log") from None
    except (KeyError, TypeError):
        raise LogCorruptError(
            f"{filesystem.root}/{path} is not what a writer wrote; restore it from a copy of the log"
        ) from None
