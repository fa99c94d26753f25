"""The connections to one upstream: a few shared ones for each protocol version, and one circuit breaker for all.

All requests of a client are sent over the same connection, so that they run in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from resp_server.backends.redis.breaker import Breaker
from resp_server.backends.redis.connection import UpstreamConnection, UpstreamRequest
from resp_server.backends.redis.dedicated_connection import FIRST_WRITE, DedicatedConnection, DedicatedConnections
from resp_server.backends.redis.hello import hello_fields
from resp_server.backends.redis.role import AnyRole, RoleCheck
from resp_server.backends.redis.sentinel import MasterLocator
from resp_server.backends.redis.shared_connections import SharedConnections
from resp_server.backends.redis.tls import UpstreamTls
from resp_server.backends.redis.tracking import Tracking, TrackingRequest
from resp_server.backends.redis.url import UpstreamAddress, UpstreamUrl
from resp_server.command.command_facts import facts_in
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.spec import CommandSpec
from resp_server.limits import DEDICATED_CONNECTIONS_MAX, UPSTREAM_CONNECTIONS, UPSTREAM_TIMEOUT_S
from resp_server.net.transports import AwakeClock
from resp_server.protocol.errors import ReplyError
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.answers import Answer, ReplyFuture, ask, in_background, run_in_steps, run_into
from resp_server.raw_replies.handshake import BUSY
from resp_server.raw_replies.packing import Packed, pack_in_steps
from resp_server.raw_replies.raw_reply import RawReply, as_bytes, is_error
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS, Defer, ReplySink
from resp_server.raw_replies.reply_splitter import pack

Found = TypeVar("Found")

logger = logging.getLogger("sparkis.proxy")

CHECKS_PER_TIMEOUT = 20
# The pause after the reply BUSY to COMMAND: the upstream runs a long script (guess).
BUSY_PAUSE_S = 1.0
# Connections for REPLICAOF and the like, which are closed when they are idle (guess: more than there are admins).
ROLE_CHANGES_MAX = 16
COMMAND, HELLO, ROLE = pack((b"COMMAND",)), pack((b"HELLO",)), pack((b"ROLE",))


class UpstreamPool:
    """The connections to one upstream. Runs on the event loop's thread.

    Args:
        connections: The number of shared connections for each version of the protocol.
        tls: The TLS of connections, for a URL with TLS.
        dedicated_max: The most connections of single clients.

    Attributes:
        locator: Finds the master by sentinels; None: the URL has the server's address.
        tracked: At a node of a Redis Cluster, the CLIENT TRACKING requests of clients that track keys at all nodes.
        on_facts: Called after each reconnection with the facts of the upstream's commands, because its modules may have
            changed; None: the facts are not requested.
        on_hello: Called with the fields of the upstream's reply to HELLO.
        on_state_lost: Called with a client whose dedicated connection was lost together with its state at the upstream,
            such as watched keys, and with the reason.
        on_moved: In a Redis Cluster, called when keys have moved to other nodes, with clients that have to forget all
            keys that they have cached.
        on_push: Called with a client and a frame that it gets without a request.
        defer: Calls back in a later turn.
    """

    def __init__(
        self,
        url: UpstreamUrl,
        timeout_s: float = UPSTREAM_TIMEOUT_S,
        connections: int = UPSTREAM_CONNECTIONS,
        tls: UpstreamTls | None = None,
        dedicated_max: int = DEDICATED_CONNECTIONS_MAX,
    ) -> None:
        self.url, self.tls = url, tls
        self.role = RoleCheck()
        self.locator: MasterLocator | None = None
        self.timeout_s = timeout_s
        self.breaker = Breaker()
        self.on_facts: Callable[[Mapping[str, CommandSpec]], None] | None = None
        self.tracked: Mapping[int, Sequence[Tracking]] = {}
        self.shared = SharedConnections(self, connections)
        self.losses = 0
        self._asks_role = False
        self.on_hello: Callable[[Mapping[bytes, Reply]], None] = lambda fields: None
        self.on_failed: Callable[[], None] = lambda: None
        self.on_state_lost: Callable[[int, str], None] = lambda client, reason: None
        self.on_moved: Callable[[Collection[int]], None] = lambda clients: None
        self.defer: Defer
        self.dedicated = DedicatedConnections(self, dedicated_max)
        self.dedicated_connections: Mapping[int, object] | None = self.dedicated.by_client
        self.on_push: Callable[[int, RawReply], None] = lambda client, frame: None
        self.dedicated.on_push = lambda client, frame: self.on_push(client, frame)
        self.dedicated.on_state_lost = lambda client, reason: self.on_state_lost(client, reason)
        self._of_any_role = DedicatedConnections(_AnyRoleEvents(self), ROLE_CHANGES_MAX)
        # The compiled core's poller, which polls clients' and servers' sockets; None: asyncio does.
        self.poller: Any = None

    @property
    def is_unused(self) -> bool:
        """Return whether no connection is open or has pending requests."""
        return not len(self.dedicated) and not any(each.is_open or each.pending_count for each in self.shared)

    def for_database(self, number: int) -> UpstreamPool:
        """Return a pool for another database, with its own breaker: the upstream may not have this database."""
        return self._with_url(replace(self.url, database=number))

    def for_login(self, user: bytes, password: bytes) -> UpstreamPool:
        """Return a pool for another login."""
        return self._with_url(self.url.with_login(user, password))

    def _with_url(self, url: UpstreamUrl) -> UpstreamPool:
        made = UpstreamPool(url, self.timeout_s, self.shared.count, self.tls, self.dedicated.count_max)
        made.locator, made.role = self.locator, self.role
        made.on_state_lost, made.poller, made.defer = self.on_state_lost, self.poller, self.defer
        return made

    @property
    def clock(self) -> Callable[[], float]:
        """The clock for time limits. It stands still while this process is stopped."""
        return self._clock

    def start(self) -> None:
        """Open the first connection, and start checking all connections for time-outs."""
        self._loop = asyncio.get_running_loop()
        self._clock = AwakeClock(2 * self.timeout_s / CHECKS_PER_TIMEOUT, self._loop.time)
        self._check()
        if self.locator is None:
            self.shared.of(0, 2).connect()
        else:
            self.locator.add(self.move)

    def stop(self) -> None:
        """Close all connections."""
        self._checking.cancel()
        if self.locator is not None:
            self.locator.remove(self.move)
        for connection in self.shared:
            connection.stop()
        self.dedicated.stop()
        self._of_any_role.stop()

    node_count = 1

    def send_request(
        self,
        client: int,
        protocol: int,
        routed: OverlayCommand,
        request: Request,
        sink: ReplySink,
        index: int,
        *,
        caching: bytes = b"",
    ) -> bool:
        """Send a client's request; the sink gets the reply later, or an error at once or later.

        Return True if parts of the request are sent later, so that the client's next requests have to wait.
        """
        if routed.policy.changes_replication:
            sent = UpstreamRequest(pack(request), sink, index, is_read=False)
            self._of_any_role.open(client, protocol).send_request(sent, protocol)
            return True
        if type(request) is LongRequest:
            send = partial(self.send, client, protocol, is_read=routed.is_read, prefix=caching)
            return send_long(request, send, sink, index, self.defer)
        self.send(client, protocol, pack(request), sink, index, is_read=routed.is_read, prefix=caching)
        return False

    def send_to_node(self, node: int, client: int, protocol: int, packed: bytes, sink: ReplySink, index: int) -> None:
        """Send a read about all keys of a node. This upstream has one node."""
        self.send(client, protocol, packed, sink, index, is_read=True)

    def send(
        self,
        client: int,
        protocol: int,
        packed: Packed,
        sink: ReplySink,
        index: int,
        *,
        is_read: bool,
        prefix: bytes = b"",
    ) -> None:
        """Send a request. The sink gets the reply later, or an error, maybe before this returns."""
        self.add(client, protocol, UpstreamRequest(packed, sink, index, is_read, prefix=prefix))

    def add(self, client: int, protocol: int, request: UpstreamRequest) -> None:
        """Send a request over the client's dedicated connection, if it has one, otherwise over a shared connection.

        Long requests have a shared connection of their own, so that short ones do not wait behind them. A long one is
        its client's only request without a reply, so the order of the client's requests is kept.
        """
        try:
            dedicated = self.track(client, protocol) if client in self.tracked else self.dedicated.get(client)
        except ReplyError as error:
            request.sink.fail(request.index, error)
            return
        if dedicated is None and not isinstance(request.packed, bytes):
            self.shared.for_long_requests(protocol).add(request)
        elif dedicated is None:
            self.shared.of(client, protocol).add(request)
        else:
            dedicated.send_request(request, protocol)

    def track(self, client: int, protocol: int) -> DedicatedConnection:
        """Return the dedicated connection of a client in `tracked`, which tracks keys from now on; ReplyError."""
        dedicated = self.dedicated.open(client, protocol)
        if not dedicated.is_tracking:
            for each in self.tracked[client]:
                reply = ReplyFuture()
                is_wanted = partial(self._is_tracked, client, each)
                TrackingRequest(each, protocol, reply, 0, is_wanted).send(self.dedicated, client)
                in_background(self._confirm_tracking(client, each, reply))
        return dedicated

    async def _confirm_tracking(self, client: int, tracking: Tracking, reply: ReplyFuture) -> None:
        """Disconnect a client if the node refuses a CLIENT TRACKING that the proxy repeats there.

        With REDIRECT the node may have replied to reads before, so the client has to forget what it has cached since.
        """
        try:
            confirmed = (await reply).reply
        except Exception as error:
            self.on_state_lost(client, f"a node of the upstream does not track keys: {error}")
            return
        if is_error(confirmed):
            reason = as_bytes(confirmed)[1:-2].decode("utf-8", "replace")
            self.on_state_lost(client, f"a node of the upstream refused to track keys: {reason}")
        elif tracking.is_redirected:
            self.on_moved([client])

    def _is_tracked(self, client: int, tracking: Tracking) -> bool:
        return any(each is tracking for each in self.tracked.get(client, ()))

    def connection_for_forwarder(self, client: int, protocol: int) -> UpstreamConnection | None:
        """Return the connection for a client's forwardable requests; None: they take the general path."""
        dedicated, has_to_track = self.dedicated.get(client), client in self.tracked
        if dedicated is None:
            return None if has_to_track else self.shared.of(client, protocol)
        return dedicated if dedicated.may_be_forwarded_to(protocol) and dedicated.is_tracking >= has_to_track else None

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this round of the event loop; without a poller, in the next round."""
        if self.poller is not None:
            self.poller.call_before_flush(then)
        else:
            self._loop.call_soon(then)

    def block(
        self,
        client: int,
        protocol: int,
        routed: OverlayCommand,
        request: Request,
        sink: ReplySink,
        index: int,
        *,
        caching: bytes = b"",
    ) -> None:
        """Send a blocking command over the client's dedicated connection; GenericError if too many clients have one."""
        if type(request) is LongRequest:
            send_long(request, partial(self.send_blocking, client, protocol, prefix=caching), sink, index, self.defer)
            return
        is_about_writes = routed.policy.waits_for_writes
        self.send_blocking(
            client, protocol, pack(request), sink, index, is_about_writes=is_about_writes, prefix=caching
        )

    def send_blocking(
        self,
        client: int,
        protocol: int,
        packed: Packed,
        sink: ReplySink,
        index: int,
        *,
        is_about_writes: bool = False,
        first_write: bytes = FIRST_WRITE,
        prefix: bytes = b"",
    ) -> None:
        """Send a blocking command over the client's dedicated connection.

        Args:
            is_about_writes: It is WAIT or WAITAOF.
            first_write: See `DedicatedConnection.send_wait`.
        """
        dedicated = self.dedicated.open(client, protocol)
        request = UpstreamRequest(packed, sink, index, is_read=False, prefix=prefix, is_blocking=True)
        if is_about_writes:
            dedicated.send_wait(request, protocol, first_write)
        else:
            dedicated.send_request(request, protocol)

    @property
    def pools(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes."""
        return (self,)

    @property
    def masters(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes that have keys."""
        return (self,)

    def begin_tracking(self, client: int, tracking: Tracking) -> None:
        """Do nothing: there are no other nodes."""

    def end_tracking(self, client: int) -> None:
        """Do nothing: there are no other nodes."""

    def notice_moves(self) -> None:
        """Do nothing: there are no other nodes."""

    def pool_of(self, routed: OverlayCommand, request: Request) -> UpstreamPool:
        """Return the pool of the node that has a request's keys."""
        return self

    def pool_of_slot(self, slot: int) -> UpstreamPool:
        """Return the pool of the node that has a slot."""
        return self

    @property
    def message_pool(self) -> UpstreamPool | None:
        """The pool of a node that delivers the messages of all channels."""
        return self

    def checked(self, reply: RawReply) -> RawReply:
        """Return the reply to a request that was sent over `pool_of`, unchanged for a single server."""
        return reply

    @property
    def is_down(self) -> bool:
        """Return whether the upstream cannot be reached."""
        return self.breaker.is_open

    @property
    def waiting(self) -> int:
        """The number of requests without a reply."""
        return sum(each.pending_count for each in (*self.shared, *self.dedicated))

    def request_facts(self) -> None:
        """Send COMMAND and HELLO again, if the upstream is connected."""
        connection = self.shared.of(0, 2)
        if connection.is_open and self.on_facts is not None:

            def later() -> None:
                self._loop.call_later(BUSY_PAUSE_S, self.request_facts)

            in_background(_read_facts(connection, COMMAND, facts_in, self.on_facts, later))
            in_background(_read_facts(connection, HELLO, hello_fields, self.on_hello, later))

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""
        return {
            "upstream": self.url.address,
            "upstream_status": "down" if self.breaker.is_open else "up",
            "upstream_error": self.breaker.reason,
            "upstream_connections": self.shared.open_count,
            "upstream_waiting": self.waiting,
            "upstream_losses": self.losses,
            "upstream_outages": self.breaker.times_opened,
            **self.dedicated.info_fields(),
        }

    def located(self) -> UpstreamUrl:
        """Return the server's URL; OSError if no sentinel knows the master now."""
        if self.locator is not None:
            self.locator.check()
        return self.url

    def move(self, address: UpstreamAddress) -> None:
        """Close the connections to the current server, and connect to another one."""
        self.url = self.url.at(address)
        for connection in self.shared:
            connection.cut("the master has moved")
            connection.try_now()
        for dedicated in self.dedicated:
            dedicated.cut("the master has moved")
        self.shared.of(0, 2).connect()

    # -- called by connections ----------------------------------------------------------------------------------------

    def opened(self, connection: UpstreamConnection) -> None:
        """Close the breaker, and request the upstream's commands again."""
        if self.breaker.is_open:
            logger.warning("the upstream %s is reached again", self.url.address)
        self.breaker.succeeded()
        if self.shared.is_first(connection):
            self.request_facts()

    def failed(self, connection: UpstreamConnection, reason: str) -> float:
        """Open the breaker; return the pause before the next attempt to connect, in seconds."""
        if not self.breaker.is_open:
            logger.warning("the upstream %s cannot be reached: %s", self.url.address, reason)
        if self.locator is not None:
            self.locator.check_now()
        self.on_failed()
        return self.breaker.failed(reason)

    def lost(self, reason: str) -> None:
        """Count a lost connection."""
        self.losses += 1
        logger.info("lost a connection to the upstream %s: %s", self.url.address, reason)
        if self.locator is not None:
            self.locator.check_now()
        self.on_failed()

    def refused_write(self, connection: UpstreamConnection) -> None:
        """Ask for the server's role after the reply READONLY. A script may also reply that, so only the role counts."""
        if self.role.must_be_master and not self._asks_role:
            self._asks_role = True
            in_background(self._check_role(connection))

    async def _check_role(self, connection: UpstreamConnection) -> None:
        """Close all connections to a master that has become a replica; a reply without a role changes nothing."""
        try:
            reply = as_bytes((await ask(partial(_send_read, connection, ROLE))).reply)
        except Exception:  # the connection is lost, and the next one checks the role
            reply = b""
        self._asks_role = False
        reason = self.role.refusal(b"ROLE", reply)
        if reason:
            for each in (*self.shared, *self.dedicated):
                each.cut(reason)

    def _check(self) -> None:
        self._checking = self._loop.call_later(self.timeout_s / CHECKS_PER_TIMEOUT, self._check)
        now_s = self._clock.tick()
        connections = [*self.shared, *self.dedicated, *self._of_any_role]
        for idle in [each for each in self._of_any_role if each.is_idle]:
            self._of_any_role.release(idle.client)
        late = next((connection for connection in connections if connection.is_late(now_s, self.timeout_s)), None)
        if late is not None:  # the upstream is one process, so it answers no other connection either
            reason = f"it did not reply within {self.timeout_s:g} s"
            self.failed(late, reason)
            for connection in connections:
                connection.cut(reason)


class _AnyRoleEvents:
    """The events of a pool's connections to a server of any role; they do not decide whether the upstream is up."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self.role, self.breaker = AnyRole(), Breaker()

    @property
    def url(self) -> UpstreamUrl:
        return self._pool.url

    @property
    def tls(self) -> UpstreamTls | None:
        return self._pool.tls

    @property
    def clock(self) -> Callable[[], float]:
        return self._pool.clock

    @property
    def poller(self) -> Any:
        return self._pool.poller

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        self._pool.at_end_of_round(then)

    def located(self) -> UpstreamUrl:
        return self._pool.located()

    def opened(self, connection: UpstreamConnection) -> None:
        pass

    def failed(self, connection: UpstreamConnection, reason: str) -> float:
        return 0.0

    def lost(self, reason: str) -> None:
        pass

    def refused_write(self, connection: UpstreamConnection) -> None:
        pass


async def _read_facts(
    connection: UpstreamConnection,
    packed: bytes,
    parse: Callable[[bytes], Found],
    take: Callable[[Found], None],
    later: Callable[[], None],
) -> None:
    """Read and take the upstream's reply to COMMAND or HELLO.

    Args:
        later: Reads it again, if the upstream runs a long script.
    """
    try:
        text = as_bytes((await ask(partial(_send_read, connection, packed))).reply)
    except Exception as error:
        logger.info("the upstream did not answer COMMAND or HELLO: %s", error)
        return
    if text.startswith(BUSY):
        later()
        return
    try:
        take(parse(text))
    except MALFORMED_REPLY_ERRORS as error:
        logger.warning("the upstream's reply to COMMAND or HELLO has an unexpected form: %s", error)


def _send_read(connection: UpstreamConnection, packed: bytes, sink: ReplySink, index: int) -> None:
    connection.add(UpstreamRequest(packed, sink, index, is_read=True))


def send_long(
    request: LongRequest, send: Callable[[Packed, ReplySink, int], object], sink: ReplySink, index: int, defer: Defer
) -> bool:
    """Pack a long request in steps, then send it; return True if that is later. The sink gets the reply."""
    is_packed = False

    async def answer() -> Answer:
        nonlocal is_packed
        try:
            packed = await run_in_steps(pack_in_steps(request), defer)
        finally:
            is_packed = True
        return await ask(partial(send, packed))

    run_into(answer(), sink, index)
    return not is_packed
