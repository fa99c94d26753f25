"""Encodes plain Python replies as bytes. The only place that distinguishes RESP2 and RESP3.

The values that a command may return, and their encoding:

    None          nil                          str      simple string (`+OK`)
    bytes         bulk string                  int      integer
    float         double; RESP2: bulk string   bool     boolean; RESP2: 1 or 0
    list, tuple   array                        dict     map; RESP2: flat array
    ReplySet      set; RESP2: array            Push     push; RESP2: array
    Verbatim      verbatim text; RESP2: bulk   PackedPairs   a map that is already encoded
    Pairs         array of arrays of two; RESP2: flat array
    NULL_ARRAY    nil; RESP2: null array       PackedItems   an array or a set that is already encoded
    DoubleText    a double, given as its text  (RESP2: bulk string)
    Frames        complete replies and pushes, already encoded
    ReplyError    error                        Sliced     encoded in steps; may contain LongBulk
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, cast

from resp_server.protocol.doubles import double_text
from resp_server.protocol.errors import ReplyError

# Any value that a command may return; nested to any depth.
Reply = Any

OK = "OK"


class ReplySet(tuple[Reply, ...]):
    """Members without order; written in the order given."""

    __slots__ = ()


class Push(tuple[Reply, ...]):
    """A message that is not the reply to a request."""

    __slots__ = ()


@dataclass(slots=True)
class Verbatim:
    """Text for people, such as INFO's."""

    text: bytes


@dataclass(frozen=True)
class DoubleText:
    """A double with its own text."""

    text: bytes


@dataclass(slots=True)
class Frames:
    """Complete replies and pushes, already encoded."""

    frames: bytes


@dataclass(frozen=True)
class PackedPairs:
    """A map whose pairs are already encoded as bulk strings."""

    count: int
    body: bytes


@dataclass(frozen=True)
class PackedItems:
    """An array, or a set, whose items are already encoded as bulk strings."""

    count: int
    body: bytes
    shape: type = list


class Pairs(list[tuple[Reply, Reply]]):
    """An ordered list of pairs, such as members with their scores."""


class _NullArray:
    """The null array of RESP2, `*-1`."""


NULL_ARRAY = _NullArray()


class LongBulk(NamedTuple):
    """A bulk string that is read and sent piece by piece; only within `LongItems`."""

    length: int
    parts: Iterator[bytes]


class LongItems(list[Reply]):
    """An array, or a chunk of a sliced reply, that contains LongBulk items, at any depth."""


class LongPair(LongItems):
    """A pair that contains a LongBulk; only within `LongItems`."""


class FirstOf:
    """The shape of a sliced reply that is the first item of all chunks, or nil if there is none."""


@dataclass
class Sliced:
    """A reply that is computed in steps, so that it neither blocks the event loop nor has to be in memory at once.

    Args:
        chunks: The items of the reply, made in steps of well below a millisecond: one for each chunk, and several for a
            chunk that is LongItems. A Pending among the chunks is waited for; its result is a chunk of one item.
        release: Called once at the end, also at an early end.
        shape: For list, dict and ReplySet, the chunks contain the items (dict: key, value, key, ...). For Pairs, they
            are Pairs, or LongItems of LongPairs. For int, they contain numbers, whose sum is the reply. For FirstOf,
            the first item is the reply. For Frames, they contain complete replies, sent after the last chunk.
        count: The number of items or pairs, or an iterator of numbers whose sum it is: the reply is sent while it is
            computed. None: the reply is sent when it is complete.
        on_finished: Called after the last step with the total time of the steps in nanoseconds.
        has_effect: Computing the reply has an effect, so it is computed even if it is suppressed.
    """

    chunks: Iterator[Sequence[Reply] | Pending]
    release: Callable[[], None]
    shape: type = list
    count: int | Iterator[int] | None = None
    on_finished: Callable[[int], None] = lambda nanoseconds: None
    has_effect: bool = False
    is_suppressed: bool = False


