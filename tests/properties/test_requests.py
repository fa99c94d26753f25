"""Requests do not depend on the chunks of the input, and memory stays bounded for any input."""

from __future__ import annotations

from itertools import chain, pairwise
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import example, given, settings

from compat.examples import examples
from resp_server.protocol.errors import ProtocolError
from resp_server.protocol.request_parser import Request, RequestLimits, RequestParser, split_requests, split_together

# Texts that look like the protocol itself are the interesting ones.
texts = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"GET", b"key:000001", b"\r\n", b"$1\r\na", b"*1\r\n$4\r\nPING\r\n", b"a\r", b"\n", b"", b"x" * 2000]
    ),
)
requests_sent = st.lists(st.lists(texts, min_size=1, max_size=6), max_size=12)
like_requests = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.lists(texts, min_size=count, max_size=count), min_size=3, max_size=10)
)
# Runs of one command, in one buffer with others before and behind.
columns = st.tuples(texts.filter(bool), st.lists(texts, min_size=1, max_size=8)).map(
    lambda drawn: [[drawn[0], text] for text in drawn[1]]
)
columns_sent = st.lists(st.one_of(columns, requests_sent), max_size=3).map(lambda runs: [*chain.from_iterable(runs)])
cuts = st.lists(st.integers(0, 400), max_size=8)

marks = b"*1\r\n *2\r\n *0\r\n *-1\r\n *9\r\n *x $ $4\r\n $0\r\n $-1\r\n PING \r\n \r \n \" ' \\x4 \0 \xff".split(b" ")
fragments = st.sampled_from([*marks, b" "])
garbage = st.lists(st.one_of(fragments, st.binary(max_size=5)), max_size=30).map(b"".join)


def packed(request: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(request) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in request)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(ends)]


def outcome(chunks: list[bytes], is_restricted: bool = False) -> tuple[list[Request], ProtocolError | None]:
    """Return what a parser makes of bytes; one that works in chunks makes the same."""
    requests, error = parse_all(chunks, is_restricted)
    others, other_error = parse_all(chunks, is_restricted, in_chunks=True)
    assert requests == others
    assert str(error) == str(other_error)
    return requests, error


# Bytes of a chunk, and steps: lines that are no words are shorter.
SMALL_CHUNKS = {"CHUNK_BYTES": 300, "CHUNK_STEPS": 2}


def parse_all(
    chunks: list[bytes], is_restricted: bool, in_chunks: bool = False
) -> tuple[list[Request], ProtocolError | None]:
    with patch.multiple("resp_server.protocol.request_parser", **SMALL_CHUNKS):
        return _parsed(chunks, is_restricted, in_chunks)


def _parsed(chunks: list[bytes], is_restricted: bool, in_chunks: bool) -> tuple[list[Request], ProtocolError | None]:
    parser = RequestParser(RequestLimits(query_buffer_bytes_max=1 << 20), is_restricted, in_chunks)
    requests: list[Request] = []
    for chunk in chunks:
        requests += parser.feed(chunk)
        while parser.has_buffered_requests:
            requests += parser.feed(b"")
    return [list(request) for request in requests], parser.error


@given(st.one_of(requests_sent, like_requests, columns_sent), cuts)
def test_any_chunking_gives_requests_that_were_sent(sent: list[list[bytes]], places: list[int]) -> None:
    data = b"".join(map(packed, sent))
    assert outcome(cut(data, places)) == (sent, None)
    assert outcome([data]) == (sent, None)
    assert outcome([*(data[at : at + 1] for at in range(len(data[:5000]))), data[5000:]]) == (sent, None)


@given(st.one_of(requests_sent, like_requests, columns_sent), st.binary(max_size=20))
def test_splitting_takes_nothing_that_was_not_sent(sent: list[list[bytes]], trailing: bytes) -> None:
    data = b"".join(map(packed, sent))
    requests, rest = split_requests(data + trailing)
    taken = [list(request) for request in requests]
    assert taken[: len(sent)] == sent[: len(taken)]
    assert (data + trailing).endswith(rest)
    assert b"".join(map(packed, taken)) + rest == data + trailing


