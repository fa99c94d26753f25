"""SCAN, KEYS, RANDOMKEY and DBSIZE over an upstream and the states behind a proxy.

The upstream's copies of keys that states own are left out, as GET does not read them; so are states' keys that the
upstream owns. DBSIZE counts both: it would have to read all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from random import choice, choices
from typing import NamedTuple, Protocol

from resp_server.backends.overlay.state_listing import KEYS_AT_ONCE, StateListing, VisibleNames, listed_names
from resp_server.backends.routing.rules import Rule
from resp_server.backends.routing.scan_cursor import ScanPosition, after
from resp_server.backends.servers.field_names import NO_RULES, FieldRules, may_match
from resp_server.backends.servers.request_split import NO_KEY
from resp_server.command.policies import special_of
from resp_server.command.policy import SpecialCommand
from resp_server.protocol.errors import GenericError, TryAgainError
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, Replies, ReplyFuture, ask, run_in_steps, run_into
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes, is_error, raw_reply_of, text_of
from resp_server.raw_replies.reply_sinks import (
    MALFORMED_REPLY_ERRORS,
    Defer,
    ReplySink,
    malformed_reply,
    merge_or_error,
)
from resp_server.raw_replies.reply_splitter import items_of, sum_of_replies

# Random keys of each backend: several, because some may be copies of the other backend's keys (guess).
UPSTREAM_DRAWS, STATES_DRAWS = 16, 4
DBSIZE, RANDOMKEY = (b"DBSIZE",), (b"RANDOMKEY",)


class KeyspaceBackends(Protocol):
    """Sends a client's requests about all keys to each backend.

    Args:
        defer: Calls back in a later turn.
        node_count: The number of the upstream's nodes; each has keys of its own.
    """

    node_count: int
    defer: Defer

    def to_node(self, node: int, request: Request, sink: ReplySink, index: int) -> None:
        """Send a read to a node of the upstream."""

    def to_states(self, request: Request, sink: ReplySink, index: int) -> None:
        """Send a request to the state servers."""

    def to_owner(self, key: bytes, request: Request) -> ReplyFuture:
        """Send a read of a state's key to the server that has it."""


class ListingFilter(NamedTuple):
    """The filters of the keys of each backend that a client sees.

    Args:
        has_common: Both backends may have the same key.
        is_named: Clients know some keys of states by other names, so patterns and rights are matched here.
        may_read: Tells whether the client has the right to a name.
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
    if special_of(request[0]) is SpecialCommand.KEYS:
        return (request[0], b"*"), request[1], None
    kept, pattern, type_name = [*request[:2]], None, None
    for index in range(2, len(request), 2):
        option = request[index].upper()
        if option == b"MATCH" and index + 1 < len(request):
            pattern = request[index + 1]
        elif option == b"TYPE" and index + 1 < len(request):
            type_name = request[index + 1].lower()
        else:
            kept += request[index : index + 2]
    return kept, pattern, type_name


def _may_name(rule: Rule, pattern: bytes) -> bool:
    return may_match(pattern, rule.keys.prefix, not rule.keys.columns)


async def scan(backends: KeyspaceBackends, keys: ListingFilter, request: Request, position: ScanPosition) -> Answer:
    """Answer a SCAN by a step of the backend that its cursor names."""
    request = (request[0], b"%d" % position.inner, *request[2:])
    listing = keys.state_listing(request)
    if position.node is None:
        page = await ask(partial(backends.to_states, listing.request))
    else:
        page = await ask(partial(backends.to_node, position.node, request))
    if is_error(page.reply):
        return page
    following, found = await run_in_steps(
        _following_and_keys(position, page.reply, backends.node_count), backends.defer
    )
    if position.node is None:
        names = await listed_names(listing, Answer(found, page.epochs), backends.to_owner, backends.defer)
    else:
        filtering = merge_or_error(lambda pages: visible_keys(pages, [keys.of_upstream]), [found])
        names = Answer(found if is_error(found) else await run_in_steps(filtering, backends.defer), page.epochs)
    if is_error(names.reply):
        return names
    return Answer(raw_reply_of([b"*2\r\n", following, names.reply]), names.epochs)


def _following_and_keys(position: ScanPosition, page: RawReply, node_count: int) -> Steps[tuple[bytes, RawReply]]:
    """Return the encoded next cursor, and a page's keys; an error in place of the keys."""
    try:
        inner, keys = yield from items_of(page)
        following = after(position, int(text_of(inner)), node_count)
    except GenericError as error:
        return b"", b"-%b\r\n" % error.line
    except MALFORMED_REPLY_ERRORS as error:
        return b"", malformed_reply(error)
    return encode(b"%d" % following, 2), keys


