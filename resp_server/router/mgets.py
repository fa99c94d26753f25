"""The short way of MGET through a proxy: each server is asked once for all of its keys (STATE MGET), in loops of C.

    *3 $4 MGET $5 key:1 $5 key:2        (each of these words is a line)
    └───start───┘

So all keys of a server are read at one epoch. What it refuses, and what goes with its connection, is asked again by
slots, each of whoever answers it then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from resp_server.protocol.following import NOT_TOLD, Epochs, Told
from resp_server.router.asks import Ask, Joined, Step, TakesReplies, understood
from resp_server.router.frames import FrameError, in_order, items_of, pack
from resp_server.router.gets import NIL_2, NIL_3, SELECTIONS, Gets, are_keys, keys_in
from resp_server.router.guard import together
from resp_server.router.lane import PING, Lane
from resp_server.router.upstream import SENDS_MAX, Upstreams
from state_backend.slots import slot_of

if TYPE_CHECKING:
    from resp_server.instance import Instance

START = re.compile(rb"\*([1-9][0-9]{0,3})\r\n\$4\r\n(?:MGET|mget)\r\n\$")
SEPARATOR = b"\r\n$"
# Of a buffer: what is looked at in one go takes about a millisecond (guess).
KEYS_MAX = 2048


def pieces_of(data: bytes) -> list[bytes] | None:
    """Return the keys of a buffer that is one whole MGET, each behind its length; None of anything else."""
    matched = START.match(data)
    if matched is None or not data.endswith(b"\r\n"):
        return None
    pieces = data[matched.end() : -2].split(SEPARATOR)
    return pieces if len(pieces) == int(matched[1]) - 1 <= KEYS_MAX and are_keys(pieces) else None


class Route(NamedTuple):
    """The connection that each key is asked over, by its number, and those connections."""

    numbers: bytes
    lanes: Sequence[tuple[Lane, int]]


class Mgets:
    """Asks for the values of keys of one application."""

    def __init__(self, gets: Gets, upstreams: Upstreams, instance: Instance) -> None:
        self._gets = gets
        self._upstreams = upstreams
        self._instance = instance

    def ask_for(self, data: bytes, protocol: int, whose: TakesReplies) -> bool:
        """Ask for what a client sent at once, if that is one MGET, and can be asked now; answer 0 is the reply."""
        pieces = pieces_of(data)
        route = None if pieces is None else self.route(list(keys_in(pieces)), whose.seen_by(0))
        if pieces is None or route is None:
            return False
        self.ask(route, pieces, protocol, whose, 0)
        self._instance.stats.input_bytes += len(data)
        self._instance.stats.tally("mget").calls += 1
        self._instance.renew()  # its clock says when clients were last active
        return True

    def route(self, keys: Sequence[bytes], seen: Epochs) -> Route | None:
        """Return how to ask for keys; None if that cannot be done this way now. seen: what must have been reached."""
        numbers = self._gets.numbers(iter(keys), b"".join(keys))
        lanes = self._gets.lanes(numbers, 1)
        return Route(numbers, lanes) if lanes is not None and self._gets.have_reached(lanes, (seen,)) else None

    def ask(self, route: Route, pieces: Sequence[bytes], protocol: int, whose: TakesReplies, index: int) -> None:
        """Ask for the keys of a route, each behind its length."""
        numbers, lanes = route
        deadline_s = self._upstreams.deadline_s()
        mget = Mget(self._upstreams, numbers, len(lanes), protocol, whose, index)
        asked = []
        for lane, number in lanes:
            some = pieces if len(lanes) == 1 else list(compress(pieces, numbers.translate(SELECTIONS[number])))
            text = SEPARATOR.join(some)
            packed = b"*%d\r\n$5\r\nSTATE\r\n$4\r\nMGET\r\n$%b\r\n" % (len(some) + 2, text)
            asked.append((lane, packed, Part(mget, number, some, lane.key.address, deadline_s)))
        for lane, packed, part in asked:  # when all is made: whoever has it raise may ask in another way
            lane.send(packed, part)


class Mget(Step):
    """One MGET that waits for its servers."""

    def __init__(
        self, upstreams: Upstreams, numbers: bytes, missing: int, protocol: int, whose: TakesReplies, index: int
    ) -> None:
        super().__init__(whose, index)
        self.upstreams = upstreams
        self._numbers = numbers
        self._missing = missing
        self._protocol = protocol
        self._replies: dict[int, bytes] = {}
        self._told = NOT_TOLD

    @property
    def seen(self) -> Epochs:
        """What the client has seen."""
        return self._whose.seen_by(self._index)

    def take_in(self, index: int, reply: bytes, told: Told) -> None:
        """Take what came of what was asked over the connection of a number: an array, or an error."""
        self._replies[index] = reply
        self._told = together(self._told, told)
        self._missing -= 1
        if not self._missing:
            self.end(understood(self._joined), self._told)

    def _joined(self) -> bytes:
        replies = list(self._replies.values())
        error = next((each for each in replies if each[:1] == b"-"), None)
        if error is not None:
            return error
        if len(replies) == 1 and self._protocol == 2:
            return replies[0]
        items = {number: self._items(number) for number in self._replies}
        found: Iterable[bytes] = map(next, map(items.__getitem__, self._numbers))
        if self._protocol != 2:
            found = [NIL_3 if each == NIL_2 else each for each in found]
        return b"*%d\r\n%b" % (len(self._numbers), b"".join(found))

    def _items(self, number: int) -> Iterator[bytes]:
        items = items_of(self._replies[number])
        if len(items) != self._numbers.count(number):
            raise FrameError(f"{len(items)} values came of {self._numbers.count(number)} keys")
        return iter(items)


class Part(TakesReplies):
    """What one server is asked; `wants` and the rest are as in `Asked`."""

    def __init__(self, mget: Mget, number: int, pieces: Sequence[bytes], address: str, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.wants = 1
        self._mget, self._number = mget, number
        self._pieces = pieces
        self._address = address

    def take(self, replies: Sequence[bytes], told: Told) -> None:
        """Take the array."""
        self.wants = 0
        self._mget.put(self._number, replies[0], told)

    def fail_all(self, error: Exception) -> None:
        """Pass on what was raised."""
        self._mget.fail(self._number, error)

    def fail(self, index: int, error: Exception) -> None:
        self._mget.fail(self._number, error)

    def next_ask(self) -> Ask:
        """Return a question whose answer is the one to this; as it is, it is not asked again."""
        self.wants = 0
        return Ask(PING, 0, 2, self.deadline_s, self, 0, self._address, sends=SENDS_MAX)

    def seen_by(self, index: int) -> Epochs:
        return self._mget.seen

    def put(self, index: int, reply: bytes, told: Told = NOT_TOLD) -> None:
        """Take an answer that came alone: the server's (0), or what came when it was asked by slots (1)."""
        if index == 0 and reply[:1] == b"-" and self._mget.upstreams.now_s < self.deadline_s:
            self._mget.attempt(self._ask_by_slots)
        else:
            self._mget.put(self._number, reply, told)

    def _ask_by_slots(self) -> None:
        keys = list(keys_in(self._pieces))
        places: dict[int, list[int]] = {}
        for at, key in enumerate(keys):
            places.setdefault(slot_of(key), []).append(at)
        joined = Joined(len(places), partial(in_order, places=list(places.values())), self, 1)
        for number, (slot, some) in enumerate(places.items()):
            packed = pack((b"MGET", *(keys[at] for at in some)))
            self._mget.upstreams.send(Ask(packed, slot, 2, self.deadline_s, joined, number, sends=1))
