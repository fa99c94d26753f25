"""Reads the keys of sorted set states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from state_backend.codec import packed_sorted
from state_backend.codec.checksums import CHECK_BYTES
from state_backend.lmdb.ranks import InnerNode, RankTree, bound_of_score
from state_backend.lmdb.record_format import (
    SCORE,
    LargeSet,
    name_of,
    payload_of,
)
from state_backend.lmdb.set_reader import SetReader
from state_backend.model.descriptor import Kind

# The number of large sorted sets whose inner nodes are cached in one version of a store. One more empties the cache.
TREES_MAX = 8


class SortedSetReader(SetReader):
    """Reads the keys of sorted set states."""

    # The payloads of large sorted sets and the cached inner nodes of their trees, by key. Only in a store without keys
    # that expire.
    _trees: dict[bytes, tuple[LargeSet, dict[int, InnerNode]]]
    _trees_version = -1

    def _sorted(self, key: bytes) -> tuple[bytes, LargeSet | None, dict[int, InnerNode]]:
        """Return the result of `_set`, and the cache for inner nodes of the set's tree."""
        if self._trees_version != self.version:
            self._trees, self._trees_version = {}, self.version
        elif cached := self._trees.get(key):
            return b"", *cached
        packed, large = self._set(key, Kind.SORTED_SET)
        inner: dict[int, InnerNode] = {}
        if large is not None and not self._read_meta().applied.expiring:
            if len(self._trees) == TREES_MAX:
                self._trees = {}
            self._trees[key] = large, inner
        return packed, large, inner

    def _ranks(self, large: LargeSet, inner: dict[int, InnerNode]) -> RankTree:
        return RankTree(self._txn, self._tables.blocks, large.prefix, inner)

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
        bound = bound_of_score(score, is_after)
        if large is not None:
            return large.size if bound is None else self._ranks(large, inner).count_before(bound)
        if not packed:
            return 0
        return packed_sorted.count(packed) if bound is None else packed_sorted.count_before(packed, bound)

    def rank_of_member(self, key: bytes, member: bytes, is_after: bool) -> int:
        packed, large, inner = self._sorted(key)
        behind = member + b"\0" if is_after else member
        if large is None:
            return packed_sorted.count_before(packed, (packed_sorted.score(packed, 0), behind)) if packed else 0
        ranks = self._ranks(large, inner)
        ((_, lowest),) = next(ranks.leaves(0, 1, is_reversed=False))
        return ranks.count_before((lowest, behind))

    def sorted_members(
        self, key: bytes, start: int, stop: int, is_reversed: bool = False
    ) -> Iterator[tuple[bytes, float]]:
        packed, large, inner = self._sorted(key)
        if large is not None:
            return chain.from_iterable(self._ranks(large, inner).leaves(start, min(stop, large.size), is_reversed))
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
