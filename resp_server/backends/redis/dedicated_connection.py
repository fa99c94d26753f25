"""Connections to an upstream that one client has alone: its blocking commands hold them, and no other client waits.

A client gets one when it first needs it. From then on all of its requests to the upstream take it, which keeps their
order. It is closed with the client, or if another client needs one and this one is idle; it is never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from resp_server.backends.redis.breaker import Breaker
from resp_server.backends.redis.connection import (
    ConnectionEvents,
    UpstreamConnection,
    UpstreamRequest,
    unreachable,
)
from resp_server.backends.redis.pushed_frames import (
    CONFIRMATIONS,
    MESSAGES,
    confirmation_in,
    first_word,
    is_monitor_line,
    is_of_channel,
)
from resp_server.backends.redis.role import RoleCheck
from resp_server.backends.redis.tls import UpstreamTls
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.limits import DEDICATED_CONNECTIONS_MAX
from resp_server.protocol.errors import GenericError, TryAgainError
from resp_server.raw_replies.raw_reply import RawReply, as_bytes, is_error
from resp_server.raw_replies.reply_sinks import ReplySink, UnansweredError
from resp_server.raw_replies.reply_splitter import PING, pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs
from resp_server.session.transaction import check_watch_limits

CLIENT_ID = pack((b"CLIENT", b"ID"))
# A write that goes to replicas and to nobody else: a sharded channel has only subscribers that name it.
FIRST_WRITE = pack((b"SPUBLISH", b"sparkis:wait", b""))
UNWATCH = pack((b"UNWATCH",))
# Only RESP3 has pushes, and a connection in RESP2 would have to subscribe.
LISTENER_PROTOCOL = 3


class DedicatedConnection(UpstreamConnection):
    """A connection of one client. It is opened once: when it is lost, its state at the upstream is lost, too.

    Args:
        client: The client's id, or that of its listener.

    Attributes:
        upstream_id: The id that CLIENT UNBLOCK at the upstream takes; None: it is not known.
        watched: The keys that WATCH watches there.
        is_dirty: One of them has another owner now, so EXEC must run nothing.
        is_monitor: MONITOR was sent, and not refused.
        is_tracking: CLIENT TRACKING ON was sent, and not refused.
        has_module_subscription: A module's command may have subscribed the connection.
        is_for_messages: The client gets messages of channels from this node, not only notifications and messages of
            shards.
        is_at_all_masters: The client has subscribed at all masters of a Redis Cluster.
    """

    may_watch = True

    def __init__(self, owner: DedicatedConnections, client: int, protocol: int) -> None:
        super().__init__(owner, protocol)
        self._owner, self.follow = owner, owner.follow
        self._failure = ""
        self.client = client
        self.upstream_id: int | None = None
        self._wait_for_id: list[Callable[[int | None], None]] | None = []  # None: the upstream has replied
        self._has_written = False
        self.watched: set[bytes] = set()
        self.is_dirty = False
        self.is_monitor = self.is_tracking = self.has_module_subscription = False
        self.is_for_messages = self.is_at_all_masters = False
        self._subscriptions = {False: 0, True: 0}  # confirmed ones; True: to shards
        self._send_own(CLIENT_ID, _IdSink(self))

    @property
    def is_idle(self) -> bool:
        """Return whether the connection has no state and no pending request, so that it may be closed."""
        if self.holds_state or self._queue:
            return False
        return all(isinstance(each, UpstreamRequest) and each.sink is DISCARD for each in self.in_flight)

    @property
    def holds_state(self) -> bool:
        """Return whether the connection has state: watched or tracked keys, subscriptions, or MONITOR."""
        has_subscription = self.is_listening or self.has_module_subscription
        return bool(self.watched) or self.is_monitor or self.is_tracking or has_subscription

    @property
    def is_listening(self) -> bool:
        """Return whether the client is subscribed to anything."""
        return any(self._subscriptions.values())

    def may_be_forwarded_to(self, protocol: int) -> bool:
        """Return whether the forwarder may use the connection for a client with a version of the protocol.

        It may if the client tracks keys: invalidations are pushes, which the forwarder leaves to the general path. The
        forwarder would confuse other frames with replies.
        """
        return (
            self.is_open
            and protocol == self.protocol
            and not (self.is_monitor or self.is_listening or self.has_module_subscription)
        )

    @property
    def is_blocked(self) -> bool:
        """Return whether a blocking command waits at the upstream, or for the connection to open."""
        if self._queue:
            return self._queue[-1].is_blocking
        return bool(self.in_flight) and self.in_flight[-1].is_blocking

    def with_upstream_id(self, then: Callable[[int | None], None]) -> None:
        """Call back, now or later, with the id that CLIENT UNBLOCK at the upstream takes; None if it cannot be known.

        CLIENT ID is the connection's first request. When its reply arrives, the command that was sent with it blocks.
        """
        if self._wait_for_id is None:
            then(self.upstream_id)
        else:
            self._wait_for_id.append(then)

    def set_upstream_id(self, upstream_id: int | None) -> None:
        """Set the id. None: the upstream has refused to tell it, or the connection has failed."""
        waiting, self.upstream_id, self._wait_for_id = self._wait_for_id or (), upstream_id, None
        for then in waiting:
            then(upstream_id)

    def with_attributes(self, sink: ReplySink, **attributes: bool) -> ReplySink:
        """Set attributes as the request does that is sent next; return the sink for its reply.

        A refused request changes nothing at the upstream. So after an error the attributes are as before.
        """
        before = {name: getattr(self, name) for name in attributes}
        self._set_attributes(attributes)
        return _AttributesSink(sink, partial(self._set_attributes, before))

    def _set_attributes(self, attributes: Mapping[str, bool]) -> None:
        for name, is_set in attributes.items():
            setattr(self, name, is_set)

    def send_request(self, request: UpstreamRequest, protocol: int) -> None:
        """Send a request in a version of the protocol, which the client may have changed."""
        if protocol != self.protocol:
            self.protocol = protocol
            self._send_own(pack((b"HELLO", b"%d" % protocol)), DISCARD)
        self.add(request)

    def send_wait(self, request: UpstreamRequest, protocol: int, first_write: bytes = FIRST_WRITE) -> None:
        """Send WAIT or WAITAOF, for all writes of the client, also for those over other connections.

        The upstream waits for this connection's writes, so the connection first sends a write of its own, which comes
        after all of the client's: `first_write`. Redis before 7.2 accepts any command for this; Redis before 7.0 has no
        SPUBLISH.
        """
        if not self._has_written:
            self._has_written = True
            sink = _WaitSink(request.sink)
            request.sink = sink
            self._send_own(first_write, _FirstWriteSink(sink))
            self._send_own(PING, DISCARD)
        self.send_request(request, protocol)

    def unwatch(self) -> None:
        """Forget all watched keys."""
        if self.watched:
            self.forget_watched()
            self._send_own(UNWATCH, DISCARD)

    @property
    def has_watched(self) -> bool:  # type: ignore[override]
        return bool(self.watched) or self.is_dirty

    def change_watched(self, ends_watch: bool, keys: Sequence[bytes]) -> bool:
        watched = set(keys) if ends_watch else {*self.watched, *keys}
        try:
            check_watch_limits((), watched)
        except GenericError:
            return False
        if ends_watch:
            self.forget_watched()
        self.watched = watched
        return True

    def forget_watched(self) -> None:
        """Handle that the upstream has forgotten all watched keys."""
        self.watched, self.is_dirty = set(), False

    def close(self) -> None:
        """Close the connection, because its client has left. Queued requests are dropped."""
        self._clear()
        self.forget_watched()
        for request in self._queue:
            request.sink = DISCARD
        self.set_upstream_id(None)
        self.stop()

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Take replies, in the order of the requests, and pushes between them."""
        self._received_s = self._owner.clock()
        for reply in replies:
            if not self._take_push(reply):
                self._receive_reply(reply)

    def _take_push(self, reply: RawReply) -> bool:
        """Handle a frame that is no reply; False: it is one."""
        kind = reply[:1] if isinstance(reply, bytes) else reply.texts[0][:1]
        if kind == b"+":  # a monitor gets many
            is_line = self.is_monitor and is_monitor_line(reply)
            if is_line:
                self._owner.on_push(self.client, reply)
            return is_line
        if kind == b"*":
            # In RESP2 a subscriber gets no arrays as replies; in RESP3 no arrays are pushes.
            is_subscriber = self.is_listening or self._confirmed_request is not None
            is_push = self.protocol == 2 and is_subscriber and first_word(reply) in (MESSAGES | CONFIRMATIONS)
        else:
            is_push = kind == b">"
        if is_push and not self._confirm(reply) and (self.is_for_messages or not is_of_channel(reply)):
            self._owner.on_push(abs(self.client), reply)
        return is_push

    def _confirm(self, reply: RawReply) -> bool:
        """Count a confirmation; after the last one the request has its reply, which is empty."""
        found = confirmation_in(reply)
        if found is None:
            return False
        self._subscriptions[found.is_shard] = found.left
        request = self._confirmed_request
        if request is None:
            return False
        request.confirmations -= 1
        if not request.confirmations:
            self._receive_reply(b"")
        return True

    @property
    def _confirmed_request(self) -> UpstreamRequest | None:
        """The SUBSCRIBE or the like whose confirmations come next."""
        first = self.in_flight[0] if self.in_flight else None
        return first if isinstance(first, UpstreamRequest) and first.confirmations else None

    def disconnected(self, reason: str) -> None:
        """Handle the loss. The client is disconnected if it waits for a reply, or has lost state at the upstream."""
        self.link = None
        holds_state = self.holds_state and not self._is_stopping
        lost = self._take_requests()
        if not self._is_stopping:
            self._pool.lost(reason)
        self._end(reason)
        for request in lost:
            request.sink.fail(request.index, UnansweredError(reason))
        if holds_state:
            self._owner.on_state_lost(abs(self.client), reason)

    def _send_own(self, packed: bytes, sink: ReplySink) -> None:
        self.add(UpstreamRequest(packed, sink, 0, is_read=False))

    def _end(self, reason: str) -> None:
        if not self._is_stopping:
            self._failure, self._is_stopping = reason, True
            self._owner.ended(self)

    def _try_later(self, pause_s: float) -> None:
        self._end(self._owner.failure)

    def _unreachable(self) -> TryAgainError:
        return unreachable(self._owner.url, self._failure) if self._failure else super()._unreachable()


