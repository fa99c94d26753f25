"""Reads a job's state from its log alone, without a server: for tests, tools and other writers."""

from __future__ import annotations

from pathlib import Path

from state_backend.change_log import ChangeLog
from state_backend.clock import now_ms
from state_backend.errors import LogError
from state_backend.memory_store import MemoryStore
from state_backend.store import EpochChanges, Snapshot


def read_snapshot(root: str | Path, job: str, epoch: int | None = None, at_ms: int | None = None) -> Snapshot:
    """Return a job's state as of an epoch (the newest unless given) and a time (now unless given), held in memory.

    Reads the whole log: cost and memory grow with it. Raises LogError if the job or the epoch is not there.
    """
    log = ChangeLog(root).job(job)
    current = log.current()
    newest = None if current is None else log.newest(current)
    if current is None or newest is None:
        raise LogError(f"the log {log.filesystem.root} holds no epoch of a job {job!r}")
    end = newest.epoch if epoch is None else epoch
    first = log.numbers(current.generation)[0]
    if not first <= end <= newest.epoch:
        raise LogError(f"job {job!r} has the epochs {first} to {newest.epoch} in its log, and not {end}")
    states = log.description(current.generation).known
    store = MemoryStore(current.generation)
    for number in range(first, end + 1):
        each = log.epoch(current, number)
        if each is None:
            raise LogError(f"job {job!r}: epoch {number} went from the log while it was read; read it again")
        runs = log.runs(current.generation, each)
        store.apply(EpochChanges(number, each.term, each.clock_ms, runs, frozenset(each.replaces)), states)
    return store.snapshot(now_ms() if at_ms is None else at_ms)
