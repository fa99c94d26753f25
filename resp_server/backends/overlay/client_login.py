"""AUTH and HELLO of clients whose logins are the upstream's own."""

from __future__ import annotations

from typing import NamedTuple

from resp_server.backends.redis.logins import Login
from resp_server.command.policies import special_of
from resp_server.command.policy import SpecialCommand
from resp_server.protocol.request_parser import Request


class LoginRequest(NamedTuple):
    """The login of an AUTH or a HELLO.

    Args:
        rest: The HELLO without its login, which is answered afterwards; None: AUTH.
    """

    login: Login
    rest: Request | None = None


def login_in(request: Request) -> LoginRequest | None:
    """Return the login in a request; None if it has none or has a syntax error, which the proxy replies to."""
    special, words = special_of(request[0]), len(request)
    if special is SpecialCommand.AUTH and words in (2, 3):
        return LoginRequest(Login(request[1] if words == 3 else b"", request[-1]))
    if special is not SpecialCommand.HELLO:
        return None
    at = 2
    while at < words:
        option = request[at].upper()
        if option == b"AUTH" and at + 2 < words:
            rest = (*request[:at], *request[at + 3 :])
            return LoginRequest(Login(request[at + 1], request[at + 2]), rest)
        at += 2
    return None
