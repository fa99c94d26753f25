"""The short way of GETs through a proxy: all of an input buffer in loops of C, without an object for each.

    *2 $3 GET $5 key:1 *2 $3 GET $5 key:2        (each of these words is a line)
    └──start──┘        └──separator─┘

A buffer that is cut at the separators gives for each request its key and the key's length; where that is right for each
of them, there was nothing but GETs. The CRC of a key says over which connection it is asked; all for one connection go
there together, and the replies are put in order when all are there. Whatever is different goes the general way.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, compress, islice, permutations, repeat
from operator import getitem
from typing import TYPE_CHECKING, NamedTuple, Protocol

from resp_server.protocol.following import NOT_TOLD, NOTHING, Epochs, Told, latest
from resp_server.router.asks import Ask, TakesReplies
from resp_server.router.frames import pack
from resp_server.router.guard import has_reached, is_behind, together
from resp_server.router.lane import Lane
from state_backend.slots import slot_of

if TYPE_CHECKING:
    from resp_server.instance import Instance
    from resp_server.router.connection import ProxyConnection
    from resp_server.router.upstream import Upstreams

KEY_BYTES_MAX = 1024
# What is asked at once for one client: what is held of replies is bounded by that (see lane.LONG_REPLY_BYTES).
GETS_MAX = 256

NIL_2, NIL_3 = b"$-1\r\n", b"_\r\n"

# By the length of `<length>\r\n<key>`: its first line, and where the key is. `?` begins no length.
_LINES = [b"?"] * (KEY_BYTES_MAX + 7)
_KEYS = [slice(0)] * (KEY_BYTES_MAX + 7)
for _length in range(KEY_BYTES_MAX + 1):
    _line = b"%d\r\n" % _length
    _LINES[len(_line) + _length] = _line
    _KEYS[len(_line) + _length] = slice(len(_line), None)
_line_of_length, _key_of_length = _LINES.__getitem__, _KEYS.__getitem__

# Bytes to one where they are a number, to zero elsewhere.
SELECTIONS = [bytes(number == each for each in range(256)) for number in range(256)]


class Spelling(NamedTuple):
    """What GETs begin with, and what stands between two keys."""

    start: bytes
    separator: bytes


def _spelling(name: bytes) -> Spelling:
    start = b"*2\r\n$3\r\n%b\r\n$" % name
    return Spelling(start, b"\r\n" + start)


UPPER, LOWER = _spelling(b"GET"), _spelling(b"get")
STARTS = (UPPER.start, LOWER.start)
START_BYTES = len(UPPER.start)


class Gets:
    """Asks for buffers of GETs, of one application: all that came in one turn of the event loop at once."""

    def __init__(self, upstreams: Upstreams, instance: Instance) -> None:
        self._upstreams = upstreams
        self._instance = instance
        self._stats = instance.stats
        self._connections: list[ProxyConnection] = []
        self._buffers: list[bytes] = []

    def add(self, connection: ProxyConnection, data: bytes) -> None:
        """Ask with this turn's others for a buffer that begins with a GET."""
        if not self._buffers:
            connection.loop.call_soon(self._ask_all)
        self._connections.append(connection)
        self._buffers.append(data)

    def _ask_all(self) -> None:
        connections, buffers = self._connections, self._buffers
        self._connections, self._buffers = [], []
        try:
            pieces = b"".join(buffers)[START_BYTES:-2].split(UPPER.separator)
            ends = ends_of(pieces, buffers)
            if ends is not None and self._ask(connections, pieces, ends):
                self._stats.input_bytes += sum(map(len, buffers))
                return
        except Exception as error:  # nothing was asked so far: one by one it may be only one's
            self._instance.report(error)
        for connection, data in zip(connections, buffers, strict=True):
            if not self._instance.attempt(self._ask_one, connection, data):
                connection.leave_to_others(data)

    def _ask_one(self, connection: ProxyConnection, data: bytes) -> None:
        """Ask for what is whole of a buffer, or leave it to the general way."""
        whole, rest, start = data, b"", UPPER if data.startswith(UPPER.start) else LOWER
        for _ in range(2):
            pieces = whole[START_BYTES:-2].split(start.separator)
            if len(pieces) > GETS_MAX:
                rest = start.start + start.separator.join(pieces[GETS_MAX:]) + b"\r\n" + rest
                del pieces[GETS_MAX:]
            is_whole = whole.startswith(start.start) and whole.endswith(b"\r\n") and are_keys(pieces)
            if is_whole and self._ask([connection], pieces, [len(pieces)]):
                self._stats.input_bytes += len(data) - len(rest)
                connection.begun = rest
                return
            at = max(0, data.rfind(start.start))  # the last one may have come in part
            whole, rest = data[:at], data[at:]
        connection.leave_to_others(data)

    def _ask(self, connections: Sequence[Taker], pieces: list[bytes], ends: Sequence[int]) -> bool:
        numbers = self.numbers(keys_in(pieces), b"".join(pieces))
        lanes = self.lanes(numbers, len(pieces))
        if lanes is None or not self.have_reached(lanes, (each.seen for each in connections)):
            return False
        self._instance.renew()  # its clock says when clients were last active
        run = Run(connections, ends, numbers, pieces, self._instance) if len(connections) < len(pieces) else None
        self._send(connections, pieces, numbers, lanes, run)
        self._stats.tally("get").calls += len(pieces)
        return True

    def numbers(self, keys: Iterator[bytes], text: bytes) -> bytes:
        """Return the numbers of the connections that keys are asked over. text: all of them."""
        # A key with a hash tag has another slot than its CRC says.
        places = map(slot_of, keys) if b"{" in text else map(crc_hqx, keys, repeat(0))
        return bytes(map(self._upstreams.table.__getitem__, places))

    def lanes(self, numbers: bytes, count: int) -> list[tuple[Lane, int]] | None:
        """Return the connections that numbers stand for, or None if one cannot take so many questions now."""
        asked: list[tuple[Lane, int]] = []
        for number in set(numbers):
            lane = self._upstreams.open_lanes[number]
            if lane is None or not lane.has_room(count):
                return None
            asked.append((lane, number))
        return asked

    def have_reached(self, asked: Sequence[tuple[Lane, int]], seen: Iterable[Epochs]) -> bool:
        """Tell whether all of these servers have reached what clients have seen."""
        if self._upstreams.is_level:
            return True
        floors = {id(each): self._upstreams.own(each) for each in seen}.values()
        return all(has_reached(lane.told, each, self._upstreams.gone_jobs) for lane, _ in asked for each in floors)

    def _send(
        self,
        takers: Sequence[Taker],
        pieces: Sequence[bytes],
        numbers: bytes,
        lanes: Sequence[tuple[Lane, int]],
        run: Run | None,
    ) -> None:
        """Send each connection its GETs; run: None if each of the takers takes one reply."""
        deadline_s = self._upstreams.deadline_s()
        asked: list[tuple[Lane, bytes, Sent]] = []
        for lane, number in lanes:
            some, its_takers = pieces, takers
            if len(lanes) > 1:
                selection = numbers.translate(SELECTIONS[number])
                some = list(compress(pieces, selection))
                its_takers = list(compress(takers, selection)) if run is None else ()
            part: Sent = Lone(some, deadline_s, its_takers) if run is None else Part(some, deadline_s, run, number)
            asked.append((lane, b"%b%b\r\n" % (UPPER.start, UPPER.separator.join(some)), part))
        for lane, packed, each in asked:
            lane.send(packed, each)


