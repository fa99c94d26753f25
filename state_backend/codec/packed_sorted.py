"""A sorted set as one value: its members in the order of their scores, then of their bytes.

    count     u32, little endian
    scores    count x f64: no NaN, and no zero with a sign
    lengths   count x u32: of the members
    members   one after another

A small sorted set is one such value. A large one is a tree of them (see `lmdb.ranks`). Bytes behind the members are
ignored.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from state_backend.codec.reductions import float_text
from state_backend.model.descriptor import Kind
from state_backend.model.errors import ChangeError
from state_backend.model.records import Change, Op

# Larger sets are stored with a record per member (see `packed_map.FIELDS_MAX`).
MEMBERS_MAX = 128
BYTES_MAX = 8192

EMPTY = bytes(4)

# Members are ordered by this pair.
Pair = tuple[float, bytes]


@lru_cache(maxsize=1024)
def layout_of_numbers(n: int, form: str) -> struct.Struct:
    """Return the layout of `n` numbers of one format, such as `d`. `struct`'s own cache is too small for all sizes."""
    return struct.Struct(f"<{n}{form}")


@lru_cache(maxsize=256)
def _header(n: int) -> struct.Struct:
    """Return the layout of everything before the members."""
    return struct.Struct(f"<I{n}d{n}I")


def score_of(text: bytes) -> float:
    """Return the score that a text stands for; -0 is 0. ChangeError for a text that is no number."""
    try:
        score = float("nan") if b"_" in text else float(text) + 0.0
    except ValueError:
        score = float("nan")
    if score != score:
        raise ChangeError(f"{text[:100]!r} is no score; a score is a number, inf or -inf")
    return score


score_text = float_text


def check_change(change: Change, kind: Kind) -> None:
    """Raise ChangeError for an invalid change of a set or sorted set."""
    try:
        if change.op not in (Op.PUT, Op.DELETE, Op.CLEAR) or (change.op == Op.CLEAR and change.field is not None):
            raise ChangeError(f"{change.op.name} is for other kinds of state; PUT or DELETE a member instead")
        if change.op == Op.PUT and kind is Kind.SORTED_SET:
            if change.field is None:
                scores_of(change.value or b"")
            else:
                score_of(change.value or b"")
        elif change.op == Op.PUT and change.field is not None and change.value:
            raise ChangeError("a member of a set has no value; write b''")
    except ChangeError as error:
        raise ChangeError(f"state {change.state!r}, key {change.key[:100]!r}: {error}") from None
    except (struct.error, IndexError):
        raise ChangeError(
            f"state {change.state!r}, key {change.key[:100]!r}: the value is no packed sorted set; "
            f"packed_sorted.pack_members makes one"
        ) from None


def pack(pairs: Sequence[Pair]) -> bytes:
    """Pack sorted (score, member) pairs; struct.error for members of 4 GiB or more."""
    n = len(pairs)
    scores = [score for score, _ in pairs]
    members = [member for _, member in pairs]
    return _header(n).pack(n, *scores, *map(len, members)) + b"".join(members)


def pack_members(members: Iterable[tuple[bytes, float]]) -> bytes:
    """Pack (member, score) pairs in any order, as the value of a change."""
    return pack(sorted((score + 0.0, member) for member, score in members))


def scores_of(packed: bytes) -> dict[bytes, float]:
    """Return the scores by member in a change's value, whose members may have any order; ChangeError for NaN."""
    found = {member: score + 0.0 for score, member in pairs(packed)} if packed else {}
    if any(score != score for score in found.values()):
        raise ChangeError("a score is NaN; a score is a number, inf or -inf")
    return found


def count(packed: bytes) -> int:
    """Return the number of members."""
    return int.from_bytes(packed[:4], "little")


def pairs(packed: bytes, start: int = 0, stop: int | None = None) -> list[Pair]:
    """Return (score, member) of all members, or of the ranks `start` to before `stop`, both within the set."""
    n = count(packed)
    stop = n if stop is None else stop
    if start >= stop:
        return []
    return list(zip(_scores(packed, start, stop), _members(packed, n, start, stop), strict=True))


