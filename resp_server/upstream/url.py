"""The URL of an upstream. Pure.

redis[s]://[[user]:password@]host[:port][/database]
unix://[[user]:password@]/path[?db=database]
redis[s]+cluster://[[user]:password@]host[:port][,host[:port]...]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from resp_server.net.addresses import PORT_MAX

DEFAULT_PORT = 6379
SCHEMES = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster")
LATER = ("redis+sentinel", "rediss+sentinel")


class Address(NamedTuple):
    """The address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class UpstreamUrl:
    """Where an upstream is, and as which user the proxy logs in. path: of a Unix socket; empty: TCP, maybe with TLS.

    seeds: nodes of a Redis Cluster, which know the others; empty: a single server.
    """

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    user: str = ""
    password: str | None = field(default=None, repr=False)
    database: int = 0
    is_tls: bool = False
    seeds: tuple[Address, ...] = ()

    @classmethod
    def parse(cls, text: str) -> UpstreamUrl:
        """Parse a URL; ValueError, whose text does not repeat the password."""
        parts = urlsplit(text)
        if parts.scheme in LATER:
            raise ValueError(f"{parts.scheme}:// is not available yet; give another kind")
        if parts.scheme not in SCHEMES:
            raise ValueError("an upstream's URL begins with redis://, rediss://, redis+cluster:// or unix://")
        options = parse_qs(parts.query)
        if parts.fragment or options.keys() - {"db"}:
            raise ValueError("an upstream's URL has no options but db=NUMBER")
        login, _, place = parts.netloc.rpartition("@")
        user, has_password, password = login.partition(":")
        if user and not has_password:
            raise ValueError("the upstream's URL has a user without a password")
        is_unix = parts.scheme == "unix"
        if is_unix and (place or not parts.path.strip("/")):
            raise ValueError("the URL of a Unix socket is unix:///path/of/the.sock")
        database = options.get("db", ["0"])[-1] if is_unix or "db" in options else parts.path.strip("/") or "0"
        if not (database.isascii() and database.isdigit()):
            raise ValueError(f"the database of the upstream's URL, {database!r}, is no number")
        url = cls(
            path=unquote(parts.path) if is_unix else "",
            user=unquote(user),
            password=unquote(password) if has_password else None,
            database=int(database),
            is_tls=parts.scheme.startswith("rediss"),
        )
        if is_unix:
            return url
        addresses = tuple(_address(each) for each in place.split(","))
        if not parts.scheme.endswith("+cluster"):
            if len(addresses) > 1:
                raise ValueError("the upstream's URL has several hosts; only redis+cluster:// takes them")
            return url.at(addresses[0])
        if url.database:
            raise ValueError("a Redis Cluster has database 0 only")
        return replace(url, seeds=addresses)

    def at(self, address: Address) -> UpstreamUrl:
        """Return the URL of one server, with the same login."""
        return replace(self, host=address.host, port=address.port, seeds=())

    @property
    def address(self) -> str:
        """The address for logs and INFO, without user and password."""
        return ",".join(map(str, self.seeds)) or self.path or f"{self.host}:{self.port}"

    def greeting(self, protocol: int) -> list[tuple[bytes, ...]]:
        """Return the requests that open a connection. RESP2 needs no HELLO, which Redis before 6 does not know."""
        words: list[tuple[bytes, ...]] = []
        if self.password is not None:
            names = (self.user.encode(),) if self.user else ()
            words.append((b"AUTH", *names, self.password.encode()))
        if protocol != 2:
            words.append((b"HELLO", b"%d" % protocol))
        if self.database:
            words.append((b"SELECT", b"%d" % self.database))
        return [*words, (b"CLIENT", b"SETNAME", b"sparkis-proxy"), (b"PING",)]


def _address(text: str) -> Address:
    """Parse `host[:port]`; an IPv6 address is in brackets."""
    host, bracket, rest = text.partition("]")
    if not bracket:
        host, _, rest = text.partition(":")
        rest = ":" + rest if rest else ""
    port = rest.removeprefix(":") or str(DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ValueError("the port of the upstream's URL is no number from 1 to 65535")
    host = unquote(host.removeprefix("[")).lower()
    if not host:
        raise ValueError("the upstream's URL has no host")
    return Address(host, int(port))
