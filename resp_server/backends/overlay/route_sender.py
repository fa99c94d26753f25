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
from resp_server.backends.routing.route import Destination, Route
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
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState

OK = b"+OK\r\n"


async def _confirmed(asked: AskedEvents, current: Answering) -> Answer:
    """Answer OK if the upstream's setting includes what a client asks for; GenericError otherwise."""
    asked.check(events_in((await current).reply))
    return Answer(OK)


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
        self.dropped_writes = 0  # requests that had `Destination.DROPPED`

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
        match route.destination:
            case Destination.STATES:
                if not self._state_sender.send(self._table.find(request), request, session, batch):
                    raise GenericError("the request is malformed")
            case Destination.UPSTREAM | Destination.SELECT:  # a SELECT here is malformed; the upstream has the error
                self._send_upstream(route, request, session, batch)
            case Destination.BOTH:
                self._send_both(route, request, session, batch)
                batch.is_last |= self.upstream_of(session).node_count > 1  # parts may be sent later
            case Destination.PREFERRED:
                self._send_preferred(route, request, session, batch)
            case Destination.ALIASED:
                self._send_aliased(route, request, session, batch)
            case Destination.DROPPED:
                self.dropped_writes += 1
                batch.add(b"" if session.replies_suppressed else OK)
            case Destination.LOCAL | Destination.ALL_KEYS:
                raise AssertionError(f"{route.destination} is not sent by its keys")
            case never:
                assert_never(never)

    def _send_upstream(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Answer a request from the cache or by the upstream."""
        routed, upstream = route.routed, self.upstream_of(session)
        answering = partial(self._upstream_answer, routed, upstream, route.request or request, session, batch)
        if route.asked_events is not None:
            asked = route.asked_events
            batch.answer(lambda: _confirmed(asked, answering()), session.replies_suppressed)
        elif self._may_be_cached(route, request, session):
            read = read_of(request, session.db, session.protocol)
            reply = self.cached.reply_to(route, read, session)
            if reply is not None:
                batch.add(b"" if session.replies_suppressed else reply)
                return
            batch.answer(lambda: self.cached.filled(route, read, session, answering()), session.replies_suppressed)
        elif route.shadowed:
            batch.answer(
                lambda: self.shadow.compared(route, session.protocol, upstream, answering()), session.replies_suppressed
            )
        elif not routed.is_read and (route.changed is None or route.changed):
            batch.answer(lambda: self.cached.changed(route.changed, session, answering()), session.replies_suppressed)
        elif (
            routed.is_read
            and route.can_overtake_cache
            and not self._dedicated.has_connection(session.id, upstream.pools)
        ):
            # Others may read cached replies after this one.
            batch.answer(
                lambda: self.cached.once_cache_is_current(route, session, answering()), session.replies_suppressed
            )
        else:  # nothing follows the reply
            sent, caching = route.request or request, caching_before(session.tracking_state)
            index = batch.expect(session.replies_suppressed)
            batch.is_last |= upstream.send_request(
                session.id, session.protocol, routed, sent, batch, index, caching=caching
            )

    async def _upstream_answer(
        self, routed: OverlayCommand, upstream: Upstream, request: Request, session: Session, batch: ReplyBatch
    ) -> Answer:
        future, caching = ReplyFuture(), caching_before(session.tracking_state)
        batch.is_last |= upstream.send_request(
            session.id, session.protocol, routed, request, future, 0, caching=caching
        )
        return await future

    def _may_be_cached(self, route: Route, request: Request, session: Session) -> bool:
        """Return whether a request may be answered from the cache. To hash a long request would take too long."""
        return (
            route.cache_s > 0
            and type(request) is not LongRequest
            and not self._has_client_logins
            and not self._dedicated.has_connection(session.id, self.upstream_of(session).pools)
        )

    def _senders(self, session: Session, routed: OverlayCommand, seen: ReadSeenEpochs) -> ClientSenders:
        """Return the functions that send a client's requests of one command to each backend."""
        protocol, upstream = session.protocol, self.upstream_of(session)

        to_upstream = partial(upstream.send_request, session.id, protocol, routed)
        return ClientSenders(
            to_upstream, partial(self._send_to_owner, protocol, session.reads_committed), seen, self.defer
        )

    def _send_to_owner(
        self, protocol: int, is_committed: bool, key: bytes, request: Request, sink: ReplySink, index: int
    ) -> None:
        """Send a read of a state's key to the server that has it."""
        number, slot = self._state_sender.target_of(key)
        cluster = self._clusters[number]
        sent = ServerRequest(pack(request), slot, protocol, cluster.deadline_s(), sink, index)
        sent.is_committed = is_committed
        cluster.send(sent)

    def _send_both(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Split a read over both backends, and merge the replies in the order of the keys."""
        command = route.routed.command
        assert command is not None  # only commands of Redis are split
        senders = self._senders(session, route.routed, batch.seen)

        def to_owners(part: Request, sink: ReplySink, index: int) -> None:
            found = split_by_slot(command, part, self._state_sender.target_of)
            assert found is not None  # it has keys
            run_into(self._state_sender.parts_answer(*found, session, batch.seen), sink, index)

        def answering() -> Answering:
            read = split_read(senders, route, request, to_owners)
            return self.cached.once_cache_is_current(route, session, read) if route.can_overtake_cache else read

        batch.answer(answering, session.replies_suppressed)

    def _send_preferred(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a read of one key to the states and to the upstream."""
        if route.routed.policy.special is SpecialCommand.SORT_RO:
            check_request(session.user, request)
        senders, (read,) = self._senders(session, route.routed, batch.seen), route.preferred.values()
        batch.answer(lambda: preferred_read(senders, request, read, route.unserved), session.replies_suppressed)

    def _send_aliased(self, route: Route, named: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a request with the states' names of its keys to the states.

        Args:
            named: The client's request.
        """
        request, convert, state = route.request, route.convert, session.tracking_state
        assert request is not None
        command = self._table.find(request)
        if state is not None and state.is_on and type(named) is not LongRequest:
            self._send_tracked(route, request, named, state, session, batch)
            return
        if convert is None:
            if not self._state_sender.send(command, request, session, batch):
                raise GenericError("the request is malformed")
            return
        reads = [request] if route.of_key is None else [request, route.of_key]

        def answering() -> Answering:
            replies = Replies(batch.seen)
            for read in reads:
                replies.ask(partial(self._send_to_owner, session.protocol, session.reads_committed, read[1], read))
            return replies.merge(convert, self.defer)

        batch.answer(answering, session.replies_suppressed)

    def _send_tracked(
        self,
        route: Route,
        request: Request,
        named: Request,
        state: TrackingState,
        session: Session,
        batch: ReplyBatch,
    ) -> None:
        """Send a request with aliases for a client that tracks keys; track the aliases, not the states' keys."""
        command, convert, client_command = self._table.find(request), route.convert, route.routed.command
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

        def answering() -> Answering:
            return self._state_sender.parts_answer(parts, convert or merge, session, batch.seen, tracked, cached_keys)

        batch.answer(answering, session.replies_suppressed)

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
                lambda key, read: ask(
                    partial(self._send_to_owner, session.protocol, session.reads_committed, key, read), seen
                ),
                database=database,
                has_states=database in self.owners.matcher.databases,
                is_named=keys.is_named,
            )
        )
        if special is SpecialCommand.SCAN:
            return partial(scan, backends, keys, request, position_of(cursor_number(request[1]), backends.node_count))
        return partial(query_both, backends, keys, special, request)
