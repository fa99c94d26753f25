"""Finds the keys of a request by COMMAND GETKEYS at the upstream, if the facts of its command do not tell them.

Only modules' commands need this. The request waits for the reply, and is then dispatched again. A reply depends on the
words of the request only, so it is cached for later requests with the same words.
"""

from __future__ import annotations

from resp_server.backends.redis.pushed_frames import words_in
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.routing.router import GetkeysCache
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import ReplyFuture
from resp_server.raw_replies.raw_reply import as_bytes, is_error
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.raw_replies.reply_splitter import pack

# The reply to COMMAND GETKEYS for a request without keys.
WITHOUT_KEYS = b"-ERR The command has no key arguments\r\n"


class GetkeysLookup:
    """Looks up the keys of requests. Runs on the event loop's thread."""

    def __init__(self, upstream: Upstream, cache: GetkeysCache) -> None:
        self._upstream, self._cache = upstream, cache

    async def look_up(self, request: Request) -> str:
        """Look up the keys of a request; return why the upstream does not name them, or an empty text."""
        future = ReplyFuture()
        try:
            self._upstream.send_to_node(0, 0, 2, pack((b"COMMAND", b"GETKEYS", *request)), future, 0)
            reply = as_bytes((await future).reply)
            if is_error(reply) and reply != WITHOUT_KEYS:
                return reply[1:-2].decode("utf-8", "replace")
            self._cache.add(request, () if is_error(reply) else words_in(reply))
        except MALFORMED_REPLY_ERRORS as error:
            malformed_reply(error)
            return "its reply has an unexpected form"
        except Exception as error:
            return str(error)
        return ""
