"""What a connection to the upstream does with a request; no socket."""

from __future__ import annotations

import asyncio

import pytest

from resp_server.backends.redis.connection import UpstreamConnection, UpstreamRequest
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.limits import SERVER_REQUESTS_MAX
from resp_server.protocol.errors import TryAgainError
from resp_server.raw_replies.answers import ReplyFuture
from resp_server.raw_replies.reply_splitter import PING
from resp_server.session.session import RESP2


def test_request_beyond_limit_of_connection_gets_tryagain() -> None:
    async def add() -> None:
        connection = UpstreamConnection(UpstreamPool(UpstreamUrl("127.0.0.1")), RESP2)
        connection.awaited_replies = SERVER_REQUESTS_MAX
        reply = ReplyFuture()
        connection.add(UpstreamRequest(PING, reply, 0, is_read=True))
        with pytest.raises(TryAgainError, match="too many requests wait for the upstream"):
            reply.result()

    asyncio.run(add())
