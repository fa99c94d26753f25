"""The facts in the reply to HELLO of an upstream."""

from __future__ import annotations

import pytest

from resp_server.backends.redis.hello import hello_fields
from resp_server.protocol.replies import encode


def test_only_fields_about_server_are_taken() -> None:
    module = [b"name", b"search", b"ver", 20811]
    reply = encode([b"server", b"redis", b"version", b"7.0.15", b"proto", 2, b"id", 5, b"modules", [module]], 2)  # type: ignore[list-item]
    assert hello_fields(reply) == {
        b"server": b"redis",
        b"version": b"7.0.15",
        b"modules": [{b"name": b"search", b"ver": 20811}],
    }


def test_unknown_hello_has_no_fields() -> None:
    assert hello_fields(b"-ERR unknown command\r\n") == {}


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"+OK\r\n", "it is no map: b'OK'"),
        (b":1\r\n", "it is no map: 1"),
        (b"*1\r\n$1\r\na\r\n", r"zip\(\) argument 2 is shorter"),
    ],
)
def test_other_replies_are_refused(reply: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        hello_fields(reply)
