"""Opening sockets to servers, without an event loop's transport."""

from __future__ import annotations

import asyncio
import socket


async def connected(loop: asyncio.AbstractEventLoop, address: tuple[str, int] | str) -> socket.socket:
    """Return a socket, connected to the first address of a host that accepts, or to a Unix socket's path. OSError."""
    if isinstance(address, str):
        return await _connected(loop, socket.AF_UNIX, 0, address)
    failed: OSError | None = None
    for family, _, protocol, _, found in await loop.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            return await _connected(loop, family, protocol, found)
        except OSError as error:
            failed = failed or error
    raise failed or OSError(f"{address[0]} has no address")


async def _connected(
    loop: asyncio.AbstractEventLoop, family: int, protocol: int, address: tuple[str | int | bytes, ...] | str
) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        made.setblocking(False)
        await loop.sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made
