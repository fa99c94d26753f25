"""One write transaction of an LMDB store: an epoch's changes. What has expired is noted and removed in `lmdb.expiry`.

Keeps the expiry index, the counts and the changed keys in step with the records (see `lmdb.layout`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from state_backend.codec import packed_list, packed_map, packed_sorted
from state_backend.codec.checksums import CHECK_BYTES, checksum, opened, sealed
from state_backend.codec.reductions import Reduction, folded, reduction_of
from state_backend.lmdb.events import Before, KeyEvents, before, dead_events, what_happened
from state_backend.lmdb.layout import (
    DROPPED_LINE,
    FEW,
    FIELD_POSITION_BYTES,
    HEADER,
    ID_BYTES,
    KEY_LINE,
    LARGE,
    LONG,
    LONG_LIST,
    LONG_TEXT,
    MANY,
    MAP_LINE,
    NAME_AT,
    NEVER,
    NOTE_LINE,
    PACKED,
    PIECE_BYTES,
    RANKED,
    SCORE,
    SHORT,
    TEXT,
    TREE,
    VALUE,
    LargeMap,
    LargeSet,
    Meta,
    Table,
    Tables,
    changed_name,
    due_name,
    expired_name,
    expiry_line,
    expiry_of,
    field_place,
    find,
    id_of,
    make_record,
    name_of,
    payload_of,
    piece_name,
    read_header,
    sound_rows,
    state_number_of,
)
from state_backend.lmdb.lists import ListBlocks, LongList
from state_backend.lmdb.ranks import RankTree, Step
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import KeyConflictError, StoreDamagedError, StoreError
from state_backend.model.records import RUN_ROWS_MAX, Change, Op, positions_in, rows_in
from state_backend.model.slots import POSITION_BYTES, place_of, places_of
from state_backend.native import packing_of
from state_backend.store.changed_keys import EPOCHS_KEPT, REMOVALS_KEPT, ChangedKeys
from state_backend.store.key_events import What

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from state_backend.native.lookup import Pages

PUT, FOLD = int(Op.PUT), int(Op.FOLD)
NEW_VALUE, CHANGED_VALUE = bytes((What.NEW, What.SET)), bytes((What.SET,))
# To find so many fields of a small map one by one takes less time than to take it apart (about).
FINDS_MAX = 4
# What is sorted and written together: in the store's order each of its pages is written once. A row takes 24 bytes
# beside its run. So a million rows of 60 bytes are written in one go.
ROWS_MAX, BYTES_MAX, RUNS_MAX = 2 << 20, 128 << 20, 1_024
# So many records are made, then written, while they are in the processor's cache (measured: 1,000 to 4,000 are alike).
ITEMS_MAX = 2_000
STATE_AND_KEY = itemgetter(0, 2)  # of a row (see `records.rows_in`)


class _State(NamedTuple):
    """A state as a write transaction needs it."""

    number: int
    kind: Kind
    is_replaced: bool
    length_max: int | None
    reduction: Reduction | None


def _unpacked(change: Change, is_sorted: bool) -> dict[bytes, float | None]:
    """Return the members that a change without a field puts."""
    if change.op != PUT or not change.value:
        return {}
    if is_sorted:
        return dict(packed_sorted.scores_of(change.value))
    return dict.fromkeys(packed_list.elements(change.value), 0.0)


def _members_of(record: bytes) -> dict[bytes, float | None]:
    """Return the members of a small set."""
    payload = payload_of(record)
    if record[14] == RANKED:
        return dict(packed_sorted.scores_of(payload))
    return dict.fromkeys(packed_list.elements(payload), 0.0)


class LmdbTransaction:
    """The changes of one write transaction; `finish` writes the counts that belong to them."""

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Tables, meta: Meta, now_ms: int) -> None:
        self._txn = txn
        self._tables = tables
        self._now_ms = now_ms
        self._keys = Table(txn, tables.keys, POSITION_BYTES)
        self._fields = Table(txn, tables.fields, ID_BYTES + FIELD_POSITION_BYTES)
        self._dues = txn.cursor(db=tables.dues)
        self._lists = ListBlocks(txn, tables.blocks)
        self.meta = meta
        self._counts = {number: self.meta.applied.keys.get(name, 0) for name, number in self.meta.state_numbers.items()}
        self._expiring = self.meta.applied.expiring
        self._expiring_maps = self.meta.applied.expiring_maps
        self._has_late_field = False
        self._states: dict[str, _State] = {}
        self._replaced_numbers: set[int] = set()
        self._touched: set[bytes] = set()
        self._changed_keys = ChangedKeys()
        self._events: KeyEvents | None = None
        self._last_position = -1  # of what was applied so far
        self.changed = 0

    def tell_events(self, epoch: int, term: int, portion_bytes: int, kept_bytes_max: int) -> None:
        """Keep what happens to each key from now on, as of an epoch; `finish` writes it."""
        self._events = KeyEvents(self._txn, self._tables.meta, epoch, term, portion_bytes, kept_bytes_max)

    def keep_changed_keys(self, epoch: int) -> None:
        """Write which keys were changed, and delete what is kept of epochs that are too old for it."""
        put, delete, meta = self._txn.put, self._txn.delete, self._tables.meta
        last = self.meta.applied.epoch
        for old in range(max(0, last + 1 - EPOCHS_KEPT), min(last, epoch - EPOCHS_KEPT) + 1):
            delete(changed_name(old), db=meta)
        put(changed_name(epoch), _sealed(self._changed_keys.pack()), db=meta)

    def keep_expired_keys(self) -> None:
        """Write which keys a removal took, or took fields of, if there were any; forget those of an old one."""
        if self._changed_keys:
            put, delete, meta = self._txn.put, self._txn.delete, self._tables.meta
            removals = self.meta.applied.removals + 1
            put(expired_name(removals), _sealed(self._changed_keys.pack()), db=meta)
            delete(expired_name(max(0, removals - REMOVALS_KEPT)), db=meta)
            self.meta.applied = replace(self.meta.applied, removals=removals)

    def finish(self) -> None:
        """Write the `applied` record, and the events."""
        if self._events is not None:
            self._events.finish()
        names = self.meta.names()
        keys = {names[number]: count for number, count in self._counts.items() if count}
        self.meta.applied = replace(
            self.meta.applied, keys=keys, expiring=self._expiring, expiring_maps=self._expiring_maps
        )
        self._txn.put(b"applied", self.meta.to_bytes(), db=self._tables.meta)

    def declare(self, states: Sequence[StateDescriptor], replaces: frozenset[str]) -> None:
        """Learn the states that changes may name, and those whose whole content this epoch brings."""
        for state in states:
            number = self.meta.number_of(state.name)
            is_replaced = state.name in replaces
            self._states[state.name] = _State(number, state.kind, is_replaced, state.length_max, reduction_of(state))
            self._counts.setdefault(number, 0)
        self._replaced_numbers = {self.meta.state_numbers[name] for name in replaces & self.meta.state_numbers.keys()}

    def apply_all(self, runs: Iterable[pa.RecordBatch], pages: Pages | None) -> None:
        """Apply runs; the changes of a key in their order. pages: those that the transaction began with, if any."""
        for some in _together(runs) if pages is not None else ([run] for run in runs):
            for run in some if pages is None else self._put_packed(some, pages):
                self.apply(run)

    def apply(self, run: pa.RecordBatch) -> None:
        """Apply a run. The changes of one key lie together in it, so that a map is read and written once."""
        if self._is_plain(run):
            run = self._put_values(run)
        if not run.num_rows:
            return
        get, now_ms, touched = self._keys.get, self._now_ms, self._touched
        has_folds = bool((run.column("op").to_numpy() == FOLD).any())
        rows: Iterable[tuple[Any, ...]]
        for (name, key), rows in groupby(rows_in(run), STATE_AND_KEY):
            state = self._states.get(name)
            if state is None:
                raise StoreError(f"a change names the state {name!r}, which is not among {sorted(self._states)}")
            at, record = standing = find(get, place_of(key), key)
            if record is not None:
                _, expire_at_ms, number, form = read_header(record)
                if number != state.number or form == LARGE or 0 < expire_at_ms <= now_ms:
                    at, record = self._make_way(at, record, key, state)
            if self._events is not None:
                rows = list(rows)
                was = self._before(standing, record, rows, state)
                self._has_late_field = False
            is_first = True
            if self._replaced_numbers:
                is_first = key not in touched
                touched.add(key)
            if has_folds:
                rows = self._without_folds(None if state.is_replaced and is_first else record, list(rows), state)
            if state.kind is Kind.VALUE:
                *_, last = rows
                self._apply_to_value(at, record, last, state.number)
            elif state.kind is Kind.LIST:
                is_kept = not (state.is_replaced and is_first)
                self._apply_to_list(at, record, list(map(Change._make, rows)), state, is_kept=is_kept)
            elif state.kind is not Kind.MAP:
                is_kept = not (state.is_replaced and is_first)
                self._apply_to_set(at, record, list(map(Change._make, rows)), state, is_kept=is_kept)
            else:
                changes = list(map(Change._make, rows))
                if state.is_replaced and is_first and record is not None:
                    at, record, changes = self._without_other_fields(at, record, changes)
                self._apply_to_map(at, record, changes, state.number)
            if self._events is not None:
                after = find(get, place_of(key), key)
                what = what_happened(was, after[1], self._fields.get)
                if what:
                    self._events.add(key, what + self._late_events(*after))

    def _before(
        self,
        standing: tuple[bytes, bytes | None],
        record: bytes | None,
        rows: Sequence[tuple[Any, ...]],
        state: _State,
    ) -> Before:
        """Look at a key before it is changed; `standing` is what was there, dead or alive, and where."""
        told = b""
        at, stood = standing
        if stood is not None and record is None and not self._is_noted(at, stood):
            told = dead_events(stood, self._now_ms, state_number_of(stood) == state.number)
        return before(state.kind, rows, record, told, self._fields.get)

    def _late_events(self, at: bytes, record: bytes | None) -> bytes:
        """Tell what of a key expires before the time that was noted already: nobody comes by to tell it later."""
        if record is not None and self._is_noted(at, record):
            return bytes((What.EXPIRED,))
        return bytes((What.FIELDS_EXPIRED,)) if self._has_late_field else b""

    def _is_plain(self, run: pa.RecordBatch) -> bool:
        """Tell whether all that a run does is to put values that never expire, of one state that is not replaced.

        Or to fold them in.
        """
        if not run.num_rows or self._replaced_numbers:
            return False
        names, ops = run.column("state").indices.to_numpy(), run.column("op").to_numpy()
        state = self._states.get(run.column("state")[0].as_py())
        return (
            state is not None
            and state.kind is Kind.VALUE
            and bool((names == names[0]).all())
            and (ops[0] == PUT or (ops[0] == FOLD and state.reduction is not None))
            and bool((ops == ops[0]).all())
            and run.column("expire_at_ms").null_count == run.num_rows
            and not run.column("value").null_count
        )

    def _put_values(self, run: pa.RecordBatch) -> pa.RecordBatch:
        """Apply the rows of a plain run at whose keys nothing stands, or a value of the same kind; return the others.

        It does with these rows what `apply` does. Of several at one position only the first is among them: the others
        come after it, in their order. What `_put_packed` does where there is a compiled core, and for values that are
        folded in.
        """
        keys, values = run.column("key").to_pylist(), run.column("value").to_pylist()
        state = self._states[run.column("state")[0].as_py()]
        number = state.number
        if run.column("op")[0].as_py() == FOLD:
            values = self._folded_values(keys, values, state)
        get = self._keys.get
        heads: dict[int, bytes] = {}  # of records, by the length of their keys
        left: list[int] = []
        items: list[tuple[bytes, bytes]] = []
        new_places: list[bytes] = []
        before = b""
        for row, (key, value, at) in enumerate(zip(keys, values, places_of(keys), strict=True)):
            length = len(key)
            head = heads.get(length) or heads.setdefault(length, HEADER.pack(length, 0, number, VALUE))
            start = head + key
            old = get(at)
            new = start + value
            new += checksum(new).to_bytes(CHECK_BYTES, "little")
            if (old is not None and not old.startswith(start)) or len(value) > PIECE_BYTES or at == before:
                left.append(row)
            elif old != new:
                items.append((at, new))
                if old is None:
                    new_places.append(at)
            before = at
        self._put_items(items, {number: new_places})
        import pyarrow as pa

        return run.take(pa.array(left, pa.int64()))

    def _put_packed(self, runs: list[pa.RecordBatch], pages: Pages) -> list[pa.RecordBatch]:
        """Apply the plain rows of some runs as `_put_values` does, all in the store's order; return the others.

        The hot path of an epoch.
        """
        import numpy as np
        import pyarrow as pa

        # What was written in this transaction is not in its first version, whose pages are read.
        positions = [positions_in(run) for run in runs]
        is_untouched = min(int(each[0]) for each in positions) > self._last_position
        self._last_position = max(self._last_position, *(int(each[-1]) for each in positions))
        numbers = [self._plain_states(run) for run in runs]
        if self._replaced_numbers or not any((each >= 0).any() for each in numbers):
            return runs
        order = np.concatenate(positions).argsort(kind="stable")
        packing = packing_of(runs, order, numbers, pages if is_untouched else None, self._keys.get, PIECE_BYTES)
        while (items := packing.take(ITEMS_MAX)) is not None:
            self._put_items(items, packing.new)
        left = [np.frombuffer(rows, np.bool_) for rows in packing.left]
        return [
            run if rows.all() else run.take(pa.array(np.flatnonzero(rows)))
            for run, rows in zip(runs, left, strict=True)
            if rows.any()
        ]

    def _plain_states(self, run: pa.RecordBatch) -> npt.NDArray[np.int32]:
        """Return the numbers of the states that a run's changes may name; -1 for other kinds than values."""
        import numpy as np

        states = map(self._states.get, run.column("state").dictionary.to_pylist())
        numbers = [state.number if state is not None and state.kind is Kind.VALUE else -1 for state in states]
        return np.array(numbers, np.int32)

    def _put_items(self, items: list[tuple[bytes, bytes]], new_places: Mapping[int, list[bytes]]) -> None:
        """Write values that are plain; `new_places` are those where nothing stood, by the number of the state."""
        self._keys.put_many(items)
        self.changed += len(items)
        for number, places in new_places.items():
            self._count_new(number, places)
        if not self._changed_keys.is_full:
            self._changed_keys.extend([name_of(record) for _, record in items])
        if self._events is not None:
            were_free = set(chain.from_iterable(new_places.values()))
            for place, record in items:
                self._events.add(name_of(record), NEW_VALUE if place in were_free else CHANGED_VALUE)

    def _count_new(self, number: int, places: list[bytes]) -> None:
        """Count keys of a state that were put where nothing stood, and do not expire."""
        self._counts[number] += len(places)

    def _folded_values(self, keys: list[bytes], values: list[bytes], state: _State) -> list[bytes]:
        """Return what the rows of a plain run that folds have to put, but for those behind one of their position."""
        assert state.reduction is not None
        get, fold = self._keys.get, state.reduction.fold
        heads: dict[int, bytes] = {}
        made: list[bytes] = []
        for key, value, at in zip(keys, values, places_of(keys), strict=True):
            length = len(key)
            head = heads.get(length) or heads.setdefault(length, HEADER.pack(length, 0, state.number, VALUE))
            old = get(at)
            if old is not None and old.startswith(head + key):
                old = opened(old)[NAME_AT + length :]
                try:
                    value = fold(old, value)
                except (ValueError, ArithmeticError):
                    folded(state.reduction, Change(self._name_of(state), Op.FOLD, key, None, value), old)  # raises
            made.append(value)
        return made

    def _name_of(self, state: _State) -> str:
        return self.meta.names()[state.number]

    def _make_way(self, at: bytes, record: bytes, key: bytes, state: _State) -> tuple[bytes, bytes | None]:
        """Remove what stands at a key if it is dead, or of another state that this epoch replaces; return the place."""
        if self._is_live(record):
            number = state_number_of(record)
            if number == state.number:
                return at, record
            if number not in self._replaced_numbers or key in self._touched:
                raise KeyConflictError(self._conflict(key, number, state.number))
            self.changed += 1
        self._delete_key(at, record)
        return find(self._keys.get, place_of(key), key)

    def _is_live(self, record: bytes) -> bool:
        if 0 < expiry_of(record) <= self._now_ms:
            return False
        return record[14] != LARGE or LargeMap.of(payload_of(record)).is_live(self._dues, self._now_ms)

    def _conflict(self, key: bytes, one: int, other: int) -> str:
        names = self.meta.names()
        return (
            f"the states {names[one]!r} and {names[other]!r} both made the key {key[:100]!r}; "
            f"give them key formats that cannot make the same key"
        )

    # Keys ------------------------------------------------------------------------------------------------------

    def _put_key(self, at: bytes, old: bytes | None, new: bytes) -> None:
        """Write a key's record and keep the expiry index and the counts in step; let go of what the old one had."""
        self._keys.put(at, new)
        self._changed_keys.add(name_of(new))
        if old is None:
            self._count(at, new, 1)
        elif old[4:15] != new[4:15] or new[14] == LARGE:
            self._count(at, old, -1)
            self._count(at, new, 1)
        if old is not None and old[14] >= LARGE and id_of(old) != id_of(new):
            self._drop(old)
            old = old[:14] + b"\0"  # for its expiry; nothing else of it is left
        if new[14] == LARGE:
            self._move_due(LargeMap.of(payload_of(old)).due_ms if old is not None and old[14] == LARGE else 0, new)
        if new[4:12] != (old[4:12] if old is not None else NEVER):
            before, after = expiry_of(old) if old is not None else 0, expiry_of(new)
            self._move_line(at[:POSITION_BYTES], before, after)

    def _is_noted(self, at: bytes, record: bytes) -> bool:
        """Tell whether it was noted that a key expired: then it is in no count."""
        expire_at_ms = expiry_of(record)
        return expire_at_ms > 0 and expiry_line(expire_at_ms, KEY_LINE, at[:POSITION_BYTES]) <= self.meta.noted

    def _count(self, at: bytes, record: bytes, sign: int) -> None:
        """Count a key in, or out; one of which it was noted that it expired is in no count."""
        if self._is_noted(at, record):
            return
        self._counts[state_number_of(record)] += sign
        self._expiring += sign * (expiry_of(record) > 0)
        self._expiring_maps += sign * (record[14] == LARGE and LargeMap.of(payload_of(record)).due_ms > 0)

    def _delete_key(self, at: bytes, record: bytes) -> None:
        self._changed_keys.add(name_of(record))
        self._drop(record)
        self._count(at, record, -1)
        self._keys.delete(at)
        expire_at_ms = expiry_of(record)
        if expire_at_ms:
            self._move_line(at[:POSITION_BYTES], expire_at_ms, 0)

    def _drop(self, record: bytes) -> None:
        """Leave what lies outside of a record, and is no key's any more now, to `lmdb.expiry`."""
        if record[14] < LARGE:
            return
        if record[14] == LARGE and (due_ms := LargeMap.of(payload_of(record)).due_ms):
            self._txn.delete(expiry_line(due_ms, MAP_LINE, id_of(record)), db=self._tables.expiry)
        self._txn.put(expiry_line(0, DROPPED_LINE, id_of(record)), b"", db=self._tables.expiry)

    def _move_line(self, position: bytes, before: int, after: int) -> None:
        """Keep a key's line in the expiry index; one that another key of the same position needs stays."""
        if before and not self._keys.expires_at(position, before):
            self._txn.delete(expiry_line(before, KEY_LINE, position), db=self._tables.expiry)
        if after:
            self._txn.put(expiry_line(after, KEY_LINE, position), b"", db=self._tables.expiry)

    def _move_due(self, before: int, record: bytes) -> None:
        """Keep a large map's line in the expiry index."""
        large = LargeMap.of(payload_of(record))
        if before == large.due_ms:
            return
        if before:
            self._txn.delete(expiry_line(before, MAP_LINE, large.prefix), db=self._tables.expiry)
        if large.due_ms:
            self._txn.put(expiry_line(large.due_ms, MAP_LINE, large.prefix), b"", db=self._tables.expiry)

    def _look_again(self, large: LargeMap, after_ms: int) -> None:
        """Have a map looked at when its next field expires after a time, if its own line was looked at before."""
        if large.due_ms and expiry_line(large.due_ms, MAP_LINE, large.prefix) <= self.meta.noted:
            name = due_name(large.prefix, after_ms + 1)
            if self._dues.set_range(name) and (due := self._dues.key()).startswith(large.prefix):
                line = due[ID_BYTES : 2 * ID_BYTES] + NOTE_LINE + large.prefix
                self._txn.put(line, b"", db=self._tables.expiry)

    @property
    def _noted_ms(self) -> int:
        return int.from_bytes(self.meta.noted[:8], "big")

    # Values ----------------------------------------------------------------------------------------------------

    def _apply_to_value(self, at: bytes, old: bytes | None, row: tuple[Any, ...], number: int) -> None:
        _, op, key, _, value, expire_at_ms = row
        if op == PUT:
            new = self._value_record(key, value or b"", expire_at_ms, number, old)
            if new != old:
                self._put_key(at, old, new)
                self.changed += 1
        elif old is not None:
            self._delete_key(at, old)
            self.changed += 1

    def _value_record(
        self, name: bytes, value: bytes, expire_at_ms: int | None, number: int, old: bytes | None
    ) -> bytes:
        """Make the record of a value, or of a field; a long value is written, unless it stands there already."""
        if len(value) <= PIECE_BYTES:
            return make_record(name, value, expire_at_ms, number, VALUE)
        payload = payload_of(old) if old is not None and old[14] == TEXT else b""
        if not payload or not self._holds(payload, value):
            text_id = self.meta.new_id()
            payload = LONG_TEXT.pack(text_id, len(value))
            for number_of_piece, start in enumerate(range(0, len(value), PIECE_BYTES)):
                name_of_piece = piece_name(text_id.to_bytes(ID_BYTES, "big"), number_of_piece)
                self._txn.put(name_of_piece, sealed(value[start : start + PIECE_BYTES]), db=self._tables.blocks)
        return make_record(name, payload, expire_at_ms, number, TEXT)

    def _holds(self, payload: bytes, value: bytes) -> bool:
        """Tell whether a long text is this value."""
        text_id, length = payload[:ID_BYTES][::-1], LONG_TEXT.unpack(payload)[1]
        return length == len(value) and all(
            value.startswith(self._piece(text_id, number), start)
            for number, start in enumerate(range(0, length, PIECE_BYTES))
        )

    def _piece(self, text_id: bytes, number: int) -> bytes:
        stored = self._txn.get(piece_name(text_id, number), db=self._tables.blocks)
        if stored is None:
            raise StoreDamagedError("a piece of a long value is missing in the store; it is made anew from the log")
        return opened(stored)

    def _text(self, record: bytes) -> bytes:
        """Return the value of a key or of a field as a whole."""
        payload = payload_of(record)
        if record[14] == VALUE:
            return payload
        text_id, length = payload[:ID_BYTES][::-1], LONG_TEXT.unpack(payload)[1]
        pieces = range((length + PIECE_BYTES - 1) // PIECE_BYTES)
        return b"".join(self._piece(text_id, number) for number in pieces)

    # Reducing states -------------------------------------------------------------------------------------------

    def _without_folds(
        self, record: bytes | None, rows: list[tuple[Any, ...]], state: _State
    ) -> Iterable[tuple[Any, ...]]:
        """Make puts of the rows of one key that fold; `record` is what they are folded into."""
        changes = list(map(Change._make, rows))
        stands: dict[bytes, bytes | None] = {}  # by field, after the changes so far; a value's is empty
        if record is not None and record[14] == PACKED and len(rows) > FINDS_MAX:
            stands, record = dict(packed_map.pairs(payload_of(record))), None
        for index, change in enumerate(changes):
            is_dead = change.expire_at_ms is not None and change.expire_at_ms <= self._now_ms
            is_whole = state.kind is Kind.VALUE or change.field is None
            at = b"" if state.kind is Kind.VALUE else change.field or b""
            if change.op == FOLD:
                old = stands[at] if at in stands else self._stands(record, at)
                change = changes[index] = change._replace(op=Op.PUT, value=folded(state.reduction, change, old))
            elif is_whole:
                record, stands = None, {}
            if state.kind is Kind.MAP and is_whole and change.op == PUT and not is_dead:
                stands = dict(packed_map.pairs(change.value or packed_map.EMPTY))
            else:
                stands[at] = change.value if change.op == PUT and not is_dead else None
        return changes

    def _stands(self, record: bytes | None, field: bytes) -> bytes | None:
        """Return the live value that stands at a key, or at a field of a map."""
        if record is None:
            return None
        if record[14] == PACKED:
            return packed_map.find(payload_of(record), field)
        if record[14] != LARGE:
            return self._text(record)
        map_id = LargeMap.of(payload_of(record)).map_id
        _, found = find(self._fields.get, field_place(map_id, field), field)
        return None if found is None or 0 < expiry_of(found) <= self._now_ms else self._text(found)

    # Lists -----------------------------------------------------------------------------------------------------

    def _apply_to_list(
        self, at: bytes, old: bytes | None, changes: list[Change], state: _State, *, is_kept: bool
    ) -> None:
        """Apply the changes of one key: what they append to what is left of the list after the last whole one."""
        appended: list[bytes] = []
        is_dead = False
        for change in changes:
            if is_dead:  # what the change before made had expired when it was made
                is_kept, appended = False, []
            is_dead = change.expire_at_ms is not None and change.expire_at_ms <= self._now_ms
            if change.op == Op.APPEND:
                appended.append(change.value or b"")
            else:
                is_kept = False
                appended = packed_list.elements(change.value) if change.op == Op.PUT and change.value else []
        last = changes[-1]
        if is_kept and old is not None and old[14] == LONG:
            which = self._lists.append(LongList(*LONG_LIST.unpack(payload_of(old))), appended)
            self._put_long_list(at, old, last, which, state)
            return
        elements = [*packed_list.elements(payload_of(old)), *appended] if is_kept and old is not None else appended
        elements = elements[-state.length_max :] if state.length_max else elements
        if not elements:
            if old is not None:
                self._delete_key(at, old)
                self.changed += 1
            return
        packed = packed_list.pack(elements)
        if len(elements) > packed_list.ELEMENTS_MAX or len(packed) > packed_list.BYTES_MAX:
            which = self._lists.append(LongList(self.meta.new_id(), 0, 0), elements)
            self._put_long_list(at, old, last, which, state)
            return
        new = make_record(last.key, packed, last.expire_at_ms, state.number, SHORT)
        if new != old:
            self._put_key(at, old, new)
            self.changed += 1

    def _put_long_list(self, at: bytes, old: bytes | None, last: Change, which: LongList, state: _State) -> None:
        if state.length_max is not None:
            which = self._lists.trim(which, state.length_max)
        new = make_record(last.key, LONG_LIST.pack(*which), last.expire_at_ms, state.number, LONG)
        self._put_key(at, old, new)
        self.changed += 1

    # Sets and sorted sets --------------------------------------------------------------------------------------
    # A set is treated as a sorted one whose scores are all zero, and has no tree.

    def _apply_to_set(
        self, at: bytes, old: bytes | None, changes: list[Change], state: _State, *, is_kept: bool
    ) -> None:
        """Apply the changes of one key: what they put and take, on what is left after the last whole one."""
        is_sorted = state.kind is Kind.SORTED_SET
        scores: dict[bytes, float | None] = {}  # None: is to go
        expire_at_ms = None if old is None else expiry_of(old) or None
        is_dead = False
        for change in changes:
            if is_dead:  # what the change before made had expired when it was made
                is_kept, scores, is_dead = False, {}, False
            if change.field is None:
                is_kept, scores = False, _unpacked(change, is_sorted)
            elif change.op == PUT:
                scores[change.field] = packed_sorted.score_of(change.value or b"") if is_sorted else 0.0
            else:
                scores[change.field] = None
            if change.op == PUT:
                expire_at_ms = change.expire_at_ms
                is_dead = expire_at_ms is not None and expire_at_ms <= self._now_ms
        key = changes[0].key
        if old is not None and old[14] >= LARGE:
            large = LargeSet.of(payload_of(old))
            if not is_kept and any(score is not None for score in scores.values()) and large.size <= RUN_ROWS_MAX:
                scores = dict.fromkeys(self._field_names(old) - scores.keys()) | scores
                is_kept = True
            if is_kept:
                self._change_large_set(at, old, key, scores, expire_at_ms, state, large)
                return
        self._change_small_set(at, old, key, scores, expire_at_ms, state, is_kept=is_kept)

    def _change_small_set(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        scores: dict[bytes, float | None],
        expire_at_ms: int | None,
        state: _State,
        *,
        is_kept: bool,
    ) -> None:
        """Write a set that was small, or is written anew."""
        is_sorted = state.kind is Kind.SORTED_SET
        before = _members_of(old) if old is not None and is_kept else {}
        after = {member: score for member, score in (before | scores).items() if score is not None}
        if not after:
            if old is not None:
                self._delete_key(at, old)
                self.changed += 1
            return
        if len(after) <= packed_sorted.MEMBERS_MAX:
            packed = packed_sorted.packed(after.items()) if is_sorted else packed_list.pack(sorted(after))
            if len(packed) <= packed_sorted.BYTES_MAX:
                new = make_record(key, packed, expire_at_ms, state.number, RANKED if is_sorted else FEW)
                if new != old:
                    self._put_key(at, old, new)
                    self.changed += 1
                return
        self._change_large_set(at, old, key, after, expire_at_ms, state, LargeSet(self.meta.new_id(), 0, 0))

    def _change_large_set(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        scores: Mapping[bytes, float | None],
        expire_at_ms: int | None,
        state: _State,
        large: LargeSet,
    ) -> None:
        """Change members of a large set, which may be a new one, and write its key's record over `old`."""
        is_sorted = state.kind is Kind.SORTED_SET
        size, changed, steps = self._with_members(large, scores, is_sorted)
        self.changed += changed
        if not size:
            if old is not None:
                self._delete_key(at, old)
            return
        next_node = large.next_node
        if steps:
            tree = RankTree(self._txn, self._tables.blocks, large.prefix, next_node)
            tree.change(steps)
            next_node = tree.next_node
        payload = LargeSet(large.set_id, size, next_node).pack()
        new = make_record(key, payload, expire_at_ms, state.number, TREE if is_sorted else MANY)
        if new != old:
            self._put_key(at, old, new)
            self.changed += not changed
        elif changed:
            self._changed_keys.add(key)

    def _with_members(
        self, large: LargeSet, scores: Mapping[bytes, float | None], is_sorted: bool
    ) -> tuple[int, int, list[Step]]:
        """Change the records of members; return how many there are then, how many differ, and the steps in order."""
        get, put = self._fields.get, self._fields.put
        size, changed = large.size, 0
        steps: list[Step] = []
        # In the order of the records: each is found on the page of the one before.
        for place, member in sorted((field_place(large.set_id, member), member) for member in scores):
            score = scores[member]
            at, record = find(get, place, member)
            if score is None:
                if record is None:
                    continue
                self._fields.delete(at)
                size -= 1
            else:
                new = make_record(member, SCORE.pack(score) if is_sorted else b"", None, 0, VALUE)
                if new == record:
                    continue
                put(at, new)
                size += record is None
            changed += 1
            if is_sorted:
                if record is not None:
                    steps.append(((SCORE.unpack(payload_of(record))[0], member), False))
                if score is not None:
                    steps.append(((score, member), True))
        steps.sort()
        return size, changed, steps

    # Maps ------------------------------------------------------------------------------------------------------

    def _without_other_fields(
        self, at: bytes, old: bytes, changes: list[Change]
    ) -> tuple[bytes, bytes | None, list[Change]]:
        """Make the changes of a map's fields those of the whole map: what they do not name goes."""
        key = changes[0].key
        if any(change.field is None for change in changes):
            return at, old, changes
        if expiry_of(old) or self._is_huge(old):
            self._delete_key(at, old)
            return *find(self._keys.get, place_of(key), key), changes
        gone = set(self._field_names(old)).difference(change.field for change in changes)
        return at, old, [Change("", Op.DELETE, key, name) for name in gone] + changes

    def _apply_to_map(self, at: bytes, old: bytes | None, changes: list[Change], number: int) -> None:
        """Apply the changes of one key: whole replacements and clears first, then fields on what is left."""
        key = changes[0].key
        last_whole = max((index for index, change in enumerate(changes) if change.field is None), default=-1)
        if last_whole >= 0:
            whole = changes[last_whole]
            if whole.op == Op.PUT and whole.value is not None and packed_map.count(whole.value):
                self._replace_map(at, old, whole, number)
            elif old is not None:
                self._delete_key(at, old)
                self.changed += 1
            changes = changes[last_whole + 1 :]
            if not changes:
                return
            at, old = self._find_live(key)
        if old is not None and expiry_of(old) and any(change.op != PUT for change in changes):
            # A map that becomes empty in between loses its expiry: one change after the other.
            for change in changes:
                self._change_fields(*self._find_live(key), {change.field or b"": change}, number)
        else:
            self._change_fields(at, old, {change.field or b"": change for change in changes}, number)

    def _find_live(self, key: bytes) -> tuple[bytes, bytes | None]:
        at, record = find(self._keys.get, place_of(key), key)
        if record is not None and not self._is_live(record):
            self._delete_key(at, record)
            return find(self._keys.get, place_of(key), key)
        return at, record

    def _change_fields(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        if old is not None and old[14] == LARGE:
            self._change_large_map(at, old, changes, expiry_of(old))
        else:
            self._change_small_map(at, old, changes, number)

    def _replace_map(self, at: bytes, old: bytes | None, whole: Change, number: int) -> None:
        packed = whole.value or b""
        if packed_map.count(packed) <= packed_map.FIELDS_MAX and len(packed) <= packed_map.BYTES_MAX:
            new = make_record(whole.key, packed, whole.expire_at_ms, number, PACKED)
            if new == old:
                return
            self._put_key(at, old, new)
            self.changed += 1
            return
        fields = dict(packed_map.pairs(packed))
        puts = {name: Change("", Op.PUT, whole.key, name, value) for name, value in fields.items()}
        if old is not None and old[14] == LARGE and not self._is_huge(old):
            gone = self._field_names(old) - fields.keys()
            puts |= {name: Change("", Op.DELETE, whole.key, name) for name in gone}
            self._change_large_map(at, old, puts, whole.expire_at_ms)
        else:
            self._make_large_map(at, old, whole.key, whole.expire_at_ms, number, puts)
            self.changed += 1

    @staticmethod
    def _is_huge(record: bytes) -> bool:
        """Tell of a map that is to be replaced whether it had better be left and written anew.

        To find out which fields go, all their names have to be held.
        """
        return record[14] == LARGE and LargeMap.of(payload_of(record)).size > RUN_ROWS_MAX

    def _field_names(self, record: bytes) -> set[bytes]:
        """Return the names of all fields of a map, or of all members of a large set."""
        payload = payload_of(record)
        if record[14] < LARGE:
            return {name for name, _ in packed_map.pairs(payload)}
        prefix = payload[:ID_BYTES][::-1]
        names = set()
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if cursor.set_range(prefix):
                for at, field in sound_rows(cursor):
                    if not at.startswith(prefix):
                        break
                    names.add(name_of(field))
        return names

    def _change_small_map(self, at: bytes, old: bytes | None, changes: dict[bytes, Change], number: int) -> None:
        before = dict(packed_map.pairs(payload_of(old))) if old is not None else {}
        fields = dict(before)
        expiring = {
            name: change for name, change in changes.items() if change.op == Op.PUT and change.expire_at_ms is not None
        }
        for name, change in changes.items():
            if change.op == Op.PUT:
                fields[name] = change.value or b""
            else:
                fields.pop(name, None)
        self.changed += sum(name in expiring or before.get(name) != fields.get(name) for name in changes)
        key = next(iter(changes.values())).key
        expire_at_ms = expiry_of(old) or None if old is not None else None
        if not fields:
            if old is not None:
                self._delete_key(at, old)
        elif (
            expiring
            or len(fields) > packed_map.FIELDS_MAX
            or (len(packed := packed_map.pack(fields.items())) > packed_map.BYTES_MAX)
        ):
            puts = {name: Change("", Op.PUT, key, name, value) for name, value in fields.items()} | expiring
            self._make_large_map(at, old, key, expire_at_ms, number, puts)
        elif fields != before:
            self._put_key(at, old, make_record(key, packed, expire_at_ms, number, PACKED))

    def _make_large_map(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        expire_at_ms: int | None,
        number: int,
        puts: dict[bytes, Change],
    ) -> None:
        """Write a map as a record per field, and its key's record over `old`."""
        map_id = self.meta.new_id()
        self._txn.put(map_id.to_bytes(ID_BYTES, "big"), sealed(key), db=self._tables.maps)
        large, _ = self._with_fields(LargeMap(map_id, 0, 0, 0), puts)
        self._put_large_map(at, old, key, expire_at_ms, number, large)

    def _change_large_map(self, at: bytes, old: bytes, changes: dict[bytes, Change], expire_at_ms: int | None) -> None:
        large, changed = self._with_fields(LargeMap.of(payload_of(old)), changes)
        self.changed += changed
        if not large.size:
            self._delete_key(at, old)
        elif (
            not self._put_large_map(at, old, name_of(old), expire_at_ms or None, state_number_of(old), large)
            and changed
        ):
            self._changed_keys.add(name_of(old))

    def _put_large_map(
        self, at: bytes, old: bytes | None, key: bytes, expire_at_ms: int | None, number: int, large: LargeMap
    ) -> bool:
        """Write a large map's record; False if it stands there already."""
        self._look_again(large, self._noted_ms)
        new = make_record(key, large.pack(), expire_at_ms, number, LARGE)
        if new == old:
            return False
        self._put_key(at, old, new)
        return True

    # Fields of large maps ------------------------------------------------------------------------------------------

    def _with_fields(self, large: LargeMap, changes: dict[bytes, Change]) -> tuple[LargeMap, int]:
        """Change fields of a large map; return what it is then, and how many changes made a difference."""
        map_id, size, expiring, due_ms = large
        changed = 0
        for name, change in changes.items():
            at, record = find(self._fields.get, field_place(map_id, name), name)
            if change.op == PUT:
                new = self._value_record(name, change.value or b"", change.expire_at_ms, 0, record)
                if new == record:
                    continue
                self._put_field(at, record, new)
                after = expiry_of(new)
                size += record is None
                expiring += after > 0
                if after and not 0 < due_ms <= after:
                    due_ms = after
            elif record is not None:
                self._delete_field(at, record)
                size -= 1
            else:
                continue
            expiring -= record is not None and expiry_of(record) > 0
            changed += 1
        return LargeMap(map_id, size, expiring, due_ms if expiring else 0), changed

    def _put_field(self, at: bytes, old: bytes | None, new: bytes) -> None:
        self._fields.put(at, new)
        if old is not None and old[14] == TEXT and id_of(old) != id_of(new):
            self._drop(old)
        before, after = expiry_of(old) if old is not None else 0, expiry_of(new)
        if before != after:
            self._move_field_due(at, before, after)
            self._has_late_field |= 0 < after <= self._noted_ms

    def _delete_field(self, at: bytes, record: bytes) -> None:
        self._drop(record)
        self._fields.delete(at)
        if expire_at_ms := expiry_of(record):
            self._move_field_due(at, expire_at_ms, 0)

    def _move_field_due(self, at: bytes, before: int, after: int) -> None:
        """Keep the row that says when a field expires; one that another field of the same position needs stays."""
        position = at[: ID_BYTES + FIELD_POSITION_BYTES]
        prefix, position_in_map = position[:ID_BYTES], position[ID_BYTES:]
        if before and not self._fields.expires_at(position, before):
            self._txn.delete(due_name(prefix, before, position_in_map), db=self._tables.dues)
        if after:
            self._txn.put(due_name(prefix, after, position_in_map), b"", db=self._tables.dues)

    # Whole states ------------------------------------------------------------------------------------------------

    def remove_untouched(self) -> None:
        """Delete every key of the replaced states that this epoch did not name."""
        if not any(map(self._may_hold, self._replaced_numbers)):
            return
        gone: list[bytes] = []
        with self._txn.cursor(db=self._tables.keys) as cursor:
            for _, record in self._records(cursor):
                if state_number_of(record) in self._replaced_numbers and (name := name_of(record)) not in self._touched:
                    gone.append(name)
        for name in gone:
            at, found = find(self._keys.get, place_of(name), name)
            if found is not None:
                self._delete_key(at, found)
                self.changed += 1
                self._tell(name, What.DELETED)

    def _tell(self, key: bytes, *what: What) -> None:
        """Note what happened to a key, if anybody wants to know."""
        if self._events is not None:
            self._events.add(key, bytes(what))

    def _may_hold(self, number: int) -> bool:
        """Tell whether a state may have keys where this transaction works; what was noted is in no count."""
        return bool(self._counts.get(number) or self.meta.noted)

    def _records(self, cursor: lmdb.Cursor[bytes]) -> Iterable[tuple[bytes, bytes]]:
        """Iterate over (place, record) of all keys where this transaction works."""
        return sound_rows(cursor)


def _together(runs: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Gather runs that may be held in memory together; without empty ones."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for run in runs:
        if held and (rows + run.num_rows > ROWS_MAX or size + run.nbytes > BYTES_MAX or len(held) == RUNS_MAX):
            yield held
            held, rows, size = [], 0, 0
        if run.num_rows:
            held.append(run)
            rows += run.num_rows
            size += run.nbytes
    if held:
        yield held


def _sealed(packed: bytes) -> bytes:
    """Return changed keys with their checksum; what stands for unknown ones stays empty."""
    return sealed(packed) if packed else packed
