"""The shared connections to one upstream: a few for each version of the protocol, and one breaker for all of them.

A client's requests always take the same connection, so that they run in their order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from resp_server.command_table.facts import Facts
from resp_server.forwarding.raw_replies import RawReply, as_bytes
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import MALFORMED_REPLY_ERRORS, Defer, ReplySink
from resp_server.net.awake import AwakeClock
from resp_server.protocol.errors import internal_error
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import Request
from resp_server.upstream.breaker import Breaker
from resp_server.upstream.command_facts import facts_in
from resp_server.upstream.connection import UpstreamConnection, UpstreamRequest, UpstreamSink
from resp_server.upstream.hello import hello_fields
from resp_server.upstream.pinned import PINNED_MAX, PinnedConnections
from resp_server.upstream.role import RoleCheck
from resp_server.upstream.routing import CommandRule
from resp_server.upstream.sentinel import MasterLocator
from resp_server.upstream.tls import UpstreamTls
from resp_server.upstream.url import Address, UpstreamUrl

Found = TypeVar("Found")

logger = logging.getLogger("sparkis.proxy")

# Twice the time after which Redis replies BUSY while a script runs (`busy-reply-threshold`).
TIMEOUT_S = 10.0
CHECKS_PER_TIMEOUT = 20
# Connections for each version of the protocol (guess: the upstream has one thread that runs commands).
CONNECTIONS = 4
COMMAND, HELLO = pack((b"COMMAND",)), pack((b"HELLO",))
# About the writes of a connection. All other commands that block are about keys.
ABOUT_WRITES = ("wait", "waitaof")


class UpstreamPool:
    """The connections to one upstream. Runs on the event loop's thread.

    on_facts: called with the facts of the upstream's commands, at each reconnection: its modules may be others; None:
    nobody needs them. on_hello: called with what it says about itself in HELLO. on_failed: called after each failure.
    on_state_lost: called with a client whose own connection was lost with what it held. tls: for a URL with TLS only.
    role: which roles are accepted. locator: finds the server, where sentinels know it. pinned: the connections that one
    client has alone.
    """

    def __init__(
        self,
        url: UpstreamUrl,
        timeout_s: float = TIMEOUT_S,
        connections: int = CONNECTIONS,
        tls: UpstreamTls | None = None,
        pinned_max: int = PINNED_MAX,
    ) -> None:
        self.url, self.tls = url, tls
        self.role = RoleCheck()
        self.locator: MasterLocator | None = None
        self.timeout_s = timeout_s
        self.breaker = Breaker()
        self.on_facts: Callable[[Mapping[str, Facts]], None] | None = None
        self._count = connections
        self._connections: dict[tuple[int, int], UpstreamConnection] = {}
        self.losses = 0
        self.on_hello: Callable[[Mapping[bytes, Reply]], None] = lambda fields: None
        self.on_failed: Callable[[], None] = lambda: None
        self.on_state_lost: Callable[[int, str], None] = lambda client, reason: None
        self.defer: Defer
        self.pinned = PinnedConnections(self, pinned_max)
        self.pinned.on_state_lost = lambda client, reason: self.on_state_lost(client, reason)
        # The compiled core's epoll for clients and servers, where there is one.
        self.poller: Any = None

    @property
    def is_unused(self) -> bool:
        """Tell whether there are no connections."""
        return not len(self.pinned) and not any(
            each.is_open or each.pending_count for each in self._connections.values()
        )

    def for_database(self, number: int) -> UpstreamPool:
        """Return a pool for another database. Its breaker is its own: the upstream may not have this database."""
        return self._with_url(replace(self.url, database=number), 1)

    def for_login(self, user: bytes, password: bytes) -> UpstreamPool:
        """Return a pool for another login."""
        return self._with_url(self.url.with_login(user, password), self._count)

    def _with_url(self, url: UpstreamUrl, connections: int) -> UpstreamPool:
        made = UpstreamPool(url, self.timeout_s, connections, self.tls, self.pinned.count_max)
        made.locator, made.role = self.locator, self.role
        made.on_state_lost, made.poller, made.defer = self.on_state_lost, self.poller, self.defer
        return made

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of time limits, which stops while this process is stopped."""
        return self._clock

    def start(self) -> None:
        """Open the first connection, and check all of them from now on."""
        self._loop = asyncio.get_running_loop()
        self._clock = AwakeClock(2 * self.timeout_s / CHECKS_PER_TIMEOUT, self._loop.time)
        self._check()
        if self.locator is None:
            self._connection(0, 2).connect()
        else:
            self.locator.add(self)

    def stop(self) -> None:
        """Close all connections."""
        self._checking.cancel()
        if self.locator is not None:
            self.locator.remove(self)
        for connection in self._connections.values():
            connection.stop()
        self.pinned.stop()

    node_count = 1

    def send_request(
        self, client: int, protocol: int, rule: CommandRule, request: Request, sink: ReplySink, index: int
    ) -> bool:
        """Send a client's request; the sink gets the reply later, or an error at once or later.

        True: parts of it are sent later, so that the client's later requests have to wait.
        """
        self.send(client, protocol, pack(request), sink, index, is_read=rule.is_read)
        return False

    def send_to_node(
        self, node: int, client: int, protocol: int, packed: bytes, sink: UpstreamSink, index: int
    ) -> None:
        """Send a read about all keys; there is one node."""
        self.send(client, protocol, packed, sink, index, is_read=True)

    def send(
        self,
        client: int,
        protocol: int,
        packed: bytes,
        sink: UpstreamSink,
        index: int,
        *,
        is_read: bool,
        is_asking: bool = False,
    ) -> None:
        """Send a request; the sink gets the reply later, or an error at once or later."""
        self.add(client, protocol, UpstreamRequest(packed, sink, index, is_read, is_asking=is_asking))

    def add(self, client: int, protocol: int, request: UpstreamRequest) -> None:
        """Send a request over the client's own connection, if it has one, else over a shared one."""
        pinned = self.pinned.get(client)
        if pinned is None:
            self._connection(client, protocol).add(request)
        else:
            pinned.send_request(request, protocol)

    def shared_connection(self, client: int, protocol: int) -> UpstreamConnection | None:
        """Return the shared connection that a client's requests take; None: it has a connection of its own."""
        return self._connection(client, protocol) if self.pinned.get(client) is None else None

    def at_end_of_turn(self, then: Callable[[], None]) -> None:
        """Call back at the end of this turn of the event loop; without a poller, in the next turn."""
        if self.poller is not None:
            self.poller.call_before_flush(then)
        else:
            self._loop.call_soon(then)

    def block(
        self, client: int, protocol: int, rule: CommandRule, request: Request, sink: UpstreamSink, index: int
    ) -> None:
        """Send a blocking command over the client's own connection; PlainError if too many clients have one."""
        self.send_blocking(client, protocol, pack(request), sink, index, is_about_writes=rule.name in ABOUT_WRITES)

    def send_blocking(
        self,
        client: int,
        protocol: int,
        packed: bytes,
        sink: UpstreamSink,
        index: int,
        *,
        is_about_writes: bool = False,
        is_asking: bool = False,
    ) -> None:
        """Send a blocking command over the client's own connection. is_about_writes: WAIT or WAITAOF."""
        pinned = self.pinned.pin(client, protocol)
        request = UpstreamRequest(packed, sink, index, is_read=False, is_asking=is_asking, is_blocking=True)
        if is_about_writes:
            pinned.send_wait(request, protocol)
        else:
            pinned.send_request(request, protocol)

    @property
    def pools(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes."""
        return (self,)

    def pool_of(self, rule: CommandRule, request: Request) -> UpstreamPool:
        """Return the pool of the node that has a request's keys."""
        return self

    @property
    def message_pool(self) -> UpstreamPool | None:
        """The pool of a node that sends all messages of channels."""
        return self

    def checked(self, reply: RawReply) -> RawReply:
        """Return the reply to a request that was sent to such a pool."""
        return reply

    @property
    def is_down(self) -> bool:
        """Tell whether the upstream cannot be reached."""
        return self.breaker.is_open

    @property
    def waiting(self) -> int:
        """The number of requests without a reply."""
        return sum(each.pending_count for each in (*self._connections.values(), *self.pinned))

    @property
    def open_connections(self) -> int:
        """The number of open shared connections."""
        return sum(each.is_open for each in self._connections.values())

    def ask_facts(self) -> None:
        """Ask which commands the upstream has, and which version it is, if it is reached."""
        connection = self._connection(0, 2)
        if connection.is_open and self.on_facts is not None:
            connection.add(UpstreamRequest(COMMAND, _AboutSink(facts_in, self.on_facts), 0, is_read=True))
            connection.add(UpstreamRequest(HELLO, _AboutSink(hello_fields, self.on_hello), 0, is_read=True))

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""
        return {
            "upstream": self.url.address,
            "upstream_status": "down" if self.breaker.is_open else "up",
            "upstream_error": self.breaker.reason,
            "upstream_connections": self.open_connections,
            "upstream_waiting": self.waiting,
            "upstream_losses": self.losses,
            "upstream_outages": self.breaker.times_opened,
            **self.pinned.info_fields(),
        }

    def located(self) -> UpstreamUrl:
        """Return the server's URL; OSError if nobody knows it now."""
        if self.locator is not None:
            self.locator.check()
        return self.url

    def move(self, address: Address) -> None:
        """Use another server: the connections to the one before are closed."""
        self.url = self.url.at(address)
        for connection in self._connections.values():
            connection.cut("the master has moved")
            connection.try_now()
        for pinned in self.pinned:
            pinned.cut("the master has moved")
        self._connection(0, 2).connect()

    # -- called by connections ----------------------------------------------------------------------------------------

    def opened(self, connection: UpstreamConnection) -> None:
        """Close the breaker, and ask again which commands the upstream has."""
        if self.breaker.is_open:
            logger.warning("the upstream %s is reached again", self.url.address)
        self.breaker.succeeded()
        if connection is self._connections.get((2, 0)):
            self.ask_facts()

    def failed(self, connection: UpstreamConnection, reason: str) -> float:
        """Open the breaker; return the pause before the next try to connect."""
        if not self.breaker.is_open:
            logger.warning("the upstream %s cannot be reached: %s", self.url.address, reason)
        if self.locator is not None:
            self.locator.ask_now()
        self.on_failed()
        return self.breaker.failed(reason)

    def lost(self, reason: str) -> None:
        """Count a lost connection."""
        self.losses += 1
        logger.info("lost a connection to the upstream %s: %s", self.url.address, reason)
        if self.locator is not None:
            self.locator.ask_now()
        self.on_failed()

    def _connection(self, client: int, protocol: int) -> UpstreamConnection:
        key = protocol, client % self._count
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = UpstreamConnection(self, protocol)
        return connection

    def _check(self) -> None:
        self._checking = self._loop.call_later(self.timeout_s / CHECKS_PER_TIMEOUT, self._check)
        now_s = self._clock.tick()
        connections = [*self._connections.values(), *self.pinned]
        late = next((each for each in connections if each.is_late(now_s, self.timeout_s)), None)
        if late is not None:  # the upstream is one process: no other connection would be answered, either
            reason = f"it did not reply within {self.timeout_s:g} s"
            self.failed(late, reason)
            for each in connections:
                each.cut(reason)


class _AboutSink(Generic[Found]):
    """Takes the upstream's reply to a question about itself: reads it, and passes on what it says."""

    def __init__(self, read: Callable[[bytes], Found], then: Callable[[Found], None]) -> None:
        self._read, self._then = read, then

    def put(self, index: int, reply: RawReply) -> None:
        try:
            self._then(self._read(as_bytes(reply)))
        except MALFORMED_REPLY_ERRORS as error:
            logger.warning("what the upstream says about itself is not understood: %s", error)
        except Exception as error:
            internal_error(error)

    def fail(self, index: int, error: Exception) -> None:
        logger.info("the upstream did not say what it is: %s", error)
