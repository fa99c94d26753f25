"""Finds the keys of a request by COMMAND GETKEYS at the upstream, if the facts of its command do not tell them.

Only modules' commands need this. The request waits for the reply, and is then dispatched again. A reply depends on the
words of the request only, so it is cached for later requests with the same words.
"""

from __future__ import annotations

from functools import partial

from resp_server.forwarding.answers import Answer, ReplyFuture
from resp_server.forwarding.raw_replies import RawReply, as_bytes, is_error
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import MALFORMED_REPLY_ERRORS, malformed_reply
from resp_server.protocol.errors import PlainError
from resp_server.protocol.request_parser import Request
from resp_server.proxy.batch import ReplyBatch
from resp_server.session.session import Session
from resp_server.upstream.pushed_frames import words_in
from resp_server.upstream.routing import GetkeysCache
from resp_server.upstream.upstream import Upstream

# The reply to COMMAND GETKEYS for a request without keys.
WITHOUT_KEYS = b"-ERR The command has no key arguments\r\n"


class GetkeysLookup:
    """Looks up the keys of requests. Runs on the event loop's thread."""

    def __init__(self, upstream: Upstream, cache: GetkeysCache) -> None:
        self._upstream, self._cache = upstream, cache
        # By client: the request whose keys the upstream refused to return, and the upstream's error.
        self._refused: dict[int, tuple[Request, str]] = {}

    def look_up(self, request: Request, unknown: PlainError, session: Session, batch: ReplyBatch) -> None:
        """Look up the keys of a request; PlainError if the upstream has refused that for this same request."""
        refused, reason = self._refused.pop(session.id, (None, ""))
        if refused is request:
            raise PlainError(f"{unknown}: {reason}")
        batch.answer(partial(self._answer, request, session), is_silent=True)

    async def _answer(self, request: Request, session: Session) -> Answer:
        """Store the keys, or the reason why there are none; the client gets no reply."""
        future = ReplyFuture()
        try:
            self._upstream.send_to_node(0, 0, 2, pack((b"COMMAND", b"GETKEYS", *request)), future, 0)
            self._take(request, session, (await future).reply)
        except MALFORMED_REPLY_ERRORS as error:
            malformed_reply(error)
            self._refused[session.id] = request, "its reply has an unexpected form"
        except Exception as error:
            self._refused[session.id] = request, str(error)
        return Answer(b"")

    def _take(self, request: Request, session: Session, reply: RawReply) -> None:
        text = as_bytes(reply)
        if text == WITHOUT_KEYS:
            self._cache.add(request, ())
        elif is_error(reply):
            self._refused[session.id] = request, text[1:-2].decode("utf-8", "replace")
        else:
            self._cache.add(request, words_in(text))

    def leave(self, session: Session) -> None:
        """Forget a client that has left."""
        self._refused.pop(session.id, None)
