"""Plain Python replies to bytes. The one place that knows RESP2 from RESP3.

What a body may return, and what becomes of it:

    None          nil                          str      simple string (`+OK`)
    bytes         bulk string                  int      integer
    float         double; RESP2: bulk string   bool     boolean; RESP2: 1 or 0
    list, tuple   array                        dict     map; RESP2: flat array
    ReplySet      set; RESP2: array            Push     push; RESP2: array
    Verbatim      verbatim text; RESP2: bulk   PackedPairs   a map that is bytes already
    Pairs         array of arrays of two; RESP2: flat array
    NULL_ARRAY      nil; RESP2: an array of -1   PackedItems   an array or a set that is bytes already
    DoubleText    a double that is written already; RESP2: bulk string
    Frames        whole replies and pushes, as they are sent
    ReplyError    error                        Sliced     made in steps; what is in it may be LongBulk
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, cast

from resp_server.protocol.doubles import double_text
from resp_server.protocol.errors import ReplyError

# What a body may return; nested to any depth.
Reply = Any

OK = "OK"


class ReplySet(tuple[Reply, ...]):
    """Members without order; written in the order given."""

    __slots__ = ()


class Push(tuple[Reply, ...]):
    """What is sent without having been asked for."""

    __slots__ = ()


@dataclass(frozen=True)
class Verbatim:
    """Text for people, such as INFO's."""

    text: bytes


@dataclass(frozen=True)
class DoubleText:
    """A double whose digits are not the usual ones, as it is written."""

    text: bytes


@dataclass(frozen=True)
class Frames:
    """Whole replies and pushes that lie there as they are sent."""

    frames: bytes


@dataclass(frozen=True)
class PackedPairs:
    """A map whose pairs lie there as length-prefixed texts, one after another."""

    count: int
    body: bytes


@dataclass(frozen=True)
class PackedItems:
    """An array, or a set, whose items lie there as length-prefixed texts, one after another."""

    count: int
    body: bytes
    shape: type = list


class Pairs(list[tuple[Reply, Reply]]):
    """Texts, each with what belongs to it, such as a member and its score; in order."""


class _NullArray:
    """What stands for an array where there is none."""


NULL_ARRAY = _NullArray()


class LongBulk(NamedTuple):
    """A bulk string that is read and sent piece by piece; only within `LongItems`."""

    length: int
    parts: Iterator[bytes]


class LongItems(list[Reply]):
    """An array, or a part of a sliced reply, that holds a LongBulk, or another of its kind that does."""


class LongPair(LongItems):
    """One of `Pairs` that holds a LongBulk; only within `LongItems`."""


class FirstOf:
    """The shape of a sliced reply that is the first item that any part has, or nil."""


@dataclass
class Sliced:
    """A reply made in steps, so that it neither holds the event loop nor has to be in memory at once.

    Each part is a step, well below a millisecond; one that is LongItems becomes several. shape list, dict and ReplySet:
    the parts hold the items (for dict, flat: key, value, key, ...); Pairs: they are Pairs, or LongItems of LongPairs;
    int: they hold numbers to be added up; FirstOf: only the first item counts. With `count` (items or pairs; or an
    iterator, each of whose steps brings a number to be added up to it) the reply is sent as it is made; without, when
    it is complete. Frames: the parts hold whole replies, sent when all are there. release: called once at the end, also
    if it comes too soon. acts: to make it does something, so that it is made for a client that wants no reply as well.
    """

    parts: Iterator[Sequence[Reply]]
    release: Callable[[], None]
    shape: type = list
    count: int | Iterator[int] | None = None
    # Told, when the reply is made, how many nanoseconds its steps took.
    when_made: Callable[[int], None] = lambda nanoseconds: None
    acts: bool = False
    is_silent: bool = False


class Pending:
    """A reply that is not known yet: others have to be asked first. The client's next requests wait for it.

    Whoever finds the reply calls `resolve`, at once or later; what comes after that, or after `seconds_max`, is not
    looked at. `at_last` makes the reply then; it may raise.
    """

    def __init__(self, seconds_max: float, on_timeout: Callable[[], Reply]) -> None:
        self.seconds_max = seconds_max
        self.make = on_timeout
        self.is_resolved = False
        self._wake: Callable[[], object] | None = None

    def resolve(self, make: Callable[[], Reply]) -> None:
        """Say how the reply is made; it may raise. Only the first time counts."""
        if self.is_resolved:
            return
        self.is_resolved = True
        self.make = make
        if self._wake is not None:
            self._wake()

    def when_resolved(self, wake: Callable[[], object] | None) -> None:
        """Have this called by `resolve`; None: nobody waits any more."""
        self._wake = wake


def encode(reply: Reply, protocol: int) -> bytes:
    """Return a reply as it is sent; `protocol` is 2 or 3."""
    kind = type(reply)
    if kind is bytes:
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if kind is int:
        return b":%d\r\n" % reply
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
    elif kind is float:
        text = double_text(reply)
        out.append(b",%b\r\n" % text if is_resp3 else b"$%d\r\n%b\r\n" % (len(text), text))
    else:
        _write_rare(reply, is_resp3, out)


