"""Reads the upstream's `notify-keyspace-events`. The setting also applies to notifications of states' keys."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.upstream_settings import EVENTS_REQUEST, events_in
from resp_server.pipeline.context import ServerContext
from resp_server.protocol.errors import ReplyError
from resp_server.raw_replies.answers import ask
from resp_server.raw_replies.reply_sinks import UnansweredError
from resp_server.raw_replies.reply_splitter import pack
from resp_server.settings.event_classes import ClassesError, classes_of, letters_of

REQUEST = pack(EVENTS_REQUEST)


class UpstreamEvents:
    """Reads the upstream's `notify-keyspace-events`, and applies it to this proxy.

    If the user may not read it, nothing changes.
    """

    def __init__(self, server: ServerContext, upstream: Upstream) -> None:
        self._server, self._upstream = server, upstream

    async def read(self) -> None:
        """Read the setting and apply it."""
        with suppress(ReplyError, UnansweredError):  # then the current setting is kept
            answer = await ask(partial(self._upstream.send_to_node, 0, 0, 2, REQUEST))
            letters = events_in(answer.reply)
            if letters is not None:
                with suppress(ClassesError):  # a class of events that states do not have
                    self._apply(letters_of(classes_of(letters)))

    def _apply(self, events: str) -> None:
        if events != self._server.config.notify_keyspace_events:
            self._server.configure({"notify_keyspace_events": events})
