"""A whole state: the rows of a snapshot, and the newest values of the keys that the files after it change.

The files are read twice: first to number their keys and find the newest record of each, then for the values. So the
memory used is that of the changed keys, not of their values. Only the values of keys with merges are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from state_backend.checkpoint.key_numbers import KeyNumbers, key_numbers
from state_backend.checkpoint.records import Numbers, Records, RecordType

# Records with merged values are made in blocks of so many.
BLOCK_RECORDS = 1 << 15

# Reads the records of a file; each time the same ones.
ReadFile = Callable[[], Iterable[Records]]
Mask = npt.NDArray[np.bool_]


def merge_changes(snapshot: Iterable[Records], files: Sequence[ReadFile]) -> Iterator[Records]:
    """Yield the puts of the whole state after all files: the unchanged rows of the snapshot, then the changed rows.

    A merge appends its bytes to the value. The parts of a value need no delimiter: each begins with its size.
    """
    changes = _Changes.of(files)
    merged: dict[int, list[bytes]] = {}
    keys: dict[int, bytes] = {}

    def collect(records: Records, numbers: Numbers) -> None:
        for number, (_, key, value) in zip(numbers.tolist(), records.items(), strict=True):
            keys[number] = key
            merged.setdefault(number, []).append(value)

    for records in snapshot:
        numbers = changes.numbers_of(records)
        yield from _chosen(records, numbers < 0)
        is_head = (numbers >= 0) & changes.is_merged[numbers] & (changes.base[numbers] < 0)
        if is_head.any():
            collect(records.select(is_head), numbers[is_head])
    at = 0
    for file in files:
        for records in file():
            part = slice(at, at + len(records))
            at += len(records)
            yield from _chosen(records, changes.is_newest[part])
            is_part = changes.is_part[part]
            if is_part.any():
                collect(records.select(is_part), changes.numbers[part][is_part])
    items = ((RecordType.PUT, keys[number], b"".join(values)) for number, values in merged.items())
    while block := list(islice(items, BLOCK_RECORDS)):
        yield Records.of(block)


def _chosen(records: Records, is_chosen: Mask) -> Iterator[Records]:
    if is_chosen.any():
        yield records if is_chosen.all() else records.select(is_chosen)


class _Changes:
    """The records of some files, in their order.

    Of each record: numbers, that of its key; is_newest, whether it is a put that counts; is_part, whether its value is
    a part of a merged one. Of each key: base, the index of its last put or delete, or -1; is_merged, whether merges
    follow. At the end stands a key that is in no file.
    """

    def __init__(self, known: KeyNumbers, numbers: Numbers, ops: npt.NDArray[np.uint8]) -> None:
        self._known = known
        self.numbers = numbers
        indices = np.arange(len(numbers))
        is_merge = ops == RecordType.MERGE
        self.base = np.full(len(known) + 1, -1)
        self.base[numbers[~is_merge]] = indices[~is_merge]  # the last one of a key stays
        self.is_merged = np.zeros(len(known) + 1, bool)
        self.is_merged[numbers[is_merge & (indices > self.base[numbers])]] = True
        of_merged = self.is_merged[numbers]
        is_base = indices == self.base[numbers]
        self.is_newest = is_base & (ops == RecordType.PUT) & ~of_merged
        self.is_part = of_merged & (indices >= self.base[numbers]) & (ops != RecordType.DELETE)

    @classmethod
    def of(cls, files: Sequence[ReadFile]) -> _Changes:
        known = key_numbers()
        numbers, ops = [np.empty(0, np.int64)], [np.empty(0, np.uint8)]
        for file in files:
            for records in file():
                added = known.added(records.content, records.keys, records.key_sizes)
                numbers.append(np.frombuffer(added, np.int64))
                ops.append(records.ops)
        return cls(known, np.concatenate(numbers), np.concatenate(ops))

    def numbers_of(self, records: Records) -> Numbers:
        """Return the numbers of keys; -1 for those that are in no file."""
        if not len(self._known):
            return np.full(len(records), -1)
        return np.frombuffer(self._known.found(records.content, records.keys, records.key_sizes), np.int64)
