"""The connection of a server to the compiled core: users' rights to read, and the recording of slow requests.

A buffer goes to the core first (`native.fast_path.FastPath`). The core answers as many of the first requests as it can,
and splits the others into arguments. Those take the general path (see `pipeline`), as do all requests if the core is
not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from resp_server import native
from resp_server.acl.selector import KeyAccess
from resp_server.acl.user import User
from resp_server.acl.visibility import Visibility
from resp_server.command.table import CommandTable
from resp_server.metrics.slow_log import batch_entry
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.keyless_commands import CommandCaller
from resp_server.pipeline.watch import watch_point_of
from resp_server.protocol.request_parser import RequestParser
from resp_server.session.session import Session
from state_backend.store.keyspace import KeyspaceView

if TYPE_CHECKING:
    from resp_server.native.fast_path import FastPath


def fast_path_of(server: ServerContext) -> FastPath | None:
    """Return the compiled core for a server; None if it is not built."""
    if native.fast_path is None:
        return None

    def record_slow(session: Session, data: bytes, elapsed_ns: int) -> None:
        """Record a slow request; of requests that were answered together, the first one and their number."""
        requests = RequestParser().feed(data)
        command, slow_requests = server.table.find(requests[0]), server.observation.slow_requests
        slow_requests.record(session, command, batch_entry(requests), elapsed_ns)

    def count_keys(user: User, view: KeyspaceView) -> int | None:
        return Visibility(user, view).key_count()

    def watch_point(job: str) -> tuple[str, int]:
        return watch_point_of(server.process.run_id, server.view, job)

    fast_path: FastPath = native.fast_path.FastPath(
        server, lambda user: permissions_of(user, server.table), record_slow, count_keys, watch_point
    )
    fast_path.command_caller = CommandCaller(server)
    return fast_path


def permissions_of(user: User, table: CommandTable) -> Any:
    """Return a user's rights to read, in the form of the core."""
    assert native.rows is not None and native.permissions is not None
    selectors: list[tuple[list[bytes], Sequence[bytes] | None]] = []
    for selector in user.selectors:
        commands = [(name, table.get(name)) for name in native.rows.NAMES]
        names = [name for name, command in commands if command is not None and selector.allows(command)]
        patterns = list(selector.patterns(KeyAccess.READ))
        selectors.append((names, None if b"*" in patterns else patterns))
    return native.permissions.Permissions(selectors)
