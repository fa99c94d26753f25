"""The numbers of keys in a store, updated with each record that a write transaction changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from state_backend.lmdb.record_format import (
    FORM_AT,
    KEY_ENTRY,
    LARGE_MAP,
    LargeMap,
    Meta,
    expiry_entry,
    expiry_of,
    payload_of,
    state_number_of,
)
from state_backend.model.slots import POSITION_BYTES


class KeyCounts:
    """Counts keys: of each state, with an expiry, and maps with a field that expires.

    A key whose expiry was announced is in no count, whether or not it is removed yet (see `lmdb.expiry`).
    """

    def __init__(self, meta: Meta) -> None:
        self.meta = meta
        numbers, applied = meta.state_numbers, meta.applied
        self._keys = Counter({number: applied.keys.get(name, 0) for name, number in numbers.items()})
        self._expiring = applied.expiring
        self._expiring_maps = applied.expiring_maps

    def is_announced(self, at: bytes, record: bytes) -> bool:
        """Return whether a key's expiry was announced."""
        expire_at_ms = expiry_of(record)
        return expire_at_ms > 0 and expiry_entry(expire_at_ms, KEY_ENTRY, at[:POSITION_BYTES]) <= self.meta.announced

    def add(self, at: bytes, record: bytes, sign: int) -> None:
        """Add a key to the counts (sign 1), or remove it from them (-1)."""
        if self.is_announced(at, record):
            return
        self._keys[state_number_of(record)] += sign
        self._expiring += sign * (expiry_of(record) > 0)
        self._expiring_maps += sign * (
            record[FORM_AT] == LARGE_MAP and LargeMap.of(payload_of(record)).next_expiry_ms > 0
        )

    def add_new(self, new: Mapping[tuple[int, int], int]) -> None:
        """Add new keys that do not expire.

        Args:
            new: How many, by (slot, state number).
        """
        for (_, number), count in new.items():
            self._keys[number] += count

    def may_have_keys(self, number: int) -> bool:
        """Return whether a state may have records; announced keys still have records, and are in no count."""
        return bool(self._keys.get(number) or self.meta.announced)

    def finish(self) -> None:
        """Put the counts into `meta`."""
        names = self.meta.names()
        keys = {names[number]: count for number, count in self._keys.items() if count}
        self.meta.applied = replace(
            self.meta.applied, keys=keys, expiring=self._expiring, expiring_maps=self._expiring_maps
        )
