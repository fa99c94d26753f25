"""The listening sockets of a master, and the connections that it accepts at them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from resp_server.net.listeners import ACCEPT_PAUSE_S, LEAVE_S, accept_all, accept_clients, leave_port
from resp_server.serving.listening_ports import listen_at_ports
from resp_server.settings.server import ServerConfig


class Acceptor:
    """Accepts connections, or leaves them in the system's queue.

    Args:
        hand_over: Called with each new connection, and whether it came to a TLS port.
        may_accept: Returns whether a worker can serve connections now.
    """

    def __init__(
        self,
        config: ServerConfig,
        hand_over: Callable[[socket.socket, bool], None],
        may_accept: Callable[[], bool],
    ) -> None:
        self._config = config
        self._hand_over = hand_over
        self._may_accept = may_accept
        self._listeners: list[socket.socket] = []
        self._tls_listeners: list[socket.socket] = []  # some of `_listeners`
        self._is_accepting = False
        self.port = config.port
        self.tls_port = 0

    @property
    def is_listening(self) -> bool:
        """Whether there are listening sockets."""
        return bool(self._listeners)

    def listen(self) -> None:
        """Open the listening sockets. OSError if an address cannot be bound."""
        plain, self._tls_listeners = listen_at_ports(self._config)
        self._listeners = [*plain, *self._tls_listeners]
        self.port = self._listeners[0].getsockname()[1]
        self.tls_port = self._tls_listeners[0].getsockname()[1] if self._tls_listeners else 0

    def set_accepting(self, is_accepting: bool) -> None:
        """Accept connections, or no longer."""
        loop = asyncio.get_running_loop()
        self._is_accepting = is_accepting
        for listener in self._listeners:
            if is_accepting:
                loop.add_reader(listener, self._accept, listener)
            else:
                loop.remove_reader(listener)

    def pause_if_unserved(self) -> None:
        """Accept no more connections if no worker can serve them."""
        self.set_accepting(self._may_accept() and self._is_accepting)

    async def finish(self) -> None:
        """Close the listening sockets after accepting all connections that have arrived."""
        if self._config.shares_port and self._listeners:
            for listener in self._listeners:
                leave_port(listener)
            await asyncio.sleep(LEAVE_S)
        for listener in self._listeners:
            for client in accept_all(listener):
                self._hand_over(client, listener in self._tls_listeners)
        self.close()

    def close(self) -> None:
        """Close the listening sockets."""
        self.set_accepting(False)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        for client in accept_clients(listener, self._pause):
            self._hand_over(client, listener in self._tls_listeners)

    def _pause(self) -> None:
        self.set_accepting(False)
        asyncio.get_running_loop().call_later(ACCEPT_PAUSE_S, lambda: self.set_accepting(self._may_accept()))
