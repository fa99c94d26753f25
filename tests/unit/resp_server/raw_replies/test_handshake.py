"""The first requests over a connection to a server: which refusals end it."""

from __future__ import annotations

import asyncio

import pytest

from resp_server.raw_replies.handshake import Handshake, HandshakeError

OPTIONAL = (b"STATE", b"FRESHNESS", b"COMMITTED")
REQUESTS = ((b"HELLO", b"3"), OPTIONAL, (b"STATE", b"FOLLOW"))


class Transport(asyncio.WriteTransport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data


def run(*replies: bytes) -> bytes:
    """Return what a handshake sends to a server with these replies."""

    async def exchange() -> bytes:
        handshake, transport = Handshake(REQUESTS, lambda request: request == OPTIONAL), Transport()
        running = asyncio.create_task(handshake.run(transport))
        await asyncio.sleep(0)
        for reply in replies:
            handshake.take(reply)
        await running
        return transport.written

    return asyncio.run(exchange())


def test_server_of_older_version_may_refuse_optional_requests() -> None:
    refused = b"-ERR unknown subcommand 'FRESHNESS'. Try STATE HELP.\r\n"
    assert run(b"+OK\r\n", refused, b"+OK\r\n").count(b"*") == len(REQUESTS)


def test_another_request_that_is_refused_ends_handshake() -> None:
    with pytest.raises(HandshakeError, match="unknown subcommand 'FOLLOW'"):
        run(b"+OK\r\n", b"+OK\r\n", b"-ERR unknown subcommand 'FOLLOW'. Try STATE HELP.\r\n")
