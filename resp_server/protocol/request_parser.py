"""The parser of clients' requests: arrays of bulk strings, and inline commands.

    *<count>\\r\\n  then count times  $<length>\\r\\n<length bytes>\\r\\n
    name argument "quoted \\x41" 'quoted'\\n

The first argument of a request is the name of its command. Numbers are checked before memory is allocated for them. A
state machine parses one argument at a time and keeps its state, so no byte is read twice, however the bytes arrive.

The compiled core (`resp_server.native`) parses simple requests itself. Without it, `split_requests` splits all similar
requests at the front of a buffer at once, and `split_together` does so for several clients. That takes 0.3 us per GET
instead of 4 (measured). The server in pure Python needs this to meet its latency budget.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from resp_server.protocol.errors import ProtocolError, QueryBufferError, client_text
from resp_server.protocol.inline import inline_arguments

Request = Sequence[bytes]

# A request with more arguments or bytes than this is executed in chunks of this size, each a few milliseconds (guess: 1
# to 5 us per argument; the slot of a key takes 3 ms per megabyte).
CHUNK_ARGUMENTS = 1024
CHUNK_ARGUMENT_BYTES = 256 << 10


class LongArgument:
    """A long argument with its line end, as the pieces in which it arrived: to join them would take too long.

    It is not `bytes`, so code that does not expect it fails. Only requests that a proxy forwards have such arguments.
    """

    __slots__ = ("_size", "texts")

    def __init__(self, texts: list[bytes], size: int) -> None:
        self.texts, self._size = texts, size

    def __len__(self) -> int:
        return self._size


class LongRequest(list[bytes]):
    """A request of many or long arguments.

    Args:
        long_at: The positions of arguments that are a `LongArgument`.
    """

    long_at: Sequence[int] = ()

    def __init__(self, arguments: Sequence[bytes], size_bytes: int) -> None:
        super().__init__(arguments)
        self.size_bytes = size_bytes


# The limits of Redis 7. Only `ARGUMENTS_MAX` is that of Redis 6, because all arguments are freed at once.
INLINE_BYTES_MAX = 64 * 1024
COUNT_MAX = 2**31 - 1
ARGUMENTS_MAX = 1024 * 1024
UNAUTHENTICATED_COUNT_MAX = 10
UNAUTHENTICATED_BULK_BYTES_MAX = 16_384
BULK_BYTES_MAX = 512 * 1024 * 1024
QUERY_BUFFER_BYTES_MAX = 1024 * 1024 * 1024

# The limits of one call of `feed` with `in_chunks`: a few milliseconds (measured: 1 us per argument). An inline command
# of the maximal length fits.
CHUNK_STEPS = 2048
CHUNK_BYTES = INLINE_BYTES_MAX + 2

# A longer argument becomes a `LongArgument` where the limits allow it (guess: to join a megabyte takes 0.3 ms).
LONG_ARGUMENT_BYTES = 1 << 20
# The command name and the first argument (a subcommand, a key, a channel, a script) are never a `LongArgument`.
FIRST_ARGUMENTS = 2

# The memory of an argument besides its bytes (CPython 3.11: object header and list pointer). It counts towards the
# query buffer's limit, so that the limit also holds for a million one-byte arguments.
ARGUMENT_OVERHEAD_BYTES = 41

# The name of a command begins at this offset or later: behind `*1`, `$1` and their line ends.
NAME_OFFSET_MIN = 8

# Larger requests gain nothing from splitting (guess).
SPLIT_ARGUMENTS_MAX = 128
SPLIT_ARGUMENT_BYTES_MAX = 1024

_COUNT_OF_LINE = {b"*%d" % count: count for count in range(1, SPLIT_ARGUMENTS_MAX + 1)}
_LENGTH_LINES = [b"$%d" % length for length in range(SPLIT_ARGUMENT_BYTES_MAX)]
_length_line = _LENGTH_LINES.__getitem__
_NUMBER = re.compile(rb"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one client's unfinished request.

    Args:
        value_bytes_max: The limit of arguments after the first two, which become a `LongArgument` above
            `LONG_ARGUMENT_BYTES`; 0: they have the limit of all arguments, `bulk_bytes_max`.
    """

    bulk_bytes_max: int = BULK_BYTES_MAX
    value_bytes_max: int = 0
    query_buffer_bytes_max: int = QUERY_BUFFER_BYTES_MAX


