"""The pipeline of a server whose backend sends requests to other processes, and whose replies come later.

The requests of one input buffer, up to a limit, form a batch. They are sent together, and their replies are returned
together, in order. A client's next batch waits for the previous one, which bounds a client's requests in flight.

    CLIENT PAUSE and the backend's delays -> the backend -> else EXEC and WATCH -> else this process' own reply

A request is a coroutine of the backend. It runs at once, up to the first reply that has not arrived, and is no task of
the event loop (see `raw_replies.answers`). An exception costs one client one error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resp_server.command.policy import SpecialCommand
from resp_server.command.table import Command
from resp_server.pipeline.admission import check, delayed_by_pause
from resp_server.pipeline.batch import ReplyBatch
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import end_caching
from resp_server.pipeline.error_replies import error_reply
from resp_server.pipeline.immediate import ImmediateBackend, ImmediatePipeline
from resp_server.pipeline.outcome import RequestOutcome
from resp_server.pipeline.pipeline import pending_reply
from resp_server.pipeline.slow_requests import NEVER_NS
from resp_server.pipeline.transactions import TransactionBackend, Transactions
from resp_server.protocol.replies import IncompleteReply, Pending, ReplyStream, Retry, Sliced, SlicedEncoder
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import Answer, CallbackWait
from resp_server.raw_replies.raw_reply import as_bytes
from resp_server.session.session import Session

if TYPE_CHECKING:
    from resp_server.native.fast_path import FastPath


# A request at the backend. It may wait for the client's next batch, in which the request is the first.
RequestCoroutine = Coroutine[None, ReplyBatch | None, RequestOutcome]


class WaitingRequest(NamedTuple):
    """A request that waits for its client's next batch."""

    request: Request
    coroutine: RequestCoroutine


class Backend(TransactionBackend, Protocol):
    """Answers requests by other processes.

    Args:
        local: Runs the commands that this process answers itself.
        forwarder: The compiled forwarder, which gets all input first; None: there is none.
        orders_by_protocol: There are connections for each version of the protocol, so that a request after HELLO would
            overtake those before it.
    """

    forwarder: Any
    orders_by_protocol: bool

    @property
    def local(self) -> ImmediateBackend: ...

    def new_batch(self, session: Session) -> ReplyBatch:
        """Return a batch for the replies to a client's requests."""

    def send_at_once(self, session: Session, request: Request, batch: ReplyBatch) -> bool:
        """Send a request that needs no checks but those of its form and its client; return whether it was sent."""

    async def answer(self, context: CommandContext, request: Request, batch: ReplyBatch) -> RequestOutcome:
        """Add a request's reply to a batch, if the backend answers it. batch.is_last: later requests have to wait."""

    def check(self, context: CommandContext, command: Command, request: Request) -> None:
        """Raise the error of a request that this backend can neither run nor queue, after the checks of `admission`."""

    def delayed(self, session: Session, request: Request) -> Retry | None:
        """Return what a request waits for before it is handled; None: it is handled now."""

    def may_replicate(self, request: Request) -> bool:
        """Return whether CLIENT PAUSE ... WRITE delays a request."""

    def exec_rejected(self, session: Session) -> None:
        """Handle an EXEC that was refused before it ran."""

    def leave(self, session: Session) -> None:
        """Close what belongs to a client that has left, or sent RESET."""

    def poll(self, poller: Any) -> None:
        """Use the compiled core's epoll for connections to other servers."""

    def stop(self) -> None:
        """Close connections to other servers."""


