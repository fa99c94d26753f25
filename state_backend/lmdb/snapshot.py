"""Reading an LMDB store: a view of one epoch, in one read transaction."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain, islice, repeat
from typing import Any
from zlib import crc32

import lmdb

from state_backend.codec import packed_list, packed_map, packed_sorted
from state_backend.codec.checksums import CHECK_BYTES, SOUND, checksum, damaged, opened
from state_backend.lmdb.events import EVENTS, kept_of, portion_name
from state_backend.lmdb.layout import (
    FEW,
    FIELD_POSITION_BYTES,
    ID_BYTES,
    KINDS,
    LARGE,
    LONG,
    LONG_LIST,
    LONG_TEXT,
    MANY,
    NAME_AT,
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
    Tables,
    changed_name,
    expired_name,
    expiry_of,
    field_place,
    field_places,
    find,
    name_of,
    payload_of,
    piece_name,
    ranges_of,
    read_header,
    read_meta,
    records_of_slots,
    sound_rows,
    state_number_of,
)
from state_backend.lmdb.lists import ListBlocks, LongList
from state_backend.lmdb.ranks import Inner, Ranks, place_of_score
from state_backend.lmdb.sizes import sizes
from state_backend.model.descriptor import Kind
from state_backend.model.errors import StoreDamagedError, WrongKindError
from state_backend.model.key_groups import ALL, KeyGroups
from state_backend.model.records import Change, Op
from state_backend.model.slots import PLACE, POSITION_BYTES, POSITIONS, place_of, slot_of
from state_backend.native import pages_of
from state_backend.store import changed_keys
from state_backend.store.changed_keys import EPOCHS_KEPT, REMOVALS_KEPT
from state_backend.store.key_events import Kept, Portion, unpack
from state_backend.store.store import (
    FIELD_POSITIONS,
    Applied,
    Entry,
    LongText,
    Snapshot,
    Text,
    keys_near_any,
    whole,
)

# A step of a scan or a count ends after so many records, live or not, beyond those that it was asked for, or after so
# many bytes of them: well below a millisecond or two (measured: 0.4 us a record, 0.1 us a KiB).
VISITS_MAX = 1024
VISITED_BYTES_MAX = 2 << 20
ALL_FORMS = (1 << len(KINDS)) - 1

# Large sorted sets whose ranks are asked for while an epoch is shown; beyond, those of before are forgotten.
TREES_KEPT = 8

# For fewer fields than these, loops of C take longer to set up than they save (measured).
LOOPS_PAY_FROM = 4


class LmdbSnapshot(Snapshot):
    """A view of an LMDB store: one read transaction, moved on by `renew`."""

    def __init__(
        self,
        begin: Callable[[], lmdb.Transaction[bytes]],
        tables: Tables,
        generation: str,
        now_ms: int,
        environment: lmdb.Environment,
        file: int | None,
    ) -> None:
        self._begin = begin
        self._tables = tables
        self._generation = generation
        self._txn = begin()
        self._meta: Meta | None = None
        self._states: list[str] = []
        self._given_back: Callable[[], None] | None = None  # of one that is lent
        # Of large sorted sets that do not expire, while nothing changes: what they are, and their trees' inner nodes.
        self._trees: dict[bytes, tuple[LargeSet, dict[int, Inner]]] = {}
        self.version = self._txn.id()
        self._clock_ms = self.applied.clock_ms
        self._now_ms = max(now_ms, self._clock_ms)
        self._environment = environment
        self._file = file
        self._can_read = False
        self._pages: Any = None
        self._pages_version = -1

    @property
    def now_ms(self) -> int:
        """The clock reading: what has expired by it is not there."""
        return self._now_ms

    @property
    def pages(self) -> Any:
        """The store's pages of this version, for the compiled core; None where they cannot be read."""
        if self._pages_version != self.version:
            if self._pages is None and self._file is not None:
                self._pages = pages_of(self._environment, self._file)
            self._pages_version = self.version
            self._can_read = False
            with suppress(lmdb.Error):  # the store is damaged: whoever asks py-lmdb hears of it
                self._can_read = self._pages is not None and self._pages.learn(self._txn)
        return self._pages if self._can_read else None

    def renew(self, now_ms: int) -> None:
        self._txn.abort()  # py-lmdb keeps the transaction's reader slot and takes it again: 0.2 us for both
        self._txn = self._begin()
        if self.version != (version := self._txn.id()):
            self._meta = None
            self._trees = {}
            self.version = version
            self._clock_ms = self.applied.clock_ms
        self._now_ms = now_ms if now_ms > self._clock_ms else self._clock_ms

    def close(self) -> None:
        if self._given_back is not None:
            self._given_back()
        else:
            self._txn.abort()

    def lend(self, now_ms: int, given_back: Callable[[], None]) -> LmdbSnapshot:
        self._known()
        lent = copy(self)
        lent._now_ms, lent._given_back = max(now_ms, self._clock_ms), given_back
        lent._pages, lent._pages_version = None, -1  # pages are of one transaction; this one's moves on
        return lent

    def _known(self) -> Meta:
        if self._meta is None:
            self._meta = read_meta(self._txn, self._tables, self._generation)
            self._states = self._meta.names()
        return self._meta

    @property
    def applied(self) -> Applied:
        return self._known().applied

    def events_kept(self) -> Kept | None:
        return kept_of(self._txn.get(EVENTS, db=self._tables.meta))

    def events(self, serial: int) -> Portion | None:
        packed = self._txn.get(portion_name(serial), db=self._tables.meta)
        return None if packed is None else unpack(opened(packed))

    @property
    def key_groups(self) -> KeyGroups:
        slot_ownership = self._known().slot_ownership
        return ALL if slot_ownership is None else slot_ownership.owned

    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        slot_ownership = self._known().slot_ownership
        if slot_ownership is not None and epoch <= slot_ownership.changed_at:
            return None  # a slot that was away may read differently in every key
        epochs = range(epoch + 1, self.applied.epoch + 1)
        if epoch > self.applied.epoch or len(epochs) > EPOCHS_KEPT:
            return None
        get, meta = self._txn.get, self._tables.meta
        return changed_keys.unpack_all(_opened(get(changed_name(each), db=meta)) for each in epochs)

    def expired_since(self, removals: int) -> Sequence[bytes] | None:
        removed = range(removals + 1, self.applied.removals + 1)
        if removals > self.applied.removals or len(removed) > REMOVALS_KEPT:
            return None
        get, meta = self._txn.get, self._tables.meta
        return changed_keys.unpack_all(_opened(get(expired_name(each), db=meta)) for each in removed)

    def _live(self, key: bytes) -> bytes | None:
        """Return a key's record, or None if it is missing or expired."""
        _, record = find(self._txn.get, place_of(key), key)
        return record if record is not None and self._is_live(record) else None

    def _is_live(self, record: bytes) -> bool:
        if 0 < expiry_of(record) <= self._now_ms:
            return False
        if record[14] != LARGE:
            return True
        with self._txn.cursor(db=self._tables.dues) as dues:
            return LargeMap.of(payload_of(record)).is_live(dues, self._now_ms)

    def entry(self, key: bytes) -> Entry | None:
        record = self._live(key)
        return None if record is None else self._entry(record)

    def stored_sizes(self, key: bytes, items_max: int) -> Iterator[int]:
        at, record = find(self._txn.get, place_of(key), key)
        if record is None or not self._is_live(record):
            return iter(())
        return sizes(self._txn, self._tables, at, record, items_max)

    def _entry(self, record: bytes) -> Entry:
        self._known()
        state = self._states[state_number_of(record)]
        return Entry(name_of(record), state, KINDS[record[14]], expiry_of(record) or None)

    def text(self, key: bytes) -> Text | None:
        # The hot path of GET: `place_of` in line, and the record's header read once.
        slot = slot_of(key) if b"{" in key else crc_hqx(key, 0) & 16383
        record = self._txn.get(PLACE.pack(slot, crc32(key)))
        if record is None:
            return None
        if checksum(record) != SOUND:
            raise damaged()
        length, expire_at_ms, _, form = read_header(record)
        if length != len(key) or not record.startswith(key, NAME_AT):  # another key of the same position
            _, record = find(self._txn.get, place_of(key), key)
            if record is None:
                return None
            length, expire_at_ms, _, form = read_header(record)
        if 0 < expire_at_ms <= self._now_ms:
            return None
        if form != VALUE:
            if form == TEXT:
                return self._long_text(payload_of(record))
            if not self._is_live(record):
                return None
            raise WrongKindError(f"{key[:100]!r} holds a {KINDS[form]}, not a value")
        value: bytes = record[NAME_AT + length : -CHECK_BYTES]
        return value

    def _long_text(self, payload: bytes) -> LongText:
        text_id, length = payload[:ID_BYTES][::-1], LONG_TEXT.unpack(payload)[1]
        return LongText(length, partial(self._parts, text_id))

    def _parts(self, text_id: bytes, start: int, stop: int) -> Iterator[bytes]:
        """Iterate over a part of a long text; the pieces that hold it are read one by one."""
        get, blocks = self._txn.get, self._tables.blocks
        for at in range(start - start % PIECE_BYTES if start < stop else stop, stop, PIECE_BYTES):
            piece = get(piece_name(text_id, at // PIECE_BYTES), db=blocks)
            if piece is None:
                raise StoreDamagedError("a piece of a long value is missing in the store; it is made anew from the log")
            piece = opened(piece)
            whole_piece = start <= at and at + len(piece) <= stop
            yield piece if whole_piece else piece[max(0, start - at) : stop - at]

    def _map(self, key: bytes) -> bytes | None:
        """Return the record of a live map, or None."""
        return self._of_kind(key, Kind.MAP)

    def _of_kind(self, key: bytes, kind: Kind) -> bytes | None:
        record = self._live(key)
        if record is not None and KINDS[record[14]] is not kind:
            raise WrongKindError(f"{key[:100]!r} holds a {KINDS[record[14]]}, not a {kind}")
        return record

    def field_texts(self, key: bytes, names: Sequence[bytes]) -> list[Text | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = payload_of(record)
        if record[14] == PACKED:
            return [packed_map.find(payload, name) for name in names]
        found = self._fields(int.from_bytes(payload[:8], "little"), names)
        now_ms = self._now_ms
        return [
            None if record is None or 0 < expiry_of(record) <= now_ms else self._field_text(record) for record in found
        ]

    def _fields(self, map_id: int, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the records of some fields of a large map, or members of a large set, live or not; None: missing."""
        if len(names) < LOOPS_PAY_FROM:
            return [find(self._get_field, field_place(map_id, name), name)[1] for name in names]
        get, table = self._txn.get, self._tables.fields
        found = list(map(get, field_places(map_id, names), repeat(None), repeat(table)))
        for index, (record, name) in enumerate(zip(found, names, strict=True)):
            if record is not None and checksum(record) != SOUND:
                raise damaged()
            if record is not None and not (record.startswith(name, NAME_AT) and read_header(record)[0] == len(name)):
                found[index] = find(self._get_field, field_place(map_id, name), name)[1]  # another one's position, too
        return found

    def _field_text(self, record: bytes) -> Text:
        payload = payload_of(record)
        return payload if record[14] == VALUE else self._long_text(payload)

    def _get_field(self, at: bytes) -> bytes | None:
        record: bytes | None = self._txn.get(at, db=self._tables.fields)
        if record is not None and checksum(record) != SOUND:
            raise damaged()
        return record

    def _field_records(self, payload: bytes, cursor_at: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over (place, record) of a large map's fields, live or not, from a field position on."""
        prefix = payload[:ID_BYTES][::-1]
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if cursor.set_range(prefix + cursor_at.to_bytes(FIELD_POSITION_BYTES, "big")):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        return
                    if checksum(record) != SOUND:
                        raise damaged()
                    yield at, record

    def _live_field_records(self, record: bytes) -> Iterator[bytes]:
        """Iterate over the records of a large map's live fields."""
        for _, each in self._field_records(payload_of(record)):
            if not 0 < expiry_of(each) <= self._now_ms:
                yield each

    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        record = self._map(key)
        if record is None:
            return [None] * len(names)
        payload = payload_of(record)
        if record[14] == PACKED:
            return [None if packed_map.find(payload, name) is None else 0 for name in names]
        found = self._fields(int.from_bytes(payload[:8], "little"), names)
        return [None if each is None or not self._is_live(each) else expiry_of(each) for each in found]

    def map_sizes(self, key: bytes) -> Iterator[int]:
        record = self._map(key)
        if record is None:
            return
        payload = payload_of(record)
        if record[14] == PACKED:
            yield packed_map.count(payload)
            return
        large = LargeMap.of(payload)
        yield large.size
        if large.may_have_expired(self._now_ms):
            expired = self._expired_fields(large)
            while count := sum(1 for _ in islice(expired, VISITS_MAX)):
                yield -count

    def _expired_fields(self, large: LargeMap) -> Iterator[bytes]:
        """Iterate over the records of a large map's fields that have expired and are not yet removed."""
        with self._txn.cursor(db=self._tables.dues) as dues:
            found = dues.set_range(large.prefix)
            while found and (name := dues.key()).startswith(large.prefix):
                due_ms = int.from_bytes(name[ID_BYTES : 2 * ID_BYTES], "big")
                if due_ms > self._now_ms:
                    return
                position = large.prefix + name[2 * ID_BYTES :]
                ordinal, at = 0, position
                while (record := self._get_field(at)) is not None:
                    if expiry_of(record) == due_ms:
                        yield record
                    ordinal += 1
                    at = position + ordinal.to_bytes(2, "big")
                found = dues.next()

    def map_texts(self, key: bytes) -> Iterator[tuple[bytes, Text]]:
        record = self._map(key)
        if record is None:
            return iter(())
        if record[14] == PACKED:
            return packed_map.pairs(payload_of(record))
        return self._large_map_texts(payload_of(record)[:ID_BYTES][::-1])

    def _large_map_texts(self, prefix: bytes) -> Iterator[tuple[bytes, Text]]:
        # The hot path of HGETALL: the record's header is read once.
        now_ms = self._now_ms
        with self._txn.cursor(db=self._tables.fields) as cursor:
            if cursor.set_range(prefix):
                for at, record in cursor.iternext():
                    if not at.startswith(prefix):
                        return
                    if checksum(record) != SOUND:
                        raise damaged()
                    length, expire_at_ms, _, form = read_header(record)
                    if not 0 < expire_at_ms <= now_ms:
                        value_at = NAME_AT + length
                        value = record[value_at:-CHECK_BYTES]
                        yield record[NAME_AT:value_at], value if form == VALUE else self._long_text(value)

    def packed_map(self, key: bytes) -> bytes | None:
        record = self._map(key)
        return payload_of(record) if record is not None and record[14] == PACKED else None

    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, Text]]]:
        record = self._map(key)
        if record is None:
            return 0, []
        if record[14] == PACKED:
            return 0, list(packed_map.pairs(payload_of(record)))
        next_cursor, fields = self._scan_fields(payload_of(record), cursor, count)
        return next_cursor, [(name_of(field), self._field_text(field)) for field in fields]

    def _scan_fields(self, payload: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor and the records of live fields of a large map, or members of a large set."""
        found: list[bytes] = []
        last = b""
        if cursor >= FIELD_POSITIONS:
            return 0, found
        visited_bytes = 0
        for visits, (at, field) in enumerate(self._field_records(payload, cursor)):
            position = at[ID_BYTES : ID_BYTES + FIELD_POSITION_BYTES]
            is_enough = len(found) >= count or visits >= VISITS_MAX + count or visited_bytes >= VISITED_BYTES_MAX
            if is_enough and position != last:
                return int.from_bytes(position, "big"), found
            visited_bytes += len(field)
            last = position
            if not 0 < expiry_of(field) <= self._now_ms:
                found.append(field)
        return 0, found

    def list_size(self, key: bytes) -> int:
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return 0
        payload = payload_of(record)
        return packed_list.count(payload) if record[14] == SHORT else LongList(*LONG_LIST.unpack(payload)).size

    def list_parts(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return (packed_list.part(*each) for each in self._list_blocks(key, start, stop))

    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return chain.from_iterable(packed_list.elements(*each) for each in self._list_blocks(key, start, stop))

    def _list_blocks(self, key: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over (packed list, first, last + 1 in it) for a range of a list."""
        record = self._of_kind(key, Kind.LIST)
        if record is None:
            return iter(())
        payload = payload_of(record)
        if record[14] == SHORT:
            return iter([(payload, start, stop)])
        which = LongList(*LONG_LIST.unpack(payload))
        return ListBlocks(self._txn, self._tables.blocks).parts(which, start, stop)

    # Sets and sorted sets; nothing in them expires by itself, so that their numbers hold.

    def _set(self, key: bytes, kind: Kind) -> tuple[bytes, LargeSet | None]:
        """Return what lies at a set's key: all of a small one, or what a large one is; nothing of a missing one."""
        record = self._of_kind(key, kind)
        if record is None:
            return b"", None
        payload = payload_of(record)
        return (payload, None) if record[14] in (FEW, RANKED) else (b"", LargeSet.of(payload))

    def set_size(self, key: bytes) -> int:
        packed, large = self._set(key, Kind.SET)
        return large.size if large is not None else packed_list.count(packed)

    def members(self, key: bytes) -> Iterator[bytes]:
        packed, large = self._set(key, Kind.SET)
        if large is None:
            return iter(packed_list.elements(packed) if packed else ())
        return (name_of(each) for _, each in self._field_records(large.pack()))

    def are_members(self, key: bytes, members: Sequence[bytes]) -> list[bool]:
        packed, large = self._set(key, Kind.SET)
        if large is None:
            return [bool(packed) and packed_list.has(packed, member) for member in members]
        return [record is not None for record in self._fields(large.set_id, members)]

    def packed_set(self, key: bytes) -> bytes | None:
        return self._set(key, Kind.SET)[0] or None

    def scan_set(self, key: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        packed, large = self._set(key, Kind.SET)
        if large is None:
            return 0, packed_list.elements(packed) if packed else []
        next_cursor, found = self._scan_fields(large.pack(), cursor, count)
        return next_cursor, list(map(name_of, found))

    def _sorted(self, key: bytes) -> tuple[bytes, LargeSet | None, dict[int, Inner]]:
        """Return what `_set` does, and where inner nodes of its tree are kept."""
        if known := self._trees.get(key):
            return b"", *known
        packed, large = self._set(key, Kind.SORTED_SET)
        inner: dict[int, Inner] = {}
        if large is not None and not self._known().applied.expiring:
            if len(self._trees) == TREES_KEPT:
                self._trees = {}
            self._trees[key] = large, inner
        return packed, large, inner

    def _ranks(self, large: LargeSet, inner: dict[int, Inner]) -> Ranks:
        return Ranks(self._txn, self._tables.blocks, large.prefix, inner)

    def sorted_size(self, key: bytes) -> int:
        packed, large, _ = self._sorted(key)
        return large.size if large is not None else packed_sorted.count(packed)

    def scores(self, key: bytes, members: Sequence[bytes]) -> list[float | None]:
        packed, large, _ = self._sorted(key)
        if large is not None:
            return self._scores(large, members)
        found = ((packed_sorted.index(packed, member) if packed else -1) for member in members)
        return [None if at < 0 else packed_sorted.score(packed, at) for at in found]

    def _scores(self, large: LargeSet, members: Sequence[bytes]) -> list[float | None]:
        read = SCORE.unpack_from
        records = self._fields(large.set_id, members)
        return [
            None if record is None else read(record, len(record) - SCORE.size - CHECK_BYTES)[0] for record in records
        ]

    def ranks(self, key: bytes, members: Sequence[bytes]) -> list[int | None]:
        packed, large, inner = self._sorted(key)
        if large is None:
            found = ((packed_sorted.index(packed, member) if packed else -1) for member in members)
            return [None if at < 0 else at for at in found]
        rank = self._ranks(large, inner).rank
        rows = zip(self._scores(large, members), members, strict=True)
        return [None if score is None else rank(score, member) for score, member in rows]

    def rank_of_score(self, key: bytes, score: float, is_after: bool) -> int:
        packed, large, inner = self._sorted(key)
        place = place_of_score(score, is_after)
        if large is not None:
            return large.size if place is None else self._ranks(large, inner).before(place)
        if not packed:
            return 0
        return packed_sorted.count(packed) if place is None else packed_sorted.before(packed, place)

    def rank_of_member(self, key: bytes, member: bytes, is_after: bool) -> int:
        packed, large, inner = self._sorted(key)
        behind = member + b"\0" if is_after else member
        if large is None:
            return packed_sorted.before(packed, (packed_sorted.score(packed, 0), behind)) if packed else 0
        ranks = self._ranks(large, inner)
        ((_, lowest),) = next(ranks.runs(0, 1, is_reversed=False))
        return ranks.before((lowest, behind))

    def sorted_members(
        self, key: bytes, start: int, stop: int, is_reversed: bool = False
    ) -> Iterator[tuple[bytes, float]]:
        packed, large, inner = self._sorted(key)
        if large is not None:
            return chain.from_iterable(self._ranks(large, inner).runs(start, min(stop, large.size), is_reversed))
        found = packed_sorted.members(packed, start, min(stop, packed_sorted.count(packed))) if packed else []
        return iter(found[::-1] if is_reversed else found)

    def packed_sorted(self, key: bytes) -> bytes | None:
        return self._set(key, Kind.SORTED_SET)[0] or None

    def scan_sorted(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        packed, large = self._set(key, Kind.SORTED_SET)
        if large is None:
            return 0, packed_sorted.members(packed, 0, packed_sorted.count(packed)) if packed else []
        next_cursor, found = self._scan_fields(large.pack(), cursor, count)
        return next_cursor, [(name_of(each), SCORE.unpack(payload_of(each))[0]) for each in found]

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
            step = pages.scan(ranges_of(self.key_groups, cursor), *limits, self._now_ms, forms, only_expiring)
            if step is not None:
                return step
        last_at = b""
        left, visits_max, visited_bytes = count, VISITS_MAX + count, 0
        now_ms = self._now_ms
        with self._txn.cursor(db=self._tables.keys) as records:
            for visits, (at, record) in enumerate(self._records(records, cursor)):
                is_enough = left <= 0 or visits >= visits_max or visited_bytes >= VISITED_BYTES_MAX
                if is_enough and (position := at[:POSITION_BYTES]) != last_at[:POSITION_BYTES]:
                    return int.from_bytes(position, "big"), found
                visited_bytes += len(record)
                last_at = at
                length, expire_at_ms, _, form = read_header(record)
                if 0 < expire_at_ms <= now_ms or (form == LARGE and not self._is_live(record)):
                    continue
                left -= 1
                if (kinds is None or KINDS[form] in kinds) and (not only_expiring or expire_at_ms):
                    found.append(record[NAME_AT : NAME_AT + length])
        return 0, found

    def _records(self, records: lmdb.Cursor[bytes], position: int = 0) -> Iterable[tuple[bytes, bytes]]:
        """Iterate over (place, record) of the keys in owned slots, live or not, from a position on."""
        owned = self.key_groups
        if owned != ALL:
            return records_of_slots(records, owned, position)
        return sound_rows(records) if records.set_range(position.to_bytes(POSITION_BYTES, "big")) else ()

    def changes(self) -> Iterator[Change]:
        return self.lend(self._clock_ms, lambda: None)._live_changes()

    def _live_changes(self) -> Iterator[Change]:
        names = self._known().names()
        with self._txn.cursor(db=self._tables.keys) as records:
            for _, record in self._records(records):
                if self._is_live(record):
                    yield from self._changes_of(record, names[state_number_of(record)])

    def _changes_of(self, record: bytes, state: str) -> Iterator[Change]:
        """Return what makes one key; a large map begins with one field where the map itself has an expiry to carry."""
        key, payload, expire_at_ms = name_of(record), payload_of(record), expiry_of(record) or None
        if record[14] == LONG:
            for element in self.list_elements(key, 0, self.list_size(key)):
                yield Change(state, Op.APPEND, key, None, element, expire_at_ms)
            return
        if record[14] == MANY:
            for member in self.members(key):
                yield Change(state, Op.PUT, key, member, b"", expire_at_ms)
            return
        if record[14] == TREE:  # in their order, so that who reads it changes one block after the other
            for member, score in self.sorted_members(key, 0, self.sorted_size(key)):
                yield Change(state, Op.PUT, key, member, packed_sorted.score_text(score), expire_at_ms)
            return
        if record[14] != LARGE:
            value = whole(self._long_text(payload)) if record[14] == TEXT else payload
            yield Change(state, Op.PUT, key, None, value, expire_at_ms)
            return
        if expire_at_ms is not None:
            first = next(self._live_field_records(record))
            packed = packed_map.pack([(name_of(first), whole(self._field_text(first)))])
            yield Change(state, Op.PUT, key, None, packed, expire_at_ms)
        for each in self._live_field_records(record):
            yield Change(state, Op.PUT, key, name_of(each), whole(self._field_text(each)), expiry_of(each) or None)

    def random_keys(self) -> Iterator[bytes | None]:
        return keys_near_any(self.scan, self.key_groups)


def _opened(stored: bytes | None) -> bytes | None:
    """Return a value that may be missing, or empty, without its checksum."""
    return opened(stored) if stored else stored
