"""The Redis client of the page, its allowed commands and its errors. The only module that imports redis-py.

`check` refuses every request that is not in ALLOWED, on every connection, also in redis-py's own handshake.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote, urlsplit

import redis.exceptions
from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

# Each command that may be sent; with subcommands, only these. None of them changes a key, a setting or another client.
ALLOWED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("AUTH", "HELLO", "PING", "INFO", "READONLY"), frozenset()),
    **dict.fromkeys(("SCAN", "TYPE", "PTTL", "STRLEN", "GETRANGE", "HLEN", "HSCAN", "LLEN", "LRANGE"), frozenset()),
    **dict.fromkeys(("SCARD", "SSCAN", "ZCARD", "ZREVRANGE", "ZSCAN"), frozenset()),
    **dict.fromkeys(("SUBSCRIBE", "PSUBSCRIBE", "PUNSUBSCRIBE"), frozenset()),
    "CLIENT": frozenset(("ID", "LIST", "SETNAME", "TRACKING")),
    "LATENCY": frozenset(("LATEST",)),
    "MEMORY": frozenset(("USAGE",)),
    "SLOWLOG": frozenset(("GET",)),
    "STATE": frozenset(("HISTORY", "JOBS", "LIST", "LOCATE", "OWNERS", "SHADOW", "TOPOLOGY")),
}
CLIENT_NAME = "sparkis-ui"
PASSWORD_VARIABLE = "SPARKIS_PASSWORD"
DEFAULT_PORT = 6379
CONNECTIONS_MAX = 4  # of one user to one server
REDIRECTS_MAX = 2  # one stale answer is normal after a move
CONNECT_S_MAX = 3.0
REPLY_S_MAX = 25.0  # STATE HISTORY takes up to 20 s
CALL_S_MAX = REPLY_S_MAX + CONNECT_S_MAX


class NotAllowedError(Exception):
    """The request is not in ALLOWED: a bug of this program."""


class RequestError(Exception):
    """The request got no reply, or an error."""


class LostError(RequestError):
    """The server cannot be reached."""


class SignInError(RequestError):
    """The server requires a user and a password, or does not accept the given ones."""


class RefusedError(RequestError):
    """The server refuses a request."""


class RedirectError(RequestError):
    """Another node of the cluster owns the key."""

    def __init__(self, text: str, host: str, port: int) -> None:
        super().__init__(text)
        self.host, self.port = host, port


def check(words: Iterable[Any]) -> None:
    """Raise NotAllowedError for a request that must not be sent."""
    # redis-py gives words as text or bytes, and the name of a command with a subcommand in one word or in two.
    text = [word.decode("latin-1") if isinstance(word, bytes) else str(word) for word in words]
    name, _, rest = text[0].upper().partition(" ")
    subcommands = ALLOWED.get(name)
    if subcommands is None:
        raise NotAllowedError(f"{name} is not one of the commands of the page")
    if subcommands:
        second = rest or (text[1].upper() if len(text) > 1 else "")
        if second not in subcommands:
            raise NotAllowedError(f"{name} {second} is not one of the commands of the page")


class _Checked:
    """The common part of both kinds of connections: checks each request."""

    def pack_command(self, *words: Any) -> Any:
        """Encode a request."""
        check(words)
        return super().pack_command(*words)  # type: ignore[misc]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> Any:
        """Encode several requests."""
        requests = [tuple(command) for command in commands]
        for request in requests:
            check(request)
        return super().pack_commands(requests)  # type: ignore[misc]


class PlainConnection(_Checked, Connection):
    """A connection over TCP."""


class TlsConnection(_Checked, SSLConnection):
    """A connection over TLS."""


@dataclass(frozen=True)
class Endpoint:
    """An address, and the user in its URL.

    Args:
        tls: Redis-py's options of TLS; None: no TLS.
    """

    host: str
    port: int
    username: str = ""
    password: str = field(default="", repr=False)
    tls: Mapping[str, str] | None = None

    @classmethod
    def of_url(cls, url: str, tls: Mapping[str, str] | None = None) -> Endpoint:
        """Parse `redis[s]://[[user]:password@]host[:port]`; ValueError for any other URL."""
        shown = re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)  # without a password, also if malformed
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError:  # its text may have a part of a password with `/` or `#`
            host, port = None, DEFAULT_PORT
        if not host or parts.scheme not in ("redis", "rediss"):
            raise ValueError(
                f"{shown!r} is not a URL of the form redis://host[:port], or rediss://... for TLS; special characters "
                "of a password are written as %XX, and an IPv6 address is in brackets"
            )
        if tls and parts.scheme == "redis":
            raise ValueError(f"{shown!r} is not a TLS URL: write rediss://, or give no TLS files")
        username, password = unquote(parts.username or ""), unquote(parts.password or "")
        options = (tls or {}) if parts.scheme == "rediss" else None
        return cls(host, port, username, password, options)

    @classmethod
    def of_options(cls, options: argparse.Namespace) -> Endpoint:
        """Return the endpoint of `add_endpoint_options`, with the password of the environment if the URL has none."""
        files = {
            "ssl_ca_certs": options.tls_ca_cert_file,
            "ssl_certfile": options.tls_cert_file,
            "ssl_keyfile": options.tls_key_file,
        }
        endpoint = cls.of_url(options.url, {name: file for name, file in files.items() if file is not None})
        if endpoint.password:
            return endpoint
        return endpoint.as_user(endpoint.username, os.environ.get(PASSWORD_VARIABLE, ""))

    @property
    def address(self) -> str:
        """Host and port, as in `MOVED`."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'redis' if self.tls is None else 'rediss'}://{host}:{self.port}"

    def as_user(self, username: str, password: str) -> Endpoint:
        """Return the same address for another user."""
        return replace(self, username=username, password=password)

    def at(self, host: str, port: int) -> Endpoint:
        """Return another server for the same user."""
        return replace(self, host=host or self.host, port=port)

    def connection_options(self, protocol: int) -> dict[str, Any]:
        """Return redis-py's options of a connection."""
        return {
            "host": self.host,
            "port": self.port,
            "username": self.username or None,
            "password": self.password or None,
            "protocol": protocol,
            "client_name": CLIENT_NAME,
            "driver_info": None,
            "socket_connect_timeout": CONNECT_S_MAX,
            "socket_timeout": REPLY_S_MAX,
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
            **(self.tls or {}),
        }

    @property
    def connection_class(self) -> type[PlainConnection] | type[TlsConnection]:
        """The class of connections."""
        return PlainConnection if self.tls is None else TlsConnection


