"""State servers as a backend: which requests they answer, and how a proxy queues, splits and watches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from resp_server.backends.servers.command_routes import CommandRoutes
from resp_server.backends.servers.forwarder_sink import forward_exec
from resp_server.backends.servers.long_requests import LongRequests, forwarded_split_of
from resp_server.backends.servers.native import forwarder, stored_reads
from resp_server.backends.servers.request_split import split_by_slot
from resp_server.backends.servers.servers_exec import ServersExec
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import StateClusters
from resp_server.backends.servers.state_sender import StateSender, send_to
from resp_server.backends.servers.transaction_plan import TransactionPlanner
from resp_server.backends.servers.watch import watch_states
from resp_server.backends.stores.stores_backend import StoresBackend
from resp_server.command.policy import AnsweredBy, ReplyMerge, SpecialCommand
from resp_server.command.table import Command
from resp_server.pipeline import admission
from resp_server.pipeline.batch import BATCH_BYTES_MAX, ReplyBatch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import count_forwarded
from resp_server.pipeline.keyless_commands import CommandCaller, LocalRequests, has_slot, needs_no_pipeline
from resp_server.pipeline.long_requests import too_long
from resp_server.pipeline.outcome import RequestOutcome
from resp_server.pipeline.transactions import BackendExec, Watched
from resp_server.protocol.errors import GenericError, ReplyError, not_served
from resp_server.protocol.replies import Retry
from resp_server.protocol.request_parser import CHUNK_ARGUMENTS, LongRequest, Request
from resp_server.raw_replies.answers import ReadSeenEpochs
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import Session
from resp_server.session.transaction import check_watch_limits
from state_backend.model.slots import slot_of

TRANSACTIONS = "transactions"


class ServersBackend:
    """The state servers behind a proxy.

    Args:
        is_routed: Another backend has decided that a request is about states' keys, which may be in any database.
            Otherwise all databases but 0 are empty.

    Attributes:
        forwarder: The compiled forwarder, which gets all input first; None: it is not built, or there are several
            clusters, because then each key must be checked.
    """

    orders_by_protocol = False

    def __init__(self, server: ServerContext, clusters: StateClusters, *, is_routed: bool = False) -> None:
        self._server, self._table, self.clusters = server, server.table, clusters
        self._is_routed = is_routed
        self.local = StoresBackend(server, self._check_all, forwarded_split_of)
        self.sender = StateSender(server, clusters, self.local)
        self.long = LongRequests(server, self.sender, self._check_all, self.new_batch, self.has_keys)
        self._planner = TransactionPlanner(self, clusters)
        self._routes = CommandRoutes(server.table, server.stats)
        only = clusters.single
        self.forwarder: Any = None
        if only is not None and forwarder is not None:
            self.forwarder = forwarder.Forwarder(only, server, self._routes.state_forward_specs())
        self.sender.forwarder = self.forwarder
        # Answers requests about the connection, and about stored keys where the servers' stores can be read, before the
        # forwarder gets them.
        self._stored_reads: Any = None
        if only is not None and forwarder is not None:
            watch_point = None if only.stores is None else only.stores.watch_point
            self._stored_reads = stored_reads.StoredReads(
                server, None, None, lambda user, view: view.key_count(), watch_point
            )
            self.forwarder.use_stores(self._stored_reads, only.stores)
            self.call_commands(self.may_call)
        if self._stored_reads is not None and only is not None and only.stores is not None:
            only.stores.follow(only.epochs)
            only.stores.on_changed = partial(self._stores_changed, only)
        tracking = server.tracking
        tracking.on_use, tracking.when_followed = clusters.follow_keys, clusters.when_followed
        for cluster in clusters:
            cluster.on_changed = tracking.changed
            cluster.defer = server.clients.defer

    def _stores_changed(self, cluster: StateCluster, keys: Sequence[bytes] | None) -> None:
        """Invalidate changed keys. This runs within a reader's request, which an exception must not fail."""
        if not self._server.attempt(cluster.on_changed, keys):
            self._server.cut_caching_clients()

    def call_commands(self, may_call: Callable[[Command], bool | LocalRequests]) -> None:
        """Let the compiled core run commands for which `may_call` is true, or the requests that its test accepts."""
        if self._stored_reads is not None:
            self._stored_reads.command_caller = CommandCaller(self._server, may_call)

    @staticmethod
    def may_call(command: Command) -> bool:
        """Return whether the proxy runs a command itself, as a server does."""
        return (
            not has_slot(command)
            and needs_no_pipeline(command)
            and command.answered_without_upstream is AnsweredBy.LOCAL
            and not command.policy.is_internal
        )

    def poll(self, poller: Any) -> None:
        """Use the compiled core's epoll for the connections to servers."""
        poller.fast_path, poller.renews_by_clock = self._stored_reads, True
        for cluster in self.clusters:
            cluster.access.poller = poller

    def stop(self) -> None:
        """Close the connections to servers."""
        self.clusters.stop()

    def leave(self, session: Session) -> None:
        """Servers know nothing of single clients."""

    def new_batch(self, session: Session, bytes_max: int = BATCH_BYTES_MAX) -> ReplyBatch:
        """Return a batch for the replies to a client's requests, of so many bytes."""
        first = self.clusters[0]
        return ReplyBatch(session, first.access.clock, first.deadline_s(), self.local.error_reply, bytes_max)

    def has_keys(self, session: Session) -> bool:
        """Return whether requests with keys are forwarded in the database that a client has selected."""
        return self._is_routed or session.db == 0

    # -- admission ----------------------------------------------------------------------------------------------------

    def check(self, context: CommandContext, command: Command, request: Request) -> None:
        """Raise the error of a request that can neither run nor be queued here, after the checks of `admission`."""
        if command.policy.is_internal:
            raise not_served(command.name)
        if context.session.transaction is not None:
            self._check_queued(command, request)

    def _check_all(self, context: CommandContext, command: Command, request: Request) -> None:
        admission.check(context, command, request)
        self.check(context, command, request)

    def _check_queued(self, command: Command, request: Request) -> None:
        answered_by = command.answered_without_upstream
        is_known = answered_by in (AnsweredBy.LOCAL, AnsweredBy.STATES)
        if not is_known or not command.policy.runs_in_transaction:
            raise GenericError(f"command '{command.name}' cannot be in a transaction through a proxy")
        split = forwarded_split_of(command, request) if type(request) is LongRequest else None
        if split is not None and split.merge is ReplyMerge.FRAMES:
            raise too_long(command, CHUNK_ARGUMENTS)  # EXEC could not wait for its chunks
        may_be_split = bool(command.single_key_at) or command.policy.is_split_by_slot
        if answered_by is AnsweredBy.STATES and not (may_be_split and self.clusters.single is not None):
            split_by_slot(command, request, self.target_of)  # raises for keys of several slots

    def delayed(self, session: Session, request: Request) -> Retry | None:
        """Return None: no request waits for another client's."""
        return None

    def may_replicate(self, request: Request) -> bool:
        """Return whether CLIENT PAUSE ... WRITE delays a request."""
        return admission.may_replicate(self._table, request)

    # -- requests -----------------------------------------------------------------------------------------------------

    def send_at_once(self, session: Session, request: Request, batch: ReplyBatch) -> bool:
        """Forward a request about one key of a client without restrictions; return whether it was sent."""
        cluster, route = self.clusters.single, self._routes.of(request[0])
        if route is None or not route.single_key_at or cluster is None:
            return False
        if type(request) is LongRequest or not session.can_use_fast_path or session.reads_committed:
            return False
        if not route.command.facts.has_arity_of(request):
            return False
        route.command_stats.calls += 1
        session.last_command = route.command.name
        send_to(cluster, pack(request), slot_of(request[route.single_key_at]), session, batch)
        return True

    async def answer(self, context: CommandContext, request: Request, batch: ReplyBatch) -> RequestOutcome:
        """Forward a request, if servers answer it. batch.is_last: later requests have to wait for its reply."""
        if type(request) is LongRequest and self.long.answer(context, request, batch) is RequestOutcome.ANSWERED:
            batch.is_last = True
            return RequestOutcome.ANSWERED
        route = self._routes.of(request[0])
        if route is not None:
            is_queued = context.session.transaction is not None
            if is_queued or route.command.facts.group == TRANSACTIONS:
                return RequestOutcome.TRANSACTION
        return self._forward(context, request, batch)

    def _forward(self, context: CommandContext, request: Request, batch: ReplyBatch) -> RequestOutcome:
        session = context.session
        try:
            command = self._table.find(request)
            command.check_arity(request)
        except ReplyError:
            return RequestOutcome.REFUSED
        answered_by = command.answered_without_upstream
        if answered_by is AnsweredBy.LOCAL:
            return RequestOutcome.LOCAL
        if not self.has_keys(session):
            return RequestOutcome.NO_KEYS
        is_sent = admission.may_leave(session, command, request)
        is_sent = is_sent and self.sender.send(command, request, session, batch, answered_by)
        if not is_sent:
            return RequestOutcome.REFUSED
        # `local` has sent INFO to monitors, with the proxy's own sections.
        if command.policy.special is SpecialCommand.INFO:
            session.last_command = command.name
            self._server.stats.command_stats(command.name).calls += 1
        else:
            count_forwarded(context, command, request)
        return RequestOutcome.ANSWERED

    # -- transactions -------------------------------------------------------------------------------------------------

    def watch(self, context: CommandContext, request: Request, batch: ReplyBatch) -> None:
        """Add the pending reply to a WATCH; ReplyError for too many keys."""
        session, server = context.session, self._server
        command = self.command(request)
        session.last_command = command.name
        if session.is_observed:
            server.observation.monitors.record(session, command, request)
        new = [key for key in dict.fromkeys(request[1:]) if (0, key) not in session.watched]
        try:
            if len(request) > CHUNK_ARGUMENTS:
                raise too_long(command, CHUNK_ARGUMENTS)
            check_watch_limits(session.watched, new)
            targets = [(self.sender.cluster_of(key), key) for key in new]
        except ReplyError:
            server.stats.command_stats(command.name).failed += 1
            raise
        server.stats.command_stats(command.name).calls += 1
        batch.answer(lambda: watch_states(session.watched, targets), session.replies_suppressed)

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: ReadSeenEpochs
    ) -> BackendExec:
        """Begin the EXEC of queued requests."""
        return ServersExec(self, self._planner, self.clusters[0], context, requests, watched)

    def forward_exec(
        self, session: Session, requests: Sequence[Request], batch: ReplyBatch, index: int, run: Callable[[], None]
    ) -> bool:
        """Have the compiled forwarder send a transaction; False if it does not."""
        return forward_exec(self.forwarder, session, requests, batch, index, run)

    def exec_rejected(self, session: Session) -> None:
        """Servers get the watched keys with an EXEC only."""

    def recorded(self, session: Session, requests: Sequence[Request]) -> Iterable[tuple[Request, bool]]:
        """Return all queued requests: servers send no monitor lines, and do not know which client tracks keys."""
        return ((request, True) for request in requests)

    def chunks_of(self, request: Request) -> Iterable[Request]:
        """Return a queued request as it is: a long one is not queued."""
        return (request,)

    def command(self, request: Request) -> Command:
        """Return the command of a request that was queued."""
        return self._table.find(request)

    def target_of(self, key: bytes) -> tuple[int, int]:
        """Return the number of a key's state cluster, and its slot."""
        return self.sender.target_of(key)
