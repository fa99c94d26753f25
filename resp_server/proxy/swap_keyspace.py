"""SCAN, KEYS, RANDOMKEY and DBSIZE over an upstream and the states behind a proxy.

The upstream's copies of keys that states own are left out, as GET does not read them; so are states' keys that the
upstream owns. DBSIZE counts both: it would have to read all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import choices
from typing import NamedTuple, Protocol

from resp_server.commands.generic import cursor_number
from resp_server.forwarding.raw_replies import RawReply, Steps, as_bytes, is_error, raw_reply_of
from resp_server.forwarding.reply_splitter import items_of, sum_of_replies
from resp_server.forwarding.reply_stages import Defer, ReplyAggregator, ReplySink, ReplyStage, merge_or_error
from resp_server.protocol.errors import PlainError, TryAgainError
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.upstream.connection import UpstreamSink
from resp_server.upstream.scan_cursor import ScanPosition, after, position_of

# Random keys of each side: several, because some may be copies of the other side's keys (guess).
UPSTREAM_DRAWS, STATES_DRAWS = 16, 4
# Keys whose owner is looked up in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 128
NOTHING = (b"$-1\r\n", b"_\r\n")
DBSIZE, RANDOMKEY = (b"DBSIZE",), (b"RANDOMKEY",)


class KeyspaceSides(Protocol):
    """Sends a client's requests about all keys to each side. defer: calls back in a later turn.

    node_count: the number of the upstream's nodes; each has keys of its own.
    """

    node_count: int
    defer: Defer

    def send_to_node(self, node: int, request: Request, sink: UpstreamSink, index: int) -> None:
        """Send a read to a node of the upstream."""

    def send_to_states(self, request: Request, sink: ReplySink, index: int) -> None:
        """Send a request to the state servers."""


# Tells whether a client sees a key, or returns the names under which it does.
Shown = Callable[[bytes], bool | Sequence[bytes]]


class KeyFilter(NamedTuple):
    """The filters of the keys of each side that a client sees. has_common: both sides may have the same key.

    is_named: clients know some keys of states by other names, so patterns are matched here.
    """

    of_upstream: Callable[[bytes], bool]
    of_states: Shown
    has_common: bool = False
    is_named: bool = False

    def states_request(self, request: Request) -> tuple[Request, Shown]:
        """Return the states' part of a SCAN or KEYS, and which of the keys in its reply the client sees."""
        if not self.is_named:
            return request, self.of_states
        kept, pattern = [request[0]], None
        if request[0].lower() == b"keys":
            kept, pattern = [request[0], b"*"], request[1]
        else:
            kept = [*request[:2]]
            for at in range(2, len(request), 2):
                if request[at].upper() == b"MATCH" and at + 1 < len(request):
                    pattern = request[at + 1]
                else:
                    kept += request[at : at + 2]
        if pattern is None:
            return kept, self.of_states
        matches, of_states = matcher(pattern), self.of_states

        def shown(key: bytes) -> Sequence[bytes]:
            names = of_states(key)
            return [name for name in (names if isinstance(names, Sequence) else [key] * names) if matches(name)]

        return kept, shown


class SwapScan(ReplyStage):
    """One SCAN: a step of the side that the cursor names."""

    def __init__(self, sides: KeyspaceSides, keys: KeyFilter, request: Request, sink: ReplySink, index: int) -> None:
        super().__init__(sink, index)
        self._sides = sides
        self._position = position_of(cursor_number(request[1]), sides.node_count)
        self._request: Request = (request[0], b"%d" % self._position.inner, *request[2:])
        self._is_visible: Shown = keys.of_upstream
        if self._position.node is None:
            self._request, self._is_visible = keys.states_request(self._request)

    def send(self) -> None:
        """Send the request to its side."""
        self.reopen()
        self.attempt(self._send)

    def _send(self) -> None:
        node = self._position.node
        if node is None:
            self._sides.send_to_states(self._request, self, 0)
        else:
            self._sides.send_to_node(node, self._request, self, 0)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        if is_error(reply):
            self.finish(reply, epochs)
            return
        steps = merge_or_error(
            lambda replies: _scan_reply(replies[0], self._position, self._sides.node_count, self._is_visible), [reply]
        )
        self.run_steps(steps, lambda merged: self.finish(merged, epochs), self._sides.defer)


