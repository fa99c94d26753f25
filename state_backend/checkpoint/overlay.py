"""The newest values of changed keys: the files after a snapshot lay them over the snapshot's rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from state_backend.checkpoint.records import Op, Records

# Records of the changed keys are made in blocks of so many.
BLOCK_RECORDS = 1 << 15


class Overlay:
    """Changed keys, with their newest values. Memory: the keys and values that changed since the snapshot.

    A merge appends its bytes to the value. The parts of a value need no delimiter: each begins with its size.
    """

    def __init__(self) -> None:
        # By key: whether the value replaces the snapshot's, and the parts of the value; None if the key is deleted.
        self._changed: dict[bytes, tuple[bool, list[bytes]] | None] = {}

    def apply(self, records: Records) -> None:
        """Apply changes in their order."""
        changed = self._changed
        for op, key, value in records.items():
            if op is Op.PUT:
                changed[key] = (True, [value])
            elif op is Op.DELETE:
                changed[key] = None
            elif key not in changed:
                changed[key] = (False, [value])
            else:
                before = changed[key]
                if before is None:
                    changed[key] = (True, [value])
                else:
                    before[1].append(value)

    def over(self, snapshot: Iterable[Records]) -> Iterator[Records]:
        """Yield the puts of a whole state: the snapshot's rows that have not changed, then all rows that have."""
        changed = self._changed
        for records in snapshot:
            if not changed:
                yield records
                continue
            kept = np.ones(len(records), bool)
            for index, (_, key, value) in enumerate(records.items()):
                if key in changed:
                    kept[index] = False
                    change = changed[key]
                    if change is not None and not change[0]:
                        changed[key] = (True, [value, *change[1]])
            if kept.any():
                yield records if kept.all() else records.select(kept)
        items = ((Op.PUT, key, b"".join(change[1])) for key, change in changed.items() if change is not None)
        while block := list(islice(items, BLOCK_RECORDS)):
            yield Records.of(block)
