"""Whole replies cut out of what a server sends, as the bytes they are: what is only passed on is never decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from resp_server.protocol.requests import Request

BULKS = b"$="
ARRAYS = b"*~>"
MAPS = b"%"
LINES = b"+-:_#,("

# Up to which size bulk strings are cut in loops of C (guess: longer ones are few in a buffer).
BULK_BYTES_MAX = 4096
# A byte that UTF-8 has none of. Where a value has it, frames are cut one by one.
CUT = b"\xff"
# By the length of a bulk string's frame, how it begins; nil is the only one of its length.
_HEADS = [b"?"] * (BULK_BYTES_MAX + 1)
for _length in range(BULK_BYTES_MAX - 10):
    _head = b"$%d\r\n" % _length
    _HEADS[len(_head) + _length + 2] = _head
_HEADS[5] = b"$-1\r\n"
_head_of_length = _HEADS.__getitem__


# Typed for a request of one word.
_pack = cast(Callable[[tuple[Any, ...]], bytes], hiredis.pack_command)


def pack(request: Request) -> bytes:
    """Return a request as it is sent."""
    return _pack(tuple(request))


class FrameError(Exception):
    """What came is no reply, or one larger than is held."""


def bulks_of(data: bytes) -> tuple[list[bytes], bytes] | None:
    """Cut a buffer of short bulk strings and nils alone in loops of C: the frames, and the beginning of one more.

    None if there is anything else in it, or could be.
    """
    if CUT in data:
        return None
    frames = data.replace(b"\r\n$", b"\r\n\xff$").split(CUT)
    rest = b"" if data.endswith(b"\r\n") and _are_bulks(frames[-1:]) else frames.pop()
    return (frames, rest) if _are_bulks(frames) else None


def _are_bulks(frames: list[bytes]) -> bool:
    try:
        return all(map(bytes.startswith, frames, map(_head_of_length, map(len, frames))))
    except IndexError:
        return False


class Frames:
    """One connection's replies."""

    def __init__(self, reply_bytes_max: int) -> None:
        self._bytes_max = reply_bytes_max
        self._done: list[bytes] = []  # of the reply that is not complete: what has been looked at
        self._done_bytes = 0
        self._rest: list[bytes] = []  # what has not
        self._rest_bytes = 0
        self._wanted_bytes = 0
        self._missing = 1  # items of this reply that are still to come
        # Whether what `feed` returned last are bulk strings and nils alone.
        self.are_bulks = False

    @property
    def begun_bytes(self) -> int:
        """How long the reply that is not complete is at least."""
        return self._done_bytes + max(self._rest_bytes, self._wanted_bytes)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, return the replies that are complete by now; FrameError."""
        if self._rest:
            self._rest.append(data)
            self._rest_bytes += len(data)
            if self._rest_bytes < self._wanted_bytes:
                return []
            data = b"".join(self._rest)
            self._rest = []
        found = None if self._done else bulks_of(data)
        self.are_bulks = found is not None
        if found is None:
            return self._cut(data)
        frames, rest = found
        if not rest:
            self._rest_bytes = self._wanted_bytes = 0
            return frames
        # What begins one more is looked at as anything else is: it may be a whole reply of another kind.
        others = self._cut(rest)
        self.are_bulks = not others
        return frames + others if others else frames

    def _cut(self, data: bytes) -> list[bytes]:
        replies: list[bytes] = []
        start = at = 0
        missing = self._missing
        while True:
            after, items = _item(data, at)
            if after > len(data):
                break
            at = after
            missing += items - 1
            if not missing:
                replies.append(data[start:at])
                start, missing = at, 1
                if self._done:
                    replies[-1] = b"".join([*self._done, replies[-1]])
                    self._done, self._done_bytes = [], 0
        self._missing = missing
        self._keep(data, start, at, after - at)
        return replies

    def _keep(self, data: bytes, start: int, at: int, wanted_bytes: int) -> None:
        if at > start:
            self._done.append(data[start:at])
            self._done_bytes += at - start
        self._rest_bytes = len(data) - at
        self._rest = [data[at:]] if self._rest_bytes else []
        self._wanted_bytes = wanted_bytes
        if self._done_bytes + self._rest_bytes > self._bytes_max:
            raise FrameError(f"a reply is larger than {self._bytes_max} bytes")


def _item(data: bytes, at: int) -> tuple[int, int]:
    """Return where an item's own bytes end (behind the data's end: how much is wanted), and how many are in it."""
    end = data.find(b"\r\n", at)
    if end < 0:
        return len(data) + 1, 0
    mark = data[at]
    if mark in LINES:
        return end + 2, 0
    try:
        number = int(data[at + 1 : end])
    except ValueError:
        raise FrameError(f"no reply begins with {data[at : at + 16]!r}") from None
    if mark in BULKS:
        return (end + 2 if number < 0 else end + 4 + number), 0
    if mark in ARRAYS:
        return end + 2, max(number, 0)
    if mark in MAPS:
        return end + 2, 2 * number
    raise FrameError(f"no reply begins with {data[at : at + 16]!r}")


def array_of(reply: bytes) -> tuple[int, bytes]:
    """Return how many items an array has, and the items as they were sent."""
    end = reply.index(b"\r\n")
    if reply[:1] != b"*":
        raise FrameError(f"an array was expected, not {reply[:16]!r}")
    return int(reply[1:end]), reply[end + 2 :]


def items_of(reply: bytes) -> list[bytes]:
    """Return the items of an array, each as it was sent."""
    count, body = array_of(reply)
    items = [body] if count == 1 else Frames(len(body) + 1).feed(body)
    if len(items) != count:
        raise FrameError(f"an array of {count} items has {len(items)}")
    return items


def sum_of(replies: Sequence[bytes]) -> bytes:
    """Return the sum of numbers, as a reply."""
    return b":%d\r\n" % sum(int(reply[1:]) for reply in replies)


def joined(replies: Sequence[bytes]) -> bytes:
    """Return one array of the items of all."""
    arrays = [array_of(reply) for reply in replies]
    return b"*%d\r\n%b" % (sum(count for count, _ in arrays), b"".join(body for _, body in arrays))


def in_order(replies: Sequence[bytes], places: Sequence[Sequence[int]]) -> bytes:
    """Return one array of the items of all, each at its place: `places` has those of each reply's items."""
    items: list[bytes] = [b""] * sum(map(len, places))
    for reply, its_places in zip(replies, places, strict=True):
        for place, item in zip(its_places, items_of(reply), strict=True):
            items[place] = item
    return b"*%d\r\n%b" % (len(items), b"".join(items))
