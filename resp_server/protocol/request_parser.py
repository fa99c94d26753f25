"""Bytes from a client to requests: arrays of bulk strings, and inline commands.

    *<count>\\r\\n  then count times  $<length>\\r\\n<length bytes>\\r\\n
    word word "quoted \\x41" 'quoted'\\n

Numbers are checked before anything is allocated for them. A state machine takes an argument at a time and remembers
where it stands, so that no byte is looked at twice however it arrives. The compiled core, where it runs, has cut what
is simple before (see `compiled`). Where it does not, a run of like requests at a buffer's front is split at line ends,
all of them at once (measured: 0.3 us a GET instead of 4; without it the server in Python alone misses its budget).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from resp_server.protocol.errors import ProtocolError, QueryBufferError, typed
from resp_server.protocol.inline import inline_words

Request = Sequence[bytes]

# Words, and bytes, from which on a request is answered in portions of so many: a millisecond or a few (guess: 1 to 5 us
# for a word; to find the slot of a key takes 3 ms for a megabyte of it).
PORTION_WORDS = 1024
PORTION_WORDS_BYTES = 256 << 10


class LongRequest(list[bytes]):
    """A request of many words, or of long ones. size_bytes: how long they are together."""

    def __init__(self, words: Sequence[bytes], size_bytes: int) -> None:
        super().__init__(words)
        self.size_bytes = size_bytes


# Standard: the limits of Redis 7; of words that come that of Redis up to 6, as they are let go in one turn.
INLINE_BYTES_MAX = 64 * 1024
COUNT_MAX = 2**31 - 1
WORDS_MAX = 1024 * 1024
UNAUTHENTICATED_COUNT_MAX = 10
UNAUTHENTICATED_BULK_BYTES_MAX = 16_384
BULK_BYTES_MAX = 512 * 1024 * 1024
QUERY_BUFFER_BYTES_MAX = 1024 * 1024 * 1024

# What `feed` takes at once where it is to work in portions: a few milliseconds (measured: 1 us for an argument). An
# inline command, or a line that is none, always fits in.
PORTION_STEPS = 2048
PORTION_BYTES = INLINE_BYTES_MAX + 2

# What an argument costs beside its bytes (CPython 3.11: object header and the list's pointer), so that the query
# buffer's limit holds for a million one-byte arguments too.
ARGUMENT_OVERHEAD_BYTES = 41

# Beyond these, splitting gains nothing (guess).
SPLIT_ARGUMENTS_MAX = 128
SPLIT_TEXT_BYTES_MAX = 1024

_COUNT_OF_LINE = {b"*%d" % count: count for count in range(1, SPLIT_ARGUMENTS_MAX + 1)}
_LENGTH_LINES = [b"$%d" % length for length in range(SPLIT_TEXT_BYTES_MAX)]
_length_line = _LENGTH_LINES.__getitem__
_NUMBER = re.compile(rb"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class RequestLimits:
    """What one client may make the server hold."""

    bulk_bytes_max: int = BULK_BYTES_MAX
    query_buffer_bytes_max: int = QUERY_BUFFER_BYTES_MAX


class RequestParser:
    """One connection's requests. After an error nothing more is parsed; the requests before it still count.

    While `is_restricted` (the client has yet to authenticate), `feed` returns one request at a time, as answering it
    may lift the restriction; with `in_portions` it works for a bounded time, and may return none. `has_more` tells to
    call `feed(b"")` afterwards.
    """

    def __init__(
        self, limits: RequestLimits | None = None, is_restricted: bool = False, in_portions: bool = False
    ) -> None:
        self.limits = limits or RequestLimits()
        self.is_restricted = is_restricted
        self._in_portions = in_portions
        self.error: ProtocolError | None = None
        self.has_more = False
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._wanted_bytes = 0
        self._arguments: list[bytes] = []
        self._argument_bytes = 0
        self._missing = 0

    @property
    def buffered_bytes(self) -> int:
        """How much is held of a request that is not yet complete."""
        return self._chunk_bytes + self._argument_bytes

    def feed(self, data: bytes) -> list[Request]:
        """Take bytes, return the requests that are complete by now. Sets `error` instead of raising."""
        if self.error is not None:
            return []
        self.has_more = False
        if self._chunks:
            self._chunks.append(data)
            self._chunk_bytes += len(data)
            if self._chunk_bytes < self._wanted_bytes:
                self._check_size()
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        requests: list[Request] = []
        rest = b""
        if len(data) > PORTION_BYTES and self._in_portions:
            data, rest = self._portion_of(data)
        if not self._missing and not self.is_restricted and data[:1] == b"*":
            requests, data = split_requests(data)
            if not data and not rest:
                self._chunk_bytes = 0
                return requests
            if rest and requests:  # what is left of the portion may be split with what is behind it
                self._chunks, self._chunk_bytes, self._wanted_bytes = [data], len(data), 0
                self._put_off(rest)
                self._check_size()
                return requests
        try:
            self._parse(data, requests)
        except ProtocolError as error:
            self.error = error
        if rest and self.error is None:
            self._put_off(rest)
        self._check_size()
        return requests

    def _portion_of(self, data: bytes) -> tuple[bytes, bytes]:
        """Return what is taken now, and the rest: an argument that is waited for is taken as a whole."""
        size = max(PORTION_BYTES, self._wanted_bytes)
        return data[:size], data[size:]

    def _put_off(self, rest: bytes) -> None:
        """Keep what is behind a portion."""
        self._chunks.append(rest)
        self._chunk_bytes += len(rest)
        self.has_more = self._chunk_bytes >= self._wanted_bytes

    def _check_size(self) -> None:
        if self.buffered_bytes > self.limits.query_buffer_bytes_max and self.error is None:
            self.error = QueryBufferError("query buffer limit exceeded")
        if self.error is not None:
            self.has_more = False
            self._chunks.clear()
            self._arguments = []
            self._chunk_bytes = self._argument_bytes = 0

    def _parse(self, data: bytes, requests: list[Request]) -> None:
        """Take what splitting could not; keep the unfinished rest."""
        at = 0
        self._wanted_bytes = 0
        steps = PORTION_STEPS if self._in_portions else len(data)
        while at < len(data):
            before = len(requests)
            end = self._step(data, at, requests)
            if end == at:
                break
            at = end
            steps -= 1
            if not steps or (self.is_restricted and len(requests) > before):
                self.has_more = at < len(data)
                break
        self._chunk_bytes = len(data) - at
        self._wanted_bytes = max(0, self._wanted_bytes - at)
        if self._chunk_bytes:
            self._chunks = [data[at:]]

    def _step(self, data: bytes, at: int, requests: list[Request]) -> int:
        """Take one argument, one count line or one inline command; return where it ended, or `at` if unfinished."""
        if self._missing:
            return self._argument(data, at, requests)
        if data[at] == 0x2A:  # *
            return self._count(data, at)
        return self._inline(data, at, requests)

    def _count(self, data: bytes, at: int) -> int:
        end = _line_end(data, at, "too big mbulk count string")
        if end < 0:
            return at
        count = _number(data[at + 1 : end])
        if count is None or count > COUNT_MAX:
            raise ProtocolError("invalid multibulk length")
        if self.is_restricted and count > UNAUTHENTICATED_COUNT_MAX:
            raise ProtocolError("unauthenticated multibulk length")
        self._missing = max(0, count)
        if count > PORTION_WORDS:
            self._arguments = LongRequest((), 0)  # from the start: to copy a million words takes 7 ms
        return end + 2

    def _argument(self, data: bytes, at: int, requests: list[Request]) -> int:
        line_end = _line_end(data, at, "too big bulk count string")
        if line_end < 0:
            return at
        if data[at] != 0x24:  # $
            raise ProtocolError(f"expected '$', got '{typed(data[at : at + 1])}'")
        if self._missing > WORDS_MAX:
            raise ProtocolError("invalid multibulk length")
        start = line_end + 2
        end = start + self._bulk_length(data[at + 1 : line_end])
        if len(data) < end + 2:
            self._wanted_bytes = end + 2
            return at
        if data[end : end + 2] != b"\r\n":
            raise ProtocolError("expected a line end after a bulk string")
        self._arguments.append(data[start:end])
        self._argument_bytes += end - start + ARGUMENT_OVERHEAD_BYTES
        self._missing -= 1
        if not self._missing:
            requests.append(_request_of(self._arguments, self._argument_bytes))
            self._arguments = []
            self._argument_bytes = 0
        elif self._argument_bytes > self.limits.query_buffer_bytes_max:
            raise QueryBufferError("query buffer limit exceeded")
        return end + 2

    def _bulk_length(self, digits: bytes) -> int:
        length = _number(digits)
        if length is None or not 0 <= length <= self.limits.bulk_bytes_max:
            raise ProtocolError("invalid bulk length")
        if self.is_restricted and length > UNAUTHENTICATED_BULK_BYTES_MAX:
            raise ProtocolError("unauthenticated bulk length")
        return length

    def _inline(self, data: bytes, at: int, requests: list[Request]) -> int:
        end = data.find(b"\n", at, at + INLINE_BYTES_MAX + 1)
        if end < 0:
            if len(data) - at > INLINE_BYTES_MAX:
                raise ProtocolError("too big inline request")
            return at
        words = inline_words(data[at:end])
        if words:
            requests.append(_request_of(words, end - at))
        return end + 1


def _request_of(words: list[bytes], size_bytes: int) -> Request:
    if isinstance(words, LongRequest):
        words.size_bytes = size_bytes
        return words
    is_long = len(words) > PORTION_WORDS or size_bytes > PORTION_WORDS_BYTES
    return LongRequest(words, size_bytes) if is_long else words


def split_requests(data: bytes) -> tuple[list[Request], bytes]:
    """Take the requests at a buffer's front that all have the same number of arguments; return them and the rest.

    Takes none, without judging, if one of them is not made of short texts without line ends: `RequestParser` goes on.
    """
    parts = data.split(b"\r\n")
    last = len(parts) - 1
    count = _COUNT_OF_LINE.get(parts[0], 0)
    stride = 1 + 2 * count
    if stride == last and count:  # one alone does not pay for the sorting out of many
        texts = parts[2::2]
        return ([texts], parts[last]) if parts[1:last:2] == _length_lines(texts) else ([], data)
    heads = parts[: last - last % stride : stride]
    alike = len(heads) if heads.count(parts[0]) == len(heads) else _alike(heads)
    if not count or not alike:
        return [], data
    end = alike * stride
    words = parts[:end]
    del words[::stride]
    texts = words[1::2]
    if words[::2] != _length_lines(texts):
        return [], data
    rest = parts[last] if end == last else b"\r\n".join(parts[end:])
    return list(zip(*[iter(texts)] * count, strict=True)), rest


def _length_lines(texts: Sequence[bytes]) -> list[bytes]:
    """Return the line before each of some texts; none if one of them is not short."""
    try:
        return list(map(_length_line, map(len, texts)))
    except IndexError:
        return []


def _alike(lines: Sequence[bytes]) -> int:
    """Return how many lines at the front are like the first."""
    return next((at for at, line in enumerate(lines) if line != lines[0]), len(lines))


def _line_end(data: bytes, at: int, too_long: str) -> int:
    """Return where a count's or length's line ends, or -1 if that is not here yet.

    It ends with a carriage return and one byte more, of which Redis does not ask that it is a line feed.
    """
    end = data.find(b"\r", at, at + INLINE_BYTES_MAX)
    if end < 0 and len(data) - at > INLINE_BYTES_MAX:
        raise ProtocolError(too_long)
    return end if end + 1 < len(data) else -1


def _number(digits: bytes) -> int | None:
    """Read a number written the one canonical way, or return None."""
    return int(digits) if _NUMBER.fullmatch(digits) else None
