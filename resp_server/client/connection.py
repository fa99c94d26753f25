"""One client's connection: it reads requests and writes replies, in short turns, so that other clients do not wait.

A round is one iteration of the event loop. A turn is one call that answers requests of one client. It ends when no
request is left, or when its time or its output is used up. The client's other requests wait for its next turn, and the
server does not read the client's socket meanwhile. While the client does not read its replies, its requests are read,
and wait: most clients send a whole pipeline before they read, and one that cannot send would never read. So one client
makes the server buffer about one turn's output, and requests up to a limit.

The calls within this module:

    data_received, requests_received      input arrives
    └─ _answer_input, _buffer_input       the connection was idle, or earlier requests have no reply yet
       └─ _answer_or_defer                long input waits for a later round if other clients wait
          └─ _take_turn                   one turn; a later one begins as _scheduled_turn
             ├─ _answer_or_step           again and again, by _answer_to_turn_end, until the turn ends
             │  ├─ _answer_batch          requests
             │  └─ _step_stream           the next step of a streamed reply
             └─ _end_turn                 schedules the next turn, reads on, or closes the connection

Without the compiled core, the short requests of all clients are answered together at the end of a round (see
`client.round`). All other requests are answered in turns.

A streamed reply (`ReplyStream`) is computed and sent in steps, because it would take longer than a turn. Its steps and
the requests after it use the same turns.

A push is sent between two replies: at once, or after the streamed reply. It is sent even if the client does not read.
So a client with too much unsent output is disconnected.

The pipeline turns an exception of a request into an error reply. Any other exception, such as one while a push is
encoded, closes only this connection (`net.transports`, `close_on_error`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain
from time import perf_counter_ns
from typing import cast

from resp_server import native
from resp_server.client.fields import ConnectionFields
from resp_server.client.input import ClientInput
from resp_server.client.output import ClientOutput
from resp_server.client.turn_scheduler import LONG_INPUT_BYTES, ScheduledTurn, TurnScheduler
from resp_server.client.unfinished_reply import UnfinishedReply
from resp_server.client.write_queue import WriteQueue
from resp_server.limits import AHEAD_BYTES_MAX
from resp_server.net.transports import isolated, unread_bytes
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.pipeline import Pipeline, release_reply
from resp_server.protocol.errors import GenericError, ProtocolError, QueryBufferError, ReplyError
from resp_server.protocol.replies import (
    IncompleteReply,
    PausedWrite,
    Pending,
    ReplyStream,
    Retry,
    Sliced,
    SlicedEncoder,
)
from resp_server.protocol.request_parser import Request, RequestLimits
from resp_server.session.session import Session

log = logging.getLogger("sparkis.clients")

# Half of the 10 ms for which a client may block others, because the last step or batch may exceed the turn.
TURN_NS_MAX = 5_000_000
# Requests between two readings of the clock (guess: 128 GETs take 0.1 ms).
BATCH_REQUESTS = 128
# Output after which a turn ends (guess: large enough for one write to be cheap per byte).
TURN_BYTES_MAX = 256 * 1024
# While a blocking command waits, up to this size of input is read, to notice that the client disconnects (guess).
BLOCKED_INPUT_BYTES_MAX = 1024 * 1024


class ConnectionHost(ABC):
    """The server that a connection belongs to.

    Attributes:
        add_to_round: Has input answered at the end of the round. None: it is answered as soon as it arrives.
    """

    context: ServerContext
    pipeline: Pipeline
    add_to_round: Callable[[Connection], None] | None
    write_queue: WriteQueue
    turn_scheduler: TurnScheduler

    @abstractmethod
    def admit(self, transport: asyncio.Transport) -> ReplyError | None:
        """Return the error for a client that is not admitted, or None."""

    @abstractmethod
    def session_of(self, transport: asyncio.Transport, session_id: int | None = None) -> Session:
        """Return the session of a new client.

        Args:
            session_id: The id of the session. None: it gets the next one.
        """

    @abstractmethod
    def add(self, connection: Connection) -> None:
        """Register a new client."""

    @abstractmethod
    def remove(self, session_id: int) -> None:
        """Remove a client whose connection ended."""

    @abstractmethod
    def keep_sending_epochs(self, connection: Connection) -> None:
        """Send new epochs to a client until it ends STATE FOLLOW."""


class RateLimitPause(Retry):
    """Stands for a reply while the user is over its rate limit."""


class Connection(ConnectionFields, asyncio.Protocol):
    """A client's connection. Everything happens on the event loop's thread."""

    # Slots cause few cache misses. With thousands of connections, cache misses are most of a request's cost.
    __slots__ = (
        "_pipeline",
        "_server",
        "_server_context",
        "_session_id",
        "_turn_ends_ns",
        "_turn_output",
        "_turn_scheduler",
        "_unauthenticated_since_ms",
        "context",
    )

    input: ClientInput
    output: ClientOutput
    reply: UnfinishedReply
    _transport: asyncio.Transport
    _next_turn: asyncio.Handle | ScheduledTurn | None

    def __init__(self, server: ConnectionHost, session_id: int | None = None) -> None:
        self._server = server
        self._session_id = session_id
        self._server_context = server.context
        self._pipeline = server.pipeline
        self._turn_scheduler = server.turn_scheduler
        self.is_idle = False
        self.reply = UnfinishedReply()
        self._turn_ends_ns = 0
        self._turn_output: list[bytes] | None = None  # None: no turn is running
        self._unauthenticated_since_ms: int | None = None
        self._is_ending = self._is_finishing = False
        self._next_turn = None

    # -- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        server, config = self._server, self._server_context.config
        is_polled = native.sockets is not None and isinstance(transport, native.sockets.Transport)
        self._transport.set_write_buffer_limits(high=config.output_pause_bytes)
        compiled = self._pipeline.compiled
        self.input = ClientInput(self._transport, config.request_limits, compiled, is_polled=is_polled)
        self.output = ClientOutput(self, self._server_context, self._transport, server.write_queue, is_polled=is_polled)
        refusal = server.admit(self._transport)
        if refusal is not None:
            self._transport.write(b"-%b\r\n" % refusal.line)
            self._transport.close()
            return
        self.session = server.session_of(self._transport, self._session_id)
        self.context = CommandContext(self.session, self._server_context)
        self.is_idle = True
        server.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            stats = self._server_context.stats
            stats.input_bytes += len(data)
            stats.reads += not self.input.is_polled  # the poller counts its own reads
            if not self.is_idle:
                self._buffer_input(data)
                return
            self.session.input_bytes += len(data)
            client_input, add_to_round = self.input, self._server.add_to_round
            if add_to_round is None:
                client_input.data = data
                self._answer_input()
            elif client_input.data:  # in the round already; answered now, so that only one input buffer is kept
                client_input.data += data
                self._answer_input()
            else:
                client_input.data = data
                add_to_round(self)
        except Exception as error:
            self.close_on_error(error)

    def requests_received(
        self, requests: list[Request], size_bytes: int, data: bytes, incomplete: IncompleteReply | None
    ) -> None:
        """Handle requests that the compiled core parsed.

        Args:
            size_bytes: Their size.
            data: The input after them.
            incomplete: The incomplete reply to the request before them; None: that was answered.
        """
        try:
            self._server_context.stats.input_bytes += size_bytes + len(data)
            self.session.input_bytes += size_bytes + len(data)
            self.input.requests, self.input.data, self.input.incomplete = requests, data, incomplete
            self._answer_input(size_bytes)
        except Exception as error:
            self.close_on_error(error)

    def _answer_input(self, parsed_bytes: int = 0) -> None:
        """Answer input of a connection that was idle.

        Args:
            parsed_bytes: The size of the requests before the bytes.
        """
        self.is_idle = False
        if self.output.is_writable:
            self._answer_or_defer(parsed_bytes + len(self.input.data))

    def _answer_or_defer(self, size_bytes: int) -> None:
        """Answer input at once if it is short, or if no other client waits; otherwise in a later round."""
        if size_bytes > LONG_INPUT_BYTES and self._turn_scheduler.must_defer:
            self._next_turn = self._turn_scheduler.defer(self._scheduled_turn)
        else:
            self._take_turn()

    def _buffer_input(self, data: bytes) -> None:
        """Buffer input that arrived after unanswered requests; answer it if no turn is scheduled."""
        if self._transport.is_closing():
            return  # not admitted, or closing
        self.session.input_bytes += len(data)
        self.input.add(data)
        if not self.output.is_writable:
            self.input.set_reading(self._reads_ahead)
        elif self.reply.pending is not None or isinstance(self._next_turn, ScheduledTurn):
            self.input.set_reading(self.reply.is_blocking and len(self.input.data) < BLOCKED_INPUT_BYTES_MAX)
        if self._next_turn is None and self.output.is_writable:
            self._answer_or_defer(self.input.unparsed_bytes)

    def eof_received(self) -> bool:
        """Stay open for the replies to earlier requests; not with TLS, where one end closes both."""
        if self.is_idle:
            self.answer_in_own_turn()  # now: the transport may be closed before the round ends
        self._server.write_queue.flush()
        if self.reply.is_blocking:
            # Before the socket is closed: a client that sees the end may send what its command must not pop any more.
            self._server_context.leave(self.session)
            return False
        if self._transport.get_extra_info("sslcontext") is not None:
            return False
        self._is_ending = self._next_turn is not None or not self.output.is_writable
        return self._is_ending

    def pause_writing(self) -> None:
        self.output.is_writable = self.is_idle = False
        self.input.set_reading(self._reads_ahead)

    @property
    def _reads_ahead(self) -> bool:
        """Return whether to buffer input while the client leaves replies unread; a polled transport does so itself."""
        return not (self.input.is_polled or self._is_ending) and self.input.unparsed_bytes < AHEAD_BYTES_MAX

    def resume_writing(self) -> None:
        self.output.is_writable = True
        if self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._scheduled_turn)

    def connection_lost(self, error: Exception | None) -> None:
        if not hasattr(self, "context"):
            return  # not admitted
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._server_context.attempt(self.reply.end_stream)
        if self.reply.pending is not None:
            self.reply.pending.abandon()
        self.is_idle = False
        self.input.clear()
        self.output.pop_delayed_pushes()
        self._server.remove(self.session.id)

    # -- called by the round ------------------------------------------------------------------------------------------

    def send_replies(self, replies: bytes, command: str) -> None:
        """Send the replies to all input. It catches exceptions like `isolated`, without the cost of another call."""
        try:
            self.input.data = b""
            session, server = self.session, self._server_context
            session.last_command, session.active_ms = command, server.view.now_ms
            if session.epoch_feed is not None:
                replies = server.pending_pushes(session.epoch_feed) + replies
                self._server.keep_sending_epochs(self)
            if self._transport.is_closing():  # the client may have disconnected meanwhile
                return
            server.stats.writes += 1
            server.stats.output_bytes += len(replies)
            session.output_bytes += len(replies)
            self._transport.write(replies)
            if len(replies) + server.config.output_pause_bytes > server.config.client_output_buffer_limit["normal"][0]:
                self.output.check_hard_limit()
        except Exception as error:
            self.close_on_error(error)

    @isolated
    def answer_rest(self, out: list[bytes], requests: list[Request], incomplete: IncompleteReply | None) -> None:
        """Send the first replies, then `incomplete`; answer the other requests in turns of this client."""
        self.input.data, self.is_idle, self.input.requests = b"", False, requests
        if self._transport.is_closing():
            release_reply(incomplete)
            return
        if self.session.epoch_feed is not None:
            out.insert(0, self._server_context.pending_pushes(self.session.epoch_feed))
        has_work = incomplete is None or self._start_incomplete(incomplete, out, len(out))
        self.output.send(out)
        if has_work:
            self._take_turn()

    @isolated
    def answer_in_own_turn(self) -> None:
        """Answer input that waits for the round, in turns of this client."""
        if self.input.data and self._next_turn is None and self.output.is_writable:
            self._answer_input()

    # -- called by the server -----------------------------------------------------------------------------------------

    def close_on_error(self, error: Exception) -> None:
        """Close the connection after an exception outside of a request; send the replies so far and an error reply."""
        line = self._server_context.report(error).line
        self.is_idle = False
        self.session.close()
        if self._transport.is_closing():
            return
        try:
            out, self._turn_output = self._turn_output or [], None
            if self.reply.stream is None or not self.reply.stream.has_started:
                self.output.write(b"".join([*out, b"-%b\r\n" % line]))
                self.output.close()
                return
        except Exception as another:
            self._server_context.report(another)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after all replies are sent."""
        self.is_idle = False
        self.output.close()

    @isolated
    def finish(self) -> None:
        """Close the connection after the replies to all requests, also to those that arrive until then.

        A client in MULTI first ends its transaction. A client that is idle now gets the reply to one more request, so
        the server closes the connection after a time (see `is_quiet`).
        """
        if self.is_idle:
            self.answer_in_own_turn()
        self._is_finishing = True
        self.is_idle = False

    @property
    def is_quiet(self) -> bool:
        """Return whether no request waits for its reply, not even in the socket; a blocking command does not count."""
        if self.reply.is_blocking:
            return True
        is_waiting = self._next_turn is not None or self.reply.exists
        return not is_waiting and not self.input.has_requests and unread_bytes(self._transport) == 0

    @property
    def is_following(self) -> bool:
        """Return whether the client follows the server's epochs (STATE FOLLOW)."""
        return self.session.epoch_feed is not None and not self._transport.is_closing()

    @isolated
    def send_epochs(self) -> None:
        """Send new epochs to a client that follows this server, unless a reply is being sent."""
        epoch_feed = self.session.epoch_feed
        is_between = self.reply.stream is None and self.output.is_writable
        if epoch_feed is not None and is_between and self._server_context.change_counter != epoch_feed.change_counter:
            self.output.send([self._server_context.pending_pushes(epoch_feed)])

    @isolated
    def send_invalidations(self) -> None:
        """Send a client's pending invalidations, unless a reply is being sent or much output waits."""
        if self.reply.stream is None and self.output.is_writable and not self._transport.is_closing():
            is_reply_pending = self.reply.pending is not None
            self.output.send([self._server_context.take_invalidations(self.session, is_reply_pending=is_reply_pending)])

    @isolated
    def push(self, frame: bytes) -> None:
        """Send push frames between two replies.

        During a turn of this client the frames precede the next reply. While a reply is streamed or pending, the
        frames are buffered until that reply ends. A client that reads too slowly is disconnected.
        """
        if self._transport.is_closing():
            return
        epoch_feed = self.session.epoch_feed
        if epoch_feed is not None and self._server_context.change_counter != epoch_feed.change_counter:
            frame = self._server_context.pending_pushes(epoch_feed) + frame
        if not self.reply.allows_push:
            self.output.delay(frame)
        elif self.session.pushed is not None:
            self.session.pushed.append(frame)
        elif self._turn_output is not None:
            self._turn_output.append(frame)
        else:
            self.output.write(frame)
        self.output.check_hard_limit()

    @isolated
    def resume(self) -> None:
        """Continue after a CLIENT PAUSE."""
        if self.session.is_paused:
            self.session.is_paused = False
            self._schedule_turn()

    @isolated
    def check(self, now_ms: int, limits: RequestLimits) -> None:
        """Apply new request limits, and check this client's age limits and soft limit; called once a second."""
        self._check_stream_age(now_ms)
        self.input.apply_limits(limits)
        self.output.check_soft_limit(now_ms)
        self._check_authenticated(now_ms)

    def _check_authenticated(self, now_ms: int) -> None:
        """Close the connection of a client that did not authenticate in time."""
        if self.session.is_authenticated:
            self._unauthenticated_since_ms = None
        elif self._unauthenticated_since_ms is None:
            self._unauthenticated_since_ms = now_ms
        elif now_ms - self._unauthenticated_since_ms > self._server_context.config.auth_seconds_max * 1000:
            self.output.abort(f"it did not authenticate within {self._server_context.config.auth_seconds_max} s")

    def _check_stream_age(self, now_ms: int) -> None:
        """End a streamed reply that has pinned its epoch for too long."""
        stream, age_ms = self.reply.stream, self.reply.pinned_ms(now_ms)
        if stream is None or age_ms <= self._server_context.config.sliced_reply_ms_max:
            return
        if stream.has_started:
            self.output.abort(f"a reply in steps was not complete after {age_ms} ms")
        else:
            self.reply.end_stream()
            error = GenericError(
                f"the reply was not complete after {age_ms} ms, the longest time for which it may pin its epoch"
            )
            self.output.send([self._pipeline.error_reply(error), *self.output.pop_delayed_pushes()])

    # -- turns --------------------------------------------------------------------------------------------------------

    @isolated
    def _scheduled_turn(self) -> None:
        self._take_turn()

    def _take_turn(self) -> None:
        """Answer requests for one turn, and send all its replies together."""
        self._next_turn = None
        server, session = self._server_context, self.session
        session.is_paused = False  # first: where this turn ends the pause, each paused client gets another turn
        if self._transport.is_closing() or (server.observation.pause.until_ms and self._wait_for_unpause()):
            return
        now_ns = perf_counter_ns()
        if now_ns >= self._turn_scheduler.fresh_until_ns:
            self._turn_scheduler.refresh(now_ns)
        session.active_ms = server.view.now_ms
        self._turn_ends_ns = now_ns + TURN_NS_MAX
        out: list[bytes] = []
        self._turn_output = out
        has_work = self._answer_or_step(out) and self._answer_to_turn_end(out)
        self._turn_output = None
        if out:
            self.output.send(out)
            if (limiter := self.session.rate_limiter) is not None:
                limiter.consume(0, sum(map(len, out)))
        if has_work or not self.input.is_reading or self._is_ending or session.is_closing:
            self._end_turn(has_work)
        if session.epoch_feed is not None:
            self._server.keep_sending_epochs(self)
        is_waiting = has_work or self.reply.pending is not None
        self.is_idle = not (is_waiting or self.input.unparsed_bytes) and self.input.is_reading
        if self._is_finishing and self.is_idle:  # this was the last reply, unless the client is in a transaction
            self.is_idle = False
            if session.transaction is None and not self._transport.is_closing():
                self.output.close()

    def _answer_to_turn_end(self, out: list[bytes]) -> bool:
        """Answer further batches while the turn lasts; return whether there is more to do."""
        has_work, ends_ns = True, self._turn_ends_ns
        is_paused = self._server_context.observation.pause.delays_all
        while has_work and not is_paused and perf_counter_ns() < ends_ns and sum(map(len, out)) < TURN_BYTES_MAX:
            has_work = self._answer_or_step(out)
            is_paused = self._server_context.observation.pause.delays_all
        return has_work

    def _wait_for_unpause(self) -> bool:
        """Wait while CLIENT PAUSE delays all requests, unless a reply is unfinished; return whether it waits."""
        pause = self._server_context.observation.pause
        left_ms = pause.remaining_ms()
        self.session.is_paused = left_ms > 0 and pause.delays_all and self.reply.allows_pause
        if self.session.is_paused:
            self.is_idle = False
            self.input.set_reading(False)
            self._next_turn = asyncio.get_running_loop().call_later(left_ms / 1000, self._scheduled_turn)
        return self.session.is_paused

    def _end_turn(self, has_work: bool) -> None:
        """End a turn: schedule the next one, read more input, or close the connection."""
        if self._transport.is_closing():
            return
        is_waiting = self.reply.pending is not None
        # As in Redis: no client would get the value that the command pops.
        if self.reply.is_blocking and self._is_ending:
            self._server_context.leave(self.session)
            self.output.close()
            return
        is_writable = self.output.is_writable
        is_closing = self.session.is_closing and self.reply.stream is None and not is_waiting
        if is_closing or (self._is_ending and not has_work and not is_waiting and is_writable):
            self.output.close()
            return
        is_waiting &= not self.reply.is_blocking
        if is_writable:
            self.input.set_reading(not has_work and not is_waiting and not self._is_ending)
        if has_work and is_writable:
            self._next_turn = self._turn_scheduler.defer(self._scheduled_turn)

    def _answer_or_step(self, out: list[bytes]) -> bool:
        """Answer a batch of requests, or send the next step of a reply; return whether there is more to do."""
        unfinished = self.reply
        if unfinished.pending is not None:
            pending, unfinished.pending = unfinished.pending, None
            pending.when_resolved(None)
            if unfinished.stream is None and not isinstance(pending, Retry):
                out.append(self._server_context.take_invalidations(self.session, is_reply_pending=True))
                reply = self._pipeline.later_reply(self.context, pending)
                if not isinstance(reply, bytes):
                    unfinished.begin_stream(reply, self._server_context.view.now_ms)
                    return True
                out.append(reply)
                out += self.output.pop_delayed_pushes()
                out.append(self._server_context.take_invalidations(self.session))
                return not self.session.is_closing
        if unfinished.stream is not None:
            self._step_stream(unfinished.stream, out)
            if unfinished.stream is not None and unfinished.stream.pending is not None:
                self._wait_for(unfinished.stream.pending)
                return False
            if unfinished.stream is None:
                out += self.output.pop_delayed_pushes()
            return unfinished.stream is not None or not self.session.is_closing
        before = len(out)
        has_work = self._answer_batch(out)
        if self.session.epoch_feed is not None and unfinished.stream is None:
            out.insert(before, self._server_context.pending_pushes(self.session.epoch_feed))
        return has_work

    def _answer_batch(self, out: list[bytes]) -> bool:
        """Answer a batch of requests; return whether there is more to do."""
        before, session, client_input = len(out), self.session, self.input
        incomplete, client_input.incomplete = client_input.incomplete, None
        if incomplete is not None:
            return self._start_incomplete(incomplete, out, before)
        if session.is_closing:
            return False
        if client_input.is_unparsed and client_input.answer_or_parse(session, out):
            return client_input.has_requests
        if not session.is_authenticated and (error := client_input.drop_refused()) is not None:
            self._reject_input(error, out)
            return False
        requests, limiter = client_input.requests, self.session.rate_limiter
        if not requests:  # after a reply that was waited for
            incomplete = None
        elif limiter is None:
            incomplete = self._pipeline.answer(self.context, requests, out, self._turn_ends_ns, BATCH_REQUESTS)
        elif allowed := limiter.allowed_requests(BATCH_REQUESTS):
            before_limit = requests[:]
            incomplete = self._pipeline.answer(self.context, requests, out, self._turn_ends_ns, allowed)
            answered = before_limit[: len(before_limit) - len(requests)]
            limiter.consume(len(answered), sum(map(len, chain.from_iterable(answered))))
        else:
            self._wait_for(RateLimitPause(limiter.pause_s()))
            return False
        if incomplete is not None:
            return self._start_incomplete(incomplete, out, before)
        if session.is_closing:
            return False
        if client_input.has_requests:
            return True
        if client_input.error is not None:
            self._reject_input(client_input.error, out)
        return False

    def _start_incomplete(self, incomplete: IncompleteReply, out: list[bytes], before: int) -> bool:
        """Start a streamed reply, or wait for a pending one; return whether there is more to do now."""
        if isinstance(incomplete, Pending):
            self._wait_for(incomplete)
            return False
        self._add_pushes_around_stream(before, out)
        stream = SlicedEncoder(incomplete, self.session.protocol) if isinstance(incomplete, Sliced) else incomplete
        self.reply.begin_stream(stream, self._server_context.view.now_ms)
        return True

    def _add_pushes_around_stream(self, before: int, out: list[bytes]) -> None:
        """Add the pushes of new epochs before and after a streamed reply.

        The reply's own view was opened after the connection's view, so it may be newer. A client must learn of a key
        that changed before it reads the new value, and again after the reply, which may have read the old value.
        """
        epoch_feed = self.session.epoch_feed
        if epoch_feed is not None:
            out.insert(before, self._server_context.pending_pushes(epoch_feed))
            out.append(self._server_context.pushes_around_reply(epoch_feed))
        if self.session.tracking_state is not None:
            self._server_context.renew_all()
            out.append(self._server_context.take_invalidations(self.session, is_reply_pending=True))

    def _reject_input(self, error: ProtocolError, out: list[bytes]) -> None:
        """Reply to a protocol error, and end the session."""
        log.info("closed the connection of %s: %s", self.session.address, error)
        self._server_context.stats.closed_for_input += isinstance(error, QueryBufferError)
        if not isinstance(error, QueryBufferError) and not self.session.replies_suppressed:
            out.append(b"-%b\r\n" % error.line)
        self.session.close()

    def _wait_for(self, pending: Pending) -> None:
        """Schedule the next turn for when a pending reply is resolved, or its time limit is reached.

        Reading continues meanwhile, up to one buffer: most clients send nothing, and pausing costs a system call.
        """
        self.reply.pending = pending
        self.session.is_paused = isinstance(pending, PausedWrite)
        if self._next_turn is not None:
            self._next_turn.cancel()  # a second turn would take the reply before it has come
        if pending.is_resolved:
            self._next_turn = asyncio.get_running_loop().call_soon(self._scheduled_turn)
        else:
            self._next_turn = asyncio.get_running_loop().call_later(pending.seconds_max, self._scheduled_turn)
            pending.when_resolved(self._schedule_turn)

    @isolated
    def _schedule_turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        # One event may resolve the replies of many clients. Their further requests may be long, so they are deferred.
        if self.input.has_requests:
            self._next_turn = self._turn_scheduler.defer(self._scheduled_turn)
        else:
            self._next_turn = asyncio.get_running_loop().call_soon(self._scheduled_turn)

    def _step_stream(self, stream: ReplyStream, out: list[bytes]) -> None:
        try:
            out.append(stream.step())
        except Exception as error:
            reply = self._pipeline.error_reply(error)
            if stream.has_started:
                self._transport.abort()
                self.session.close()
            else:
                out.append(reply)
            self.reply.end_stream()
            return
        if stream.is_done:
            self.reply.end_stream()
        elif stream.buffered_bytes > self._server_context.config.output_limits(is_subscriber=False)[0]:
            self._server_context.stats.closed_for_output += 1
            self.output.abort(f"a reply of more than {stream.buffered_bytes} bytes")
            self.session.close()
