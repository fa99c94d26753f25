"""A store in a plain dictionary, which each epoch copies. Tests compare the LMDB store with it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from random import choice
from secrets import token_hex
from typing import NamedTuple, Self

from state_backend.codec import packed_list, packed_map, packed_sorted
from state_backend.codec.keep_by_order import OrderedList, pack, row_order_of, unpack
from state_backend.codec.reductions import folded, reduction_of
from state_backend.model.descriptor import Kind, StateDescriptor
from state_backend.model.errors import KeyConflictError, StoreError, WrongKindError
from state_backend.model.records import Change, Op, changes_in
from state_backend.model.slot_set import ALL, SlotSet
from state_backend.model.slots import field_hash_position, hash_position, slot_of
from state_backend.store.changed_keys import CHANGED_EPOCHS_MAX, EXPIRY_BATCHES_MAX
from state_backend.store.store import (
    READ_TOGETHER_BYTES_MAX,
    AppliedEpoch,
    EpochChanges,
    KeyInfo,
    Snapshot,
    Store,
    Value,
)

SETS = (Kind.SET, Kind.SORTED_SET)
# As in `lmdb.expiry`.
CLOCK_STEP_MS = 5_000


class _StoredField(NamedTuple):
    """A field of a map."""

    value: bytes
    expire_at_ms: int | None


class _Orders(dict[bytes | None, tuple[bytes, ...]]):
    """The orders of an ordered state's values, by field; of a list's elements under None.

    All instances are equal: a change of an order alone does not change the key, because readers do not see orders.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Orders)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _StoredKey(NamedTuple):
    """A key's content. It is never changed in place, so snapshots may share it."""

    state: str
    kind: Kind
    value: bytes
    fields: Mapping[bytes, _StoredField]
    expire_at_ms: int | None
    elements: tuple[bytes, ...] = ()
    scores: Mapping[bytes, float] = {}  # of a set: all zero
    orders: _Orders = _Orders()

    @property
    def expiries(self) -> list[int]:
        """The times at which the key and its fields expire."""
        each = (self.expire_at_ms, *(field.expire_at_ms for field in self.fields.values()))
        return [at_ms for at_ms in each if at_ms is not None]

    @property
    def ranking(self) -> list[tuple[float, bytes]]:
        """The (score, member) pairs of a set in their order."""
        return sorted((score, member) for member, score in self.scores.items())


def _is_live(expire_at_ms: int | None, now_ms: int) -> bool:
    return expire_at_ms is None or expire_at_ms > now_ms


def _live_part(stored: _StoredKey | None, now_ms: int) -> _StoredKey | None:
    """Return a key without its expired fields; None if the key has expired."""
    if stored is None or not _is_live(stored.expire_at_ms, now_ms):
        return None
    if stored.kind is Kind.MAP and not all(_is_live(field.expire_at_ms, now_ms) for field in stored.fields.values()):
        live = {name: each for name, each in stored.fields.items() if _is_live(each.expire_at_ms, now_ms)}
        return stored._replace(fields=live) if live else None
    return stored


