"""The small synchronous client against a real server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from compat.conformance.servers import free_port
from resp_server.client import Client, ClientError


def test_a_url_leads_to_replies(serve: Callable[..., Any]) -> None:
    port = serve(password="a b").server.port
    with Client.from_url(f"redis://:a%20b@127.0.0.1:{port}") as client:
        assert client.call("GET", "job:temp:5") == "5"
        assert client.call("MGET", "job:temp:5", "nope") == ["5", None]
        assert len(client.call("HKEYS", "job:visits:/")) == 5000


def test_an_error_reply_is_raised_with_the_address(serve: Callable[..., Any]) -> None:
    port = serve().server.port
    with Client("127.0.0.1", port) as client:
        with pytest.raises(ClientError, match=f"127.0.0.1:{port}: READONLY"):
            client.call("SET", "a", "b")
        assert client.call("PING") == "PONG"


def test_a_wrong_password_is_raised_at_once(serve: Callable[..., Any]) -> None:
    port = serve(password="secret").server.port
    with pytest.raises(ClientError, match="WRONGPASS"):
        Client("127.0.0.1", port, password="other")


def test_a_server_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(ClientError, match=f"cannot connect to 127.0.0.1:{port}"):
        Client("127.0.0.1", port)


def test_a_server_that_says_nothing_is_not_waited_for_longer_than_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client("127.0.0.1", silent.getsockname()[1], timeout_s=0.05)
        with client, pytest.raises(ClientError, match="did not answer PING"):
            client.call("PING")


@pytest.mark.parametrize("url", ["http://a", "redis://", "redis://a:b:c", "nothing"])
def test_what_is_no_redis_url_is_said(url: str) -> None:
    with pytest.raises(ClientError, match="is not a URL"):
        Client.from_url(url)