def ends_of(pieces: Sequence[bytes], buffers: Sequence[bytes]) -> list[int] | None:
    """Return behind which piece each buffer ends, if these are nothing but whole GETs; None otherwise."""
    ends = list(accumulate([data.count(b"*") for data in buffers]))
    if ends[-1] != len(pieces) or not are_keys(pieces) or len(pieces) > len(buffers) * GETS_MAX:
        return None
    sizes = list(accumulate(map(len, pieces)))
    bounds = accumulate(map(len, buffers))
    is_so = all(sizes[end - 1] + end * (START_BYTES + 2) == bound for end, bound in zip(ends, bounds, strict=True))
    return ends if is_so and buffers[-1].endswith(b"\r\n") and buffers[0].startswith(UPPER.start) else None


def is_part(data: bytes) -> bool:
    """Tell whether a buffer is the beginning of one GET and no more."""
    if len(data) <= START_BYTES:
        return UPPER.start.startswith(data) or LOWER.start.startswith(data)
    line, end, key = data[START_BYTES:].partition(b"\r\n")
    digits = line if end else line.removesuffix(b"\r")
    is_length = len(digits) <= 4 and (digits.isdigit() or not (digits or end))
    return data.startswith(STARTS) and is_length and (not end or len(key) < int(digits) + 2)


