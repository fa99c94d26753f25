"""One client's connection: it reads requests and writes replies, in short turns, so that other clients do not wait.

A round is one iteration of the event loop. A turn is one call that answers requests of one client. It ends when no
request is left, or when its time or its output is used up. The client's other requests wait for its next turn, and the
server does not read the client's socket meanwhile. The server does not read it either while the client does not read
its replies. So one client makes the server buffer at most one input buffer and about one turn's output.

Without the compiled core, the short requests of all clients are answered together at the end of a round (see
`client.round`). All other requests are answered in turns.

A streamed reply (`ReplyStream`) is computed and sent in steps, because it would take longer than a turn. Its steps and
the requests after it use the same turns.

A push is sent between two replies: at once, or after the streamed reply. It is sent even if the client does not read.
So a client with too much unsent output is disconnected.

The dispatcher turns an exception of a request into an error reply. Any other exception, such as one while a push is
encoded, closes only this connection (`net.transports`, `close_on_error`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from itertools import chain
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol, cast

from resp_server import native
from resp_server.acl.rate_limits import RateLimiter
from resp_server.client.round import Round
from resp_server.client.turn_scheduler import LONG_INPUT_BYTES, ScheduledTurn, TurnScheduler
from resp_server.client.write_queue import WriteQueue
from resp_server.net.transports import isolated, unread_bytes
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.pipeline.dispatcher import Dispatcher, IncompleteReply, release_reply
from resp_server.protocol.errors import GenericError, ProtocolError, QueryBufferError, ReplyError
from resp_server.protocol.replies import PausedWrite, Pending, ReplyStream, Retry, Sliced, SlicedEncoder
from resp_server.protocol.request_parser import Request, RequestLimits, RequestParser
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
# An incomplete request up to this size is buffered for the compiled core; the parser takes a longer one (guess).
PARTIAL_BYTES_MAX = 32 * 1024


if TYPE_CHECKING or native.core is None:

    class ConnectionFields:
        """The fields of a connection that its transport reads with each request; C fields, if the core is built.

        Args:
            is_idle: The client is admitted, no output is unsent, and all input was answered or waits for the round's
                end.
        """

        __slots__ = ("is_idle", "session")
        is_idle: bool
        session: Session

else:
    ConnectionFields = native.core.ConnectionFields


class ConnectionHost(Protocol):
    """The server that a connection belongs to.

    Args:
        round: None: input is answered as soon as it arrives.
    """

    context: ServerContext
    dispatcher: Dispatcher
    round: Round | None
    write_queue: WriteQueue
    turn_scheduler: TurnScheduler

    def admit(self, transport: asyncio.Transport) -> ReplyError | None:
        """Return the error for a client that is not admitted, or None."""

    def session_of(self, transport: asyncio.Transport, session_id: int | None = None) -> Session:
        """Return the session of a new client;

        Args:
            session_id: None for the next id.
        """

    def add(self, connection: Connection) -> None:
        """Register a new client."""

    def remove(self, session_id: int) -> None:
        """Remove a client whose connection ended."""

    def keep_sending_epochs(self, connection: Connection) -> None:
        """Send new epochs to a client until it ends STATE FOLLOW."""


class RateLimitPause(Retry):
    """Stands for a reply while the user is over its rate limit."""


class DelegatedReplies(Pending):
    """Stands for replies that a proxy's forwarder sends (see `Connection.delegate_replies`)."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda: None)


class NoTurn(asyncio.Handle):
    """Stands for the next turn while nothing is scheduled, so there is nothing to cancel."""

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        pass


DELEGATED_REPLIES, NO_TURN = DelegatedReplies(), NoTurn()


