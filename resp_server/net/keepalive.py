"""TCP keepalive: the end of a machine or a network path is noticed also while nothing is sent."""

from __future__ import annotations

import socket


def keep_alive(sock: socket.socket, seconds: int) -> None:
    """Turn TCP keepalive on: the first probe after `seconds`, then up to three probes at a third of that interval."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 3))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
