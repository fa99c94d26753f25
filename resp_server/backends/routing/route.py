"""The route of a request at a proxy with an upstream: its destination and the facts for that. The router finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from resp_server.backends.routing.key_aliases import ConvertReplies, StateRead
from resp_server.backends.routing.rules import Rule
from resp_server.backends.routing.upstream_settings import AskedEvents
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import Request

NO_FIELDS: Mapping[int, Request] = {}
NO_STATE_READS: Mapping[int, StateRead] = {}


class Destination(Enum):
    """What answers a request. "This process" is the proxy, or the server that gets the request."""

    LOCAL = auto()  # this process
    STATES = auto()  # the state servers, as without an upstream
    UPSTREAM = auto()  # the upstream
    BOTH = auto()  # the state servers and the upstream, each for its own keys
    ALIASED = auto()  # the state servers, by a request with their keys in place of aliases
    PREFERRED = auto()  # the state servers if they have the only key, otherwise the upstream
    ALL_KEYS = auto()  # all state servers and the upstream, about their keys
    SELECT = auto()  # this process, after the upstream has confirmed that it has the database
    DROPPED = auto()  # this process: a write that gets OK and is not run


# Requests that are answered in the same way whether there is an upstream or not.
WITHOUT_UPSTREAM = frozenset((Destination.LOCAL, Destination.STATES))


class Route(NamedTuple):
    """What answers a request, and what it needs for that.

    Args:
        state_keys: For `Destination.BOTH`, the positions of the states' keys.
        is_blocking: For `Destination.UPSTREAM`: the reply may come much later, so the client needs a connection of its
            own.
        request: What the backend gets instead of the client's request; None: the client's request.
        fields: For `Destination.BOTH`, the requests for keys that are fields of states' keys, by position.
        convert: For `Destination.ALIASED`: makes the reply to the client's request of the states' replies to `request`
            and, if there is one, to `of_key`.
        of_key: For `Destination.ALIASED`, a read of the whole key.
        preferred: The states' reads for keys that the states answer if they have them, by position. For
            `Destination.PREFERRED`, that for the only key.
        unserved: For `Destination.PREFERRED`, the error if the states have the key, but do not serve the command.
        shadowed: The keys to compare.
        cache_s: How long the reply about `cached_keys` may be cached.
        changed: The keys that the request may change, if any key is cached; None: all keys.
        can_overtake_cache: Its reply may be newer than a reply that is cached exactly, so the cache has to know all
            earlier changes before the client gets it.
        asked_events: What the reply to `request` has to include, so that the client gets OK.
        is_in_chunks: For `Destination.BOTH`: the upstream's keys are read by one request, the states' in chunks.
    """

    destination: Destination
    routed: OverlayCommand
    state_keys: Sequence[int] = ()
    is_blocking: bool = False
    request: Request | None = None
    fields: Mapping[int, Request] = NO_FIELDS
    convert: ConvertReplies | None = None
    of_key: Request | None = None
    preferred: Mapping[int, StateRead] = NO_STATE_READS
    unserved: GenericError | None = None
    shadowed: Sequence[Shadowed] = ()
    cache_s: float = 0.0
    cached_keys: Sequence[bytes] = ()
    changed: Sequence[bytes] | None = ()
    can_overtake_cache: bool = False
    asked_events: AskedEvents | None = None
    is_in_chunks: bool = False


class Shadowed(NamedTuple):
    """A key whose value in the upstream is compared with the state's.

    Args:
        at: The position of the key among the request's keys.
        name, upstream_request: The read of this key alone.
        request, convert: The state's read, and what makes its reply that of the client's.
    """

    rule: Rule
    at: int
    key: bytes
    name: str
    upstream_request: Request
    state_key: bytes
    request: Request
    convert: ConvertReplies | None = None
