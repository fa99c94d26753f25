"""The socket of a connection to an upstream: splits received bytes into replies, and sends long requests in pieces."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from resp_server.backends.redis.role import RoleCheck
from resp_server.limits import KEEPALIVE_S
from resp_server.net.addresses import address_of
from resp_server.net.transports import end_now, keep_alive
from resp_server.protocol.errors import internal_error
from resp_server.raw_replies.handshake import Handshake
from resp_server.raw_replies.packing import size_of
from resp_server.raw_replies.pipelined_connection import Link, PipelinedConnection
from resp_server.raw_replies.raw_reply import as_bytes
from resp_server.raw_replies.reply_splitter import FrameError, ReplySplitter

# The longest reply that is forwarded: twice the longest value of Redis.
REPLY_BYTES_MAX = 1 << 30
# Bytes of long requests that are given to a socket in one turn (guess: takes a millisecond).
TURN_BYTES_MAX = 1 << 20


# The addresses of this process's open connections to upstreams, as the upstream's MONITOR shows them.
open_addresses: set[bytes] = set()


class UpstreamProtocol(asyncio.Protocol, Link):
    """The socket of a connection."""

    _transport: asyncio.Transport

    def __init__(self, connection: PipelinedConnection[Any]) -> None:
        self._connection: PipelinedConnection[Any] | None = connection
        self._splitter = ReplySplitter(REPLY_BYTES_MAX, returns_chunks=True)
        self._handshake: Handshake | None = None
        self._reason = "it closed the connection"
        self._unsent: deque[bytes] = deque()  # the texts of long requests, and what is behind them
        self._unsent_bytes = 0
        self._address = b""
        self._is_paused = self._is_sending = self._is_scheduled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = self._transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._address = address_of(*sock.getsockname()[:2]).encode()
            open_addresses.add(self._address)
            keep_alive(sock, KEEPALIVE_S)  # blocking commands have no time limit, so only probes find a dead upstream

    async def greet(self, requests: list[tuple[bytes, ...]], role: RoleCheck) -> None:
        """Send the requests that open a connection, and wait for their replies; HandshakeError if one is refused."""
        # CLIENT SETNAME only helps people who read CLIENT LIST, so a user without the right to it may log in. A user
        # without the right to ROLE may log in, too; then the role is not checked.
        self._handshake = Handshake(requests, lambda request: request[0] in (b"CLIENT", b"ROLE"), role.refusal)
        await self._handshake.run(self._transport)
        self._handshake = None
        if self._connection is not None:
            self._connection.takes_batches = self._splitter.is_empty

    @property
    def output_bytes(self) -> int:
        """The size of unsent output."""
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if self._unsent or len(data) > TURN_BYTES_MAX:
            self.write_texts((data,))
        else:
            self._transport.write(data)

    def write_texts(self, texts: Sequence[bytes]) -> None:
        """Send many bytes as fast as the upstream takes them, in later turns, too."""
        self._unsent.extend(texts)
        self._unsent_bytes += size_of(texts)
        self._send_some()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send_some()

    def _send_some(self) -> None:
        """Send texts until the transport has enough for this turn."""
        if self._is_sending or self._is_scheduled or not self._unsent:
            return
        if self._connection is not None:
            self._connection.note_progress()
        size, self._is_sending = 0, True  # so that a pause which ends at once sends nothing out of order
        while self._unsent and not self._is_paused and size < TURN_BYTES_MAX:
            text = self._unsent.popleft()
            self._unsent_bytes -= len(text)
            size += len(text)
            self._transport.write(text)
        self._is_sending = False
        if self._unsent and not self._is_paused:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_more)

    def _send_more(self) -> None:
        self._is_scheduled = False
        self._send_some()

    def forget(self) -> None:
        """Close the socket without notifying the connection."""
        self._connection = None
        self._unsent.clear()
        self._transport.abort()

    def cut(self, reason: str) -> None:
        """Close the socket now; the connection is notified once."""
        end_now(self._transport)  # else a push of this turn could be popped for a blocked client that has left
        self._transport.abort()
        self._unsent.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnected(reason)

    def data_received(self, data: bytes) -> None:
        try:
            connection = self._connection
            if connection is not None and connection.takes_batches:
                data = connection.receive_batch_replies(data)
                if not data:
                    return
            replies = self._splitter.feed(data)
            if connection is not None:
                connection.takes_batches = self._handshake is None and self._splitter.is_empty
            if self._handshake is not None:
                for reply in map(as_bytes, replies):
                    self._handshake.take(reply)
            elif self._connection is not None and replies:
                self._connection.receive_replies(replies)
            elif self._connection is not None:
                self._connection.note_progress()
            if self._splitter.error is not None:
                raise self._splitter.error
        except Exception as error:
            if not isinstance(error, FrameError):
                internal_error(error)
            self._fail(f"its data is malformed: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        open_addresses.discard(self._address)
        self._fail(self._reason if error is None else f"{self._reason}: {error}")

    def _fail(self, reason: str) -> None:
        if self._handshake is not None:
            self._handshake.fail(reason)
        else:
            self.cut(reason)
