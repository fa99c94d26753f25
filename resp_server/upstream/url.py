"""The URL of an upstream: `redis[s]://[[user]:password@]host[:port][/database]` or `unix://[...@]/path?db=0`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

DEFAULT_PORT = 6379
SCHEMES = ("redis", "rediss", "unix")
LATER = ("redis+cluster", "redis+sentinel")


@dataclass(frozen=True)
class UpstreamUrl:
    """Where an upstream is, and as which user the proxy logs in. path: of a Unix socket; empty: TCP, maybe with TLS."""

    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    user: str = ""
    password: str | None = field(default=None, repr=False)
    database: int = 0
    is_tls: bool = False

    @classmethod
    def parse(cls, text: str) -> UpstreamUrl:
        """Parse a URL; ValueError, whose text does not repeat the password."""
        parts = urlsplit(text)
        if parts.scheme in LATER:
            raise ValueError(f"{parts.scheme}:// is not available yet; give redis://, rediss:// or unix://")
        if parts.scheme not in SCHEMES:
            raise ValueError("an upstream's URL begins with redis://, rediss:// or unix://")
        try:
            port = parts.port or DEFAULT_PORT
        except ValueError:
            raise ValueError("the port of the upstream's URL is no number from 1 to 65535") from None
        options = parse_qs(parts.query)
        if parts.fragment or options.keys() - {"db"}:
            raise ValueError("an upstream's URL has no options but db=NUMBER")
        is_unix = parts.scheme == "unix"
        if is_unix and (parts.hostname or not parts.path.strip("/")):
            raise ValueError("the URL of a Unix socket is unix:///path/of/the.sock")
        if not is_unix and not parts.hostname:
            raise ValueError("the upstream's URL has no host")
        database = options.get("db", ["0"])[-1] if is_unix or "db" in options else parts.path.strip("/") or "0"
        if not (database.isascii() and database.isdigit()):
            raise ValueError(f"the database of the upstream's URL, {database!r}, is no number")
        password = None if parts.password is None else unquote(parts.password)
        user = unquote(parts.username or "")
        if user and password is None:
            raise ValueError("the upstream's URL has a user without a password")
        return cls(
            "" if is_unix else parts.hostname or "",
            port,
            unquote(parts.path) if is_unix else "",
            user,
            password,
            int(database),
            is_tls=parts.scheme == "rediss",
        )

    @property
    def address(self) -> str:
        """The address for logs and INFO, without user and password."""
        return self.path or f"{self.host}:{self.port}"

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
