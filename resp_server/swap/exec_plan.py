"""EXEC at a proxy with an upstream: the states' part is read first, then the upstream's runs as one MULTI ... EXEC.

The states' part is one `ProxyExec`, at one epoch of each job. It also checks the watched keys of states; if one has
changed, the upstream's part is not sent. The upstream's part goes out in one write, so it needs no connection of the
client's own, unless the client watches keys there. The replies of the two sides are not from one instant.

A queued SELECT is part of the upstream's transaction if commands for the upstream follow it. The connection may be a
shared one, so a last SELECT returns it to its database. The same holds for a queued CLIENT CACHING, which ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Protocol

from resp_server.command.ours import role_of
from resp_server.command.policy import Destination, Role
from resp_server.execution.exec_runner import NOTHING_RUN
from resp_server.forwarding.packing import Packed, pack_in_steps, size_of, texts_of
from resp_server.forwarding.raw_replies import JOINED_BYTES_MAX, RawReply, Steps, is_error, raw_reply_of
from resp_server.forwarding.reply_splitter import items_of, pack
from resp_server.forwarding.reply_stages import (
    MALFORMED_REPLY_ERRORS,
    Defer,
    ReplySink,
    ReplyStage,
    malformed_reply,
)
from resp_server.protocol.errors import CrossSlotError, ExecAbortError, PlainError, ReplyError
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.proxy.transaction_plan import EXEC, MULTI
from resp_server.proxy.transactions import StartableExec
from resp_server.session.epoch_feed import NO_EPOCHS, Epochs, ReplyEpochs, latest, union_of
from resp_server.session.session import Session
from resp_server.session.transaction import Mark
from resp_server.swap.cached_reads import CachedReads
from resp_server.swap.exec_listings import QueuedSides
from resp_server.swap.keyspace import KeyspaceSides
from resp_server.swap.shadow import COMPARISONS_MAX, QueuedRead, Shadow
from resp_server.swap.side_split import STATES_PART, UPSTREAM_PART, SideSplit, mapped_split, split_over_sides
from resp_server.upstream.connection import UnansweredError, UpstreamRequest
from resp_server.upstream.databases import OUT_OF_RANGE, Databases
from resp_server.upstream.pinned import PinnedConnection
from resp_server.upstream.pool import UpstreamPool
from resp_server.upstream.routed_commands import RoutedCommand
from resp_server.upstream.routing import Route, SwapRouter
from resp_server.upstream.tracking import caching_before
from resp_server.upstream.upstream import Upstream

OK = b"+OK\r\n"
Watched = dict[tuple[int, bytes], Mark]


class Sides(Protocol):
    """The dispatcher that runs both parts. is_strict: it refuses a transaction over both sides. cached: its cache.

    shadow: compares reads.
    """

    router: SwapRouter
    cached: CachedReads
    is_strict: bool
    shadow: Shadow

    @property
    def defer(self) -> Defer: ...
    def upstream_of(self, session: Session) -> Upstream:
        """Return the connections to the database that a client has selected."""

    def databases_of(self, session: Session) -> Databases:
        """Return the databases of the upstream as a client's user has them."""

    def has_states(self, database: int) -> bool:
        """Tell whether states may have keys in a database."""

    def keyspace_query(
        self,
        role: Role | None,
        request: Request,
        session: Session,
        database: int,
        sink: ReplySink,
        index: int,
        through: Callable[[KeyspaceSides], KeyspaceSides],
    ) -> Callable[[], None]:
        """Return what sends a request about all keys of a database to both sides."""

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""


