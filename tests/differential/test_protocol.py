"""Requests as bytes, right and wrong: the same answers, and the connection closed at the same byte."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from compat.conformance.generators import checked
from compat.conformance.pair import Pair
from compat.conformance.wire import Connection, exchange, request, requests

KIB = 1024
# Redis drops the connection for these, and with it what it has answered in the same turn: so they come alone here.
HTTP = [
    b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"post x\r\n",
    b"Host: x\r\n",
    b"host:\r\n",
    b"*1\r\n$4\r\nPOST\r\n",
    b"*2\r\n$5\r\nHost:\r\n$1\r\nx\r\n",
]
# The answer to a bulk string that is not as long as it says: a deviation.
LINE_END_EXPECTED = b"-ERR Protocol error: expected a line end after a bulk string\r\n"
# What follows a request that ends the connection is not answered: this shows whether it was.
LATER_REQUESTS = b"\r\nECHO after\r\n*2\r\n$4\r\nECHO\r\n$5\r\nlater\r\n"

INPUTS = [
    b"",
    b"\r\n",
    b"\n",
    b"\r\n\r\n\n\n",
    b"   \r\n",
    b"PING\r\n",
    b"PING\n",
    b"PING\r",
    b"ping\r\nPiNg x\r\n",
    b" \t PING   x \r\n",
    b'ECHO "quoted \\x41\\n\\r\\t\\a\\b\\\\ \\" \\z \\xZZ"\r\n',
    b"ECHO 'single \\' \\n'\r\n",
    b'ECHO ""\r\n',
    b"ECHO ''\n",
    b'ECHO "a"b\r\n',
    b"ECHO 'a'b\r\n",
    b'ECHO a"b c"\r\n',
    b'ECHO "a\r\n',
    b"ECHO 'a\r\n",
    b'ECHO "a\\\r\n',
    b"ECHO \x80\xff\r\n",
    b"GET \x0b\x0c plain\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"*-10\r\n",
    b"*0\r\n*1\r\n$4\r\nPING\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"*1\r\n$0\r\n\r\n",
    b"*2\r\n$4\r\nECHO\r\n$0\r\n\r\n",
    b"*2\r\n$4\r\nECHO\r\n$2\r\n\r\n\r\n",
    b"*01\r\n$4\r\nPING\r\n",
    b"*+1\r\n$4\r\nPING\r\n",
    b"* 1\r\n$4\r\nPING\r\n",
    b"*1 \r\n$4\r\nPING\r\n",
    b"*x\r\n",
    b"*\r\n",
    b"*2147483647\r\n",
    b"*2147483648\r\n",
    b"*1048577\r\n",
    b"*99999999999999999999\r\n",
    b"*-99999999999999999999\r\n",
    b"*1\r\n$-1\r\n",
    b"*1\r\n$-2\r\n",
    b"*1\r\n$04\r\nPING\r\n",
    b"*1\r\n$+4\r\nPING\r\n",
    b"*1\r\n$x\r\n",
    b"*1\r\n$\r\n",
    b"*1\r\n$536870913\r\n",
    b"*1\r\n$99999999999999999999\r\n",
    b"*1\r\n+PING\r\n",
    b"*1\r\n:4\r\n",
    b"*1\r\n*1\r\n",
    b"*1\r\nPING\r\n",
    b"*1\r\n\r\n",
    b"*1\r\n\x80\r\n",
    b"*2\r\n$4\r\nECHO\r\nx\r\n",
    b"$4\r\nPING\r\n",
    b"+PING\r\n",
    b":1\r\n",
    b"-ERR\r\n",
    b"%1\r\n",
    b"GET\r\n",
    b"GET a b\r\n",
    b"QUIT\r\n",
    b"QUIT x\r\n",
    b"RESET\r\n",
    b"PUT / HTTP/1.1\r\n",
    b"CLIENT REPLY OFF\r\nPING\r\nCLIENT REPLY ON\r\nECHO a\r\n",
    b"CLIENT REPLY SKIP\r\nPING\r\nECHO a\r\nECHO b\r\n",
    b"CLIENT REPLY SKIP\r\nCLIENT REPLY SKIP\r\nPING\r\nECHO a\r\n",
    b"CLIENT REPLY OFF\r\nCLIENT REPLY SKIP\r\nPING\r\nCLIENT REPLY ON\r\n",
    b"CLIENT REPLY SKIP\r\nCLIENT REPLY OFF\r\nPING\r\n",
    b"CLIENT REPLY SKIP\r\nCLIENT REPLY ON\r\nPING\r\n",
    b"CLIENT REPLY OFF\r\nQUIT\r\n",
    b"CLIENT REPLY SKIP\r\nRESET\r\nPING\r\n",
    b"CLIENT REPLY OFF\r\nRESET\r\nPING\r\n",
    b"CLIENT REPLY OFF\r\n*1\r\n+PING\r\n",
    b"CLIENT REPLY SKIP\r\nnope\r\nECHO a\r\n",
    b"CLIENT REPLY nope\r\n",
    b"CLIENT REPLY\r\n",
]

# A little of everything, with answers that do not depend on the server.
CONVERSATION = (
    requests([[b"PING"], [b"ECHO", b"\r\n$1\r\n"], [b"GET", b"plain"], [b"nope", b"x"], [b"GET"]])
    + b"ECHO 'in line'\r\n\r\n*0\r\nGET empty\n"
    + requests([[b"HMGET", b"hash:one", b"field", b"nope"], [b"STRLEN", b"big"]])
)


@pytest.mark.parametrize("data", INPUTS, ids=repr)
def test_malformed_bytes_are_answered_as_by_redis(pair: Pair, data: bytes) -> None:
    pair.check_bytes(data)
    pair.check_bytes(data + LATER_REQUESTS)
    pair.check_bytes(b"PING\r\n" + data + LATER_REQUESTS)


@pytest.mark.parametrize("data", HTTP, ids=repr)
def test_http_request_of_web_page_ends_connection_as_at_redis(pair: Pair, data: bytes) -> None:
    assert pair.check_bytes(data + LATER_REQUESTS) == b""


# hypothesis finds words in the sources and tries them: no other commands, some of which would write.
WORD = re.compile(rb"[A-Za-z]{3,}")
KNOWN_WORDS = {word.upper() for data in (*INPUTS, LATER_REQUESTS) for word in WORD.findall(data)}
# No zero bytes: they are a deviation.
CHUNKS = st.one_of(
    st.sampled_from([each for each in INPUTS if len(each) < 40]),
    st.binary(max_size=8).map(lambda chunk: chunk.replace(b"\0", b"")),
    st.sampled_from([b"*", b"$", b"\r\n", b"\n", b"1", b"3", b"-", b"PING", b"ECHO ", b"'", b'"', b"\\x4", b" "]),
)


@given(chunks=st.lists(CHUNKS, max_size=6))
@checked(50)
def test_garbage_is_answered_as_by_redis(pair: Pair, chunks: list[bytes]) -> None:
    data = b"".join(chunks) + LATER_REQUESTS
    assume(all(word.upper() in KNOWN_WORDS for word in WORD.findall(data)))
    assume(LINE_END_EXPECTED not in exchange(pair.sparkis.port, data))
    pair.check_bytes(data)


@pytest.mark.parametrize("pause_s", [0.0, 0.002])
def test_requests_cut_at_any_byte_are_answered_as_by_redis(pair: Pair, pause_s: float) -> None:
    whole = pair.check_bytes(CONVERSATION)
    for cut in range(1, len(CONVERSATION)):
        assert pair.check_bytes(CONVERSATION, [cut], pause_s) == whole


def test_requests_byte_by_byte_are_answered_as_by_redis(pair: Pair) -> None:
    assert pair.check_bytes(CONVERSATION, range(1, len(CONVERSATION)), 0.001) == pair.check_bytes(CONVERSATION)


@pytest.mark.parametrize("size", [64 * KIB - 8, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 64 * KIB + 2, 80 * KIB])
def test_limit_of_inline_commands_equals_redis(pair: Pair, size: int) -> None:
    """Redis looks for the line's end in what it has read: so without one, the limit is exact."""
    pair.check_bytes(b"ECHO " + b"x" * (size - 5))