class Connection(ConnectionFields, asyncio.Protocol):
    """A client's connection. Everything happens on the event loop's thread."""

    # Slots cause few cache misses. With thousands of connections, cache misses are most of a request's cost.
    __slots__ = (
        "_compiled",
        "_delayed_push_bytes",
        "_delayed_pushes",
        "_dispatcher",
        "_has_partial_request",
        "_is_ending",
        "_is_finishing",
        "_is_polled",
        "_is_reading",
        "_is_writable",
        "_loop",
        "_next_turn",
        "_over_soft_limit_since_ms",
        "_parser",
        "_pending",
        "_requests",
        "_round",
        "_server",
        "_server_context",
        "_session_id",
        "_stream",
        "_stream_since_ms",
        "_transmit",
        "_transport",
        "_turn_ends_ns",
        "_turn_output",
        "_turn_scheduler",
        "_unauthenticated_since_ms",
        "_write_queue",
        "context",
        "input",
        "unsent_bytes",
    )

    _transport: asyncio.Transport

    def __init__(self, server: ConnectionHost, session_id: int | None = None) -> None:
        self._server = server
        self._session_id = session_id
        self._server_context = server.context
        self._dispatcher = server.dispatcher
        self._write_queue = server.write_queue
        self._turn_scheduler = server.turn_scheduler
        self._round = server.round
        self._loop = asyncio.get_running_loop()
        self._requests: list[Request] = []
        self.input = b""  # received after `_requests`, not parsed yet
        self._has_partial_request = False  # the compiled core found that `input` is an incomplete request
        self.is_idle = False
        self._stream: ReplyStream | None = None
        self._stream_since_ms = 0
        self._turn_ends_ns = 0
        self._pending: Pending | None = None
        self._turn_output: list[bytes] | None = None  # None: no turn is running
        self._delayed_pushes: list[bytes] = []  # they wait for the end of the current reply
        self._delayed_push_bytes = 0
        self.unsent_bytes = 0  # in the write queue
        self._over_soft_limit_since_ms: int | None = None
        self._unauthenticated_since_ms: int | None = None
        self._is_writable = True
        self._is_reading = True
        self._is_ending = False  # the client has sent its end of stream
        self._is_finishing = False  # this server ends
        self._next_turn: asyncio.Handle | ScheduledTurn | None = None

    # -- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_polled = native.sockets is not None and isinstance(transport, native.sockets.Transport)
        # Where the transport does not send at the end of the round, the write queue does.
        self._transmit = self._transport.write if self._is_polled else partial(self._write_queue.add, self)
        config = self._server_context.config
        self._transport.set_write_buffer_limits(high=config.output_pause_bytes)
        refusal = self._server.admit(self._transport)
        if refusal is not None:
            self._transport.write(b"-%b\r\n" % refusal.line)
            self._transport.close()
            return
        self.session = self._server.session_of(self._transport, self._session_id)
        self.context = CommandContext(self.session, self._server_context)
        self._parser = RequestParser(config.request_limits, not self.session.is_authenticated, in_chunks=True)
        self._compiled = self._dispatcher.compiled
        self.is_idle = True
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            stats = self._server_context.stats
            stats.input_bytes += len(data)
            stats.reads += not self._is_polled  # the poller counts its own reads
            if not self.is_idle:
                self._buffer_input(data)
                return
            self.session.input_bytes += len(data)
            if self._round is None:
                self.input = data
                self._answer_input()
            elif self.input:  # in the round already; answered now, so that only one input buffer is kept
                self.input += data
                self._answer_input()
            else:
                self.input = data
                self._round.add(self)
        except Exception as error:
            self.close_on_error(error)

    def requests_received(self, requests: list[Request], size_bytes: int, data: bytes) -> None:
        """Handle requests that the compiled core parsed.

        Args:
            size_bytes: Their size.
            data: The input after them.
        """
        try:
            self._server_context.stats.input_bytes += size_bytes + len(data)
            self.session.input_bytes += size_bytes + len(data)
            self._requests, self.input = requests, data
            self._answer_input(size_bytes)
        except Exception as error:
            self.close_on_error(error)

    def _answer_input(self, parsed_bytes: int = 0) -> None:
        """Answer input of a connection that was idle.

        Args:
            parsed_bytes: The size of the requests before `input`.
        """
        self.is_idle = False
        if self._is_writable:
            self._answer_or_defer(parsed_bytes + len(self.input))

    def _answer_or_defer(self, size_bytes: int) -> None:
        """Answer input at once if it is short, or if no other client waits; otherwise in a later round."""
        if size_bytes > LONG_INPUT_BYTES and self._turn_scheduler.must_defer:
            self._next_turn = self._turn_scheduler.defer(self._turn)
        else:
            self._take_turn()

    def _buffer_input(self, data: bytes) -> None:
        """Buffer input that arrived after unanswered requests; answer it if no turn is scheduled."""
        if self._transport.is_closing():
            return  # not admitted, or closing
        self.session.input_bytes += len(data)
        self.input += data
        self._has_partial_request = False
        if self._pending is not None or isinstance(self._next_turn, ScheduledTurn):
            self._set_reading(self.is_blocked and len(self.input) < BLOCKED_INPUT_BYTES_MAX)
        if self._next_turn is None and self._is_writable:
            self._answer_or_defer(self._parser.buffered_bytes + len(self.input))

    def eof_received(self) -> bool:
        """Stay open for the replies to earlier requests; not with TLS, where one end closes both."""
        if self.is_idle:
            self.answer_alone()  # now: the transport may be closed before the round ends
        self._write_queue.flush()
        if self.is_blocked:
            # Before the socket is closed: a client that sees the end may send what its command must not pop any more.
            self._server_context.leave(self.session)
            return False
        if self._transport.get_extra_info("sslcontext") is not None:
            return False
        self._is_ending = self._next_turn is not None or not self._is_writable
        return self._is_ending

    def pause_writing(self) -> None:
        self._is_writable = self.is_idle = False
        self._set_reading(False)

    def resume_writing(self) -> None:
        self._is_writable = True
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def connection_lost(self, error: Exception | None) -> None:
        if not hasattr(self, "context"):
            return  # not admitted
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._server_context.attempt(self._end_stream)
        if self._pending is not None:
            self._pending.abandon()
        self.is_idle = False
        self._requests, self.input = [], b""
        self._delayed_pushes, self._delayed_push_bytes = [], 0
        self._server.remove(self.session.id)

    # -- called by the round ------------------------------------------------------------------------------------------

    def send_replies(self, replies: bytes, command: str) -> None:
        """Send the replies to all input. It catches exceptions like `isolated`, without the cost of another call."""
        try:
            self.input = b""
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
                self._check_output()
        except Exception as error:
            self.close_on_error(error)

    @isolated
    def answer_rest(self, out: list[bytes], requests: list[Request], incomplete: IncompleteReply | None) -> None:
        """Send the first replies, then `incomplete`; answer the other requests in turns of this client."""
        self.input, self.is_idle, self._requests = b"", False, requests
        if self._transport.is_closing():
            release_reply(incomplete)
            return
        if self.session.epoch_feed is not None:
            out.insert(0, self._server_context.pending_pushes(self.session.epoch_feed))
        has_more = incomplete is None or self._start_incomplete(incomplete, out, len(out))
        self._send(out)
        if has_more:
            self._take_turn()

    @isolated
    def answer_alone(self) -> None:
        """Answer input that waits for the round, in turns of this client."""
        if self.input and self._next_turn is None and self._is_writable:
            self._answer_input()

    # -- called by the server -----------------------------------------------------------------------------------------

    @property
    def output_bytes(self) -> int:
        """How many bytes wait to be sent."""
        return self._transport.get_write_buffer_size() + self._delayed_push_bytes + self.unsent_bytes

    def close_on_error(self, error: Exception) -> None:
        """Close the connection after an exception outside of a request; send the replies so far and an error reply."""
        line = self._server_context.report(error).line
        self.is_idle = False
        self.session.close()
        if self._transport.is_closing():
            return
        try:
            out, self._turn_output = self._turn_output or [], None
            if self._stream is None or not self._stream.has_started:
                self._write(b"".join([*out, b"-%b\r\n" % line]))
                self._close_transport()
                return
        except Exception as another:
            self._server_context.report(another)
        self._transport.abort()

    def send_now(self, reply: bytes) -> None:
        """Send bytes from the write queue. It catches exceptions like `isolated`, without the cost of another call."""
        try:
            self.unsent_bytes -= len(reply)
            if not self._transport.is_closing():  # the client may have disconnected meanwhile
                self._server_context.stats.writes += 1
                self._transport.write(reply)
        except Exception as error:
            self.close_on_error(error)

    def close(self) -> None:
        """Close the connection after all replies are sent."""
        self.is_idle = False
        self._close_transport()

    @isolated
    def finish(self) -> None:
        """Close the connection after the replies to all requests, also to those that arrive until then.

        A client in MULTI first ends its transaction. A client that is idle now gets the reply to one more request, so
        the server closes the connection after a time (see `is_quiet`).
        """
        if self.is_idle:
            self.answer_alone()
        self._is_finishing = True
        self.is_idle = False

    @property
    def is_quiet(self) -> bool:
        """Return whether no request waits for its reply, not even in the socket; a blocking command does not count."""
        if self.is_blocked:
            return True
        is_waiting = self._next_turn is not None or self._pending is not None or self._stream is not None
        return not is_waiting and not self._has_more() and unread_bytes(self._transport) == 0

    def abort(self, reason: str) -> None:
        """Close the connection now, without sending more; `reason` is logged."""
        # A closing TLS connection waits for the client's close_notify. Nothing is lost if it is closed without one.
        level = logging.DEBUG if self._transport.is_closing() and not self.output_bytes else logging.WARNING
        log.log(level, "cut the connection of %s: %s", self.session.address, reason)
        self.is_idle = False
        self._transport.abort()

    @property
    def is_following(self) -> bool:
        """Return whether the client follows the server's epochs (STATE FOLLOW)."""
        return self.session.epoch_feed is not None and not self._transport.is_closing()

    @isolated
    def send_epochs(self) -> None:
        """Send new epochs to a client that follows this server, unless a reply is being sent."""
        epoch_feed = self.session.epoch_feed
        is_between = self._stream is None and self._is_writable
        if epoch_feed is not None and is_between and self._server_context.change_counter != epoch_feed.change_counter:
            self._send([self._server_context.pending_pushes(epoch_feed)])

    @isolated
    def send_invalidations(self) -> None:
        """Send a client's pending invalidations, unless a reply is being sent or much output waits."""
        if self._stream is None and self._is_writable and not self._transport.is_closing():
            self._send([self._server_context.pending_invalidations(self.session, is_within=self._pending is not None)])

    @property
    def has_all_replies(self) -> bool:
        """Whether all replies that the client waits for have arrived, and are sent in the next turn."""
        pending = self._pending
        return pending is not None and pending.is_resolved and not isinstance(pending, Retry)

    @property
    def is_writable(self) -> bool:
        """Return whether the client reads its output."""
        return self._is_writable

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
        is_between = self._pending is None or self.is_blocked or isinstance(self._pending, Retry)
        if self._stream is not None or not is_between:
            self._delayed_pushes.append(frame)
            self._delayed_push_bytes += len(frame)
        elif self._turn_output is not None:
            self._turn_output.append(frame)
        else:
            self._write(frame)
        self._check_output()

    @isolated
    def resume(self) -> None:
        """Continue after a CLIENT PAUSE."""
        if self.session.is_paused:
            self.session.is_paused = False
            self._schedule_turn()

    @isolated
    def check_authenticated(self, now_ms: int) -> None:
        """Close the connection of a client that did not authenticate in time."""
        if self.session.is_authenticated:
            self._unauthenticated_since_ms = None
        elif self._unauthenticated_since_ms is None:
            self._unauthenticated_since_ms = now_ms
        elif now_ms - self._unauthenticated_since_ms > self._server_context.config.auth_seconds_max * 1000:
            self.abort(f"it did not authenticate within {self._server_context.config.auth_seconds_max} s")

    @isolated
    def check_age(self, now_ms: int) -> None:
        """End a streamed reply that has pinned its epoch for too long."""
        age_ms = now_ms - self._stream_since_ms
        if (
            self._stream is None
            or age_ms <= self._server_context.config.sliced_reply_ms_max
            or not self._stream.pins_epoch
        ):
            return
        if self._stream.has_started:
            self.abort(f"a reply in steps was not complete after {age_ms} ms")
        else:
            self._end_stream()
            error = GenericError(
                f"the reply was not complete after {age_ms} ms, the longest time for which it may pin its epoch"
            )
            self._send([self._dispatcher.error_reply(error), *self._pop_delayed_pushes()])

    # -- called by a proxy's compiled forwarder ----------------------------------------------------------------------

    @property
    def is_polled(self) -> bool:
        """Return whether the compiled core polls this connection's socket."""
        return self._is_polled

    @property
    def transmit(self) -> Callable[[bytes], None]:
        """The function that sends bytes at the end of the round; its caller counts them."""
        return self._transmit

    def delegate_replies(self, rest: bytes) -> None:
        """Let the forwarder send the replies until `end_delegation`.

        Args:
            rest: The input after the requests that it forwards.
        """
        self.is_idle = False
        self._pending, self._next_turn, self.input = DELEGATED_REPLIES, NO_TURN, rest

    @property
    def is_delegated(self) -> bool:
        """Return whether the forwarder sends the replies now."""
        return self._pending is DELEGATED_REPLIES

    def end_delegation(self) -> bool:
        """Answer requests here again; return False if the client has disconnected."""
        self._pending = self._next_turn = None
        return not self._transport.is_closing()

    @property
    def is_drained(self) -> bool:
        """Return whether no input or push is buffered, the client reads its output, and the server is not ending."""
        is_open = self._is_reading and self._is_writable and not self._is_finishing
        return is_open and not (self.input or self._delayed_pushes or self._is_ending)

    @property
    def takes_requests(self) -> bool:
        """Return whether the forwarder may answer more requests: the client reads its output, and no side is ending."""
        return self._is_writable and not (self._is_ending or self._is_finishing)

    def send_delayed_pushes(self) -> None:
        """Send the pushes that were delayed until the end of a reply."""
        if self._delayed_pushes:
            self._send(self._pop_delayed_pushes())

    def take_input(self) -> bytes:
        """Return the unanswered input, and clear it."""
        data, self.input = self.input, b""
        return data

    def await_input(self) -> None:
        """Read more input, unless buffered input has to be answered first."""
        self._set_reading(not self.input)

    def answer_soon(self, data: bytes) -> None:
        """Answer this input, and then the buffered input, in the client's next turn."""
        self.input = data + self.input
        if self._is_writable:
            self._next_turn = self._loop.call_soon(self._turn)

    def send_stream(self, reply: ReplyStream) -> None:
        """Send a streamed reply, in turns of this client."""
        self._stream = reply
        self._next_turn = self._loop.call_soon(self._turn)

    @property
    def is_blocked(self) -> bool:
        """Return whether a blocking command of the client waits; all replies before it are sent."""
        return self._pending is not None and self._pending.is_blocking

    # -- turns --------------------------------------------------------------------------------------------------------

    @isolated
    def _turn(self) -> None:
        self._take_turn()

    def _take_turn(self) -> None:
        """Answer requests for one turn, and send all its replies together."""
        self._next_turn = None
        server, session = self._server_context, self.session
        session.is_paused = False  # first: where this turn ends the pause, each paused client gets another turn
        if self._transport.is_closing() or (server.paused_until_ms and self._wait_for_unpause()):
            return
        now_ns = perf_counter_ns()
        if now_ns >= self._turn_scheduler.fresh_until_ns:
            self._turn_scheduler.refresh(now_ns)
        session.active_ms = server.view.now_ms
        self._turn_ends_ns = now_ns + TURN_NS_MAX
        out: list[bytes] = []
        self._turn_output = out
        has_more = self._advance(out) and self._advance_to_turn_end(out)
        self._turn_output = None
        if out:
            self._send(out)
            if (limiter := self._rate_limiter) is not None:
                limiter.consume(0, sum(map(len, out)))
        if has_more or not self._is_reading or self._is_ending or self.session.is_closing:
            self._end_turn(has_more)
        if self.session.epoch_feed is not None:
            self._server.keep_sending_epochs(self)
        is_waiting = has_more or self._pending is not None
        self.is_idle = not (is_waiting or self.input or self._parser.buffered_bytes) and self._is_reading
        if self._is_finishing and self.is_idle:
            self._finish_after_reply()

    def _finish_after_reply(self) -> None:
        """Close the connection after its last reply, unless the client is in a transaction."""
        self.is_idle = False
        if self.session.transaction is None and not self._transport.is_closing():
            self._close_transport()

    def _advance_to_turn_end(self, out: list[bytes]) -> bool:
        """Answer further batches while the turn lasts; return whether there is more to do."""
        has_more, ends_ns = True, self._turn_ends_ns
        is_paused = self._server_context.pauses_all
        while has_more and not is_paused and perf_counter_ns() < ends_ns and sum(map(len, out)) < TURN_BYTES_MAX:
            has_more = self._advance(out)
            is_paused = self._server_context.pauses_all
        return has_more

    def _wait_for_unpause(self) -> bool:
        """Wait while CLIENT PAUSE delays all requests, unless a reply is unfinished; return whether it waits."""
        left_ms = self._server_context.pause_remaining_ms()
        is_between = self._stream is None and (self._pending is None or isinstance(self._pending, Retry))
        self.session.is_paused = left_ms > 0 and self._server_context.pauses_all and is_between
        if self.session.is_paused:
            self.is_idle = False
            self._set_reading(False)
            self._next_turn = self._loop.call_later(left_ms / 1000, self._turn)
        return self.session.is_paused

    def _end_turn(self, has_more: bool) -> None:
        """End a turn: schedule the next one, read more input, or close the connection."""
        if self._transport.is_closing():
            return
        is_waiting = self._pending is not None
        if self.is_blocked and self._is_ending:  # as Redis does: no client would get the value that the command pops
            self._server_context.leave(self.session)
            self._close_transport()
            return
        is_closing = self.session.is_closing and self._stream is None and not is_waiting
        if is_closing or (self._is_ending and not has_more and not is_waiting and self._is_writable):
            self._close_transport()
            return
        is_waiting &= not self.is_blocked
        self._set_reading(self._is_writable and not has_more and not is_waiting and not self._is_ending)
        if has_more and self._is_writable:
            self._next_turn = self._turn_scheduler.defer(self._turn)

    def _advance(self, out: list[bytes]) -> bool:
        """Answer a batch of requests, or send the next step of a reply; return whether there is more to do."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.when_resolved(None)
            if self._stream is None and not isinstance(pending, Retry):
                out.append(self._server_context.pending_invalidations(self.session, is_within=True))
                reply = self._dispatcher.later_reply(self.context, pending)
                if not isinstance(reply, bytes):
                    self._start_stream(reply)
                    return True
                out.append(reply)
                out += self._pop_delayed_pushes()
                out.append(self._server_context.pending_invalidations(self.session))
                return not self.session.is_closing
        if self._stream is not None:
            self._step_stream(self._stream, out)
            if self._stream is not None and self._stream.pending is not None:
                self._wait_for(self._stream.pending)
                return False
            if self._stream is None:
                out += self._pop_delayed_pushes()
            return self._stream is not None or not self.session.is_closing
        before = len(out)
        has_more = self._answer_batch(out)
        if self.session.epoch_feed is not None and self._stream is None:
            out.insert(before, self._server_context.pending_pushes(self.session.epoch_feed))
        return has_more

    @property
    def _rate_limiter(self) -> RateLimiter | None:
        """The limiter of the user; None: no limit, or the client has not logged in, so that it is no user yet."""
        return self.session.user.rate_limiter if self.session.is_authenticated else None

    def _answer_batch(self, out: list[bytes]) -> bool:
        """Answer a batch of requests; return whether there is more to do."""
        before = len(out)
        if not self._requests and (self.input or self._parser.has_more) and self._answer_or_parse(out):
            return self._has_more()
        requests, limiter = self._requests, self._rate_limiter
        if not requests:  # after a reply that was waited for
            incomplete = None
        elif limiter is None:
            incomplete = self._dispatcher.answer(self.context, requests, out, self._turn_ends_ns, BATCH_REQUESTS)
        elif allowed := limiter.allowed_requests(BATCH_REQUESTS):
            before_limit = requests[:]
            incomplete = self._dispatcher.answer(self.context, requests, out, self._turn_ends_ns, allowed)
            answered = before_limit[: len(before_limit) - len(requests)]
            limiter.consume(len(answered), sum(map(len, chain.from_iterable(answered))))
        else:
            self._wait_for(RateLimitPause(limiter.pause_s()))
            return False
        if incomplete is not None:
            return self._start_incomplete(incomplete, out, before)
        if self.session.is_closing:
            return False
        if self._has_more():
            return True
        if self._parser.error is not None:
            self._reject_input(self._parser.error, out)
        return False

    def _start_incomplete(self, incomplete: IncompleteReply, out: list[bytes], before: int) -> bool:
        """Start a streamed reply, or wait for a pending one; return whether there is more to do now."""
        if isinstance(incomplete, Pending):
            self._wait_for(incomplete)
            return False
        self._add_pushes_around_stream(before, out)
        stream = SlicedEncoder(incomplete, self.session.protocol) if isinstance(incomplete, Sliced) else incomplete
        self._start_stream(stream)
        return True

    def _has_more(self) -> bool:
        """Return whether there are further requests to answer."""
        return bool(self._requests or (self.input and not self._has_partial_request) or self._parser.has_more)

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
            out.append(self._server_context.pending_invalidations(self.session, is_within=True))

    def _answer_or_parse(self, out: list[bytes]) -> bool:
        """Let the compiled core answer the input, and parse the rest; return whether the core replied."""
        parser, data = self._parser, self.input
        if self._compiled is not None and not parser.buffered_bytes:
            reply, requests, self.input = self._compiled.answer(self.session, data)
            self._requests = requests
            self._has_partial_request = self._compiled.is_incomplete and 0 < len(self.input) <= PARTIAL_BYTES_MAX
            if reply:
                out.append(reply)
            if reply or requests or self._has_partial_request:
                return bool(reply)
        parser.is_restricted = not self.session.is_authenticated
        self._requests, self.input = parser.feed(data), b""
        return False

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
        self._pending = pending
        self.session.is_paused = isinstance(pending, PausedWrite)
        if self._next_turn is not None:
            self._next_turn.cancel()  # a second turn would take the reply before it has come
        if pending.is_resolved:
            self._next_turn = self._loop.call_soon(self._turn)
        else:
            self._next_turn = self._loop.call_later(pending.seconds_max, self._turn)
            pending.when_resolved(self._schedule_turn)

    @isolated
    def _schedule_turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        # One event may resolve the replies of many clients. Their further requests may be long, so they are deferred.
        self._next_turn = (
            self._turn_scheduler.defer(self._turn) if self._has_more() else self._loop.call_soon(self._turn)
        )

    def _start_stream(self, reply: ReplyStream) -> None:
        self._stream = reply
        self._stream_since_ms = self._server_context.view.now_ms

    def _step_stream(self, stream: ReplyStream, out: list[bytes]) -> None:
        try:
            out.append(stream.step())
        except Exception as error:
            reply = self._dispatcher.error_reply(error)
            if stream.has_started:
                self._transport.abort()
                self.session.close()
            else:
                out.append(reply)
            self._end_stream()
            return
        if stream.is_done:
            self._end_stream()
        elif stream.buffered_bytes > self._server_context.config.output_limits(is_subscriber=False)[0]:
            self._server_context.stats.closed_for_output += 1
            self.abort(f"a reply of more than {stream.buffered_bytes} bytes")
            self.session.close()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _pop_delayed_pushes(self) -> list[bytes]:
        """Remove and return the pushes that were delayed until the end of a reply."""
        pushed, self._delayed_pushes, self._delayed_push_bytes = self._delayed_pushes, [], 0
        return pushed

    def _send(self, out: list[bytes]) -> None:
        reply = out[0] if len(out) == 1 else b"".join(out)
        if reply:
            self._write(reply)
            self._check_output()

    @isolated
    def check_limits(self, now_ms: int, limits: RequestLimits) -> None:
        """Apply new request limits; disconnect a client that was over the soft output limit for too long."""
        self._parser.limits = limits
        config, is_subscriber = self._server_context.config, self.session.is_subscriber
        _, soft_bytes, soft_seconds = config.output_limits(is_subscriber=is_subscriber)
        if not soft_bytes or self.output_bytes <= soft_bytes:
            self._over_soft_limit_since_ms = None
        elif self._over_soft_limit_since_ms is None:
            self._over_soft_limit_since_ms = now_ms
        elif now_ms - self._over_soft_limit_since_ms > soft_seconds * 1000:
            self._server_context.stats.closed_for_output += 1
            self.abort(f"more than {soft_bytes} bytes of output have waited for more than {soft_seconds} s")

    def _check_output(self) -> None:
        """Disconnect a client that is over the hard output limit."""
        bytes_max, *_ = self._server_context.config.output_limits(is_subscriber=self.session.is_subscriber)
        if self.output_bytes <= bytes_max:
            return
        self._write_queue.flush()  # only output that the socket does not accept counts
        if self.output_bytes > bytes_max:
            self._server_context.stats.closed_for_output += 1
            self.abort("its unsent output exceeds the limit")

    def _write(self, reply: bytes) -> None:
        self._server_context.stats.output_bytes += len(reply)
        self.session.output_bytes += len(reply)
        self._transmit(reply)

    def _close_transport(self) -> None:
        self._write_queue.flush()
        self._transport.close()

    def _set_reading(self, is_reading: bool) -> None:
        if is_reading == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
