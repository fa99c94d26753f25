"""A client's output, which waits in three places, and the limits of it.

A push waits for the end of the reply that is being sent. What a client gets waits for the end of the round: in the
write queue, or in a transport of the compiled core. The transport buffers what the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from resp_server.client.fields import ConnectionFields
from resp_server.client.write_queue import WriteQueue
from resp_server.net.transports import end_now
from resp_server.pipeline.context import ServerContext

log = logging.getLogger("sparkis.clients")


class ClientOutput:
    """The output of one client.

    Args:
        connection: Its field `is_idle` becomes False when the output is aborted.
        is_polled: The transport is one of the compiled core. It sends at the end of the round itself.

    Attributes:
        transmit: Sends bytes at the end of the round; its caller counts them.
        is_writable: The client reads its output.
        delayed_pushes: They wait for the end of the current reply. None: there are none.
    """

    __slots__ = (
        "_connection",
        "_delayed_push_bytes",
        "_over_soft_limit_since_ms",
        "_server",
        "_transport",
        "_unsent_bytes",
        "_write_queue",
        "delayed_pushes",
        "is_writable",
        "transmit",
    )

    def __init__(
        self,
        connection: ConnectionFields,
        server: ServerContext,
        transport: asyncio.Transport,
        write_queue: WriteQueue,
        *,
        is_polled: bool,
    ) -> None:
        self._connection = connection
        self._server = server
        self._transport = transport
        self._write_queue = write_queue
        self.transmit = transport.write if is_polled else self._enqueue
        self.is_writable = True
        self._unsent_bytes = 0  # in the write queue
        self.delayed_pushes: list[bytes] | None = None
        self._delayed_push_bytes = 0
        self._over_soft_limit_since_ms: int | None = None

    @property
    def size_bytes(self) -> int:
        """How many bytes wait to be sent."""
        return self._transport.get_write_buffer_size() + self._delayed_push_bytes + self._unsent_bytes

    def send(self, out: Sequence[bytes]) -> None:
        """Send replies together, and check the hard limit."""
        reply = out[0] if len(out) == 1 else b"".join(out)
        if reply:
            self.write(reply)
            self.check_hard_limit()

    def write(self, reply: bytes) -> None:
        """Send bytes at the end of the round, and count them."""
        self._server.stats.output_bytes += len(reply)
        self._connection.session.output_bytes += len(reply)
        self.transmit(reply)

    def _enqueue(self, reply: bytes) -> None:
        self._unsent_bytes += len(reply)
        self._write_queue.add(self._send_now, reply)

    def _send_now(self, reply: bytes) -> None:
        """Send bytes from the write queue. An exception ends this client only: replies of others come next."""
        try:
            self._unsent_bytes -= len(reply)
            if not self._transport.is_closing():  # the client may have disconnected meanwhile
                self._server.stats.writes += 1
                self._transport.write(reply)
        except Exception as error:
            self._server.report(error)
            self._connection.is_idle = False
            self._connection.session.close()
            self._transport.abort()

    def delay(self, frame: bytes) -> None:
        """Let a push wait for the end of the current reply."""
        if self.delayed_pushes is None:
            self.delayed_pushes = []
        self.delayed_pushes.append(frame)
        self._delayed_push_bytes += len(frame)

    def pop_delayed_pushes(self) -> Sequence[bytes]:
        """Remove and return the pushes that were delayed until the end of a reply."""
        pushes, self.delayed_pushes, self._delayed_push_bytes = self.delayed_pushes, None, 0
        return pushes or ()

    def send_delayed_pushes(self) -> None:
        """Send the pushes that were delayed until the end of a reply."""
        if self.delayed_pushes is not None:
            self.send(self.pop_delayed_pushes())

    def check_soft_limit(self, now_ms: int) -> None:
        """Disconnect a client that was over the soft limit for too long."""
        config, is_subscriber = self._server.config, self._connection.session.is_subscriber
        _, soft_bytes, soft_seconds = config.output_limits(is_subscriber=is_subscriber)
        if not soft_bytes or self.size_bytes <= soft_bytes:
            self._over_soft_limit_since_ms = None
        elif self._over_soft_limit_since_ms is None:
            self._over_soft_limit_since_ms = now_ms
        elif now_ms - self._over_soft_limit_since_ms > soft_seconds * 1000:
            self._server.stats.closed_for_output += 1
            self.abort(f"more than {soft_bytes} bytes of output have waited for more than {soft_seconds} s")

    def check_hard_limit(self) -> None:
        """Disconnect a client that is over the hard limit."""
        bytes_max, *_ = self._server.config.output_limits(is_subscriber=self._connection.session.is_subscriber)
        if self.size_bytes <= bytes_max:
            return
        self._write_queue.flush()  # only output that the socket does not accept counts
        if self.size_bytes > bytes_max:
            self._server.stats.closed_for_output += 1
            self.abort("its unsent output exceeds the limit")

    def close(self) -> None:
        """Close the connection after all output is sent."""
        self._write_queue.flush()
        self._transport.close()

    def cut(self, reason: str) -> None:
        """Abort, and let the client see its end before other clients get their next replies.

        Its session must have been removed: whoever sees the end finds no subscription of it any more.
        """
        end_now(self._transport)
        self.abort(reason)

    def abort(self, reason: str) -> None:
        """Close the connection now, without sending more; `reason` is logged."""
        # A closing TLS connection waits for the client's close_notify. Nothing is lost if it is closed without one.
        level = logging.DEBUG if self._transport.is_closing() and not self.size_bytes else logging.WARNING
        log.log(level, "cut the connection of %s: %s", self._connection.session.address, reason)
        self._connection.is_idle = False
        self._transport.abort()