class RequestParser:
    """The parser of one connection. After an error it parses nothing more; the requests before the error are valid.

    Args:
        is_restricted: The client has not authenticated yet. `feed` returns one request at a time, because executing it
            may lift the restriction.
        in_chunks: `feed` works for a bounded time, and may return no request.

    Attributes:
        has_buffered_requests: More requests are buffered; call `feed(b"")` for them.
    """

    def __init__(
        self, limits: RequestLimits | None = None, is_restricted: bool = False, in_chunks: bool = False
    ) -> None:
        self.limits = limits or RequestLimits()
        self.is_restricted = is_restricted
        self._in_chunks = in_chunks
        self.error: ProtocolError | None = None
        self.has_buffered_requests = False
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._needed_bytes = 0
        self._arguments: list[bytes] = []
        self._arguments_bytes = 0
        # The arguments of the current request that have not arrived yet.
        self._arguments_left = 0
        self._long_argument: LongArgument | None = None
        self._long_missing = 0  # bytes of that argument, with its line end
        self._long_at: list[int] = []

    @property
    def buffered_bytes(self) -> int:
        """The buffered size of unparsed bytes and of an incomplete request."""
        return self._chunk_bytes + self._arguments_bytes

    def feed(self, data: bytes) -> list[Request]:
        """Add received bytes; return the requests that are complete. Sets `error` instead of raising."""
        if self.error is not None:
            return []
        self.has_buffered_requests = False
        if self._chunks:
            self._chunks.append(data)
            self._chunk_bytes += len(data)
            if self._chunk_bytes < self._needed_bytes:
                self._check_size()
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        requests: list[Request] = []
        if self._long_missing:
            data, self._chunk_bytes = self._feed_long_argument(data), 0
            requests = self._finished_long_argument()
            if not data or self.error is not None:
                self._check_size()
                return requests
        rest = b""
        if len(data) > CHUNK_BYTES and self._in_chunks:
            data, rest = self._chunk_of(data)
        if not self._arguments_left and not self.is_restricted and data[:1] == b"*":
            found, data = split_requests(data)
            requests += found
            if not data and not rest:
                self._chunk_bytes = 0
                return requests
            if rest and requests:  # the rest of the chunk may be split together with the bytes after it
                self._chunks, self._chunk_bytes, self._needed_bytes = [data], len(data), 0
                self._buffer_rest(rest)
                self._check_size()
                return requests
        try:
            self._parse(data, requests)
        except ProtocolError as error:
            self.error = error
        if rest and self.error is None:
            self._buffer_rest(rest)
        self._check_size()
        return requests

    def _chunk_of(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the first chunk, and the rest. An argument whose length is known is never cut."""
        size = max(CHUNK_BYTES, self._needed_bytes)
        return data[:size], data[size:]

    def _buffer_rest(self, rest: bytes) -> None:
        """Buffer the bytes after a chunk."""
        self._chunks.append(rest)
        self._chunk_bytes += len(rest)
        self.has_buffered_requests = self._chunk_bytes >= self._needed_bytes

    def _check_size(self) -> None:
        if self.buffered_bytes > self.limits.query_buffer_bytes_max and self.error is None:
            self.error = QueryBufferError("query buffer limit exceeded")
        if self.error is not None:
            self.has_buffered_requests = False
            self._chunks.clear()
            self._arguments, self._long_argument = [], None
            self._chunk_bytes = self._arguments_bytes = self._long_missing = 0

    def _parse(self, data: bytes, requests: list[Request]) -> None:
        """Parse bytes step by step; buffer the unfinished rest."""
        at = 0
        self._needed_bytes = 0
        steps = CHUNK_STEPS if self._in_chunks else len(data)
        while at < len(data):
            before = len(requests)
            end = self._step(data, at, requests)
            if end == at:
                break
            at = end
            requests += self._finished_long_argument()
            if self.error is not None:
                break
            steps -= 1
            if not steps or (self.is_restricted and len(requests) > before):
                self.has_buffered_requests = at < len(data)
                break
        self._chunk_bytes = len(data) - at
        self._needed_bytes = max(0, self._needed_bytes - at)
        if self._chunk_bytes:
            self._chunks = [data[at:]]

    def _step(self, data: bytes, at: int, requests: list[Request]) -> int:
        """Parse one argument, count line or inline command; return the offset after it, or `at` if it is incomplete."""
        if self._arguments_left:
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
        self._arguments_left = max(0, count)
        if count > CHUNK_ARGUMENTS:
            # Created here, because copying a million arguments later would take 7 ms.
            self._arguments = LongRequest((), 0)
        return end + 2

    def _argument(self, data: bytes, at: int, requests: list[Request]) -> int:
        line_end = _line_end(data, at, "too big bulk count string")
        if line_end < 0:
            return at
        if data[at] != 0x24:  # $
            raise ProtocolError(f"expected '$', got '{client_text(data[at : at + 1])}'")
        if self._arguments_left > ARGUMENTS_MAX:
            raise ProtocolError("invalid multibulk length")
        start = line_end + 2
        length = self._bulk_length(data[at + 1 : line_end])
        if length > LONG_ARGUMENT_BYTES and self._may_be_long:
            return self._begin_long_argument(data, start, length)
        end = start + length
        if len(data) < end + 2:
            self._needed_bytes = end + 2
            return at
        if data[end : end + 2] != b"\r\n":
            raise ProtocolError("expected a line end after a bulk string")
        self._arguments.append(data[start:end])
        self._arguments_bytes += length + ARGUMENT_OVERHEAD_BYTES
        self._arguments_left -= 1
        if not self._arguments_left:
            requests.append(self._pop_request())
        elif self._arguments_bytes > self.limits.query_buffer_bytes_max:
            raise QueryBufferError("query buffer limit exceeded")
        return end + 2

    def _pop_request(self) -> Request:
        """Remove and return the complete request."""
        request = _request_of(self._arguments, self._arguments_bytes)
        if self._long_at:
            assert isinstance(request, LongRequest)  # each of these arguments is long enough for that
            request.long_at, self._long_at = self._long_at, []
        self._arguments, self._arguments_bytes = [], 0
        return request

    @property
    def _may_be_long(self) -> bool:
        """Whether the next argument may be a `LongArgument`."""
        return len(self._arguments) >= FIRST_ARGUMENTS and self.limits.value_bytes_max > 0

    def _begin_long_argument(self, data: bytes, start: int, length: int) -> int:
        """Take the first bytes of a long argument; return the offset after them. `feed` takes the other bytes."""
        self._long_argument, self._long_missing = LongArgument([], length), length + 2
        self._feed_long_argument(data[start:])
        return min(len(data), start + length + 2)

    def _feed_long_argument(self, data: bytes) -> bytes:
        """Add bytes to the long argument; return the bytes after it."""
        assert self._long_argument is not None
        some = data[: self._long_missing]
        self._long_argument.texts.append(some)
        self._arguments_bytes += len(some) + ARGUMENT_OVERHEAD_BYTES
        self._long_missing -= len(some)
        return data[len(some) :]

    def _finished_long_argument(self) -> list[Request]:
        """Add the long argument to the request if it is complete; return the request if that is complete, too."""
        argument = self._long_argument
        if argument is None or self._long_missing or self.error is not None:
            return []
        self._long_argument = None
        if b"".join(argument.texts[-2:])[-2:] != b"\r\n":
            self.error = ProtocolError("expected a line end after a bulk string")
            return []
        self._long_at.append(len(self._arguments))
        self._arguments.append(argument)  # type: ignore[arg-type]
        self._arguments_bytes += ARGUMENT_OVERHEAD_BYTES
        self._arguments_left -= 1
        return [] if self._arguments_left else [self._pop_request()]

    def _bulk_length(self, digits: bytes) -> int:
        length = _number(digits)
        bytes_max = self.limits.value_bytes_max if self._may_be_long else self.limits.bulk_bytes_max
        if length is None or not 0 <= length <= bytes_max:
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
        arguments = inline_arguments(data[at:end])
        if arguments:
            requests.append(_request_of(arguments, end - at))
        return end + 1


def _request_of(arguments: list[bytes], size_bytes: int) -> Request:
    if isinstance(arguments, LongRequest):
        arguments.size_bytes = size_bytes
        return arguments
    is_long = len(arguments) > CHUNK_ARGUMENTS or size_bytes > CHUNK_ARGUMENT_BYTES
    return LongRequest(arguments, size_bytes) if is_long else arguments


def unauthenticated_error(request: Request) -> ProtocolError | None:
    """Return the error of a request that a client without a login may not send; None: it may.

    The parser raises it for such a client. A request is parsed before that if the client logs out in the same buffer.
    """
    if len(request) > UNAUTHENTICATED_COUNT_MAX:
        return ProtocolError("unauthenticated multibulk length")
    if max(map(len, request)) > UNAUTHENTICATED_BULK_BYTES_MAX:
        return ProtocolError("unauthenticated bulk length")
    return None


def split_requests(data: bytes) -> tuple[list[Request], bytes]:
    """Parse the requests at a buffer's front that have the same number of arguments; return them and the rest.

    Returns no requests if one of them is invalid, or has an argument that is long or contains a line end.
    `RequestParser` then parses them.
    """
    parts = data.split(b"\r\n")
    last = len(parts) - 1
    count = _COUNT_OF_LINE.get(parts[0], 0)
    stride = 1 + 2 * count
    if stride == last and count:  # a single request: skip the work for several
        arguments = parts[2::2]
        return ([arguments], parts[last]) if parts[1:last:2] == _length_lines(arguments) else ([], data)
    count_lines = parts[: last - last % stride : stride]
    equal_count = len(count_lines) if count_lines.count(parts[0]) == len(count_lines) else _count_equal(count_lines)
    if not count or not equal_count:
        return [], data
    end = equal_count * stride
    lines_and_arguments = parts[:end]
    del lines_and_arguments[::stride]
    arguments = lines_and_arguments[1::2]
    if lines_and_arguments[::2] != _length_lines(arguments):
        return [], data
    rest = parts[last] if end == last else b"\r\n".join(parts[end:])
    return list(zip(*[iter(arguments)] * count, strict=True)), rest


def split_together(inputs: Sequence[bytes]) -> tuple[list[int], list[Request]]:
    """Parse the inputs of several clients. Their first requests have the same command and number of arguments.

    Returns the number of requests in each input, and the requests of all. The number is 0 if `RequestParser` has to
    parse an input: it ends within a request, or has requests of other commands.
    """
    name_end = inputs[0].find(b"\r\n", NAME_OFFSET_MIN) + 2
    prefix = inputs[0][:name_end]
    stride = 1 + 2 * _COUNT_OF_LINE.get(prefix[: prefix.find(b"\r")], 0)
    lines = [data.count(b"\r\n") if data.endswith(b"\r\n") else 0 for data in inputs]
    if stride > 1 and lines.count(stride) == len(lines):  # nearly always: one request each
        counts = [1] * len(lines)
    else:
        counts = [_request_count(data, prefix, each, stride) for data, each in zip(inputs, lines, strict=True)]
    complete = inputs if 0 not in counts else [data for data, count in zip(inputs, counts, strict=True) if count]
    if complete:
        requests, rest = split_requests(b"".join(complete))
        name = requests[0][0] if requests else b""
        if not rest and len(requests) == sum(counts) and [each[0] for each in requests].count(name) == len(requests):
            return counts, requests
    return [0] * len(inputs), []


def _request_count(data: bytes, prefix: bytes, lines: int, stride: int) -> int:
    """Return the number of requests in an input if all are complete and begin with a prefix; else 0."""
    count, more = divmod(lines, stride)
    return count if stride > 1 and not more and (count == 1 or data.count(prefix) == count) else 0


def _length_lines(arguments: Sequence[bytes]) -> list[bytes]:
    """Return the length line `$<length>` of each argument; an empty list if one of the arguments is long."""
    try:
        return list(map(_length_line, map(len, arguments)))
    except IndexError:
        return []


def _count_equal(lines: Sequence[bytes]) -> int:
    """Return the number of lines at the front that equal the first one, given that some line does not."""
    return next(index for index, line in enumerate(lines) if line != lines[0])


def _line_end(data: bytes, at: int, too_long: str) -> int:
    """Return the offset of the end of a count or length line, or -1 if the line is incomplete.

    A line ends with a carriage return and one more byte; like Redis, this does not check that it is a line feed.
    """
    end = data.find(b"\r", at, at + INLINE_BYTES_MAX)
    if end < 0 and len(data) - at > INLINE_BYTES_MAX:
        raise ProtocolError(too_long)
    return end if end + 1 < len(data) else -1


def _number(digits: bytes) -> int | None:
    """Return a number, or None if it is not in its canonical form."""
    return int(digits) if _NUMBER.fullmatch(digits) else None