@pytest.mark.parametrize("mark", [b"*", b"*1\r\n$"])
@pytest.mark.parametrize("size", [64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 64 * KIB + 2, 80 * KIB])
def test_limit_of_numbers_equals_redis(pair: Pair, mark: bytes, size: int) -> None:
    pair.check_bytes(mark + b"1" * size)


@pytest.mark.parametrize("size", [0, 1, 16 * KIB, 64 * KIB, 1024 * KIB])
def test_arguments_of_any_size_come_back(pair: Pair, size: int) -> None:
    pair.check([[b"ECHO", b"x" * size], [b"PING", b"\r\n" * (size // 2)], [b"ECHO", b"after"]])


def test_many_arguments_are_answered_as_by_redis(pair: Pair) -> None:
    pair.check([[b"EXISTS", *[b"plain"] * 20_000], [b"MGET", *[b"number", b"nope"] * 2_000], [b"ECHO", b"after"]])


def test_long_pipeline_is_answered_in_order(pair: Pair) -> None:
    pair.check([[b"ECHO", b"%d" % number] for number in range(5_000)])


@pytest.mark.parametrize("last", [b"*1\r\n+PING\r\n", b"QUIT\r\n", b"RESET\r\nQUIT\r\n", b"ECHO 'a\r\n"])
def test_both_close_by_themselves(pair: Pair, last: bytes) -> None:
    """The client keeps its end open: that the answer ends is the server's doing."""
    answers = []
    for server in (pair.redis, pair.sparkis):
        with Connection(server.port) as connection:
            connection.send(request("PING") + last)
            answers.append(connection.read_to_end())
    assert answers[0] == answers[1]


def test_endless_request_delays_no_other_client(pair: Pair) -> None:
    with pair.sparkis.connect() as slow, pair.sparkis.connect() as other:
        slow.send(b"*2\r\n$4\r\nECHO\r\n$10\r\n12345")
        assert other.call("PING").value == b"PONG"
        slow.send(b"67890\r\n")
        assert slow.read().value == b"1234567890"
