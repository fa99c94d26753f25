"""Splits the bytes from a server into complete replies, without decoding them.

A reply that arrives in chunks is stored in chunks. A long text is not parsed again before its end has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import hiredis

from resp_server import native
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes, raw_reply_of, split_header

BULKS = b"$="
BULK_MARKS = (b"$", b"=")
ARRAYS = b"*~>"
MAP = b"%"
LINES = b"+-,("
LENGTHS = BULKS + ARRAYS + MAP
NUMBER = ord(":")
# The whole lines that encode nil, true and false.
NAMED = (b"_", b"$-1", b"*-1", b"#t", b"#f")
# A longer line is invalid (guess: the longest lines are errors, of a few hundred bytes).
LINE_BYTES_MAX = 64 << 10
# Characters of a 64-bit number with its sign, and digits of a length (more than any reply needs).
NUMBER_DIGITS_MAX = 20
LENGTH_DIGITS_MAX = 15
# If more of a text is missing, its chunks are stored without parsing (guess: a few reads of a socket).
TEXT_BYTES_MAX = 256 << 10
# Replies whose items are put in order in one step (guess: 0.2 ms if each has one item).
REPLIES_AT_ONCE = 64
# Items that are put in order, or joined, in one step (guess: 0.1 ms).
ITEMS_AT_ONCE = 1024
# Bytes that are split into items in one step (guess: a millisecond if items are short).
STEP_BYTES = 8 << 10


# The type stub of hiredis wrongly accepts only requests of one word.
_pack = cast(Callable[[tuple[Any, ...]], bytes], hiredis.pack_command)


def pack(request: Request) -> bytes:
    """Encode a request."""
    return _pack(tuple(request))


PING = pack((b"PING",))


class FrameError(Exception):
    """The received bytes are not a valid reply, or the reply is too large."""


class ReplySplitter:
    """Splits the bytes of one connection into replies.

    Args:
        returns_chunks: A reply of more than `JOINED_BYTES_MAX` that arrived in chunks is returned as `ReplyChunks`.
    """

    def __init__(self, reply_bytes_max: int, *, returns_chunks: bool = False) -> None:
        self._bytes_max = reply_bytes_max
        self.returns_chunks = returns_chunks
        self._done: list[bytes] = []  # the parsed bytes of the incomplete reply
        self._done_bytes = 0
        self._rest: list[bytes] = []  # its bytes that are not parsed yet
        self._rest_bytes = 0
        self._needed_bytes = 0  # nothing is parsed before `_rest` has this size
        self._missing = 1  # the items of the incomplete reply that are not parsed yet
        self._text_missing = 0  # the missing bytes of a long text, including its line end
        self._text_end = b""  # the last two bytes of that text so far
        # Set if the bytes after the replies that `feed` returned are invalid; further bytes are ignored.
        self.error: FrameError | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether only complete replies were received."""
        return self.error is None and not (self._done or self._rest)

    @property
    def partial_bytes(self) -> int:
        """The size that the incomplete reply will have at least."""
        return self._done_bytes + self._text_missing + max(self._rest_bytes, self._needed_bytes)

    def feed(self, data: bytes) -> list[RawReply]:
        """Add bytes; return the replies that they complete. The same bytes in other chunks give the same replies."""
        if self.error is not None:
            return []
        if self._text_missing:
            return self._feed_text(data)
        if self._rest:
            self._rest.append(data)
            self._rest_bytes += len(data)
            if self._rest_bytes < self._needed_bytes:
                return []
            data = b"".join(self._rest)
            self._rest = []
        return self._split(data)

    def _feed_text(self, data: bytes) -> list[RawReply]:
        """Add bytes of a long text, and the bytes after it."""
        some = data[: self._text_missing]
        self._text_missing -= len(some)
        self._text_end = (self._text_end + some)[-2:]
        self._done.append(some)
        self._done_bytes += len(some)
        if self._done_bytes > self._bytes_max:
            self._text_missing, self.error = 0, self._too_large()
            return []
        if self._text_missing:
            return []
        if self._text_end != b"\r\n":
            self.error = FrameError("a text is longer than its length line says")
            return []
        replies: list[RawReply] = []
        self._missing -= 1
        if not self._missing:
            self._missing = 1
            replies.append(self._pop_reply())
        return replies + self._split(data[len(some) :]) if len(some) < len(data) else replies

    def _pop_reply(self) -> RawReply:
        """Remove and return the complete reply."""
        done, self._done, self._done_bytes = self._done, [], 0
        return raw_reply_of(done) if self.returns_chunks else b"".join(done)

    def _too_large(self) -> FrameError:
        return FrameError(f"a reply is larger than {self._bytes_max} bytes")

    def _split(self, data: bytes) -> list[RawReply]:
        replies: list[RawReply] = []
        start = at = 0
        missing = self._missing
        while True:
            if missing > 1 and native.pipelines is not None:
                at, missing = native.pipelines.past_items(data, at, missing)
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
                some = data[start:at]
                start, missing = at, 1
                if self._done:
                    self._done.append(some)
                    replies.append(self._pop_reply())
                else:
                    replies.append(some)
        self._missing = missing
        if data[at : at + 1] in BULK_MARKS and after - len(data) > TEXT_BYTES_MAX:
            self._text_missing, self._text_end = after - len(data), data[-2:]
            at = after = len(data)
        self._store_rest(data, start, at, after - at)
        return replies

    def _store_rest(self, data: bytes, start: int, at: int, needed_bytes: int) -> None:
        if at > start:
            self._done.append(data[start:at])
            self._done_bytes += at - start
        self._rest_bytes = len(data) - at
        self._rest = [data[at:]] if self._rest_bytes else []
        self._needed_bytes = needed_bytes
        if self._done_bytes + self._rest_bytes > self._bytes_max:
            self.error = self._too_large()


