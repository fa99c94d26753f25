"""How a proxy reaches the servers of a cluster: the password, TLS, time limits, and the loop that reads the sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from resp_server.net.connecting import connected
from resp_server.net.tls import Certificates
from resp_server.net.transports import AwakeClock

TIMEOUT_S = 1.0
# For requests about all of a server's keys, and for long replies.
LONG_TIMEOUT_S = 60.0
CHECKS_PER_TIMEOUT = 10

Link = TypeVar("Link", bound=asyncio.Protocol)


@dataclass
class ServerAccess:
    """How servers are reached. Runs on the event loop's thread.

    Args:
        certificates: None: no TLS. Otherwise all servers have to use TLS.
        poller: The compiled core's poller, which polls clients' and servers' sockets; None: asyncio does.
    """

    password: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    certificates: Certificates | None = field(default=None, repr=False)
    poller: Any = None

    def start(self) -> None:
        """Start the clock."""
        self._loop = asyncio.get_running_loop()
        # This clock stands still while the process is stopped. So servers do not seem silent afterwards, and requests
        # do not expire.
        self.clock = AwakeClock(2 * self.check_s, self._loop.time)

    @property
    def check_s(self) -> float:
        """The time between two checks of connections."""
        return self.timeout_s / CHECKS_PER_TIMEOUT

    def deadline_s(self, is_long: bool = False) -> float:
        """Return the deadline of a request that is sent now."""
        return self.clock() + (LONG_TIMEOUT_S if is_long else self.timeout_s)

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this round of the event loop; without a poller, in the next round."""
        if self.poller is not None:
            self.poller.call_before_flush(then)
        else:
            self._loop.call_soon(then)

    async def connect(self, make: Callable[[], Link], address: str) -> Link:
        """Return a new connection to a server; OSError, or ValueError for an invalid address."""
        host, _, port = address.rpartition(":")
        context = None if self.certificates is None else self.certificates.for_server()
        if context is not None or self.poller is None:
            return (await self._loop.create_connection(make, host, int(port), ssl=context))[1]
        made = make()
        self.poller.add(await connected(self._loop, (host, int(port))), made)
        return made
