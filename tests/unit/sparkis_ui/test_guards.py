"""`Host` and `Origin` of requests, and the headers of responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from sparkis_ui.guards import HEADERS, Guards

HOSTS = ("localhost", "127.0.0.1", "::1", "Page.example")


async def page(scope: Scope, receive: Receive, send: Send) -> None:
    """Accept everything."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await PlainTextResponse("seen")(scope, receive, send)


def ask(kind: str, method: str, **headers: str) -> list[Message]:
    """Return what the guarded page sends."""
    sent: list[Any] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": method, "path": "/", "headers": raw, "query_string": b""}
    asyncio.run(Guards(page, HOSTS)(scope, receive, send))
    return sent


@pytest.mark.parametrize("host", ["localhost:7380", "127.0.0.1", "[::1]:7380", "LOCALHOST:1", "page.example:99"])
def test_known_host_is_served(host: str) -> None:
    start, body = ask("http", "GET", host=host)
    assert start["status"] == 200
    assert body["body"] == b"seen"


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:7380", "", "[::1", "127.0.0.1@evil.example", "x localhost"]
)
def test_another_host_is_refused(host: str) -> None:
    start, body = ask("http", "GET", host=host)
    assert start["status"] == 403
    assert b"--host-name" in body["body"]
    (end,) = ask("websocket", "", host=host, origin=f"http://{host}")
    assert end["type"] == "websocket.close"


def test_request_without_host_is_refused() -> None:
    assert ask("http", "GET")[0]["status"] == 403


@pytest.mark.parametrize(
    ("method", "origin", "status"),
    [
        ("GET", None, 200),
        ("HEAD", None, 200),
        ("GET", "http://localhost:7380", 200),
        ("GET", "http://evil.example", 403),
        ("POST", "http://localhost:7380", 200),
        ("POST", "https://LOCALHOST:7380", 200),
        ("POST", None, 403),
        ("POST", "null", 403),
        ("POST", "http://localhost:7381", 403),
        ("POST", "http://evil.example", 403),
        ("DELETE", None, 403),
    ],
)
def test_form_comes_from_this_page_alone(method: str, origin: str | None, status: int) -> None:
    headers = {"host": "localhost:7380"} | ({} if origin is None else {"origin": origin})
    assert ask("http", method, **headers)[0]["status"] == status


@pytest.mark.parametrize(
    ("origin", "kind"),
    [
        ("http://localhost:7380", "websocket.accept"),
        ("http://evil.example", "websocket.close"),
        ("null", "websocket.close"),
        (None, "websocket.close"),
    ],
)
def test_socket_comes_from_this_page_alone(origin: str | None, kind: str) -> None:
    headers = {"host": "localhost:7380"} | ({} if origin is None else {"origin": origin})
    assert ask("websocket", "", **headers)[0]["type"] == kind


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_every_response_forbids_foreign_content(host: str) -> None:
    found = {name.decode().lower(): value.decode() for name, value in ask("http", "GET", host=host)[0]["headers"]}
    assert {name.lower(): value for name, value in HEADERS.items()}.items() <= found.items()
    assert found["cache-control"] == "no-store"
    policy = dict(each.strip().split(" ", 1) for each in found["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in found["content-security-policy"]