class Pending:
    """A reply that depends on responses of other processes. The client's next requests wait for it.

    `resolve` provides the reply, at once or later; only its first call counts. After `seconds_max`, `on_timeout`
    returns the reply, or raises.

    Attributes:
        is_blocking: Whether the command ends when its client leaves. Those are blocking commands, which wait for
            other clients, and expensive ones.
        on_abandon: Called when the client has left.
    """

    is_blocking = False

    def __init__(self, seconds_max: float, on_timeout: Callable[[], Reply]) -> None:
        self.seconds_max = seconds_max
        self.make = on_timeout
        self.is_resolved = False
        self.on_abandon: Callable[[], object] = lambda: None
        self._wake: Callable[[], object] | None = None

    def resolve(self, make: Callable[[], Reply]) -> None:
        """Set the function that returns the reply, or raises. Only the first call counts."""
        if self.is_resolved:
            return
        self.is_resolved = True
        self.make = make
        if self._wake is not None:
            self._wake()

    def when_resolved(self, wake: Callable[[], object] | None) -> None:
        """Set the function that `resolve` calls; None: the client no longer waits."""
        self._wake = wake

    def abandon(self) -> None:
        """Forget the reply, because the client has disconnected."""
        self._wake = None
        self.on_abandon()


class Retry(Pending):
    """Stands for the reply to a request that is retried within `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, lambda: None)

    @property
    def is_awaited(self) -> bool:
        """Whether the client still waits."""
        return self._wake is not None


class PausedWrite(Retry):
    """Stands for the reply to a write that CLIENT PAUSE delays. The end of the pause ends the wait, too."""

    is_blocking = True  # the write of a client that leaves is not run


def encode(reply: Reply, protocol: int) -> bytes:
    """Encode a reply; `protocol` is 2 or 3."""
    kind = type(reply)
    if kind is bytes:
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if kind is int:
        return b":%d\r\n" % reply
    if isinstance(reply, Frames):
        return reply.frames
    out: list[bytes] = []
    _write(reply, protocol >= 3, out)
    return b"".join(out)


def encode_header(shape: type, count: int, protocol: int) -> bytes:
    """Return the first line of an array, a map, a set or pairs."""
    if shape is Frames:
        return b""
    if shape is dict:
        return b"%%%d\r\n" % count if protocol >= 3 else b"*%d\r\n" % (2 * count)
    if shape is Pairs:
        return b"*%d\r\n" % (count if protocol >= 3 else 2 * count)
    return b"~%d\r\n" % count if shape is ReplySet and protocol >= 3 else b"*%d\r\n" % count


def encode_items(items: Sequence[Reply], protocol: int) -> bytes:
    """Return the items of an array without its first line."""
    out: list[bytes] = []
    (_write_pairs if type(items) is Pairs else _write_items)(items, protocol >= 3, out)
    return b"".join(out)


def _write(reply: Reply, is_resp3: bool, out: list[bytes]) -> None:
    kind = type(reply)
    if kind is bytes:
        out.append(b"$%d\r\n%b\r\n" % (len(reply), reply))
    elif reply is None:
        out.append(b"_\r\n" if is_resp3 else b"$-1\r\n")
    elif kind is int:
        out.append(b":%d\r\n" % reply)
    elif kind is str:
        out.append(b"+%b\r\n" % reply.encode("utf-8", "surrogateescape"))
    elif kind is list or kind is tuple:
        out.append(b"*%d\r\n" % len(reply))
        _write_items(reply, is_resp3, out)
    elif kind is dict:
        out.append(encode_header(dict, len(reply), 2 + is_resp3))
        for pair in reply.items():
            _write_items(pair, is_resp3, out)
    elif kind is Frames:
        out.append(reply.frames)
    elif kind is float:
        text = double_text(reply)
        out.append(b",%b\r\n" % text if is_resp3 else b"$%d\r\n%b\r\n" % (len(text), text))
    else:
        _write_rare(reply, is_resp3, out)


def _write_items(items: Sequence[Reply], is_resp3: bool, out: list[bytes]) -> None:
    for item in items:
        if type(item) is bytes:  # nearly always, and this saves a call per item
            out.append(b"$%d\r\n%b\r\n" % (len(item), item))
        else:
            _write(item, is_resp3, out)


def _write_pairs(pairs: Sequence[Reply], is_resp3: bool, out: list[bytes]) -> None:
    for pair in pairs:
        if is_resp3:
            out.append(b"*2\r\n")
        _write_items(pair, is_resp3, out)


def _write_rare(reply: Reply, is_resp3: bool, out: list[bytes]) -> None:
    protocol = 2 + is_resp3
    match reply:
        case DoubleText(text):
            out.append(b",%b\r\n" % text if is_resp3 else b"$%d\r\n%b\r\n" % (len(text), text))
        case PackedPairs(count, body):
            out += (encode_header(dict, count, protocol), body)
        case PackedItems(count, body, shape):
            out += (encode_header(shape, count, protocol), body)
        case Pairs():
            out.append(encode_header(Pairs, len(reply), protocol))
            _write_pairs(reply, is_resp3, out)
        case _NullArray():
            out.append(b"_\r\n" if is_resp3 else b"*-1\r\n")
        case bool():
            out.append((b"#t\r\n" if reply else b"#f\r\n") if is_resp3 else b":%d\r\n" % reply)
        case Verbatim(text):
            header = b"=%d\r\ntxt:" % (len(text) + 4) if is_resp3 else b"$%d\r\n" % len(text)
            out += (header, text, b"\r\n")
        case ReplySet():
            out.append(encode_header(ReplySet, len(reply), protocol))
            _write_items(reply, is_resp3, out)
        case Push():
            out.append(b">%d\r\n" % len(reply) if is_resp3 else b"*%d\r\n" % len(reply))
            _write_items(reply, is_resp3, out)
        case ReplyError():
            out.append(b"-%b\r\n" % reply.line)
        case _:
            raise TypeError(f"a command returned {type(reply).__name__}, which is not a reply value")


# A step ends after this many encoded bytes (guess).
STEP_BYTES_MAX = 64 << 10


class ReplyStream(Protocol):
    """A reply that is sent in steps."""

    @property
    def pins_epoch(self) -> bool:
        """Return whether the epoch stays pinned until the reply is sent."""

    @property
    def pending(self) -> Pending | None:
        """The pending reply that the next step needs; None: it can be made now."""

    @property
    def buffered_bytes(self) -> int:
        """The bytes that were encoded and cannot be sent yet."""

    @property
    def has_started(self) -> bool:
        """Return whether the reply's first byte was sent, after which it cannot become an error."""

    @property
    def is_done(self) -> bool:
        """Return whether all of the reply was returned."""

    def step(self) -> bytes:
        """Return the next bytes to send, which may be none."""

    def close(self) -> None:
        """Release the pinned epoch. Call it once, at the end or at an early end."""


