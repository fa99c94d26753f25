"""Visibility: the keys, states and jobs that a user sees in SCAN, KEYS, RANDOMKEY, DBSIZE, STATE, INFO and the like.

In Redis every user sees the names of all keys, and their number. Here tenants with jobs of their own may share a
server, so a user sees only keys that it may read, and the states and jobs of such keys.

A state's keys begin with the literal prefix of its key format. So a rule such as `~job:*` shows, without reading keys,
whether a user may read all of a state's keys or none. If the user may read some, keys are checked one by one, and only
DBSIZE counts them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from random import randrange

from resp_server.session.account import Account
from state_backend.model.descriptor import KeyFormat, Kind, StateDescriptor
from state_backend.model.slots import HASH_BITS, SLOTS
from state_backend.store.keyspace import Job, KeyspaceView
from state_backend.store.slot_view import STEP_KEYS, SlotView, counts_of
from state_backend.store.store import AppliedEpoch, Snapshot
from state_backend.store.uncommitted import FreshFacts

# Random keys that are tried before a full scan: enough for a user that may read an eighth of all keys.
RANDOM_TRIES = 32

_LITERAL = re.compile(rb"(?:[^*?\[\\]|\\.)*", re.DOTALL)
_ESCAPED = re.compile(rb"\\(.)", re.DOTALL)


class Coverage(Enum):
    """The share of a state's keys that a user may read."""

    NOTHING = 0
    SOME = 1
    ALL = 2


def coverage_of(patterns: Sequence[bytes], key_format: KeyFormat) -> Coverage:
    """Return the share of a key format's keys that match some globs; SOME where prefixes do not decide."""
    literal = key_format.prefix
    found = Coverage.NOTHING
    for pattern in patterns:
        prefix = _LITERAL.match(pattern)
        assert prefix is not None  # the pattern also matches an empty prefix
        literal_prefix = _ESCAPED.sub(rb"\1", prefix[0])
        wildcards = pattern[prefix.end() :]
        if wildcards and not wildcards.strip(b"*") and literal.startswith(literal_prefix):
            return Coverage.ALL
        may_match = literal_prefix == literal if not key_format.columns else literal_prefix.startswith(literal)
        if may_match or (wildcards and literal.startswith(literal_prefix)):
            found = Coverage.SOME
    return found


def can_see_job(user: Account, job: str) -> bool:
    """Return whether a user may see a job's epochs, where only the job's name is known.

    A job whose keys do not begin with its name is visible only to users that may read all keys.
    """
    if user.reads_all_keys:
        return True
    return coverage_of(user.read_patterns, KeyFormat((f"{job}:", ""), ("key",))) is not Coverage.NOTHING


@dataclass(frozen=True)
class VisibleJob:
    """A job as a user sees it, with the states of which the user may read keys.

    Args:
        is_fully_visible: The user may read all keys of the job.
    """

    job: Job
    snapshot: Snapshot
    states: Sequence[StateDescriptor]
    coverage: Mapping[str, Coverage]
    is_fully_visible: bool

    @cached_property
    def file_bytes(self) -> tuple[int, int]:
        """The bytes of used and of free pages of the job's store; none for a user who may not read all of it."""
        return self.job.store.used_bytes() if self.is_fully_visible else (0, 0)

    @cached_property
    def fresh(self) -> FreshFacts:
        """What is known of the values that are not committed yet."""
        return FreshFacts() if self.job.fresh is None else self.job.fresh.facts(self.applied.epoch)

    @property
    def applied(self) -> AppliedEpoch:
        """The store's applied epoch and key counts."""
        return self.snapshot.applied

    def keys_of(self, state: str) -> int | None:
        """Return the number of a state's keys; None if the user may read only some of them."""
        return self.applied.keys.get(state, 0) if self._can_count(state) else None

    def bytes_of(self, state: str) -> int | None:
        """Return a state's bytes in the newest snapshot; None without one, or if the user may read only some keys."""
        known = self.job.state_bytes
        return known.get(state, 0) if known is not None and self._can_count(state) else None

    def _can_count(self, state: str) -> bool:
        return self.is_fully_visible or self.coverage[state] is Coverage.ALL

    @property
    def countable_keys(self) -> int:
        """The number of keys in fully visible states."""
        if self.is_fully_visible:
            return self.applied.key_count
        return sum(self.keys_of(state.name) or 0 for state in self.states)

    @property
    def keys(self) -> int | None:
        """The number of keys that the user may read; None if a state is partly visible."""
        return self.countable_keys if self.is_fully_visible or Coverage.SOME not in self.coverage.values() else None

    @property
    def error(self) -> str:
        """The job's error. It may name other keys, so a restricted user sees only that there is one."""
        return self.job.error if self.is_fully_visible or not self.job.error else "see the server's log"


class Visibility:
    """One user's visible part of a keyspace view."""

    def __init__(self, user: Account, view: KeyspaceView) -> None:
        self._user = user
        self.sees_all = user.reads_all_keys
        self.view = view
        self._coverage: dict[str, Mapping[str, Coverage]] = {}
        if not self.sees_all:
            for job in view.jobs():
                coverage = {
                    state.name: coverage_of(user.read_patterns, state.format_for(job.name)) for state in job.states
                }
                if set(coverage.values()) - {Coverage.NOTHING}:
                    self._coverage[job.name] = coverage
            self.view = view.limited_to(self._coverage)

    def jobs(self) -> Iterator[VisibleJob]:
        """Iterate over the jobs of which the user may read keys."""
        for job, snapshot in self.view.snapshots():
            coverage = self._coverage.get(job.name, {})
            states = [state for state in job.states if self.sees_all or coverage[state.name] is not Coverage.NOTHING]
            is_fully_visible = self.sees_all or set(coverage.values()) == {Coverage.ALL}
            yield VisibleJob(job, snapshot, states, coverage, is_fully_visible)

    def sees(self, job: str) -> bool:
        """Return whether a job is visible."""
        return self.sees_all or job in self._coverage

    def scan(self, cursor: int, count: int, kinds: Collection[Kind] | None = None) -> tuple[int, list[bytes]]:
        """Scan the visible keys, as `KeyspaceView.scan` does."""
        next_cursor, keys = self.view.scan(cursor, count, kinds)
        return next_cursor, keys if self.sees_all else list(filter(self._user.can_read, keys))

    def key_count(self) -> int | None:
        """Return the number of keys, with expired ones that are not removed yet; None if they have to be counted."""
        if isinstance(self.view, SlotView) and not self.view.is_counted:
            return None
        self.view.check_all_listed()
        counts = [job.keys for job in self.jobs()]
        return None if None in counts else sum(count for count in counts if count is not None)

    def key_counts(self) -> Iterator[int]:
        """Count the visible keys in steps; their number is the sum of the items."""
        return counts_of(self.scan)

    def random_keys(self) -> Iterator[bytes | None]:
        """Search for a random visible key in short steps: the first item that is not None."""
        if self.sees_all:
            yield from self.view.random_keys()
            return
        for _ in range(RANDOM_TRIES):
            found = None
            for found in self.view.random_keys():
                if found is not None:
                    break
                yield None
            if found is None:
                return  # the keyspace is empty
            if self._user.can_read(found):
                yield found
                return
        start = randrange(SLOTS << HASH_BITS)
        for first, last in ((start, SLOTS << HASH_BITS), (0, start)):
            cursor = first
            while cursor < last:
                cursor, keys = self.scan(cursor, STEP_KEYS)
                yield keys[0] if keys else None
                if not cursor:
                    break
