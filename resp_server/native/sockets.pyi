"""The types of `sockets.pyx`, which has the docstrings."""

import asyncio
import socket

from resp_server.instance import Instance
from resp_server.native.core import Reads

class Transport(asyncio.Transport): ...

class Poller:
    def __init__(self, loop: asyncio.AbstractEventLoop, instance: Instance, reads: Reads) -> None: ...
    def add(self, sock: socket.socket, protocol: asyncio.Protocol) -> Transport: ...
    def close(self) -> None: ...
