"""The short way of a connection that follows its server: news stand before the replies that are the first of them."""

from __future__ import annotations

from resp_server.checked_way import CheckedWay
from resp_server.instance import Instance
from resp_server.protocol.following import Following
from resp_server.protocol.session import Session
from resp_server.short_way import ShortWay
from resp_server.tracked_way import TrackedWay


class FollowedWay:
    """A short way, and what was told on one connection."""

    def __init__(self, way: ShortWay | CheckedWay | TrackedWay, instance: Instance, following: Following) -> None:
        self._way = way
        self._instance = instance
        self._following = following

    def answer(self, session: Session, data: bytes) -> tuple[bytes, bytes]:
        """Answer as the short way does."""
        reply, rest = self._way.answer(session, data)
        if reply and self._instance.moves != self._following.moves:
            reply = self._instance.news(self._following) + reply
        return reply, rest