# A reply that is not complete yet: it is encoded in steps, or pending.
IncompleteReply = Sliced | Pending | ReplyStream


class SlicedEncoder:
    """Encodes a sliced reply, step by step."""

    def __init__(self, sliced: Sliced, protocol: int) -> None:
        self._sliced = sliced
        self._protocol = protocol
        self._count = sliced.count
        self._buffered: deque[bytes] = deque()
        self._items_left: deque[Reply] = deque()  # items of the last chunk
        self._bulk: Iterator[bytes] | None = None
        self._items = 0
        self._total = 0
        self._is_last = False
        self._nanoseconds = 0
        self.pins_epoch = True
        self.pending: Pending | None = None
        self.buffered_bytes = 0
        self.has_started = False
        self.is_done = False

    def step(self) -> bytes:
        """Compute the next chunk, and return the bytes that can be sent now, which may be none.

        Exceptions of a chunk are raised here; before `has_started` the reply can still be an error.
        """
        started_ns = perf_counter_ns()
        try:
            out_bytes = self._step()
            return b"" if self._sliced.is_suppressed else out_bytes
        finally:
            self._nanoseconds += perf_counter_ns() - started_ns

    def _step(self) -> bytes:
        if self._bulk is not None or self._items_left:
            return self._send_items()
        if self._is_last:
            return self._send_buffered()
        if self._count is not None and not isinstance(self._count, int):
            return self._add_up(self._count)
        chunk = self._next_chunk()
        if self.pending is not None:
            return b""
        if chunk is None:
            return self._finish()
        if self._sliced.shape is int:
            self._total += sum(chunk)
            return b""
        if self._sliced.shape is FirstOf:
            return self._send_only(chunk[0]) if chunk else b""
        self._items += len(chunk)
        if not chunk:
            return b""
        if type(chunk) is LongItems:
            self._items_left.extend(chunk)
            return self._start() + self._send_items()
        items = encode_items(chunk, self._protocol)
        if self._count is None:
            self._buffered.append(items)
            self.buffered_bytes += len(items)
            return b""
        return self._start() + items

    def _next_chunk(self) -> Sequence[Reply] | None:
        """Return the next chunk; None after the last one, or if `pending` is set and must be awaited first."""
        if self.pending is not None:
            resolved, self.pending = self.pending, None
            return [resolved.make()]
        chunk = next(self._sliced.chunks, None)
        if isinstance(chunk, Pending):
            self.pending = chunk
            return None
        return chunk

    def close(self) -> None:
        """Release the pinned epoch. Call it once, at the end or at an early end."""
        self._sliced.release()
        self._sliced.on_finished(self._nanoseconds)

    def _add_up(self, numbers: Iterator[int]) -> bytes:
        number = next(numbers, None)
        if number is None:
            self._count, self._total = self._total, 0
        else:
            self._total += number
        return b""

    def _send_only(self, item: Reply) -> bytes:
        self._items_left.append(item)
        self._is_last = self.has_started = True
        return self._send_items()

    def _send_items(self) -> bytes:
        """Encode the rest of the last chunk: a piece of a long item, or the items up to the next long one."""
        out: list[bytes] = []
        if self._bulk is not None:
            piece = next(self._bulk, None)
            if piece is not None:
                return piece
            self._bulk = None
            out.append(b"\r\n")
        size = 0
        while self._items_left and self._bulk is None and size < STEP_BYTES_MAX:
            item = self._items_left.popleft()
            if type(item) is LongBulk:
                out.append(b"$%d\r\n" % item.length)
                self._bulk = item.parts
            elif type(item) is LongItems:
                out.append(encode_header(list, len(item), self._protocol))
                self._items_left.extendleft(reversed(item))
            elif type(item) is LongPair:
                out.append(b"*2\r\n" if self._protocol >= 3 else b"")
                self._items_left.extendleft(reversed(item))
            else:
                out.append(encode(item, self._protocol))
                size += len(out[-1])
        self.is_done = self._is_last and not self._buffered and not self._items_left and self._bulk is None
        return b"".join(out)

    def _send_buffered(self) -> bytes:
        out: list[bytes] = []
        size = 0
        while self._buffered and size < STEP_BYTES_MAX:
            out.append(self._buffered.popleft())
            size += len(out[-1])
        self.is_done = not self._buffered
        return b"".join(out)

    def _start(self) -> bytes:
        if self.has_started:
            return b""
        self.has_started = True
        return encode_header(self._sliced.shape, cast(int, self._count), self._protocol)

    def _finish(self) -> bytes:
        self.is_done = True
        if self._sliced.shape is int:
            return encode(self._total, self._protocol)
        if self._sliced.shape is FirstOf:
            return encode(None, self._protocol)
        per_count = 2 if self._sliced.shape is dict else 1
        if self._count is None:
            self._count = self._items // per_count
            self._is_last, self.is_done = True, not self._buffered
        elif self._items != cast(int, self._count) * per_count:
            raise RuntimeError(f"a sliced reply announced {self._count} items and has {self._items}")
        return self._start()
