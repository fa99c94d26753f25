"""What the compiled forwarder knows of an upstream: its commands, the owners of keys, and when to leave requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resp_server.backends.overlay.cached_reads import CachedReads
from resp_server.backends.overlay.dedicated_requests import DedicatedRequests
from resp_server.backends.redis.cluster import NodeConnections
from resp_server.backends.redis.connection import UpstreamConnection
from resp_server.backends.redis.logins import Logins
from resp_server.backends.routing.key_matcher import KeyOwner
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.result_cache import ResultCache
from resp_server.backends.routing.router import Router
from resp_server.backends.servers.command_routes import FORWARDED_NAME_BYTES_MAX
from resp_server.metrics.stats import Stats


class ForwarderRules:
    """Keeps the forwarder's commands and patterns up to date. Without a forwarder it does nothing.

    Args:
        has_client_logins: Clients log in at the upstream, so that no client gets a cached reply.
    """

    def __init__(
        self,
        forwarder: Any,
        router: Router,
        logins: Logins,
        dedicated: DedicatedRequests,
        cached: CachedReads,
        stats: Stats,
        *,
        has_client_logins: bool,
    ) -> None:
        self._forwarder, self._router, self._stats = forwarder, router, stats
        self._logins, self._dedicated, self._cached = logins, dedicated, cached
        self._has_client_logins = has_client_logins
        self.set_commands()
        self.set_key_owners()

    @property
    def _ownership(self) -> Ownership:
        return self._router.ownership

    def set_commands(self) -> None:
        """Have the forwarder forward the commands that may be forwarded to the upstream."""
        if self._forwarder is None:
            return
        plain = self._router.commands.upstream_forward_specs()
        rows = [
            (*each, self._stats.command_stats(each.name))
            for each in plain
            if len(each.name) <= FORWARDED_NAME_BYTES_MAX
        ]
        self._forwarder.set_upstream(self._connection_of, self._dedicated_clients, self._cache_of, rows)

    def set_key_owners(self) -> None:
        """Give the forwarder the owners of keys. Before all owners are known, it forwards nothing."""
        if self._forwarder is None:
            return
        if self._ownership.is_known:
            self._forwarder.set_key_owners(self._ownership.matcher.key_owners)
        else:
            self._forwarder.set_key_owners({}, [KeyOwner(b"*", None)])

    def hold_requests(self, is_held: bool, are_publishing_held: bool) -> None:
        """Have the forwarder leave the upstream's requests to the general path while these wait for a subscription.

        Args:
            are_publishing_held: Those that may send messages wait.
        """
        if self._forwarder is not None:
            self._forwarder.hold(is_held, are_publishing_held)

    @property
    def _dedicated_clients(self) -> Sequence[Mapping[int, object]]:
        """The clients with connections of their own; all others keep the one that they get from `_connection_of`."""
        dedicated = self._logins.default.of(0).dedicated_connections
        return () if dedicated is None else (dedicated, self._logins.by_client)

    def _connection_of(self, client: int, protocol: int, database: int) -> UpstreamConnection | NodeConnections | None:
        """Return a client's connection to a database; None: the general path opens one, or replies an error."""
        databases = self._logins.of(client)
        if database and not databases.is_open(database):
            return None
        return databases.of(database).connection_for_forwarder(client, protocol)

    def _cache_of(self, client: int, database: int) -> ResultCache | None:
        """Return the cache for a client of the forwarder; None: the client gets no cached replies."""
        databases = self._logins.default
        if self._has_client_logins or not databases.is_open(database):
            return None
        if self._dedicated.has_connection(client, databases.of(database).pools):
            return None
        return self._cached.for_forwarder(self._ownership.matcher.has_exactly_cached)
