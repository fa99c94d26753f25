"""The short way of a connection that tracks: what is invalid stands before the replies, and what is read is remembered.

Where everything becomes invalid, a thousand clients ask at once for what they held; nobody is to wait long for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from resp_server.instance import Instance
from resp_server.protocol.session import Session
from resp_server.protocol.wholes import by_head, many_of, pieces_of, second_of
from resp_server.short_way import ShortWay


class TrackedWay:
    """A short way, and what has to be done about what it answers."""

    def __init__(self, way: ShortWay, instance: Instance) -> None:
        self._way = way
        self._instance = instance

    def answer(self, session: Session, data: bytes) -> tuple[bytes, bytes]:
        """Answer as the short way does, unless somebody else is told, or CLIENT CACHING says which requests count."""
        tracked = session.tracked
        if tracked is None or not session.is_plain_but_tracks or self._instance.is_loading:
            return b"", data
        if tracked.redirect or tracked.is_optin or tracked.is_optout:
            return b"", data
        reply, rest = self._way.take(session, data)
        if not reply:
            return b"", data
        told = self._instance.invalid_for(session)
        if tracked.remembers:
            self._instance.tracking.remember(tracked, keys_of(data[: len(data) - len(rest)]))
        return told + reply, rest


def keys_of(text: bytes) -> Sequence[bytes]:
    """Return the keys of requests that the short way has answered, as they were sent."""
    keys: list[bytes] = []
    for its_head, wholes in by_head(pieces_of(text)[1:]):
        many = many_of(its_head)
        gets = wholes if many is None else [get for whole in wholes for get in many.gets(whole)]
        keys += map(second_of, gets)
    return keys