class MemoryStore(Store):
    """A store in this process's memory."""

    def __init__(self, generation: str) -> None:
        self._keys: dict[bytes, _StoredKey] = {}
        self._applied = AppliedEpoch(generation)
        self._changed: dict[int, Sequence[bytes]] = {}
        self._expired: dict[int, Sequence[bytes]] = {}
        self._version = 0
        self._announced_ms = 0
        self._owned_slots = ALL
        self._lineage = token_hex(8)

    @property
    def applied(self) -> AppliedEpoch:
        return self._applied

    @property
    def lineage(self) -> str:
        return self._lineage

    def own(self, slots: SlotSet) -> None:
        """Own some slots only: keys in other slots are neither counted nor in snapshots."""
        self._owned_slots = slots
        self._count(self._applied)

    def _owned(self) -> dict[bytes, _StoredKey]:
        if self._owned_slots == ALL:
            return self._keys
        return {key: stored for key, stored in self._keys.items() if slot_of(key) in self._owned_slots}

    def apply(self, epoch: EpochChanges, states: Sequence[StateDescriptor]) -> int:
        states_by_name = {state.name: state for state in states}
        stored = dict(self._keys)
        touched: set[bytes] = set()
        changed = 0
        for run in epoch.runs:
            for change in changes_in(run):
                if change.state not in states_by_name:
                    raise StoreError(
                        f"a change names the state {change.state!r}, which is not among {sorted(states_by_name)}"
                    )
                old = base = _live_part(stored.get(change.key), epoch.clock_ms)
                if base is not None and base.state in epoch.replaces and change.key not in touched:
                    base = None
                touched.add(change.key)
                if base is not None and base.state != change.state:
                    raise KeyConflictError(_conflict(change, base.state))
                new = _after_change(base, change, states_by_name[change.state])
                changed += new != old
                if new is None:
                    stored.pop(change.key, None)
                else:
                    stored[change.key] = new
        for key in [key for key, old in stored.items() if old.state in epoch.replaces and key not in touched]:
            del stored[key]
            changed += 1
        differ = [key for key in self._keys.keys() | stored.keys() if self._keys.get(key) != stored.get(key)]
        retained = {each: keys for each, keys in self._changed.items() if each > epoch.epoch - CHANGED_EPOCHS_MAX}
        self._changed = {**retained, epoch.epoch: differ}
        self._keys = stored
        self._count(replace(self._applied, epoch=epoch.epoch, term=epoch.term, clock_ms=epoch.clock_ms))
        return changed

    def expire(self, now_ms: int, removals_max: int) -> int:
        """Announce and remove all expired keys and fields at once, regardless of `removals_max`."""
        clock_ms, before_ms = self._applied.clock_ms, self._announced_ms
        announced_ms = max(now_ms, clock_ms)
        is_set_back = announced_ms < before_ms - CLOCK_STEP_MS
        self._announced_ms = announced_ms + CLOCK_STEP_MS if is_set_back else max(announced_ms, before_ms)
        expiring = [
            key
            for key, stored in self._keys.items()
            if any(before_ms < expiry <= self._announced_ms for expiry in stored.expiries)
        ]
        expired_keys = sum(before_ms < (self._keys[key].expire_at_ms or 0) <= self._announced_ms for key in expiring)
        remaining = {key: _live_part(stored, clock_ms) for key, stored in self._keys.items()}
        expired_fields = sum(
            len(stored.fields) - len(now.fields if (now := remaining[key]) else ())
            for key, stored in self._keys.items()
            # The fields of an expired key are removed with the key.
            if _is_live(stored.expire_at_ms, clock_ms)
        )
        done = len(expiring) + sum(remaining[key] != stored for key, stored in self._keys.items())
        self._keys = {key: stored for key, stored in remaining.items() if stored is not None}
        applied = self._applied
        if expiring:
            applied = replace(applied, expiry_batches=applied.expiry_batches + 1)
            retained = {
                each: keys for each, keys in self._expired.items() if each > applied.expiry_batches - EXPIRY_BATCHES_MAX
            }
            self._expired = {**retained, applied.expiry_batches: expiring}
        if done or self._announced_ms < before_ms:
            applied = replace(
                applied,
                expired_keys=applied.expired_keys + expired_keys,
                expired_fields=applied.expired_fields + expired_fields,
            )
            self._count(applied)
        return done

    def _is_counted(self, stored: _StoredKey) -> bool:
        return stored.expire_at_ms is None or stored.expire_at_ms > self._announced_ms

    def _count(self, applied: AppliedEpoch) -> None:
        counted = list(filter(self._is_counted, self._owned().values()))
        keys = Counter(each.state for each in counted)
        expiring = sum(each.expire_at_ms is not None for each in counted)
        expiring_maps = sum(any(field.expire_at_ms is not None for field in each.fields.values()) for each in counted)
        self._applied = replace(applied, keys=dict(keys), expiring=expiring, expiring_maps=expiring_maps)
        self._version += 1

    def snapshot(self, now_ms: int) -> MemorySnapshot:
        return MemorySnapshot(self, now_ms)

    def close(self) -> None:
        self._keys = {}


def _conflict(change: Change, other: str) -> str:
    return (
        f"the states {other!r} and {change.state!r} both made the key {change.key[:100]!r}; "
        f"give them key formats that cannot make the same key"
    )


