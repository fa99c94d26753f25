"""Sockets that systemd has passed are found by their port, and only those that are for this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from resp_server.net import passed_sockets
from resp_server.net.listeners import accept_all, listen
from resp_server.net.passed_sockets import PassedSocket, passed_ports, take_passed


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Pass a TCP socket and one of a path, as systemd does; return the port."""
    with ExitStack() as stack:
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first = 900  # two free descriptors in a row
        for number, each in enumerate((local, listener)):
            os.dup2(each.fileno(), first + number)
            stack.callback(os.close, first + number)
        monkeypatch.setattr(passed_sockets, "FIRST_DESCRIPTOR", first)
        monkeypatch.setenv("LISTEN_FDS", "2")
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        yield listener.getsockname()[1]


def test_passed_socket_is_taken_in_place_of_new_one(port: int) -> None:
    assert passed_ports() == [port]
    [taken] = listen(["10.255.255.255"], port, 1)  # no address of this machine: it is not bound
    with taken:
        assert isinstance(taken, PassedSocket) and taken.getsockname()[1] == port and not taken.getblocking()
    [again] = take_passed(port)  # the socket of systemd stays open
    again.close()


def test_clients_of_passed_socket_are_left_to_next_process(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        [taken] = take_passed(port)
        with taken:
            assert list(accept_all(taken)) == []


def test_other_ports_have_no_passed_sockets(port: int) -> None:
    assert take_passed(port - 1) == [] and take_passed(0) == []


@pytest.mark.parametrize(("name", "value"), [("LISTEN_PID", "1"), ("LISTEN_PID", ""), ("LISTEN_FDS", "x")])
def test_sockets_for_other_process_stay(port: int, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 2)
    monkeypatch.setenv(name, value)
    assert take_passed(port) == [] and passed_ports() == []
