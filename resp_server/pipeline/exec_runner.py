"""EXEC at a server: pins a view, compares the watched keys with it, and runs the queued commands in short steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from time import perf_counter_ns

from resp_server.command.policy import SpecialCommand
from resp_server.command.table import Command
from resp_server.limits import STEP_NS_MAX
from resp_server.pipeline.context import CommandContext, PinnedContext, ServerContext
from resp_server.pipeline.effects import keys_read, push_invalidations, record_time
from resp_server.pipeline.error_replies import error_reply
from resp_server.pipeline.pipeline import pending_reply, release_reply
from resp_server.pipeline.watch import Watch
from resp_server.protocol.errors import ExecAbortError
from resp_server.protocol.replies import STEP_BYTES_MAX, Pending, Sliced, SlicedEncoder, encode_header
from resp_server.protocol.request_parser import Request
from resp_server.session.session import ReplyMode, Session
from resp_server.session.tracking import TrackingState
from resp_server.session.transaction import Transaction, WatchedVersion
from state_backend.store.keyspace import KeyspaceView

NOTHING_RUN = {2: b"*-1\r\n", 3: b"_\r\n"}

# Requests of a transaction whose keys are recorded in one step for a tracking client (guess: 2 us a key).
RECORDED_REQUESTS = 256

# Runs a queued command, with its effects; returns its reply, or its error.
RunQueued = Callable[[CommandContext, Request], bytes | Sliced | Pending]


def begin_exec(
    context: CommandContext,
    command: Command,
    request: Request,
    transaction: Transaction,
    started_ns: int,
    run_queued: RunQueued,
) -> bytes | ExecRunner:
    """Begin an EXEC, with its effects; return its reply, or its error."""
    session, server = context.session, context.server
    tracking_state, command_stats = session.tracking_state, server.stats.command_stats(command.name)
    command_stats.calls += 1
    reply: bytes | ExecRunner
    try:
        if tracking_state is not None:
            server.renew_all()  # EXEC's view is at least as new as the invalidations sent before it
        view = _open_view(server, session, transaction)
        reply = ExecRunner(context, command, request, transaction.requests, view, run_queued)
    except Exception as error:
        command_stats.failed += 1
        session.end_transaction()
        reply = error_reply(server, error)
    try:
        record_time(context, command, command_stats, request, perf_counter_ns() - started_ns)
        if isinstance(reply, bytes) and session.is_observed:  # others are recorded after the queued commands
            server.observation.monitors.record(session, command, request)
        if tracking_state is not None:
            push_invalidations(context, tracking_state)
            if not isinstance(reply, bytes):
                reply.record_keys(tracking_state)
    except Exception as error:
        release_reply(reply)
        if tracking_state is not None:
            session.close()  # its cache could be stale without an invalidation
        return error_reply(server, error)
    return reply


def _open_view(server: ServerContext, session: Session, transaction: Transaction) -> KeyspaceView:
    """Open the view that all commands of a transaction read; ReplyError if they may not run."""
    read_point = session.read_point
    if server.cluster is not None:
        may_differ = read_point is not None or session.epoch_feed is not None  # for proxies, which follow the epochs
        server.cluster.check_slots(list(transaction.slots), session.is_readonly, may_differ=may_differ)
    if transaction.is_aborted:
        raise ExecAbortError
    return server.pin() if read_point is None else server.pin_at(read_point)


class ExecRunner:
    """Makes the reply to EXEC step by step, as `SlicedEncoder` does for other replies.

    While `pending` is set, the next step waits for it. Replies that a queued CLIENT REPLY suppresses are dropped.

    Args:
        view: The view that the commands read. The runner closes it.
    """

    def __init__(
        self,
        context: CommandContext,
        command: Command,
        request: Request,
        queued: Sequence[Request],
        view: KeyspaceView,
        run_queued: RunQueued,
    ) -> None:
        self._command, self._request, self._requests, self._run_queued = command, request, queued, run_queued
        self._watched = dict(context.session.watched)
        self._context = PinnedContext(context.session, context.server, view)
        self._replies = self._make()
        self._recording: Iterator[None] = iter(())  # of the keys of a long transaction, before the first command
        self.pending: Pending | None = None
        self.pins_epoch = True
        self.buffered_bytes = 0
        self.has_started = False
        self.is_done = False

    def record_keys(self, tracking_state: TrackingState) -> None:
        """Record the keys that the commands read for a tracking client: before the first one runs."""
        self._recording = self._record_in_steps(tracking_state, is_older=self._context.session.read_point is not None)
        if len(self._requests) <= RECORDED_REQUESTS:
            deque(self._recording, maxlen=0)

    def _record_in_steps(self, tracking_state: TrackingState, *, is_older: bool) -> Iterator[None]:
        """Record the keys that the commands read.

        Args:
            is_older: They read an older epoch than that of the invalidations that were sent.
        """
        tracking, table = self._context.server.tracking, self._context.server.table
        for first in range(0, len(self._requests), RECORDED_REQUESTS):
            batch = self._requests[first : first + RECORDED_REQUESTS]
            keys = [key for each in batch for key in keys_read(table.find(each), each)]
            # With OPTIN or OPTOUT, CLIENT CACHING may be queued, so all keys are recorded.
            has_mode = tracking_state.is_optin or tracking_state.is_optout
            if is_older:
                tracking.enqueue_resend(tracking_state, keys)
            elif tracking_state.records_reads or has_mode:
                tracking.record_keys(tracking_state, keys)
            yield

    def step(self) -> bytes:
        """Run the next commands, and return the bytes to send now, maybe none."""
        out: list[bytes] = []
        size, ends_ns = 0, perf_counter_ns() + STEP_NS_MAX
        for reply in self._replies:
            out.append(reply)
            size += len(reply)
            if self.pending is not None or size >= STEP_BYTES_MAX or perf_counter_ns() >= ends_ns:
                return b"".join(out)
        self.is_done = True
        return b"".join(out)

    def close(self) -> None:
        """End the transaction, also an unfinished one. Called once."""
        session = self._context.session
        self._replies.close()
        self._context.pinned.close()
        session.end_transaction()
        if session.is_observed:
            self._context.server.observation.monitors.record(session, self._command, self._request)
        if session.tracking_state is not None:
            session.tracking_state.is_caching_set = False

    def _make(self) -> Generator[bytes]:
        session = self._context.session
        for _ in self._recording:
            yield b""
        for is_changed in self._check_watched():
            if is_changed:
                yield b"" if session.replies_suppressed else NOTHING_RUN[session.protocol]
                return
            yield b""
        session.watched.clear()
        session.read_point = None
        self.has_started = True
        count = len(self._requests)
        yield b"" if session.replies_suppressed else encode_header(list, count, session.protocol)
        for request in self._requests:
            yield from self._answer(request)

    def _check_watched(self) -> Iterator[bool]:
        watch = Watch(self._context.server.process.run_id, self._context.pinned)
        # All databases but the first are always empty.
        marks = ((key, WatchedVersion(*mark)) for (db, key), mark in self._watched.items() if db == 0)
        return (watch.is_changed(key, mark) for key, mark in marks)

    def _answer(self, request: Request) -> Iterator[bytes]:
        session = self._context.session
        reply = self._run_queued(self._context, request)
        if isinstance(reply, Pending):
            self.pending = reply
            yield b""
            self.pending = None
            reply = pending_reply(self._context, reply)
        # A queued CLIENT REPLY SKIP suppresses its own reply, and the one after EXEC.
        is_skip = (
            session.reply_mode is ReplyMode.SKIP_NEXT
            and self._context.server.table.special_of(request) is SpecialCommand.CLIENT_REPLY
        )
        is_suppressed = is_skip or session.reply_mode in (ReplyMode.OFF, ReplyMode.SKIP)
        if not isinstance(reply, Sliced):
            yield b"" if is_suppressed else reply
        elif is_suppressed and not reply.has_effect:
            reply.release()
        else:
            reply.is_suppressed = is_suppressed
            yield from self._in_steps(SlicedEncoder(reply, session.protocol))

    def _in_steps(self, encoder: SlicedEncoder) -> Iterator[bytes]:
        try:
            while not encoder.is_done:
                try:
                    yield encoder.step()
                except Exception as error:
                    if encoder.has_started:
                        raise
                    yield error_reply(self._context.server, error)
                    return
                self.buffered_bytes = encoder.buffered_bytes
        finally:
            self.buffered_bytes = 0
            encoder.close()
