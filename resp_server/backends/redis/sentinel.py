"""Finds the master that sentinels know by its name, and notices when they make another server the master.

One sentinel is queried once a second, and at once after a failure of the master; another one if it does not reply.
A subscription to `+switch-master` would be no faster: a sentinel that fails would have to be noticed in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import hiredis

from resp_server.backends.redis.tls import UpstreamTls
from resp_server.backends.redis.url import UpstreamAddress, UpstreamUrl
from resp_server.net.tls import reason_of
from resp_server.protocol.errors import internal_error
from resp_server.raw_replies.reply_splitter import pack

logger = logging.getLogger("sparkis.proxy")

# The pause between two requests to sentinels, and the shortest one after a failure (guess: a failover takes a second).
POLL_S, PAUSE_S = 1.0, 0.1
# The time limit of a request to a sentinel.
ASK_S_MAX = 1.0
# The limit of a reply from a sentinel.
REPLY_BYTES_MAX = 4096


# Has a pool of connections use another server.
Move = Callable[[UpstreamAddress], None]


class SentinelError(Exception):
    """A sentinel's reply is an error, or not understood."""


class MasterLocator:
    """Asks sentinels, and moves pools to the master. Runs on the event loop's thread."""

    def __init__(self, url: UpstreamUrl, tls: UpstreamTls | None) -> None:
        self._url, self._tls = url, tls
        self._moves: list[Move] = []
        self._master: UpstreamAddress | None = None
        self._error = "no sentinel has replied yet"
        self._number = 0  # of the sentinel to query
        self._failures = 0  # in a row
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, move: Move) -> None:
        """Have a pool move to the master now, and after each failover."""
        self._moves.append(move)
        if self._master is not None:
            move(self._master)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def remove(self, move: Move) -> None:
        """Forget a pool."""
        if move in self._moves:
            self._moves.remove(move)
        if not self._moves and self._task is not None:
            self._task.cancel()
            self._task = None

    def check_now(self) -> None:
        """Check at once, because the master has failed."""
        self._is_due.set()

    def check(self) -> None:
        """Raise OSError if the master is not known."""
        if self._master is None:
            raise OSError(self._error)

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as error:
                internal_error(error)
            # After a failure the next sentinel is queried at once, until all have been.
            if not self._failures or not self._failures % len(self._url.seeds):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_due.wait(), POLL_S)
                    await asyncio.sleep(PAUSE_S)
            self._is_due.clear()

    async def _look(self) -> None:
        sentinel = self._url.seeds[self._number % len(self._url.seeds)]
        try:
            async with asyncio.timeout(ASK_S_MAX):
                found = await self._ask(sentinel)
        except (OSError, SentinelError) as error:
            self._failed(f"the sentinel {sentinel}: {reason_of(error) or 'it does not reply'}")
            return
        if found is None:
            self._failed(f"the sentinel {sentinel} knows no master '{self._url.master}'")
            return
        self._failures, self._error = 0, ""
        if found != self._master:
            logger.info("the master %s is %s", self._url.master, found)
            self._master = found
            for move in list(self._moves):
                move(found)

    def _failed(self, reason: str) -> None:
        if reason != self._error:
            logger.warning("%s", reason)
        self._error = reason
        self._failures += 1
        self._number += 1

    async def _ask(self, sentinel: UpstreamAddress) -> UpstreamAddress | None:
        """Ask a sentinel for the address of the master; None if it knows no such master."""
        url, tls = self._url, self._tls
        context, name = (None, None) if tls is None else (tls.context(), tls.server_name or sentinel.host)
        reader, writer = await asyncio.open_connection(
            sentinel.host, sentinel.port, ssl=context, server_hostname=name, limit=REPLY_BYTES_MAX
        )
        try:
            requests: list[tuple[bytes, ...]] = []
            if url.sentinel_password is not None:
                user = (url.sentinel_user.encode(),) if url.sentinel_user else ()
                requests.append((b"AUTH", *user, url.sentinel_password.encode()))
            requests.append((b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", url.master.encode()))
            writer.write(b"".join(map(pack, requests)))
            replies = hiredis.Reader(encoding="utf-8", errors="replace", replyError=SentinelError, notEnoughData=...)
            found: object = None
            for _ in requests:
                while (found := _next(replies)) is ...:
                    data = await reader.read(REPLY_BYTES_MAX)
                    if not data:
                        raise SentinelError("it closed the connection")
                    replies.feed(data)
                if isinstance(found, SentinelError):
                    raise found
        finally:
            writer.close()
        return _address_in(found)


def _next(reader: hiredis.Reader) -> object:
    """Return the next reply; Ellipsis: it is not complete."""
    try:
        found: object = reader.gets()
    except (TypeError, hiredis.HiredisError) as error:
        raise SentinelError(f"its reply is malformed: {error}") from None
    return found


def _address_in(reply: object) -> UpstreamAddress | None:
    if reply is None:
        return None
    if not isinstance(reply, list) or len(reply) != 2 or not str(reply[1]).isdigit():
        raise SentinelError(f"its reply is not understood: {str(reply)[:200]}")
    return UpstreamAddress(str(reply[0]), int(reply[1]))
