"""One write transaction of an LMDB store: the changes of an epoch. `lmdb.expiry` removes expired keys.

`value_writer`, `map_writer`, `list_writer` and `set_writer` write the keys of each kind of state, one at a time.
`bulk_writer` writes values and small maps, many at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import lmdb

from state_backend.codec.checksums import with_checksum
from state_backend.codec.keep_by_order import row_order_of
from state_backend.codec.reductions import reduction_of
from state_backend.lmdb.bulk_writer import BulkWriter
from state_backend.lmdb.events import EventWriter, KeyBefore, events_between, key_before, stale_events
from state_backend.lmdb.folds import Folds
from state_backend.lmdb.key_counts import KeyCounts
from state_backend.lmdb.key_writer import KeyWriter, KindWriter, WrittenState
from state_backend.lmdb.list_writer import ListWriter
from state_backend.lmdb.map_writer import MapWriter
from state_backend.lmdb.ordered_changes import OrderedChanges
from state_backend.lmdb.record_format import (
    LARGE_MAP,
    Meta,
    Tables,
    changed_name,
    checked_rows,
    expired_name,
    find,
    name_of,
    read_header,
    state_number_of,
)
from state_backend.lmdb.set_writer import SetWriter
from state_backend.lmdb.value_writer import ValueWriter
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import KeyConflictError, StoreError
from state_backend.model.records import Op, rows_in
from state_backend.model.slots import store_key_of
from state_backend.store.changed_keys import CHANGED_EPOCHS_MAX, EXPIRY_BATCHES_MAX
from state_backend.store.key_events import KeyEvent

if TYPE_CHECKING:
    import pyarrow as pa

    from state_backend.native.lookup import Pages

FOLD = int(Op.FOLD)
# Limits of a batch: runs that are sorted and written together. In the store's order each page is written once, so the
# limits are large: a million rows of 60 bytes are one batch. A row takes 24 bytes in addition to its run.
ROWS_MAX, BYTES_MAX, RUNS_MAX = 2 << 20, 128 << 20, 1_024
STATE_AND_KEY = itemgetter(0, 2)  # of a row (see `records.rows_in`)


class LmdbTransaction:
    """The changes of one write transaction; `finish` writes the counts that follow from them."""

    def __init__(
        self,
        txn: lmdb.Transaction[bytes],
        tables: Tables,
        meta: Meta,
        now_ms: int,
        counts: KeyCounts | None = None,
    ) -> None:
        self._txn = txn
        self._tables = tables
        self._now_ms = now_ms
        self.meta = meta
        self._keys = KeyWriter(txn, tables, counts or KeyCounts(meta), now_ms)
        values, sets = ValueWriter(self._keys), SetWriter(self._keys)
        self._maps = MapWriter(self._keys, values)
        self._writers: Mapping[Kind, KindWriter] = {
            Kind.VALUE: values,
            Kind.MAP: self._maps,
            Kind.LIST: ListWriter(self._keys),
            Kind.SET: sets,
            Kind.SORTED_SET: sets,
        }
        self._folds = Folds(self._keys, values)
        self._ordered_changes = OrderedChanges(self._keys, self._folds)
        self._states: dict[str, WrittenState] = {}
        self._bulk_writer = BulkWriter(self._keys, self._states)
        self._replaced_numbers: set[int] = set()
        self._touched: set[bytes] = set()

    @property
    def changed(self) -> int:
        """How many changes made a difference so far."""
        return self._keys.changed

    def record_events(self, epoch: int, term: int, batch_bytes: int, events_bytes_max: int) -> None:
        """Record events of keys from now on, as events of an epoch; `finish` writes the last batch."""
        self._keys.events = EventWriter(self._txn, self._tables.meta, epoch, term, batch_bytes, events_bytes_max)

    def store_changed_keys(self, epoch: int) -> None:
        """Store the keys that an epoch changed; delete the changed keys of epochs that are too old."""
        put, delete, meta = self._txn.put, self._txn.delete, self._tables.meta
        last = self.meta.applied.epoch
        for old in range(max(0, last + 1 - CHANGED_EPOCHS_MAX), min(last, epoch - CHANGED_EPOCHS_MAX) + 1):
            delete(changed_name(old), db=meta)
        put(changed_name(epoch), _with_checksum(self._keys.changed_keys.pack()), db=meta)

    def store_expired_keys(self) -> None:
        """Store the keys that this transaction announced, if any, as a batch; delete the oldest batch."""
        if self._keys.changed_keys:
            put, delete, meta = self._txn.put, self._txn.delete, self._tables.meta
            expiry_batches = self.meta.applied.expiry_batches + 1
            put(expired_name(expiry_batches), _with_checksum(self._keys.changed_keys.pack()), db=meta)
            delete(expired_name(max(0, expiry_batches - EXPIRY_BATCHES_MAX)), db=meta)
            self.meta.applied = replace(self.meta.applied, expiry_batches=expiry_batches)

    def finish(self) -> None:
        """Write the `applied` record, and the events."""
        if self._keys.events is not None:
            self._keys.events.finish()
        self._keys.counts.finish()
        self._txn.put(b"applied", self.meta.to_bytes(), db=self._tables.meta)

    def declare(self, states: Sequence[StateDescriptor], replaces: frozenset[str]) -> None:
        """Set the states that changes may name, and the states that the epoch replaces."""
        for state in states:
            self._states[state.name] = WrittenState(
                self.meta.number_of(state.name),
                state.kind,
                state.name in replaces,
                state.length_max,
                reduction_of(state),
                row_order_of(state),
                self._writers[state.kind],
            )
        self._replaced_numbers = {self.meta.state_numbers[name] for name in replaces & self.meta.state_numbers.keys()}

    def apply_all(self, runs: Iterable[pa.RecordBatch], pages: Pages | None) -> None:
        """Apply runs, the changes of each key in their order.

        Args:
            pages: The pages of the version that the transaction began with; None without the compiled core.
        """
        if pages is None or self._replaced_numbers:
            for run in runs:
                self.apply(run)
        else:
            for batch in _batches(runs):
                for run in self._bulk_writer.put_runs(batch, pages):
                    self.apply(run)

    def apply(self, run: pa.RecordBatch) -> None:
        """Apply a run. The changes of one key are contiguous in it, so a map is read and written once."""
        if not self._replaced_numbers and self._bulk_writer.can_take(run):
            run = self._bulk_writer.put_run(run)
        if not run.num_rows:
            return
        get, now_ms, touched, events = self._keys.records.get, self._now_ms, self._touched, self._keys.events
        has_folds = bool((run.column("op").to_numpy() == FOLD).any())
        rows: Iterable[tuple[Any, ...]]
        for (name, key), rows in groupby(rows_in(run), STATE_AND_KEY):
            state = self._states.get(name)
            if state is None:
                raise StoreError(f"a change names the state {name!r}, which is not among {sorted(self._states)}")
            at, record = found = find(get, store_key_of(key), key)
            if record is not None:
                _, expire_at_ms, number, form = read_header(record)
                if number != state.number or form == LARGE_MAP or 0 < expire_at_ms <= now_ms:
                    at, record = self._evict_stale(at, record, key, state)
            keeps_old = True
            if self._replaced_numbers:
                keeps_old = not state.is_replaced or key in touched
                touched.add(key)
            if state.row_order is not None:
                rows = self._ordered_changes.selected(key, record if keeps_old else None, rows, state)
                if not rows:
                    continue
            if events is not None:
                rows = list(rows)
                before = self._before(found, record, rows, state)
                self._maps.has_late_field = False
            if has_folds and state.row_order is None:
                rows = self._folds.as_puts(record if keeps_old else None, list(rows), state)
            state.writer.apply(at, record, rows, state, keeps_old=keeps_old)
            if state.row_order is not None:
                self._ordered_changes.write_orders(key, has_value=find(get, store_key_of(key), key)[1] is not None)
            if events is not None:
                after = find(get, store_key_of(key), key)
                key_events = events_between(before, after[1], self._keys.fields.get)
                if key_events:
                    events.add(key, key_events + self._late_events(*after))

    def _before(
        self,
        found: tuple[bytes, bytes | None],
        record: bytes | None,
        rows: Sequence[tuple[Any, ...]],
        state: WrittenState,
    ) -> KeyBefore:
        """Describe a key before it is changed.

        Args:
            found: Its store key and its record, live or not.
            record: A live one.
        """
        first_events = b""
        at, stale = found
        if stale is not None and record is None and not self._keys.counts.is_announced(at, stale):
            first_events = stale_events(stale, self._now_ms, state_number_of(stale) == state.number)
        return key_before(state.kind, rows, record, first_events, self._keys.fields.get)

    def _late_events(self, at: bytes, record: bytes | None) -> bytes:
        """Return the expiry events of a key or field that is put with an expiry before the announced time.

        `announce_expired` has passed that time, so it will not report them.
        """
        if record is not None and self._keys.counts.is_announced(at, record):
            return bytes((KeyEvent.EXPIRED,))
        return bytes((KeyEvent.FIELDS_EXPIRED,)) if self._maps.has_late_field else b""

    def _evict_stale(self, at: bytes, record: bytes, key: bytes, state: WrittenState) -> tuple[bytes, bytes | None]:
        """Delete a key's record if it has expired, or if it is of another state, which this epoch replaces.

        Returns the store key and the record; None if the record was deleted. KeyConflictError if the key is of a
        state that is not replaced.
        """
        if self._keys.is_live(record):
            number = state_number_of(record)
            if number == state.number:
                return at, record
            if number not in self._replaced_numbers or key in self._touched:
                raise KeyConflictError(self._conflict(key, number, state.number))
            self._keys.changed += 1
        self._keys.delete(at, record)
        return self._keys.find(key)

    def _conflict(self, key: bytes, one: int, other: int) -> str:
        names = self.meta.names()
        return (
            f"the states {names[one]!r} and {names[other]!r} both made the key {key[:100]!r}; "
            f"give them key formats that cannot make the same key"
        )

    def delete_untouched(self) -> None:
        """Delete every key of the replaced states that this epoch did not name."""
        if not any(map(self._keys.counts.may_have_keys, self._replaced_numbers)):
            return
        untouched: list[bytes] = []
        with self._txn.cursor(db=self._tables.keys) as cursor:
            for _, record in self._records(cursor):
                if state_number_of(record) in self._replaced_numbers and (name := name_of(record)) not in self._touched:
                    untouched.append(name)
        for name in untouched:
            at, found = self._keys.find(name)
            if found is not None:
                self._keys.delete(at, found)
                self._keys.changed += 1
                self._keys.report(name, KeyEvent.DELETED)

    def _records(self, cursor: lmdb.Cursor[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Iterate over (store key, record) of all keys that this transaction may change."""
        return checked_rows(cursor)


def _batches(runs: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Group runs into batches of bounded size; empty runs are left out."""
    batch: list[pa.RecordBatch] = []
    rows = size = 0
    for run in runs:
        if batch and (rows + run.num_rows > ROWS_MAX or size + run.nbytes > BYTES_MAX or len(batch) == RUNS_MAX):
            yield batch
            batch, rows, size = [], 0, 0
        if run.num_rows:
            batch.append(run)
            rows += run.num_rows
            size += run.nbytes
    if batch:
        yield batch


def _with_checksum(packed: bytes) -> bytes:
    """Return changed keys with their checksum; UNKNOWN, which is empty, stays empty."""
    return with_checksum(packed) if packed else packed
