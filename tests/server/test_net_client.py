"""The small synchronous client against a real server."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.certificates import Authority
from compat.conformance.servers import free_port
from resp_server.net.client import Client, ClientError
from resp_server.net.tls import TlsFiles, client_context, server_context


def test_client_from_url_reads(serve: Callable[..., Any]) -> None:
    port = serve(password="a b").server.port
    with Client.from_url(f"redis://:a%20b@127.0.0.1:{port}") as client:
        assert client.call("GET", "job:temp:5") == "5"
        assert client.call("MGET", "job:temp:5", "nope") == ["5", None]
        assert len(client.call("HKEYS", "job:visits:/")) == 5000
    with Client.from_url(f"redis://127.0.0.1:{port}", other_password="a b") as client:
        assert client.call("GET", "job:temp:5") == "5"
    with pytest.raises(ClientError, match="WRONGPASS"):
        Client.from_url(f"redis://:wrong@127.0.0.1:{port}", other_password="a b")


def test_error_reply_is_raised_with_address(serve: Callable[..., Any]) -> None:
    port = serve().server.port
    with Client("127.0.0.1", port) as client:
        with pytest.raises(ClientError, match=f"127.0.0.1:{port}: READONLY"):
            client.call("SET", "a", "b")
        assert client.call("PING") == "PONG"


def test_wrong_password_is_raised_at_once(serve: Callable[..., Any]) -> None:
    port = serve(password="secret").server.port
    with pytest.raises(ClientError, match="WRONGPASS"):
        Client("127.0.0.1", port, password="other")


def test_refused_connection_names_address() -> None:
    port = free_port()
    with pytest.raises(ClientError, match=f"cannot connect to 127.0.0.1:{port}"):
        Client("127.0.0.1", port)


def test_silent_server_is_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client("127.0.0.1", silent.getsockname()[1], timeout_s=0.05)
        with client, pytest.raises(ClientError, match="did not reply to PING"):
            client.call("PING")


@pytest.mark.parametrize(
    ("with_tls", "hint"), [(False, "does it speak TLS (rediss://)?"), (True, "does it ask for a certificate?")]
)
def test_early_end_of_connection_is_error_with_likely_causes(tmp_path: Path, with_tls: bool, hint: str) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def hear_and_end() -> None:
            taken = listener.accept()[0]
            if with_tls:
                taken = server_context(TlsFiles(str(cert), str(key))).wrap_socket(taken, server_side=True)
            with taken:
                assert taken.recv(1000)

        done = pool.submit(hear_and_end)
        context = client_context(TlsFiles(ca=str(authority.ca))) if with_tls else None
        with (
            Client("127.0.0.1", listener.getsockname()[1], tls=context) as client,
            pytest.raises(ClientError, match=re.escape(f"closed the connection: {hint}")),
        ):
            client.call("PING")
        done.result()


@pytest.mark.parametrize("url", ["http://a", "redis://", "redis://a:b:c", "nothing"])
def test_invalid_redis_url_is_named(url: str) -> None:
    with pytest.raises(ClientError, match="is not a URL"):
        Client.from_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:planted@127.0.0.1:1",
        "user:planted@127.0.0.1:1",
        "redis://:planted@127.0.0.1:99999",
        "redis://:planted/x@127.0.0.1:1",
        "redis://:x#planted@127.0.0.1:1",
        "redis://:planted@127.0.0.1:x",
        "redis://:planted@",
    ],
)
def test_error_about_url_hides_its_password(url: str) -> None:
    with pytest.raises(ClientError, match=r"@127\.0\.0\.1|@'") as error:
        Client.from_url(url)
    assert "planted" not in str(error.value)
