"""The socket of a connection to an upstream, on the core's own epoll and behind asyncio, as with TLS."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from resp_server.backends.redis.link import UpstreamProtocol
from resp_server.raw_replies.pipelined_connection import PipelinedConnection
from tests.server.faults import Scene


@pytest.fixture
def scene(kind_of_sockets: str) -> Iterator[Scene]:
    made = Scene()
    yield made
    made.stop()


class Losses(PipelinedConnection[Any]):
    """Takes the end of a connection, which gets no reply."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def receive_batch_replies(self, data: bytes) -> bytes:
        return data

    def receive_replies(self, replies: object) -> None:
        raise AssertionError(replies)

    def disconnected(self, reason: str) -> None:
        self.reasons.append(reason)


def test_upstream_sees_cut_connection_in_same_turn(scene: Scene) -> None:
    ours, upstreams = socket.socketpair()
    losses = Losses()
    link = UpstreamProtocol(losses)

    async def connect() -> None:
        poller = scene.cluster.access.poller
        if poller is None:
            await scene.loop.create_unix_connection(lambda: link, sock=ours)
        else:
            poller.add(ours, link)

    def received_in_the_turn() -> bytes:
        link.cut("its client has left")
        link.cut("the proxy stops")
        return upstreams.recv(1)

    with upstreams:
        upstreams.setblocking(False)  # the loop cannot turn meanwhile
        scene.run(connect())
        assert scene.call(received_in_the_turn) == b""
        assert losses.reasons == ["its client has left"]
