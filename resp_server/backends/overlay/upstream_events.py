"""Reads the upstream's `notify-keyspace-events`. The setting also applies to notifications of states' keys."""

from __future__ import annotations

import hiredis

from resp_server.backends.redis.upstream import Upstream
from resp_server.forwarding.raw_replies import RawReply, as_bytes
from resp_server.forwarding.reply_splitter import pack
from resp_server.pipeline.context import ServerContext
from resp_server.protocol.errors import internal_error
from resp_server.settings.event_classes import ClassesError, classes_of, letters_of

SETTING = b"notify-keyspace-events"
REQUEST = pack((b"CONFIG", b"GET", SETTING))


class UpstreamEvents:
    """Reads the setting, and applies it to this proxy. If the user may not read it, nothing changes."""

    def __init__(self, server: ServerContext, upstream: Upstream) -> None:
        self._server, self._upstream = server, upstream

    def read(self) -> None:
        """Request the setting; it is applied when the reply arrives."""
        self._upstream.send_to_node(0, 0, 2, REQUEST, self, 0)

    def put(self, index: int, reply: RawReply) -> None:
        """Apply the upstream's reply."""
        try:
            reader = hiredis.Reader()
            reader.feed(as_bytes(reply))
            found = reader.gets()
            match found:
                case [_, bytes(classes)]:
                    self._apply(letters_of(classes_of(classes.decode("latin-1"))))
        except (TypeError, hiredis.HiredisError, ClassesError):
            pass  # the reply is malformed, or the setting contains a class of events that states do not have
        except Exception as error:
            internal_error(error)

    def _apply(self, events: str) -> None:
        if events != self._server.config.notify_keyspace_events:
            self._server.configure({"notify_keyspace_events": events})

    def fail(self, index: int, error: Exception) -> None:
        """Keep the current setting."""
