"""Replies that need other workers first: only the next requests of the same client wait."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resp_server.pipeline import context as contexts
from tests.server.conftest import OtherWorkers

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"
LIST = b"CLIENT LIST TYPE pubsub\r\n"  # of nobody, so that the whole answer is known
EMPTY_LIST = b"$0\r\n\r\n"


@pytest.fixture
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    return serve()


@pytest.fixture
def others(server: Any) -> OtherWorkers:
    return OtherWorkers(server)


def test_requests_behind_pending_reply_wait_for_it(server: Any, others: OtherWorkers) -> None:
    waiting, other = server.connect(), server.connect()
    waiting.send(PING + LIST + PING + LIST + PING)
    waiting.expect(PONG)
    others.wait_for_queries(1)
    other.expect_reply(PING, PONG)  # nobody else waits
    waiting.send(PING)  # comes while the reply is pending
    others.answer([])
    assert waiting.read(len(EMPTY_LIST + PONG)) == EMPTY_LIST + PONG
    others.answer([])
    assert waiting.read(len(EMPTY_LIST + PONG + PONG)) == EMPTY_LIST + PONG + PONG


def test_answers_of_other_workers_are_part_of_reply(server: Any, others: OtherWorkers) -> None:
    peer = server.connect()
    peer.send(b"CLIENT KILL ID 77\r\n")
    others.answer([77], [])
    assert peer.read(4) == b":1\r\n"
    peer.send(b"CLIENT KILL 127.0.0.1:1\r\n")
    others.answer([])
    error = b"-ERR No such client\r\n"
    assert peer.read(len(error)) == error


def test_slow_worker_is_left_out(server: Any, others: OtherWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "GATHER_S_MAX", 0.01)
    peer = server.connect()
    peer.expect_reply(LIST + PING, EMPTY_LIST + PONG)
    others.answer([])  # too late: nobody waits any more
    peer.expect_reply(PING, PONG)


def test_client_that_leaves_meanwhile_is_forgotten(server: Any, others: OtherWorkers) -> None:
    peer, other = server.connect(), server.connect()
    peer.send(LIST)
    others.wait_for_queries(1)
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing sends a reset
    peer.socket.close()
    other.expect_reply(PING, PONG)
    others.answer([])
    other.expect_reply(PING, PONG)


def test_half_closed_client_gets_its_pending_reply(server: Any, others: OtherWorkers) -> None:
    peer = server.connect()
    peer.send(LIST + PING)
    peer.socket.shutdown(socket.SHUT_WR)
    others.answer([])
    assert peer.read_all() == EMPTY_LIST + PONG


def test_command_of_client_with_replies_off_is_run(server: Any, others: OtherWorkers) -> None:
    peer = server.connect()
    peer.send(b"CLIENT REPLY SKIP\r\nCLIENT KILL ID 1 SKIPME no\r\n")  # itself
    others.answer([])
    assert peer.read_all() == b""
