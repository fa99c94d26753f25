"""Requests of a proxy's clients that need a connection to the upstream of the client's own: blocking commands."""

from __future__ import annotations

from resp_server.forwarding.reply_splitter import pack
from resp_server.protocol.request_parser import Request
from resp_server.proxy.batch import ReplyBatch
from resp_server.session.session import Session
from resp_server.upstream.connection import UpstreamRequest
from resp_server.upstream.databases import Databases

# About the writes of a connection. All other commands that block are about keys.
WAITS = ("wait", "waitaof")
UNBLOCK_REASONS = (b"TIMEOUT", b"ERROR")


class PinnedRequests:
    """Sends such requests. Runs on the event loop's thread."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases

    def block(self, name: str, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a blocking command, the only request of its batch; PlainError if too many clients have connections."""
        pinned = self._databases.of(session.db).pinned.pin(session.id, session.protocol)
        batch.block()
        sent = UpstreamRequest(pack(request), batch, batch.expect(session.is_silent), is_read=False, is_blocking=True)
        if name in WAITS:
            pinned.send_wait(sent, session.protocol)
        else:
            pinned.send_request(sent, session.protocol)

    def has_own(self, session: Session) -> bool:
        """Tell whether a client has a connection of its own."""
        return any(pool.pinned.get(session.id) is not None for pool in self._databases)

    def unwatch(self, session: Session) -> None:
        """Forget the keys that a client watches at the upstream."""
        for pool in self._databases:
            pinned = pool.pinned.get(session.id)
            if pinned is not None:
                pinned.unwatch()

    def has_watched(self, session: Session) -> bool:
        """Tell whether a client watches keys at the upstream."""
        pinned = (pool.pinned.get(session.id) for pool in self._databases)
        return any(each is not None and bool(each.watched) for each in pinned)

    def leave(self, session: Session) -> None:
        """Close the connection of a client that has left, or sent RESET."""
        for pool in self._databases:
            pool.pinned.release(session.id)

    def unblock(self, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Send CLIENT UNBLOCK about a client that is blocked at the upstream; False if it is about no such client."""
        if len(request) not in (3, 4) or not request[2].isdigit():
            return False
        if len(request) == 4 and request[3].upper() not in UNBLOCK_REASONS:
            return False
        pinned = [pool.pinned.get(int(request[2])) for pool in self._databases]
        blocked = next((each for each in pinned if each is not None and each.is_blocked), None)
        if blocked is None or blocked.upstream_id is None:
            return False
        packed = pack((*request[:2], b"%d" % blocked.upstream_id, *request[3:]))
        index = batch.expect(session.is_silent)
        self._databases.of(0).send(session.id, session.protocol, packed, batch, index, is_read=False)
        return True
