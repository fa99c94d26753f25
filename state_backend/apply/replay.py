"""Reads a job's state from its log, without a server: for tests, tools and other writers."""

from __future__ import annotations

from pathlib import Path

from state_backend.apply import snapshots
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import Filesystem
from state_backend.model.clock import now_ms
from state_backend.model.errors import LogError
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import EpochChanges, Snapshot


def read_snapshot(
    root: str | Path | Filesystem, job: str, epoch: int | None = None, at_ms: int | None = None
) -> Snapshot:
    """Return a job's state as of an epoch and a time, read from its log into memory.

    No server is needed. Reading begins with the newest snapshot up to the epoch; time and memory grow with the state.

    Args:
        root: The root of the change log.
        job: The job's name.
        epoch: The number of the epoch. Default: the newest that readers may see.
        at_ms: The time that decides what has expired, in milliseconds since 1970 UTC. Default: now.

    Raises:
        LogError: The log has no such job, or does not have the epoch (any more).

    Examples:
        >>> states = [sparkis.StateDescriptor("price", key="ticker", value="price")]
        >>> with sparkis.LogWriter(path, "market", states) as writer:
        ...     for price in (b"12.5", b"12.75"):
        ...         epoch = writer.publish([sparkis.Change("price", sparkis.Op.PUT, b"market:price:ACME", value=price)])
        >>> for epoch in (0, 1):
        ...     with sparkis.read_snapshot(path, "market", epoch) as snapshot:
        ...         print(snapshot.value(b"market:price:ACME"))
        b'12.5'
        b'12.75'
    """
    log = ChangeLog(root).job(job)
    current = log.visible()
    newest = None if current is None else log.end(current)
    if current is None or newest is None:
        raise LogError(f"the log {log.filesystem.root} has no epoch of a job {job!r}")
    end = newest.epoch if epoch is None else epoch
    states = log.description(current.generation).all_states
    store = MemoryStore(current.generation)
    manifest = next((each for each in log.snapshots(current) if each.epoch <= end), None)
    if manifest is not None:
        store.apply(snapshots.changes(log, current.generation, manifest), states)
    first = manifest.epoch + 1 if manifest is not None else min(log.numbers(current.generation), default=newest.epoch)
    if not first - (manifest is not None) <= end <= newest.epoch:
        raise LogError(f"job {job!r}: its log has the epochs {first} to {newest.epoch}, and not {end}")
    for number in range(first, end + 1):
        each = log.epoch(current, number)
        if each is None or (number == first and manifest is None and each.previous is not None):
            raise LogError(f"job {job!r}: the log no longer has epoch {end}; read a newer one")
        runs = log.runs(current.generation, each)
        store.apply(EpochChanges(number, each.term, each.clock_ms, runs, frozenset(each.replaces)), states)
    return store.snapshot(now_ms() if at_ms is None else at_ms)
