"""Sessions of users who have signed in. Passwords stay in this process's memory; a browser's cookie is a random name.

Sessions of the same user with the same password share a hub, and so its connections and its polling loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from sparkis_ui.client import Client, Endpoint, RequestError
from sparkis_ui.polling import Hub

COOKIE = "sparkis_ui"
SESSIONS_MAX = 1000
IDLE_S_MAX = 12 * 3600.0
FAILED_S = 1.0  # all browsers together can try one wrong password a second


@dataclass
class Session:
    """A browser that has signed in."""

    hub: Hub
    used_s: float


class Sessions:
    """The sessions, and one hub for all browsers without a session, with the user of the URL or none."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._sessions: dict[str, Session] = {}
        self._everybody = Hub(endpoint)
        self._signing_in = asyncio.Lock()

    def hub_of(self, cookie: str | None) -> Hub:
        """Return the hub of a browser."""
        session = self._sessions.get(cookie or "")
        if session is None or time.monotonic() - session.used_s > IDLE_S_MAX:
            return self._everybody
        session.used_s = time.monotonic()
        return session.hub

    async def sign_in(self, username: str, password: str) -> str:
        """Start a session for a Redis user; return its cookie. RequestError if the server does not accept the user."""
        endpoint = self.endpoint.as_user(username or "default", password)
        async with self._signing_in:
            client = Client(endpoint)
            try:
                await client.execute("PING")
            except RequestError:
                await asyncio.sleep(FAILED_S)
                raise
            finally:
                await client.close()
        await self._forget_old()
        same = (session.hub for session in self._sessions.values() if session.hub.endpoint == endpoint)
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = Session(next(same, None) or Hub(endpoint), time.monotonic())
        return cookie

    async def sign_out(self, cookie: str | None) -> None:
        """End a session."""
        session = self._sessions.pop(cookie or "", None)
        if session is not None and all(each.hub is not session.hub for each in self._sessions.values()):
            await session.hub.close()

    async def close(self) -> None:
        """End all sessions."""
        for cookie in list(self._sessions):
            await self.sign_out(cookie)
        await self._everybody.close()

    async def _forget_old(self) -> None:
        now_s = time.monotonic()
        for cookie in [each for each, session in self._sessions.items() if now_s - session.used_s > IDLE_S_MAX]:
            await self.sign_out(cookie)
        while len(self._sessions) >= SESSIONS_MAX:
            await self.sign_out(min(self._sessions, key=lambda cookie: self._sessions[cookie].used_s))