def _after_ordered_fold(old: _StoredKey | None, change: Change, state: StateDescriptor) -> _StoredKey | None:
    """Return a key after a FOLD of an ordered state."""
    row_order = row_order_of(state)
    assert row_order is not None
    order, value = unpack(change)
    orders = _Orders(old.orders if old is not None else {})
    if state.kind is not Kind.LIST:
        is_kept = old is not None and (change.field is None or change.field in old.fields) and change.field in orders
        if not row_order.replaces(order, orders[change.field][0] if is_kept else None):
            return old
        orders[change.field] = (order,)
        new = _after_change(old, change._replace(op=Op.PUT, value=value), state)
        return None if new is None else new._replace(orders=orders)
    before = old.elements if old is not None else ()
    current = OrderedList(row_order, orders.get(None, ()))
    if not current.add(order, value):
        return old
    elements = tuple(element if isinstance(element, bytes) else before[element] for element in current.elements)
    orders[None] = tuple(current.orders)
    return _StoredKey(change.state, Kind.LIST, b"", {}, change.expire_at_ms, elements, {}, orders)


def _after_change(old: _StoredKey | None, change: Change, state: StateDescriptor) -> _StoredKey | None:
    """Return a key after a change; None if it is deleted."""
    kind = state.kind
    if change.op == Op.FOLD and state.by is not None:
        return _after_ordered_fold(old, change, state)
    if change.op == Op.FOLD:
        change = change._replace(op=Op.PUT, value=folded(reduction_of(state), change, _folded_into(old, change, kind)))
    if change.op == Op.CLEAR or (change.op == Op.DELETE and change.field is None):
        return None
    if kind is Kind.VALUE:
        return _StoredKey(change.state, kind, change.value or b"", {}, change.expire_at_ms)
    if kind is Kind.LIST:
        if change.op == Op.PUT:
            elements = tuple(packed_list.elements(change.value or packed_list.EMPTY))
        else:
            elements = (*(old.elements if old is not None else ()), change.value or b"")
        elements = elements[-state.length_max :] if state.length_max else elements
        return _StoredKey(change.state, kind, b"", {}, change.expire_at_ms, elements) if elements else None
    if kind in SETS:
        return _set_after_change(old, change, kind)
    if change.field is None:
        pairs = packed_map.pairs(change.value or packed_map.EMPTY)
        fields = {name: _StoredField(value, None) for name, value in pairs}
        return _StoredKey(change.state, kind, b"", fields, change.expire_at_ms) if fields else None
    fields = dict(old.fields) if old is not None else {}
    if change.op == Op.DELETE:
        fields.pop(change.field, None)
    else:
        fields[change.field] = _StoredField(change.value or b"", change.expire_at_ms)
    if not fields:
        return None
    if old is None:
        return _StoredKey(change.state, kind, b"", fields, None)
    return _StoredKey(change.state, kind, b"", fields, old.expire_at_ms, orders=old.orders)


def _set_after_change(old: _StoredKey | None, change: Change, kind: Kind) -> _StoredKey | None:
    """Return a set or sorted set after a change; None if it is empty then."""
    expire_at_ms = change.expire_at_ms
    if change.field is None:
        if kind is Kind.SET:
            scores = dict.fromkeys(packed_list.elements(change.value or packed_list.EMPTY), 0.0)
        else:
            scores = packed_sorted.scores_of(change.value or b"")
    else:
        scores = dict(old.scores) if old is not None else {}
        if change.op == Op.PUT:
            scores[change.field] = 0.0 if kind is Kind.SET else packed_sorted.score_of(change.value or b"")
        else:
            scores.pop(change.field, None)
            expire_at_ms = old.expire_at_ms if old is not None else None
    return _StoredKey(change.state, kind, b"", {}, expire_at_ms, (), scores) if scores else None


def _folded_into(old: _StoredKey | None, change: Change, kind: Kind) -> bytes | None:
    """Return the value that a change is folded into."""
    if old is None or kind is Kind.VALUE:
        return None if old is None else old.value
    each = old.fields.get(change.field or b"")
    return None if each is None else each.value


