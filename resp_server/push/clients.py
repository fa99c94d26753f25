"""Interfaces to a server's clients and to the other processes that serve its port; the server has the sockets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from resp_server.acl.users import UserChange
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState


class Clients:
    """The connected clients of this process, by their session ids. Without a server, there are none."""

    def push(self, session_id: int, frames: bytes) -> None:
        """Send frames between two replies; a client that is not connected gets nothing."""

    def push_invalidations(self, tracking_state: TrackingState) -> None:
        """Send a client's pending invalidations to it, or to the client that it redirects to."""

    def has_all_replies(self, session_id: int) -> bool:
        """Return whether all replies that a client waits for have arrived, and are sent in the next turn."""
        return False

    def waits_for_reply(self, session_id: int) -> bool:
        """Return whether a client waits for a reply that has not been sent."""
        return False

    def cut(self, session_id: int, reason: str = "CLIENT KILL") -> None:
        """Close a client's connection at once, if it is connected; `reason` is logged."""

    def resume(self) -> None:
        """Answer clients again after a CLIENT PAUSE."""

    def output_bytes(self, session_id: int) -> int:
        """Return how many bytes wait to be sent to a client."""
        return 0

    def describe(self, session: Session) -> str:
        """Return a client's line of CLIENT LIST."""
        return ""

    def defer(self, run: Callable[[], None]) -> object:
        """Call a function in a later turn of the event loop; without a server, now."""
        run()
        return None


class OtherWorkers(ABC):
    """The other workers of the same port; they are reached through the master."""

    @abstractmethod
    def query(self, name: str, argument: Any, then: Callable[[list[Any]], None]) -> None:
        """Send a `command.handler.WorkerQuery` to each process; call back with the responses."""

    @abstractmethod
    def change_users(self, change: UserChange, caller_id: int, then: Callable[[dict[str, Any]], None]) -> None:
        """Change users in all processes; call back with the fields of an `Outcome`."""
