"""EXEC and WATCH of a client whose queued commands a backend runs.

This process queues the commands. When EXEC arrives, the backend begins an EXEC. It runs after all replies to earlier
requests:

    earlier replies -> prepare -> rights, MONITOR -> answer -> end -> invalidations
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from resp_server.acl.denial import EXEC_DENIAL, EXEC_DENIAL_REASONS
from resp_server.command.policy import AnsweredBy, SpecialCommand
from resp_server.pipeline.admission import may_leave
from resp_server.pipeline.batch import ReplyBatch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import keys_read
from resp_server.pipeline.outcome import RequestOutcome
from resp_server.protocol.errors import ExecAbortError, NoPermError, ReplyError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, ReadSeenEpochs, run_in_steps, run_into
from resp_server.raw_replies.raw_reply import Steps
from resp_server.session.session import Session
from resp_server.session.transaction import Transaction, WatchedVersion

MULTI: Request = (b"MULTI",)
EXEC: Request = (b"EXEC",)
# The longest queued commands that are packed for the forwarder; in longer ones, few words are short enough for it.
FORWARDED_BYTES_MAX = 1 << 18

Watched = dict[tuple[int, bytes], WatchedVersion]


class BackendExec:
    """One EXEC of a client at a backend. It is made when EXEC arrives.

    The client's earlier requests may have no replies then. `prepare` and `answer` are called when they have.
    """

    async def prepare(self) -> None:
        """Wait until the transaction may run."""

    async def answer(self) -> Answer:
        """Run the queued commands; a ReplyError becomes the reply to EXEC."""
        raise NotImplementedError

    def end(self) -> None:
        """Handle the end of the transaction, also after an exception."""

    def has_read_newest(self) -> bool:
        """Return whether no epoch has come since the one that `answer` has read."""
        return True


class TransactionBackend(Protocol):
    """Runs the queued commands of an EXEC, and watches keys."""

    def begin_exec(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, seen: ReadSeenEpochs
    ) -> BackendExec:
        """Begin the EXEC of queued requests. seen: returns the epochs that the client has seen."""

    def forward_exec(
        self,
        session: Session,
        requests: Sequence[Request],
        batch: ReplyBatch,
        index: int,
        run: Callable[[], None],
    ) -> bool:
        """Have the compiled forwarder send a transaction that needs no check any more; False if it does not.

        Args:
            index: The place of EXEC's reply in the batch.
            run: Runs it by the general path.
        """

    def watch(self, context: CommandContext, request: Request, batch: ReplyBatch) -> None:
        """Add the pending reply to a WATCH; ReplyError for keys that cannot be watched."""

    def has_keys(self, session: Session) -> bool:
        """Return whether the backend may have keys in the database that a client has selected."""

    def chunks_of(self, request: Request) -> Iterable[Request]:
        """Split a queued request into chunks, to check the rights to all of its keys."""

    def recorded(self, session: Session, requests: Sequence[Request]) -> Iterable[tuple[Request, bool]]:
        """Return the queued requests that monitors and tracking clients here get; another Redis sends its own.

        Each with whether a client may cache its keys: states alone answer it, under these names.
        """


class Transactions:
    """Answers EXEC and WATCH: one coroutine over any backend."""

    def __init__(self, server: ServerContext, backend: TransactionBackend) -> None:
        self._server, self._backend, self._table = server, backend, server.table
        self._multi_command, self._exec_command = server.table.find(MULTI), server.table.find(EXEC)

    def answer(self, context: CommandContext, request: Request, batch: ReplyBatch) -> RequestOutcome:
        """Add the reply to an EXEC or a WATCH, if the backend runs it."""
        session, transaction = context.session, context.session.transaction
        command, length = self._table.get(request[0]), len(request)
        special = None if command is None else command.policy.special
        is_exec = (
            special is SpecialCommand.EXEC and length == 1 and transaction is not None and not transaction.is_aborted
        )
        is_watch = (
            special is SpecialCommand.WATCH and length > 1 and transaction is None and self._backend.has_keys(session)
        )
        if command is None or not (is_exec or is_watch) or not may_leave(session, command, request):
            return RequestOutcome.LOCAL
        if transaction is not None:
            self._execute(context, transaction, batch)
        else:
            self._backend.watch(context, request, batch)
        return RequestOutcome.ANSWERED

    def _execute(self, context: CommandContext, transaction: Transaction, batch: ReplyBatch) -> None:
        """Add the reply to EXEC to a batch. The session is in no transaction any more."""
        session, name = context.session, self._exec_command.name
        watched, session.last_command = session.watched, name
        session.end_transaction()
        self._server.stats.command_stats(name).calls += 1
        index = batch.expect(session.replies_suppressed)

        def run() -> None:
            run_into(self._answer(context, transaction.requests, watched, batch), batch, index)

        is_checked = session.can_be_forwarded and session.tracking_state is None and not watched
        is_checked = is_checked and transaction.size_bytes <= FORWARDED_BYTES_MAX
        if not is_checked or not self._backend.forward_exec(session, transaction.requests, batch, index, run):
            run()
            return
        for each in (self._multi_command, self._exec_command):  # the forwarder counts them, too
            self._server.stats.command_stats(each.name).uncount()

    async def _answer(
        self, context: CommandContext, requests: Sequence[Request], watched: Watched, batch: ReplyBatch
    ) -> Answer:
        session, tracking_state, tracking = context.session, context.session.tracking_state, self._server.tracking
        keys: list[bytes] = []
        uncached: list[bytes] = []
        run = self._backend.begin_exec(context, requests, watched, batch.seen)
        try:
            await batch.earlier_replies()  # they must not be from a later epoch
            await run.prepare()
            try:
                await run_in_steps(self._before(session, requests, keys, uncached), self._server.clients.defer)
            except ExecAbortError:
                raise
            except ReplyError as error:  # keys may have got other owners since they were queued
                raise ExecAbortError(error) from error
            answer = await run.answer()
        finally:
            run.end()
        if tracking_state is not None:
            # The invalidation of a later epoch than EXEC has read may have been sent before its reply.
            is_newest = run.has_read_newest()
            changed = [key for key in keys if not (is_newest and tracking.has(tracking_state, key))]
            tracking.enqueue_resend(tracking_state, uncached + changed)
        return answer

    def _before(
        self, session: Session, requests: Sequence[Request], keys: list[bytes], uncached: list[bytes]
    ) -> Steps[None]:
        """Check the user's rights to the queued commands, send them to monitors, and collect the keys they read.

        The keys that a client may cache are recorded, too. A change between now and the reply removes them again.
        """
        for each in requests if not session.user.is_unrestricted else ():
            for chunk in self._backend.chunks_of(each):
                denied = session.user.denial(self._table.find(each), chunk)
                if denied is not None:  # the rights changed meanwhile; servers do not know this user
                    raise ExecAbortError(NoPermError(EXEC_DENIAL.format(EXEC_DENIAL_REASONS[denied.reason])))
                yield
        tracking_state = session.tracking_state
        is_observed, monitors = session.is_observed, self._server.observation.monitors
        recorded = self._backend.recorded(session, requests) if is_observed or tracking_state is not None else ()
        for each, may_be_cached in recorded:
            command = self._table.find(each)
            if is_observed and command.answered_without_upstream is AnsweredBy.STATES:
                monitors.record(session, command, each)
            if tracking_state is not None and not tracking_state.is_bcast:
                read = keys_read(command, each)
                if may_be_cached:
                    self._server.tracking.record_keys(tracking_state, read)
                    keys += read
                else:
                    uncached += read
            yield
        if is_observed:
            monitors.record(session, self._exec_command, (self._exec_command.name.encode(),))
