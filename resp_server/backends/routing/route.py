"""The route of a request at a proxy with an upstream: what answers it, and the facts for that. The router finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from resp_server.backends.routing.key_aliases import ConvertReplies, StateRead
from resp_server.backends.routing.rules import Rule
from resp_server.backends.routing.upstream_settings import AskedEvents
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import Request

NO_FIELDS: Mapping[int, Request] = {}
NO_STATE_READS: Mapping[int, StateRead] = {}


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


class CacheableRead(NamedTuple):
    """A read whose reply may be cached.

    Args:
        cache_s: For how long.
        exact: Those of the keys that are cached exactly. The cache has to know all earlier changes of them before the
            client gets the reply.
    """

    keys: Sequence[bytes]
    cache_s: float
    exact: Sequence[bytes] = ()


class UncachedRead(NamedTuple):
    """A read that is not cached, with keys that are cached exactly: its reply may be newer than a cached one.

    Args:
        exact: These keys; None: too many to list.
    """

    exact: Sequence[bytes] | None


class CachedKeysWrite(NamedTuple):
    """A write that may change cached keys.

    Args:
        keys: The keys that it may change; None: all keys.
    """

    keys: Sequence[bytes] | None


class ShadowedRead(NamedTuple):
    """A read whose reply is compared with the states' values.

    Args:
        exact: Its keys that are cached exactly; None: too many to list.
    """

    shadowed: Sequence[Shadowed]
    exact: Sequence[bytes] | None = ()


# What the upstream's reply is used for, beside being sent to the client; None: for nothing.
ReplyUse = AskedEvents | CacheableRead | UncachedRead | CachedKeysWrite | ShadowedRead | None


class LocalRoute(NamedTuple):
    """This process answers: the proxy, or the server that gets the request."""

    routed: OverlayCommand


class StatesRoute(NamedTuple):
    """The state servers answer, as without an upstream."""

    routed: OverlayCommand


class UpstreamRoute(NamedTuple):
    """The upstream answers.

    Args:
        request: What it gets instead of the client's request; None: the client's request.
        is_blocking: The reply may come much later, so the client needs a dedicated connection.
        use: What the reply is used for. `AskedEvents`: the client gets OK if the reply to `request` includes them.
    """

    routed: OverlayCommand
    request: Request | None = None
    is_blocking: bool = False
    use: ReplyUse = None


class SplitRoute(NamedTuple):
    """The state servers and the upstream answer, each for its own keys.

    Args:
        state_keys: The positions of the states' keys.
        preferred: The reads for keys that the states answer if they have them, by position.
        request: The request with the states' keys in place of aliases; None: the client's request.
        fields: The requests for keys that are fields of states' keys, by position.
        can_overtake_cache: Its reply may be newer than a reply that is cached exactly, so the cache has to know all
            earlier changes before the client gets it.
        is_in_chunks: The upstream's keys are read by one request, the states' in chunks.
    """

    routed: OverlayCommand
    state_keys: Sequence[int] = ()
    preferred: Mapping[int, StateRead] = NO_STATE_READS
    request: Request | None = None
    fields: Mapping[int, Request] = NO_FIELDS
    can_overtake_cache: bool = False
    is_in_chunks: bool = False


class AliasedRoute(NamedTuple):
    """The state servers answer a request with their keys in place of aliases.

    Args:
        request: This request.
        convert: Makes the reply to the client's request of the states' replies to `request` and, if there is one, to
            `of_key`; None: the reply to `request` is the client's.
        of_key: A read of the whole key.
    """

    routed: OverlayCommand
    request: Request
    convert: ConvertReplies | None = None
    of_key: Request | None = None


class PreferredRoute(NamedTuple):
    """The state servers answer if they have the only key, otherwise the upstream.

    Args:
        read: The states' read of the key.
        unserved: The error if the states have the key, but do not serve the command.
    """

    routed: OverlayCommand
    read: StateRead
    unserved: GenericError | None = None


class AllKeysRoute(NamedTuple):
    """All state servers and the upstream answer, about their keys."""

    routed: OverlayCommand


class SelectRoute(NamedTuple):
    """This process answers after the upstream has confirmed that it has the database."""

    routed: OverlayCommand


class DroppedRoute(NamedTuple):
    """This process answers OK to a write, and does not run it."""

    routed: OverlayCommand


Route = (
    LocalRoute
    | StatesRoute
    | UpstreamRoute
    | SplitRoute
    | AliasedRoute
    | PreferredRoute
    | AllKeysRoute
    | SelectRoute
    | DroppedRoute
)
# Requests that are answered in the same way whether there is an upstream or not.
WITHOUT_UPSTREAM = (LocalRoute, StatesRoute)
# Requests that states answer, or may answer, together with the upstream or under other names.
PARTLY_OF_STATES = (SplitRoute, PreferredRoute, AliasedRoute)


def is_in_chunks(route: Route) -> bool:
    """Return whether a long read of both backends is answered in chunks."""
    return type(route) is SplitRoute and route.is_in_chunks


def changed_keys(route: Route) -> Sequence[bytes] | None:
    """Return the keys about which a transaction with the request makes cached replies old; None: all keys.

    A read of a key that is cached exactly counts, too: the reply to EXEC may be newer than a cached one.
    """
    match route:
        case UpstreamRoute(use=CachedKeysWrite(keys)):
            return keys
        case UpstreamRoute(use=CacheableRead(exact=exact) | UncachedRead(exact) | ShadowedRead(exact=exact)):
            return exact
    return ()