def _is_length(digits: bytes) -> bool:
    """Return whether digits are a length without leading zeros, so that all parsers read the same number."""
    return digits.isdigit() and len(digits) <= LENGTH_DIGITS_MAX and (digits[:1] != b"0" or digits == b"0")


def _item(data: bytes, at: int) -> tuple[int, int]:
    """Return the offset after an item's own bytes, and the number of items in it.

    An offset after the end of the data means that bytes are missing. FrameError for bytes that a client could parse
    differently.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        if len(data) - at > LINE_BYTES_MAX + 1:  # one byte of the line end may be there
            raise _unexpected(data, at)
        return len(data) + 1, 0
    first_byte = data[at]
    digits = data[at + 1 : end]
    if first_byte in LINES and end - at <= LINE_BYTES_MAX:
        return end + 2, 0
    if first_byte == NUMBER and digits.removeprefix(b"-").isdigit() and len(digits) <= NUMBER_DIGITS_MAX:
        return end + 2, 0
    line = data[at:end]
    if line in NAMED:
        return end + 2, 0
    if first_byte not in LENGTHS or not _is_length(digits):
        raise _unexpected(data, at)
    number = int(digits)
    if first_byte in BULKS:
        after = end + 4 + number
        if after <= len(data) and data[after - 2 : after] != b"\r\n":
            raise FrameError(f"a text is longer than its length line says, {number} bytes")
        return after, 0
    return end + 2, 2 * number if first_byte in MAP else number


def _unexpected(data: bytes, at: int) -> FrameError:
    return FrameError(f"no reply begins with {data[at : at + 16]!r}")


def array_of(answer: RawReply) -> tuple[int, list[bytes]]:
    """Return the number of an array's items, and their encoded bytes."""
    head, texts = split_header(answer)
    if head[:1] != b"*" or head == b"*-1":
        raise FrameError(f"an array was expected, not {head[:16]!r}")
    return int(head[1:]), texts


def items_of(answer: RawReply) -> Steps[list[RawReply]]:
    """Return the items of an array, still encoded."""
    count, texts = array_of(answer)
    size = sum(map(len, texts))
    if count == 1:
        items: list[RawReply] = [raw_reply_of(texts)]
    else:
        items, frames = [], ReplySplitter(size + 1, returns_chunks=True)
        for some in _chunks_of_texts(texts):
            items += frames.feed(some)
            yield
    if len(items) != count:
        raise FrameError(f"an array of {count} items has {len(items)}")
    return items


def _chunks_of_texts(texts: Sequence[bytes]) -> Iterator[bytes]:
    for text in texts:
        for start in range(0, len(text), STEP_BYTES):
            yield text[start : start + STEP_BYTES]


def sum_of_replies(answers: Sequence[RawReply]) -> bytes:
    """Return the encoded sum of integer replies; ValueError for a reply that is not an integer."""
    return b":%d\r\n" % sum(int(as_bytes(answer)[1:]) for answer in answers)


def joined(answers: Sequence[RawReply]) -> RawReply:
    """Return one array with the items of all arrays, one array after the other."""
    arrays = [array_of(answer) for answer in answers]
    return raw_reply_of(
        [b"*%d\r\n" % sum(count for count, _ in arrays), *(text for _, texts in arrays for text in texts)]
    )


def array_in_order(answers: Sequence[RawReply], places: Sequence[Sequence[int]]) -> Steps[RawReply]:
    """Return one array with the items of all arrays.

    Args:
        places: For each array, the new indexes of its items.
    """
    items: list[RawReply] = [b""] * sum(map(len, places))
    for number, (answer, its_places) in enumerate(zip(answers, places, strict=True)):
        if not number % REPLIES_AT_ONCE:
            yield
        found = yield from items_of(answer)
        if len(found) != len(its_places):
            raise FrameError(f"{len(found)} items were returned for {len(its_places)} keys")
        for first in range(0, len(found), ITEMS_AT_ONCE):
            for place, item in zip(its_places[first : first + ITEMS_AT_ONCE], _taken(found, first), strict=True):
                items[place] = item
            if first:
                yield
    texts: list[RawReply] = [b"*%d\r\n" % len(items)]
    for first in range(0, len(items), ITEMS_AT_ONCE):
        texts.append(raw_reply_of(_taken(items, first)))
        if first:
            yield
    return raw_reply_of(texts)


def _taken(items: list[RawReply], first: int) -> list[RawReply]:
    """Return some items, and replace them by empty ones: freeing a million items at once would take too long."""
    some = items[first : first + ITEMS_AT_ONCE]
    items[first : first + len(some)] = [b""] * len(some)
    return some
