"""The pipeline of a server whose backend replies at once, or with a reply that is made in steps.

    find the command -> admission -> queue, within a transaction -> the backend runs it -> effects

An exception of a request becomes its reply: a `ReplyError` as it is, any other as `ERR internal error <id>`
(`ServerContext.report`). It does not affect other requests.

If the clients can use the fast path (`Session.can_use_fast_path`), a run of requests about keys with the same command
name is checked once. The requests may be of several clients (see `client.round`). Requests that the compiled core
answers do not reach the pipeline.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from resp_server.cluster.node_view import NodeView
from resp_server.command.keys import keys_of
from resp_server.command.policy import SpecialCommand
from resp_server.command.spellings import BySpelling
from resp_server.command.table import Command
from resp_server.metrics.slow_log import batch_entry
from resp_server.metrics.stats import CommandStats
from resp_server.pipeline.admission import Check, delayed_by_pause, may_replicate
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.effects import end_caching, record
from resp_server.pipeline.error_replies import error_reply, reply_error_for
from resp_server.pipeline.exec_runner import begin_exec
from resp_server.pipeline.loading_waits import LOADING
from resp_server.pipeline.long_requests import first_chunk, may_run_unsplit, too_long
from resp_server.pipeline.pipeline import pending_reply
from resp_server.pipeline.slow_requests import NEVER_NS
from resp_server.protocol.errors import ExecAbortError, ReplyError
from resp_server.protocol.replies import IncompleteReply, Pending, ReplyStream, Retry, Sliced
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.session.session import Session
from resp_server.session.transaction import QUEUED
from state_backend.model.slots import slot_of

if TYPE_CHECKING:
    from resp_server.native.fast_path import FastPath

log = logging.getLogger("sparkis.clients")


# A longer reply ends its batch of requests, so that 128 small requests cannot make 128 large replies before the output
# limits are checked (guess).
LARGE_REPLY_BYTES = 16_384

# Requests that a command with a batch argument gets in one call, between two clock readings (guess: 40 us for GETs).
REQUESTS_PER_CALL = 32

# The first words of an HTTP request, sent by a browser on behalf of a web page; closed without a reply, as in Redis.
HTTP_WORDS = (b"post", b"host:")


class ImmediateBackend(Protocol):
    """Runs commands of admitted requests; it replies at once."""

    def answer(
        self, context: CommandContext, command: Command, request: Request, started_ns: int
    ) -> bytes | IncompleteReply:
        """Run a request, with its effects; return its reply, or its error."""

    def answer_queued(self, context: CommandContext, request: Request) -> bytes | Sliced | Pending:
        """Run a queued request of an EXEC, with its effects; return its reply, or its error."""

    def run(
        self, context: CommandContext, command: Command, command_stats: CommandStats, requests: Sequence[Request]
    ) -> list[Any]:
        """Answer the first requests of one command, at least one; an incomplete reply is the only one."""


class KeyCommand(NamedTuple):
    """A command about keys, which does not change the session, and its counters."""

    command: Command
    command_stats: CommandStats


def _is_key_command(command: Command, name: bytes) -> bool:
    """Return whether a command is about keys and does not change the session."""
    facts = command.facts
    is_served = command.handler is not None and b"|" not in name
    return is_served and bool(facts.key_specs) and "pubsub" not in facts.flags


def same_command_prefix(requests: list[Request]) -> list[Request]:
    """Return the first requests that have the same name, as typed, and the same number of arguments."""
    name, size = requests[0][0], len(requests[0])
    for index, request in enumerate(requests):
        if request[0] != name or len(request) != size or type(request) is LongRequest:
            return requests[: index or 1]
    return requests


class ImmediatePipeline:
    """Answers requests by a backend that replies at once.

    Args:
        check: Raises the error of a request that may neither run nor be queued.
        compiled: The compiled core, which gets all input first; None: it is not built.
        on_rejected_exec: Called with the client of an EXEC that is refused before it runs.
    """

    def __init__(
        self,
        server: ServerContext,
        backend: ImmediateBackend,
        check: Check,
        compiled: FastPath | None = None,
        on_rejected_exec: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self._server, self.backend, self._check = server, backend, check
        self._table, self._stats = server.table, server.stats
        self._on_rejected_exec = on_rejected_exec
        self._key_commands = BySpelling(self._find_key_command)
        self.compiled = compiled

    def poll(self, poller: Any) -> None:
        """The backend has no connections."""

    def stop(self) -> None:
        """The backend has no connections."""

    def answer(
        self,
        context: CommandContext,
        requests: list[Request],
        out: list[bytes],
        ends_ns: int = NEVER_NS,
        requests_max: int = sys.maxsize,
    ) -> IncompleteReply | None:
        """Answer requests in order; see `Pipeline`."""
        session, server = context.session, self._server
        answered, later, is_turn_over = 0, None, False
        end = len(requests) if len(requests) < requests_max else requests_max
        may_answer_runs = not server.loading_waits.may_occur
        while answered < end and not is_turn_over:
            request = requests[answered]
            key_command = self.key_command(request[0]) if session.can_use_fast_path and may_answer_runs else None
            if key_command is None:
                later, is_turn_over = self._answer_one(context, request, out, ends_ns)
                answered += not isinstance(later, Retry)
                continue
            session.last_command = key_command.command.name
            run = same_command_prefix(requests[answered:end])
            count, later, is_turn_over = self.answer_run([context] * len(run), key_command, run, out, ends_ns)
            answered += count
        session.calls += answered
        del requests[:answered]
        return later

    def key_command(self, name: bytes) -> KeyCommand | None:
        """Return a command that `answer_run` can answer, by its name as typed; None for all others."""
        return self._key_commands[name]

    def answer_run(
        self,
        contexts: Sequence[CommandContext],
        key_command: KeyCommand,
        run: Sequence[Request],
        out: list[bytes],
        ends_ns: int = NEVER_NS,
    ) -> tuple[int, IncompleteReply | None, bool]:
        """Answer requests of one command, several at once if the command can; each call is timed.

        All their clients can use the fast path and have the same protocol version. Returns how many requests were
        answered, an incomplete reply to the last one, and whether no more may be answered now.

        Args:
            contexts: One for each request. Replies are added to `out`.
        """
        command, command_stats = key_command
        server, answered, rejected, is_turn_over = self._server, 0, 0, False
        try:
            command.check_arity(run[0])
        except Exception as error:
            command_stats.rejected += len(run)
            out += [self.error_reply(error) for _ in run]
            return len(run), None, False
        started_ns = began_ns = perf_counter_ns()
        while answered < len(run) and not is_turn_over:
            context, batch = contexts[answered], run[answered : answered + REQUESTS_PER_CALL]
            if server.cluster is not None:
                try:
                    batch = self._owned_here(server.cluster, command, contexts[answered:], batch)
                except Exception as error:
                    out.append(self.error_reply(error))
                    answered, rejected = answered + 1, rejected + 1
                    continue
            replies = self.backend.run(context, command, command_stats, batch)
            now_ns = perf_counter_ns()
            last = replies[-1]
            if type(last) is not bytes:
                command_stats.calls += 1
                record(context, command, command_stats, batch[0], last, now_ns - began_ns)
                break
            if now_ns - began_ns >= server.observation.slow_ns:
                slow = batch_entry(batch[: len(replies)])
                server.observation.slow_requests.record(context.session, command, slow, now_ns - began_ns)
            began_ns = now_ns
            out += replies
            answered += len(replies)
            is_turn_over = now_ns >= ends_ns or len(last) > LARGE_REPLY_BYTES
        else:
            last = None
        command_stats.rejected += rejected
        if answered > rejected:
            command_stats.count(answered - rejected, began_ns - started_ns)
        return (answered, None, is_turn_over) if last is None else (answered + 1, last, True)

    @staticmethod
    def _owned_here(
        cluster: NodeView, command: Command, contexts: Sequence[CommandContext], requests: Sequence[Request]
    ) -> Sequence[Request]:
        """Return the first requests that this node answers; ReplyError if it does not answer the first one."""
        for index, (context, request) in enumerate(zip(contexts, requests, strict=False)):
            try:
                cluster.check(command.facts, first_chunk(request), context.session.is_readonly)
            except ReplyError:
                if index:
                    return requests[:index]
                raise
        return requests

    def _answer_one(
        self, context: CommandContext, request: Request, out: list[bytes], ends_ns: int
    ) -> tuple[IncompleteReply | None, bool]:
        """Answer one request on the general path; return an incomplete reply, and whether to answer no more now."""
        session = context.session
        if self._server.observation.pause.until_ms and (delayed := self._delayed(session, request)) is not None:
            return delayed, True
        session.begin_command()
        is_alone = session.transaction is None
        reply = self.reply_to(context, request)
        if isinstance(reply, bytes) and reply.startswith(LOADING) and is_alone:
            retry = self._server.loading_waits.retry_of(session)
            if retry is not None:
                return retry, True
        end_caching(session, self._table, request)
        if isinstance(reply, Sliced):
            reply.is_suppressed = session.replies_suppressed
            if reply.has_effect or not reply.is_suppressed:
                return reply, True
            reply.release()
        elif not isinstance(reply, bytes):
            return reply, True
        elif not session.replies_suppressed:
            out.append(reply)
            if len(reply) > LARGE_REPLY_BYTES:
                return None, True
        is_over = session.is_closing or not session.is_authenticated or self._server.observation.pause.delays_all
        return None, is_over or perf_counter_ns() >= ends_ns

    def _delayed(self, session: Session, request: Request) -> Retry | None:
        return delayed_by_pause(self._server, session, request, lambda each: may_replicate(self._table, each))

    def _find_key_command(self, name: bytes) -> KeyCommand | None:
        """Return a command about keys by its name as typed; None for other commands."""
        command = self._table.get(name)
        if command is None or not _is_key_command(command, name):
            return None
        return KeyCommand(command, self._stats.command_stats(command.name))

    def reply_to(self, context: CommandContext, request: Request) -> bytes | IncompleteReply:
        """Answer one request on the general path."""
        command = None
        started_ns = perf_counter_ns()
        try:
            command = self._table.find(request)
            context.session.last_command = command.name
            command.check_arity(request)
            self._check(context, command, first_chunk(request))
            transaction = context.session.transaction
            if transaction is not None and command.policy.is_queued:
                if not may_run_unsplit(request):
                    raise too_long(command)
                needs_state = "loading" not in command.facts.flags
                transaction.queue(request, needs_state=needs_state, slots=self._slots_of(command, request))
                return QUEUED
            if command.handler is None:
                raise command.refusal()
        except Exception as error:
            return self._rejected(context, command, request, error)
        if transaction is not None and command.policy.special is SpecialCommand.EXEC:
            return begin_exec(context, command, request, transaction, started_ns, self.backend.answer_queued)
        return self.backend.answer(context, command, request, started_ns)

    def _slots_of(self, command: Command, request: Request) -> Iterable[int]:
        """Return the slots of a request's keys at a node of a cluster; elsewhere none is needed."""
        if self._server.cluster is None or not command.facts.key_specs:
            return ()
        return [slot_of(key) for key, _ in keys_of(command.facts, request) or ()]

    def _rejected(self, context: CommandContext, command: Command | None, request: Request, error: Exception) -> bytes:
        if context.session.transaction is not None:
            context.session.transaction.is_aborted = True
        if command is not None:
            self._stats.command_stats(command.name).rejected += 1
            if command.policy.special is SpecialCommand.EXEC:
                self._on_rejected_exec(context.session)
                context.session.end_transaction()
                return self.error_reply(ExecAbortError(reply_error_for(self._server, error)))
        elif request[0].lower() in HTTP_WORDS:
            log.warning(
                "closed the connection of %s: it speaks HTTP; a web page may have caused a browser to do so",
                context.session.address,
            )
            context.session.close()
            return b""
        return self.error_reply(error)

    def later_reply(self, context: CommandContext, pending: Pending) -> bytes | ReplyStream:
        """Return a resolved reply, encoded."""
        return pending_reply(context, pending)

    def error_reply(self, error: Exception) -> bytes:
        """Return an encoded error reply, and count it."""
        return error_reply(self._server, error)