def _write_items(items: Sequence[Reply], is_resp3: bool, out: list[bytes]) -> None:
    for item in items:
        if type(item) is bytes:  # nearly always, and a call less for each
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
        case Frames(frames):
            out.append(frames)
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
            head = b"=%d\r\ntxt:" % (len(text) + 4) if is_resp3 else b"$%d\r\n" % len(text)
            out += (head, text, b"\r\n")
        case ReplySet():
            out.append(encode_header(ReplySet, len(reply), protocol))
            _write_items(reply, is_resp3, out)
        case Push():
            out.append(b">%d\r\n" % len(reply) if is_resp3 else b"*%d\r\n" % len(reply))
            _write_items(reply, is_resp3, out)
        case ReplyError():
            out.append(b"-%b\r\n" % reply.line)
        case _:
            raise TypeError(f"a command returned {type(reply).__name__}, which is no reply")


# What one step sends at most of items that are all there, beside the item that goes past it (guess).
STEP_BYTES_MAX = 64 << 10


class ReplyStream(Protocol):
    """A reply that is sent in steps. pins_epoch: the epoch stays pinned until the reply is sent."""

    pins_epoch: bool
    held_bytes: int
    has_begun: bool
    is_done: bool

    def step(self) -> bytes:
        """Return what can be sent next, which may be nothing."""

    def close(self) -> None:
        """Let go of what it is made from. To be called once, at the end or instead of it."""


class SlicedEncoder:
    """Turns a sliced reply into bytes, a step at a time."""

    def __init__(self, sliced: Sliced, protocol: int) -> None:
        self._sliced = sliced
        self._protocol = protocol
        self._count = sliced.count
        self._held: deque[bytes] = deque()
        self._waiting: deque[Reply] = deque()  # items of the last part
        self._bulk: Iterator[bytes] | None = None
        self._items = 0
        self._total = 0
        self._is_last = False
        self._nanoseconds = 0
        self.pins_epoch = True
        self.held_bytes = 0
        self.has_begun = False
        self.is_done = False

    def step(self) -> bytes:
        """Make the next part and return what of the reply can be sent now, which may be nothing.

        What a part raises comes through; before `has_begun` an error can still be the answer.
        """
        started_ns = perf_counter_ns()
        try:
            made = self._step()
            return b"" if self._sliced.is_silent else made
        finally:
            self._nanoseconds += perf_counter_ns() - started_ns

    def _step(self) -> bytes:
        if self._bulk is not None or self._waiting:
            return self._send_waiting()
        if self._is_last:
            return self._send_held()
        if self._count is not None and not isinstance(self._count, int):
            return self._add_up(self._count)
        part = next(self._sliced.parts, None)
        if part is None:
            return self._end()
        if self._sliced.shape is int:
            self._total += sum(part)
            return b""
        if self._sliced.shape is FirstOf:
            return self._only(part[0]) if part else b""
        self._items += len(part)
        if not part:
            return b""
        if type(part) is LongItems:
            self._waiting.extend(part)
            return self._begin() + self._send_waiting()
        items = encode_items(part, self._protocol)
        if self._count is None:
            self._held.append(items)
            self.held_bytes += len(items)
            return b""
        return self._begin() + items

    def close(self) -> None:
        """Let go of what the reply is made from. To be called once, at the end or instead of it."""
        self._sliced.release()
        self._sliced.when_made(self._nanoseconds)

    def _add_up(self, numbers: Iterator[int]) -> bytes:
        number = next(numbers, None)
        if number is None:
            self._count, self._total = self._total, 0
        else:
            self._total += number
        return b""

    def _only(self, item: Reply) -> bytes:
        self._waiting.append(item)
        self._is_last = self.has_begun = True
        return self._send_waiting()

    def _send_waiting(self) -> bytes:
        """Write what there is of the last part: a piece of a long item, or items, up to the next long one."""
        out: list[bytes] = []
        if self._bulk is not None:
            piece = next(self._bulk, None)
            if piece is not None:
                return piece
            self._bulk = None
            out.append(b"\r\n")
        size = 0
        while self._waiting and self._bulk is None and size < STEP_BYTES_MAX:
            item = self._waiting.popleft()
            if type(item) is LongBulk:
                out.append(b"$%d\r\n" % item.length)
                self._bulk = item.parts
            elif type(item) is LongItems:
                out.append(encode_header(list, len(item), self._protocol))
                self._waiting.extendleft(reversed(item))
            elif type(item) is LongPair:
                out.append(b"*2\r\n" if self._protocol >= 3 else b"")
                self._waiting.extendleft(reversed(item))
            else:
                out.append(encode(item, self._protocol))
                size += len(out[-1])
        self.is_done = self._is_last and not self._held and not self._waiting and self._bulk is None
        return b"".join(out)

    def _send_held(self) -> bytes:
        out: list[bytes] = []
        size = 0
        while self._held and size < STEP_BYTES_MAX:
            out.append(self._held.popleft())
            size += len(out[-1])
        self.is_done = not self._held
        return b"".join(out)

    def _begin(self) -> bytes:
        if self.has_begun:
            return b""
        self.has_begun = True
        return encode_header(self._sliced.shape, cast(int, self._count), self._protocol)

    def _end(self) -> bytes:
        self.is_done = True
        if self._sliced.shape is int:
            return encode(self._total, self._protocol)
        if self._sliced.shape is FirstOf:
            return encode(None, self._protocol)
        per_count = 2 if self._sliced.shape is dict else 1
        if self._count is None:
            self._count = self._items // per_count
            self._is_last, self.is_done = True, not self._held
        elif self._items != cast(int, self._count) * per_count:
            raise RuntimeError(f"a sliced reply promised {self._count} items and made {self._items}")
        return self._begin()
