"""The upstream's part of an EXEC: MULTI, the commands for the upstream, EXEC.

It goes out in one write, so it needs no connection of the client's own, unless the client watches keys there.

A queued SELECT is part of it if commands for the upstream follow. The connection may be a shared one, so a last SELECT
returns it to its database. The same holds for a queued CLIENT CACHING, which ends there.
"""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.backends.redis.cluster_requests import first_slot
from resp_server.backends.redis.connection import UpstreamRequest
from resp_server.backends.redis.databases import Databases
from resp_server.backends.redis.dedicated_connection import DedicatedConnection
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.tracking import caching_before
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.servers.transaction_plan import PACKED_EXEC, PACKED_MULTI
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.protocol.errors import CrossSlotError, ExecAbortError, ReplyError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReplyFuture
from resp_server.raw_replies.packing import Packed, size_of, texts_of
from resp_server.raw_replies.raw_reply import JOINED_BYTES_MAX
from resp_server.raw_replies.reply_sinks import UnansweredError
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session


class UpstreamTransaction:
    """The commands of one EXEC for the upstream. It is made when EXEC arrives, over the connection that watches keys.

    Args:
        databases: Of the client's login.

    Attributes:
        refusals: The databases that the upstream does not have, with its errors.
        changed: The keys that the commands may change, if any keys are cached; None: all keys.
    """

    def __init__(self, databases: Databases, session: Session) -> None:
        self._upstream, self._session, self._protocol = databases.of(session.db), session, session.protocol
        self._number_of = databases.upstream_number_of
        self._caching = caching_before(session.tracking_state)  # of the whole transaction
        self._queued_caching = b""  # a queued CLIENT CACHING, before the next command
        # The pool of the upstream's node that has the keys, and the client's connection that watches keys there.
        self._pool, self._dedicated = _watching(self._upstream, session)
        self._any_pool: UpstreamPool | None = None  # if no command has keys
        self._packed: list[Packed] = []
        self._database = session.db  # of the connection, after the commands so far
        self.refusals: dict[int, ReplyError] = {}
        self.changed: list[bytes] | None = []

    @property
    def is_needed(self) -> bool:
        """Whether there are commands for the upstream, or watched keys there."""
        return bool(self._packed) or self._dedicated is not None

    @property
    def is_dirty(self) -> bool:
        """Whether a watched key has another owner now, so that EXEC must run nothing."""
        return self._dedicated is not None and self._dedicated.is_dirty

    def add_changed(self, keys: Sequence[bytes] | None) -> None:
        """Add keys that a command may change; None: all keys."""
        if keys is None:
            self.changed = None
        elif keys and self.changed is not None:
            self.changed += keys

    def cache_by(self, request: Request) -> None:
        """Have the next command follow a queued CLIENT CACHING."""
        self._queued_caching = pack(request)

    def begin_command(self, database: int) -> int:
        """Select the database of the next command, and repeat CLIENT CACHING; return the command's position."""
        if self._queued_caching:
            self._packed.append(self._queued_caching)
            self._queued_caching = b""
        if self._database != database:
            self._select(database)
        return len(self._packed)

    def _select(self, database: int) -> None:
        refusal = self.refusals.get(database)
        if refusal is not None:
            raise ExecAbortError(refusal)
        self._database = database
        self._packed.append(pack((b"SELECT", b"%d" % self._number_of(database))))

    def add(self, routed: OverlayCommand, request: Request, packed: Packed) -> None:
        """Add a command; CrossSlotError if its keys are at another node than those of earlier commands."""
        self._any_pool = pool = self._upstream.pool_of(routed, request)
        if pool is not self._pool and first_slot(routed, request) is not None:
            if self._pool is not None:
                raise CrossSlotError
            self._pool = pool
        self._packed.append(packed)

    def end_commands(self) -> None:
        """Have the connection return to its database."""
        if self._database != self._session.db:
            self._select(self._session.db)

    async def answer(self) -> Answer:
        """Send the transaction; return the reply to EXEC. UnansweredError: the commands may have run or not."""
        dedicated, client = self._dedicated, self._session.id
        if dedicated is not None and (self._pool is None or self._pool.dedicated.get(client) is not dedicated):
            raise UnansweredError("the connection to the upstream, which watches its keys, was lost")
        pool = self._pool or self._any_pool
        assert pool is not None
        texts = [PACKED_MULTI, *(text for each in self._packed for text in texts_of(each)), PACKED_EXEC]
        packed: Packed = texts if size_of(texts) > JOINED_BYTES_MAX else b"".join(texts)
        future, replies_before = ReplyFuture(), len(self._packed) + 1
        request = UpstreamRequest(packed, future, 0, is_read=False, prefix=self._caching, replies_before=replies_before)
        pool.add(client, self._protocol, request)
        if dedicated is not None and not future.has_failed:
            dedicated.forget_watched()
        return Answer(self._upstream.checked((await future).reply))

    def unwatch(self) -> None:
        """Unwatch the client's keys at the upstream, unless EXEC has ended their watch."""
        if self._dedicated is not None:
            self._dedicated.unwatch()


def _watching(upstream: Upstream, session: Session) -> tuple[UpstreamPool | None, DedicatedConnection | None]:
    """Return the client's connection that watches keys at the upstream, with its pool."""
    for pool in upstream.pools:
        dedicated = pool.dedicated.get(session.id)
        if dedicated is not None and dedicated.has_watched:
            return pool, dedicated
    return None, None
