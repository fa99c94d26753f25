"""CLIENT KILL: each filter disconnects the same clients, with the same replies, as at Redis."""

from __future__ import annotations

import pytest

from compat.conformance.judge import client_lines
from compat.conformance.pair import Pair
from compat.conformance.servers import Running
from compat.conformance.wire import Connection, request

# Filters that name the victim, in words where {field} is what CLIENT INFO says of it; {own} of the killer.
FILTERS = [
    "{addr}",
    "ID {id}",
    "ADDR {addr}",
    "laddr {laddr} id {id}",
    "ID {id} TYPE normal USER default SKIPME no",
    "ID {id} TYPE pubsub",
    "ID {id} ADDR 127.0.0.1:1",
    "ID 1 ID {id}",
    "ID {own}",
    "ID {own} SKIPME yes",
    "ID {own} SKIPME no",
    "{own_addr}",
    "ADDR {own_addr} SKIPME NO",
]


def who_is_left(server: Running, filters: str) -> tuple[bytes, bool, bool]:
    """Kill; return what the killer is told, and whether the killer and the other client still have answers."""
    with server.connect() as killer, server.connect() as other:
        own, its = (client_lines(each.call("CLIENT", "INFO"))[0] for each in (killer, other))
        words = filters.format(**its, own=own["id"], own_addr=own["addr"]).split()
        reply = killer.call("CLIENT", "KILL", *words)
        return reply.raw, is_connected(killer), is_connected(other)


def is_connected(connection: Connection) -> bool:
    """Return whether a connection is still there."""
    try:
        connection.send(request("PING"))
        return connection.read().raw == b"+PONG\r\n"
    except (OSError, EOFError):
        return False


@pytest.mark.parametrize("filters", FILTERS)
def test_client_kill_disconnects_same_clients_as_redis(pair: Pair, filters: str) -> None:
    assert who_is_left(pair.sparkis, filters) == who_is_left(pair.redis, filters)


def test_killed_client_is_unlisted_for_next_request_of_buffer(pair: Pair) -> None:
    with pair.sparkis.connect() as killer, pair.sparkis.connect() as other:
        other_id = str(other.call("CLIENT", "ID").value)
        killer.send(request("CLIENT", "KILL", "ID", other_id) + request("CLIENT", "LIST", "ID", other_id))
        assert [killer.read().raw, killer.read().raw] == [b":1\r\n", b"$0\r\n\r\n"]
