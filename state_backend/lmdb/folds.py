"""Changes of reducing states in a write transaction: each FOLD becomes a PUT of its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from state_backend.codec import packed_map
from state_backend.codec.reductions import folded
from state_backend.lmdb.key_writer import KeyWriter, WrittenState
from state_backend.lmdb.record_format import (
    FORM_AT,
    LARGE_MAP,
    SMALL_MAP,
    LargeMap,
    expiry_of,
    field_store_key,
    find,
    payload_of,
)
from state_backend.lmdb.value_writer import ValueWriter
from state_backend.model.descriptor import Kind
from state_backend.model.records import Change, Op

FOLD = int(Op.FOLD)
# Up to so many changes of a small map, it is faster to find each field than to unpack the map (guess).
FINDS_MAX = 4


class Folds:
    """Folds changes into the stored values of their keys and fields."""

    def __init__(self, keys: KeyWriter, values: ValueWriter) -> None:
        self._keys = keys
        self._values = values

    def as_puts(
        self, record: bytes | None, rows: Sequence[tuple[Any, ...]], state: WrittenState
    ) -> Iterable[tuple[Any, ...]]:
        """Return the changes of one key, with PUTs in place of FOLDs.

        Args:
            record: The key's live record.
        """
        changes = list(map(Change._make, rows))
        # By field, after the changes so far. The field of a value is empty.
        current: dict[bytes, bytes | None] = {}
        if record is not None and record[FORM_AT] == SMALL_MAP and len(rows) > FINDS_MAX:
            current, record = dict(packed_map.pairs(payload_of(record))), None
        for index, change in enumerate(changes):
            has_expired = change.expire_at_ms is not None and change.expire_at_ms <= self._keys.now_ms
            is_of_key = state.kind is Kind.VALUE or change.field is None
            field = b"" if state.kind is Kind.VALUE else change.field or b""
            if change.op == FOLD:
                old = current[field] if field in current else self._current(record, field)
                change = changes[index] = change._replace(op=Op.PUT, value=folded(state.reduction, change, old))
            elif is_of_key:
                record, current = None, {}
            if state.kind is Kind.MAP and is_of_key and change.op == Op.PUT and not has_expired:
                current = dict(packed_map.pairs(change.value or packed_map.EMPTY))
            else:
                current[field] = change.value if change.op == Op.PUT and not has_expired else None
        return changes

    def is_live(self, record: bytes, field: bytes) -> bool:
        """Return whether a map has a live field."""
        return self._current(record, field) is not None

    def _current(self, record: bytes | None, field: bytes) -> bytes | None:
        """Return the live value of a key, or of a field of a map."""
        if record is None:
            return None
        if record[FORM_AT] == SMALL_MAP:
            return packed_map.find(payload_of(record), field)
        if record[FORM_AT] != LARGE_MAP:
            return self._values.value_in(record)
        map_id = LargeMap.of(payload_of(record)).map_id
        _, found = find(self._keys.fields.get, field_store_key(map_id, field), field)
        if found is None or 0 < expiry_of(found) <= self._keys.now_ms:
            return None
        return self._values.value_in(found)