def _scan_reply(reply: RawReply, position: ScanPosition, node_count: int, is_visible: Shown) -> Steps[RawReply]:
    cursor, keys = yield from items_of(reply)
    try:
        following = after(position, int(text_of(cursor)), node_count)
    except PlainError as error:
        return b"-%b\r\n" % error.line
    found = yield from visible_keys([keys], [is_visible])
    return raw_reply_of([b"*2\r\n", encode(b"%d" % following, 2), found])


def text_of(item: RawReply) -> bytes:
    """Return the text of an encoded bulk string."""
    return as_bytes(item).partition(b"\r\n")[2][:-2]


def visible_keys(arrays: Sequence[RawReply], filters: Sequence[Shown], has_common: bool = False) -> Steps[RawReply]:
    """Return one array of the keys of all arrays that their filters let through. has_common: each key once."""
    found: list[RawReply] = []
    seen: set[bytes] = set()
    for array, is_visible in zip(arrays, filters, strict=True):
        for number, item in enumerate((yield from items_of(array))):
            name = text_of(item)
            shown = is_visible(name)
            if not isinstance(shown, bool):
                found += [encode(each, 2) for each in shown]
            elif shown and name not in seen:
                found.append(item)
                if has_common:
                    seen.add(name)
            if not number % KEYS_AT_ONCE:
                yield
    return raw_reply_of([b"*%d\r\n" % len(found), *found])


def _shown_item(item: RawReply, is_visible: Shown) -> RawReply | None:
    """Return a key as the client sees it; None if it does not."""
    shown = is_visible(text_of(item))
    if isinstance(shown, bool):
        return item if shown else None
    return encode(shown[0], 2) if shown else None


def query_both(sides: KeyspaceSides, keys: KeyFilter, name: str, request: Request, sink: ReplySink, index: int) -> None:
    """Send KEYS, RANDOMKEY or DBSIZE to both sides, and join the replies."""
    count = sides.node_count
    if name == "randomkey":
        _draw(sides, keys, sink, index)
        return

    states_request, of_states = (request, keys.of_states) if name == "dbsize" else keys.states_request(request)

    def merge(replies: Sequence[RawReply]) -> RawReply | Steps[RawReply]:
        if name == "dbsize":
            return sum_of_replies(replies)
        filters: list[Shown] = [keys.of_upstream] * count
        return visible_keys(replies, [*filters, of_states], keys.has_common)

    both = ReplyAggregator(count + 1, merge, sink, index, sides.defer)
    for node in range(count):
        sides.send_to_node(node, request, both, node)
    both.attempt(sides.send_to_states, states_request, both, count)


def _draw(sides: KeyspaceSides, keys: KeyFilter, sink: ReplySink, index: int) -> None:
    """Reply a random key. A side is chosen in proportion to its visible keys, estimated from its random keys."""
    count = sides.node_count
    size = count * (UPSTREAM_DRAWS + 1) + STATES_DRAWS + 1

    def merge(replies: Sequence[RawReply]) -> RawReply:
        at, candidates, weights, is_hidden = 0, [], [], False
        for part in range(count + 1):
            draws = UPSTREAM_DRAWS if part < count else STATES_DRAWS
            is_visible: Shown = keys.of_upstream if part < count else keys.of_states
            drawn = [each for each in replies[at + 1 : at + 1 + draws] if each not in NOTHING]
            found = [item for each in drawn if (item := _shown_item(each, is_visible)) is not None]
            is_hidden |= len(found) < len(drawn)
            if found:
                candidates.append(found[0])
                weights.append(max(1, int(as_bytes(replies[at])[1:])) * len(found) / len(drawn))
            at += draws + 1
        if candidates:
            return choices(candidates, weights)[0]
        if is_hidden:
            error = TryAgainError("each random key was an old copy of a key that the other side owns")
            return b"-%b\r\n" % error.line
        return replies[1]

    both = ReplyAggregator(size, merge, sink, index, sides.defer)
    at = 0
    for node in range(count):
        for number in range(UPSTREAM_DRAWS + 1):
            sides.send_to_node(node, RANDOMKEY if number else DBSIZE, both, at + number)
        at += UPSTREAM_DRAWS + 1
    for number in range(STATES_DRAWS + 1):
        both.attempt(sides.send_to_states, RANDOMKEY if number else DBSIZE, both, at + number)
