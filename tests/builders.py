"""What most tests begin with, in one call: changes, an epoch in a store, a log with some epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from state_backend.apply.replay import read_snapshot
from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.filesystems import Filesystem
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges, Store


def value_state(name: str) -> StateDescriptor:
    """Return a state of values, of which a test needs nothing but the name."""
    return StateDescriptor(name, key="k", value="v")


def put_value(state: str, key: bytes, value: bytes = b"v", expire_at_ms: int | None = None) -> Change:
    """Return the change that sets a value."""
    return Change(state, Op.PUT, key, None, value, expire_at_ms)


def put_field(state: str, key: bytes, field: bytes, value: bytes = b"v", expire_at_ms: int | None = None) -> Change:
    """Return the change that sets a field of a map, or adds a member to a set: its value is the member's score."""
    return Change(state, Op.PUT, key, field, value, expire_at_ms)


def put_large(state: str, number: int) -> Change:
    """Return a change of the key of a number that is too large to be in an epoch's file."""
    return put_value(state, b"%d" % number, b"%d" % number + b"x" * 70_000)


def epoch_of(
    states: Sequence[StateDescriptor],
    changes: Iterable[Change],
    epoch: int = 0,
    *,
    term: int = 1,
    clock_ms: int = 1,
    replaces: Collection[str] = (),
) -> EpochChanges:
    """Return an epoch as a store takes it: the changes as sorted runs."""
    runs = list(runs_of(changes, [state.name for state in states]))
    return EpochChanges(epoch, term, clock_ms, runs, frozenset(replaces))


def apply_epoch(
    store: Store, states: Sequence[StateDescriptor], changes: Iterable[Change], epoch: int | None = None, **more: Any
) -> Any:
    """Apply an epoch to a store, and return what it returns. epoch: None: the store's next. more: of `epoch_of`."""
    number = store.applied.epoch + 1 if epoch is None else epoch
    return store.apply(epoch_of(states, changes, number, **more), states)


def write_log(
    root: str | Path | Filesystem,
    job: str,
    states: Sequence[StateDescriptor],
    *epochs: Iterable[Change],
    query_id: str | None = None,
) -> int:
    """Write these epochs into a job's log, after those that it has; return the number of the last one."""
    with LogWriter(root, job, states, query_id) as writer:
        return [writer.publish(changes) for changes in epochs][-1]


def current_of(root: str | Path | Filesystem, job: str = "job") -> tuple[JobLog, CurrentGeneration]:
    """Return a job's log, and its current generation."""
    log = ChangeLog(root).job(job)
    current = log.current()
    assert current is not None
    return log, current


def numbers_in(root: Path) -> list[int]:
    """Return the keys that a snapshot of the job has, which are numbers."""
    with read_snapshot(root, "job") as shown:
        return sorted(map(int, shown.scan(0, 1 << 20)[1]))
