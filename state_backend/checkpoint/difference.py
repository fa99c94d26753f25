"""The changes between two whole states, which are both sorted by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from state_backend.checkpoint.records import Records, RecordType


def difference(older: Iterable[Records], newer: Iterable[Records]) -> Iterator[Records]:
    """Yield puts of new and changed pairs, and deletes of missing keys. A few blocks are in memory at a time."""
    blocks = iter(older)
    old: dict[bytes, bytes] = {}  # pairs of the older state that the newer one has not passed yet
    last_old = b""
    for records in newer:
        last = records.last_key()
        while last_old <= last and (block := next(blocks, None)) is not None:
            old.update((key, value) for _, key, value in block.items())
            last_old = block.last_key()
        changed = [(RecordType.PUT, key, value) for _, key, value in records.items() if old.pop(key, None) != value]
        missing = [key for key in old if key <= last]
        for key in missing:
            del old[key]
        changed += [(RecordType.DELETE, key, b"") for key in missing]
        if changed:
            yield Records.of(changed)
    if old:
        yield Records.of((RecordType.DELETE, key, b"") for key in old)
    for block in blocks:
        yield Records.of((RecordType.DELETE, key, b"") for _, key, _ in block.items())
