"""Delays requests that would get the error LOADING, until the server has opened their job.

The server delays such a request, and the later requests of its connection, for up to LOADING_WAIT_S. It retries the
request whenever its jobs change. Requests of other connections are not delayed. EXEC and requests within MULTI get the
error at once, because clients repeat a transaction as a whole. Proxies get it at once, too: they send the requests of
many clients over one connection, and retry LOADING themselves.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Container

from resp_server.protocol.replies import Retry
from resp_server.session.session import Session
from state_backend.store.keyspace import Keyspace

LOADING = b"-LOADING "
# A connection waits at most this long in each WAIT_PERIOD_S. Opening a job takes less, unless its state is large. Some
# clients give up after two seconds without a reply.
LOADING_WAIT_S = 1.0
WAIT_PERIOD_S = 10.0
# More waiting clients than this get the error at once (guess).
WAITING_CLIENTS_MAX = 1_000
POLL_S = 0.01


class LoadingWaits:
    """The clients of one server that wait for a job. Runs on the event loop's thread."""

    def __init__(self, keyspace: Keyspace, sessions: Container[int], is_loading: Callable[[], bool]) -> None:
        self._keyspace = keyspace
        self._sessions = sessions
        self._is_loading = is_loading
        # By session id: when its last wait ends or ended, by `time.monotonic`.
        self._until_s: dict[int, float] = {}
        self._waiting: list[Retry] = []
        self._poll: asyncio.TimerHandle | None = None
        self._seen: tuple[int, bool] = (0, False)

    @property
    def may_occur(self) -> bool:
        """Whether any request may be answered with LOADING now."""
        return self._is_loading() or None in self._keyspace.unreadable.values()

    def retry_of(self, session: Session) -> Retry | None:
        """Return the delayed reply to a request that got LOADING; None: the client gets the error."""
        if not self.may_occur or session.epoch_feed is not None or len(self._waiting) >= WAITING_CLIENTS_MAX:
            return None
        now_s = time.monotonic()
        if now_s > self._until_s.get(session.id, -math.inf) + WAIT_PERIOD_S:
            if len(self._until_s) >= WAITING_CLIENTS_MAX:
                self._forget_until(now_s - WAIT_PERIOD_S)
            self._until_s[session.id] = now_s + LOADING_WAIT_S
        remaining_s = self._until_s[session.id] - now_s
        if remaining_s <= 0:
            return None
        retry = Retry(remaining_s)
        self._waiting.append(retry)
        if self._poll is None:
            self._seen = self._version
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._poll_jobs)
        return retry

    def _forget_until(self, ended_s: float) -> None:
        """Forget the waits that ended before a time, and those of clients that have left."""
        sessions = self._sessions
        self._until_s = {each: at_s for each, at_s in self._until_s.items() if at_s > ended_s and each in sessions}

    @property
    def _version(self) -> tuple[int, bool]:
        return self._keyspace.version, self._is_loading()

    def _poll_jobs(self) -> None:
        """Retry the waiting requests if the jobs have changed."""
        self._poll = None
        if self._version != self._seen:
            self._seen = self._version
            waiting, self._waiting = self._waiting, []
            for retry in waiting:
                retry.resolve(lambda: None)
        else:
            self._waiting = [each for each in self._waiting if each.is_awaited]
        if self._waiting:
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._poll_jobs)
