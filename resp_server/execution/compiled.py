"""The compiled core as a server uses it: what it may answer for whom, and where it is told what took long.

A buffer's requests go to the core first (`native.core.Reads`), which answers what it can from the front, and cuts what
it leaves into words. These go through the general path (see `dispatcher`). Without the core everything goes that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from resp_server import native
from resp_server.acl.rules import KeyAccess, User
from resp_server.command_table.table import CommandTable
from resp_server.execution.context import ServerContext
from resp_server.metrics.slow_log import together_as_one
from resp_server.protocol.request_parser import Request, RequestParser
from resp_server.session.session import Session


class Reads(Protocol):
    """What answers first of what a connection brings.

    is_full: more of the last buffer could be answered, but not at once, because the replies are long. is_incomplete:
    what is left of it is the beginning of a request.
    """

    @property
    def is_full(self) -> bool: ...
    @property
    def is_incomplete(self) -> bool: ...

    def answer(self, session: Session, data: bytes) -> tuple[bytes, list[Request], bytes]:
        """Return the replies to the requests at a buffer's front, requests behind them, and what of it is left.

        Where there are neither replies nor requests, the parser has to look at what is left, unless it is incomplete.
        """


def reads_of(server: ServerContext) -> Reads | None:
    """Return the compiled core for an instance; None where it is not there."""
    if native.core is None:
        return None

    def note(session: Session, data: bytes, elapsed_ns: int) -> None:
        """Keep what took long: a request, or the first of some that were answered together, and how many these are."""
        requests = RequestParser().feed(data)
        server.slow_requests.record(session, server.table.find(requests[0]), together_as_one(requests), elapsed_ns)

    reads: Reads = native.core.Reads(server, lambda user: rules_of(user, server.table), note)
    return reads


def rules_of(user: User, table: CommandTable) -> Any:
    """Return what a user may read, as the core asks for it."""
    assert native.core is not None
    selectors: list[tuple[list[bytes], Sequence[bytes] | None]] = []
    for selector in user.selectors:
        commands = [(name, table.get(name)) for name, _, _ in native.core.NAMES]
        names = [name for name, command in commands if command is not None and selector.allows(command)]
        patterns = list(selector.patterns(KeyAccess.READ))
        selectors.append((names, None if b"*" in patterns else patterns))
    return native.core.Rules(selectors)
