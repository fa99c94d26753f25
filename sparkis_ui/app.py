"""The web application: routes, signing in, and the WebSockets that update live pages.

A template renders a page from facts. The part that changes is the template's block `live`. It is rendered in each turn
of the hub, once for all tabs with the same URL, and sent if it differs from the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

from sparkis_ui import charts, text
from sparkis_ui.client import Endpoint, RequestError, SignInError
from sparkis_ui.guards import Guards
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.pages import browse, cluster, history, key, overview, shadow, slow, watch
from sparkis_ui.polling import Hub
from sparkis_ui.sessions import COOKIE, IDLE_S_MAX, Sessions

PAGES = tuple(each.PAGE for each in (overview, browse, watch, cluster, slow, shadow, history, key))
HERE = Path(__file__).parent
FORM_BYTES_MAX = 8192
CHANGES_S = 0.1  # the shortest time between two updates of a page that follows changes
SIGN_IN_CODE = 4401  # closes a socket: the browser loads the page again, and gets the form to sign in
TABS_MAX = 500


class Pages:
    """The templates, and the names that all of them may use."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=PackageLoader("sparkis_ui"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters: list[Callable[..., Any]] = [text.shown, text.number, text.short, text.size]
        filters += [text.duration, text.countdown, text.clock]
        self._environment.filters |= {each.__name__: each for each in filters}
        self._environment.globals |= {
            "link": text.link,
            "field": text.field,
            "graph_width": charts.WIDTH,
            "graph_height": charts.HEIGHT,
            "pages": PAGES,
        }

    def render(self, name: str, facts: dict[str, Any]) -> str:
        """Return a page."""
        return self._environment.get_template(f"{name}.html").render(facts)

    def render_live(self, name: str, facts: dict[str, Any]) -> str:
        """Return the part of a page that changes."""
        template = self._environment.get_template(f"{name}.html")
        return "".join(template.blocks["live"](template.new_context(facts)))


class Site:
    """The handlers of all routes."""

    def __init__(self, endpoint: Endpoint, is_tls: bool) -> None:
        self._pages = Pages()
        self._sessions = Sessions(endpoint)
        self._is_tls = is_tls
        self._tabs = 0

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close all connections at the end."""
        yield
        await self._sessions.close()

    def routes(self) -> list[Route | Mount | WebSocketRoute]:
        """Return the routes of the site."""
        return [
            Route("/", self._home),
            Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            *(Route(page.path, self._shower_of(page)) for page in PAGES),
            *(WebSocketRoute(f"/live{page.path}", self._sender_of(page)) for page in PAGES if page.is_live),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ]

    async def _home(self, request: Request) -> Response:
        return RedirectResponse("/overview", 302)

    def _shower_of(self, page: Page) -> Callable[[Request], Any]:
        async def show(request: Request) -> Response:
            page_request = self._page_request(request)
            try:
                await page_request.hub.poll(page.groups)
                return HTMLResponse(self._pages.render(page.name, await self._read(page, page_request)))
            except SignInError:
                here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(text.link("/sign-in", to=here), 303)

        return show

    def _sender_of(self, page: Page) -> Callable[[WebSocket], Any]:
        async def send(socket: WebSocket) -> None:
            if self._tabs >= TABS_MAX:
                await socket.close(1013, "too many tabs")
                return
            await socket.accept()
            self._tabs += 1
            sending = asyncio.create_task(self._send(page, socket))
            try:
                while True:  # a browser sends nothing, and closes at the end
                    await socket.receive_text()
            except WebSocketDisconnect:
                pass
            finally:
                self._tabs -= 1
                sending.cancel()
                with suppress(asyncio.CancelledError):
                    await sending

        return send

    async def _send(self, page: Page, socket: WebSocket) -> None:
        """Send the live part of a page whenever it differs from the last one."""
        request, sent = self._page_request(socket), ""
        url = (page.name, socket.scope["query_string"])
        with suppress(WebSocketDisconnect, RuntimeError):  # the browser has gone
            while True:
                turn, version = request.hub.turn, request.hub.watcher.version
                name = (url, version if page.follows_changes else 0)
                try:
                    await request.hub.poll(page.groups)
                    html = await request.hub.once(name, lambda: self._live(page, request))
                except SignInError:
                    await socket.close(SIGN_IN_CODE)
                    return
                if html != sent:
                    await socket.send_text(html)
                    sent = html
                await _next(request.hub, turn, version, page.follows_changes)

    async def _live(self, page: Page, request: PageRequest) -> str:
        return self._pages.render_live(page.name, await self._read(page, request))

    async def _read(self, page: Page, request: PageRequest) -> dict[str, Any]:
        hub = request.hub
        return {
            "page": page,
            "user": hub.endpoint.username,
            "url": hub.endpoint.url,
            "hub": hub,
            "is_loading": hub.facts.info.get("loading") == "1",
            "page_error": hub.facts.errors.get("jobs", ""),
            **await page.read(request),
        }

    async def _sign_in(self, request: Request) -> Response:
        to, username, error = request.query_params.get("to", ""), "", ""
        if request.method == "POST":
            form = await _form(request)
            username, to = form.get("username", ""), form.get("to", "")
            try:
                cookie = await self._sessions.sign_in(username, form.get("password", ""))
            except RequestError as refusal:
                error = str(refusal)
            else:
                response = RedirectResponse(_inside(to), 303)
                response.set_cookie(
                    COOKIE, cookie, max_age=int(IDLE_S_MAX), httponly=True, samesite="strict", secure=self._is_tls
                )
                return response
        facts = {
            "page": None,
            "to": _inside(to),
            "username": username,
            "error": error,
            "url": self._sessions.endpoint.url,
        }
        return HTMLResponse(self._pages.render("sign_in", facts), 403 if error else 200)

    async def _sign_out(self, request: Request) -> Response:
        await self._sessions.sign_out(request.cookies.get(COOKIE))
        response = RedirectResponse("/", 303)
        response.delete_cookie(COOKIE)
        return response

    def _page_request(self, connection: HTTPConnection) -> PageRequest:
        hub = self._sessions.hub_of(connection.cookies.get(COOKIE))
        return PageRequest(hub, text.Query(connection.scope["query_string"]))


async def _next(hub: Hub, turn: int, version: int, follows_changes: bool) -> None:
    """Wait for the next turn of the hub, or for a change of a watched key."""
    if not follows_changes:
        await hub.wait_for_turn(turn + 1)
        return
    await asyncio.sleep(CHANGES_S)
    waits = [
        asyncio.create_task(hub.wait_for_turn(turn + 1)),
        asyncio.create_task(hub.watcher.wait_for_change(version)),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form; none if it is longer than `FORM_BYTES_MAX`."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            return {}
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _inside(path: str) -> str:
    """Return a path of this site; for any other URL the path of the first page."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"


async def _fail(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"This page has failed ({type(error).__name__}); the program's log has the reason.\n", 500)


def make_app(endpoint: Endpoint, hosts: Sequence[str], *, is_tls: bool = False) -> Guards:
    """Return the application.

    Args:
        hosts: The names under which browsers may reach it.
        is_tls: Browsers use https.
    """
    site = Site(endpoint, is_tls)
    app = Starlette(routes=site.routes(), lifespan=site.lifespan, exception_handlers={Exception: _fail})
    return Guards(app, hosts)
