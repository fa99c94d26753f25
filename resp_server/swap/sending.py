"""Sends requests to the sides of their keys: unchanged, split over both sides, or with the states' names of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from resp_server.command.policy import Destination, RequestPolicy, Role
from resp_server.command.table import Command
from resp_server.commands.generic import cursor_number
from resp_server.commands.sort import check_request
from resp_server.execution.dispatcher import keys_read
from resp_server.forwarding.answers import Answering, SeenEpochs, ask
from resp_server.forwarding.raw_replies import RawReply, Steps
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import Defer, ReplyAggregator, ReplySink
from resp_server.protocol.errors import PlainError
from resp_server.protocol.request_parser import Request
from resp_server.proxy.batch import ReplyBatch
from resp_server.proxy.dispatcher import ProxyDispatcher
from resp_server.proxy.mapped_keys import MappedKeys
from resp_server.proxy.request_policy import split_by_slot
from resp_server.proxy.requests import ServerRequest
from resp_server.proxy.state_cluster import StateCluster
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState
from resp_server.swap.cached_reads import CachedReads
from resp_server.swap.exec_plan import OK
from resp_server.swap.keyspace import KeyspaceSides, query_both, scan
from resp_server.swap.long_requests import is_long
from resp_server.swap.pinned_requests import PinnedRequests
from resp_server.swap.preferred_reads import ClientSenders, PreferredRead, SplitRead
from resp_server.swap.shadow import Shadow
from resp_server.swap.sides import ClientSides, visible_keys
from resp_server.upstream.logins import Logins
from resp_server.upstream.ownership import Ownership
from resp_server.upstream.result_cache import read_of
from resp_server.upstream.routed_commands import RoutedCommand
from resp_server.upstream.routing import Route
from resp_server.upstream.scan_cursor import position_of
from resp_server.upstream.tracking import caching_before
from resp_server.upstream.upstream import Upstream


class SideSender(ProxyDispatcher):
    """The part of a `SwapDispatcher` that sends requests. _dropped_writes: how many had `Destination.DROPPED`."""

    _logins: Logins
    _ownership: Ownership
    shadow: Shadow
    _pinned: PinnedRequests
    _has_client_logins: bool
    cached: CachedReads
    mapped: MappedKeys
    defer: Defer
    _dropped_writes = 0

    def upstream_of(self, session: Session) -> Upstream:
        """Return the connections to the database that a client has selected."""
        return self._logins.of(session.id).of(session.db)

    def _cluster_of(self, key: bytes) -> StateCluster:
        return self._applications.each[self.target_of(key)[0]]

    def send(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Send a request to the sides of its keys; return whether later requests have to wait for its reply."""
        if route.destination is Destination.STATES:
            if not self._forward_by_policy(self.command(request), RequestPolicy.BY_KEYS, request, session, batch):
                raise PlainError("the request is malformed")
        elif route.destination is Destination.BOTH:
            self._send_both(route, request, session, batch)
            return self.upstream_of(session).node_count > 1  # parts may be sent later
        elif route.destination is Destination.PREFERRED:
            self._send_preferred(route, request, session, batch)
        elif route.destination is Destination.MAPPED:
            self._send_mapped(route, request, session, batch)
        elif route.destination is Destination.DROPPED:
            self._dropped_writes += 1
            batch.add(b"" if session.is_silent else OK)
        else:
            return self._send_upstream(route, request, session, batch)
        return False

    def _send_upstream(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> bool:
        """Answer a request from the cache or by the upstream; return whether later requests have to wait for it."""
        routed, upstream, sink = route.routed, self.upstream_of(session), cast(ReplySink, batch)
        if self._may_be_cached(route, request, session):
            read = read_of(request, session.db, session.protocol)
            reply = self.cached.reply_to(route, read, session)
            if reply is not None:
                batch.add(b"" if session.is_silent else reply)
                return False
            sink = self.cached.filling(route, read, session, sink)
        elif route.shadowed:
            sink = self.shadow.sink(route.shadowed, routed, session.protocol, upstream, sink)
        elif not routed.is_read:
            sink = self.cached.changing(route.changed, session, sink)
        elif not self._pinned.has_own(session.id, upstream.pools):  # others may read cached replies after this one
            sink = self.cached.fenced(route, session, sink)
        sent, index = route.request or request, batch.expect(session.is_silent)
        caching = caching_before(session.tracking_state)
        with self.cached.sending(sink):
            return upstream.send_request(session.id, session.protocol, routed, sent, sink, index, caching=caching)

    def _may_be_cached(self, route: Route, request: Request, session: Session) -> bool:
        """Tell whether a request may be answered from the cache. To hash a long request would take too long."""
        return (
            route.cache_s > 0
            and not is_long(request)
            and not self._has_client_logins
            and not self._pinned.has_own(session.id, self.upstream_of(session).pools)
        )

    def _senders(self, session: Session, routed: RoutedCommand) -> ClientSenders:
        """Return the functions that send a client's requests of one command to each side."""
        protocol, upstream = session.protocol, self.upstream_of(session)

        def to_upstream(request: Request, sink: ReplySink, index: int) -> None:
            upstream.send_request(session.id, protocol, routed, request, sink, index)

        return ClientSenders(to_upstream, partial(self._send_to_owner, protocol), self._server.clients.defer)

    def _send_to_owner(self, protocol: int, key: bytes, request: Request, sink: ReplySink, index: int) -> None:
        """Send a read of a state's key to the server that has it."""
        number, slot = self.target_of(key)
        cluster = self._applications.each[number]
        cluster.send(ServerRequest(pack(request), slot, protocol, cluster.deadline_s(), sink, index))

    def _send_both(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Split a read over both sides, and merge the replies in the order of the keys."""
        command = route.routed.command
        assert command is not None  # `routing.SPLIT` has commands of Redis only
        split = SplitRead(route, request, self._senders(session, route.routed))
        index, sink = batch.expect(session.is_silent), self.cached.fenced(route, session, batch)
        send_to_states = partial(self._send_states, command, session)
        send = partial(split.send, send_to_states, sink, index)
        batch.set_retry(index, send)
        send()

    def _send_states(
        self, command: Command, session: Session, request: Request, both: ReplyAggregator, part: int
    ) -> None:
        found = split_by_slot(command.facts, request, self.target_of)
        assert found is not None  # it has keys
        parts, merge = found
        self._send_parts(command, parts, merge, session, both, part)

    def _send_preferred(self, route: Route, request: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a read of one key to the states and to the upstream."""
        if route.routed.policy.role is Role.SORT_RO:
            check_request(session.user, request)
        senders, (read,) = self._senders(session, route.routed), route.preferred.values()
        index = batch.expect(session.is_silent)

        def send() -> None:
            PreferredRead(senders, request, read, route.unserved, batch, index).send()

        batch.set_retry(index, send)
        send()

    def _send_mapped(self, route: Route, named: Request, session: Session, batch: ReplyBatch) -> None:
        """Send a request with the states' names of its keys to the states. named: the client's request."""
        request, convert, state = route.request, route.convert, session.tracking_state
        assert request is not None
        command = self.command(request)
        if state is not None and state.is_on and not is_long(named):
            self._send_tracked(route, request, named, state, session, batch)
            return
        if convert is None:
            if not self._forward_by_policy(command, RequestPolicy.BY_KEYS, request, session, batch):
                raise PlainError("the request is malformed")
            return
        to_states = self._senders(session, route.routed).to_states
        index = batch.expect(session.is_silent)

        def send() -> None:
            reads = [request] if route.of_key is None else [request, route.of_key]
            stage = ReplyAggregator(len(reads), convert, batch, index, self.defer)
            for part, each in enumerate(reads):
                stage.attempt(to_states, each[1], each, stage, part)

        batch.set_retry(index, send)
        send()

    def _send_tracked(
        self,
        route: Route,
        request: Request,
        named: Request,
        state: TrackingState,
        session: Session,
        batch: ReplyBatch,
    ) -> None:
        """Send such a request for a client that tracks keys, and track the names in the client's request."""
        command, convert, client_command = self.command(request), route.convert, route.routed.command
        assert client_command is not None  # a mapped name has Redis' own commands only
        found = split_by_slot(command.facts, request, self.target_of)
        if found is None:
            raise PlainError("the request is malformed")
        parts, merge = found
        if route.of_key is not None:
            parts = [*parts, parts[0]._replace(request=route.of_key)]
        names: dict[bytes, list[bytes]] = {}
        for key, name in zip(keys_read(command, request), keys_read(client_command, named), strict=True):
            names.setdefault(key, []).append(name)
            if not self.mapped.record_read(key, name):
                self._tracking.changed(None)
        tracked = state if state.records_reads else None
        index = batch.expect(session.is_silent)

        def merged(replies: Sequence[RawReply]) -> RawReply | Steps[RawReply]:
            return merge(replies) if convert is None else convert(replies)

        def cached_keys(command: Command, part: Request) -> Sequence[bytes]:
            return [name for key in keys_read(command, part) for name in names.get(key, ())]

        send = partial(self._send_parts, command, parts, merged, session, batch, index, tracked, cached_keys)
        batch.set_retry(index, send)
        send()

    def _query_keyspace(self, role: Role | None, request: Request, session: Session, batch: ReplyBatch) -> None:
        batch.answer(self.keyspace_query(role, request, session, session.db, batch.seen), session.is_silent)

    def keyspace_query(
        self,
        role: Role | None,
        request: Request,
        session: Session,
        database: int,
        seen: SeenEpochs,
        through: Callable[[KeyspaceSides], KeyspaceSides] = lambda sides: sides,
    ) -> Callable[[], Answering]:
        """Return what answers a request about all keys of a database from both sides; ReplyError for a wrong cursor.

        through: changes how it is sent.
        """
        keys = visible_keys(self._ownership, session.user, database)
        sides = through(
            ClientSides(
                self.upstream_of(session),
                self._applications,
                session,
                seen,
                self._server.clients.defer,
                lambda key, read: ask(partial(self._send_to_owner, session.protocol, key, read), seen),
                database=database,
                has_states=database in self._ownership.matcher.databases,
                is_named=keys.is_named,
            )
        )
        if role is Role.SCAN:
            return partial(scan, sides, keys, request, position_of(cursor_number(request[1]), sides.node_count))
        return partial(query_both, sides, keys, role, request)
