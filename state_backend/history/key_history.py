"""The values that a key had, from a job's log.

Only files with the key's slot are opened, and only the key's rows are applied. The log is read backwards, one segment
after the other: from the newest snapshot to the end, then from the snapshot before it to the newest one, until there
are enough values. They are in memory, about VALUES_BYTES_MAX bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from state_backend.apply.replay import epochs_of
from state_backend.history.limits import VALUES_BYTES_MAX
from state_backend.history.whole_values import WholeValue, whole_value
from state_backend.log.change_log import JobLog
from state_backend.log.time_travel import Moment, PastJobLog, ReadableEpochs, moment_of, readable_epochs
from state_backend.model.descriptor import Kind
from state_backend.model.slot_set import SlotSet
from state_backend.model.slots import slot_of
from state_backend.store.memory_store import MemoryStore


class Version(NamedTuple):
    """A value that a key had from an epoch on, and its kind; both are None if the key did not exist then.

    Args:
        is_oldest: The log begins at this epoch, so the key may have had the value earlier.
    """

    epoch: int
    clock_ms: int
    kind: Kind | None
    value: WholeValue | None
    is_oldest: bool


def history_of(log: JobLog, key: bytes, count: int, until: Moment | None = None) -> list[Version]:
    """Return the last versions of a key up to a moment (default: the newest epoch), the newest first.

    A key that expires has a version with the value None from the next epoch on. LogError if the log cannot be read.
    """
    past = PastJobLog(log, until or moment_of(log, None))
    readable = readable_epochs(past)
    assert readable is not None, "the moment is one of its epochs"
    versions: list[Version] = []
    size = 0
    for begin, end in _segments(past, readable):
        found = _versions(PastJobLog(log, past.moment._replace(epoch=end)), key, begin, readable)
        newest, has_more = _newest(found, count - len(versions), VALUES_BYTES_MAX - size, 0 if versions else 1)
        versions += newest
        size += sum(_size(each.value) for each in newest)
        if has_more or len(versions) == count:
            break
    return versions


def _segments(past: PastJobLog, readable: ReadableEpochs) -> Iterator[tuple[int, int]]:
    """Iterate over segments of the log, as (first epoch, last epoch), the newest first.

    Each begins with the snapshot of the epoch at which the one before it ends. The oldest begins with the first epoch.
    """
    first, last = readable.first.epoch, past.moment.epoch
    snapshots = [each.epoch for each in past.complete_snapshots(readable.generation) if first < each.epoch < last]
    yield from ((begin, end) for end, begin in pairwise([last, *snapshots, first]))


def _newest(versions: Iterator[Version], count: int, bytes_max: int, at_least: int) -> tuple[list[Version], bool]:
    """Return the last versions that fit, the newest first, and whether older ones were left out.

    Args:
        at_least: So many are returned even if they are larger than `bytes_max`.
    """
    newest: deque[Version] = deque()
    size, has_more = 0, False
    for version in versions:
        newest.append(version)
        size += _size(version.value)
        while len(newest) > count or (size > bytes_max and len(newest) > at_least):
            size -= _size(newest.popleft().value)
            has_more = True
    return list(reversed(newest)), has_more


def _versions(past: PastJobLog, key: bytes, begin: int, readable: ReadableEpochs) -> Iterator[Version]:
    """Iterate over the versions of a key in a segment of the log that begins at an epoch, the oldest first."""
    states = past.description(past.moment.generation).all_states
    store = MemoryStore(past.moment.generation)
    value: WholeValue | None = None
    is_expiring = False
    first = readable.first.epoch
    for changes in epochs_of(past, SlotSet.parse(str(slot_of(key))), begin):
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
        if value != before and (changes.epoch > begin or begin == first):
            kind = None if info is None else info.kind
            # An attachment begins with the whole state of a query that has run before.
            is_incomplete = not readable.starts_at_first_epoch or (first > 0 and bool(changes.replaces))
            is_oldest = changes.epoch == first and is_incomplete
            yield Version(changes.epoch, changes.clock_ms, kind, value, is_oldest)


def _rows_of(run: pa.RecordBatch, key: bytes) -> pa.RecordBatch:
    return run.filter(pc.equal(run.column("key"), pa.scalar(key, pa.binary())))


def _size(value: Any) -> int:
    """Return about how many bytes a value takes."""
    if isinstance(value, dict):
        return sum(100 + len(name) + len(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 50 + (len(value) if isinstance(value, bytes) else 0)
