"""Expiry in a write transaction of an LMDB store: expired keys and fields are first announced, then removed.

The server's own clock decides when a key is announced: from then on the key is in no count, and its events are written.
The log's clock decides when it is removed: until then an epoch may still change it (see `store.Store.expire`).
"""

from __future__ import annotations

from dataclasses import replace

import lmdb

from state_backend.codec.checksums import check, checked
from state_backend.lmdb.record_format import (
    DROPPED_ENTRY,
    ENTRY_NAME_AT,
    ENTRY_TAG_AT,
    ENTRY_TIME_AT,
    FIELD_ENTRY,
    FIELD_EXPIRY_POSITION_AT,
    FIELD_EXPIRY_TIME_AT,
    FORM_AT,
    KEY_ENTRY,
    LARGE_MAP,
    LargeMap,
    Tables,
    expiry_entry,
    expiry_of,
    field_expiry_name,
    id_of,
    name_of,
    payload_of,
    state_number_of,
)
from state_backend.lmdb.transaction import LmdbTransaction
from state_backend.model.errors import StoreDamagedError
from state_backend.store.changed_keys import ChangedKeys
from state_backend.store.key_events import KeyEvent

# Announced keys stay announced if the clock is set back by less than this (guess).
CLOCK_STEP_MS = 5_000
# Entries of dropped rows have the time 0; all others are at or behind FIRST_TIMED. LAST_TAG is behind all tags.
FIRST_TIMED, LAST_TAG = (1).to_bytes(8, "big"), b"\xff"


