"""Finds the records of keys in one read transaction of an LMDB store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Self

import lmdb

from state_backend.lmdb.record_format import (
    FORM_AT,
    KINDS,
    LARGE_MAP,
    LONG_VALUE_PAYLOAD,
    PIECE_BYTES,
    LargeMap,
    Meta,
    Tables,
    expiry_of,
    find,
    id_in,
    payload_of,
    read_meta,
    read_piece,
)
from state_backend.model.descriptor import Kind
from state_backend.model.errors import WrongKindError
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import store_key_of
from state_backend.native import pages_of
from state_backend.store.store import (
    AppliedEpoch,
    LongValue,
    Snapshot,
)

# One call of a scan or a count ends after so many records, live or not, in addition to the requested number; or after
# so many bytes of records. That takes less than a millisecond or two (measured: 0.4 us a record, 0.1 us a KiB).
VISITS_MAX = 1024
VISITED_BYTES_MAX = 2 << 20


class RecordReader(Snapshot):
    """The records of one epoch, in one read transaction that `renew` replaces."""

    def __init__(
        self,
        begin: Callable[[], lmdb.Transaction[bytes]],
        tables: Tables,
        generation: str,
        now_ms: int,
        environment: lmdb.Environment,
        file: int | None,
        as_of_ms: int | None = None,
    ) -> None:
        self._as_of_ms = as_of_ms
        self._begin = begin
        self._tables = tables
        self._generation = generation
        self._txn = begin()
        self._meta: Meta | None = None  # None until it is read in this version
        self._states: list[str] = []  # their names by number, as of `_meta`
        self._on_close: Callable[[], None] | None = None  # set in a snapshot that `at_time` returned
        self.version = self._txn.id()
        self._clock_ms = self.applied.clock_ms
        self._now_ms = self.clock_at(now_ms)
        self._environment = environment
        self._file = file
        self._can_read = False
        self._pages: Any = None
        self._pages_version = -1

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @property
    def pages(self) -> Any:
        """The store's pages in this version, for the compiled core; None if they cannot be read."""
        if self._pages_version != self.version:
            if self._pages is None and self._file is not None:
                self._pages = pages_of(self._environment, self._file)
            self._pages_version = self.version
            self._can_read = False
            with suppress(lmdb.Error):  # the store is damaged: the next read by py-lmdb raises the error
                self._can_read = self._pages is not None and self._pages.learn(self._txn)
        return self._pages if self._can_read else None

    def renew(self, now_ms: int) -> None:
        self._txn.abort()  # py-lmdb keeps the transaction's reader slot and takes it again: 0.2 us for both
        self._txn = self._begin()
        if self.version != (version := self._txn.id()):
            self._meta = None
            self.version = version
            self._clock_ms = self.applied.clock_ms
        self._now_ms = self.clock_at(now_ms)

    def clock_at(self, now_ms: int) -> int:
        """Return the clock reading of this snapshot: a store of a past moment has that moment's."""
        if self._as_of_ms is not None:
            now_ms = self._as_of_ms
        return now_ms if now_ms > self._clock_ms else self._clock_ms

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()
        else:
            self._txn.abort()

    def at_time(self, now_ms: int, on_close: Callable[[], None]) -> Self:
        self._read_meta()
        copied = copy(self)
        copied._now_ms, copied._on_close = self.clock_at(now_ms), on_close
        copied._pages, copied._pages_version = None, -1  # this snapshot's `_pages` change with its renewals
        return copied

    def _read_meta(self) -> Meta:
        """Return the `applied` record of this version, read once."""
        if self._meta is None:
            self._meta = read_meta(self._txn, self._tables, self._generation)
            self._states = self._meta.names()
        return self._meta

    @property
    def applied(self) -> AppliedEpoch:
        return self._read_meta().applied

    @property
    def owned_slots(self) -> SlotSet:
        slot_ownership = self._read_meta().slot_ownership
        return ALL if slot_ownership is None else slot_ownership.owned

    def _live(self, key: bytes) -> bytes | None:
        """Return a key's record, or None if it is missing or expired."""
        _, record = find(self._txn.get, store_key_of(key), key)
        return record if record is not None and self._is_live(record) else None

    def _is_live(self, record: bytes) -> bool:
        if 0 < expiry_of(record) <= self._now_ms:
            return False
        if record[FORM_AT] != LARGE_MAP:
            return True
        with self._txn.cursor(db=self._tables.field_expiry) as field_expiry:
            return LargeMap.of(payload_of(record)).is_live(field_expiry, self._now_ms)

    def _of_kind(self, key: bytes, kind: Kind) -> bytes | None:
        """Return the record of a live key, or None; WrongKindError if it is of another kind."""
        record = self._live(key)
        if record is not None and KINDS[record[FORM_AT]] is not kind:
            raise WrongKindError(f"{key[:100]!r} holds a {KINDS[record[FORM_AT]]}, not a {kind}")
        return record

    def _long_value(self, payload: bytes) -> LongValue:
        value_id, length = id_in(payload), LONG_VALUE_PAYLOAD.unpack(payload)[1]
        return LongValue(length, partial(self._chunks, value_id))

    def _chunks(self, value_id: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over a range of a long value, a piece at a time."""
        for at in range(start - start % PIECE_BYTES if start < stop else stop, stop, PIECE_BYTES):
            piece = read_piece(self._txn, self._tables, value_id, at // PIECE_BYTES)
            is_inside = start <= at and at + len(piece) <= stop
            yield piece if is_inside else piece[max(0, start - at) : stop - at]
