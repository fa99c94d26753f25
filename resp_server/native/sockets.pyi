"""The types of `sockets.pyx`, which has the docstrings."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

from resp_server.native.core import FastPath, InputInterceptor

class PollerHost(Protocol):
    """The server whose sockets the poller reads (`pipeline.context.ServerContext`)."""

    stats: Any

    def renew(self) -> None: ...
    def report(self, error: Exception) -> object: ...

class Transport(asyncio.Transport):
    def set_interceptor(self, interceptor: InputInterceptor) -> None: ...

class Poller:
    fast_path: FastPath | None
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: PollerHost,
        fast_path: FastPath | None = None,
        has_peer_processes: bool = False,
    ) -> None: ...
    def add(self, sock: socket.socket, protocol: asyncio.Protocol) -> Transport: ...
    def call_before_flush(self, callback: Callable[[], None]) -> None: ...
    def close(self) -> None: ...
