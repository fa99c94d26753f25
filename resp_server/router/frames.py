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
# What is cut in loops of C, and what it begins with.
MARKS = (b"$", b"*", b"~", MAP)
FIRSTS = b"$*~%"
# Of an array that has not come to its end, what is looked at again with what comes next (guess).
BEGUN_ITEMS_MAX = 4096

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


def _are_bulks(frames: Sequence[bytes]) -> bool:
    try:
        return all(map(bytes.startswith, frames, map(_head_of_length, map(len, frames))))
    except IndexError:
        return False


def _is_whole(frame: bytes) -> bool:
    """Tell whether a frame is a bulk string, or what may be the header of an array."""
    return frame.endswith(b"\r\n") and (frame[:1] != b"$" or _are_bulks((frame,)))


class CutArray(bytes):
    """An array, or a map, as it was sent, whose items are known: all of them are bulk strings or nils."""

    items: Sequence[bytes]


def _cut_array(frames: list[bytes]) -> CutArray | None:
    """Return the array that frames are, its header first; None if an item is no short bulk string."""
    items = frames[1:]
    if not _are_bulks(items):
        return None
    array = CutArray(b"".join(frames))
    array.items = items
    return array


class Frames:
    """One connection's replies."""

    def __init__(self, reply_bytes_max: int) -> None:
        self._bytes_max = reply_bytes_max
        self._begun: list[bytes] = []  # of an array that is not complete: its header, and bulk strings
        self._begun_bytes = 0
        self._done: list[bytes] = []  # of another reply that is not complete: what has been looked at
        self._done_bytes = 0
        self._rest: list[bytes] = []  # what has not
        self._rest_bytes = 0
        self._wanted_bytes = 0
        self._missing = 1  # items of this reply that are still to come
        # Whether what `feed` returned last are bulk strings and nils alone.
        self.are_bulks = False
        # Why what came behind the replies that `feed` returned is none, nor is anything that is still to come.
        self.error: FrameError | None = None

    @property
    def begun_bytes(self) -> int:
        """How long the reply that is not complete is at least."""
        return self._begun_bytes + self._done_bytes + max(self._rest_bytes, self._wanted_bytes)

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
        self.are_bulks = False
        if self._done:
            return self._cut(data)
        found = bulks_of(data) if data[:1] == b"$" and not self._begun else None
        if found is None:
            return self._cut_arrays(data)
        frames, rest = found
        self.are_bulks = True
        if not rest:
            self._rest_bytes = self._wanted_bytes = 0
            return frames
        # What begins one more is looked at as anything else is: it may be a whole reply of another kind.
        others = self._cut_arrays(rest)
        self.are_bulks = not others
        return frames + others if others else frames

    def _cut_arrays(self, data: bytes) -> list[bytes]:
        """Cut a buffer of bulk strings and of arrays of them in loops of C; from where it is anything else, not so."""
        if (not self._begun and data[:1] not in FIRSTS) or CUT in data:
            return self._cut(self._take_begun() + data)
        for mark in MARKS:
            data = data.replace(b"\r\n" + mark, b"\r\n\xff" + mark)
        frames = self._begun + data.split(CUT)
        rest = b"" if _is_whole(frames[-1]) else frames.pop()
        self._begun, self._begun_bytes = [], 0
        replies, at, end = [], 0, len(frames)
        while at < end:
            frame, stop = frames[at], at + 1
            reply: bytes | None = None
            if frame[:1] == b"$":
                reply = frame if _are_bulks((frame,)) else None
            elif _is_header(frame):
                stop += int(frame[1:-2]) * (2 if frame[:1] == MAP else 1)
                if stop > end and end - at <= BEGUN_ITEMS_MAX and _are_bulks(frames[at + 1 :]):
                    self._begun, self._begun_bytes = frames[at:], sum(map(len, frames[at:]))
                    break
                reply = _cut_array(frames[at:stop]) if stop <= end else None
            if reply is None:
                rest = b"".join(frames[at:]) + rest
                break
            replies.append(reply)
            at = stop
        wanted_bytes = _wanted_bytes(rest) if rest else 0
        if not self._begun or (rest and (rest[:1] != b"$" or wanted_bytes <= len(rest))):
            return replies + self._cut(self._take_begun() + rest)
        self._keep(rest, 0, 0, wanted_bytes)
        return replies

    def _take_begun(self) -> bytes:
        begun, self._begun, self._begun_bytes = self._begun, [], 0
        return b"".join(begun)

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
        if self._begun_bytes + self._done_bytes + self._rest_bytes > self._bytes_max:
            self.error = FrameError(f"a reply is larger than {self._bytes_max} bytes")


def _is_header(frame: bytes) -> bool:
    """Tell whether a frame is the header of an array or a map."""
    return frame.endswith(b"\r\n") and _is_length(frame[1:-2])


def _is_length(digits: bytes) -> bool:
    """Tell whether digits are a length as everybody writes, and reads, it."""
    return digits.isdigit() and len(digits) <= LENGTH_DIGITS_MAX and (digits[:1] != b"0" or digits == b"0")


def _wanted_bytes(data: bytes) -> int:
    """Return how many bytes an item takes by itself; none if it is none."""
    try:
        return _item(data, 0)[0]
    except FrameError:
        return 0


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
    if isinstance(reply, CutArray):
        return reply.items
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
