"""The URL of an upstream. Pure.

redis[s]://[[user]:password@]host[:port][/database]
unix://[[user]:password@]/path[?db=database]
redis[s]+cluster://[[user]:password@]host[:port][,host[:port]...]
redis[s]+sentinel://[[user]:password@]host[:port][,host[:port]...]/master[/database][?sentinel_password=password]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from resp_server.net.addresses import PORT_MAX, address_of

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
KINDS = ("", "+cluster", "+sentinel")
SCHEMES = ("unix", *(name + kind for name in ("redis", "rediss") for kind in KINDS))
# The name of a proxy's connections at the upstream.
CLIENT_NAME = b"sparkis-proxy"
# Options of a URL. The login of sentinels is their own.
DATABASE, SENTINEL_USER, SENTINEL_PASSWORD = "db", "sentinel_user", "sentinel_password"


ROLE = (b"ROLE",)


class UpstreamAddress(NamedTuple):
    """The address of a server of the upstream."""

    host: str
    port: int

    def __str__(self) -> str:
        return address_of(self.host, self.port)


@dataclass(frozen=True)
class UpstreamUrl:
    """The address of an upstream, and the login for it.

    Args:
        path: The path of a Unix socket; empty: TCP.
        seeds: Nodes of a Redis Cluster, which know the others, or sentinels; empty: a single server.
        master: The name that sentinels have for the master.
        sentinel_user, sentinel_password: The login at the sentinels.
    """

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    user: str = ""
    password: str | None = field(default=None, repr=False)
    database: int = 0
    is_tls: bool = False
    seeds: tuple[UpstreamAddress, ...] = ()
    master: str = ""
    sentinel_user: str = ""
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> UpstreamUrl:
        """Parse a URL; ValueError if it is invalid, with a text that does not contain the password."""
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise ValueError(
                "an upstream's URL begins with redis://, rediss://, redis+cluster://, redis+sentinel:// or unix://"
            )
        is_unix, _, kind = parts.scheme == "unix", *parts.scheme.partition("+")[1:]
        options = parse_qs(parts.query)
        known = {DATABASE, SENTINEL_USER, SENTINEL_PASSWORD} if kind == "sentinel" else {DATABASE}
        if parts.fragment or options.keys() - known:
            raise ValueError(f"an upstream's URL of this kind has no options but {', '.join(sorted(known))}")
        login, _, place = parts.netloc.rpartition("@")
        user, has_password, password = login.partition(":")
        if user and not has_password:
            raise ValueError("the upstream's URL has a user without a password")
        if is_unix and (place or not parts.path.strip("/")):
            raise ValueError("the URL of a Unix socket is unix:///path/of/the.sock")
        path, master = parts.path.strip("/"), ""
        if kind == "sentinel":
            master, _, path = path.partition("/")
            if not master:
                raise ValueError("the URL of sentinels has the name of their master: redis+sentinel://HOST,HOST/MASTER")
        database = options.get(DATABASE, ["0"])[-1] if is_unix or DATABASE in options else path or "0"
        if not (database.isascii() and database.isdigit()):
            raise ValueError("the database of the upstream's URL is no number; a password's / is written as %2F")
        url = cls(
            path=unquote(parts.path) if is_unix else "",
            user=unquote(user),
            password=unquote(password) if has_password else None,
            database=int(database),
            is_tls=parts.scheme.startswith("rediss"),
            master=unquote(master),
            sentinel_user=options.get(SENTINEL_USER, [""])[-1],
            sentinel_password=options.get(SENTINEL_PASSWORD, [None])[-1],
        )
        if is_unix:
            return url
        port = SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT
        addresses = tuple(_address(each, port) for each in place.split(","))
        if not kind:
            if len(addresses) > 1:
                raise ValueError("redis:// has one host; redis+cluster:// and redis+sentinel:// take several")
            return url.at(addresses[0])
        if url.database and kind == "cluster":
            raise ValueError("a Redis Cluster has database 0 only")
        return replace(url, seeds=addresses)

    def at(self, address: UpstreamAddress) -> UpstreamUrl:
        """Return the URL of one server, with the same login."""
        return replace(self, host=address.host, port=address.port, seeds=(), master="")

    def with_login(self, user: bytes, password: bytes) -> UpstreamUrl:
        """Return the URL with another login."""
        texts = [each.decode("utf-8", "surrogateescape") for each in (user, password)]
        return replace(self, user=texts[0], password=texts[1])

    @property
    def is_cluster(self) -> bool:
        """Return whether the upstream is a Redis Cluster."""
        return bool(self.seeds) and not self.master

    @property
    def address(self) -> str:
        """The address for logs and INFO, without user and password."""
        name = f"{self.master} of " if self.master else ""
        return name + ",".join(map(str, self.seeds)) if self.seeds else self.path or address_of(self.host, self.port)

    def greeting(self, protocol: int) -> list[tuple[bytes, ...]]:
        """Return the first requests over a connection. RESP2 needs no HELLO, which Redis before 6 does not know."""
        requests: list[tuple[bytes, ...]] = []
        if self.password is not None:
            names = (self.user.encode("utf-8", "surrogateescape"),) if self.user else ()
            requests.append((b"AUTH", *names, self.password.encode("utf-8", "surrogateescape")))
        if protocol != 2:
            requests.append((b"HELLO", b"%d" % protocol))
        if self.database:
            requests.append((b"SELECT", b"%d" % self.database))
        return [*requests, (b"CLIENT", b"SETNAME", CLIENT_NAME), ROLE, (b"PING",)]


def _address(text: str, default_port: int) -> UpstreamAddress:
    """Parse `host[:port]`, with an IPv6 address in brackets; ValueError if it is invalid."""
    host, bracket, rest = text.partition("]")
    if not bracket:
        if text.count(":") > 1:
            raise ValueError("an IPv6 address in the upstream's URL is in brackets: redis://[::1]:6379")
        host, _, rest = text.partition(":")
        rest = ":" + rest if rest else ""
    port = rest.removeprefix(":") or str(default_port)
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ValueError("the port of the upstream's URL is no number from 1 to 65535")
    host = unquote(host.removeprefix("[")).lower()
    if not host:
        raise ValueError("the upstream's URL has no host")
    return UpstreamAddress(host, int(port))
