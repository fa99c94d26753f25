"""A queued read with keys of both backends: its requests for each of them, and the join of their replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from resp_server.backends.overlay.preferred_reads import ABSENT
from resp_server.backends.routing.key_aliases import StateRead
from resp_server.backends.routing.route import AliasedRoute, PreferredRoute, SplitRoute
from resp_server.backends.servers.request_split import merge_parts
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply, Steps, is_error, result_of

# The backends.
UPSTREAM, STATES = 0, 1


class SplitRead(NamedTuple):
    """The requests for each backend.

    Args:
        join: Makes one reply of the replies to all of them.
    """

    upstream: Sequence[Request]
    states: Sequence[Request]
    join: Callable[[Sequence[RawReply], Sequence[RawReply]], Steps[RawReply]]


def split_by_backend(route: SplitRoute, request: Request) -> SplitRead:
    """Split a request by the backends of its keys. The states' requests must be answered from one epoch.

    A read of a key whose rule is `prefer-state` is sent to both backends, and to the states with an EXISTS before it.
    """
    request = request if route.request is None else route.request
    of_states = {*route.state_keys, *route.preferred, *route.fields}
    theirs = [at for at in range(1, len(request)) if at not in of_states]
    ours = list(route.state_keys)
    upstream = [_part(request, theirs)] if theirs else []
    states = [_part(request, ours)] if ours else []
    for at, read in route.preferred.items():
        upstream.append((request[0], request[at]))
        states += [read.exists, *read.reads]
    states += route.fields.values()
    groups = [group for group in (theirs, ours, *([at] for at in (*route.preferred, *route.fields))) if group]
    places = [[at - 1 for at in group] for group in groups]

    def join(from_upstream: Sequence[RawReply], from_states: Sequence[RawReply]) -> Steps[RawReply]:
        replies = [*from_upstream[: len(theirs) and 1], *from_states[: len(ours) and 1]]
        rest = iter(from_states[len(ours) and 1 :])
        for reply, read in zip(from_upstream[len(theirs) and 1 :], route.preferred.values(), strict=True):
            replies.append(_chosen(reply, next(rest), read, list(islice(rest, len(read.reads)))))
        replies += rest
        error = next(filter(is_error, replies), None)
        if error is not None:
            return error
        return (yield from result_of(merge_parts(route.routed.policy, replies, places)))

    return SplitRead(upstream, states, join)


def alias_split(route: AliasedRoute) -> SplitRead:
    """Return the requests of a route that is for the states only."""
    convert = route.convert
    requests = [route.request] if route.of_key is None else [route.request, route.of_key]

    def join(from_upstream: Sequence[RawReply], from_states: Sequence[RawReply]) -> Steps[RawReply]:
        yield
        return from_states[0] if convert is None else convert(from_states)

    return SplitRead([], requests, join)


def preferred_split(route: PreferredRoute, request: Request) -> SplitRead:
    """Return the requests to both backends for a key that the states answer if they have it."""
    read = route.read

    def join(from_upstream: Sequence[RawReply], from_states: Sequence[RawReply]) -> Steps[RawReply]:
        yield
        if route.unserved is not None and from_states[0] != ABSENT:
            return b"-%b\r\n" % route.unserved.line
        return _chosen(from_upstream[0], from_states[0], read, from_states[1:])

    return SplitRead([request], [read.exists, *read.reads], join)


def _chosen(upstream: RawReply, exists: RawReply, read: StateRead, states: Sequence[RawReply]) -> RawReply:
    """Return the states' reply if they have the key, else the upstream's."""
    if is_error(exists):
        return exists
    return upstream if exists == ABSENT else read.reply(states)


def _part(request: Request, positions: Sequence[int]) -> Request:
    return (request[0], *(request[at] for at in positions))