class ExpiryTransaction(LmdbTransaction):
    """A write transaction that also announces and removes expired keys and fields."""

    _expired_keys = _expired_fields = 0

    def announce_expired(self, clock_ms: int, entries_max: int) -> int:
        """Announce keys and fields that have expired by a clock, oldest first.

        Announced keys leave the counts, and their events are written. Their records stay: an epoch may still change
        them. Returns how many entries of the expiry index were processed; `entries_max` if there may be more.
        """
        if clock_ms < self.meta.announced_ms - CLOCK_STEP_MS:
            return self._undo_announcements(clock_ms + CLOCK_STEP_MS, entries_max)
        with self._txn.cursor(db=self._tables.expiry) as entries:
            for done in range(entries_max):
                found = entries.set_range(max(self.meta.announced + b"\0", FIRST_TIMED))
                entry = entries.key()
                at_ms = int.from_bytes(entry[ENTRY_TIME_AT], "big")
                if not found or at_ms > clock_ms:
                    if done:
                        # All entries up to the clock are announced. A key that is put later with an earlier expiry
                        # counts as announced from the beginning.
                        self.meta.announced = expiry_entry(clock_ms, LAST_TAG, b"")
                    return done
                if entry[ENTRY_TAG_AT] == KEY_ENTRY:
                    self._announce_keys_at(entry[ENTRY_NAME_AT], at_ms)
                    self.meta.announced = entry
                else:
                    self.meta.announced = entry
                    self._announce_fields(entry, clock_ms)
        return entries_max

    def _announce_keys_at(self, position: bytes, at_ms: int) -> None:
        for at, record in self._keys.records.at(position):
            if expiry_of(record) == at_ms:
                self._keys.counts.add(at, record, -1)
                self._keys.changed_keys.add(name_of(record))
                self._keys.report(name_of(record), KeyEvent.EXPIRED)
                self._expired_keys += 1

    def _announce_fields(self, entry: bytes, clock_ms: int) -> None:
        """Announce the expired fields of a large map, given one of its two entries."""
        at_ms, prefix = int.from_bytes(entry[ENTRY_TIME_AT], "big"), entry[ENTRY_NAME_AT]
        at, record = self._map_of(prefix)
        large = None if record is None else LargeMap.of(payload_of(record))
        if entry[ENTRY_TAG_AT] == FIELD_ENTRY:
            self._txn.delete(entry, db=self._tables.expiry)
            if large is not None and large.next_expiry_ms >= at_ms:
                large = None  # its own entry comes later
        if record is None or large is None:
            return
        found = self._keys.field_expiry.set_range(field_expiry_name(prefix, at_ms)) and self._keys.field_expiry.key()
        has_expired_field = found and found.startswith(prefix) and found < field_expiry_name(prefix, clock_ms + 1)
        if has_expired_field and not self._keys.counts.is_announced(at, record):
            self._keys.changed_keys.add(name_of(record))
            is_live = large.is_live(self._keys.field_expiry, clock_ms)
            self._keys.report(name_of(record), KeyEvent.FIELDS_EXPIRED, *(() if is_live else (KeyEvent.DELETED,)))
        self._maps.announce_next(large, clock_ms)

    def _map_of(self, prefix: bytes) -> tuple[bytes, bytes | None]:
        """Return a large map's store key and record, given its key's prefix; None if the key has another record."""
        key = self._txn.get(prefix, db=self._tables.maps)
        if key is None:
            return b"", None
        key = checked(key)
        at, record = self._keys.find(key)
        is_same = record is not None and record[FORM_AT] == LARGE_MAP and id_of(record) == prefix
        return at, record if is_same else None

    def _undo_announcements(self, until_ms: int, entries_max: int) -> int:
        """Count the announced keys that expire after a time as live again, latest first: the clock was set back."""
        with self._txn.cursor(db=self._tables.expiry) as entries:
            found = entries.prev() if entries.set_range(self.meta.announced + b"\0") else entries.last()
            for done in range(entries_max):
                entry = entries.key() if found else b""
                at_ms = int.from_bytes(entry[ENTRY_TIME_AT], "big")
                if at_ms <= until_ms:
                    self.meta.announced = entry
                    return done
                found = entries.prev()
                self.meta.announced = entries.key() if found else b""
                if entry[ENTRY_TAG_AT] == KEY_ENTRY:
                    for at, record in self._keys.records.at(entry[ENTRY_NAME_AT]):
                        if expiry_of(record) == at_ms:
                            self._keys.counts.add(at, record, 1)
        return entries_max

    def remove_expired(self, removals_max: int) -> int:
        """Remove dropped rows, and announced keys and fields that have expired by this transaction's clock.

        The oldest come first. Returns how many keys, fields and other rows were removed; about `removals_max` if there
        are more.
        """
        self._keys.changed_keys = ChangedKeys()  # announced keys were stored before: see `store_expired_keys`
        done = 0
        with self._txn.cursor(db=self._tables.expiry) as entries:
            while done < removals_max and entries.first():
                entry = entries.key()
                tag, name = entry[ENTRY_TAG_AT], entry[ENTRY_NAME_AT]
                if tag == DROPPED_ENTRY:
                    done += self._remove_dropped(entry, name, removals_max - done)
                elif int.from_bytes(entry[ENTRY_TIME_AT], "big") > self._now_ms or entry > self.meta.announced:
                    break
                elif tag == KEY_ENTRY:
                    done += self._remove_keys_at(name)
                else:
                    done += self._remove_fields(name, removals_max - done)
        applied = self.meta.applied
        self.meta.applied = replace(
            applied,
            expired_keys=applied.expired_keys + self._expired_keys,
            expired_fields=applied.expired_fields + self._expired_fields,
        )
        return done

    def _remove_keys_at(self, position: bytes) -> int:
        """Remove the expired keys at one position, and their entries of the expiry index; return how many keys."""
        removed = 0
        ordinal = 0
        at = position
        while (record := self._keys.records.get(at)) is not None:
            check(record)
            if expiry_of(record) <= self._now_ms and self._keys.counts.is_announced(at, record):
                self._keys.delete(at, record)
                removed += 1  # the last record of the position has moved to this store key, if there is one
            else:
                ordinal += 1
                at = position + ordinal.to_bytes(2, "big")
        return removed

    def _remove_fields(self, prefix: bytes, removals_max: int) -> int:
        """Remove expired fields of a large map, and move its entry to the next expiry; return how many fields."""
        at, record = self._map_of(prefix)
        if record is None:
            raise StoreDamagedError(
                "the store has an expiring field of a map without a key; the store is rebuilt from the log"
            )
        map_id, size, expiring, _ = LargeMap.of(payload_of(record))
        removed = 0
        expire_at_ms = 0
        while self._keys.field_expiry.set_range(prefix) and (name := self._keys.field_expiry.key()).startswith(prefix):
            expire_at_ms = int.from_bytes(name[FIELD_EXPIRY_TIME_AT], "big")
            if expire_at_ms > self._now_ms or removed >= removals_max:
                break
            removed_here = self._remove_fields_at(
                name_of(record), prefix + name[FIELD_EXPIRY_POSITION_AT], expire_at_ms
            )
            if not removed_here:
                raise StoreDamagedError(
                    "a field that expires is missing in the store; the store is rebuilt from the log"
                )
            removed += removed_here
        self._expired_fields += removed
        large = LargeMap(map_id, size - removed, expiring - removed, expire_at_ms if expiring > removed else 0)
        if large.size:
            self._maps.put_large(at, record, name_of(record), expiry_of(record) or None, state_number_of(record), large)
        else:
            self._expired_keys += not self._keys.counts.is_announced(at, record)
            self._keys.delete(at, record)
        return max(removed, 1)

    def _remove_fields_at(self, key: bytes, position: bytes, expire_at_ms: int) -> int:
        removed = 0
        ordinal = 0
        at = position
        while (record := self._keys.fields.get(at)) is not None:
            check(record)
            if expiry_of(record) == expire_at_ms:
                self._maps.delete_field(at, record)
                self._keys.orders.delete(key, name_of(record))
                removed += 1
            else:
                ordinal += 1
                at = position + ordinal.to_bytes(2, "big")
        return removed

    def _remove_dropped(self, entry: bytes, prefix: bytes, removals_max: int) -> int:
        """Remove rows of a dropped map, list, set or long value, and the entry with the last row; return how many."""
        removed = 0
        for table in (self._tables.fields, self._tables.field_expiry, self._tables.blocks):
            with self._txn.cursor(db=table) as cursor:
                found = cursor.set_range(prefix)
                while found and cursor.key().startswith(prefix):
                    if removed >= removals_max:
                        return removed
                    if table is self._tables.fields:
                        check(record := cursor.value())
                        self._keys.drop(record)
                    found = cursor.delete() and bool(cursor.key())
                    removed += 1
        self._txn.delete(prefix, db=self._tables.maps)
        self._txn.delete(entry, db=self._tables.expiry)
        return max(removed, 1)


def has_expired(
    txn: lmdb.Transaction[bytes], tables: Tables, announced: bytes, announced_to_ms: int, removed_to_ms: int
) -> bool:
    """Return whether `announce_expired` or `remove_expired` has anything to do, given the clock of each."""
    if announced_to_ms < int.from_bytes(announced[ENTRY_TIME_AT], "big") - CLOCK_STEP_MS:
        return True
    with txn.cursor(db=tables.expiry) as entries:
        if entries.first() and int.from_bytes(entries.key()[ENTRY_TIME_AT], "big") <= removed_to_ms:
            return True
    next_ms = next_expiry_ms(txn, tables, announced)
    return next_ms is not None and next_ms <= announced_to_ms


def next_expiry_ms(txn: lmdb.Transaction[bytes], tables: Tables, announced: bytes) -> int | None:
    """Return the time of the first entry that is not announced yet; None if there is none."""
    with txn.cursor(db=tables.expiry) as entries:
        if not entries.set_range(max(announced + b"\0", FIRST_TIMED)):
            return None
        return int.from_bytes(entries.key()[ENTRY_TIME_AT], "big")
