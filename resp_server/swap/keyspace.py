"""SCAN, KEYS, RANDOMKEY and DBSIZE over an upstream and the states behind a proxy.

The upstream's copies of keys that states own are left out, as GET does not read them; so are states' keys that the
upstream owns. DBSIZE counts both: it would have to read all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import choice, choices
from typing import NamedTuple, Protocol

from resp_server.command.ours import role_of
from resp_server.command.policy import Role
from resp_server.commands.generic import cursor_number
from resp_server.forwarding.raw_replies import RawReply, Steps, as_bytes, is_error, raw_reply_of, text_of
from resp_server.forwarding.reply_splitter import items_of, sum_of_replies
from resp_server.forwarding.reply_stages import Defer, ReplyAggregator, ReplySink, ReplyStage, merge_or_error
from resp_server.protocol.errors import PlainError, TryAgainError
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.proxy.field_names import NO_RULES, FieldRules, may_match
from resp_server.proxy.request_policy import NO_KEY
from resp_server.session.epoch_feed import ReplyEpochs
from resp_server.swap.state_listing import KEYS_AT_ONCE, ListedNames, StateListing, VisibleNames
from resp_server.upstream.connection import UpstreamSink
from resp_server.upstream.rules import Rule
from resp_server.upstream.scan_cursor import after, position_of

# Random keys of each side: several, because some may be copies of the other side's keys (guess).
UPSTREAM_DRAWS, STATES_DRAWS = 16, 4
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

    def send_to_owner(self, key: bytes, request: Request, sink: ReplySink, index: int) -> None:
        """Send a read of a state's key to the server that has it."""


class KeyFilter(NamedTuple):
    """The filters of the keys of each side that a client sees. has_common: both sides may have the same key.

    is_named: clients know some keys of states by other names, so patterns and rights are matched here. fields: the
    rules with names of fields. may_read: tells whether the client has the right to a name.
    """

    of_upstream: Callable[[bytes], bool]
    of_states: VisibleNames
    has_common: bool = False
    is_named: bool = False
    fields: FieldRules = NO_RULES
    may_read: Callable[[bytes], bool] = lambda name: True

    def state_listing(self, request: Request) -> StateListing:
        """Return the listing of states' keys for a SCAN, KEYS or RANDOMKEY."""
        if not self.is_named:
            return StateListing(request, self.of_states, NO_RULES)
        if len(request) == 1:
            return StateListing(request, self.of_states, self.fields, accepts=self.may_read)
        kept, pattern, type_name = _options_of(request)
        if type_name not in (None, b"string"):  # names of fields are strings
            return self._matching([*kept, b"TYPE", type_name], pattern, NO_RULES)
        rules = [rule for rule in self.fields.rules if pattern is None or _may_name(rule, pattern)]
        if type_name is not None and not rules:
            return self._matching([*kept, b"TYPE", type_name], pattern, NO_RULES)
        part = self._matching(kept, pattern, self.fields._replace(rules=rules))
        return part._replace(is_of_strings=type_name is not None)

    def _matching(self, request: Request, pattern: bytes | None, fields: FieldRules) -> StateListing:
        """Return the listing of the names that match a pattern."""
        if pattern is None:
            return StateListing(request, self.of_states, fields, accepts=self.may_read)
        matches, of_states, may_read = matcher(pattern), self.of_states, self.may_read

        def visible_names(key: bytes) -> Sequence[bytes]:
            names = of_states(key)
            return [name for name in (names if isinstance(names, Sequence) else [key] * names) if matches(name)]

        def accepts(name: bytes) -> object:
            return matches(name) and may_read(name)

        return StateListing(request, visible_names, fields, partial(may_match, pattern), accepts)


def _options_of(request: Request) -> tuple[Request, bytes | None, bytes | None]:
    """Split a SCAN or KEYS: without patterns and types, and these."""
    if role_of(request[0]) is Role.KEYS:
        return (request[0], b"*"), request[1], None
    kept, pattern, type_name = [*request[:2]], None, None
    for at in range(2, len(request), 2):
        option = request[at].upper()
        if option == b"MATCH" and at + 1 < len(request):
            pattern = request[at + 1]
        elif option == b"TYPE" and at + 1 < len(request):
            type_name = request[at + 1].lower()
        else:
            kept += request[at : at + 2]
    return kept, pattern, type_name


def _may_name(rule: Rule, pattern: bytes) -> bool:
    return may_match(pattern, rule.keys.prefix, not rule.keys.columns)


