"""The users of an upstream as which clients have logged in: each has connections of its own.

A login is a user and a password. Each AUTH is checked by the upstream, over the login's connections if there are any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from resp_server.backends.redis.databases import Databases
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.protocol.errors import GenericError, WrongPassError
from resp_server.raw_replies.answers import Answer, ask
from resp_server.raw_replies.raw_reply import is_error
from resp_server.raw_replies.reply_splitter import pack

# Logins with connections (guess). Those that no client uses are forgotten when there are more.
LOGINS_MAX = 128
WRONG_PASSWORD = "WRONGPASS"


class Login(NamedTuple):
    """A user and a password.

    Args:
        user: The user; empty: AUTH with a password only.
    """

    user: bytes
    password: bytes

    @property
    def request(self) -> bytes:
        """The request that logs in."""
        return pack((b"AUTH", *([self.user] if self.user else []), self.password))


class Logins:
    """The databases of an upstream, by the login of each client. Runs on the event loop's thread.

    Args:
        default: With the login of the upstream's URL. They serve clients without a login of their own.

    Attributes:
        by_client: The databases of clients with a login of their own.
    """

    def __init__(self, default: Databases) -> None:
        self.default = default
        self._by_login: dict[Login, Databases] = {}
        self.by_client: dict[int, Databases] = {}

    def __iter__(self) -> Iterator[Databases]:
        yield self.default
        yield from list(self._by_login.values())

    @property
    def pools(self) -> Sequence[UpstreamPool]:
        """The pools of all logins."""
        return [pool for databases in self for pool in databases.pools] if self._by_login else self.default.pools

    def of(self, client: int) -> Databases:
        """Return the databases over the connections of a client's login."""
        return self.by_client.get(client, self.default)

    async def open(self, client: int, login: Login) -> Answer:
        """Log a client in; return the upstream's reply, which is an error if it refuses the login.

        GenericError if there are too many logins.
        """
        databases = self._by_login.get(login)
        if databases is None:
            if len(self._by_login) >= LOGINS_MAX:
                self._forget_unused()
            if len(self._by_login) >= LOGINS_MAX:
                raise GenericError(
                    f"clients have logged in as {LOGINS_MAX} users of the upstream already, which is the limit"
                )
            databases = self._by_login[login] = Databases(self.default.of(0).for_login(*login))
            databases.of(0).start()
        try:
            answer = await ask(partial(databases.of(0).send_to_node, 0, 0, 2, login.request))
        except Exception as error:
            self._forget_refused(login)
            if WRONG_PASSWORD in str(error):
                raise WrongPassError from error
            raise
        if is_error(answer.reply):
            self._forget_refused(login)
        else:
            self.by_client[client] = self._by_login[login]
        return answer

    def _forget_refused(self, login: Login) -> None:
        """Forget a login that the upstream refuses, unless clients use it: Redis keeps their connections, too."""
        databases = self._by_login.get(login)
        if databases is not None and databases not in self.by_client.values():
            self._by_login.pop(login).stop()

    def leave(self, client: int) -> None:
        """Forget the login of a client that has left, or sent RESET."""
        self.by_client.pop(client, None)

    def info_fields(self) -> dict[str, object]:
        """Return the fields of INFO."""
        return {**self.default.info_fields(), "upstream_logins": len(self._by_login)}

    def stop(self) -> None:
        """Close all connections."""
        for databases in self:
            databases.stop()

    def _forget_unused(self) -> None:
        used = set(map(id, self.by_client.values()))
        for login, databases in list(self._by_login.items()):
            if id(databases) not in used:
                self._by_login.pop(login).stop()
