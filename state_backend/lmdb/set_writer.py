"""Sets and sorted sets in a write transaction: a small one is one record, a large one has a record for each member.

A set is written as a sorted set whose scores are all zero, and has no tree (see `lmdb.ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from state_backend.codec import packed_list, packed_sorted
from state_backend.lmdb.key_writer import KindWriter, WrittenState
from state_backend.lmdb.ranks import Edit, RankTreeWriter
from state_backend.lmdb.record_format import (
    FIRST_LARGE,
    FORM_AT,
    LARGE_SET,
    LARGE_SORTED_SET,
    SCORE,
    SMALL_SET,
    SMALL_SORTED_SET,
    VALUE,
    LargeSet,
    expiry_of,
    field_store_key,
    find,
    make_record,
    payload_of,
)
from state_backend.model.descriptor import Kind
from state_backend.model.records import RUN_ROWS_MAX, Change, Op

PUT = int(Op.PUT)


class SetWriter(KindWriter):
    """Writes the keys of set and sorted set states."""

    def apply(
        self,
        at: bytes,
        old: bytes | None,
        rows: Iterable[tuple[Any, ...]],
        state: WrittenState,
        *,
        keeps_old: bool,
    ) -> None:
        """Apply the changes of one key: the last one that replaces the set, then added and removed members after it."""
        changes = list(map(Change._make, rows))
        is_sorted = state.kind is Kind.SORTED_SET
        scores: dict[bytes, float | None] = {}  # None: the member is removed
        expire_at_ms = None if old is None else expiry_of(old) or None
        has_expired = False
        for change in changes:
            if has_expired:  # the set was expired from the change before on
                keeps_old, scores, has_expired = False, {}, False
            if change.field is None:
                keeps_old, scores = False, _scores_put(change, is_sorted)
            elif change.op == PUT:
                scores[change.field] = packed_sorted.score_of(change.value or b"") if is_sorted else 0.0
            else:
                scores[change.field] = None
            if change.op == PUT:
                expire_at_ms = change.expire_at_ms
                has_expired = expire_at_ms is not None and expire_at_ms <= self._keys.now_ms
        key = changes[0].key
        if old is not None and old[FORM_AT] >= FIRST_LARGE:
            large = LargeSet.of(payload_of(old))
            if not keeps_old and any(score is not None for score in scores.values()) and large.size <= RUN_ROWS_MAX:
                scores = dict.fromkeys(self._keys.item_names(large.prefix) - scores.keys()) | scores
                keeps_old = True
            if keeps_old:
                self._change_large(at, old, key, scores, expire_at_ms, state, large)
                return
        self._change_small(at, old, key, scores, expire_at_ms, state, keeps_old=keeps_old)

    def _change_small(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        scores: dict[bytes, float | None],
        expire_at_ms: int | None,
        state: WrittenState,
        *,
        keeps_old: bool,
    ) -> None:
        """Write a set that was small or missing, or whose old members are replaced."""
        is_sorted = state.kind is Kind.SORTED_SET
        before = _scores_in(old) if old is not None and keeps_old else {}
        after = {member: score for member, score in (before | scores).items() if score is not None}
        if not after:
            self._keys.change(at, old, None)
            return
        if len(after) <= packed_sorted.MEMBERS_MAX:
            packed = packed_sorted.pack_members(after.items()) if is_sorted else packed_list.pack(sorted(after))
            if len(packed) <= packed_sorted.BYTES_MAX:
                new = make_record(key, packed, expire_at_ms, state.number, SMALL_SORTED_SET if is_sorted else SMALL_SET)
                self._keys.change(at, old, new)
                return
        self._change_large(at, old, key, after, expire_at_ms, state, LargeSet(self._keys.meta.new_id(), 0, 0))

    def _change_large(
        self,
        at: bytes,
        old: bytes | None,
        key: bytes,
        scores: Mapping[bytes, float | None],
        expire_at_ms: int | None,
        state: WrittenState,
        large: LargeSet,
    ) -> None:
        """Change members of a large set, which may be new, and write its key's record over `old`."""
        keys = self._keys
        is_sorted = state.kind is Kind.SORTED_SET
        size, changed, edits = self._change_members(large, scores, is_sorted)
        keys.changed += changed
        if not size:
            if old is not None:
                keys.delete(at, old)
            return
        next_node = large.next_node
        if edits:
            tree = RankTreeWriter(keys.txn, keys.tables.blocks, large.prefix, next_node)
            tree.change(edits)
            next_node = tree.next_node
        payload = LargeSet(large.set_id, size, next_node).pack()
        new = make_record(key, payload, expire_at_ms, state.number, LARGE_SORTED_SET if is_sorted else LARGE_SET)
        if new != old:
            keys.put(at, old, new)
            keys.changed += not changed
        elif changed:
            keys.changed_keys.add(key)

    def _change_members(
        self, large: LargeSet, scores: Mapping[bytes, float | None], is_sorted: bool
    ) -> tuple[int, int, list[Edit]]:
        """Change the records of members; return the new size, how many members differ, and the tree's sorted edits."""
        fields = self._keys.fields
        get, put = fields.get, fields.put
        size, changed = large.size, 0
        edits: list[Edit] = []
        # In the order of the records: most are found on the page of the one before.
        for store_key, member in sorted((field_store_key(large.set_id, member), member) for member in scores):
            score = scores[member]
            at, record = find(get, store_key, member)
            if score is None:
                if record is None:
                    continue
                fields.delete(at)
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
                    edits.append(((SCORE.unpack(payload_of(record))[0], member), False))
                if score is not None:
                    edits.append(((score, member), True))
        edits.sort()
        return size, changed, edits


def _scores_put(change: Change, is_sorted: bool) -> dict[bytes, float | None]:
    """Return the members that a PUT of a whole set writes, with their scores."""
    if change.op != PUT or not change.value:
        return {}
    if is_sorted:
        return dict(packed_sorted.scores_of(change.value))
    return dict.fromkeys(packed_list.elements(change.value), 0.0)


def _scores_in(record: bytes) -> dict[bytes, float | None]:
    """Return the scores of the members of a small set."""
    payload = payload_of(record)
    if record[FORM_AT] == SMALL_SORTED_SET:
        return dict(packed_sorted.scores_of(payload))
    return dict.fromkeys(packed_list.elements(payload), 0.0)
