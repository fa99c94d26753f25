"""The order of a client's SUBSCRIBE and what other clients of this proxy send after it.

A client's SUBSCRIBE goes over a connection of its own, which may have to be opened first; a PUBLISH of another client
goes over one that is open. At one Redis the message of a PUBLISH that was received later always arrives. So a request
that could send something to the subscriber waits until the upstream has confirmed each SUBSCRIBE that this proxy
received before it. It does not wait for later ones, so many subscribers do not hold a publisher back for long.

A client's second SUBSCRIBE is read only after the reply to its first. So the first one keeps its place in the order
until the client's requests that had arrived by then have begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from resp_server.protocol.replies import Retry


@dataclass(slots=True)
class _Unconfirmed:
    """A SUBSCRIBE, or the like, without the upstream's reply.

    Args:
        is_about_requests: It is about what any request may cause: notifications of keys, or invalidations.
        reply: The number of the upstream's reply to the client's last one; 0: there is none yet.
    """

    number: int
    is_about_requests: bool
    until_s: float
    reply: int = 0
    waiting: list[Retry] = field(default_factory=list)


class SubscriptionOrder:
    """The unconfirmed requests of this proxy's clients, and the clients that wait for them.

    Args:
        on_changed: Called when `holds_requests`, or whether there are any, may have changed.
    """

    def __init__(self, clock: Callable[[], float], on_changed: Callable[[], None]) -> None:
        self._clock, self._on_changed = clock, on_changed
        self._number = self._replies = 0
        self._unconfirmed: dict[int, _Unconfirmed] = {}  # by client, in the order of their numbers
        self._newest: dict[int, int] = {}  # by client that waits the number of the newest request that it waits for

    def __bool__(self) -> bool:
        return bool(self._unconfirmed)

    @property
    def holds_requests(self) -> bool:
        """Whether all requests to the upstream wait, not only those that send messages."""
        return any(each.is_about_requests for each in self._unconfirmed.values())

    def begin(self, client: int, seconds_max: float, *, is_about_requests: bool) -> None:
        """Have later requests wait for this client's request, for at most some seconds. It keeps its place if known."""
        found = self._unconfirmed.get(client)
        if found is None:
            self._number += 1
            until_s = self._clock() + seconds_max
            found = self._unconfirmed[client] = _Unconfirmed(self._number, is_about_requests, until_s)
        found.reply = 0
        found.is_about_requests |= is_about_requests
        self._on_changed()

    def confirm(self, client: int) -> int:
        """Note that the upstream has replied to a client's request; return the reply's number."""
        self._replies += 1
        if client in self._unconfirmed:
            self._unconfirmed[client].reply = self._replies
        return self._replies

    def end_after(self, client: int, reply: int) -> None:
        """End the wait for a client's request, unless the client has begun another one since this reply."""
        if client in self._unconfirmed and self._unconfirmed[client].reply == reply:
            self.end(client)

    def end(self, client: int) -> None:
        """End the wait for a client's request."""
        ended = self._unconfirmed.pop(client, None)
        if ended is not None:
            if not self._unconfirmed:
                self._newest.clear()
            self._on_changed()
            for each in ended.waiting:
                each.resolve(lambda: None)

    def leave(self, client: int) -> None:
        """Forget a client that has left."""
        self._newest.pop(client, None)
        self.end(client)

    def delay(self, client: int, *, publishes: bool) -> Retry | None:
        """Return what a request of a client waits for; None: it is sent now.

        Args:
            publishes: It may send messages.
        """
        now_s = self._clock()
        for each in [each for each, found in self._unconfirmed.items() if found.until_s <= now_s]:
            self.end(each)
        newest = self._newest.setdefault(client, self._number)
        for other, found in reversed(self._unconfirmed.items()):
            if found.number <= newest and other != client and (publishes or found.is_about_requests):
                found.waiting.append(retry := Retry(found.until_s - now_s))
                return retry
        del self._newest[client]
        return None
