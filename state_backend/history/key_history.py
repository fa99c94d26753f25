"""The values that a key had, from a job's log.

Only the files that have the key's slot are opened, and only the key's rows are applied. The values of one key are in
memory, at most COUNT_MAX of them and about VALUES_BYTES_MAX.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from state_backend.apply.replay import epochs_of
from state_backend.history.whole_values import WholeValue, whole_value
from state_backend.log.change_log import JobLog
from state_backend.log.past import AsOf, PastJobLog, moment_of, readable_epochs
from state_backend.model.key_groups import KeyGroups
from state_backend.model.slots import slot_of
from state_backend.store.memory_store import MemoryStore

COUNT_DEFAULT = 10
COUNT_MAX = 1_000
# Older values are left out beyond this size of all values together (guess); the newest one never is.
VALUES_BYTES_MAX = 16 << 20


class Version(NamedTuple):
    """A value that a key had from an epoch on; None: the key did not exist. clock_ms: the epoch's time.

    is_oldest: the log reaches back to this epoch only, and the key had the value there; it may be older.
    """

    epoch: int
    clock_ms: int
    value: WholeValue | None
    is_oldest: bool


def history_of(log: JobLog, key: bytes, count: int, until: int | None = None) -> list[Version]:
    """Return the last versions of a key up to an epoch (default: the newest), the newest first.

    A key that has expired has a version None from the next epoch on. LogError if the log cannot be read.
    """
    versions: deque[Version] = deque(maxlen=count)
    size = 0
    for version in _versions(log, key, until):
        if len(versions) == count:
            size -= _size(versions[0].value)
        versions.append(version)
        size += _size(version.value)
        while size > VALUES_BYTES_MAX and len(versions) > 1:
            size -= _size(versions.popleft().value)
    return list(reversed(versions))


def _versions(log: JobLog, key: bytes, until: int | None) -> Iterator[Version]:
    """Iterate over all versions of a key, the oldest first."""
    past = PastJobLog(log, moment_of(log, None if until is None else AsOf(until)))
    readable = readable_epochs(past)
    assert readable is not None, "the moment is one of its epochs"
    states = log.description(past.moment.generation).all_states
    store = MemoryStore(past.moment.generation)
    slot = slot_of(key)
    value: WholeValue | None = None
    is_expiring = False
    for changes in epochs_of(past, KeyGroups.parse(str(slot)), readable.first.epoch):
        runs = [rows for run in changes.runs if (rows := _rows_of(run, key)).num_rows]
        if runs or changes.replaces:
            store.apply(changes._replace(runs=runs), states)
        elif not is_expiring:
            continue
        before = value
        with store.snapshot(changes.clock_ms) as snapshot:
            info = snapshot.key_info(key)
            value = None if info is None else whole_value(snapshot, info)
            is_expiring = info is not None and (info.expire_at_ms is not None or isinstance(value, dict))
        if value != before:
            is_oldest = changes.epoch == readable.first.epoch and not readable.is_begun
            yield Version(changes.epoch, changes.clock_ms, value, is_oldest)


def _rows_of(run: pa.RecordBatch, key: bytes) -> pa.RecordBatch:
    return run.filter(pc.equal(run.column("key"), pa.scalar(key, pa.binary())))


def _size(value: Any) -> int:
    """Return about how many bytes a value takes."""
    if isinstance(value, dict):
        return sum(100 + len(name) + len(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 50 + (len(value) if isinstance(value, bytes) else 0)


def to_json(version: Version) -> dict[str, Any]:
    """Return a version as JSON, with bytes as Latin-1."""
    return version._asdict() | {"value": _json_value(version.value)}


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {name.decode("latin-1"): each.decode("latin-1") for name, each in value.items()}
    return [_json_value(each) for each in value] if isinstance(value, (list, tuple)) else value