class MemorySnapshot(Snapshot):
    """A view of a memory store: its dictionary as of one epoch. The first scan sorts the keys by position."""

    def __init__(self, store: MemoryStore, now_ms: int) -> None:
        self._store = store
        self._order: list[tuple[int, bytes]] = []
        self._on_close: Callable[[], None] = lambda: None
        self.renew(now_ms)

    def renew(self, now_ms: int) -> None:
        self._keys = self._store._owned()
        self._owned_slots = self._store._owned_slots
        self._applied = self._store.applied
        self._changed = self._store._changed
        self._expired = self._store._expired
        self.version = self._store._version
        self._now_ms = max(now_ms, self._applied.clock_ms)
        self._order = []

    def close(self) -> None:
        self._keys = {}
        self._on_close()

    def at_time(self, now_ms: int, on_close: Callable[[], None]) -> Self:
        copied = copy(self)
        copied._order, copied._on_close = [], on_close
        copied._now_ms = max(now_ms, self._applied.clock_ms)
        return copied

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @property
    def applied(self) -> AppliedEpoch:
        return self._applied

    @property
    def owned_slots(self) -> SlotSet:
        return self._owned_slots

    def changed_since(self, epoch: int) -> Sequence[bytes] | None:
        epochs = range(epoch + 1, self._applied.epoch + 1)
        if epoch > self._applied.epoch or len(epochs) > CHANGED_EPOCHS_MAX or not self._changed.keys() >= set(epochs):
            return None
        return [key for each in epochs for key in self._changed[each]]

    def expired_since(self, expiry_batches: int) -> Sequence[bytes] | None:
        removed = range(expiry_batches + 1, self._applied.expiry_batches + 1)
        if expiry_batches > self._applied.expiry_batches or not self._expired.keys() >= set(removed):
            return None
        return [key for each in removed for key in self._expired[each]]

    def _live(self, key: bytes) -> _StoredKey | None:
        return _live_part(self._keys.get(key), self._now_ms)

    def _map(self, key: bytes) -> Mapping[bytes, _StoredField]:
        stored = self._live(key)
        if stored is None:
            return {}
        if stored.kind is not Kind.MAP:
            raise WrongKindError(f"{key!r} holds a {stored.kind}, not a map")
        return stored.fields

    def key_info(self, key: bytes) -> KeyInfo | None:
        stored = self._live(key)
        return None if stored is None else KeyInfo(key, stored.state, stored.kind, stored.expire_at_ms)

    def stored_sizes(self, key: bytes, items_max: int) -> Iterator[int]:
        stored = self._live(key)
        if stored is not None:
            yield len(key) + len(stored.value) + sum(map(len, stored.elements)) + sum(map(len, stored.scores))
            yield sum(len(name) + len(each.value) for name, each in stored.fields.items())

    def lazy_value(self, key: bytes) -> Value | None:
        stored = self._live(key)
        if stored is None:
            return None
        if stored.kind is not Kind.VALUE:
            raise WrongKindError(f"{key!r} holds a {stored.kind}, not a value")
        return stored.value

    def lazy_values(self, keys: Sequence[bytes]) -> list[Value | None]:
        values: list[Value | None] = []
        with suppress(WrongKindError):
            for value in map(self.lazy_value, keys):
                if isinstance(value, bytes) and len(value) > READ_TOGETHER_BYTES_MAX:
                    return values or [value]
                values.append(value)
        return values or [self.lazy_value(keys[0])]

    def lazy_fields(self, key: bytes, names: Sequence[bytes]) -> list[Value | None]:
        fields = self._map(key)
        return [fields[name].value if name in fields else None for name in names]

    def field_expiries(self, key: bytes, names: Sequence[bytes]) -> list[int | None]:
        fields = self._map(key)
        return [fields[name].expire_at_ms or 0 if name in fields else None for name in names]

    def map_sizes(self, key: bytes) -> Iterator[int]:
        return iter([len(self._map(key))])

    def lazy_map_pairs(self, key: bytes) -> Iterator[tuple[bytes, Value]]:
        return iter([(name, each.value) for name, each in self._map(key).items()])

    def packed_map(self, key: bytes) -> bytes | None:
        fields = self._map(key)
        if not 0 < len(fields) <= packed_map.FIELDS_MAX:
            return None
        packed = packed_map.pack((name, each.value) for name, each in fields.items())
        return packed if len(packed) <= packed_map.BYTES_MAX else None

    def scan_map(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, Value]]]:
        fields = self._map(key)
        if len(fields) <= packed_map.FIELDS_MAX:
            return 0, [(name, each.value) for name, each in fields.items()]
        order = sorted((field_hash_position(name), name) for name in fields)
        start, end = _scan_range(order, cursor, count)
        pairs: list[tuple[bytes, Value]] = [(name, fields[name].value) for _, name in order[start:end]]
        return (order[end][0] if end < len(order) else 0), pairs

    def _list(self, key: bytes) -> tuple[bytes, ...]:
        stored = self._live(key)
        if stored is not None and stored.kind is not Kind.LIST:
            raise WrongKindError(f"{key!r} holds a {stored.kind}, not a list")
        return () if stored is None else stored.elements

    def list_size(self, key: bytes) -> int:
        return len(self._list(key))

    def list_bulk_strings(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return (b"$%d\r\n%b\r\n" % (len(element), element) for element in self._list(key)[start:stop])

    def list_elements(self, key: bytes, start: int, stop: int) -> Iterator[bytes]:
        return iter(self._list(key)[start:stop])

    def _scores(self, key: bytes, kind: Kind) -> Mapping[bytes, float]:
        stored = self._live(key)
        if stored is not None and stored.kind is not kind:
            raise WrongKindError(f"{key!r} holds a {stored.kind}, not a {kind}")
        return {} if stored is None else stored.scores

    def set_size(self, key: bytes) -> int:
        return len(self._scores(key, Kind.SET))

    def members(self, key: bytes) -> Iterator[bytes]:
        return iter(sorted(self._scores(key, Kind.SET)))

    def are_members(self, key: bytes, members: Sequence[bytes]) -> list[bool]:
        scores = self._scores(key, Kind.SET)
        return [member in scores for member in members]

    def packed_set(self, key: bytes) -> bytes | None:
        members = sorted(self._scores(key, Kind.SET))
        packed = packed_list.pack(members)
        is_small = 0 < len(members) <= packed_list.ELEMENTS_MAX and len(packed) <= packed_list.BYTES_MAX
        return packed if is_small else None

    def scan_set(self, key: bytes, cursor: int, count: int) -> tuple[int, list[bytes]]:
        return _scan_members(self._scores(key, Kind.SET), cursor, count)

    def _ranking(self, key: bytes) -> list[tuple[float, bytes]]:
        return sorted((score, member) for member, score in self._scores(key, Kind.SORTED_SET).items())

    def sorted_size(self, key: bytes) -> int:
        return len(self._scores(key, Kind.SORTED_SET))

    def scores(self, key: bytes, members: Sequence[bytes]) -> list[float | None]:
        scores = self._scores(key, Kind.SORTED_SET)
        return [scores.get(member) for member in members]

    def ranks(self, key: bytes, members: Sequence[bytes]) -> list[int | None]:
        rank_by_member = {member: rank for rank, (_, member) in enumerate(self._ranking(key))}
        return [rank_by_member.get(member) for member in members]

    def rank_of_score(self, key: bytes, score: float, is_after: bool) -> int:
        scores = [each for each, _ in self._ranking(key)]
        return (bisect_right if is_after else bisect_left)(scores, score)

    def rank_of_member(self, key: bytes, member: bytes, is_after: bool) -> int:
        ranking = self._ranking(key)
        return (bisect_right if is_after else bisect_left)(ranking, (ranking[0][0], member)) if ranking else 0

    def sorted_members(
        self, key: bytes, start: int, stop: int, is_reversed: bool = False
    ) -> Iterator[tuple[bytes, float]]:
        found = [(member, score) for score, member in self._ranking(key)[start:stop]]
        return iter(found[::-1] if is_reversed else found)

    def packed_sorted(self, key: bytes) -> bytes | None:
        ranking = self._ranking(key)
        packed = packed_sorted.pack(ranking)
        is_small = 0 < len(ranking) <= packed_sorted.MEMBERS_MAX and len(packed) <= packed_sorted.BYTES_MAX
        return packed if is_small else None

    def scan_sorted(self, key: bytes, cursor: int, count: int) -> tuple[int, list[tuple[bytes, float]]]:
        scores = self._scores(key, Kind.SORTED_SET)
        next_cursor, members = _scan_members(scores, cursor, count)
        return next_cursor, [(member, scores[member]) for member in members]

    def scan(
        self, cursor: int, count: int, kinds: Collection[Kind] | None = None, *, only_expiring: bool = False
    ) -> tuple[int, list[bytes]]:
        if not self._order:
            self._order = sorted((hash_position(key), key) for key in self._keys if self._live(key) is not None)
        start, end = _scan_range(self._order, cursor, count)
        found = [key for _, key in self._order[start:end] if kinds is None or self._keys[key].kind in kinds]
        if only_expiring:
            found = [key for key in found if self._keys[key].expire_at_ms is not None]
        return (self._order[end][0] if end < len(self._order) else 0), found

    def changes(self) -> Iterator[Change]:
        for key in sorted(self._keys, key=lambda key: (hash_position(key), key)):
            stored = _live_part(self._keys[key], self._applied.clock_ms)
            if stored is None:
                continue
            if stored.orders:
                yield from _folds(key, stored)
                continue
            if stored.kind is Kind.VALUE:
                yield Change(stored.state, Op.PUT, key, None, stored.value, stored.expire_at_ms)
                continue
            if stored.kind is Kind.LIST:
                yield Change(stored.state, Op.PUT, key, None, packed_list.pack(stored.elements), stored.expire_at_ms)
                continue
            if stored.kind in SETS:
                for score, member in stored.ranking:
                    value = b"" if stored.kind is Kind.SET else packed_sorted.score_text(score)
                    yield Change(stored.state, Op.PUT, key, member, value, stored.expire_at_ms)
                continue
            if stored.expire_at_ms is not None:
                name, each = next(iter(stored.fields.items()))
                yield Change(
                    stored.state, Op.PUT, key, None, packed_map.pack([(name, each.value)]), stored.expire_at_ms
                )
            for name, each in stored.fields.items():
                yield Change(stored.state, Op.PUT, key, name, each.value, each.expire_at_ms)

    def random_keys(self) -> Iterator[bytes | None]:
        live = [key for key in self._keys if self._live(key) is not None]
        return iter([choice(live)] if live else [])


def _folds(key: bytes, stored: _StoredKey) -> Iterator[Change]:
    """Iterate over the FOLDs that build a key of an ordered state."""
    of_key = stored.orders.get(None)
    if stored.kind is Kind.LIST and of_key is not None:
        for order, element in zip(of_key, stored.elements, strict=True):
            yield Change(stored.state, Op.FOLD, key, None, pack(order, element), stored.expire_at_ms)
    elif of_key is not None:
        fields = packed_map.pack((name, each.value) for name, each in stored.fields.items())
        value = fields if stored.kind is Kind.MAP else stored.value
        yield Change(stored.state, Op.FOLD, key, None, pack(of_key[0], value), stored.expire_at_ms)
    else:
        for name, each in stored.fields.items():
            yield Change(stored.state, Op.FOLD, key, name, pack(stored.orders[name][0], each.value), each.expire_at_ms)


def _scan_members(members: Iterable[bytes], cursor: int, count: int) -> tuple[int, list[bytes]]:
    """Do one call of a scan of a set."""
    order = sorted((field_hash_position(member), member) for member in members)
    if len(order) <= packed_list.ELEMENTS_MAX:
        return 0, [member for _, member in order]
    start, end = _scan_range(order, cursor, count)
    return (order[end][0] if end < len(order) else 0), [member for _, member in order[start:end]]


def _scan_range(order: list[tuple[int, bytes]], cursor: int, count: int) -> tuple[int, int]:
    """Return the range of sorted keys that one call of a scan covers: full positions, and at least `count` keys."""
    start = bisect_left(order, (cursor, b""))
    end = min(start + count, len(order))
    while 0 < end < len(order) and order[end][0] == order[end - 1][0]:
        end += 1
    return start, end
