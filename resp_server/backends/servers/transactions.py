"""EXEC and WATCH of a proxy's clients, over any backend: state servers, or these and an upstream.

The proxy queues the commands. When EXEC arrives, the backend begins an EXEC. It runs after all replies to earlier
requests:

    earlier replies -> prepare -> rights, MONITOR -> answer -> end -> invalidations
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from resp_server.acl.rules import EXEC_DENIAL, EXEC_DENIAL_REASONS
from resp_server.backends.servers.batch import ReplyBatch
from resp_server.backends.servers.request_policy import destination_of
from resp_server.backends.servers.requests import ServerRequest
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.command.policy import Destination
from resp_server.command.table import Command
from resp_server.forwarding.answers import Answer, ReplyFuture, SeenEpochs, deliver, in_steps
from resp_server.forwarding.raw_replies import Steps, as_bytes, is_error
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.dispatcher import keys_read
from resp_server.protocol.errors import ExecAbortError, NoPermError, ReplyError
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session
from resp_server.session.transaction import WatchedVersion
from state_backend.model.slots import slot_of

EXEC: Request = (b"EXEC",)

Watched = dict[tuple[int, bytes], WatchedVersion]


class BackendExec:
    """One EXEC of a client at a backend. It is made when EXEC arrives.

    The client's earlier requests may have no replies then. `prepare` and `answer` are called when they have.
    """

    async def prepare(self) -> None:
        """Wait for what the transaction needs before it runs."""

    async def answer(self) -> Answer:
        """Run the queued commands; a ReplyError becomes the reply to EXEC."""
        raise NotImplementedError

    def end(self) -> None:
        """Handle the end of the transaction, also after an exception."""


class TransactionHost(Protocol):
    """Knows the queued commands, and the backend that runs them; implemented by the dispatcher."""

    def command(self, request: Request) -> Command:
        """Return the command of a queued request."""

    def chunks_of(self, request: Request) -> Iterable[Request]:
        """Split a queued request into chunks, to check the rights to all of its keys."""

    def of_states(self, session: Session, requests: Sequence[Request]) -> Iterable[Request]:
        """Return the queued requests that state servers, or this proxy, answer."""

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: SeenEpochs
    ) -> BackendExec:
        """Begin the EXEC of queued requests. seen: returns the epochs that the client has seen."""


class Transactions:
    """Answers EXEC: one coroutine over any backend. host: begins an EXEC there."""

    def __init__(self, host: TransactionHost, server: ServerContext) -> None:
        self._host, self._server = host, server
        self._exec_command = server.table.find(EXEC)

    def execute(self, context: CommandContext, requests: Sequence[Request], batch: ReplyBatch) -> None:
        """Add the reply to EXEC to a batch. The session is in no transaction any more."""
        session, name = context.session, self._exec_command.name
        watched, session.last_command = session.watched, name
        session.end_transaction()
        self._server.stats.command_stats(name).calls += 1
        index = batch.expect(session.replies_suppressed)
        deliver(self._answer(context, requests, watched, batch), batch, index)

    async def _answer(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, batch: ReplyBatch
    ) -> Answer:
        session, tracking_state = context.session, context.session.tracking_state
        is_tracked = tracking_state is not None and not tracking_state.is_bcast
        keys: list[bytes] = []
        run = self._host.begin_exec(context, requests, watched, batch.seen)
        try:
            await batch.earlier_replies()  # they must not be from a later epoch
            await run.prepare()
            try:
                await in_steps(self._before(session, requests, keys), self._server.clients.defer)
            except ExecAbortError:
                raise
            except ReplyError as error:  # keys may have got other owners since they were queued
                raise ExecAbortError(error) from error
            answer = await run.answer()
        finally:
            run.end()
        if tracking_state is not None and is_tracked:
            # EXEC may have read an older epoch than that of the invalidations sent so far.
            self._server.tracking.enqueue_resend(tracking_state, keys)
        return answer

    def _before(self, session: Session, requests: Sequence[Request], keys: list[bytes]) -> Steps[None]:
        """Check the user's rights to the queued commands, send them to monitors, and collect the keys they read."""
        for each in requests if not session.user.is_unrestricted else ():
            for chunk in self._host.chunks_of(each):
                denied = session.user.denial(self._host.command(each), chunk)
                if denied is not None:  # the rights changed meanwhile; servers do not know this user
                    raise ExecAbortError(NoPermError(EXEC_DENIAL.format(EXEC_DENIAL_REASONS[denied.reason])))
                yield
        is_tracked = session.tracking_state is not None and not session.tracking_state.is_bcast
        is_observed, monitors = session.is_observed, self._server.monitors
        for each in self._host.of_states(session, requests) if is_tracked or is_observed else ():
            command = self._host.command(each)
            if is_observed and destination_of(command) is Destination.STATES:
                monitors.record(session, command, each)
            if is_tracked:
                keys += keys_read(command, each)
            yield
        if is_observed:
            monitors.record(session, self._exec_command, (self._exec_command.name.encode(),))


async def watch_states(
    watched: dict[tuple[int, bytes], WatchedVersion], targets: Sequence[tuple[StateCluster, bytes]]
) -> Answer:
    """Request a mark of each key from its owner, and store it in `watched`; answer a WATCH."""
    marks = []
    for cluster, key in targets:
        future = ReplyFuture()
        cluster.send(ServerRequest(pack((b"STATE", b"MARK", key)), slot_of(key), 2, cluster.deadline_s(), future, 0))
        marks.append((key, future))
    error = None
    for key, future in marks:
        mark = as_bytes((await future).reply)
        try:
            if is_error(mark):
                error = error or mark
            else:
                watched[0, key] = WatchedVersion.parse(mark.partition(b"\r\n")[2][:-2])
        except MALFORMED_REPLY_ERRORS as malformed:
            error = error or malformed_reply(malformed)
    return Answer(error or b"+OK\r\n")
