"""Dispatches a proxy's requests: answers some itself, as any server does, and forwards the others to servers.

The requests of one input buffer, up to a limit, form a batch. They are sent together, and their replies are returned
together, in order. A client's next batch waits for the previous one, which bounds a client's requests in flight.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from time import perf_counter_ns
from types import coroutine
from typing import Any, NamedTuple, cast

from resp_server.backends.servers.batch import BATCH_BYTES_MAX, ReplyBatch
from resp_server.backends.servers.chunked_request import answer_in_chunks, pack_in_steps
from resp_server.backends.servers.compiled import forwarder
from resp_server.backends.servers.request_policy import destination_of, split_by_slot
from resp_server.backends.servers.servers_backend import ServersBackend
from resp_server.backends.servers.servers_exec import ServersExec
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.servers.transaction_plan import TransactionPlanner
from resp_server.backends.servers.transactions import BackendExec, Transactions, Watched, watch_states
from resp_server.command.ours import MOST_USED
from resp_server.command.policy import Destination, Joined, Role, Split
from resp_server.command.table import Command
from resp_server.forwarding.answers import (
    Answer,
    Called,
    SeenEpochs,
    Wait,
    in_steps,
)
from resp_server.forwarding.raw_replies import Result, as_bytes
from resp_server.forwarding.reply_splitter import pack
from resp_server.metrics.stats import CommandStats
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.dispatcher import (
    SPELLINGS_MAX,
    Dispatcher,
    IncompleteReply,
    end_caching,
)
from resp_server.pipeline.long_requests import first_chunk, may_run_unsplit, request_chunks, too_long
from resp_server.pipeline.slow_requests import NEVER_NS
from resp_server.protocol.errors import (
    GenericError,
    ReplyError,
    not_served,
)
from resp_server.protocol.replies import Pending, ReplyStream, Retry, Sliced, SlicedEncoder
from resp_server.protocol.request_parser import CHUNK_WORDS, LongRequest, Request
from resp_server.session.session import RESP2, Session
from resp_server.session.transaction import check_watch_limits
from state_backend.model.slots import slot_of

# The keys of a long request that are requested at once. Each slot among them costs a request (measured: 20 to 80 us).
CHUNK_KEYS = 256
# Commands with longer names take the general path.
HOP_NAME_BYTES_MAX = 16
TRANSACTIONS = "transactions"


# Answers a request: adds its reply to a batch, or returns a reply in steps, which is sent after the batch. It may wait
# for the client's next batch, in which it is the first request.
Handling = Coroutine[None, ReplyBatch | None, Sliced | None]


@coroutine
def next_batch() -> Generator[None, ReplyBatch, ReplyBatch]:
    """Wait until the client has the replies to all earlier requests; return the batch that begins then."""
    return (yield)


async def between_batches(work: Coroutine[Wait, None, Result], batch: ReplyBatch) -> tuple[Result, ReplyBatch]:
    """Do work while earlier requests are answered; return its result, and the batch that begins after both."""
    results: list[Result] = []
    errors: list[Exception] = []

    async def answering() -> Answer:
        try:
            results.append(await work)
        except Exception as error:
            errors.append(error)
        return Answer(b"")

    batch.answer(answering, is_suppressed=True)
    following = await next_batch()
    if errors:
        raise errors[0]
    return results[0], following


class CommandRoute(NamedTuple):
    """How to route a command name as typed.

    Args:
        single_key_at: The index of the only key; 0: there may be others.
    """

    command: Command
    destination: Destination
    single_key_at: int
    command_stats: CommandStats


class ProxyDispatcher(Dispatcher):
    """Answers the requests of one proxy."""

    has_upstream = False
    batch_bytes_max = BATCH_BYTES_MAX  # of the replies to requests that arrived together

    def __init__(self, server: ServerContext, clusters: StateClusters) -> None:
        super().__init__(server)
        self.compiled = None  # a proxy has no keys to look up
        self._transactions = Transactions(self, server)
        self._clusters = clusters
        self.servers = ServersBackend(server, clusters, self._own_reply)
        self._planner = TransactionPlanner(self, clusters)
        self._routes: dict[bytes, CommandRoute | None] = {}
        # By client the request that waits for the client's next batch.
        self._waiting: dict[int, tuple[Request, Handling]] = {}
        only = clusters.single
        # With several applications, each key must be checked, so there is no forwarder.
        self.forwarder = (
            None if only is None or forwarder is None else forwarder.Forwarder(only, server, self._forwarder_commands())
        )
        self.servers.forwarder = self.forwarder
        # Answers reads of stored keys before the forwarder gets them; None: the servers' stores cannot be read here.
        self._stored_reads: Any = None
        if only is not None and only.stores is not None and forwarder is not None:
            only.stores.follow(only.epochs)
            self._stored_reads = forwarder.StoredReads(server)
            self._stored_reads.use(self.forwarder, only.stores)
        self._tracking = server.tracking
        self._tracking.on_use, self._tracking.when_followed = clusters.follow_keys, clusters.when_followed
        for cluster in clusters:
            cluster.on_changed = self._tracking.changed
            cluster.defer = server.clients.defer

    @property
    def answers_rounds(self) -> bool:
        return False  # servers answer

    def has_keys(self, session: Session) -> bool:
        """Return whether requests about keys are forwarded. All databases but 0 are empty."""
        return session.db == 0

    def poll(self, poller: Any) -> None:
        poller.fast_path = self._stored_reads
        for cluster in self._clusters:
            cluster.access.poller = poller

    def stop(self) -> None:
        self._clusters.stop()

    def _forwarder_commands(self) -> list[tuple[str, int, int, CommandStats]]:
        """Return the commands that the forwarder forwards: GET, MGET, and those whose only key is the first word."""
        found = []
        for name in dict.fromkeys([*MOST_USED, *(each.name for each in self._table)]):
            route = self._learn_route(name.encode())
            if route is None or len(name) > HOP_NAME_BYTES_MAX:
                continue
            is_mget = route.command.policy.role is Role.MGET
            if route.single_key_at != 1 and not is_mget:
                continue
            arity = route.command.facts.arity
            least = 3 if is_mget else abs(arity)  # an MGET of one key is forwarded as it is
            found.append((name, least, arity if arity > 0 else CHUNK_WORDS, route.command_stats))
        return found

    def answer(
        self,
        context: CommandContext,
        requests: list[Request],
        out: list[bytes],
        ends_ns: int = NEVER_NS,
        requests_max: int = sys.maxsize,
    ) -> IncompleteReply | None:
        session, clusters, routes = context.session, self._clusters, self._routes
        first = clusters[0]
        batch = ReplyBatch(session, first.access.clock, first.deadline_s(), self.error_reply, self.batch_bytes_max)
        answered, later, delayed, protocol = 0, None, None, session.protocol
        for request in requests[:requests_max]:
            answered += 1
            index = len(batch)
            try:
                waiting, handling = self._waiting.pop(session.id, (None, None)) if self._waiting else (None, None)
                name = request[0]
                route = routes[name] if name in routes else self._learn_route(name)
                if handling is None or waiting is not request:
                    if self._forward_single(session, route, request, batch):
                        if perf_counter_ns() >= ends_ns:
                            break
                        continue
                    delayed = self.delayed(session, request)
                    if delayed is not None:
                        answered -= 1
                        break
                    session.begin_command()
                    handling, begun = self.handle(context, route, request, batch), None
                else:
                    begun = batch
                try:
                    handling.send(begun)
                except StopIteration as end:
                    later = end.value
                else:
                    self._waiting[session.id] = request, handling
                    answered -= 1
                    break
            except Exception as error:  # it fails this request only
                self._reply_error(session, request, batch, index, error)
            end_caching(session, self._table, request)
            # The upstream has connections for each protocol: later requests must not overtake those before HELLO.
            must_wait = batch.is_last or (self.has_upstream and session.protocol != protocol)
            is_over = must_wait or session.is_closing or self._server.pause.delays_all or perf_counter_ns() >= ends_ns
            if later is not None or is_over:
                break
        session.calls += answered
        del requests[:answered]
        incomplete = self._finish(batch, later, session.protocol, out)
        return delayed if incomplete is None else incomplete

    def _forward_single(
        self, session: Session, route: CommandRoute | None, request: Request, batch: ReplyBatch
    ) -> bool:
        """Forward a request that needs no checks but those of its form and its client; False: it needs others."""
        cluster = self._clusters.single
        if route is None or not route.single_key_at or cluster is None or self.has_upstream:
            return False
        if type(request) is LongRequest or not session.can_use_fast_path or not _fits(route, request):
            return False
        route.command_stats.calls += 1
        session.last_command = route.command.name
        batch.send(cluster, pack(request), slot_of(request[route.single_key_at]))
        return True

    def delayed(self, session: Session, request: Request) -> Retry | None:
        """Return what a request waits for before it is handled; None: it is handled now."""
        return self.delayed_by_pause(session, request) if self._server.pause.until_ms else None

    @staticmethod
    def _finish(batch: ReplyBatch, later: Sliced | None, protocol: int, out: list[bytes]) -> IncompleteReply | None:
        """Return the batch if it lacks replies of servers; else output its replies, and return the later one."""
        if batch.missing:
            if later is None:
                batch.seal()
            else:
                batch.end_with(SlicedEncoder(later, protocol))
            return batch
        out += map(as_bytes, batch.replies())
        return later

    async def handle(
        self, context: CommandContext, route: CommandRoute | None, request: Request, batch: ReplyBatch
    ) -> Sliced | None:
        """Forward a request, or answer it here. batch.is_last: later requests have to wait for its reply."""
        if type(request) is LongRequest and self._forward_long(context, request, batch):
            batch.is_last = True
            return None
        is_queued = context.session.transaction is not None
        if route is not None and (is_queued or route.command.facts.group == TRANSACTIONS):
            if self._transact(context, route.command, request, batch):
                batch.is_last = True
                return None
        elif self._forward(context, request, batch):
            return None
        return self._answer_locally(context, request, batch)

    def _reply_error(self, session: Session, request: Request, batch: ReplyBatch, index: int, error: Exception) -> None:
        """Reply the error that a request raised. Within MULTI, EXEC will be refused; an EXEC itself ends."""
        if session.transaction is not None:
            if self._table.role_of(request) is Role.EXEC:
                session.end_transaction()
            else:
                session.transaction.is_aborted = True
        batch.refuse(index, error)

    def _check(self, context: CommandContext, command: Command, request: Request) -> None:
        super()._check(context, command, request)
        if command.policy.is_internal:
            raise not_served(command.name)
        if context.session.transaction is None:
            return
        self._check_queued(context.session, command, request)
        split = self._split_of(command, request) if type(request) is LongRequest else None
        if split is not None and split.joined is Joined.FRAMES:
            raise too_long(command, CHUNK_WORDS)  # EXEC could not wait for its chunks
        may_be_split = bool(command.single_key_at) or command.policy.is_split_by_slot
        if destination_of(command) is Destination.STATES and not (may_be_split and self._clusters.single is not None):
            split_by_slot(command, request, self.servers.target_of)  # raises for keys of several slots

    def _check_queued(self, session: Session, command: Command, request: Request) -> None:
        """Raise GenericError for a command that cannot be queued here."""
        is_known = destination_of(command) in (Destination.LOCAL, Destination.STATES)
        if not is_known or not command.policy.runs_in_transaction:
            raise GenericError(f"command '{command.name}' cannot be in a transaction through a proxy")

    def _split_of(self, command: Command, request: Request) -> Split | None:
        """Return how a long request is split; None: it is not forwarded, or not split."""
        split = super()._split_of(command, request)
        if split is None or split.joined is Joined.FRAMES:
            return split
        if destination_of(command) is Destination.STATES and split.joined in (Joined.SUM, Joined.LIST):
            return split
        if not may_run_unsplit(request):
            raise too_long(command)
        return None

    def _forward_long(self, context: CommandContext, request: Request, batch: ReplyBatch) -> bool:
        """Forward a long request; later requests wait. False: it takes the general path."""
        session = context.session
        command = self._table.find(request)
        command.check_arity(request)
        self._check(context, command, first_chunk(request))
        split = self._split_of(command, request)
        if session.transaction is not None and not may_run_unsplit(request):
            raise too_long(command)
        if split is None or split.joined is Joined.FRAMES:
            return False
        if session.transaction is not None or not self.has_keys(session):
            return False
        session.last_command = command.name
        self._stats.command_stats(command.name).calls += 1
        self._monitor(session, command, request)
        if session.replies_suppressed:  # a read whose reply is suppressed has no effect
            return True
        if command.single_key_at:
            self._answer_unsplit(session, command, request, batch)
        else:
            batch.answer(partial(self._chunks_answer, context, command, request, split, batch))
        return True

    def _answer_unsplit(self, session: Session, command: Command, request: Request, batch: ReplyBatch) -> None:
        """Send a long request about one key unsplit, so that its reply is from one epoch.

        The request uses a connection for slow requests, so that other clients do not wait behind it.
        """
        key = request[command.single_key_at]
        packed: list[bytes] = []  # once: the request's words are cleared then

        async def answering() -> Answer:
            await batch.earlier_replies()  # they must not be from a later epoch
            if not packed:
                packed.append(await in_steps(pack_in_steps(cast(LongRequest, request)), self._server.clients.defer))
            return await self.servers.slow_answer(packed[0], key, key, session, batch.seen)

        batch.answer(answering)

    async def _chunks_answer(
        self, context: CommandContext, command: Command, request: Request, split: Split, batch: ReplyBatch
    ) -> Answer:
        """Answer a long request about keys of many slots, after all earlier replies."""
        session, first = context.session, self._clusters[0]
        await batch.earlier_replies()  # they must not be from a later epoch

        def send(chunk: Request) -> ReplyBatch:
            self._check(context, command, chunk)
            chunk_batch = ReplyBatch(session, first.access.clock, first.deadline_s(), self.error_reply)
            if not self.servers.answer(command, Destination.STATES, chunk, session, chunk_batch):
                raise GenericError("the request is malformed")
            chunk_batch.seal()
            return chunk_batch

        found = request_chunks(command, split, request, CHUNK_KEYS)
        return await answer_in_chunks(found, send, split, session.protocol, BATCH_BYTES_MAX)

    def _transact(self, context: CommandContext, command: Command, request: Request, batch: ReplyBatch) -> bool:
        """Send an EXEC or a WATCH to servers, and return True: later requests must wait. False: this proxy replies.

        Args:
            command: Found by the request's first word only, without the subcommand.
        """
        session, transaction = context.session, context.session.transaction
        role, words = command.policy.role, len(request)
        is_exec = role is Role.EXEC and words == 1 and transaction is not None and not transaction.is_aborted
        is_watch = role is Role.WATCH and words > 1 and transaction is None and self.has_keys(session)
        if not (is_exec or is_watch) or not self._may_forward(context, command, request):
            return False
        if transaction is not None:
            self._transactions.execute(context, transaction.requests, batch)
        else:
            self._watch(context, request, batch)
        return True

    def _may_forward(self, context: CommandContext, command: Command, request: Request) -> bool:
        """Return whether a request may be forwarded; if not, this proxy replies the error."""
        session = context.session
        if not session.is_authenticated or session.user.denial(command, request) is not None:
            return False
        is_refused = session.is_monitor and "readonly" in command.facts.flags
        return not is_refused and (session.subscriptions is None or session.protocol != RESP2)

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: SeenEpochs
    ) -> BackendExec:
        """Begin the EXEC of queued requests at the state servers."""
        return ServersExec(self, self._planner, self._clusters[0], context, requests, watched)

    def _watch(self, context: CommandContext, request: Request, batch: ReplyBatch) -> None:
        session = context.session
        command = self.command(request)
        session.last_command = command.name
        self._monitor(session, command, request)
        new = [key for key in dict.fromkeys(request[1:]) if (0, key) not in session.watched]
        try:
            if len(request) > CHUNK_WORDS:
                raise too_long(command, CHUNK_WORDS)
            check_watch_limits(session.watched, new)
            numbers = [self.servers.target_of(key)[0] for key in new]
        except ReplyError:
            self._stats.command_stats(command.name).failed += 1
            raise
        self._stats.command_stats(command.name).calls += 1
        targets = [(self._clusters[number], key) for number, key in zip(numbers, new, strict=True)]
        batch.answer(lambda: watch_states(session.watched, targets), session.replies_suppressed)

    def of_states(self, session: Session, requests: Sequence[Request]) -> Iterable[Request]:
        """Return the queued requests that state servers, or this proxy, answer."""
        return requests

    def _own_reply(self, session: Session, request: Request) -> object:
        return self.reply_to(CommandContext(session, self._server), request)

    def target_of(self, key: bytes) -> tuple[int, int]:
        """Return the number of a key's application, and its slot."""
        return self.servers.target_of(key)

    def chunks_of(self, request: Request) -> Iterable[Request]:
        """Split a queued request into chunks, to check the rights to all of its keys."""
        return (request,)

    def command(self, request: Request) -> Command:
        """Return the command of a request that was queued."""
        return self._table.find(request)

    def later_reply(self, context: CommandContext, pending: Pending) -> bytes | ReplyStream:
        return pending.joined() if isinstance(pending, ReplyBatch) else super().later_reply(context, pending)

    def _learn_route(self, name: bytes) -> CommandRoute | None:
        command = self._table.get(name) if b"|" not in name else None
        route = None
        if command is not None:
            destination = destination_of(command)
            route = CommandRoute(
                command,
                destination,
                command.single_key_at if destination is Destination.STATES else 0,
                self._stats.command_stats(command.name),
            )
        if len(self._routes) < SPELLINGS_MAX:
            self._routes[name] = route
        return route

    def _forward(self, context: CommandContext, request: Request, batch: ReplyBatch) -> bool:
        """Forward a request; False: this proxy replies itself, maybe with an error."""
        session = context.session
        try:
            command = self._table.find(request)
            command.check_arity(request)
        except ReplyError:
            return False
        destination = destination_of(command)
        # This proxy can answer a request to an empty database.
        if destination is Destination.LOCAL or not self.has_keys(session):
            return False
        if not self._may_forward(context, command, request):
            return False
        is_forwarded = self.servers.answer(command, destination, request, session, batch)
        if is_forwarded:
            session.last_command = command.name
            self._stats.command_stats(command.name).calls += 1
            # For INFO, `reply_to` made the proxy's own sections, and sent the request to monitors.
            if command.policy.role is not Role.INFO:
                self._monitor(session, command, request)
        return is_forwarded

    def _monitor(self, session: Session, command: Command, request: Request) -> None:
        """Send a forwarded request to monitors."""
        if session.is_observed:
            self._server.monitors.record(session, command, request)

    def _answer_locally(self, context: CommandContext, request: Request, batch: ReplyBatch) -> Sliced | None:
        """Answer a request without servers. Returns a reply in steps, which is sent after the batch."""
        reply = self.reply_to(context, request)
        if isinstance(reply, Sliced):
            reply.is_suppressed = context.session.replies_suppressed
            if reply.is_suppressed and not reply.has_effect:
                reply.release()
                return None
            return reply
        if isinstance(reply, Pending):
            batch.is_last |= context.session.replies_suppressed  # a later request would end CLIENT REPLY SKIP first
            batch.answer(partial(self.resolved, context, reply), context.session.replies_suppressed)
            return None
        assert isinstance(reply, bytes)
        batch.add(b"" if context.session.replies_suppressed else reply)
        return None

    async def resolved(self, context: CommandContext, pending: Pending) -> Answer:
        """Return a pending reply once it is resolved, or after its time limit an error."""
        await Called(partial(_call_when_resolved, pending))
        try:
            return Answer(self.pending_reply(context, pending))
        except Exception as error:
            return Answer(self.error_reply(error))


def _call_when_resolved(pending: Pending, then: Callable[[], None]) -> None:
    """Call back once a reply is resolved, or after its time limit."""

    def end() -> None:
        late.cancel()
        pending.when_resolved(None)
        then()

    loop = asyncio.get_running_loop()
    late: asyncio.Handle = loop.call_later(pending.seconds_max, end)
    if pending.is_resolved:
        late.cancel()
        late = loop.call_soon(end)
    else:
        pending.when_resolved(end)


def _fits(route: CommandRoute, request: Request) -> bool:
    arity = route.command.facts.arity
    return len(request) == arity if arity > 0 else len(request) >= -arity
