"""The listener for the project's own processes: RESP with a token, apart from the port that clients use.

    AUTH token                     +OK; anything else before it ends the connection
    NOTICE job epoch               +OK; the job's applier looks at the log now
    WAIT job epoch timeout_ms      :1 when the epoch can be read, :0 when it cannot after that time
    TOPOLOGY node json             +OK; clients are answered as by this node (its id or host:port) of this topology
                                   from now on, or an error that tells why not, and nothing changes

Few connections, few requests: a task for each connection, replies in order.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket

from resp_server.children import TOKEN_VARIABLE as TOKEN_VARIABLE
from resp_server.cluster.membership import Membership
from resp_server.cluster.topology import Topology, TopologyError
from resp_server.errors import PlainError, ReplyError
from resp_server.followers import Followers
from resp_server.protocol.replies import OK, Reply, encode
from resp_server.protocol.requests import Request, RequestLimits, RequestParser
from resp_server.tls import Certificates, TlsListener, start_streams

logger = logging.getLogger("sparkis.control")

# A topology of a thousand nodes takes some 200 KB.
REQUEST_BYTES_MAX = 1 << 20
READ_BYTES_MAX = 64 << 10
# Handshakes at a time.
ARRIVING_MAX = 64
WAIT_MS_MAX = 600_000


class ControlListener:
    """Answers the verbs of the control plane on a port of the loopback interface."""

    def __init__(
        self, followers: Followers, membership: Membership, token: str, certificates: Certificates | None = None
    ) -> None:
        self._followers = followers
        self._membership = membership
        self._token = token.encode()
        self._certificates = certificates
        self._server: asyncio.Server | TlsListener | None = None

    async def start(self) -> int:
        """Listen on a free port and return it."""
        listener = socket.create_server(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        self._server = await start_streams(
            self._serve, listener, self._certificates, lambda arriving: arriving < ARRIVING_MAX
        )
        return port

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = RequestParser(RequestLimits(REQUEST_BYTES_MAX, REQUEST_BYTES_MAX))
        is_trusted = False
        try:
            while data := await reader.read(READ_BYTES_MAX):
                for request in parser.feed(data):
                    if not is_trusted:
                        is_trusted = self._is_token(request)
                        if not is_trusted:
                            return
                        writer.write(encode(OK, 2))
                        continue
                    writer.write(encode(await self._answer(request), 2))
                if parser.error is not None:
                    return
                await writer.drain()
        except OSError as error:  # those of TLS are some of these
            logger.debug("a control connection broke: %s", error)
        finally:
            writer.close()

    def _is_token(self, request: Request) -> bool:
        return (
            len(request) == 2 and request[0].upper() == b"AUTH" and hmac.compare_digest(bytes(request[1]), self._token)
        )

    async def _answer(self, request: Request) -> Reply:
        try:
            match [bytes(request[0]).upper(), *(bytes(word).decode() for word in request[1:])]:
                case [b"NOTICE", str(job), str(_)]:
                    await self._followers.notice(job)
                    return OK
                case [b"WAIT", str(job), str(epoch), str(timeout_ms)]:
                    timeout_s = min(int(timeout_ms), WAIT_MS_MAX) / 1000
                    return int(await self._followers.wait(job, int(epoch), timeout_s))
                case [b"TOPOLOGY", str(node), str(text)]:
                    self._membership.take(Topology.parse(text), node)
                    return OK
        except TopologyError as error:
            return PlainError(str(error))
        except ValueError:
            pass
        return ReplyError("not a request of the control plane")
