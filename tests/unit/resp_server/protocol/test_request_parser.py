"""The request parser, each case whole, byte by byte, and with trailing bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from resp_server.protocol.errors import QueryBufferError
from resp_server.protocol.request_parser import (
    ARGUMENT_OVERHEAD_BYTES,
    CHUNK_STEPS,
    INLINE_BYTES_MAX,
    LONG_ARGUMENT_BYTES,
    LongArgument,
    LongRequest,
    Request,
    RequestLimits,
    RequestParser,
    split_requests,
)

pytestmark = pytest.mark.pure

PING = b"*1\r\n$4\r\nPING\r\n"

VALID_REQUESTS = [
    (PING, [[b"PING"]]),
    (b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n", [[b"GET", b"a"]]),
    (b"*2\r\n$3\r\nGET\r\n$0\r\n\r\n", [[b"GET", b""]]),
    (b"*2\r\n$3\r\nGET\r\n$4\r\n\r\n\r\n\r\n", [[b"GET", b"\r\n\r\n"]]),
    (b"*2\r\n$3\r\nGET\r\n$5\r\n$1\r\na\r\n", [[b"GET", b"$1\r\na"]]),
    (b"*2\r\n$3\r\nGET\r\n$2\r\na\r\r\n", [[b"GET", b"a\r"]]),
    (PING * 3, [[b"PING"]] * 3),
    (b"*0\r\n" + PING, [[b"PING"]]),
    (b"*-1\r\n" + PING, [[b"PING"]]),
    (b"*-7\r\n" + PING, [[b"PING"]]),
    (b"\r\n\n" + PING, [[b"PING"]]),
    (b"PING\r\n" + PING + b"PING\n", [[b"PING"]] * 3),
    (b"*1048577\r\n", []),
    (b"GET  a\tb \r\n", [[b"GET", b"a", b"b"]]),
    (b"SET \"a b\" 'c d'\r\n", [[b"SET", b"a b", b"c d"]]),
    (b'ECHO "\\x41\\n\\q\\""\n', [[b"ECHO", b'A\nq"']]),
    (b"ECHO 'it\\'s\\n'\n", [[b"ECHO", b"it's\\n"]]),
    (b'ECHO a"b c"\n', [[b"ECHO", b"ab c"]]),
    (b'""\n', [[b""]]),
    (b"*200\r\n" + b"$1\r\na\r\n" * 200, [[b"a"] * 200]),
    (b"*1\r\n$5000\r\n" + b"a" * 5000 + b"\r\n" + PING, [[b"a" * 5000], [b"PING"]]),
]

INVALID_REQUESTS = [
    (b"*a\r\n", "invalid multibulk length"),
    (b"*\r\n", "invalid multibulk length"),
    (b"*+1\r\n", "invalid multibulk length"),
    (b"*01\r\n", "invalid multibulk length"),
    (b"*2147483648\r\n", "invalid multibulk length"),
    (b"*1048577\r\n$1\r\na\r\n", "invalid multibulk length"),
    (b"*99999999999999999999999\r\n", "invalid multibulk length"),
    (b"*1\r\n+PING\r\n", "expected '$', got '+'"),
    (b"*1\r\n\xe9\r\n", "expected '$', got '\udce9'"),
    (b"*1\r\n$-1\r\n", "invalid bulk length"),
    (b"*1\r\n$04\r\nPING\r\n", "invalid bulk length"),
    (b"*1\r\n$536870913\r\n", "invalid bulk length"),
    (b"*1\r\n$4\r\nPINGxx", "expected a line end after a bulk string"),
    (b'ECHO "a\r\n', "unbalanced quotes in request"),
    (b'ECHO "a"b\r\n', "unbalanced quotes in request"),
    (b"ECHO 'a\r\n", "unbalanced quotes in request"),
    (b"a" * (INLINE_BYTES_MAX + 1) + b"\n", "too big inline request"),
    (b"*" + b"1" * INLINE_BYTES_MAX + b"\r\n", "too big mbulk count string"),
    (b"*1\r\n$" + b"1" * INLINE_BYTES_MAX + b"\r\n", "too big bulk count string"),
]


def parse_all(parser: RequestParser, *chunks: bytes) -> list[Request]:
    return [list(request) for chunk in chunks for request in parser.feed(chunk)]


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@pytest.mark.parametrize(("data", "requests"), VALID_REQUESTS)
def test_requests_of_whole_buffer_are_parsed(data: bytes, requests: list[Request]) -> None:
    parser = RequestParser()
    assert parse_all(parser, data) == requests
    assert parser.error is None


@pytest.mark.parametrize(("data", "requests"), VALID_REQUESTS)
def test_requests_byte_by_byte_are_parsed_alike(data: bytes, requests: list[Request]) -> None:
    parser = RequestParser()
    assert parse_all(parser, *bytewise(data)) == requests
    assert parser.error is None


@pytest.mark.parametrize(("data", "requests"), VALID_REQUESTS)
def test_trailing_bytes_wait_for_their_rest(data: bytes, requests: list[Request]) -> None:
    if not requests:
        return  # the trailing bytes would be its arguments
    parser = RequestParser()
    assert parse_all(parser, data + PING[:9]) == requests
    assert parser.buffered_bytes > 0
    assert parse_all(parser, PING[9:]) == [[b"PING"]]
    assert parser.buffered_bytes == 0


@pytest.mark.parametrize(("data", "text"), INVALID_REQUESTS)
def test_broken_request_is_one_error_after_requests_before_it(data: bytes, text: str) -> None:
    whole, single = RequestParser(), RequestParser()
    assert parse_all(whole, PING + data + PING) == [[b"PING"]]
    assert parse_all(single, PING, *bytewise(data)) == [[b"PING"]]
    assert str(whole.error) == str(single.error) == text
    assert parse_all(whole, PING) == []
    assert whole.buffered_bytes == single.buffered_bytes == 0


def test_line_of_exactly_limit_is_taken() -> None:
    parser = RequestParser()
    line = b"a" * INLINE_BYTES_MAX
    assert parse_all(parser, line, b"\n") == [[line]]


def test_huge_argument_is_joined_once() -> None:
    parser = RequestParser()
    chunk = b"x" * 65_536
    assert parse_all(parser, b"*2\r\n$4\r\nECHO\r\n$%d\r\n" % (len(chunk) * 64)) == []
    assert parse_all(parser, *[chunk] * 64) == []
    assert len(parser._chunks) > 60
    assert parse_all(parser, b"\r\n" + PING) == [[b"ECHO", chunk * 64], [b"PING"]]


def test_count_reserves_nothing() -> None:
    parser = RequestParser()
    assert parser.buffered_bytes == 0
    assert parse_all(parser, b"*2147483647\r\n$1\r\na\r\n") == []
    assert parser.buffered_bytes < 100


def test_query_buffer_limit_counts_many_small_arguments() -> None:
    parser = RequestParser(RequestLimits(query_buffer_bytes_max=10_000))
    parse_all(parser, b"*1000000\r\n", b"$1\r\na\r\n" * 1000)
    assert isinstance(parser.error, QueryBufferError)
    assert parser.buffered_bytes == 0


def test_query_buffer_limit_counts_one_large_argument() -> None:
    parser = RequestParser(RequestLimits(query_buffer_bytes_max=10_000))
    parse_all(parser, b"*1\r\n$50000\r\n", *[b"a" * 1000] * 20)
    assert isinstance(parser.error, QueryBufferError)


def test_unauthenticated_client_may_send_ten_arguments_of_16_kib() -> None:
    parser = RequestParser(is_restricted=True)
    assert parse_all(parser, b"*10\r\n" + b"$1\r\na\r\n" * 10) == [[b"a"] * 10]
    assert parse_all(parser, b"*1\r\n$16384\r\n" + b"a" * 16_384 + b"\r\n") == [[b"a" * 16_384]]
    assert parser.error is None


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"*11\r\n", "unauthenticated multibulk length"), (b"*1\r\n$16385\r\n", "unauthenticated bulk length")],
)
def test_unauthenticated_client_may_not_send_more(data: bytes, text: str) -> None:
    parser = RequestParser(is_restricted=True)
    assert parse_all(parser, data) == []
    assert str(parser.error) == text


def test_requests_after_auth_are_parsed_with_limits_of_its_result() -> None:
    parser = RequestParser(is_restricted=True)
    mget = b"*12\r\n$4\r\nMGET\r\n" + b"$1\r\na\r\n" * 11
    assert parse_all(parser, b"AUTH x\r\n" + mget) == [[b"AUTH", b"x"]]
    assert parser.has_buffered_requests
    parser.is_restricted = False
    assert parse_all(parser, b"") == [[b"MGET", *[b"a"] * 11]]
    assert not parser.has_buffered_requests


def test_unauthenticated_client_may_send_one_request_at_a_time() -> None:
    parser = RequestParser(is_restricted=True)
    assert parse_all(parser, PING * 3) == [[b"PING"]]
    assert parser.has_buffered_requests
    assert parse_all(parser, b"", b"") == [[b"PING"]] * 2
    assert not parser.has_buffered_requests


def test_splitting_takes_run_of_like_requests_and_leaves_rest() -> None:
    gets = b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in (b"a", b"bcd", b"", b"ef"))
    for rest in (b"", b"*2\r\n$3\r\nGE", PING + gets):
        requests, left = split_requests(gets + rest)
        assert [*map(list, requests)] == [[b"GET", b"a"], [b"GET", b"bcd"], [b"GET", b""], [b"GET", b"ef"]]
        assert left == rest


def test_splitting_takes_nothing_that_has_line_end_in_it() -> None:
    data = PING + b"*1\r\n$4\r\na\r\nb\r\n" + PING
    assert split_requests(data) == ([], data)


@pytest.mark.parametrize("count", [CHUNK_STEPS - 1, CHUNK_STEPS, 3 * CHUNK_STEPS + 1])
@pytest.mark.parametrize("word", [b"", b"a", b"a" * 300], ids=len)
def test_request_of_many_arguments_is_taken_in_steps(count: int, word: bytes) -> None:
    parser = RequestParser(in_chunks=True)
    data = PING * 2 + b"*%d\r\n" % count + b"$%d\r\n%b\r\n" % (len(word), word) * count + PING
    requests, words = [], [0]
    for chunk in (data[:100_000], data[100_000:]):
        requests += parser.feed(chunk)
        while parser.has_buffered_requests:
            words.append(len(parser._arguments))
            requests += parser.feed(b"")
    assert [*map(list, requests)] == [[b"PING"], [b"PING"], [word] * count, [b"PING"]]
    assert all(later - sooner <= CHUNK_STEPS for sooner, later in pairwise(words))
    assert not parser.buffered_bytes


def test_long_argument_is_taken_whole_by_parser_that_works_in_steps() -> None:
    parser = RequestParser(in_chunks=True)
    data = b"*2\r\n$300000\r\n" + b"a" * 300_000 + b"\r\n$1\r\nb\r\n"
    for start in range(0, len(data), 65_536):
        requests = parser.feed(data[start : start + 65_536])
        while parser.has_buffered_requests:
            requests += parser.feed(b"")
    assert requests == [[b"a" * 300_000, b"b"]]


def test_error_ends_parser_that_works_in_steps() -> None:
    parser = RequestParser(RequestLimits(query_buffer_bytes_max=100_000), in_chunks=True)
    assert parser.feed(b"*100000\r\n" + b"$1\r\na\r\n" * 30_000) == []
    assert isinstance(parser.error, QueryBufferError)
    assert not parser.has_buffered_requests


@pytest.mark.parametrize(
    ("data", "size_bytes"),
    [
        (b"*2\r\n$4\r\nECHO\r\n$300000\r\n" + b"a" * 300_000 + b"\r\n", 300_004 + 2 * ARGUMENT_OVERHEAD_BYTES),
        (b"*1025\r\n" + b"$1\r\na\r\n" * 1025, 1025 * (1 + ARGUMENT_OVERHEAD_BYTES)),
        (b"a " * 1025 + b"\n", 2050),
    ],
    ids=["long word", "many words", "inline"],
)
def test_request_of_many_or_long_arguments_is_executed_in_steps(data: bytes, size_bytes: int) -> None:
    first, request = RequestParser().feed(PING + data)
    assert list(first) == [b"PING"] and isinstance(request, LongRequest)
    assert request.size_bytes == size_bytes


@pytest.mark.parametrize(
    "data",
    [PING, b"*1024\r\n" + b"$1\r\na\r\n" * 1024, b"*1\r\n$200000\r\n" + b"a" * 200_000 + b"\r\n", b"a " * 1024 + b"\n"],
    ids=["short", "1024 words", "200 KB", "inline"],
)
def test_request_within_one_step_is_executed_at_once(data: bytes) -> None:
    [request] = RequestParser().feed(data)
    assert not isinstance(request, LongRequest)


LONG = b"0123456789" * (LONG_ARGUMENT_BYTES // 8)
VALUES = RequestLimits(value_bytes_max=2 * len(LONG))


def parsed_with_long_words(data: bytes, size: int) -> tuple[list[list[bytes]], RequestParser]:
    """Parse data in chunks of a size; return the requests, with their long words joined, and the parser."""
    parser, found = RequestParser(VALUES, in_chunks=True), []
    for at in range(0, len(data), size):
        found += parser.feed(data[at : at + size])
        while parser.has_buffered_requests:
            found += parser.feed(b"")
    for each in found:
        for at in each.long_at if isinstance(each, LongRequest) else ():
            word = each[at]
            assert isinstance(word, LongArgument)
            text = b"".join(word.texts)
            assert len(word) == len(text) - 2 and text.endswith(b"\r\n")
            each[at] = text[:-2]
    return list(map(list, found)), parser


@pytest.mark.parametrize("size", [1 << 30, 300_000, 65_536, len(LONG) + 30, len(LONG) + 31, len(LONG) + 32])
def test_long_value_is_not_joined(size: int) -> None:
    words = [b"MSET", b"a", LONG, b"b", b"1", b"c", LONG]
    data = b"*7\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    found, parser = parsed_with_long_words(data + PING + data + PING, size)
    assert found == [words, [b"PING"], words, [b"PING"]]
    assert parser.error is None and parser.buffered_bytes == 0


def test_first_word_and_value_without_permission_are_joined() -> None:
    data = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(LONG), LONG)
    assert RequestParser(VALUES).feed(data) == [[b"GET", LONG]]
    data = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$%d\r\n%b\r\n" % (len(LONG), LONG)
    assert RequestParser().feed(data) == [[b"SET", b"a", LONG]]


@pytest.mark.parametrize("size", [1 << 30, 65_536])
def test_long_value_has_its_limit_and_its_line_end(size: int) -> None:
    start = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n"
    for data, error in (
        (b"$%d\r\n" % (2 * len(LONG) + 1), "invalid bulk length"),
        (b"$%d\r\n%bxx" % (len(LONG), LONG), "expected a line end after a bulk string"),
    ):
        found, parser = parsed_with_long_words(PING + start + data + PING, size)
        assert found == [[b"PING"]]
        assert error in str(parser.error) and parser.buffered_bytes == 0


def test_query_buffer_limit_counts_incomplete_long_value() -> None:
    parser = RequestParser(RequestLimits(value_bytes_max=1 << 30, query_buffer_bytes_max=2 << 20), in_chunks=True)
    parser.feed(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$100000000\r\n")
    for _ in range(40):
        parser.feed(b"x" * 65_536)
    assert isinstance(parser.error, QueryBufferError) and parser.buffered_bytes == 0
