"""Errors of listening sockets: each names the host and the port."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from resp_server.net.listeners import cannot_listen


def test_error_names_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError) as raised:
            socket.create_server(("127.0.0.1", port))
    assert (
        cannot_listen("127.0.0.1", port, raised.value).strerror
        == f"cannot listen on 127.0.0.1, port {port}: {os.strerror(errno.EADDRINUSE)}"
    )


def test_error_names_unknown_host() -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert cannot_listen("nowhere", 0, error).strerror == "cannot listen on nowhere, port 0: Name or service not known"
