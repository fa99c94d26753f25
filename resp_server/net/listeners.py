"""Listening sockets: all addresses of a server, on one port."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from resp_server.net.passed_sockets import PassedSocket, take_passed

log = logging.getLogger("sparkis.server")

LOOPBACK = ("127.0.0.1", "::1")

# File descriptors that a process needs besides those of its clients: stores, logs, pipes, listeners (guess).
OTHER_FILES = 256

# Connections accepted in one round of the event loop, so that a flood does not delay the open connections (guess).
ACCEPTS_PER_ROUND = 64
# The pause after a system error, for example when no file descriptor is left (guess).
ACCEPT_PAUSE_S = 0.5

# After `leave_port`, connections that are being made get this time: some round trips (guess).
LEAVE_S = 0.5

# From Linux' asm-generic/socket.h and linux/bpf_common.h (BPF_RET | BPF_K).
SO_ATTACH_REUSEPORT_CBPF = 51
BPF_RETURN = 0x06


def raise_file_limit(clients: int) -> None:
    """Raise this process' limit of open files to serve a number of clients, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = clients + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (OSError, ValueError) as error:
        log.warning("%d clients may be too many: files stay limited to %d (%s)", clients, soft, error)


def listen(hosts: Sequence[str], port: int, tcp_backlog: int, *, shares_port: bool = False) -> list[socket.socket]:
    """Return listening sockets for some hosts, all on one port; port 0: any free port.

    Resolves names. A loopback address that the machine does not have is skipped. OSError if another address cannot be
    bound. If systemd has passed sockets of the port, they are returned.

    Args:
        shares_port: Another process of this user may listen at the port, too (SO_REUSEPORT).
    """
    listeners = take_passed(port)
    if listeners:
        return listeners
    for host in hosts:
        try:
            for address in _addresses(host, port):
                listeners.append(_listener(address, port, tcp_backlog, shares_port=shares_port))
                port = listeners[-1].getsockname()[1]
        except OSError as error:
            if host in LOOPBACK and listeners:
                log.info("not listening on %s: this machine does not have it", host)
                continue
            for listener in listeners:
                listener.close()
            raise cannot_listen(host, port, error) from None
    return listeners


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    """Return a socket's error with the host and port in its text."""
    # Errors of name look-ups have negative numbers and texts of their own. For others the system's text is used,
    # because socket and asyncio add words to the error's text.
    reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or error
    return OSError(error.errno, f"cannot listen on {host}, port {port}: {reason}")


def accept_clients(listener: socket.socket, pause: Callable[[], object]) -> Iterator[socket.socket]:
    """Accept waiting clients of a listening socket, as many as one round of the event loop may accept.

    Args:
        pause: Called after a system error; stops listening for `ACCEPT_PAUSE_S`.
    """
    for _ in range(ACCEPTS_PER_ROUND):
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.error("cannot accept a connection: %s; retrying in %s s", error.strerror, ACCEPT_PAUSE_S)
            pause()
            return
        yield client


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept all clients that wait at a listening socket before it is closed, because closing cuts them off.

    Those that wait at a socket of systemd are left to the next process.
    """
    while not isinstance(listener, PassedSocket):
        accepted = list(accept_clients(listener, lambda: None))
        yield from accepted
        if not accepted:
            return


def leave_port(listener: socket.socket) -> None:
    """Have the kernel give all new clients to the process that listens at the same port since later.

    A socket that is closed loses the clients whose connection is being made. So before it is closed, new connections
    must go to the other one, for longer than making a connection takes. The kernel numbers the sockets of a port in the
    order in which they began to listen, and runs this classic BPF program (`ret #1`) to choose the number. Where there
    is no such socket, it chooses as before. OSError on systems that have no such programs.
    """
    program = ctypes.create_string_buffer(struct.pack("=HBBI", BPF_RETURN, 0, 0, 1))
    option = struct.pack("HL", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, option)


def is_wildcard(host: str) -> bool:
    """Return whether a host means all addresses of a machine; such a host is no address to connect to."""
    return host in ("", "*", "0.0.0.0", "::")


def address_towards(there: tuple[str, int]) -> str:
    """Return this machine's own address on the route to a host and port. Resolves the name; sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(*there, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _addresses(host: str, port: int) -> list[tuple[int, str]]:
    """Return (family, address) of each address of a host; an empty host means all addresses of this machine."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _listener(address: tuple[int, str], port: int, tcp_backlog: int, *, shares_port: bool) -> socket.socket:
    family, host = address
    listener = socket.create_server((host, port), family=family, backlog=tcp_backlog, reuse_port=shares_port)
    listener.setblocking(False)
    return listener


class PolledListener:
    """A listening socket that adds its clients to the compiled core's poller."""

    def __init__(self, poller: Any, listener: socket.socket, connect: Callable[[], asyncio.Protocol]) -> None:
        self._poller = poller
        self._listener = listener
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept)

    def finish(self) -> None:
        """Accept the clients that have connected, and stop listening."""
        for client in accept_all(self._listener):
            add_client(self._poller, client, self._connect())
        self.close()

    def close(self) -> None:
        """Stop listening."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _accept(self) -> None:
        for client in accept_clients(self._listener, self._pause):
            add_client(self._poller, client, self._connect())

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)


def add_client(poller: Any, client: socket.socket, connection: asyncio.Protocol) -> None:
    """Add a client's socket to a poller, with TCP_NODELAY set, as asyncio does."""
    client.setblocking(False)
    if client.family != socket.AF_UNIX:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    poller.add(client, connection)
