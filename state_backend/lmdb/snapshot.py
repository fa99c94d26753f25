"""A view of one epoch of an LMDB store: keys of any kind, scans, and the keys that epochs changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import lmdb

from state_backend.codec import packed_map, packed_sorted
from state_backend.codec.checksums import CHECK_BYTES, checked
from state_backend.lmdb.events import EVENTS, batch_name, stored_event_batches_of
from state_backend.lmdb.list_reader import ListReader
from state_backend.lmdb.map_reader import MapReader
from state_backend.lmdb.order_table import OrderPositions, OrderTable, with_orders
from state_backend.lmdb.record_format import (
    FIRST_LARGE,
    FORM_AT,
    KINDS,
    LARGE_MAP,
    LARGE_SET,
    LARGE_SORTED_SET,
    LONG_LIST,
    LONG_VALUE,
    NAME_AT,
    changed_name,
    checked_rows,
    expired_name,
    expiry_of,
    find,
    name_of,
    payload_of,
    ranges_of,
    read_header,
    records_of_slots,
    state_number_of,
)
from state_backend.lmdb.record_reader import VISITED_BYTES_MAX, VISITS_MAX
from state_backend.lmdb.sizes import sizes
from state_backend.lmdb.sorted_set_reader import SortedSetReader
from state_backend.lmdb.value_reader import ValueReader
from state_backend.model.descriptor import Kind
from state_backend.model.records import Change, Op, Row, runs_of_rows
from state_backend.model.slot_set import ALL
from state_backend.model.slots import POSITION_BYTES, POSITIONS, store_key_of
from state_backend.store import changed_keys
from state_backend.store.changed_keys import CHANGED_EPOCHS_MAX, EXPIRY_BATCHES_MAX
from state_backend.store.key_events import EventBatch, StoredEventBatches, unpack
from state_backend.store.store import (
    KeyInfo,
    as_bytes,
    random_key_steps,
)

if TYPE_CHECKING:
    import pyarrow as pa

ALL_FORMS = (1 << len(KINDS)) - 1


class LmdbSnapshot(ValueReader, MapReader, ListReader, SortedSetReader):
    """A view of an LMDB store: a read transaction, which `renew` replaces by one of the newest epoch."""

    def key_info(self, key: bytes) -> KeyInfo | None:
        record = self._live(key)
        if record is None:
            return None
        self._read_meta()
        state = self._states[state_number_of(record)]
        return KeyInfo(name_of(record), state, KINDS[record[FORM_AT]], expiry_of(record) or None)

    def stored_record(self, key: bytes) -> bytes | None:
        record = self._live(key)
        return None if record is None else record[:-CHECK_BYTES]

    def stored_sizes(self, key: bytes, items_max: int) -> Iterator[int]:
        at, record = find(self._txn.get, store_key_of(key), key)
        if record is None or not self._is_live(record):
            return iter(())
        return sizes(self._txn, self._tables, at, record, items_max)

    def stored_event_batches(self) -> StoredEventBatches | None:
        return stored_event_batches_of(self._txn.get(EVENTS, db=self._tables.meta))

    def events(self, serial: int) -> EventBatch | None:
        packed = self._txn.get(batch_name(serial), db=self._tables.meta)
        return None if packed is None else unpack(checked(packed))

    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        slot_ownership = self._read_meta().slot_ownership
        if slot_ownership is not None and epoch <= slot_ownership.changed_at:
            return None  # the slots have changed since: any key of a loaded slot may have changed
        epochs = range(epoch + 1, self.applied.epoch + 1)
        if epoch > self.applied.epoch or len(epochs) > CHANGED_EPOCHS_MAX:
            return None
        get, meta = self._txn.get, self._tables.meta
        return changed_keys.unpack_all(_checked(get(changed_name(each), db=meta)) for each in epochs)

    def expired_since(self, expiry_batches: int) -> Sequence[bytes] | None:
        removed = range(expiry_batches + 1, self.applied.expiry_batches + 1)
        if expiry_batches > self.applied.expiry_batches or len(removed) > EXPIRY_BATCHES_MAX:
            return None
        get, meta = self._txn.get, self._tables.meta
        return changed_keys.unpack_all(_checked(get(expired_name(each), db=meta)) for each in removed)

    def scan(
        self, cursor: int, count: int, kinds: Collection[Kind] | None = None, *, only_expiring: bool = False
    ) -> tuple[int, list[bytes]]:
        found: list[bytes] = []
        if cursor >= POSITIONS:
            return 0, found
        if (pages := self.pages) is not None:
            forms = ALL_FORMS if kinds is None else sum(1 << form for form, kind in enumerate(KINDS) if kind in kinds)
            limits = (count, VISITS_MAX + count, VISITED_BYTES_MAX)
            step: tuple[int, list[bytes]] | None
            step = pages.scan(ranges_of(self.owned_slots, cursor), *limits, self._now_ms, forms, only_expiring)
            if step is not None:
                return step
        last_at = b""
        remaining, visits_max, visited_bytes = count, VISITS_MAX + count, 0
        now_ms = self._now_ms
        with self._txn.cursor(db=self._tables.keys) as records:
            for visits, (at, record) in enumerate(self._records(records, cursor)):
                is_enough = remaining <= 0 or visits >= visits_max or visited_bytes >= VISITED_BYTES_MAX
                if is_enough and (position := at[:POSITION_BYTES]) != last_at[:POSITION_BYTES]:
                    return int.from_bytes(position, "big"), found
                visited_bytes += len(record)
                last_at = at
                length, expire_at_ms, _, form = read_header(record)
                if 0 < expire_at_ms <= now_ms or (form == LARGE_MAP and not self._is_live(record)):
                    continue
                remaining -= 1
                if (kinds is None or KINDS[form] in kinds) and (not only_expiring or expire_at_ms):
                    found.append(record[NAME_AT : NAME_AT + length])
        return 0, found

    def _records(self, records: lmdb.Cursor[bytes], position: int = 0) -> Iterable[tuple[bytes, bytes]]:
        """Iterate over (store key, record) of the keys in owned slots, live or not, from a position on."""
        owned = self.owned_slots
        if owned != ALL:
            return records_of_slots(records, owned, position)
        return checked_rows(records) if records.set_range(position.to_bytes(POSITION_BYTES, "big")) else ()

    def changes(self) -> Iterator[Change]:
        names = self._read_meta().names()
        for _, number, op, key, field, value, expire_at_ms in self._live_rows(names):
            yield Change(names[number], Op(op), key, field, value, expire_at_ms)

    def runs(self, states: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return runs_of_rows(self._live_rows(states), states)

    def _live_rows(self, states: Sequence[str]) -> Iterator[Row]:
        """Iterate over the rows that build this state. Most records are one row; this function decodes them itself."""
        view = self.at_time(self._clock_ms, lambda: None)
        names, now_ms, put = self._read_meta().names(), self._clock_ms, int(Op.PUT)
        numbers = [states.index(name) if name in states else -1 for name in names]
        orders = OrderTable(self._txn, self._tables.orders)
        positions = None if orders.is_empty else OrderPositions(self._txn, self._tables.orders)
        with self._txn.cursor(db=self._tables.keys) as records:
            for at, record in self._records(records):
                length, expire_at_ms, number, form = read_header(record)
                position = int.from_bytes(at[:POSITION_BYTES], "big")
                if positions is not None and positions.has(at[:POSITION_BYTES]):
                    if view._is_live(record):
                        for change in with_orders(orders, name_of(record), view._changes_of(record), KINDS[form]):
                            yield (position, numbers[number], *change)
                    continue
                if form < FIRST_LARGE:
                    if not 0 < expire_at_ms <= now_ms:
                        start = NAME_AT + length
                        key, value = record[NAME_AT:start], record[start:-CHECK_BYTES]
                        yield position, numbers[number], put, key, None, value, expire_at_ms or None
                elif view._is_live(record):
                    for change in view._changes_of(record):
                        yield (position, numbers[number], *change)

    def _changes_of(self, record: bytes) -> Iterator[tuple[Op, bytes, bytes | None, bytes, int | None]]:
        """Iterate over the changes that build a key; the changes lack their state.

        For a large map that expires as a whole, the first change puts one field, which sets the map's expiry.
        """
        key, payload, expire_at_ms = name_of(record), payload_of(record), expiry_of(record) or None
        if record[FORM_AT] < FIRST_LARGE:
            yield (Op.PUT, key, None, payload, expire_at_ms)
            return
        if record[FORM_AT] == LONG_LIST:
            for element in self.list_elements(key, 0, self.list_size(key)):
                yield (Op.APPEND, key, None, element, expire_at_ms)
            return
        if record[FORM_AT] == LARGE_SET:
            for member in self.members(key):
                yield (Op.PUT, key, member, b"", expire_at_ms)
            return
        if record[FORM_AT] == LARGE_SORTED_SET:
            # In the order of scores: a store that applies the changes fills one node of the tree after another.
            for member, score in self.sorted_members(key, 0, self.sorted_size(key)):
                yield (Op.PUT, key, member, packed_sorted.score_text(score), expire_at_ms)
            return
        if record[FORM_AT] == LONG_VALUE:
            yield (Op.PUT, key, None, as_bytes(self._long_value(payload)), expire_at_ms)
            return
        if expire_at_ms is not None:
            first = next(self._live_field_records(record))
            packed = packed_map.pack([(name_of(first), as_bytes(self._lazy_field(first)))])
            yield (Op.PUT, key, None, packed, expire_at_ms)
        for each in self._live_field_records(record):
            yield (Op.PUT, key, name_of(each), as_bytes(self._lazy_field(each)), expiry_of(each) or None)

    def random_keys(self) -> Iterator[bytes | None]:
        return random_key_steps(self.scan, self.owned_slots)


def _checked(stored: bytes | None) -> bytes | None:
    """Return a value without its checksum; a missing or empty one as it is."""
    return checked(stored) if stored else stored
