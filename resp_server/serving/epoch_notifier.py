"""Sends new epochs and invalidations to idle clients: those that follow this server, or track keys."""

from __future__ import annotations

import asyncio

from resp_server.client.connection import Connection
from resp_server.pipeline.context import ServerContext
from resp_server.serving.invalidation_sender import InvalidationSender

# The interval of reporting new epochs to idle clients that follow this server or track keys (guess).
NOTIFY_SECONDS = 0.02


class EpochNotifier:
    """The timer that looks for new epochs, while a client needs to know them."""

    def __init__(self, context: ServerContext, invalidations: InvalidationSender) -> None:
        self._context = context
        self._invalidations = invalidations
        self._following: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        context.tracking.on_begin = self._begin

    @property
    def is_followed(self) -> bool:
        """Whether a client follows the server's epochs."""
        return bool(self._following)

    def follow(self, connection: Connection) -> None:
        """Report new epochs to a client for as long as it follows the server."""
        self._following.add(connection)
        self._context.keep_epochs(self._context.clock(), is_followed=True)
        self._schedule()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._context.renew_all()  # so that later changes are reported, also of unread keys
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTIFY_SECONDS, self._notify)

    def _notify(self) -> None:
        self._timer = None
        tracking = self._context.tracking
        if self._following or tracking.clients or tracking.is_freeing:
            self._schedule()  # before all that may raise, and here: nothing else sends the next invalidations
            self._context.renew_all()
            self._following = {each for each in self._following if each.is_following}
            for each in list(self._following):
                each.send_epochs()
            self._invalidations.send()
            tracking.free()
