"""How a proxy tries a read again: after which replies and losses, how often, and after which pause.

    the reply, or the loss           a request to a state server             an EXEC at state servers
    MOVED                            goes to the new owner: at once, but     all of it again
                                     from the third time on after
                                     AGREE_PAUSE_S
    LOADING, CLUSTERDOWN, TRYAGAIN   again after AGREE_PAUSE_S               all of it again
    NOEPOCH                          (is not replied)                        all of it, at later epochs
    a lost connection                again at once, in all SENDS_MAX times   again, LOSSES_MAX times
    any other error                  is the reply                            is the reply

Each of them ends at the request's deadline. An attempt of an EXEC follows after a pause that doubles. All requests to
state servers only read, so to run one twice does no harm.

    the reply, or the loss           a request to the upstream
    MOVED, ASK of a Redis Cluster    goes to the other node at once, UPSTREAM_REDIRECTS_MAX times
    a lost connection                a read: again at once, in all SENDS_MAX times; a write may have run, and is lost
    any other error                  is the reply
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from resp_server.protocol.errors import TryAgainError
from resp_server.raw_replies.answers import CallbackWait

# How often a request is sent; the second time is only after a lost connection.
SENDS_MAX = 2
# Redirects of one request in a Redis Cluster; after more the nodes disagree (guess: a failover makes two).
UPSTREAM_REDIRECTS_MAX = 5
# Redirects that are followed without a pause: one MOVED is normal after slots moved, two mean that servers disagree.
REDIRECTS_AT_ONCE_MAX = 2
# The pause before a request is sent again to servers that disagree or are not ready.
AGREE_PAUSE_S = 0.05
# The pause before the next attempt of an EXEC; it doubles each time. Servers apply an epoch some milliseconds apart.
EXEC_PAUSE_S = 0.005
EXEC_PAUSE_S_MAX = 0.1
# There is another attempt of an EXEC after so many lost connections. More losses mean that something is wrong.
LOSSES_MAX = 2


def is_passing(error: bytes) -> bool:
    """Return whether an error reply is of a server or a shard that will soon be able to answer."""
    return error.startswith((b"-LOADING ", b"-CLUSTERDOWN ", b"-TRYAGAIN "))


def may_send_again(sends: int, *, is_read: bool = True) -> bool:
    """Return whether to send a request again whose connection was lost.

    Args:
        sends: How often it was sent.
        is_read: It only reads.
    """
    return is_read and sends < SENDS_MAX


class RetryPauses:
    """The pauses of one state cluster's requests. They end early when the proxy stops, so that nothing waits for ever.

    Runs on the event loop's thread.
    """

    def __init__(self) -> None:
        self._ends: dict[Callable[[], None], None] = {}
        self._is_stopped = False

    async def pause(self, seconds: float) -> bool:
        """Pause; return False if the proxy stops, maybe early."""
        if not self._is_stopped:
            await CallbackWait(partial(self._begin, seconds))
        return not self._is_stopped

    def _begin(self, seconds: float, then: Callable[[], None]) -> None:
        def end() -> None:
            timer.cancel()
            del self._ends[end]
            then()

        timer = asyncio.get_running_loop().call_later(seconds, end)
        self._ends[end] = None

    def stop(self) -> None:
        """End all pauses now, and all later ones at once."""
        self._is_stopped = True
        for end in list(self._ends):
            end()


class ExecAttempts:
    """The attempts to run one EXEC, until its deadline: the pauses between them, and the lost connections.

    Args:
        pause: Pauses for so many seconds, but not beyond the deadline; returns False if there is no time left.
    """

    def __init__(self, pause: Callable[[float, float], Awaitable[bool]], deadline_s: float) -> None:
        self._pause, self._deadline_s = pause, deadline_s
        self._pause_s, self._losses = EXEC_PAUSE_S, 0

    async def pause(self, reason: str) -> None:
        """Wait before the next attempt; TryAgainError if the deadline would be over then, or the proxy stops."""
        if not await self._pause(self._deadline_s, self._pause_s):
            raise TryAgainError(reason)
        self._pause_s = min(2 * self._pause_s, EXEC_PAUSE_S_MAX)

    def count_loss(self) -> bool:
        """Count a lost connection, or another error; return whether to try again."""
        self._losses += 1
        return self._losses <= LOSSES_MAX