class BatchedPipeline:
    """Answers requests by a backend whose replies come later."""

    def __init__(self, server: ServerContext, backend: Backend) -> None:
        self._server, self._table, self.backend = server, server.table, backend
        self._local = ImmediatePipeline(server, backend.local, self._check, on_rejected_exec=backend.exec_rejected)
        self._transactions = Transactions(server, backend)
        self._waiting: dict[int, WaitingRequest] = {}  # by client
        self.compiled: FastPath | None = None  # there are no stores
        self.poll: Callable[[Any], None] = backend.poll
        self.stop: Callable[[], None] = backend.stop
        server.proxy.leave = self._leave

    def _check(self, context: CommandContext, command: Command, request: Request) -> None:
        check(context, command, request)
        self.backend.check(context, command, request)

    def _leave(self, session: Session) -> None:
        self._waiting.pop(session.id, None)
        self.backend.leave(session)

    def answer(
        self,
        context: CommandContext,
        requests: list[Request],
        out: list[bytes],
        ends_ns: int = NEVER_NS,
        requests_max: int = sys.maxsize,
    ) -> IncompleteReply | None:
        """Answer requests in order; see `Pipeline`."""
        session, backend, pause = context.session, self.backend, self._server.observation.pause
        batch = backend.new_batch(session)
        answered, later, delayed, protocol = 0, None, None, session.protocol
        for request in requests[:requests_max]:
            answered += 1
            index = len(batch)
            try:
                waiting = self._waiting.pop(session.id, None) if self._waiting else None
                next_batch: ReplyBatch | None
                if waiting is not None and waiting.request is request:
                    coroutine, next_batch = waiting.coroutine, batch
                else:
                    if backend.send_at_once(session, request, batch):
                        if perf_counter_ns() >= ends_ns:
                            break
                        continue
                    delayed = self._delayed(session, request)
                    if delayed is not None:
                        answered -= 1
                        break
                    session.begin_command()
                    coroutine, next_batch = backend.answer(context, request, batch), None  # None starts it
                try:
                    coroutine.send(next_batch)
                except StopIteration as end:
                    if end.value is not RequestOutcome.ANSWERED:
                        later = self._answer_here(context, request, batch, end.value)
                else:
                    self._waiting[session.id] = WaitingRequest(request, coroutine)
                    answered -= 1
                    break
            except Exception as error:  # it fails this request only
                self._reply_error(session, request, batch, index, error)
            end_caching(session, self._table, request)
            must_wait = batch.is_last or (backend.orders_by_protocol and session.protocol != protocol)
            must_wait |= session.is_closing or not session.is_authenticated or pause.delays_all
            is_over = must_wait or perf_counter_ns() >= ends_ns
            if later is not None or is_over:
                break
        session.calls += answered
        del requests[:answered]
        incomplete = self._finish(batch, later, session.protocol, out)
        return delayed if incomplete is None else incomplete

    def _delayed(self, session: Session, request: Request) -> Retry | None:
        backend, delayed = self.backend, None
        if self._server.observation.pause.until_ms:
            delayed = delayed_by_pause(self._server, session, request, backend.may_replicate)
        return delayed or backend.delayed(session, request)

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

    def _reply_error(self, session: Session, request: Request, batch: ReplyBatch, index: int, error: Exception) -> None:
        """Reply the error that a request raised. Within MULTI, EXEC will be refused; an EXEC itself ends."""
        if session.transaction is not None:
            if self._table.special_of(request) is SpecialCommand.EXEC:
                session.end_transaction()
            else:
                session.transaction.is_aborted = True
        batch.refuse(index, error)

    def _answer_here(
        self, context: CommandContext, request: Request, batch: ReplyBatch, outcome: RequestOutcome
    ) -> Sliced | None:
        """Answer a request that the backend does not. Returns a reply in steps, which is sent after the batch."""
        if outcome is RequestOutcome.TRANSACTION:
            outcome = self._transactions.answer(context, request, batch)
        if outcome is RequestOutcome.ANSWERED:
            batch.is_last = True
            return None
        session, reply = context.session, self._local.reply_to(context, request)
        if isinstance(reply, Sliced):
            reply.is_suppressed = session.replies_suppressed
            if reply.is_suppressed and not reply.has_effect:
                reply.release()
                return None
            return reply
        if isinstance(reply, Pending):
            batch.is_last |= session.replies_suppressed  # a later request would end CLIENT REPLY SKIP first
            batch.answer(partial(resolved, context, reply), session.replies_suppressed)
            return None
        assert isinstance(reply, bytes)
        batch.add(b"" if session.replies_suppressed else reply)
        return None

    def later_reply(self, context: CommandContext, pending: Pending) -> bytes | ReplyStream:
        """Return a resolved reply, encoded at once or in steps."""
        return pending.joined() if isinstance(pending, ReplyBatch) else pending_reply(context, pending)

    def error_reply(self, error: Exception) -> bytes:
        """Return an encoded error reply, and count it."""
        return error_reply(self._server, error)


async def resolved(context: CommandContext, pending: Pending) -> Answer:
    """Return a pending reply once it is resolved, or after its time limit an error."""
    await CallbackWait(partial(_call_when_resolved, pending))
    try:
        return Answer(pending_reply(context, pending))
    except Exception as error:
        return Answer(error_reply(context.server, error))


def _call_when_resolved(pending: Pending, then: Callable[[], None]) -> None:
    """Call `then` when a reply is resolved, or at its deadline."""

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
