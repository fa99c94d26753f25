"""Sends requests by their routes: to one backend, split over both, or with the states' names of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

from resp_server.backends.overlay.cached_reads import CachedReads
from resp_server.backends.overlay.client_backends import ClientBackends, visible_keys
from resp_server.backends.overlay.dedicated_requests import DedicatedRequests
from resp_server.backends.overlay.keyspace import KeyspaceBackends, query_both, scan
from resp_server.backends.overlay.preferred_reads import ClientSenders, preferred_read, split_read
from resp_server.backends.overlay.shadow import Shadow
from resp_server.backends.redis.databases import Databases
from resp_server.backends.redis.logins import Logins
from resp_server.backends.redis.tracking import caching_before
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.result_cache import read_of
from resp_server.backends.routing.route import (
    AliasedRoute,
    AllKeysRoute,
    CacheableRead,
    CachedKeysWrite,
    DroppedRoute,
    LocalRoute,
    PreferredRoute,
    ReplyUse,
    Route,
    SelectRoute,
    ShadowedRead,
    SplitRoute,
    StatesRoute,
    UncachedRead,
    UpstreamRoute,
)
from resp_server.backends.routing.router import Router
from resp_server.backends.routing.scan_cursor import position_of
from resp_server.backends.routing.upstream_settings import AskedEvents, events_in
from resp_server.backends.servers.aliased_keys import AliasedKeys
from resp_server.backends.servers.request_split import split_by_slot
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.policy import SpecialCommand
from resp_server.commands.generic import cursor_number
from resp_server.commands.sort import check_request
from resp_server.pipeline.batch import ReplyBatch
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.effects import keys_read
from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.answers import Answer, Answering, ReadSeenEpochs, Replies, ReplyFuture, ask, run_into
from resp_server.raw_replies.raw_reply import RawReply
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState

OK = b"+OK\r\n"


async def _confirmed(asked: AskedEvents, current: Answering) -> Answer:
    """Answer OK if the upstream's setting includes what a client asks for; GenericError otherwise."""
    asked.check(events_in((await current).reply))
    return Answer(OK)


async def _compared(answering: Answering, compare: Callable[[RawReply], None]) -> Answer:
    answer = await answering
    compare(answer.reply)
    return answer