class SwapExec(ReplyStage):
    """One EXEC of a client. run_states: returns the part of states for requests, watched keys, a sink and its index."""

    def __init__(
        self,
        sides: Sides,
        session: Session,
        requests: Sequence[Request],
        watched: Watched,
        sink: ReplySink,
        index: int,
        run_states: Callable[[Sequence[Request], Watched, ReplySink, int], StartableExec],
    ) -> None:
        super().__init__(sink, index)
        self._sides, self._session, self._protocol = sides, session, session.protocol
        self._requests, self._watched = requests, watched
        self._run_states = run_states
        self._upstream = sides.upstream_of(session)
        self._caching = caching_before(session.tracking_state)  # of the whole transaction
        self._queued_caching = b""  # a CLIENT CACHING in the transaction, before the upstream's next command
        # The pool of the upstream's node that runs its part, and the client's connection that watches keys there.
        self._pool, self._pinned = _watching(self._upstream, session)
        self._any_pool: UpstreamPool | None = None  # if no request has keys
        self._packed: list[Packed] = []  # for the upstream
        self._changed: list[bytes] = []  # the keys that it may change, if any are cached
        self._changes_any_key = False
        self._of_states: list[Request] = []
        # For each queued command: its reply; or the side that runs it, and its position there; or, if it is split, the
        # split and the positions of its first requests at both sides.
        self._parts: list[RawReply | tuple[int, int] | tuple[SideSplit, int, int]] = []
        # The database of the next command, and that of the upstream's connection then.
        self._database = self._selected = session.db
        self._listings: list[QueuedSides] = []  # of commands about all keys
        self._missing_listings = 0
        self._shadowed: list[QueuedRead] = []
        # The databases that the upstream may not have, with the error of a check.
        self._unchecked = _selected_in(requests, sides, session)
        self._refusals: dict[int, ReplyError] = {}
        self._needs_states = bool(watched)
        self._replies: list[RawReply] = [b"*0\r\n", b"*0\r\n"]
        self._items: dict[int, Sequence[RawReply]] = {}  # of the replies
        self._epochs = NO_EPOCHS

    @property
    def _watches_upstream(self) -> bool:
        return self._pinned is not None

    @property
    def _needs_upstream(self) -> bool:
        return bool(self._packed) or self._watches_upstream

    def start(self, before: Steps[None]) -> None:
        """Run the transaction. before: steps to run first; a ReplyError of theirs is the reply."""
        if self._unchecked:
            self.attempt(self._check_database, before)
        else:
            self._start(before)

    def _check_database(self, before: Steps[None]) -> None:
        """Check whether the upstream has the next database that a SELECT names, then start again."""
        number = self._unchecked.pop()
        sink = _DatabaseSink(self, number, before)
        try:
            self._sides.databases_of(self._session).open(number, _nothing, sink, 0)
        except ReplyError as error:
            sink.fail(0, error)

    def checked_database(self, number: int, error: Exception | None, before: Steps[None]) -> None:
        """Take the result of such a check."""
        if error is not None:
            if not isinstance(error, ReplyError):
                raise error
            self._refusals[number] = error
        self.start(before)

    def _start(self, before: Steps[None]) -> None:
        self.attempt(self.run_steps, self._plan(before), lambda _: self._send(), self._sides.defer)

    def _plan(self, before: Steps[None]) -> Steps[None]:
        try:
            yield from before
            for request in self._requests:
                yield from self._add(request)
                yield
            if self._selected != self._session.db:
                self._select_at_upstream(self._session.db)
            if self._sides.is_strict and self._needs_states and self._needs_upstream:
                raise PlainError("--transactions strict refuses keys of states and of the upstream together")
        except ExecAbortError as error:
            self._end(self._sides.error_reply(error))
        except ReplyError as error:  # keys may have got other owners since they were queued
            self._end(self._sides.error_reply(ExecAbortError(error)))

    def _add(self, request: Request) -> Steps[None]:
        if type(request) is LongRequest:
            route = yield from self._sides.router.route_in_steps(request, self._database)
        else:
            route = self._sides.router.route(request, self._database)
        if route is not None and route.destination is Destination.PORTIONS:  # it was short enough to be queued
            route = self._sides.router.route(request, self._database)
        if route is not None:
            self._changes_any_key |= route.changed is None
            self._changed += route.changed or ()
        if route is not None and route.destination is Destination.DROPPED:
            self._parts.append(OK)
        elif route is not None and route.destination is Destination.SELECT:
            self._parts.append(self._select(request[1]))
        elif route is not None and route.destination is Destination.ALL_KEYS:
            self._add_listing(route.routed, request)
        elif route is not None and route.destination is Destination.UPSTREAM:
            self._before_upstream()
            if route.shadowed:
                self._add_shadowed(route)
            self._parts.append((UPSTREAM_PART, len(self._packed)))
            yield from self._add_upstream(route.routed, request if route.request is None else route.request)
        elif route is not None and route.destination in (Destination.BOTH, Destination.PREFERRED, Destination.MAPPED):
            split = mapped_split(route) if route.destination is Destination.MAPPED else split_over_sides(route, request)
            self._needs_states = True
            if split.upstream:
                self._before_upstream()
            self._parts.append((split, len(self._packed), len(self._of_states)))
            for part in split.upstream:
                yield from self._add_upstream(route.routed, part)
            self._of_states += split.states
        else:
            self._needs_states |= route is not None and route.destination is Destination.STATES
            if (
                route is not None
                and route.routed.policy.role is Role.CLIENT_CACHING
                and self._session.tracking_state is not None
            ):
                self._queued_caching = pack(request)
            self._parts.append((STATES_PART, len(self._of_states)))
            self._of_states.append(request)

    def _add_shadowed(self, route: Route) -> None:
        """Remember a read that is to be compared, the next one for the upstream."""
        if len(self._shadowed) >= COMPARISONS_MAX:
            self._sides.shadow.skip(route.shadowed)
            return
        upstream = self._sides.databases_of(self._session).of(self._database)
        self._shadowed.append(QueuedRead(len(self._packed), route.shadowed, route.routed, upstream))

    def _answer(self, reply: RawReply) -> None:
        """Reply to the client, then compare its reads."""
        self.finish(reply, self._epochs)
        if self._shadowed:
            self._sides.shadow.compare_queued(self._shadowed, self._protocol, self._replies[UPSTREAM_PART])

    def _select(self, word: bytes) -> bytes:
        """Apply a queued SELECT; return its reply."""
        try:
            number = self._sides.databases_of(self._session).number_of(word)
        except PlainError as error:
            return self._sides.error_reply(error)
        refusal = self._refusals.get(number)
        if refusal is not None and not self._sides.has_states(number):
            if OUT_OF_RANGE not in str(refusal) and not self._upstream.url.is_cluster:
                raise ExecAbortError(refusal)  # the upstream may have the database
            return self._sides.error_reply(refusal)  # the selected one stays
        self._database = number
        return OK

    def _select_at_upstream(self, number: int) -> None:
        """Have the upstream's next commands run in a database."""
        refusal = self._refusals.get(number)
        if refusal is not None:
            raise ExecAbortError(refusal)
        self._selected = number
        self._packed.append(pack((b"SELECT", b"%d" % (number or self._upstream.url.database))))

    def _add_listing(self, routed: RoutedCommand, request: Request) -> None:
        """Add a command about all keys."""
        place = len(self._parts)
        self._parts.append(b"")

        def queue(part: Request) -> int:
            self._before_upstream()
            self._any_pool = self._upstream.pool_of(routed, part)
            self._packed.append(pack(part))
            return len(self._packed) - 1

        def through(sides: KeyspaceSides) -> KeyspaceSides:
            self._listings.append(QueuedSides(sides, queue))
            return self._listings[-1]

        self._needs_states |= self._sides.has_states(self._database)
        sink = _ListingSink(self)
        try:
            self._sides.keyspace_query(
                routed.policy.role, request, self._session, self._database, sink, place, through
            )()
            self._missing_listings += 1
        except ExecAbortError:
            raise
        except ReplyError as error:  # such as an invalid cursor
            self._parts[place] = self._sides.error_reply(error)

    def _before_upstream(self) -> None:
        """Select the database of the upstream's next command there, and repeat CLIENT CACHING."""
        if self._queued_caching:
            self._packed.append(self._queued_caching)
            self._queued_caching = b""
        if self._selected != self._database:
            self._select_at_upstream(self._database)

    def _add_upstream(self, routed: RoutedCommand, request: Request) -> Steps[None]:
        self._any_pool = pool = self._upstream.pool_of(routed, request)
        if routed.facts.key_specs:
            self._pool = self._pool or pool
            if pool is not self._pool:
                raise CrossSlotError
        self._packed.append((yield from pack_in_steps(request)) if type(request) is LongRequest else pack(request))

    def _send(self) -> None:
        if self._is_over:
            return
        if self._pinned is not None and self._pinned.is_dirty:
            self._end(NOTHING_RUN[self._protocol])
        elif self._of_states or self._watched:
            self._run_states(self._of_states, self._watched, self, STATES_PART).start(_no_steps())
        else:
            self._send_upstream()

    def _send_upstream(self) -> None:
        if not self._needs_upstream:
            self._merge()
            return
        if self._watches_upstream:
            assert self._pinned is not None
            if self._pool is None or self._pool.pinned.get(self._session.id) is not self._pinned:
                raise UnansweredError("the connection to the upstream, which watches its keys, was lost")
        texts = [MULTI, *(text for each in self._packed for text in texts_of(each)), EXEC]
        packed: Packed = texts if size_of(texts) > JOINED_BYTES_MAX else b"".join(texts)
        replies_before = len(self._packed) + 1
        changed = None if self._changes_any_key else self._changed
        sink = self._sides.cached.changing(changed, self._session, self)
        request = UpstreamRequest(
            packed, sink, UPSTREAM_PART, is_read=False, prefix=self._caching, replies_before=replies_before
        )
        pool = self._pool or self._any_pool
        assert pool is not None
        pool.add(self._session.id, self._protocol, request)
        if self._pinned is not None:
            self._pinned.forget_watched()

    def receive(self, index: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Take the reply to the EXEC of one side."""
        if index == STATES_PART:
            self._epochs = epochs
        else:
            reply = self._upstream.checked(reply)
        self._replies[index] = reply
        if is_error(reply) or reply in NOTHING_RUN.values():
            self._end(reply)
        elif index == STATES_PART:
            self._send_upstream()
        else:
            self._merge()

    def _merge(self) -> None:
        """Merge the replies. All commands have run, so the client is in the last database that one has selected."""
        if self._session.db != self._database:
            self._session.select(self._database)
        if all(type(part) is tuple and part[0] == UPSTREAM_PART for part in self._parts):
            self._answer(self._replies[UPSTREAM_PART])
        elif all(type(part) is tuple and part[0] == STATES_PART for part in self._parts):
            self.finish(self._replies[STATES_PART], self._epochs)
        else:
            self.run_steps(self._read_items(), self._start_listings, self._sides.defer)

    def _read_items(self) -> Steps[dict[int, Sequence[RawReply]]]:
        items: dict[int, Sequence[RawReply]] = {}
        try:
            for side in (UPSTREAM_PART, STATES_PART):
                items[side] = yield from items_of(self._replies[side])
        except MALFORMED_REPLY_ERRORS as error:
            self.finish(malformed_reply(error))
        return items

    def _start_listings(self, items: dict[int, Sequence[RawReply]]) -> None:
        if self._is_over:
            return
        self._items = items
        self._missing_listings += 1  # one too many, so that the last one comes after this loop
        for each in self._listings:
            each.start(items[UPSTREAM_PART])
        self._end_listing()

    def take_listing(self, place: int, reply: RawReply, epochs: ReplyEpochs) -> None:
        """Take the reply to a command about all keys."""
        self._parts[place] = reply
        self._epochs = union_of(self._epochs, epochs)
        self._end_listing()

    def _end_listing(self) -> None:
        self._missing_listings -= 1
        if not self._missing_listings:
            self.run_steps(self._merged(), self._answer, self._sides.defer)

    def seen_epochs(self, index: int) -> Epochs:
        """Return the epochs that the client has seen; those of this transaction's reads, too."""
        return reduce(latest, self._epochs, super().seen_epochs(index))

    def _merged(self) -> Steps[RawReply]:
        items = self._items
        try:
            replies: list[RawReply] = []
            for part in self._parts:
                if not isinstance(part, tuple):
                    replies.append(part)
                elif len(part) == 2:
                    replies.append(items[part[0]][part[1]])
                else:
                    split, first, first_of_states = part
                    of_upstream = items[UPSTREAM_PART][first : first + len(split.upstream)]
                    of_states = items[STATES_PART][first_of_states : first_of_states + len(split.states)]
                    replies.append((yield from split.join(of_upstream, of_states)))
                yield
            return raw_reply_of([b"*%d\r\n" % len(replies), *replies])
        except MALFORMED_REPLY_ERRORS as error:
            return malformed_reply(error)

    def _end(self, reply: RawReply) -> None:
        """Finish without the upstream's EXEC, and unwatch the keys there."""
        if self._pinned is not None:
            self._pinned.unwatch()
        self.finish(reply, self._epochs)

    def fail(self, index: int, error: Exception) -> None:
        if self._pinned is not None:
            self._pinned.unwatch()
        super().fail(index, error)


class _ListingSink(ReplySink):
    """Takes the reply to a queued command about all keys. Its index is the place of the command."""

    def __init__(self, run: SwapExec) -> None:
        self._run = run

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._run.attempt(self._run.take_listing, index, reply, epochs)

    def fail(self, index: int, error: Exception) -> None:
        self._run.fail(index, error)

    def seen_epochs(self, index: int) -> Epochs:
        return self._run.seen_epochs(index)


class _DatabaseSink(ReplySink):
    """Takes the reply about the existence of a database."""

    def __init__(self, run: SwapExec, number: int, before: Steps[None]) -> None:
        self._run, self._number, self._before = run, number, before

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._run.attempt(self._run.checked_database, self._number, None, self._before)

    def fail(self, index: int, error: Exception) -> None:
        self._run.attempt(self._run.checked_database, self._number, error, self._before)


def _selected_in(requests: Sequence[Request], sides: Sides, session: Session) -> set[int]:
    """Return the databases in the queued SELECTs of which it is not known whether the upstream has them."""
    found = set()
    databases = sides.databases_of(session)
    for request in requests:
        if len(request) == 2 and role_of(request[0]) is Role.SELECT:
            with suppress(PlainError):
                found.add(databases.number_of(request[1]))
    return {number for number in found if number != session.db and not databases.is_open(number)}


def _nothing() -> None:
    """Do nothing when a database is found."""


def _watching(upstream: Upstream, session: Session) -> tuple[UpstreamPool | None, PinnedConnection | None]:
    """Return the client's connection that watches keys at the upstream, with its pool."""
    for pool in upstream.pools:
        pinned = pool.pinned.get(session.id)
        if pinned is not None and (pinned.watched or pinned.is_dirty):
            return pool, pinned
    return None, None


def _no_steps() -> Steps[None]:
    yield from ()