def are_keys(pieces: Sequence[bytes]) -> bool:
    """Tell whether each piece is a key behind its length."""
    try:
        return all(map(bytes.startswith, pieces, map(_line_of_length, map(len, pieces))))
    except IndexError:
        return False


def keys_in(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Iterate over the keys of pieces that are keys behind their lengths."""
    return map(getitem, pieces, map(_key_of_length, map(len, pieces)))  # type: ignore[arg-type]


class Taker(Protocol):
    """Whoever asked: a client's connection. Taking an answer does not raise: others' come behind."""

    @property
    def seen(self) -> Epochs:
        """What it has seen: nothing before that will do."""

    def in_its_protocol(self, replies: Sequence[bytes]) -> bytes:
        """Return replies to GETs as they are sent."""

    def answered(self, reply: bytes, told: Told) -> None:
        """Take what was waited for, and what it is from."""

    def answered_unevenly(self, data: bytes, count: int, told: Told) -> None:
        """Ask again, the general way, for so many GETs: replies are from earlier epochs than others before them."""

    def fail(self, index: int, error: Exception) -> None:
        """Take what was raised instead."""


class Run:
    """The GETs of some buffers, which were asked together, and the replies, by the connections that they came over.

    A client is answered when the connections that it needs have brought theirs: it does not wait for others.
    """

    def __init__(
        self,
        connections: Sequence[Taker],
        ends: Sequence[int],
        numbers: bytes,
        pieces: list[bytes],
        instance: Instance,
    ) -> None:
        self.parts: dict[int, Part] = {}
        self._instance = instance
        self._pieces = pieces
        self._told = NOT_TOLD
        self._told_by: dict[int, Told] = {}
        self._numbers = numbers
        self._done = b""
        rows = zip(connections, (0, *ends), ends, strict=False)
        self._waiting = {start: (connection, start, end) for connection, start, end in rows}

    @property
    def seen(self) -> Epochs:
        """What any of the clients has seen that wait."""
        return reduce(latest, [connection.seen for connection, _, _ in self._waiting.values()], NOTHING)

    def came(self, number: int, told: Told) -> None:
        """Take in what replies that came over a connection are from."""
        self._told = together(self._told, told)
        self._told_by[number] = together(self._told_by.get(number, NOT_TOLD), told)

    def _tell(self, taker: Taker, start: int, end: int, replies: Sequence[bytes]) -> None:
        is_even = len(self._told) <= 1 or is_in_order(self._numbers[start:end], self._told_by)
        reply = taker.in_its_protocol(replies) if is_even else b""
        del self._waiting[start]
        if is_even:
            taker.answered(reply, self._told)
        else:
            self._ask_again(taker, start, end, self._told)

    def _ask_again(self, taker: Taker, start: int, end: int, told: Told) -> None:
        data = UPPER.start + UPPER.separator.join(self._pieces[start:end]) + b"\r\n"
        taker.answered_unevenly(data, end - start, told)

    def fail(self, error: Exception) -> None:
        """Have those that wait ask again, the general way: one by one it may be only one's."""
        self._instance.report(error)
        waiting, self._waiting = self._waiting, {}
        for taker, start, end in waiting.values():
            self._ask_again(taker, start, end, NOT_TOLD)

    def part_is_done(self, part: Part) -> None:
        """Answer the clients for which all has come."""
        self._done += bytes((part.number,))
        waiting, numbers = list(self._waiting.values()), self._numbers
        if len(self._done) == len(self.parts):
            replies = self._in_order(0, len(numbers)) if waiting else []
            for connection, start, end in waiting:
                self._tell(connection, start, end, replies[start:end])
            return
        if len(waiting) == 1:
            return
        done = self._done
        for connection, start, end in waiting:
            if not numbers[start:end].translate(None, done):
                self._tell(connection, start, end, self._in_order(start, end))

    def _in_order(self, start: int, end: int) -> list[bytes]:
        numbers = self._numbers
        if len(self.parts) == 1:
            return next(iter(self.parts.values())).replies[start:end]
        its_numbers = numbers[start:end]
        replies = {
            number: islice(part.replies, numbers.count(number, 0, start), None)
            for number, part in self.parts.items()
            if number in its_numbers
        }
        return list(map(next, map(replies.__getitem__, its_numbers)))


def is_in_order(numbers: bytes, told: Mapping[int, Told]) -> bool:
    """Tell whether no reply is from an earlier epoch than one before it, which came over another connection.

    numbers: of the connections that replies came over, in their order. told: what each one's replies are from.
    """
    for later, earlier in permutations(set(numbers), 2):
        is_later = any(is_behind(each, newer) for each in told[earlier] for newer in told[later])
        if is_later and numbers.index(later) < numbers.rindex(earlier):
            return False
    return True


class Sent(TakesReplies):
    """GETs that were sent together over one connection; `wants` and the rest are as in `Asked`."""

    def __init__(self, pieces: Sequence[bytes], deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.wants = len(pieces)
        self._pieces = pieces

    def take(self, replies: Sequence[bytes], told: Told) -> None:
        """Take the next replies."""
        raise NotImplementedError

    def fail_all(self, error: Exception) -> None:
        """Pass on what was raised."""
        raise NotImplementedError

    def next_ask(self) -> Ask:
        """Return the next question to be answered as one of its own."""
        at = len(self._pieces) - self.wants
        self.wants -= 1
        key = self._pieces[at].partition(b"\r\n")[2]
        return Ask(pack((b"GET", key)), slot_of(key), 2, self.deadline_s, self, at, sends=1)

    def put(self, index: int, reply: bytes, told: Told = NOT_TOLD) -> None:
        """Take the answer to such a question."""
        raise NotImplementedError


class Lone(Sent):
    """One of each of several clients, which is all that these asked for."""

    def __init__(self, pieces: Sequence[bytes], deadline_s: float, connections: Sequence[Taker]) -> None:
        super().__init__(pieces, deadline_s)
        self._connections = connections

    def take(self, replies: Sequence[bytes], told: Told) -> None:
        """Pass the next replies on."""
        start = len(self._pieces) - self.wants
        self.wants -= len(replies)
        for connection, reply in zip(self._connections[start:] if start else self._connections, replies, strict=False):
            connection.answered(reply, told)

    def fail_all(self, error: Exception) -> None:
        for connection in self._connections[len(self._pieces) - self.wants :]:
            connection.fail(0, error)

    def fail(self, index: int, error: Exception) -> None:
        self._connections[index].fail(0, error)

    def seen_by(self, index: int) -> Epochs:
        return self._connections[index].seen

    def put(self, index: int, reply: bytes, told: Told = NOT_TOLD) -> None:
        self._connections[index].answered(reply, told)


class Part(Sent):
    """A part of a run."""

    def __init__(self, pieces: Sequence[bytes], deadline_s: float, run: Run, number: int) -> None:
        super().__init__(pieces, deadline_s)
        self.number = number
        self.replies: list[bytes] = []
        self._run = run
        self._missing = len(pieces)
        run.parts[number] = self

    def take(self, replies: Sequence[bytes], told: Told) -> None:
        """Take the next replies."""
        self.wants -= len(replies)
        self._run.came(self.number, told)
        self.replies += replies
        self._missing -= len(replies)
        if not self._missing:
            self._run.part_is_done(self)

    def fail_all(self, error: Exception) -> None:
        self._run.fail(error)

    def fail(self, index: int, error: Exception) -> None:
        self._run.fail(error)

    def next_ask(self) -> Ask:
        self.replies.append(b"")
        return super().next_ask()

    def seen_by(self, index: int) -> Epochs:
        return self._run.seen

    def put(self, index: int, reply: bytes, told: Told = NOT_TOLD) -> None:
        try:
            self._run.came(self.number, told)
            self.replies[index] = reply
            self._missing -= 1
            if not self._missing:
                self._run.part_is_done(self)
        except Exception as error:
            self._run.fail(error)
