"""What a connection to a state server does with a request; no socket."""

from __future__ import annotations

import asyncio

from resp_server.backends.servers.requests import ConnectionKey, ServerRequest
from resp_server.backends.servers.server_connection import ServerConnection
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.limits import SERVER_REQUESTS_MAX
from resp_server.raw_replies.answers import ReplyFuture
from resp_server.raw_replies.reply_splitter import PING
from resp_server.session.session import RESP2

ADDRESS = "127.0.0.1:7379"


def test_request_beyond_limit_of_connection_gets_tryagain() -> None:
    async def add() -> None:
        cluster = StateCluster()
        cluster.access.start()
        connection = ServerConnection(cluster, ConnectionKey(ADDRESS, RESP2, is_long=False))
        connection.awaited_replies = SERVER_REQUESTS_MAX
        reply = ReplyFuture()
        connection.add(ServerRequest(PING, 0, RESP2, 1.0, reply, 0))
        assert reply.result().reply == b"-TRYAGAIN too many requests wait for 127.0.0.1:7379\r\n"

    asyncio.run(add())