class SwapScan(ReplyStage):
    """One SCAN: a step of the side that the cursor names."""

    PAGE, NAMES = 0, 1

    def __init__(self, sides: KeyspaceSides, keys: KeyFilter, request: Request, sink: ReplySink, index: int) -> None:
        super().__init__(sink, index)
        self._sides, self._of_upstream = sides, keys.of_upstream
        self._position = position_of(cursor_number(request[1]), sides.node_count)
        self._request: Request = (request[0], b"%d" % self._position.inner, *request[2:])
        self._part = keys.state_listing(self._request)
        self._following = b""  # the next cursor

    def send(self) -> None:
        """Send the request to its side."""
        self.reopen()
        self.attempt(self._send)

    def _send(self) -> None:
        node = self._position.node
        if node is None:
            self._sides.send_to_states(self._part.request, self, self.PAGE)
        else:
            self._sides.send_to_node(node, self._request, self, self.PAGE)

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        if is_error(reply):
            self.finish(reply, epochs)
        elif index == self.NAMES:
            self.finish(raw_reply_of([b"*2\r\n", self._following, reply]), epochs)
        elif self._position.node is None:
            names = ListedNames(self._part, self._sides.send_to_owner, self._sides.defer, self, self.NAMES)
            self.run_steps(
                merge_or_error(self._keys, [reply]),
                lambda keys: names.put(ListedNames.KEYS, keys, epochs),
                self._sides.defer,
            )
        else:
            self.run_steps(
                merge_or_error(self._visible, [reply]),
                lambda names: self.put(self.NAMES, names, epochs),
                self._sides.defer,
            )

    def _keys(self, replies: Sequence[RawReply]) -> Steps[RawReply]:
        """Take the cursor of a page; return its keys."""
        cursor, keys = yield from items_of(replies[0])
        try:
            following = after(self._position, int(text_of(cursor)), self._sides.node_count)
        except PlainError as error:
            return b"-%b\r\n" % error.line
        self._following = encode(b"%d" % following, 2)
        return keys

    def _visible(self, replies: Sequence[RawReply]) -> Steps[RawReply]:
        keys = yield from self._keys(replies)
        return keys if is_error(keys) else (yield from visible_keys([keys], [self._of_upstream]))


def visible_keys(
    arrays: Sequence[RawReply], filters: Sequence[Callable[[bytes], bool]], has_common: bool = False
) -> Steps[RawReply]:
    """Return one array of the keys of all arrays that their filters let through. has_common: each key once."""
    found: list[RawReply] = []
    seen: set[bytes] = set()
    for array, is_visible in zip(arrays, filters, strict=True):
        for number, item in enumerate((yield from items_of(array))):
            name = text_of(item)
            if is_visible(name) and name not in seen:
                found.append(item)
                if has_common:
                    seen.add(name)
            if not number % KEYS_AT_ONCE:
                yield
    return raw_reply_of([b"*%d\r\n" % len(found), *found])


def query_both(
    sides: KeyspaceSides, keys: KeyFilter, role: Role | None, request: Request, sink: ReplySink, index: int
) -> None:
    """Send KEYS, RANDOMKEY or DBSIZE to both sides, and join the replies."""
    count = sides.node_count
    if role is Role.RANDOMKEY:
        _draw(sides, keys, sink, index)
        return

    def merge(replies: Sequence[RawReply]) -> RawReply | Steps[RawReply]:
        if role is Role.DBSIZE:
            return sum_of_replies(replies)
        return visible_keys(replies, [*[keys.of_upstream] * count, lambda name: True], keys.has_common)

    both = ReplyAggregator(count + 1, merge, sink, index, sides.defer)
    for node in range(count):
        sides.send_to_node(node, request, both, node)
    if role is Role.DBSIZE:
        both.attempt(sides.send_to_states, request, both, count)
    else:
        part = keys.state_listing(request)
        names = ListedNames(part, sides.send_to_owner, sides.defer, both, count)
        names.attempt(sides.send_to_states, part.request, names, ListedNames.KEYS)


def _draw(sides: KeyspaceSides, keys: KeyFilter, sink: ReplySink, index: int) -> None:
    """Reply a random key. A side is chosen in proportion to its visible names, estimated from its random keys."""
    count = sides.node_count
    size = count * (UPSTREAM_DRAWS + 1) + STATES_DRAWS + 1
    part = keys.state_listing(RANDOMKEY)

    def merge(replies: Sequence[RawReply]) -> Steps[RawReply]:
        at, candidates, weights, is_hidden = 0, [], [], False
        for side in range(count + 1):
            draws = UPSTREAM_DRAWS if side < count else STATES_DRAWS
            drawn = [each for each in replies[at + 1 : at + 1 + draws] if each not in NO_KEY]
            found: list[RawReply] = []
            for each in drawn:
                if side == count:
                    names = yield from items_of(each)
                else:
                    names = [each] if keys.of_upstream(text_of(each)) else []
                is_hidden |= not names
                found += names
            if found:
                candidates.append(choice(found))
                weights.append(max(1, int(as_bytes(replies[at])[1:])) * len(found) / len(drawn))
            at += draws + 1
        if candidates:
            return choices(candidates, weights)[0]
        if is_hidden:
            error = TryAgainError(
                "each random key was an old copy of a key that the other side owns, or may not be read"
            )
            return b"-%b\r\n" % error.line
        return replies[1]

    both = ReplyAggregator(size, merge, sink, index, sides.defer)
    at = 0
    for node in range(count):
        for number in range(UPSTREAM_DRAWS + 1):
            sides.send_to_node(node, RANDOMKEY if number else DBSIZE, both, at + number)
        at += UPSTREAM_DRAWS + 1
    both.attempt(sides.send_to_states, DBSIZE, both, at)
    for number in range(1, STATES_DRAWS + 1):
        names = ListedNames(part, sides.send_to_owner, sides.defer, both, at + number)
        names.attempt(sides.send_to_states, part.request, names, ListedNames.KEYS)
