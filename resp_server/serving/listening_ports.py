"""The listening sockets of a server, at its port and at its TLS port."""

from __future__ import annotations

import socket

from resp_server.net.listeners import listen
from resp_server.settings.server import ServerConfig


def listen_at_ports(config: ServerConfig) -> tuple[list[socket.socket], list[socket.socket]]:
    """Return a server's listening sockets: (those without TLS, those with TLS). OSError."""

    def listen_at(port: int) -> list[socket.socket]:
        return listen(config.hosts, port, config.tcp_backlog, shares_port=config.shares_port)

    first = listen_at(config.port)
    if config.tls is None:
        return first, []
    if config.tls_port is None:
        return [], first
    try:
        return first, listen_at(config.tls_port)
    except OSError:
        for each in first:
            each.close()
        raise
