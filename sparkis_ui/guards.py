"""Headers of all responses, and refusals of requests that other sites cause.

A page of another site may make a browser send requests here. With DNS rebinding they have a foreign `Host`. Forms and
WebSockets of the other page have a foreign `Origin`.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # keys are in URLs
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guards:
    """Checks `Host` and `Origin` of all requests, and adds headers to all responses."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal and scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": refusal})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        app = PlainTextResponse(f"{refusal}\n", 403) if refusal else self._app
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> str:
        """Return why a request is refused; empty if it is not."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if name_of(f"//{host}") not in self._hosts:
            return "this page has another name: start `sparkis ui` with --host-name NAME to allow it"
        is_read = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        origin = headers.get("origin")
        if (origin is not None or not is_read) and urlsplit(origin or "").netloc.lower() != host.lower():
            return "a page of another origin may not do this"
        return ""


def name_of(url: str) -> str:
    """Return the host name of a URL; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