def visible_keys(
    arrays: Sequence[RawReply], filters: Sequence[Callable[[bytes], bool]], has_common: bool = False
) -> Steps[RawReply]:
    """Return one array of the keys of all arrays that their filters let through.

    Args:
        has_common: Each key once.
    """
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


async def query_both(
    backends: KeyspaceBackends, keys: ListingFilter, special: SpecialCommand | None, request: Request
) -> Answer:
    """Answer KEYS, RANDOMKEY or DBSIZE from both backends."""
    if special is SpecialCommand.RANDOMKEY:
        return await _random_key(backends, keys)
    count, replies = backends.node_count, Replies()
    for node in range(count):
        replies.ask(partial(backends.to_node, node, request))
    if special is SpecialCommand.DBSIZE:
        replies.ask(partial(backends.to_states, request))
        return await replies.merge(sum_of_replies, backends.defer)
    run_into(_state_names(backends, keys.state_listing(request)), replies, replies.expect())
    filters = [*[keys.of_upstream] * count, lambda name: True]
    return await replies.merge(lambda found: visible_keys(found, filters, keys.has_common), backends.defer)


async def _state_names(backends: KeyspaceBackends, listing: StateListing) -> Answer:
    """Return the clients' names of the keys that the state servers list."""
    listed = await ask(partial(backends.to_states, listing.request))
    return await listed_names(listing, listed, backends.to_owner, backends.defer)


async def _random_key(backends: KeyspaceBackends, keys: ListingFilter) -> Answer:
    """Return a random key. A backend is chosen in proportion to its visible names, estimated from its random keys."""
    count, listing, replies = backends.node_count, keys.state_listing(RANDOMKEY), Replies()
    # For each node, then for the states: the number of keys, and some random ones.
    for node in range(count):
        for request in (DBSIZE, *[RANDOMKEY] * UPSTREAM_DRAWS):
            replies.ask(partial(backends.to_node, node, request))
    replies.ask(partial(backends.to_states, DBSIZE))
    for _ in range(STATES_DRAWS):
        run_into(_state_names(backends, listing), replies, replies.expect())

    def choose(replies: Sequence[RawReply]) -> Steps[RawReply]:
        each_reply, candidates, weights, is_hidden = iter(replies), [], [], False
        for number in range(count + 1):
            size, *draws = islice(each_reply, 1 + (UPSTREAM_DRAWS if number < count else STATES_DRAWS))
            drawn = [each for each in draws if each not in NO_KEY]
            found: list[RawReply] = []
            for each in drawn:
                if number == count:
                    names = yield from items_of(each)
                else:
                    names = [each] if keys.of_upstream(text_of(each)) else []
                is_hidden |= not names
                found += names
            if found:
                candidates.append(choice(found))
                weights.append(max(1, int(as_bytes(size)[1:])) * len(found) / len(drawn))
        if candidates:
            return choices(candidates, weights)[0]
        if is_hidden:
            error = TryAgainError(
                "no random key was found that is no old copy and that you may read; send the command again"
            )
            return b"-%b\r\n" % error.line
        return replies[1]

    return await replies.merge(choose, backends.defer)
