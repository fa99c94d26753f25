"""Requests of a proxy's clients that need a connection to the upstream of the client's own: blocking commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from resp_server.backends.redis.dedicated_connection import DISCARD, DedicatedConnection
from resp_server.backends.redis.logins import Logins
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.tracking import caching_before
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.pipeline.batch import ReplyBatch
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, CallbackWait, ReplyFuture, ask, run_into
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session

UNBLOCK_REASONS = (b"TIMEOUT", b"ERROR")
NOT_BLOCKED = b":0\r\n"


class DedicatedRequests:
    """Sends requests over clients' dedicated connections. Runs on the event loop's thread."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins

    async def block(self, routed: OverlayCommand, request: Request, session: Session) -> Answer:
        """Answer a blocking command, the only one of its batch; GenericError if too many clients have connections."""
        future, caching = ReplyFuture(), caching_before(session.tracking_state)
        upstream = self._logins.of(session.id).of(session.db)
        upstream.block(session.id, session.protocol, routed, request, future, 0, caching=caching)
        return await future

    def has_connection(self, client: int, pools: Iterable[UpstreamPool]) -> bool:
        """Return whether a client has a connection of its own, among those of some pools."""
        return bool([pool for pool in pools if client in pool.dedicated.by_client])

    def unwatch(self, session: Session) -> None:
        """Forget the keys that a client watches at the upstream."""
        for pool in self._logins.pools:
            dedicated = pool.dedicated.get(session.id)
            if dedicated is not None:
                dedicated.unwatch()

    def has_watched(self, session: Session) -> bool:
        """Return whether a client watches keys at the upstream."""
        dedicated = (pool.dedicated.get(session.id) for pool in self._logins.pools)
        return any(each is not None and each.has_watched for each in dedicated)

    def holds_state(self, session: Session) -> bool:
        """Return whether a client watches keys at the upstream, or is subscribed there."""
        dedicated = (pool.dedicated.get(session.id) for pool in self._logins.pools)
        return any(each is not None and each.holds_state for each in dedicated)

    def listens(self, session: Session) -> bool:
        """Return whether a client is subscribed at the upstream, monitors it, or tracks keys there."""
        dedicated = (pool.dedicated.get(session.id) for pool in self._logins.pools)
        return any(
            each is not None and (each.is_listening or each.is_monitor or each.is_tracking) for each in dedicated
        )

    def leave(self, session: Session) -> None:
        """Close the connection of a client that has left, or sent RESET."""
        for pool in self._logins.pools:
            pool.dedicated.release(session.id)

    def blocked(self, request: Request) -> Sequence[tuple[UpstreamPool, DedicatedConnection]]:
        """Return the connections of the client that a CLIENT UNBLOCK is about, if it is blocked at the upstream."""
        pools = [pool for pool in self._logins.pools if len(pool.dedicated)]
        if not pools or len(request) not in (3, 4) or not request[2].isdigit():
            return ()
        if len(request) == 4 and request[3].upper() not in UNBLOCK_REASONS:
            return ()
        blocked = [(pool, pool.dedicated.get(int(request[2]))) for pool in pools]
        return [(pool, connection) for pool, connection in blocked if connection is not None and connection.is_blocked]

    def unblock(self, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Send CLIENT UNBLOCK about a client that is blocked at the upstream; False if it is about no such client."""
        found = self.blocked(request)
        if not found:
            return False
        index = batch.expect(session.replies_suppressed)
        for number, (pool, connection) in enumerate(found):  # WAIT is sent to all nodes of a Redis Cluster
            run_into(_unblocked(request, session, pool, connection), DISCARD if number else batch, index)
        return True


async def _unblocked(request: Request, session: Session, pool: UpstreamPool, connection: DedicatedConnection) -> Answer:
    """Return the upstream's reply to CLIENT UNBLOCK, which is sent once the id of the blocked connection is known."""
    await CallbackWait(lambda then: connection.with_upstream_id(lambda upstream_id: then()))
    if connection.upstream_id is None:
        return Answer(NOT_BLOCKED)
    packed = pack((*request[:2], b"%d" % connection.upstream_id, *request[3:]))
    return await ask(partial(pool.send, session.id, session.protocol, packed, is_read=False))