class Client:
    """A user's connections to an endpoint, and to the nodes of its cluster to which the endpoint redirects."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._nodes: dict[str, Client] = {}
        pool = ConnectionPool(
            connection_class=endpoint.connection_class,
            max_connections=CONNECTIONS_MAX,
            retry=Retry(NoBackoff(), 1),  # a pooled connection may be closed by now
            **endpoint.connection_options(protocol=3),
        )
        self._redis = Redis.from_pool(pool)
        self._redis.response_callbacks.clear()  # `facts` parses the replies
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)

    async def execute(self, *words: str | bytes | int) -> Any:
        """Send a request and return its RESP3 reply, undecoded; follow `MOVED`. RequestError: no reply, or an error."""
        client = self
        for _ in range(REDIRECTS_MAX):
            try:
                return await client._execute_here(*words)
            except RedirectError as moved:
                client = self.at(moved.host, moved.port)
        return await client._execute_here(*words)

    async def execute_all(self, *requests: tuple[str | bytes | int, ...]) -> list[Any]:
        """Send several requests at once. A refusal takes the place of its reply; any other error is raised."""
        replies = await asyncio.gather(*(self.execute(*request) for request in requests), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, RefusedError):
                raise reply
        return replies

    def at(self, host: str, port: int) -> Client:
        """Return the client of another node."""
        endpoint = self.endpoint.at(host, port)
        if endpoint == self.endpoint:
            return self
        if endpoint.address not in self._nodes:
            self._nodes[endpoint.address] = Client(endpoint)
        return self._nodes[endpoint.address]

    async def _execute_here(self, *words: str | bytes | int) -> Any:
        check(words)
        try:
            async with self._free, asyncio.timeout(CALL_S_MAX):
                return await self._redis.execute_command(*words)  # type: ignore[no-untyped-call]
        except (redis.exceptions.RedisError, OSError) as error:
            raise error_of(error, self.endpoint) from None

    async def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            await node.close()
        await self._redis.aclose(close_connection_pool=True)


class Listener:
    """A connection for messages. It speaks RESP2, in which every message is an array."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection = endpoint.connection_class(**endpoint.connection_options(protocol=2))

    async def send(self, *words: str | bytes | int) -> None:
        """Connect if needed, and send a request; `receive` returns its reply."""
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
            await self._connection.send_command(*words)
        except (redis.exceptions.RedisError, OSError) as error:
            raise error_of(error, self._endpoint) from None

    async def receive(self) -> Any:
        """Return the next reply or message, without a time limit."""
        try:
            return await self._connection.read_response(timeout=None)
        except (redis.exceptions.RedisError, OSError) as error:
            raise error_of(error, self._endpoint) from None

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.disconnect()


class TrackedReader:
    """A connection whose reads the server tracks: invalidations of their keys go to a listener."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection = endpoint.connection_class(**endpoint.connection_options(protocol=3))
        self._turn = asyncio.Lock()

    async def execute(self, *words: str | bytes | int) -> Any:
        """Send a request on this connection and return its reply."""
        try:
            async with self._turn, asyncio.timeout(CALL_S_MAX):
                await self._connection.connect()  # type: ignore[no-untyped-call]
                await self._connection.send_command(*words)
                return await self._connection.read_response()
        except (redis.exceptions.RedisError, OSError) as error:
            raise error_of(error, self._endpoint) from None

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.disconnect()


def error_of(error: Exception, endpoint: Endpoint) -> RequestError:
    """Return the `RequestError` for an error of redis-py."""
    text = str(error)
    if isinstance(error, redis.exceptions.MovedError):
        return RedirectError(text, error.host, error.port)
    if isinstance(error, redis.exceptions.AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")):
        return SignInError(text)
    if isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError | OSError):
        return LostError(f"{endpoint.url} does not answer: {_reason(error)}")
    return RefusedError(text)


def _reason(error: Exception) -> str:
    """Return why an endpoint does not answer; redis-py writes it behind `Error 111 connecting to HOST:PORT. `."""
    if isinstance(error.__context__, ConnectionRefusedError):
        return "connection refused"
    text = str(error)
    return (text.partition(". ")[2] or text).rstrip(".") or "no reply in time"
