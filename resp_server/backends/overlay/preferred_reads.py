"""Reads of keys whose rule is `prefer-state`: the states answer if they have the key, otherwise the upstream does.

Both backends get the request at once, and the states an EXISTS before it. So a client's requests keep their order at
each backend, and a read costs one round trip. The upstream's reply is not waited for if the states have the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from resp_server.backends.routing.key_aliases import StateRead
from resp_server.backends.routing.route import SplitRoute
from resp_server.backends.servers.request_split import merge_parts
from resp_server.protocol.errors import ReplyError, TryAgainError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReadSeenEpochs, Replies, all_of, ask, run_into
from resp_server.raw_replies.raw_reply import is_error
from resp_server.raw_replies.reply_sinks import Defer, ReplySink
from resp_server.session.epochs import ReplyEpochs

ABSENT = b":0\r\n"
# A read is repeated if an epoch came between its two requests to the states. Twice in a row is rare (guess).
TRIES_MAX = 10


class ClientSenders(NamedTuple):
    """Sends one client's requests to each backend.

    Args:
        to_states: Takes a key of the request, too.
    """

    to_upstream: Callable[[Request, ReplySink, int], object]
    to_states: Callable[[bytes, Request, ReplySink, int], object]
    seen: ReadSeenEpochs
    defer: Defer


async def preferred_read(
    senders: ClientSenders, request: Request, read: StateRead, unserved: ReplyError | None = None
) -> Answer:
    """Answer a read of one key.

    Args:
        unserved: The error if the states have the key, but do not serve the command.
    """
    from_upstream = ask(partial(senders.to_upstream, request), senders.seen)
    for _ in range(TRIES_MAX):
        key_exists, *reads = [
            ask(partial(senders.to_states, read.exists[1], each), senders.seen) for each in (read.exists, *read.reads)
        ]
        exists = await key_exists
        if is_error(exists.reply):
            return exists
        if exists.reply == ABSENT:
            return Answer((await from_upstream).reply, exists.epochs)
        if unserved is not None:
            raise unserved
        answers = await all_of(reads)
        if all(_are_same(exists.epochs, answer.epochs) for answer in answers):
            return Answer(read.reply([answer.reply for answer in answers]), answers[0].epochs)
    raise TryAgainError("the state changes too often to be read together")


def _are_same(first: ReplyEpochs, second: ReplyEpochs) -> bool:
    """Return whether two replies are from the same epochs."""
    return first == second or not first or not second


async def split_read(
    senders: ClientSenders, route: SplitRoute, request: Request, to_owners: Callable[[Request, ReplySink, int], None]
) -> Answer:
    """Answer a read of several keys: those of the upstream, those of the states, and each preferred key or field.

    Args:
        to_owners: Sends a read of the states' keys, which may be of several slots.
    """
    request = request if route.request is None else route.request
    of_states = {*route.state_keys, *route.preferred, *route.fields}
    of_upstream = [at for at in range(1, len(request)) if at not in of_states]
    replies = Replies(senders.seen)
    if of_upstream:
        replies.ask(partial(senders.to_upstream, _part(request, of_upstream)))
    if route.state_keys:
        replies.ask(partial(to_owners, _part(request, route.state_keys)))
    for at, read in route.preferred.items():
        run_into(preferred_read(senders, (request[0], request[at]), read), replies, replies.expect())
    for field in route.fields.values():
        replies.ask(partial(senders.to_states, field[1], field))
    groups = [of_upstream, route.state_keys, *([at] for at in (*route.preferred, *route.fields))]
    places = [[at - 1 for at in group] for group in groups if group]

    return await replies.merge(lambda found: merge_parts(route.routed.policy, found, places), senders.defer)


def _part(request: Request, positions: Sequence[int]) -> Request:
    return (request[0], *(request[at] for at in positions))
