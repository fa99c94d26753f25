"""Values of several megabytes through a proxy with an upstream."""

from __future__ import annotations

import pytest

from compat.conformance.wire import Connection
from resp_server.backends.routing.long_arguments import VALUE_BYTES_MAX
from resp_server.protocol.request_parser import LONG_ARGUMENT_BYTES

LONG = bytes(range(256)) * (5 << 12)
REFUSAL = "-ERR only a value for the upstream may have more than 1 MB\r\n"


def test_value_of_megabytes_is_written_and_read(client: Connection) -> None:
    assert client.call("SET", "a", LONG).plain == b"OK"
    assert client.call("GET", "a").plain == LONG
    assert client.call("RPUSH", "list", "short", LONG).plain == 2
    assert client.call("LRANGE", "list", 0, -1).plain == [b"short", LONG]
    assert client.call("EVAL", "return #ARGV[1]", 1, "k", LONG).plain == len(LONG)
    assert client.call("PUBLISH", "channel", LONG).plain == 0
    client.call("DEL", "list")


def test_transaction_accepts_value_of_megabytes(client: Connection) -> None:
    assert client.call("MULTI").plain == b"OK"
    assert client.call("SET", "b", LONG).plain == b"QUEUED"
    assert client.call("STRLEN", "b").plain == b"QUEUED"
    assert client.call("EXEC").plain == [b"OK", len(LONG)]


def test_value_of_many_megabytes_is_read_whole(client: Connection) -> None:
    size = 13 * len(LONG) + 1
    client.send(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$%d\r\n" % size + LONG * 13 + b"e\r\n")
    assert client.read().plain == b"OK"
    assert client.call("STRLEN", "a").plain == size
    is_same = client.call("GET", "a").plain == LONG * 13 + b"e"  # no text of megabytes is to be compared line by line
    assert is_same
    assert client.call("DEL", "a").plain == 1


def test_value_above_limit_closes_connection_with_redis_error(client: Connection) -> None:
    client.send(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$%d\r\n" % (VALUE_BYTES_MAX + 1))
    assert client.read().raw == b"-ERR Protocol error: invalid bulk length\r\n"
    assert client.read_to_end() == b""


@pytest.mark.parametrize(
    "words",
    [
        ["GET", LONG],
        ["MSET", "a", "1", LONG, "2"],
        [LONG, "a"],
        ["PUBLISH", LONG, "x"],
        ["KEYS", LONG],
        ["SCAN", "0", "MATCH", LONG],
        ["HGET", "job:speed:1", LONG],
        ["SET", "job:speed:1", LONG],
        ["CLIENT", "SETNAME", LONG],
        ["ECHO", LONG],
        ["SUBSCRIBE", "a", LONG],
    ],
    ids=lambda words: " ".join("LONG" if word is LONG else str(word) for word in words),
)
def test_other_argument_above_megabyte_is_refused(client: Connection, words: list[bytes | str]) -> None:
    assert client.call(*words).raw.decode() == REFUSAL
    assert client.call("PING").plain == b"PONG"


def test_argument_of_megabyte_is_accepted_anywhere(client: Connection) -> None:
    key = b"k" * LONG_ARGUMENT_BYTES
    assert client.call("SET", key, "1").plain == b"OK"
    assert client.call("GETDEL", key).plain == b"1"