def members(packed: bytes, start: int, stop: int) -> list[tuple[bytes, float]]:
    """Return (member, score) of the ranks `start` to before `stop`, both within the set."""
    if start >= stop:
        return []
    return list(zip(_members(packed, count(packed), start, stop), _scores(packed, start, stop), strict=True))


def _scores(packed: bytes, start: int, stop: int) -> tuple[float, ...]:
    return layout_of_numbers(stop - start, "d").unpack_from(packed, 4 + 8 * start)


def _score_array(packed: bytes, n: int) -> array[float]:
    """Return all scores as an array, without an object for each score (73 scores: 0.3 us instead of 3, measured)."""
    return _as_little_endian(array("d", packed[4 : 4 + 8 * n]))


def _lengths(packed: bytes, n: int) -> array[int]:
    return _as_little_endian(array("I", packed[4 + 8 * n : 4 + 12 * n]))


def _as_little_endian(found: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _members(packed: bytes, n: int, start: int, stop: int) -> list[bytes]:
    lengths = _lengths(packed, n)
    ends = accumulate(lengths[start:stop], initial=4 + 12 * n + sum(lengths[:start]))
    return [packed[at:end] for at, end in pairwise(ends)]


def count_before(packed: bytes, pair: Pair) -> int:
    """Return how many members are before a pair, which need not be in the set."""
    n = count(packed)
    score, member = pair
    scores = _score_array(packed, n)
    start = bisect_left(scores, score)
    if not member or start == n or scores[start] != score:
        return start
    stop = bisect_right(scores, score, start)
    return start + bisect_left(_members(packed, n, start, stop), member)


def rank(packed: bytes, score: float, member: bytes) -> int:
    """Return the rank of a member with this score. For a member that is not in the set: most often IndexError."""
    n = int.from_bytes(packed[:4], "little")
    lengths_at, texts_at = 4 + 8 * n, 4 + 12 * n
    scores = _as_little_endian(array("d", packed[4:lengths_at]))
    at = bisect_left(scores, score)
    if at + 1 < n and scores[at + 1] == score:
        lengths = _as_little_endian(array("I", packed[lengths_at:texts_at]))
        text_at = texts_at + sum(lengths[:at])
        while (length := lengths[at]) != len(member) or not packed.startswith(member, text_at):
            text_at += length
            at += 1
    return at


def index(packed: bytes, member: bytes) -> int:
    """Return the rank of a member whose score is unknown; -1 if it is not in the set."""
    n = count(packed)
    texts_at = 4 + 12 * n
    at = packed.find(member, texts_at)
    if at < 0:
        return -1
    ends = list(accumulate(_lengths(packed, n)))
    size = len(member)
    while at >= 0:
        end = at - texts_at + size
        found = bisect_left(ends, end)
        # An empty member ends where the one before it does.
        while found < n and ends[found] == end:
            if end - size == (ends[found - 1] if found else 0):
                return found
            found += 1
        at = packed.find(member, at + 1)
    return -1


def score(packed: bytes, index: int) -> float:
    """Return the score of the member with a rank."""
    found: float = struct.unpack_from("<d", packed, 4 + 8 * index)[0]
    return found


def edit(packed: bytes, edits: Iterable[tuple[Pair, bool]]) -> bytes:
    """Return a packed sorted set after a few edits, without unpacking all members: True puts a pair, False removes it.

    Nothing may follow behind the members. KeyError for a removed member that is not in the set.
    """
    n = count(packed)
    scores, lengths, texts = list(_scores(packed, 0, n)), list(_lengths(packed, n)), bytearray(packed[4 + 12 * n :])
    for (score, member), is_put in edits:
        index = bisect_left(scores, score)
        at = sum(lengths[:index])
        while index < len(scores) and scores[index] == score and texts[at : at + lengths[index]] < member:
            at += lengths[index]
            index += 1
        if is_put:
            scores.insert(index, score)
            lengths.insert(index, len(member))
            texts[at:at] = member
        elif scores[index : index + 1] == [score] and texts[at : at + lengths[index]] == member:
            texts[at : at + lengths[index]] = b""
            del scores[index], lengths[index]
        else:
            raise KeyError(member)
    return _header(len(scores)).pack(len(scores), *scores, *lengths) + texts
