"""A client's input that is not answered yet: its requests, and the bytes after them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from resp_server.limits import PARTIAL_BYTES_MAX
from resp_server.pipeline.pipeline import release_reply
from resp_server.protocol.errors import ProtocolError
from resp_server.protocol.replies import IncompleteReply
from resp_server.protocol.request_parser import Request, RequestLimits, RequestParser, unauthenticated_error
from resp_server.session.session import Session

if TYPE_CHECKING:
    from resp_server.native.fast_path import FastPath


class ClientInput:
    """The input of one client.

    Args:
        limits: Those of an unfinished request (see `apply_limits`).
        compiled: The compiled core, which gets the bytes first. None: it is not built, or does not answer here.
        is_polled: The compiled core polls the socket, and counts its own reads.

    Attributes:
        requests: Those that are parsed. None: there are none.
        data: The bytes after them.
        incomplete: The incomplete reply, of a command that the compiled core called, before them. None: there is none.
    """

    __slots__ = (
        "_compiled",
        "_has_partial_request",
        "_limits",
        "_parser",
        "_transport",
        "_was_restricted",
        "data",
        "incomplete",
        "is_polled",
        "is_reading",
        "requests",
    )

    def __init__(
        self, transport: asyncio.Transport, limits: RequestLimits, compiled: FastPath | None, *, is_polled: bool
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._parser: RequestParser | None = None  # most clients send nothing that the compiled core leaves to it
        self._compiled = compiled
        self.is_polled = is_polled
        self.requests: list[Request] | None = None
        self.data = b""
        self.incomplete: IncompleteReply | None = None
        self._has_partial_request = False  # the compiled core found that `data` is an incomplete request
        self._was_restricted = False  # the requests were parsed for a client without a login
        self.is_reading = True

    @property
    def has_requests(self) -> bool:
        """Return whether there may be requests to answer."""
        has_data = bool(self.data) and not self._has_partial_request
        return bool(self.requests or has_data or self.incomplete is not None or self._has_buffered_requests)

    @property
    def is_unparsed(self) -> bool:
        """Return whether there are no parsed requests, but bytes that may have some."""
        return not self.requests and (bool(self.data) or self._has_buffered_requests)

    @property
    def _has_buffered_requests(self) -> bool:
        return self._parser is not None and self._parser.has_buffered_requests

    @property
    def error(self) -> ProtocolError | None:
        """The error after the requests. None: there is none."""
        return None if self._parser is None else self._parser.error

    @property
    def unparsed_bytes(self) -> int:
        """The size of the bytes after the requests, and of an incomplete request."""
        return len(self.data) if self._parser is None else self._parser.buffered_bytes + len(self.data)

    def apply_limits(self, limits: RequestLimits) -> None:
        """Apply these limits to requests that are not parsed yet."""
        self._limits = limits
        if self._parser is not None:
            self._parser.limits = limits

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self.data += data
        self._has_partial_request = False

    def clear(self) -> None:
        """Drop the input."""
        release_reply(self.incomplete)
        self.requests, self.data, self.incomplete = None, b"", None

    def take_data(self) -> bytes:
        """Return the bytes, and clear them."""
        data, self.data = self.data, b""
        return data

    def answer_or_parse(self, session: Session, out: list[bytes]) -> bool:
        """Let the compiled core answer the bytes, and parse the rest; return whether the core replied, or called."""
        parser, data = self._parser, self.data
        self._was_restricted = not session.is_authenticated
        if self._compiled is not None and (parser is None or not parser.buffered_bytes):
            reply, requests, self.data = self._compiled.answer(session, data)
            self.requests, self.incomplete = requests, self._compiled.take_incomplete()
            self._has_partial_request = self._compiled.is_incomplete and 0 < len(self.data) <= PARTIAL_BYTES_MAX
            if reply:
                out.append(reply)
            if reply or requests or self.incomplete is not None or self._has_partial_request:
                return bool(reply) or self.incomplete is not None
        if parser is None:
            parser = self._parser = RequestParser(self._limits, in_chunks=True)
        parser.is_restricted = self._was_restricted
        self.requests, self.data = parser.feed(self.data), b""
        return False

    def drop_refused(self) -> ProtocolError | None:
        """Drop the input of a client that has just logged out if it may not send its next request.

        Returns:
            The error, or None. The parser itself has checked the requests of a client that had no login before.
        """
        error = unauthenticated_error(self.requests[0]) if self.requests and not self._was_restricted else None
        if error is not None:
            self.clear()
        return error

    def set_reading(self, is_reading: bool) -> None:
        """Read the socket, or read it no more for now."""
        if is_reading == self.is_reading or self._transport.is_closing():
            return
        self.is_reading = is_reading
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
