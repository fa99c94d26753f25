"""All jobs that a server serves, as one keyspace.

A key belongs to the job that has a key format which matches the key. A job is refused if its formats overlap those of
another job. A key of a default format begins with the job's name and `:`. All other formats are in one regular
expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import takewhile
from random import choices
from typing import Any, Self

from state_backend.model.descriptor import KeyFormat, Kind, StateDescriptor
from state_backend.model.errors import DescriptorError, JobLoadingError, SlotLoadingError, StoreError
from state_backend.model.generations import query_of
from state_backend.model.slot_set import ALL, NONE, SlotSet
from state_backend.model.slots import hash_position, slot_of
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import AppliedEpoch, Snapshot, Store, Value
from state_backend.store.uncommitted import FreshLayers, FreshSnapshot, FreshTable, OnChange

# Called with a snapshot, and with the number of expiry batches that were reported before.
OnExpiry = Callable[[Snapshot, int], None]
# Makes a snapshot of one epoch at a clock reading.
SnapshotAt = Callable[[int], Snapshot]
# The rates of a job are those of the last minute, or of this many epochs if the minute had more.
RATE_WINDOW_MS = 60_000
RECENT_EPOCHS = 16
# In place of the term and epoch of a job that exists, and cannot be read. Terms begin at 1.
UNREADABLE = (0, -1)


@dataclass
class Job:
    """One job of a server: its open store, and the last report of its applier.

    Args:
        is_stale: No writer sends heartbeats: the query is stopped, restarting, or unreachable.
        error: Why epochs are not applied, or empty.
        is_incomplete: The state may lack keys, because the log began later than the query.
        skipped_rows: Rows that were left out since the generation began, because they cannot be written.
        held_back_epoch, held_back_since_ms: The last epoch of a newer generation that is held back, and when that
            generation began.
        recent_epochs: The commit time and the number of changes of up to RECENT_EPOCHS epochs, the newest last.
        renamed_from: The former name of the job, under which it is served until this one is open.
        as_of_ms: The past moment that is served, if the log is not followed.
        log: The log root; empty: there is no log.
        log_id: The identity of the log that filled the store; empty: unknown.
        applied_epochs, apply_ns: The epochs that this server has applied, and the time in which it did.
        state_bytes: The bytes of each state, in all slots, in the newest snapshot in the log; None if there is no
            snapshot, or an old one.
        source_lag: How far the visible epoch is behind the query's sources (see `log.source_lag`); None: unknown.
        record_delays: The times from records until this server's clients could read them (see `apply.record_delays`);
            None: unknown.
        fresh: The values that are not committed yet; None: no query has sent any.
    """

    name: str
    generation: str
    states: Sequence[StateDescriptor]
    store: Store
    committed_epoch: int = -1
    committed_clock_ms: int = 0
    is_stale: bool = True
    is_incomplete: bool = False
    skipped_rows: int = 0
    held_back_epoch: int | None = None
    held_back_since_ms: int | None = None
    recent_epochs: Sequence[tuple[int, int]] = ()
    error: str = ""
    renamed_from: str | None = None
    as_of_ms: int | None = None
    log: str = ""
    log_id: str = ""
    applied_epochs: int = 0
    apply_ns: int = 0
    state_bytes: Mapping[str, int] | None = None
    source_lag: Mapping[str, Any] | None = None
    record_delays: Mapping[str, Any] | None = None
    fresh: FreshTable | None = None

    def lag_epochs(self, applied: AppliedEpoch) -> int:
        """Return how many committed epochs are not visible yet."""
        return max(0, self.committed_epoch - applied.epoch)

    def per_minute(self, now_ms: int) -> tuple[int, int]:
        """Return the epochs that were committed, and their changes, per minute, over about the last minute."""
        recent = [epoch for epoch in self.recent_epochs if epoch[0] > now_ms - RATE_WINDOW_MS]
        span_ms = RATE_WINDOW_MS
        if len(recent) == RECENT_EPOCHS:  # there may have been more: count from the oldest known one
            span_ms = max(1, now_ms - recent.pop(0)[0])
        changes = sum(changes for _, changes in recent)
        return len(recent) * RATE_WINDOW_MS // span_ms, changes * RATE_WINDOW_MS // span_ms

    def follows(self, other: Job) -> bool:
        """Return whether this is the other job under a new name.

        Another query may have taken the old name, so the queries are compared. The generations differ: that of the
        renamed job began in another term.
        """
        return self.renamed_from == other.name and query_of(self.generation) == query_of(other.generation)


@dataclass
class Keyspace:
    """The jobs by name. Changed only between requests, on the server's own thread.

    Args:
        unreadable: By job, why it cannot be read here; None while the job is being opened. Reads of such a job's keys
            are errors, because "the key does not exist" would be a wrong reply. The key formats of an
            unreadable job may be unknown, so a key that no readable job has is such a key, too.
        version: It grows when a job is added, replaced or removed.
    """

    jobs: dict[str, Job] = field(default_factory=dict)
    unreadable: dict[str, str | None] = field(default_factory=dict)
    version: int = 0
    # Called with the name of a job that may have a newer epoch, or another status.
    on_epoch: Callable[[str], None] = lambda job: None
    # Called with the name of a job that has fresh values from now on.
    on_fresh: Callable[[str], None] = lambda job: None

    def put(self, job: Job) -> None:
        """Add a job, or replace its old generation; DescriptorError if its keys could be another job's."""
        self.check(job)
        for other in [other for other in self.jobs.values() if job.follows(other)]:
            del self.jobs[other.name]
        self.jobs[job.name] = job
        self.unreadable.pop(job.name, None)
        self.version += 1

    def check(self, job: Job) -> None:
        """Raise DescriptorError if a job's keys could be another job's."""
        for other in self.jobs.values():
            if other.name != job.name and not job.follows(other):
                self._check_apart(job, other)

    def refuse(self, name: str, reason: str | None) -> None:
        """Make reads of a job's own name space, `name:...`, an error, unless the job is open.

        Args:
            reason: Why the job cannot be read; None while it is being opened.
        """
        if name not in self.jobs and self.unreadable.get(name, "") != reason:
            self.unreadable[name] = reason
            self.version += 1

    def show_fresh(self, name: str, fresh: FreshTable) -> None:
        """Show the fresh values of a job from now on."""
        self.jobs[name] = replace(self.jobs[name], fresh=fresh)
        self.version += 1
        self.on_fresh(name)

    def suspect_stores(self) -> None:
        """Ask the appliers to verify all stores: a reader found damage in one of them."""
        for job in self.jobs.values():
            job.store.suspect()

    def remove(self, name: str) -> None:
        """Remove a job; the caller closes its store."""
        if self.jobs.pop(name, None) is not None or self.unreadable.pop(name, None) is not None:
            self.version += 1

    @staticmethod
    def _check_apart(job: Job, other: Job) -> None:
        for mine in _formats(job):
            for theirs in _formats(other):
                if mine.overlaps(theirs):
                    raise DescriptorError(
                        f"job {job.name!r} is not served: its keys {mine.text!r} could be keys {theirs.text!r} of job "
                        f"{other.name!r}; change the key format of one of them"
                    )

    def view(self, now_ms: int, on_change: OnChange | None = None) -> KeyspaceView:
        """Open a view of all jobs at their newest epochs."""
        return KeyspaceView(self, now_ms, on_change)


