"""EXEC at a proxy with an upstream: the states' part is read first, then the upstream's runs as one MULTI ... EXEC.

The states' part is one `ServersExec`, at one epoch of each job. It also checks the watched keys of states; if one has
changed, the upstream's part is not sent. The replies of the two backends are not from one instant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from typing import NamedTuple, assert_never

from resp_server.backends.overlay.exec_listings import QueuedBackends
from resp_server.backends.overlay.exec_reads import (
    STATES,
    UPSTREAM,
    SplitRead,
    alias_split,
    preferred_split,
    split_by_backend,
)
from resp_server.backends.overlay.keyspace import KeyspaceBackends
from resp_server.backends.overlay.route_sender import OK, RouteSender
from resp_server.backends.overlay.shadow import COMPARISONS_MAX, QueuedRead
from resp_server.backends.overlay.upstream_transaction import UpstreamTransaction
from resp_server.backends.redis.databases import OUT_OF_RANGE, Databases
from resp_server.backends.routing.route import (
    AliasedRoute,
    AllKeysRoute,
    DroppedRoute,
    LocalRoute,
    PreferredRoute,
    Route,
    SelectRoute,
    Shadowed,
    ShadowedRead,
    SplitRoute,
    StatesRoute,
    UpstreamRoute,
    changed_keys,
    is_in_chunks,
)
from resp_server.command.overlay_commands import OverlayCommand, Routing
from resp_server.command.policies import special_of
from resp_server.command.policy import SpecialCommand
from resp_server.pipeline.exec_runner import NOTHING_RUN
from resp_server.pipeline.transactions import BackendExec, Watched
from resp_server.protocol.errors import ExecAbortError, GenericError, ReplyError
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.answers import (
    Answer,
    ReadSeenEpochs,
    ReplyFuture,
    StepPauses,
    all_of,
    run_in_steps,
    start,
)
from resp_server.raw_replies.packing import pack_in_steps
from resp_server.raw_replies.raw_reply import RawReply, Steps, is_error, raw_reply_of
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.raw_replies.reply_splitter import items_of, pack
from resp_server.session.epochs import Epochs, latest, union_of
from resp_server.session.session import Session

# Queued commands that are searched for SELECT in one step (guess: 0.1 ms).
SEARCHED_AT_ONCE = 256
EMPTY = b"*0\r\n"


class SinglePlace(NamedTuple):
    """A queued command that one backend answers: `UPSTREAM` or `STATES`.

    Args:
        at: Its position there.
    """

    backend: int
    at: int


class SplitPlace(NamedTuple):
    """A queued read that both backends answer.

    Args:
        upstream_at, states_at: The positions of its first request there.
    """

    read: SplitRead
    upstream_at: int
    states_at: int


class ListingPlace(NamedTuple):
    """A queued command about all keys.

    Args:
        place: Its number among the queued commands.
    """

    place: int
    backends: Sequence[QueuedBackends]
    reply: ReplyFuture


class OverlayPlan:
    """The backend of each queued command of an EXEC.

    Args:
        seen: Returns the epochs that the client has seen when a listing is read.

    Attributes:
        places: For each queued command, where its reply is found, or its reply.
        state_requests: The commands for the states.
        shadowed: The reads to compare.
        database: The selected one, after the commands so far.
        needs_states: Some commands are about states.
    """

    def __init__(
        self, sender: RouteSender, session: Session, upstream: UpstreamTransaction, seen: ReadSeenEpochs
    ) -> None:
        self._sender, self._session, self._upstream, self._seen = sender, session, upstream, seen
        self.places: list[RawReply | SinglePlace | SplitPlace] = []
        self.state_requests: list[Request] = []
        self.listings: list[ListingPlace] = []
        self.shadowed: list[QueuedRead] = []
        self.database = session.db
        self.needs_states = False

    async def make(self, requests: Sequence[Request]) -> None:
        """Add all queued commands; ReplyError if one may not run."""
        pauses = StepPauses(self._sender.defer)
        for request in requests:
            self.places.append(await self._place_of(request))
            await pauses
        self._upstream.end_commands()
        if self._sender.is_strict and self.needs_states and self._upstream.is_needed:
            raise GenericError("--transactions strict refuses keys of states and of the upstream together")

    async def _route_of_long(self, request: LongRequest) -> Route | None:
        router = self._sender.router
        route = await run_in_steps(router.route_in_steps(request, self.database), self._sender.defer)
        if route is not None and is_in_chunks(route):  # it was short enough to be queued
            return router.route(request, self.database)
        return route

    async def _place_of(self, request: Request) -> RawReply | SinglePlace | SplitPlace:
        """Add a command; return where its reply will be found, or its reply."""
        if type(request) is LongRequest:
            route = await self._route_of_long(request)
        else:
            route = self._sender.router.route(request, self.database)
        if route is None:
            return self._add_for_states(request)
        routed = route.routed
        self._upstream.add_changed(changed_keys(route))
        match route:
            case UpstreamRoute():
                at = self._upstream.begin_command(self.database)
                if type(route.use) is ShadowedRead:
                    self._add_shadowed(routed, route.use.shadowed, at)
                await self._add_for_upstream(routed, request if route.request is None else route.request)
                return SinglePlace(UPSTREAM, at)
            case DroppedRoute():
                return OK
            case SelectRoute():
                return self._select(request[1])
            case AllKeysRoute():
                return await self._add_listing(routed, request)
            case SplitRoute():
                return await self._add_split(routed, split_by_backend(route, request))
            case PreferredRoute():
                return await self._add_split(routed, preferred_split(route, request))
            case AliasedRoute():
                return await self._add_split(routed, alias_split(route))
            case StatesRoute() | LocalRoute():
                # A command that is about states by its name, such as STATE MGET, does not count.
                self.needs_states |= type(route) is StatesRoute and routed.routing is Routing.BY_KEYS
                if routed.policy.special is SpecialCommand.CLIENT_CACHING and self._session.tracking_state is not None:
                    self._upstream.cache_by(request)
                return self._add_for_states(request)
            case never:
                assert_never(never)

    async def _add_for_upstream(self, routed: OverlayCommand, request: Request) -> None:
        is_long = type(request) is LongRequest
        packed = await run_in_steps(pack_in_steps(request), self._sender.defer) if is_long else pack(request)
        self._upstream.add(routed, request, packed)

    def _add_for_states(self, request: Request) -> SinglePlace:
        self.state_requests.append(request)
        return SinglePlace(STATES, len(self.state_requests) - 1)

    async def _add_split(self, routed: OverlayCommand, read: SplitRead) -> SplitPlace:
        """Add a read that both backends may answer."""
        self.needs_states = True
        at = self._upstream.begin_command(self.database) if read.upstream else 0
        for each in read.upstream:
            await self._add_for_upstream(routed, each)
        self.state_requests += read.states
        return SplitPlace(read, at, len(self.state_requests) - len(read.states))

    def _add_shadowed(self, routed: OverlayCommand, shadowed: Sequence[Shadowed], at: int) -> None:
        """Remember a read that is to be compared."""
        if len(self.shadowed) >= COMPARISONS_MAX:
            self._sender.shadow.skip(shadowed)
            return
        upstream = self._sender.databases_of(self._session).of(self.database)
        self.shadowed.append(QueuedRead(at, shadowed, routed, upstream))

    def _select(self, word: bytes) -> bytes:
        """Apply a queued SELECT; return its reply."""
        try:
            number = self._sender.databases_of(self._session).number_of(word)
        except GenericError as error:
            return self._sender.error_reply(error)
        refusal = self._upstream.refusals.get(number)
        if refusal is not None and not self._sender.has_states(number):
            is_cluster = self._sender.upstream_of(self._session).url.is_cluster
            if OUT_OF_RANGE not in str(refusal) and not is_cluster:
                raise ExecAbortError(refusal)  # the upstream may have the database
            return self._sender.error_reply(refusal)  # the selected one stays
        self.database = number
        return OK

    async def _add_listing(self, routed: OverlayCommand, request: Request) -> RawReply:
        """Add a command about all keys; return its error reply, such as for an invalid cursor, or nothing yet."""
        sender, database, backends = self._sender, self.database, list[QueuedBackends]()

        def queue(part: Request) -> int:
            at = self._upstream.begin_command(database)
            self._upstream.add(routed, part, pack(part))
            return at

        def through(direct: KeyspaceBackends) -> KeyspaceBackends:
            backends.append(QueuedBackends(direct, queue))
            return backends[-1]

        self.needs_states |= sender.has_states(database)
        try:
            query = sender.keyspace_query(routed.policy.special, request, self._session, database, self._seen, through)
            reply = start(query())
            if reply.has_failed:
                await reply
        except ExecAbortError:
            raise
        except ReplyError as error:
            return sender.error_reply(error)
        self.listings.append(ListingPlace(len(self.places), backends, reply))
        return b""


class OverlayExec(BackendExec):
    """One EXEC over both backends.

    Args:
        begin_states: Begins the states' part, for requests and watched keys.
    """

    def __init__(
        self,
        sender: RouteSender,
        session: Session,
        requests: Sequence[Request],
        watched: Watched,
        seen: ReadSeenEpochs,
        begin_states: Callable[[Sequence[Request], Watched, ReadSeenEpochs], BackendExec],
    ) -> None:
        self._sender, self._session, self._protocol = sender, session, session.protocol
        self._requests, self._watched, self._seen = requests, watched, seen
        self._begin_states = begin_states
        self._upstream = UpstreamTransaction(sender.databases_of(session), session)
        self._states: BackendExec | None = None
        self._states_answer = Answer(EMPTY)

    async def prepare(self) -> None:
        """Check whether the upstream has the databases that queued SELECTs name."""
        databases = self._sender.databases_of(self._session)
        unchecked = _unchecked_databases(self._requests, databases, self._session)
        for number in await run_in_steps(unchecked, self._sender.defer):
            try:
                await databases.open(number)
            except ReplyError as error:
                self._upstream.refusals[number] = error

    async def answer(self) -> Answer:
        """Run the states' part, then the upstream's, and merge the replies."""
        plan = await self._planned()
        if self._upstream.is_dirty:
            return Answer(NOTHING_RUN[self._protocol])
        if plan.state_requests or self._watched:
            self._states = self._begin_states(plan.state_requests, self._watched, self._seen)
            states = self._states_answer = await self._states.answer()
            if _has_run_nothing(states.reply):
                return states
        upstream_reply: RawReply = EMPTY
        if self._upstream.is_needed:
            running = self._sender.cached.changed(self._upstream.changed, self._session, self._upstream.answer())
            upstream_reply = (await running).reply
            if _has_run_nothing(upstream_reply):
                return Answer(upstream_reply, self._states_answer.epochs)
        if self._session.db != plan.database:
            self._session.select(plan.database)  # all commands have run, so the client is in the last one selected
        answer = await self._merged(plan, upstream_reply)
        if plan.shadowed:  # compared after the client's reply
            compare = self._sender.shadow.compare_queued
            self._sender.defer(partial(compare, plan.shadowed, self._protocol, upstream_reply))
        return answer

    async def _planned(self) -> OverlayPlan:
        plan = OverlayPlan(self._sender, self._session, self._upstream, self._listing_seen)
        plan.needs_states = bool(self._watched)
        try:
            await plan.make(self._requests)
        except ExecAbortError:
            raise
        except ReplyError as error:  # keys may have got other owners since they were queued
            raise ExecAbortError(error) from error
        return plan

    def _listing_seen(self) -> Epochs:
        """Return the epochs that the client has seen, with those of this transaction's reads."""
        return reduce(latest, self._states_answer.epochs, self._seen())

    async def _merged(self, plan: OverlayPlan, upstream_reply: RawReply) -> Answer:
        """Merge the replies of both backends."""
        backends = {place.backend if type(place) is SinglePlace else None for place in plan.places}
        if backends <= {UPSTREAM}:
            return Answer(upstream_reply, self._states_answer.epochs)
        if backends == {STATES}:
            return self._states_answer
        defer = self._sender.defer
        try:
            upstream_items = await run_in_steps(items_of(upstream_reply), defer)
            state_items = await run_in_steps(items_of(self._states_answer.reply), defer)
        except MALFORMED_REPLY_ERRORS as error:
            return Answer(malformed_reply(error))
        epochs = self._states_answer.epochs
        for listing in plan.listings:
            for backend in listing.backends:
                backend.start(upstream_items)
        listed = await all_of([each.reply for each in plan.listings])
        for listing, answer in zip(plan.listings, listed, strict=True):
            plan.places[listing.place] = answer.reply
            epochs = union_of(epochs, answer.epochs)
        try:
            reply = await run_in_steps(_joined(plan.places, upstream_items, state_items), defer)
        except MALFORMED_REPLY_ERRORS as error:
            reply = malformed_reply(error)
        return Answer(reply, epochs)

    def has_read_newest(self) -> bool:
        return self._states is None or self._states.has_read_newest()

    def end(self) -> None:
        self._upstream.unwatch()


