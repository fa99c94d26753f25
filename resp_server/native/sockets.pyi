"""The types of `sockets.pyx`, which has the docstrings."""

import asyncio
import socket
from collections.abc import Callable

from resp_server.execution.context import ServerContext
from resp_server.native.core import Hearer, Reads

class Transport(asyncio.Transport):
    def hear_first(self, hearer: Hearer) -> None: ...

class Poller:
    def __init__(self, loop: asyncio.AbstractEventLoop, server: ServerContext, reads: Reads | None = None) -> None: ...
    def add(self, sock: socket.socket, protocol: asyncio.Protocol) -> Transport: ...
    def soon(self, callback: Callable[[], None]) -> None: ...
    def close(self) -> None: ...
