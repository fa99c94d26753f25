"""Expiry in a write transaction of an LMDB store: expired keys and fields are first announced, then removed.

They are announced by this server's clock: announced keys are in no count, and their events are written. They are
removed by the log's clock: until then an epoch may still change them (see `store.Store.expire`).
"""

from __future__ import annotations

from dataclasses import replace

import lmdb

from state_backend.codec.checksums import check, checked
from state_backend.lmdb.layout import (
    DROPPED_LINE,
    FIELD_EXPIRY_POSITION_AT,
    FIELD_EXPIRY_TIME_AT,
    FIELD_LINE,
    FORM_AT,
    KEY_LINE,
    LARGE,
    LINE_NAME_AT,
    LINE_TAG_AT,
    LINE_TIME_AT,
    LargeMap,
    Tables,
    expiry_line,
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

# If the clock is set back by less, announced keys stay announced (guess).
CLOCK_STEP_MS = 5_000
# The first line of the expiry index that has a time, and a tag behind all other tags.
FIRST_TIMED, LAST_TAG = (1).to_bytes(8, "big"), b"\xff"


class ExpiryTransaction(LmdbTransaction):
    """A write transaction that also announces and removes expired keys and fields."""

    _expired_keys = _expired_fields = 0

    def announce_expired(self, clock_ms: int, lines_max: int) -> int:
        """Announce keys and fields that have expired by a clock, oldest first: uncount the keys, and report events.

        Their records stay: an epoch may still change them. Returns how many lines of the expiry index were processed;
        `lines_max` if there may be more.
        """
        if clock_ms < self.meta.announced_ms - CLOCK_STEP_MS:
            return self._undo_announcements(clock_ms + CLOCK_STEP_MS, lines_max)
        with self._txn.cursor(db=self._tables.expiry) as lines:
            for done in range(lines_max):
                found = lines.set_range(max(self.meta.announced + b"\0", FIRST_TIMED))
                line = lines.key()
                at_ms = int.from_bytes(line[LINE_TIME_AT], "big")
                if not found or at_ms > clock_ms:
                    if done:  # a key that is put later with an earlier expiry counts as announced
                        self.meta.announced = expiry_line(clock_ms, LAST_TAG, b"")
                    return done
                if line[LINE_TAG_AT] == KEY_LINE:
                    self._announce_keys_at(line[LINE_NAME_AT], at_ms)
                    self.meta.announced = line
                else:
                    self.meta.announced = line
                    self._announce_fields(line, clock_ms)
        return lines_max

    def _announce_keys_at(self, position: bytes, at_ms: int) -> None:
        for at, record in self._keys.records.at(position):
            if expiry_of(record) == at_ms:
                self._keys.counts.add(at, record, -1)
                self._keys.changed_keys.add(name_of(record))
                self._keys.report(name_of(record), KeyEvent.EXPIRED)
                self._expired_keys += 1

    def _announce_fields(self, line: bytes, clock_ms: int) -> None:
        """Announce the expired fields of a large map, given one of its two lines."""
        at_ms, prefix = int.from_bytes(line[LINE_TIME_AT], "big"), line[LINE_NAME_AT]
        at, record = self._map_of(prefix)
        large = None if record is None else LargeMap.of(payload_of(record))
        if line[LINE_TAG_AT] == FIELD_LINE:
            self._txn.delete(line, db=self._tables.expiry)
            if large is not None and large.next_expiry_ms >= at_ms:
                large = None  # its own line comes later
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
        """Return the place and the record of a large map's key; None if the key has another record now."""
        key = self._txn.get(prefix, db=self._tables.maps)
        if key is None:
            return b"", None
        key = checked(key)
        at, record = self._keys.find(key)
        is_same = record is not None and record[FORM_AT] == LARGE and id_of(record) == prefix
        return at, record if is_same else None

    def _undo_announcements(self, until_ms: int, lines_max: int) -> int:
        """Count announced keys that expire after a time again, latest first: the clock was set back."""
        with self._txn.cursor(db=self._tables.expiry) as lines:
            found = lines.prev() if lines.set_range(self.meta.announced + b"\0") else lines.last()
            for done in range(lines_max):
                line = lines.key() if found else b""
                at_ms = int.from_bytes(line[LINE_TIME_AT], "big")
                if at_ms <= until_ms:
                    self.meta.announced = line
                    return done
                found = lines.prev()
                self.meta.announced = lines.key() if found else b""
                if line[LINE_TAG_AT] == KEY_LINE:
                    for at, record in self._keys.records.at(line[LINE_NAME_AT]):
                        if expiry_of(record) == at_ms:
                            self._keys.counts.add(at, record, 1)
        return lines_max

    def remove_expired(self, removals_max: int) -> int:
        """Remove announced keys and fields that expired by this transaction's clock, oldest first, and dropped rows.

        Returns how many keys, fields, elements and pieces were removed; about `removals_max` if there are more.
        """
        self._keys.changed_keys = ChangedKeys()  # announced keys were stored as changed keys already
        done = 0
        with self._txn.cursor(db=self._tables.expiry) as lines:
            while done < removals_max and lines.first():
                line = lines.key()
                tag, name = line[LINE_TAG_AT], line[LINE_NAME_AT]
                if tag == DROPPED_LINE:
                    done += self._remove_dropped(line, name, removals_max - done)
                elif int.from_bytes(line[LINE_TIME_AT], "big") > self._now_ms or line > self.meta.announced:
                    break
                elif tag == KEY_LINE:
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
        """Remove the expired keys at one position, and their lines with them; return how many."""
        removed = 0
        ordinal = 0
        at = position
        while (record := self._keys.records.get(at)) is not None:
            check(record)
            if expiry_of(record) <= self._now_ms and self._keys.counts.is_announced(at, record):
                self._keys.delete(at, record)
                removed += 1  # the last record of the position has its place now, if there is one
            else:
                ordinal += 1
                at = position + ordinal.to_bytes(2, "big")
        return removed

    def _remove_fields(self, prefix: bytes, removals_max: int) -> int:
        """Remove expired fields of a large map, and move its line to the next expiry; return how many."""
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
            removed_here = self._remove_fields_at(prefix + name[FIELD_EXPIRY_POSITION_AT], expire_at_ms)
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

    def _remove_fields_at(self, position: bytes, expire_at_ms: int) -> int:
        removed = 0
        ordinal = 0
        at = position
        while (record := self._keys.fields.get(at)) is not None:
            check(record)
            if expiry_of(record) == expire_at_ms:
                self._maps.delete_field(at, record)
                removed += 1
            else:
                ordinal += 1
                at = position + ordinal.to_bytes(2, "big")
        return removed

    def _remove_dropped(self, line: bytes, prefix: bytes, removals_max: int) -> int:
        """Remove rows of a dropped map, list, set or text, and its line with the last row; return how many."""
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
        self._txn.delete(line, db=self._tables.expiry)
        return max(removed, 1)


def has_expired(
    txn: lmdb.Transaction[bytes], tables: Tables, announced: bytes, announced_to_ms: int, removed_to_ms: int
) -> bool:
    """Tell whether a key or field is to be announced by one clock or removed by another, or rows were dropped."""
    if announced_to_ms < int.from_bytes(announced[LINE_TIME_AT], "big") - CLOCK_STEP_MS:
        return True
    with txn.cursor(db=tables.expiry) as lines:
        if lines.first() and int.from_bytes(lines.key()[LINE_TIME_AT], "big") <= removed_to_ms:
            return True
        found = lines.set_range(max(announced + b"\0", FIRST_TIMED))
        return found and int.from_bytes(lines.key()[LINE_TIME_AT], "big") <= announced_to_ms
