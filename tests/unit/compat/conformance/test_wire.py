"""Replies are read as they were sent, and parts of replies are not taken for whole ones."""

from __future__ import annotations

from typing import Any

import pytest

from compat.conformance.wire import NotAReplyError, replies_in, request, requests

PLAIN: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", b"OK"),
    (b"-ERR no\r\n", b"ERR no"),
    (b":-12\r\n", -12),
    (b"$2\r\n\r\n\r\n", b"\r\n"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"*0\r\n", []),
    (b"*2\r\n:1\r\n*1\r\n_\r\n", [1, [None]]),
    (b"~1\r\n+a\r\n", [b"a"]),
    (b"%2\r\n+a\r\n:1\r\n+b\r\n*0\r\n", [b"a", 1, b"b", []]),
    (b"=5\r\ntxt:a\r\n", b"txt:a"),
    (b",1.5\r\n", b"1.5"),
    (b"#t\r\n", b"t"),
]


@pytest.mark.parametrize(("data", "plain"), PLAIN)
def test_reply_is_read(data: bytes, plain: Any) -> None:
    (reply,) = replies_in(data)
    assert (reply.plain, reply.raw, reply.type) == (plain, data, chr(data[0]))


def test_replies_are_read_one_after_another() -> None:
    assert [reply.raw for reply in replies_in(b"".join(data for data, _ in PLAIN))] == [data for data, _ in PLAIN]


@pytest.mark.parametrize("data", [data for data, _ in PLAIN])
def test_part_of_reply_is_none(data: bytes) -> None:
    for end in range(1, len(data)):
        with pytest.raises(NotAReplyError):
            replies_in(data[:end])


def test_bytes_that_are_no_reply_are_error() -> None:
    with pytest.raises(NotAReplyError):
        replies_in(b"HTTP/1.1 400\r\n")


def test_request_is_array_of_bulk_strings() -> None:
    assert request("GET", b"\xff", 7) == b"*3\r\n$3\r\nGET\r\n$1\r\n\xff\r\n$1\r\n7\r\n"
    assert requests([[b"A"], [b"B"]]) == request("A") + request("B")
