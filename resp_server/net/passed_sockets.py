"""Listening sockets that systemd has opened for this process (`sd_listen_fds(3)`).

They stay open while the process restarts. Clients that connect meanwhile wait in their queue, and nobody is refused.
A program asks for the sockets of a port, and listens itself at ports that have none.

systemd names the process id in LISTEN_PID. `programs.supervisor` has that id, and its child answers the clients. So the
id of the parent counts as well.
"""

from __future__ import annotations

import os
import socket

FIRST_DESCRIPTOR = 3
COUNT_VARIABLE, PROCESS_VARIABLE = "LISTEN_FDS", "LISTEN_PID"


class PassedSocket(socket.socket):
    """A listening socket that another process also has: it must be neither emptied nor shut down."""


def take_passed(port: int) -> list[socket.socket]:
    """Return this process' own copies of the passed TCP sockets that listen at a port; 0: none."""
    taken: list[socket.socket] = []
    for descriptor in _descriptors():
        passed = PassedSocket(fileno=os.dup(descriptor))
        if port and _port_of(passed) == port:
            passed.setblocking(False)
            taken.append(passed)
        else:
            passed.close()
    return taken


def passed_ports() -> list[int]:
    """Return the ports of all passed TCP sockets, in order."""
    ports = []
    for descriptor in _descriptors():
        with socket.socket(fileno=os.dup(descriptor)) as passed:
            ports.append(_port_of(passed))
    return sorted(set(filter(None, ports)))


def _descriptors() -> range:
    of_process, count = os.environ.get(PROCESS_VARIABLE, ""), os.environ.get(COUNT_VARIABLE, "")
    if not count.isdecimal() or of_process not in (str(os.getpid()), str(os.getppid())):
        return range(0)
    return range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))


def _port_of(passed: socket.socket) -> int:
    """Return the port of a listening TCP socket, else 0."""
    is_tcp = passed.family in (socket.AF_INET, socket.AF_INET6) and passed.type == socket.SOCK_STREAM
    return int(passed.getsockname()[1]) if is_tcp else 0
