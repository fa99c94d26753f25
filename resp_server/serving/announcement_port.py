"""The port of a server for announcements of writers on other machines. It has a token, as a registry's port has.

AUTH token                   +OK; any other first request ends the connection (see `token_port`)
NOTICE job epoch [term]      +OK; the job's applier looks at the log soon. Nothing of the request is served
"""

from __future__ import annotations

import asyncio
import socket

from resp_server.limits import DRIVER_CONNECTIONS_MAX
from resp_server.net.tls import Certificates
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import OK, Reply, encode
from resp_server.protocol.request_parser import Request
from resp_server.serving.appliers import Appliers
from resp_server.serving.token_port import AuthenticatedConnection, TokenPort

PROTOCOL = 2


class AnnouncementListener:
    """Listens for announcements."""

    def __init__(self, appliers: Appliers, token: str, certificates: Certificates | None = None) -> None:
        def make_connection(writer: asyncio.StreamWriter) -> _Writer:
            return _Writer(appliers)

        self._port = TokenPort(
            "the server",
            token,
            make_connection,
            peers_max=DRIVER_CONNECTIONS_MAX,
            protocol=PROTOCOL,
            certificates=certificates,
        )

    def start(self, host: str, port: int) -> int:
        """Listen on a port (0: a free one), and return it. OSError if the address cannot be bound."""
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._port.start(listener)
        bound: int = listener.getsockname()[1]
        return bound

    def stop(self) -> None:
        """Stop listening."""
        self._port.close()


class _Writer(AuthenticatedConnection):
    """One authenticated connection, of a writer."""

    def __init__(self, appliers: Appliers) -> None:
        self._appliers = appliers

    def connection_ended(self) -> None:
        """Do nothing: a writer has no state here."""

    async def answer(self, request: Request) -> bytes:
        """Return the encoded reply to a request."""
        return encode(await self._answer(request), PROTOCOL)

    async def _answer(self, request: Request) -> Reply:
        try:
            match [bytes(request[0]).upper(), *(bytes(word).decode() for word in request[1:])]:
                case [b"NOTICE", str(job), str(epoch), *_] if len(request) <= 4:
                    await self._appliers.notice(job, int(epoch), *map(int, request[3:]))
                    return OK
        except ValueError:
            pass
        return GenericError("not a request of the announcements port; there is NOTICE job epoch [term]")
