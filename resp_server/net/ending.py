"""The end of a connection that a transport closes only in a later turn of the event loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress


def end_now(transport: asyncio.BaseTransport) -> None:
    """Let the peer see the end now, before anything that other connections send later in this turn."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.is_closing():  # None: of a closed transport with TLS
        return  # its descriptor may be that of another connection already
    # uvloop's sockets have no `shutdown`, so a second descriptor is used. OSError: the connection has ended already.
    with suppress(OSError), socket.fromfd(sock.fileno(), sock.family, sock.type) as same:
        same.shutdown(socket.SHUT_RDWR)
