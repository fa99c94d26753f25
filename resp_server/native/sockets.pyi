"""The types of `sockets.pyx`, which has the docstrings."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from resp_server.native.client_fields import InputInterceptor
from resp_server.native.fast_path import FastPath

class Transport(asyncio.Transport):
    def set_interceptor(self, interceptor: InputInterceptor) -> None: ...

class Poller:
    fast_path: FastPath | None
    renews_by_clock: bool
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: Any,  # a `pipeline.context.ServerContext`
        fast_path: FastPath | None = None,
        has_peer_processes: bool = False,
    ) -> None: ...
    def add(self, sock: socket.socket, protocol: asyncio.Protocol) -> Transport: ...
    def call_before_flush(self, callback: Callable[[], None]) -> None: ...
    def close(self) -> None: ...