class RouteSender:
    """Sends requests to the backends of their keys, and joins the replies.

    Args:
        aliases: The states' names of keys that clients know by other names.
        cached: Answers reads of the upstream's keys that may be cached.
        is_strict: A transaction over both backends is refused.
        has_client_logins: Clients log in at the upstream, so that no client gets a cached reply.
    """

    def __init__(
        self,
        server: ServerContext,
        servers: ServersBackend,
        logins: Logins,
        router: Router,
        aliases: AliasedKeys,
        cached: CachedReads,
        shadow: Shadow,
        dedicated: DedicatedRequests,
        *,
        is_strict: bool,
        has_client_logins: bool,
    ) -> None:
        self._table, self._tracking = server.table, server.tracking
        self._clusters, self._state_sender, self._logins = servers.clusters, servers.sender, logins
        self._aliases, self._dedicated, self._has_client_logins = aliases, dedicated, has_client_logins
        self.defer, self.error_reply = server.clients.defer, servers.local.error_reply
        self.router, self.cached, self.shadow, self.is_strict = router, cached, shadow, is_strict
        self.new_batch = servers.new_batch
        self.dropped_writes = 0  # requests that had a `DroppedRoute`

    @property
    def owners(self) -> Ownership:
        """The owners of keys."""
        return self.router.ownership

    def has_states(self, database: int) -> bool:
        """Return whether states may have keys in a database."""
        return database in self.owners.matcher.databases

    def databases_of(self, session: Session) -> Databases:
        """Return the databases of the upstream as a client's user has them."""
        return self._logins.of(session.id)

    def upstream_of(self, session: Session) -> Upstream:
        """Return the connections to the database that a client has selected."""
        return self._logins.of(session.id).of(session.db)

    def send(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a request to the backends of its keys. batch.is_last: later requests have to wait for its reply."""
        match route:
            case StatesRoute():
                if not self._state_sender.send(self._table.find(request), request, session, batch):
                    raise GenericError("the request is malformed")
            case UpstreamRoute():
                self._send_upstream(route, request, session, batch)
            case SelectRoute():  # it is malformed; the upstream has the error
                self._send_upstream(UpstreamRoute(route.routed), request, session, batch)
            case SplitRoute():
                self._send_both(route, request, session, batch)
                batch.is_last |= self.upstream_of(session).node_count > 1  # parts may be sent later
            case PreferredRoute():
                self._send_preferred(route, request, session, batch)
            case AliasedRoute():
                self._send_aliased(route, request, session, batch)
            case DroppedRoute():
                self.dropped_writes += 1
                batch.add(b"" if session.replies_suppressed else OK)
            case LocalRoute() | AllKeysRoute():
                raise AssertionError(f"a {type(route).__name__} is not sent by its keys")
            case never:
                assert_never(never)

    def _send_upstream(self, route: UpstreamRoute, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Answer a request from the cache or by the upstream."""
        routed, upstream, sent = route.routed, self.upstream_of(session), route.request or request
        answer = partial(self._upstream_answer, routed, upstream, sent, session, batch)
        cached, is_suppressed = self.cached, session.replies_suppressed
        match self._use_for(route.use, request, session):
            case None:
                index, caching = batch.expect(is_suppressed), caching_before(session.tracking_state)
                batch.is_last |= upstream.send_request(
                    session.id, session.protocol, routed, sent, batch, index, caching=caching
                )
            case AskedEvents() as asked:
                batch.answer(lambda: _confirmed(asked, answer()), is_suppressed)
            case CacheableRead() as use:
                read = read_of(request, session.db, session.protocol)
                reply = cached.reply_to(use, read, session)
                if reply is not None:
                    batch.add(b"" if is_suppressed else reply)
                else:
                    batch.answer(lambda: cached.filled(use, read, session, answer()), is_suppressed)
            case UncachedRead(exact):
                batch.answer(lambda: cached.once_cache_is_current(exact, session, answer()), is_suppressed)
            case CachedKeysWrite(keys):
                batch.answer(lambda: cached.changed(keys, session, answer()), is_suppressed)
            case ShadowedRead(shadowed, exact):
                compare = partial(self.shadow.compare_later, shadowed, routed, session.protocol, upstream)
                batch.answer(
                    lambda: _compared(cached.once_cache_is_current(exact, session, answer()), compare), is_suppressed
                )
            case never:
                assert_never(never)

    def _use_for(self, use: ReplyUse, request: Request, session: Session) -> ReplyUse:
        """Return what the reply to a client's request is used for.

        The cache does not know about the requests of a client with a dedicated connection.
        """
        if type(use) is not CacheableRead and type(use) is not UncachedRead:
            return use
        if self._dedicated.has_connection(session.id, self.upstream_of(session).pools):
            return None
        if type(use) is CacheableRead and (type(request) is LongRequest or self._has_client_logins):
            return UncachedRead(use.exact) if use.exact else None  # to hash a long request would take too long
        return use

    async def _upstream_answer(
        self, routed: OverlayCommand, upstream: Upstream, request: Request, session: Session, batch: ReplyBatch
    ) -> Answer:
        future, caching = ReplyFuture(), caching_before(session.tracking_state)
        batch.is_last |= upstream.send_request(
            session.id, session.protocol, routed, request, future, 0, caching=caching
        )
        return await future

    def _senders(self, session: Session, routed: OverlayCommand, seen: ReadSeenEpochs) -> ClientSenders:
        """Return the functions that send a client's requests of one command to each backend."""
        to_upstream = partial(self.upstream_of(session).send_request, session.id, session.protocol, routed)
        return ClientSenders(to_upstream, partial(self._send_to_owner, session), seen, self.defer)

    def _send_to_owner(self, session: Session, key: bytes, request: Request, sink: ReplySink, index: int) -> None:
        """Send a read of a state's key to the server that has it."""
        number, slot = self._state_sender.target_of(key)
        cluster = self._clusters[number]
        sent = ServerRequest(pack(request), slot, session.protocol, cluster.deadline_s(), sink, index)
        sent.is_committed = session.reads_committed
        cluster.send(sent)

    def _send_both(self, route: SplitRoute, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Split a read over both backends, and merge the replies in the order of the keys."""
        command = route.routed.command
        assert command is not None  # only commands of Redis are split
        senders = self._senders(session, route.routed, batch.seen)

        def to_owners(part: Request, sink: ReplySink, index: int) -> None:
            found = split_by_slot(command, part, self._state_sender.target_of)
            assert found is not None  # it has keys
            run_into(self._state_sender.parts_answer(*found, session, batch.seen), sink, index)

        def start_answer() -> Answering:
            read = split_read(senders, route, request, to_owners)
            return self.cached.once_cache_is_current(None, session, read) if route.can_overtake_cache else read

        batch.answer(start_answer, session.replies_suppressed)

    def _send_preferred(self, route: PreferredRoute, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a read of one key to the states and to the upstream."""
        if route.routed.policy.special is SpecialCommand.SORT_RO:
            check_request(session.user, request)
        senders = self._senders(session, route.routed, batch.seen)
        batch.answer(partial(preferred_read, senders, request, route.read, route.unserved), session.replies_suppressed)

    def _send_aliased(self, route: AliasedRoute, named: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a request with the states' names of its keys to the states.

        Args:
            named: The client's request.
        """
        request, convert, state = route.request, route.convert, session.tracking_state
        command = self._table.find(request)
        if state is not None and state.is_on and type(named) is not LongRequest:
            self._send_tracked(route, named, state, session, batch)
            return
        if convert is None:
            if not self._state_sender.send(command, request, session, batch):
                raise GenericError("the request is malformed")
            return
        reads = [request] if route.of_key is None else [request, route.of_key]

        def start_answer() -> Answering:
            replies = Replies(batch.seen)
            for read in reads:
                replies.ask(partial(self._send_to_owner, session, read[1], read))
            return replies.merge(convert, self.defer)

        batch.answer(start_answer, session.replies_suppressed)

    def _send_tracked(
        self, route: AliasedRoute, named: Request, state: TrackingState, session: Session, batch: ReplyBatch
    ) -> None:
        """Send a request with aliases for a client that tracks keys; track the aliases, not the states' keys."""
        request, convert, client_command = route.request, route.convert, route.routed.command
        command = self._table.find(request)
        assert client_command is not None  # an alias has Redis' own commands only
        found = split_by_slot(command, request, self._state_sender.target_of)
        if found is None:
            raise GenericError("the request is malformed")
        parts, merge = found
        if route.of_key is not None:
            parts = [*parts, parts[0]._replace(request=route.of_key)]
        names: dict[bytes, dict[bytes, None]] = {}
        for key, name in zip(keys_read(command, request), keys_read(client_command, named), strict=True):
            names.setdefault(key, {})[name] = None
            if not self._aliases.record_read(key, name):
                self._tracking.changed(None)
        tracked = state if state.records_reads else None

        def cached_keys(part: Request) -> Sequence[bytes]:
            return [name for key in dict.fromkeys(keys_read(command, part)) for name in names.get(key, ())]

        def start_answer() -> Answering:
            return self._state_sender.parts_answer(parts, convert or merge, session, batch.seen, tracked, cached_keys)

        batch.answer(start_answer, session.replies_suppressed)

    def query_keyspace(
        self, special: SpecialCommand | None, request: Request, session: Session, batch: ReplyBatch
    ) -> None:
        """Add the pending reply to a request about all keys."""
        batch.answer(self.keyspace_query(special, request, session, session.db, batch.seen), session.replies_suppressed)

    def keyspace_query(
        self,
        special: SpecialCommand | None,
        request: Request,
        session: Session,
        database: int,
        seen: ReadSeenEpochs,
        through: Callable[[KeyspaceBackends], KeyspaceBackends] = lambda backends: backends,
    ) -> Callable[[], Answering]:
        """Return what answers a request about all keys of a database from both; ReplyError for a wrong cursor."""
        keys = visible_keys(self.owners, session.user, database)
        backends = through(
            ClientBackends(
                self.upstream_of(session),
                self._clusters,
                session,
                seen,
                self.defer,
                lambda key, read: ask(partial(self._send_to_owner, session, key, read), seen),
                database=database,
                has_states=database in self.owners.matcher.databases,
                is_named=keys.is_named,
            )
        )
        if special is SpecialCommand.SCAN:
            return partial(scan, backends, keys, request, position_of(cursor_number(request[1]), backends.node_count))
        return partial(query_both, backends, keys, special, request)