def _formats(job: Job) -> list[KeyFormat]:
    """Return the job's own name space, `job:...`, and every key format outside of it."""
    name_space = KeyFormat((f"{job.name}:", ""), ("key",))
    formats = [state.format_for(job.name) for state in job.states]
    return [name_space, *(each for each in formats if not each.prefix.startswith(name_space.prefix))]


class KeyspaceView:
    """Snapshots of all jobs. Between two calls of `renew`: the same jobs, one epoch per job and one clock reading.

    The snapshot of a job is opened, or renewed, at the first read of one of its keys. Before any read from a newer
    epoch, `on_change` is called with the keys whose cached values are no longer valid. Expired keys read as missing
    even before they are announced, so `on_expiry` may be called later.

    If the view shows fresh values, a read of a key takes its newest one (see `state_backend.fresh`). All that counts or
    lists keys, and a view of `committed`, reads committed epochs only.

    A job's store may own only some slots, and other ones in each version of a snapshot. A read of a key in a slot that
    is not owned raises SlotLoadingError, because "the key does not exist" would be a wrong reply.
    """

    # The slots that are served here.
    _slots: SlotSet = ALL
    # Whether reads of a key take values that are not committed yet.
    _shows_fresh = False
    # The jobs that are listed, counted and scanned; None: all.
    _listed: Collection[str] | None = None

    def __init__(self, keyspace: Keyspace, now_ms: int, on_change: OnChange | None = None) -> None:
        self._keyspace = keyspace
        self._on_change = on_change
        # Of each snapshot, as last reported: its version, its epoch and its number of expiry batches.
        self._versions: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._expiry_batches: dict[str, int] = {}
        self.on_expiry: OnExpiry = lambda snapshot, expiry_batches: None
        self._missing: dict[str, SlotSet] = {}  # served slots that a job's snapshot does not own
        self._jobs: dict[str, Job] = {}
        self._logs: dict[str, tuple[str, str]] = {}
        self._unreadable: dict[str, str | None] = {}
        self._empty = MemoryStore("").snapshot(now_ms)
        self._snapshots: dict[str, Snapshot] = {}
        self._stores: dict[str, Store] = {}
        self._held: dict[str, SnapshotAt] = {}  # jobs that stay at one epoch: what makes their snapshots
        self._moved: set[str] = set()  # jobs that go to their held epoch, or leave it, at the next `renew`
        self._renewed: set[str] = set()  # jobs whose snapshot was opened or renewed since the last `renew`
        self._layers = FreshLayers()
        self._version = -1
        self._single_job: str | None = None  # the only job, if there is only one
        self._single_snapshot: Snapshot | None = None  # its snapshot, if no read needs more than it
        self._formats: re.Pattern[bytes] | None = None
        self._format_jobs: list[str] = []
        self.now_ms = now_ms
        self.renewals = 0
        self.renew(now_ms)

    def renew(self, now_ms: int) -> None:
        """Move to the newest epochs and a new clock reading."""
        self.now_ms = now_ms
        self.renewals += 1
        self._renewed.clear()
        self._single_snapshot = None
        if self._moved:
            self._move()
        if self._version != self._keyspace.version:
            self._route()

    def hold(self, name: str, snapshot_at: SnapshotAt) -> None:
        """Read a job at one epoch, whatever newer ones there are, from the next `renew` until `release`."""
        self._held[name] = snapshot_at
        self._moved.add(name)

    def release(self, name: str) -> None:
        """Read a job at its newest epoch again, from the next `renew` on."""
        if self._held.pop(name, None) is not None:
            self._moved.add(name)

    def _move(self) -> None:
        """Close the snapshots of the jobs that go to another epoch, maybe an earlier one."""
        for name in self._moved & self._snapshots.keys():
            self._close_snapshot(name)
        self._moved.clear()
        if self._on_change is not None:
            self._on_change(None)

    def _close_snapshot(self, name: str) -> None:
        self._snapshots.pop(name).close()
        self._versions.pop(name, None)
        self._missing.pop(name, None)
        del self._stores[name]

    def show_fresh(self) -> Self:
        """Read values that are not committed yet, too; returns this view. To be called before the first read."""
        self._shows_fresh = True
        self._route_layers()
        return self

    @property
    def committed(self) -> Self:
        """A view of the same epochs without fresh values. It is valid until this view is renewed."""
        if not self._layers.names:
            return self
        view = copy(self)
        view._shows_fresh = False
        return view

    def pin_to(self, snapshots: Mapping[str, Snapshot]) -> None:
        """Read from these snapshots, by job. Closing the view closes them. A pinned view must not be renewed."""
        for name, snapshot in snapshots.items():
            self._snapshots[name] = snapshot
            self._stores[name] = self._jobs[name].store
            self._find_missing(name, snapshot)
            self._renewed.add(name)

    def close(self) -> None:
        """Close every snapshot."""
        for snapshot in self._snapshots.values():
            snapshot.close()
        self._snapshots.clear()
        self._stores.clear()
        self._layers.route({})

    def _route(self) -> None:
        """Read the keyspace's jobs, close snapshots of removed jobs and generations, and compile the key formats."""
        jobs = self._jobs = dict(self._keyspace.jobs)
        self._logs = {name: (job.log, job.log_id) for name, job in jobs.items() if job.log_id}
        for name in [name for name, store in self._stores.items() if name not in jobs or jobs[name].store is not store]:
            self._close_snapshot(name)
            self._held.pop(name, None)
        if self._shows_fresh:
            self._route_layers()
        self._version = self._keyspace.version
        self._unreadable = dict(self._keyspace.unreadable)
        self._single_job = next(iter(jobs)) if len(jobs) == 1 and not self._unreadable else None
        own = [(b"(" + each.pattern() + b")", job.name) for job in jobs.values() for each in _formats(job)[1:]]
        self._formats = re.compile(b"|".join(pattern for pattern, _ in own), re.DOTALL) if own else None
        self._format_jobs = [name for _, name in own]
        if self._on_change is not None:
            self._on_change(None)

    def _route_layers(self) -> None:
        """Read which jobs have fresh values."""
        self._layers.route({name: job.fresh for name, job in self._jobs.items() if job.fresh is not None})

    # -- for the compiled core -----------------------------------------------------------------------------------------

    @property
    def routes_version(self) -> int:
        """A number that changes whenever a key may belong to another job than before."""
        return self._version

    @property
    def served_slots(self) -> bytes | None:
        """A byte for each slot, 1 if the slot is served here; None: all slots are."""
        return None

    @property
    def has_single_job(self) -> bool:
        """Return whether there is a single job, to which every key belongs."""
        return self._single_job is not None

    def has_fresh(self, name: str) -> bool:
        """Return whether a job may have fresh values. It changes with `routes_version` only."""
        return name in self._layers.names

    def fresh_snapshots(self, name: str) -> tuple[FreshSnapshot, ...]:
        """Return the views of a job's fresh values, the newest first, that belong to the job's current snapshot."""
        return self._layers.shown(name)

    # -- jobs and their snapshots --------------------------------------------------------------------------------------

    def job_names(self) -> list[str]:
        """Return the names of the jobs."""
        return list(self._jobs)

    def slots_missing(self, name: str) -> SlotSet | None:
        """Return the served slots that a job's store did not own when its snapshot was last renewed; None: no slot."""
        return self._missing.get(name)

    def job_of(self, key: bytes) -> str | None:
        """Return the job that a key belongs to, or None; StoreError if that job cannot be read."""
        if self._single_job is not None:
            return self._single_job
        prefix = key[: key.find(b":")] if b":" in key else b""
        name = prefix.decode("utf-8", "replace")
        if name in self._jobs:
            return name
        if name in self._unreadable:
            reason = self._unreadable[name]
            if reason is None:
                raise JobLoadingError(f"job '{name}' is being opened, retry in a moment")
            raise StoreError(f"job '{name}' cannot be read: {reason}")
        match = self._formats.match(key) if self._formats is not None else None
        if match and match.lastindex:
            return self._format_jobs[match.lastindex - 1]
        for name, reason in self._unreadable.items():
            if reason is not None:
                raise StoreError(f"job '{name}' cannot be read, and the key may be one of its keys: {reason}")
        return None

    def snapshot_of(self, name: str) -> Snapshot:
        """Return the current snapshot of a job; KeyError for an unknown one."""
        if name in self._renewed:
            return self._snapshots[name]
        has_layers = name in self._layers.names
        if has_layers:  # before the snapshot: what an epoch has settled by then is in the snapshot
            self._layers.renew(name, self.now_ms, self._on_change)
        snapshot = self._snapshots.get(name)
        if snapshot is None or name in self._held:
            if snapshot is not None:
                snapshot.close()
            store = self._jobs[name].store
            snapshot_at = self._held.get(name, store.snapshot)
            snapshot = self._snapshots[name] = snapshot_at(self.now_ms)
            self._stores[name] = store
        else:
            snapshot.renew(self.now_ms)
        if snapshot.version != self._versions.get(name):
            self._find_missing(name, snapshot)
            if self._on_change is not None:
                self._report(self._on_change, name, snapshot)
            self._versions[name] = snapshot.version
        if has_layers:
            self._layers.settle(name, snapshot.applied.epoch)
        self._renewed.add(name)
        is_single = name == self._single_job and name not in self._missing and not self._layers.shown(name)
        self._single_snapshot = snapshot if is_single else None
        return snapshot

    def _find_missing(self, name: str, snapshot: Snapshot) -> None:
        """Find the served slots that a snapshot does not own. Called once per version, not for each key."""
        owned = snapshot.owned_slots
        missing = NONE if owned in (ALL, self._slots) else self._slots - owned
        if missing:
            self._missing[name] = missing
        else:
            self._missing.pop(name, None)

    def check_all_listed(self) -> None:
        """Raise StoreError if keys can be neither counted nor listed: those of a job or of a slot cannot be read."""
        for name, reason in self._unreadable.items():
            if reason is not None:
                raise StoreError(
                    f"job '{name}' cannot be read, and its keys can be neither counted nor listed: {reason}"
                )
        self.check_complete()

    def check_complete(self) -> None:
        """Raise SlotLoadingError if a store lacks served slots: then the keys of a job cannot be counted."""
        for _ in self.snapshots():
            pass  # opens or renews the snapshot, which finds its missing slots
        for name, slots in self._missing.items():
            if self._listed is not None and name not in self._listed:
                continue
            raise SlotLoadingError(f"{len(slots)} slots of job '{name}' are not loaded here yet, retry in a moment")

    def _report(self, on_change: OnChange, name: str, snapshot: Snapshot) -> None:
        """Report the keys that changed up to the epoch of a snapshot; no keys if the snapshot was just opened."""
        on_change(snapshot.changed_since(self._epochs[name]) if name in self._versions else ())
        if name in self._versions and snapshot.applied.expiry_batches != self._expiry_batches[name]:
            self.on_expiry(snapshot, self._expiry_batches[name])
        self._epochs[name], self._expiry_batches[name] = snapshot.applied.epoch, snapshot.applied.expiry_batches
        self._versions[name] = snapshot.version

    def at(self, key: bytes) -> Snapshot:
        """Return the snapshot to read a key from: the snapshot of its job, or an empty one for a key of no job."""
        if self._single_snapshot is not None:  # the hot path of GET with a single job
            return self._single_snapshot
        name = self.job_of(key)
        if name is None:
            return self._empty
        snapshot = self.snapshot_of(name)
        if self._missing and (slot := slot_of(key)) in self._missing.get(name, NONE):
            raise SlotLoadingError(f"slot {slot} of job '{name}' is not loaded here yet, retry in a moment")
        if self._shows_fresh:
            return next((layer for layer in self._layers.shown(name) if layer.has(key)), snapshot)
        return snapshot

    def lazy_values(self, keys: Sequence[bytes]) -> list[Value | None]:
        """Return the values of the first keys, at least one, as `Snapshot.lazy_values` does."""
        if self._single_snapshot is not None and self._slots is ALL:
            return self._single_snapshot.lazy_values(keys)
        first = self.at(keys[0])
        return first.lazy_values(list(takewhile(lambda key: self._is_at(first, key), keys)))

    def _is_at(self, snapshot: Snapshot, key: bytes) -> bool:
        try:
            return self.at(key) is snapshot
        except StoreError:
            return False

    def store_of(self, key: bytes) -> Store | None:
        """Return the store of a key's job; None for a key of no job."""
        name = self.job_of(key)
        return None if name is None else self.store_of_job(name)

    def store_of_job(self, name: str) -> Store:
        """Return a job's store."""
        return self._jobs[name].store

    def snapshots(self) -> Iterator[tuple[Job, Snapshot]]:
        """Iterate over (job, snapshot) of all jobs."""
        for name, job in self._jobs.items():
            if self._listed is None or name in self._listed:
                yield self._keyspace.jobs.get(name, job), self.snapshot_of(name)

    def jobs(self) -> Iterable[Job]:
        """Return the jobs, as they were at the last `renew`."""
        return self._jobs.values()

    def limited_to(self, names: Collection[str]) -> Self:
        """Return a view that lists and counts only some jobs. It is valid until this view is renewed."""
        view = copy(self)
        view._listed = names
        return view

    @property
    def logs(self) -> Mapping[str, tuple[str, str]]:
        """The root and the identity of each job's log, if it has an identity. Another object when the jobs change."""
        return self._logs

    def term_epochs(self) -> dict[str, tuple[int, int] | None]:
        """Return the term and epoch of each job's snapshot, by job; None for a job that was not read yet.

        A job that is being opened, or cannot be read, has `UNREADABLE`.
        """
        found: dict[str, tuple[int, int] | None] = dict.fromkeys(self._unreadable, UNREADABLE)
        found |= dict.fromkeys(self._jobs)
        for name, snapshot in self._snapshots.items():
            found[name] = (snapshot.applied.term, snapshot.applied.epoch)
        return found

    def key_count(self) -> int:
        """Return the number of keys in all jobs; as in DBSIZE, expired keys count until they are announced."""
        self.check_all_listed()
        return sum(snapshot.applied.key_count for _, snapshot in self.snapshots())

    def scan(self, cursor: int, count: int, kinds: Collection[Kind] | None = None) -> tuple[int, list[bytes]]:
        """Scan all jobs at once in slot order; see `Snapshot.scan`.

        All jobs are scanned from the same position. The cursor is the first position at which one of them has more
        keys; keys of other jobs from there on are left for the next call.
        """
        self.check_all_listed()
        steps = [snapshot.scan(cursor, count, kinds) for _, snapshot in self.snapshots()]
        if len(steps) == 1:
            return steps[0]
        end = min((next_cursor for next_cursor, _ in steps if next_cursor), default=0)
        found = [key for _, keys in steps for key in keys]
        if end:
            found = [key for key in found if hash_position(key) < end]
        return end, found

    def random_keys(self) -> Iterator[bytes | None]:
        """Search a random key in short steps: yield None for each step, and a key at last.

        The jobs are tried one after another, in a random order that is weighted by their numbers of keys.
        """
        self.check_all_listed()
        jobs = [(job, snapshot) for job, snapshot in self.snapshots() if snapshot.applied.key_count]
        while jobs:
            weights = [snapshot.applied.key_count for _, snapshot in jobs]
            chosen = choices(range(len(jobs)), weights)[0]
            yield from jobs.pop(chosen)[1].random_keys()
