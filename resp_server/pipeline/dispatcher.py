"""From requests to replies: finds the command, checks the request in Redis' order, runs it, and encodes errors.

    unknown command or subcommand -> arity -> NOAUTH -> NOPERM -> MOVED -> READONLY or not served -> LOADING
    -> queue, within a transaction -> run

An exception of a request becomes its reply: a `ReplyError` as it is, any other as `ERR internal error <id>`
(`ServerContext.report`). It does not affect other requests.

If the clients can use the fast path (`Session.can_use_fast_path`), a run of requests about keys with the same command
name is checked once. The requests may be of several clients (see `client.round`). Requests that the compiled core
answers (see `compiled`) do not reach the dispatcher.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

from resp_server.acl.rules import EXEC_DENIAL, EXEC_DENIAL_REASONS, Denial, denial_text
from resp_server.cluster.node_view import NodeView
from resp_server.command.keys import keys_of
from resp_server.command.policy import Role, Split
from resp_server.command.table import Command, CommandTable
from resp_server.metrics.slow_log import batch_entry
from resp_server.metrics.stats import CommandStats
from resp_server.pipeline.compiled import fast_path_of
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.exec_runner import ExecPlan, ExecRunner
from resp_server.pipeline.loading_waits import LOADING
from resp_server.pipeline.long_requests import (
    first_chunk,
    in_chunks,
    may_run_unsplit,
    split_of,
    too_long,
)
from resp_server.pipeline.slow_requests import NEVER_NS
from resp_server.protocol.errors import (
    ExecAbortError,
    GenericError,
    LoadingError,
    NoAuthError,
    NoPermError,
    ReplyError,
    cluster_is_static,
    not_for_subscribers,
    reply_error_of,
)
from resp_server.protocol.replies import PausedWrite, Pending, ReplyStream, Retry, Sliced, encode
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.session.session import RESP2, Session
from resp_server.session.tracking import TrackingState
from resp_server.session.transaction import Transaction
from state_backend.lmdb.damage import as_damage
from state_backend.model.errors import StoreError
from state_backend.model.slots import slot_of

log = logging.getLogger("sparkis.clients")

# Requests of a transaction whose keys are recorded in one step for a tracking client (guess: 2 us a key).
RECORDED_REQUESTS = 256

# Cached spellings of command names (`GET`, `get`, `Get`).
SPELLINGS_MAX = 1024

# A longer reply ends its batch of requests, so that 128 small requests cannot make 128 large replies before the output
# limits are checked (guess).
LARGE_REPLY_BYTES = 16_384

# Requests that a command with a batch argument gets in one call, between two clock readings (guess: 40 us for GETs).
REQUESTS_PER_CALL = 32

# The first words of an HTTP request, sent by a browser on behalf of a web page; closed without a reply, as in Redis.
HTTP_WORDS = (b"post", b"host:")

# A reply that is not complete yet: it is encoded in steps, or pending.
IncompleteReply = Sliced | Pending | ExecRunner

# Flags of commands that a monitor may not send; to Redis it is a kind of replica.
NOT_FOR_MONITORS = frozenset(("readonly", "write", "may_replicate"))

QUEUED = b"+QUEUED\r\n"


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
    """Return the first requests that have the same name, as typed, and the same number of words."""
    name, words = requests[0][0], len(requests[0])
    for at, request in enumerate(requests):
        if request[0] != name or len(request) != words or type(request) is LongRequest:
            return requests[: at or 1]
    return requests


def keys_read(command: Command, request: Request) -> list[bytes]:
    """Return the keys that a request reads, so that its client may cache them."""
    facts = command.facts
    return [key for key, _ in keys_of(facts, request) or ()] if facts.key_specs and "readonly" in facts.flags else []


def release_reply(reply: bytes | IncompleteReply | None) -> None:
    """Release the view of a reply that will not be sent."""
    if isinstance(reply, Sliced):
        reply.release()
    elif isinstance(reply, ExecRunner):
        reply.close()


def end_caching(session: Session, table: CommandTable, request: Request) -> None:
    """End CLIENT CACHING after the next request, or after the transaction."""
    tracking_state = session.tracking_state
    if tracking_state is not None and tracking_state.is_caching_set:
        is_exec = table.role_of(request) is Role.EXEC
        if is_exec or (session.transaction is None and not table.keeps_caching(request)):
            tracking_state.is_caching_set = False


class Dispatcher:
    """Answers the requests of one server."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._table = server.table
        self._stats = server.stats
        self._key_commands: dict[bytes, KeyCommand | None] = {}
        # The compiled core, which gets all input first; None: it is not built.
        self.compiled = fast_path_of(server)

    def poll(self, poller: Any) -> None:
        """Use the compiled core's epoll for connections to other servers."""

    def stop(self) -> None:
        """Close connections to other servers."""

    def answer(
        self,
        context: CommandContext,
        requests: list[Request],
        out: list[bytes],
        ends_ns: int = NEVER_NS,
        requests_max: int = sys.maxsize,
    ) -> IncompleteReply | None:
        """Answer requests in order, until all are answered, a reply is large or incomplete, or time or session end.

        Replies are added to `out`, and answered requests are removed from `requests`. Returns the incomplete reply.
        """
        session, server = context.session, self._server
        at, later, is_over = 0, None, False
        end = len(requests) if len(requests) < requests_max else requests_max
        has_fast_path = not server.loading_waits.may_occur
        while at < end and not is_over:
            request = requests[at]
            key_command = self.key_command(request[0]) if session.can_use_fast_path and has_fast_path else None
            if key_command is None:
                later, is_over = self._answer_one(context, request, out, ends_ns)
                at += not isinstance(later, Retry)
                continue
            session.last_command = key_command.command.name
            run = same_command_prefix(requests[at:end])
            answered, later, is_over = self.answer_run([context] * len(run), key_command, run, out, ends_ns)
            at += answered
        session.calls += at
        del requests[:at]
        return later

    @property
    def answers_rounds(self) -> bool:
        """Return whether the requests of a round are answered together here; the compiled core does that itself."""
        return self.compiled is None

    def key_command(self, name: bytes) -> KeyCommand | None:
        """Return a command that `answer_run` can answer, by its name as typed; None for all others."""
        try:
            return self._key_commands[name]
        except KeyError:
            return self._find_key_command(name)

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
        server, answered, rejected, is_over = self._server, 0, 0, False
        try:
            command.check_arity(run[0])
        except Exception as error:
            command_stats.rejected += len(run)
            out += [self.error_reply(error) for _ in run]
            return len(run), None, False
        started_ns = began_ns = perf_counter_ns()
        while answered < len(run) and not is_over:
            context, batch = contexts[answered], run[answered : answered + REQUESTS_PER_CALL]
            if server.cluster is not None:
                try:
                    batch = self._owned_here(server.cluster, command, contexts[answered:], batch)
                except Exception as error:
                    out.append(self.error_reply(error))
                    answered, rejected = answered + 1, rejected + 1
                    continue
            replies = self._run(context, command, command_stats, batch)
            now_ns = perf_counter_ns()
            last = replies[-1]
            if type(last) is not bytes:
                command_stats.calls += 1
                self._record_time(context, command, command_stats, batch[0], last, now_ns - began_ns)
                break
            if now_ns - began_ns >= server.slow_ns:
                slow = batch_entry(batch[: len(replies)])
                server.slow_requests.record(context.session, command, slow, now_ns - began_ns)
            began_ns = now_ns
            out += replies
            answered += len(replies)
            is_over = now_ns >= ends_ns or len(last) > LARGE_REPLY_BYTES
        else:
            last = None
        command_stats.rejected += rejected
        if answered > rejected:
            command_stats.count(answered - rejected, began_ns - started_ns)
        return (answered, None, is_over) if last is None else (answered + 1, last, True)

    @staticmethod
    def _owned_here(
        cluster: NodeView, command: Command, contexts: Sequence[CommandContext], requests: Sequence[Request]
    ) -> Sequence[Request]:
        """Return the first requests that this node answers; ReplyError if it does not answer the first one."""
        for at, (context, request) in enumerate(zip(contexts, requests, strict=False)):
            try:
                cluster.check(command.facts, first_chunk(request), context.session.is_readonly)
            except ReplyError:
                if at:
                    return requests[:at]
                raise
        return requests

    def _record_time(
        self,
        context: CommandContext,
        command: Command,
        command_stats: CommandStats,
        request: Request,
        reply: bytes | IncompleteReply,
        nanoseconds: int,
    ) -> None:
        """Record how long a request took; for a reply in steps, after the last step."""
        if isinstance(reply, Sliced):
            reply.on_finished = lambda more_ns: self._record_time(
                context, command, command_stats, request, b"", nanoseconds + more_ns
            )
            return
        if context.session.is_observed:
            monitors = self._server.monitors
            if isinstance(reply, ExecRunner):  # after the queued commands
                reply.when_done = lambda: monitors.record(context.session, command, request)
            else:
                monitors.record(context.session, command, request)
        command_stats.nanoseconds += nanoseconds
        command_stats.took[nanoseconds.bit_length()] += 1
        if nanoseconds >= self._server.slow_ns:
            self._server.slow_requests.record(context.session, command, request, nanoseconds)

    def _answer_one(
        self, context: CommandContext, request: Request, out: list[bytes], ends_ns: int
    ) -> tuple[IncompleteReply | None, bool]:
        """Answer one request on the general path; return an incomplete reply, and whether to answer no more now."""
        session = context.session
        if self._server.pause.until_ms and (delayed := self.delayed_by_pause(session, request)) is not None:
            return delayed, True
        session.begin_command()
        is_alone = session.transaction is None
        reply = self.reply_to(context, request)
        if isinstance(reply, bytes) and reply.startswith(LOADING) and is_alone:
            retry = self._server.loading_waits.retry_of(session)
            if retry is not None:
                return retry, True
        end_caching(session, self._table, request)
        if isinstance(reply, (Pending, ExecRunner)):
            return reply, True
        if isinstance(reply, Sliced):
            reply.is_suppressed = session.replies_suppressed
            if reply.has_effect or not reply.is_suppressed:
                return reply, True
            reply.release()
        elif not session.replies_suppressed:
            out.append(reply)
            if len(reply) > LARGE_REPLY_BYTES:
                return None, True
        return None, session.is_closing or self._server.pause.delays_all or perf_counter_ns() >= ends_ns

    def delayed_by_pause(self, session: Session, request: Request) -> PausedWrite | None:
        """Return the wait of a request that CLIENT PAUSE ... WRITE delays; None: the request is answered now.

        As in Redis, these are writes, PUBLISH and scripts, also those that are queued, and an EXEC of such commands.
        """
        remaining_ms = self._server.pause.remaining_ms()
        if not remaining_ms or not session.is_authenticated:
            return None
        is_exec = session.transaction is not None and self._table.role_of(request) is Role.EXEC
        queued = session.transaction.requests if is_exec and session.transaction is not None else ()
        if not any(map(self.may_replicate, (request, *queued))):
            return None
        return PausedWrite(remaining_ms / 1000)

    def may_replicate(self, request: Request) -> bool:
        """Return whether a request is well-formed, and CLIENT PAUSE ... WRITE delays its command."""
        try:
            command = self._table.find(request)
            command.check_arity(request)
        except ReplyError:
            return False
        return command.facts.is_write or command.policy.may_replicate

    def _find_key_command(self, name: bytes) -> KeyCommand | None:
        """Return a command about keys by its name as typed; None for other commands."""
        command, key_command = self._table.get(name), None
        if command is not None and _is_key_command(command, name):
            key_command = KeyCommand(command, self._stats.command_stats(command.name))
        if len(self._key_commands) < SPELLINGS_MAX:
            self._key_commands[name] = key_command
        return key_command

    def reply_to(self, context: CommandContext, request: Request) -> bytes | IncompleteReply:
        """Answer one request on the general path."""
        command = None
        started = perf_counter_ns()
        try:
            command = self._table.find(request)
            context.session.last_command = command.name
            command.check_arity(request)
            self._check(context, command, first_chunk(request))
            transaction = context.session.transaction
            if transaction is not None and command.policy.is_queued:
                if not may_run_unsplit(request):
                    raise too_long(command)
                self._queue(transaction, command, request)
                return QUEUED
            if command.handler is None:
                raise command.refusal()
        except Exception as error:
            return self._rejected(context, command, request, error)
        command_stats = self._stats.command_stats(command.name)
        command_stats.calls += 1
        if context.session.tracking_state is not None and command.policy.role is Role.EXEC:
            self._server.renew_all()  # EXEC's view is at least as new as the invalidations sent before it
        reply: bytes | IncompleteReply = self._run(context, command, command_stats, [request])[0]
        try:
            self._record_time(context, command, command_stats, request, reply, perf_counter_ns() - started)
            if context.session.tracking_state is not None:
                self._track(context.session, context.session.tracking_state, command, request, reply)
        except Exception as error:
            release_reply(reply)
            if context.session.tracking_state is not None:
                context.session.close()  # its cache could be stale without an invalidation
            return self.error_reply(error)
        return reply

    def _track(
        self,
        session: Session,
        tracking_state: TrackingState,
        command: Command,
        request: Request,
        reply: bytes | IncompleteReply,
    ) -> None:
        """Send a client's pending invalidations before its reply, then record the keys that the request or EXEC reads.

        Recording may evict keys. Their invalidations are sent after the reply, so the order matters.
        """
        if tracking_state.redirect and tracking_state.has_pending:
            self._server.clients.push_invalidations(tracking_state)
        elif tracking_state.has_pending:
            self._server.clients.push(session.id, self._server.pending_invalidations(session))
        if not isinstance(reply, ExecRunner):
            if tracking_state.records_reads and may_run_unsplit(request):  # a longer one records keys by chunk
                self._server.tracking.record_keys(tracking_state, keys_read(command, request))
            return
        recording = self._record_exec_keys(tracking_state, reply.requests, is_older=session.read_point is not None)
        if len(reply.requests) > RECORDED_REQUESTS:
            reply.before = recording
        else:
            deque(recording, maxlen=0)

    def _record_exec_keys(
        self, tracking_state: TrackingState, requests: Sequence[Request], *, is_older: bool
    ) -> Iterator[None]:
        """Record the keys that requests read, in steps.

        Args:
            is_older: Than the invalidations that were sent.
        """
        tracking = self._server.tracking
        for at in range(0, len(requests), RECORDED_REQUESTS):
            batch = requests[at : at + RECORDED_REQUESTS]
            keys = [key for each in batch for key in keys_read(self._table.find(each), each)]
            # With OPTIN or OPTOUT, CLIENT CACHING may be queued, so all keys are recorded.
            has_mode = tracking_state.is_optin or tracking_state.is_optout
            if is_older:
                tracking.enqueue_resend(tracking_state, keys)
            elif tracking_state.records_reads or has_mode:
                tracking.record_keys(tracking_state, keys)
            yield

    def _check(self, context: CommandContext, command: Command, request: Request) -> None:
        """Raise the error of a request that may neither run nor be queued, regardless of its arguments."""
        session, cluster, transaction = context.session, self._server.cluster, context.session.transaction
        if command.facts.needs_auth and not session.is_authenticated:
            raise NoAuthError
        if transaction is not None and "no_multi" in command.facts.flags:
            raise GenericError("Command not allowed inside a transaction")
        if not session.user.is_unrestricted:
            self._check_user(context, command, request)
        if cluster is not None:
            cluster.check(command.facts, request, session.is_readonly)
        is_missing = command.handler is None
        if is_missing and command.facts.is_write:
            raise command.refusal()
        if session.is_monitor and NOT_FOR_MONITORS.intersection(command.facts.flags):
            raise GenericError("Replica can't interact with the keyspace")
        is_subscribed = session.subscriptions is not None and session.protocol == RESP2
        if is_subscribed and not command.policy.runs_while_subscribed:
            raise not_for_subscribers(command.name)
        if is_missing:
            if cluster is not None and command.facts.group == "cluster":
                raise cluster_is_static(command.name)
            if not command.is_refused_when_run:
                raise command.refusal()
        if self._server.is_loading:
            needs_state = transaction is not None and transaction.needs_state and command.policy.role is Role.EXEC
            if needs_state or "loading" not in command.facts.flags:
                raise LoadingError

    def _check_user(self, context: CommandContext, command: Command, request: Request) -> None:
        """Raise NoPermError if the user may not run a request."""
        denied: Denial | None = context.session.user.denial(command, request)
        if denied is not None:
            context.record_denial(denied.reason, request[denied.position] if denied.position else command.name.encode())
            raise NoPermError(denial_text(denied.reason, context.session.user.name, command.name))

    def _queue(self, transaction: Transaction, command: Command, request: Request) -> None:
        """Queue a request for EXEC, unless EXEC will be refused anyway."""
        if transaction.is_aborted:
            return
        transaction.add(request)
        transaction.needs_state |= "loading" not in command.facts.flags
        if self._server.cluster is not None and command.facts.key_specs:
            for key, _ in keys_of(command.facts, request) or ():
                transaction.slots[slot_of(key)] = None

    def answer_queued(self, context: CommandContext, request: Request) -> bytes | Sliced | Pending:
        """Run a queued request."""
        started, reply = perf_counter_ns(), None
        try:
            command = self._table.find(request)
            command_stats = self._stats.command_stats(command.name)
            command_stats.calls += 1
            denied: Denial | None = context.session.user.denial(command, request)
            if denied is not None:  # the user's rights were changed meanwhile
                command_stats.failed += 1
                context.record_denial(
                    denied.reason, request[denied.position] if denied.position else command.name.encode()
                )
                return self.error_reply(NoPermError(EXEC_DENIAL.format(EXEC_DENIAL_REASONS[denied.reason])))
            reply = cast(bytes | Sliced | Pending, self._run(context, command, command_stats, [request])[0])
            self._record_time(context, command, command_stats, request, reply, perf_counter_ns() - started)
            return reply
        except Exception as error:
            release_reply(reply)
            return self.error_reply(error)

    def _rejected(self, context: CommandContext, command: Command | None, request: Request, error: Exception) -> bytes:
        if context.session.transaction is not None:
            context.session.transaction.is_aborted = True
        if command is not None:
            self._stats.command_stats(command.name).rejected += 1
            if command.policy.role is Role.EXEC:
                context.session.end_transaction()
                return self.error_reply(ExecAbortError(self._reply_error_for(error)))
        elif request[0].lower() in HTTP_WORDS:
            log.warning(
                "closed the connection of %s: it speaks HTTP; a web page may have caused a browser to do so",
                context.session.address,
            )
            context.session.close()
            return b""
        return self.error_reply(error)

    def _run(
        self, context: CommandContext, command: Command, command_stats: CommandStats, requests: Sequence[Request]
    ) -> list[Any]:
        """Answer the first requests of one command, at least one; an incomplete reply is the only one."""
        try:
            first = requests[0]
            if type(first) is LongRequest and (split := self._split_of(command, first)) is not None:
                return [self._in_chunks(context, command, split, first)]
            replies = command.execute(context, requests)
            kind = type(replies[0])
            if kind is Sliced or kind is Pending:
                return replies
            if kind is ExecPlan:
                return [ExecRunner(context, replies[0], self.answer_queued, self.pending_reply, self.error_reply)]
            protocol = context.session.protocol
            return [
                b"$%d\r\n%b\r\n" % (len(reply), reply) if type(reply) is bytes else encode(reply, protocol)
                for reply in replies
            ]
        except Exception as error:
            command_stats.failed += 1
            if command.policy.role is Role.EXEC and context.session.transaction is not None:
                context.session.end_transaction()
            return [self.error_reply(error)]

    def _split_of(self, command: Command, request: Request) -> Split | None:
        """Return how a long request is split; None: it is not."""
        return split_of(command, request)

    def _in_chunks(self, context: CommandContext, command: Command, split: Split, request: Request) -> Sliced:
        """Answer a long request in chunks."""
        tracking_state = context.session.tracking_state

        def record_keys(chunk: Request) -> None:
            if tracking_state is not None and tracking_state.records_reads:
                self._server.tracking.record_keys(tracking_state, keys_read(command, chunk))

        return in_chunks(context, command, split, request, self._check, record_keys)

    def later_reply(self, context: CommandContext, pending: Pending) -> bytes | ReplyStream:
        """Return a resolved reply, encoded at once or in steps."""
        return self.pending_reply(context, pending)

    def pending_reply(self, context: CommandContext, pending: Pending) -> bytes:
        """Return a resolved reply, or its error, encoded; empty if replies are suppressed."""
        try:
            reply = encode(pending.make(), context.session.protocol)
        except Exception as error:
            reply = self.error_reply(error)
        return b"" if context.session.replies_suppressed else reply

    def error_reply(self, error: Exception) -> bytes:
        """Return an encoded error reply, and count it. An unexpected exception is logged with an id."""
        reply_error = self._reply_error_for(error)
        self._stats.count_error(reply_error.code)
        return b"-%b\r\n" % reply_error.line

    def _reply_error_for(self, error: Exception) -> ReplyError:
        """Return the error reply for an exception."""
        if (damage := as_damage(error)) is not None:
            error = damage
            self._server.keyspace.suspect_stores()
        if isinstance(error, StoreError):
            return reply_error_of(error, is_node=self._server.cluster is not None)
        return error if isinstance(error, ReplyError) else self._server.report(error)
