"""A RESP port for the project's own processes. Connections authenticate with a token, also during a connection flood.

Connections that have not authenticated yet have a limit of their own (`UNAUTHENTICATED_MAX`), apart from the limit for
authenticated ones. Each has `AUTH_S_MAX` seconds, the TLS handshake included, and one short request. At the limit the
oldest of them is dropped for a new one, but not before a grace period in which it can send its token. During that
period new connections wait in the socket's backlog, in their order. So a flood of silent connections passes through.
If new connections were refused instead, the flood would block the port.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

from resp_server.limits import KEEPALIVE_S
from resp_server.net.listeners import ACCEPT_PAUSE_S, ACCEPTS_PER_ROUND
from resp_server.net.tls import Certificates, reason_of
from resp_server.net.transports import keep_alive
from resp_server.protocol.errors import GenericError, internal_error
from resp_server.protocol.replies import OK, encode
from resp_server.protocol.request_parser import Request, RequestLimits, RequestParser

logger = logging.getLogger("sparkis.control")

# Connections that have not authenticated yet. With TLS each takes some 0.3 MB (buffers of uvloop and OpenSSL).
UNAUTHENTICATED_MAX = 256
# The time from accept to AUTH with the right token (guess: some round trips on a busy machine).
AUTH_S_MAX = 5.0
# The limit of bytes before authentication: AUTH with the token, and a little of what follows.
AUTH_BYTES_MAX = 16 << 10
# The grace period in which a connection is not dropped for a new one; with TLS it covers the handshakes of all (guess).
GRACE_S = 0.05
TLS_GRACE_S = 0.25
# The socket's backlog, where new connections wait during a grace period. The system's own limit is usually 4096.
BACKLOG_CONNECTIONS = 4096
# A topology of a thousand nodes takes some 200 KB, and so does a server's report.
REQUEST_BYTES_MAX = 1 << 20
READ_BYTES_MAX = 64 << 10


class AuthenticatedConnection(ABC):
    """An authenticated connection; the owner of the port implements it."""

    @abstractmethod
    async def answer(self, request: Request) -> bytes:
        """Return the encoded reply to a request."""

    @abstractmethod
    def connection_ended(self) -> None:
        """Handle the end of the connection."""


# Makes the handler of a connection that has authenticated.
MakeConnection = Callable[[asyncio.StreamWriter], AuthenticatedConnection]


class _UnauthenticatedConnection(asyncio.Protocol):
    """A connection that has not authenticated yet."""

    def __init__(self, port: TokenPort, client: socket.socket) -> None:
        self._port = port
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(RequestLimits(AUTH_BYTES_MAX, AUTH_BYTES_MAX), is_restricted=True)
        self._bytes = 0
        self._is_refused = False
        self.since_s = self._loop.time()
        self._late = self._loop.call_later(AUTH_S_MAX, self.drop)
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        certificates = self._port.certificates
        context = None if certificates is None else certificates.for_client()
        try:
            await self._loop.connect_accepted_socket(lambda: self, self._client, ssl=context)
        except Exception as error:
            if not isinstance(error, OSError):
                internal_error(error)
            logger.debug("a connection could not be accepted: %s", reason_of(error))
            self.drop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._bytes += len(data)
        requests = self._parser.feed(data) if self._bytes <= AUTH_BYTES_MAX else []
        if requests and self._port.is_token(requests[0]):
            self._authenticate()
        elif requests or self._parser.error is not None or self._bytes > AUTH_BYTES_MAX:
            self._refuse(f"AUTH with {self._port.name}'s token must be the first request")

    def _authenticate(self) -> None:
        assert self._transport is not None
        if self._port.is_full:
            self._refuse(f"{self._port.name} has reached its limit of connections")
            return
        self._stop_counting()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader, self._serve)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._parser.is_restricted = False
        self._parser.limits = RequestLimits(REQUEST_BYTES_MAX, REQUEST_BYTES_MAX)
        await self._port.serve(reader, writer, self._parser)

    def _refuse(self, reason: str) -> None:
        """Send an error and close. If the client does not read it or keeps TLS open, `AUTH_S_MAX` ends it."""
        assert self._transport is not None
        self._is_refused = True
        self._transport.write(encode(GenericError(reason), self._port.protocol))
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_counting()

    def drop(self) -> None:
        """Close the connection at once."""
        self._stop_counting()
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._client.close()

    def _stop_counting(self) -> None:
        self._late.cancel()
        self._port.stop_counting(self)


class TokenPort:
    """Accepts and authenticates the connections of a listening socket. Runs on the event loop's thread.

    Args:
        name: The port's owner, for error texts.
    """

    def __init__(
        self,
        name: str,
        token: str,
        make_connection: MakeConnection,
        *,
        peers_max: int,
        protocol: int,
        certificates: Certificates | None = None,
    ) -> None:
        self.name = name
        self.protocol = protocol
        self.certificates = certificates
        self._token = token.encode()
        self._make_connection = make_connection
        self._peers_max = peers_max
        self._grace_s = GRACE_S if certificates is None else TLS_GRACE_S
        self._peers: dict[AuthenticatedConnection, asyncio.StreamWriter] = {}
        self._unauthenticated: dict[_UnauthenticatedConnection, None] = {}
        self._listener: socket.socket | None = None
        self._pause: asyncio.Handle | None = None

    @property
    def is_full(self) -> bool:
        """Whether the limit of authenticated connections is reached."""
        return len(self._peers) >= self._peers_max

    @property
    def counts(self) -> tuple[int, int]:
        """(connections that have not authenticated yet, authenticated connections)."""
        return len(self._unauthenticated), len(self._peers)

    def start(self, listener: socket.socket) -> None:
        """Start accepting connections."""
        listener.listen(BACKLOG_CONNECTIONS)
        listener.setblocking(False)
        self._listener = listener
        self._listen()

    def close(self) -> None:
        """Stop accepting, and close all connections."""
        if self._listener is None:
            return
        self._stop_listening()
        self._listener.close()
        self._listener = None
        for connection in list(self._unauthenticated):
            connection.drop()
        for writer in self._peers.values():
            writer.close()

    def is_token(self, request: Request) -> bool:
        """Return whether a request is AUTH with the token."""
        is_auth = len(request) == 2 and request[0].upper() == b"AUTH"
        return is_auth and hmac.compare_digest(bytes(request[1]), self._token)

    def stop_counting(self, connection: _UnauthenticatedConnection) -> None:
        """Remove a connection from the unauthenticated ones: it has authenticated or ended."""
        self._unauthenticated.pop(connection, None)

    # -- the listening socket -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._pause = None
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _stop_listening(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)

    def _listen_after(self, seconds: float) -> None:
        self._stop_listening()
        self._pause = asyncio.get_running_loop().call_later(seconds, self._listen)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_ROUND):
            oldest = next(iter(self._unauthenticated), None)
            if oldest is not None and len(self._unauthenticated) >= UNAUTHENTICATED_MAX:
                grace_left_s = oldest.since_s + self._grace_s - asyncio.get_running_loop().time()
                if grace_left_s > 0:
                    self._listen_after(grace_left_s)
                    return
                oldest.drop()
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                logger.error("cannot accept a connection: %s; retrying in %s s", error.strerror, ACCEPT_PAUSE_S)
                for each in list(self._unauthenticated)[: len(self._unauthenticated) // 2]:
                    each.drop()
                self._listen_after(ACCEPT_PAUSE_S)
                return
            client.setblocking(False)
            keep_alive(client, KEEPALIVE_S)
            self._unauthenticated[_UnauthenticatedConnection(self, client)] = None

    # -- authenticated connections ------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parser: RequestParser) -> None:
        """Answer an authenticated connection's requests until it ends. An exception becomes the request's reply."""
        writer.write(encode(OK, self.protocol))
        peer = self._make_connection(writer)
        self._peers[peer] = writer
        try:
            data = b""
            while True:
                for request in parser.feed(data):
                    writer.write(await self._answer(peer, request))
                await writer.drain()
                if parser.error is not None or not (data := await reader.read(READ_BYTES_MAX)):
                    return
        except OSError as error:  # includes ssl.SSLError
            logger.debug("a connection broke: %s", error)
        except asyncio.CancelledError:
            pass  # the process is ending
        finally:
            del self._peers[peer]
            writer.close()
            peer.connection_ended()

    async def _answer(self, peer: AuthenticatedConnection, request: Request) -> bytes:
        try:
            return await peer.answer(request)
        except Exception as error:
            return encode(internal_error(error), self.protocol)
