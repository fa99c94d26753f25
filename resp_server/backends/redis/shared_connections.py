"""The connections to one server that clients share: a few for each version of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from resp_server.backends.redis.connection import ConnectionEvents, UpstreamConnection, UpstreamRequest

# Bytes of long requests that wait for the upstream (guess: two of the longest).
LONG_BYTES_MAX = 1 << 30


class SharedConnections:
    """The shared connections. All requests of a client are sent over the same one, so that they run in order.

    Args:
        pool: Gets the events of the connections.
        count: The number of connections for each version of the protocol, beside one for long requests.

    Attributes:
        follow: See `UpstreamConnection`.
    """

    def __init__(self, pool: ConnectionEvents, count: int) -> None:
        self._pool, self.count = pool, count
        self._of: dict[tuple[int, int], UpstreamConnection] = {}
        self.follow: Callable[[UpstreamRequest, int, int], None] | None = None

    def __iter__(self) -> Iterator[UpstreamConnection]:
        return iter(list(self._of.values()))

    def of(self, client: int, protocol: int) -> UpstreamConnection:
        """Return the connection for a client's requests."""
        key = protocol, client % self.count
        connection = self._of.get(key)
        if connection is None:
            connection = self._of[key] = UpstreamConnection(self._pool, protocol)
            connection.follow = self.follow
        return connection

    def for_long_requests(self, protocol: int) -> UpstreamConnection:
        """Return the connection for long requests, so that short ones do not wait behind them."""
        key = protocol, self.count
        connection = self._of.get(key)
        if connection is None:
            connection = self._of[key] = UpstreamConnection(self._pool, protocol, LONG_BYTES_MAX)
        return connection

    def is_first(self, connection: UpstreamConnection) -> bool:
        """Return whether a connection is the one that a pool opens at its start."""
        return connection is self._of.get((2, 0))

    @property
    def open_count(self) -> int:
        """The number of open connections."""
        return sum(each.is_open for each in self._of.values())
