"""Reads a job's state from its log, without a server: for tests, tools and other writers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from state_backend.apply import snapshots
from state_backend.log.change_log import ChangeLog
from state_backend.log.filesystems import Filesystem
from state_backend.log.time_travel import AsOf, PastJobLog, moment_of
from state_backend.model.clock import now_ms
from state_backend.model.errors import LogError
from state_backend.model.slot_set import SlotSet
from state_backend.store.memory_store import MemoryStore
from state_backend.store.store import EpochChanges, Snapshot


def read_snapshot(
    log: str | Path | Filesystem, job: str, epoch: int | None = None, at_ms: int | None = None
) -> Snapshot:
    """Return a job's state as of an epoch and a time, read from its log into memory.

    No server is needed. Reading begins with the newest snapshot up to the epoch; time and memory grow with the state.

    Args:
        log: The root of the change log.
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
    if epoch is not None and not isinstance(epoch, int):
        raise LogError(f"epoch={epoch!r} is no epoch's number: read_snapshot(log, job, epoch) has no state")
    job_log = ChangeLog(log).job(job)
    moment = moment_of(job_log, None if epoch is None else AsOf(epoch))
    past = PastJobLog(job_log, moment)
    store = MemoryStore(moment.generation)
    for changes in epochs_of(past):
        store.apply(changes, job_log.description(moment.generation).all_states)
    return store.snapshot(now_ms() if at_ms is None else at_ms)


def epochs_of(past: PastJobLog, slots: SlotSet | None = None, start: int | None = None) -> Iterator[EpochChanges]:
    """Iterate over the changes that build a job's state at a past moment, in all slots or in some, from an empty store.

    The first ones are those of the newest snapshot up to the epoch `start` (default: the moment's), if there is one.
    LogError if a file was swept meanwhile.
    """
    current = past.visible()
    assert current is not None
    end = past.moment.epoch
    manifest = next((each for each in past.complete_snapshots(current) if start is None or each.epoch <= start), None)
    if manifest is not None:
        yield snapshots.changes(past, current.generation, manifest, slots)
    first = manifest.epoch + 1 if manifest is not None else min(past.numbers(current.generation), default=end)
    for number in range(first, end + 1):
        each = past.epoch(current, number)
        if each is None or (number == first and manifest is None and each.previous is not None):
            raise LogError(f"job {past.job!r}: the log no longer has epoch {number}; read a newer one")
        runs = past.runs(current.generation, each, slots)
        yield EpochChanges(number, each.term, each.clock_ms, runs, frozenset(each.replaces))