HEAD = b"*2\r\n$3\r\nGET\r\n"
gets = st.lists(st.binary(max_size=6), min_size=1, max_size=3).map(
    lambda keys: b"".join(packed([b"GET", key]) for key in keys)
)
inputs_alike = st.one_of(
    gets,
    st.builds(lambda data, size: data[: max(len(HEAD), size)], gets, st.integers(0, 70)),  # cut off anywhere
    st.builds(bytes.__add__, gets, st.sampled_from([b"*", b"\r\n", HEAD, packed([b"TTL", b"k"]), packed([b"PING"])])),
    st.binary(max_size=20).map(HEAD.__add__),
)


@given(st.lists(inputs_alike, min_size=1, max_size=5))
@example([HEAD + b"$1\r\na\r\n*", HEAD + b"$1\r\na\r\n"])
@example([HEAD + b"$3\r\n", HEAD])
@example([HEAD + b"$9\r\na\r\n", HEAD + b"$1\r\na\r\n"])
def test_inputs_split_together_give_each_client_requests_that_it_sent(inputs: list[bytes]) -> None:
    counts, requests = split_together(inputs)
    assert len(counts) == len(inputs) and sum(counts) == len(requests)
    left = [list(request) for request in requests]
    for data, count in zip(inputs, counts, strict=True):
        own, left = left[:count], left[count:]
        if count:
            parser = RequestParser()
            assert [list(request) for request in parser.feed(data)] == own
            assert not parser.buffered_bytes


@given(st.lists(gets, min_size=1, max_size=5))
def test_whole_requests_of_one_command_are_all_split_together(inputs: list[bytes]) -> None:
    _, requests = split_together(inputs)
    if not any(b"\r\n" in request[1] for data in inputs for request in RequestParser().feed(data)):
        assert [list(request) for request in requests] == [
            list(request) for data in inputs for request in RequestParser().feed(data)
        ]


@settings(max_examples=examples(150))
@given(garbage, cuts)
@example(b"*1\r\n$4\r\nPINGxx", [9])
@example(b"*2\r\n$3\r\nGET\r\n$1\r\n", [3, 9])
@example(b'"\\x4', [1])
@example(b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n" * 3 + b"*2\r\n$3\r\nGET\r\n$12\r\n", [])
@example(b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*2\r\n$3\r\nGET\r\n$x\r\nb\r\n", [])
def test_garbage_has_same_outcome_for_any_chunking(data: bytes, places: list[int]) -> None:
    requests, error = outcome([data])
    for chunks in (cut(data, places), [data[at : at + 1] for at in range(len(data))]):
        others, other_error = outcome(chunks)
        assert others == requests
        assert str(other_error) == str(error)


@given(garbage, cuts)
def test_restricted_parser_gives_same_requests_up_to_its_error(data: bytes, places: list[int]) -> None:
    requests, error = outcome([data])
    restricted, other_error = outcome(cut(data, places), is_restricted=True)
    assert restricted == requests[: len(restricted)]
    assert len(restricted) == len(requests) or other_error is not None
    assert error is None or other_error is not None


@given(st.lists(garbage, max_size=40))
def test_input_is_bounded_for_any_bytes(chunks: list[bytes]) -> None:
    limit_bytes = 500
    parser = RequestParser(RequestLimits(bulk_bytes_max=300, query_buffer_bytes_max=limit_bytes))
    for chunk in chunks:
        parser.feed(chunk)
        assert parser.buffered_bytes <= limit_bytes
        if parser.error is not None:
            assert parser.buffered_bytes == 0
            assert parser.feed(b"*1\r\n$4\r\nPING\r\n") == []