def _joined(
    places: Sequence[RawReply | SinglePlace | SplitPlace],
    upstream_items: Sequence[RawReply],
    state_items: Sequence[RawReply],
) -> Steps[RawReply]:
    """Return the reply to EXEC.

    Args:
        upstream_items, state_items: The items of both backends' replies.
    """
    replies: list[RawReply] = []
    for place in places:
        if isinstance(place, SinglePlace):
            replies.append((upstream_items if place.backend == UPSTREAM else state_items)[place.at])
        elif isinstance(place, SplitPlace):
            read = place.read
            theirs = upstream_items[place.upstream_at : place.upstream_at + len(read.upstream)]
            ours = state_items[place.states_at : place.states_at + len(read.states)]
            replies.append((yield from read.join(theirs, ours)))
        else:
            replies.append(place)
        yield
    return raw_reply_of([b"*%d\r\n" % len(replies), *replies])


def _has_run_nothing(reply: RawReply) -> bool:
    return is_error(reply) or reply in NOTHING_RUN.values()


def _unchecked_databases(requests: Sequence[Request], databases: Databases, session: Session) -> Steps[set[int]]:
    """Return the databases that queued SELECTs name and that the upstream has not confirmed."""
    found = set()
    for index, request in enumerate(requests):
        if index % SEARCHED_AT_ONCE == SEARCHED_AT_ONCE - 1:
            yield
        if len(request) == 2 and special_of(request[0]) is SpecialCommand.SELECT:
            with suppress(GenericError):
                found.add(databases.number_of(request[1]))
    return {number for number in found if number != session.db and not databases.is_open(number)}
