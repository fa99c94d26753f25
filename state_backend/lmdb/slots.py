"""A write transaction of an LMDB store that does not own all slots (see `store.slot_ownership`).

It also counts keys by slot, so that no keys need be counted when the store gains or loses a slot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import lmdb

from state_backend.codec.checksums import checked, with_checksum
from state_backend.lmdb.expiry import ExpiryTransaction
from state_backend.lmdb.key_counts import KeyCounts
from state_backend.lmdb.record_format import (
    EXPIRING,
    EXPIRING_MAPS,
    EXPIRY_AT,
    FORM_AT,
    LARGE_MAP,
    NEVER,
    SLOT_BYTES,
    SLOT_COUNT,
    STATE_AT,
    LargeMap,
    Meta,
    Tables,
    checked_rows,
    expiry_of,
    name_of,
    payload_of,
    records_of_slots,
    slot_counts_name,
    state_number_of,
)
from state_backend.model.slot_set import ALL, NONE, SlotSet


class SlotCounts(KeyCounts):
    """Counts of keys by slot. The counts in `meta` are their sums over the owned slots."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables, meta: Meta) -> None:
        super().__init__(meta)
        assert meta.slot_ownership is not None
        self._txn = txn
        self._tables = tables
        self._owned = meta.slot_ownership.owned
        # By slot: how many keys were added, by state number, and under EXPIRING and EXPIRING_MAPS.
        self._added: defaultdict[bytes, Counter[int]] = defaultdict(Counter)

    def add(self, at: bytes, record: bytes, sign: int) -> None:
        if self.is_announced(at, record):
            return
        added = self._added[at[:SLOT_BYTES]]
        added[state_number_of(record)] += sign
        added[EXPIRING] += sign * (expiry_of(record) > 0)
        added[EXPIRING_MAPS] += sign * (
            record[FORM_AT] == LARGE_MAP and LargeMap.of(payload_of(record)).next_expiry_ms > 0
        )

    def add_new(self, new: Mapping[tuple[int, int], int]) -> None:
        for (slot, number), count in new.items():
            self._added[slot.to_bytes(SLOT_BYTES, "big")][number] += count

    def add_all(self) -> None:
        """Count all keys of a store that has no counts by slot yet. Takes about a microsecond a key."""
        with self._txn.cursor(db=self._tables.keys) as cursor:
            for slot_and_number, keys in Counter(self._plain(cursor)).items():
                number = int.from_bytes(slot_and_number[SLOT_BYTES:], "little")
                self._added[slot_and_number[:SLOT_BYTES]][number] += keys

    def _plain(self, cursor: lmdb.Cursor[bytes]) -> Iterator[bytes]:
        """Yield slot and state of each key that does not expire; add the other keys to the counts."""
        for at, record in checked_rows(cursor):
            if record[EXPIRY_AT] != NEVER or record[FORM_AT] == LARGE_MAP:
                self.add(at, record, 1)
            else:
                yield at[:SLOT_BYTES] + record[STATE_AT]

    def may_have_keys(self, number: int) -> bool:
        return True  # `meta` has no counts of slots that are being loaded

    def finish(self) -> None:
        assert self.meta.slot_ownership is not None
        applied, owned = self.meta.applied, self.meta.slot_ownership.owned
        numbers = self.meta.state_numbers
        counts = Counter({numbers[name]: count for name, count in applied.keys.items()})
        counts.update({EXPIRING: applied.expiring, EXPIRING_MAPS: applied.expiring_maps})
        for slot, added in self._added.items():
            self._write(slot, added)
            if int.from_bytes(slot, "big") in self._owned:
                counts.update(added)
        if owned != self._owned:
            counts = self._sum(owned)
        names = self.meta.names()
        keys = {names[number]: count for number, count in counts.items() if number < EXPIRING and count}
        self.meta.applied = replace(applied, keys=keys, expiring=counts[EXPIRING], expiring_maps=counts[EXPIRING_MAPS])

    def _sum(self, slots: SlotSet) -> Counter[int]:
        """Sum the counts of some slots, reading in order the rows of all slots that have keys."""
        counts: Counter[int] = Counter()
        prefix = slot_counts_name(b"")
        with self._txn.cursor(db=self._tables.meta) as rows:
            for name, stored in rows.iternext() if rows.set_range(prefix) else ():
                if not name.startswith(prefix):
                    break
                slot = int.from_bytes(name[len(prefix) :], "big")
                if slot in slots:
                    for number, keys in SLOT_COUNT.iter_unpack(checked(stored)):
                        counts[number] += keys
        return counts

    def _write(self, slot: bytes, added: Counter[int]) -> None:
        stored = self._txn.get(slot_counts_name(slot), db=self._tables.meta)
        counts = Counter(dict(SLOT_COUNT.iter_unpack(checked(stored)) if stored else ()))
        counts.update(added)
        packed = b"".join(SLOT_COUNT.pack(*item) for item in counts.items() if item[1])
        if packed:
            self._txn.put(slot_counts_name(slot), with_checksum(packed), db=self._tables.meta)
        else:
            self._txn.delete(slot_counts_name(slot), db=self._tables.meta)


class SlotsTransaction(ExpiryTransaction):
    """The changes of one write transaction to keys in some slots. Expired keys may be in any slot."""

    def __init__(
        self, txn: lmdb.Transaction[bytes], tables: Tables, meta: Meta, now_ms: int, slots: SlotSet = ALL
    ) -> None:
        self._slot_counts = SlotCounts(txn, tables, meta)
        super().__init__(txn, tables, meta, now_ms, self._slot_counts)
        self._slots = slots

    def count_all(self) -> None:
        """Count all keys by slot, in a store that has no counts by slot yet."""
        self._slot_counts.add_all()

    def _records(self, cursor: lmdb.Cursor[bytes]) -> Iterable[tuple[bytes, bytes]]:
        return records_of_slots(cursor, self._slots)

    def remove_slots(self, keys_max: int) -> SlotSet:
        """Delete about `keys_max` keys of `slots`; return the slots that may have more."""
        found: list[bytes] = []
        rest = NONE
        with self._txn.cursor(db=self._tables.keys) as cursor:
            for at, record in self._records(cursor):
                if len(found) >= keys_max:
                    slot = int.from_bytes(at[:SLOT_BYTES], "big")
                    rest = self._slots - SlotSet(((0, slot - 1),)) if slot else self._slots
                    break
                found.append(name_of(record))
        for name in found:
            at, record_now = self._keys.find(name)
            if record_now is not None:
                self._keys.delete(at, record_now)
        return rest
