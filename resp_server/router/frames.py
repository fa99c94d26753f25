"""Whole replies cut out of what a server sends, as the bytes they are: what is only passed on is never decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from resp_server.protocol.requests import Request

BULKS = b"$="
ARRAYS = b"*~>"
MAP = b"%"
LINES = b"+-,("
LENGTHS = BULKS + ARRAYS + MAP
NUMBER = ord(":")
# Whole lines: nil, true and false.
NAMED = (b"_", b"$-1", b"*-1", b"#t", b"#f")
# A line that is longer is none (guess: the longest are errors, of some hundred bytes).
LINE_BYTES_MAX = 64 << 10
# Of a number: what 64 bits take. Of a length: more than can be meant.
NUMBER_DIGITS_MAX = 20
LENGTH_DIGITS_MAX = 15


# Typed for a request of one word.
_pack = cast(Callable[[tuple[Any, ...]], bytes], hiredis.pack_command)


def pack(request: Request) -> bytes:
    """Return a request as it is sent."""
    return _pack(tuple(request))


class FrameError(Exception):
    """What came is no reply, or one larger than is held."""


class Frames:
    """One connection's replies."""

    def __init__(self, reply_bytes_max: int) -> None:
        self._bytes_max = reply_bytes_max
        self._done: list[bytes] = []  # of a reply that is not complete: what has been looked at
        self._done_bytes = 0
        self._rest: list[bytes] = []  # what has not
        self._rest_bytes = 0
        self._wanted_bytes = 0
        self._missing = 1  # items of this reply that are still to come
        # Why what came behind the replies that `feed` returned is none, nor is anything that is still to come.
        self.error: FrameError | None = None

    @property
    def is_empty(self) -> bool:
        """Tell whether all that came was whole replies."""
        return self.error is None and not (self._done or self._rest)

    @property
    def begun_bytes(self) -> int:
        """How long the reply that is not complete is at least."""
        return self._done_bytes + max(self._rest_bytes, self._wanted_bytes)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, return the replies that are complete by now: the same ones however the bytes are cut."""
        if self.error is not None:
            return []
        if self._rest:
            self._rest.append(data)
            self._rest_bytes += len(data)
            if self._rest_bytes < self._wanted_bytes:
                return []
            data = b"".join(self._rest)
            self._rest = []
        return self._cut(data)

    def _cut(self, data: bytes) -> list[bytes]:
        replies: list[bytes] = []
        start = at = 0
        missing = self._missing
        while True:
            try:
                after, items = _item(data, at)
            except FrameError as error:
                self.error = error
                return replies
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
            self.error = FrameError(f"a reply is larger than {self._bytes_max} bytes")


def _is_length(digits: bytes) -> bool:
    """Tell whether digits are a length as everybody writes, and reads, it."""
    return digits.isdigit() and len(digits) <= LENGTH_DIGITS_MAX and (digits[:1] != b"0" or digits == b"0")


def _item(data: bytes, at: int) -> tuple[int, int]:
    """Return where an item's own bytes end (behind the data's end: how much is wanted), and how many are in it.

    FrameError for what a client could read as something else than is read here.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        if len(data) - at > LINE_BYTES_MAX + 1:  # of its end there may be one byte
            raise _no_reply(data, at)
        return len(data) + 1, 0
    mark = data[at]
    digits = data[at + 1 : end]
    if mark in LINES and end - at <= LINE_BYTES_MAX:
        return end + 2, 0
    if mark == NUMBER and digits.removeprefix(b"-").isdigit() and len(digits) <= NUMBER_DIGITS_MAX:
        return end + 2, 0
    line = data[at:end]
    if line in NAMED:
        return end + 2, 0
    if mark not in LENGTHS or not _is_length(digits):
        raise _no_reply(data, at)
    number = int(digits)
    if mark in BULKS:
        after = end + 4 + number
        if after <= len(data) and data[after - 2 : after] != b"\r\n":
            raise FrameError(f"a text of {number} bytes does not end there")
        return after, 0
    return end + 2, 2 * number if mark in MAP else number


def _no_reply(data: bytes, at: int) -> FrameError:
    return FrameError(f"no reply begins with {data[at : at + 16]!r}")


def array_of(reply: bytes) -> tuple[int, bytes]:
    """Return how many items an array has, and the items as they were sent."""
    end = reply.index(b"\r\n")
    if reply[:1] != b"*" or reply == b"*-1\r\n":
        raise FrameError(f"an array was expected, not {reply[:16]!r}")
    return int(reply[1:end]), reply[end + 2 :]


def items_of(reply: bytes) -> Sequence[bytes]:
    """Return the items of an array, each as it was sent."""
    count, body = array_of(reply)
    items = [body] if count == 1 else Frames(len(body) + 1).feed(body)
    if len(items) != count:
        raise FrameError(f"an array of {count} items has {len(items)}")
    return items


def sum_of(replies: Sequence[bytes]) -> bytes:
    """Return the sum of numbers, as a reply; ValueError if one is none."""
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