class DedicatedConnections:
    """The connections of single clients, the least recently used one first.

    Args:
        pool: Gets the events of the connections.

    Attributes:
        on_state_lost: Called with a client whose connection was lost with its state.
        on_push: Called with a client and a frame that it gets without a request. A client's listener, a second
            connection that gets its invalidations, has the negative id of the client.
        follow: See `UpstreamConnection`.
        by_client: The connections.
    """

    def __init__(self, pool: ConnectionEvents, count_max: int = DEDICATED_CONNECTIONS_MAX) -> None:
        self._pool = pool
        self.count_max = count_max
        self.by_client: dict[int, DedicatedConnection] = {}
        self.on_state_lost: Callable[[int, str], None] = lambda client, reason: None
        self.on_push: Callable[[int, RawReply], None] = lambda client, frame: None
        self.follow: Callable[[UpstreamRequest, int, int], None] | None = None
        self.failure = ""  # of the last try to connect

    def __iter__(self) -> Iterator[DedicatedConnection]:
        return iter(list(self.by_client.values()))

    def __len__(self) -> int:
        return len(self.by_client)

    def get(self, client: int) -> DedicatedConnection | None:
        """Return a client's connection, if it has one."""
        found = self.by_client.get(client)
        if found is not None:
            del self.by_client[client]
            self.by_client[client] = found
        return found

    def open(self, client: int, protocol: int) -> DedicatedConnection:
        """Return a client's connection, a new one if it has none; GenericError if too many clients have one."""
        found = self.get(client)
        if found is not None:
            return found
        if len(self.by_client) >= self.count_max:
            idle = next((each for each in self.by_client.values() if each.is_idle), None)
            if idle is None:
                raise GenericError(
                    f"max number of clients with an upstream connection of their own reached, {self.count_max}; "
                    "see --upstream-pinned"
                )
            self._close(idle.client)
        if self.breaker.is_open:
            raise unreachable(self.url, self.breaker.reason)
        made = self.by_client[client] = DedicatedConnection(self, client, protocol)
        return made

    def open_listener(self, client: int) -> DedicatedConnection:
        """Return the second connection of a client, for its invalidations; GenericError as `open`."""
        return self.open(-client, LISTENER_PROTOCOL)

    def listener_of(self, client: int) -> DedicatedConnection | None:
        """Return the second connection of a client, if it has one."""
        return self.by_client.get(-client)

    def release(self, client: int) -> None:
        """Close the connections of a client that has left, or that needs none any more."""
        self._close(client)
        self._close(-client)

    def _close(self, client: int) -> None:
        found = self.by_client.pop(client, None)
        if found is not None:
            found.close()

    def stop(self) -> None:
        """Close all connections."""
        for client in list(self.by_client):
            self._close(client)

    @property
    def blocked(self) -> int:
        """The number of clients whose blocking command waits at the upstream."""
        return sum(each.is_blocked for each in self.by_client.values())

    def info_fields(self) -> dict[str, object]:
        """Return the fields of INFO."""
        return {
            "upstream_pinned": len(self.by_client),
            "upstream_pinned_max": self.count_max,
            "upstream_blocked": self.blocked,
        }

    # -- called by connections ----------------------------------------------------------------------------------------

    @property
    def url(self) -> UpstreamUrl:
        """The upstream's URL."""
        return self._pool.url

    @property
    def tls(self) -> UpstreamTls | None:
        """The TLS of connections, if the URL has TLS."""
        return self._pool.tls

    @property
    def role(self) -> RoleCheck:
        """The check of the upstream's role."""
        return self._pool.role

    def located(self) -> UpstreamUrl:
        """Return the server's URL; OSError if no sentinel knows the master now."""
        return self._pool.located()

    @property
    def breaker(self) -> Breaker:
        """The upstream's breaker."""
        return self._pool.breaker

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of time limits."""
        return self._pool.clock

    @property
    def poller(self) -> Any:
        """The compiled core's epoll, where there is one."""
        return self._pool.poller

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this turn of the event loop."""
        self._pool.at_end_of_round(then)

    def opened(self, connection: UpstreamConnection) -> None:
        """Tell the pool, which closes its breaker."""
        self._pool.opened(connection)

    def failed(self, connection: UpstreamConnection, reason: str) -> float:
        """Remember why a connection was not opened. The breaker is not: the upstream may only have too many clients."""
        self.failure = reason
        return 0.0

    def lost(self, reason: str) -> None:
        """Count a lost connection."""
        self._pool.lost(reason)

    def refused_write(self, connection: UpstreamConnection) -> None:
        """Handle the reply READONLY."""
        self._pool.refused_write(connection)

    def ended(self, connection: DedicatedConnection) -> None:
        """Forget a connection that was lost, or not opened."""
        if self.by_client.get(connection.client) is connection:
            del self.by_client[connection.client]


class _Discard(ReplySink):
    """Ignores replies."""

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        pass

    def fail(self, index: int, error: Exception) -> None:
        pass


DISCARD = _Discard()


class _IdSink(_Discard):
    """Takes the reply to CLIENT ID."""

    def __init__(self, connection: DedicatedConnection) -> None:
        self._connection = connection

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        line = as_bytes(reply)
        self._connection.set_upstream_id(int(line[1:]) if line[:1] == b":" else None)  # None: its user may not ask

    def fail(self, index: int, error: Exception) -> None:
        self._connection.set_upstream_id(None)


class _AttributesSink(ReplySink):
    """Takes the reply to a request that changes attributes of its connection, such as CLIENT TRACKING.

    Args:
        undo: Called if the request is refused.
    """

    def __init__(self, sink: ReplySink, undo: Callable[[], None]) -> None:
        self._sink, self._undo = sink, undo

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        if is_error(reply):
            self._undo()
        self._sink.put(index, reply, epochs)

    def fail(self, index: int, error: Exception) -> None:
        self._undo()
        self._sink.fail(index, error)


class _WaitSink(_Discard):
    """Takes the reply to WAIT; instead of it an error, if the write before it was refused."""

    def __init__(self, sink: ReplySink) -> None:
        self._sink = sink
        self.error: RawReply | None = None

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        self._sink.put(index, reply if self.error is None else self.error)

    def fail(self, index: int, error: Exception) -> None:
        self._sink.fail(index, error)


class _FirstWriteSink(_Discard):
    """Takes the reply to the write before WAIT."""

    def __init__(self, wait: _WaitSink) -> None:
        self._wait = wait

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        if is_error(reply) and not as_bytes(reply).startswith(b"-ERR unknown command"):
            self._wait.error = reply
