"""Relays messages: a proxy subscribes at servers to what its clients are subscribed to, and delivers the messages.

    channels, patterns        at one server, the proxy's home: cluster nodes pass published messages to each other
    key notifications         at the active server of each shard, of all applications: each notifies of its own slots.
                              A pattern that may match both kinds is subscribed at all servers; its messages that are
                              no notifications count from the home alone
    shard channels            at the active server of the slot
    __sparkis__:...           nowhere: the proxy itself announces an epoch when all shards serve it

With several applications the messages of clients go over the first one. The proxy's own settings (STATE NOTIFY) say
which events are notified, whatever the servers' settings are. When a connection is lost or silent, clients that may
have missed a message are disconnected, as the server would do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import Any

import hiredis

from resp_server.acl.rules import DEFAULT_USER
from resp_server.execution.context import ServerContext
from resp_server.net.tls import why
from resp_server.protocol.errors import ClusterDownError, PlainError
from resp_server.protocol.replies import Frames, Pending, Reply
from resp_server.protocol.request_parser import Request
from resp_server.proxy.applications import Applications
from resp_server.proxy.reply_splitter import pack
from resp_server.proxy.requests import PING, BackgroundSink, UpstreamRequest
from resp_server.proxy.upstream_cluster import UpstreamCluster
from resp_server.proxy.upstream_connection import ConnectionKey
from resp_server.push.deliveries import TURN_NS_MAX
from resp_server.push.keyspace_notifications import KEYEVENT, KEYSPACE, may_be_of_keys
from resp_server.push.message_bus import MessageBus
from resp_server.push.pubsub import OWN_CHANNELS, Found, MessageBatch
from resp_server.session.session import Session
from resp_server.session.subscriptions import SUBSCRIBED_BYTES_MAX, SUBSCRIPTIONS_MAX, Way, check_name, message
from state_backend.model.slots import slot_of

logger = logging.getLogger("sparkis.proxy")

# How long an epoch that all servers show, or a change of who answers, goes unseen (guess).
LOOK_S = 0.05
# A server that cannot be reached is tried again after this.
PAUSE_S = 0.5
# A server that says nothing for a timeout of the proxy's is asked to, and is as good as gone after so many (guess).
SILENT_TIMEOUTS_MAX = 5
NAMES_PER_REQUEST = 1_000
# How long a proxy reads nothing more of a server's messages while its clients do not take them.
PATIENCE_S = 1.0
PATIENCE_STEP_S = 0.01
VERBS = {Way.CHANNEL: b"SUBSCRIBE", Way.PATTERN: b"PSUBSCRIBE", Way.SHARD: b"SSUBSCRIBE"}

# The channels and patterns that a server is asked for.
Names = dict[Way, set[bytes]]


def _none() -> Names:
    return {way: set() for way in VERBS}


class RelayConnection(asyncio.Protocol):
    """A connection to a server over which messages come."""

    def __init__(self, feeds: PubsubRelay, cluster: UpstreamCluster, address: str) -> None:
        self.address = address
        self.cluster = cluster
        self.wanted = _none()
        self._wanted_bytes = 0
        self.pings = 0  # sent, or to be sent when there is a connection
        self.pongs = 0
        self._feeds = feeds
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._has = _none()
        self._changed = _none()  # what came to `wanted` or went since the server was asked
        self._letters: str | None = None
        self._reader = hiredis.Reader()
        self._connecting: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        self._silent_looks = 0  # since the server was heard; while this process itself stands still nobody looks
        self._paused_steps = 0
        self._passing_on: Iterator[None] | None = None  # what came, as far as it was not passed on yet

    def has_room(self, name: bytes) -> bool:
        """Tell whether the server lets this connection be subscribed to another channel or pattern."""
        count = sum(map(len, self.wanted.values()))
        return count < SUBSCRIPTIONS_MAX and self._wanted_bytes + len(name) <= SUBSCRIBED_BYTES_MAX

    def want(self, way: Way, name: bytes, is_wanted: bool) -> None:
        """Take in whether messages to a channel or pattern are to come over this connection."""
        names = self.wanted[way]
        if is_wanted is (name in names):
            return
        if is_wanted:
            names.add(name)
            self._wanted_bytes += len(name)
        else:
            names.remove(name)
            self._wanted_bytes -= len(name)
        self._changed[way].add(name)

    def settle(self, letters: str) -> None:
        """Ask the server for what is wanted and not there yet, and for no more."""
        if self._transport is None:
            self.pings = max(self.pings, self.pongs + 1)
            if self._connecting is None and self._loop.time() >= self._not_before_s:
                self._connecting = self._loop.create_task(self._connect())
            return
        words: list[Request] = []
        if letters != self._letters:
            self._letters = letters
            words.append((b"STATE", b"NOTIFY", letters.encode()))
        for way, verb in VERBS.items():
            changed, has = self._changed[way], self._has[way]
            if not changed:
                continue
            come, gone = (changed & self.wanted[way]) - has, (changed & has) - self.wanted[way]
            words += _in_parts(verb.replace(b"SUB", b"UNSUB"), gone)
            words += _in_parts(verb, come)
            has -= gone
            has |= come
            self._changed[way] = set()
        if words:
            self.pings += 1
            self._transport.write(b"".join([*map(pack, words), PING]))

    async def _connect(self) -> None:
        host, _, port = self.address.rpartition(":")
        certificates, password = self.cluster.certificates, self.cluster.password
        try:
            async with asyncio.timeout(self.cluster.timeout_s):
                context = None if certificates is None else certificates.for_server()
                transport, _ = await self._loop.create_connection(lambda: self, host, int(port), ssl=context)
        except (OSError, TimeoutError) as error:
            logger.warning("no messages from %s: %s", self.address, why(error) or "it does not answer")
            self._not_before_s = self._loop.time() + PAUSE_S
            return
        finally:
            self._connecting = None
        words: list[Request] = [] if password is None else [(b"AUTH", DEFAULT_USER, password.encode())]
        words += [(b"HELLO", b"3"), (b"CLIENT", b"SETNAME", b"sparkis-proxy")]
        transport.write(b"".join(map(pack, words)))
        self._transport, self._has, self._letters = transport, _none(), None
        self._changed = {way: set(names) for way, names in self.wanted.items()}
        self._silent_looks = 0
        self.pings = self.pongs = self.pings - 1  # the next one stands for those that went with the connection before
        self._feeds.settle()

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is wanted of the server any more."""
        return not any(self.wanted.values())

    @property
    def is_behind(self) -> bool:
        """Tell whether there is something to ask the server for, or no connection."""
        return self._transport is None or any(self._changed.values())

    def check(self) -> None:
        """Have a server that is silent say something; end the connection if it does not."""
        timeout_s = self.cluster.timeout_s
        if self._transport is None or self._paused_steps or self._passing_on is not None:
            return
        self._silent_looks += 1
        silent_s = self._silent_looks * LOOK_S
        if silent_s > SILENT_TIMEOUTS_MAX * timeout_s:
            logger.warning("%s, which messages come from, says nothing any more", self.address)
            self._transport.abort()
        elif silent_s > timeout_s and self.pings == self.pongs:
            self.pings += 1
            self._transport.write(PING)

    def close(self) -> None:
        """End it; nobody misses anything."""
        if self._connecting is not None:
            self._connecting.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._silent_looks = 0
        self._reader.feed(data)
        if self._passing_on is None:
            mail = MessageBatch()
            self._passing_on = self._pass_on(mail)
            self._step(self._passing_on, mail, {})

    def _step(self, steps: Iterator[None], mail: MessageBatch, told: dict[Session, None]) -> None:
        """Pass on some of what came, and the rest in turns to come. Until then nothing more is read."""
        transport, server = self._transport, self._feeds.server
        if transport is None or steps is not self._passing_on:
            return  # the connection was lost
        ends_ns, is_done = perf_counter_ns() + TURN_NS_MAX, True
        try:
            for _ in steps:
                if perf_counter_ns() >= ends_ns:
                    is_done = False
                    break
        except Exception as error:
            self._fail(error)
        told |= dict.fromkeys(mail.send(server.clients.push))
        if not is_done:
            transport.pause_reading()
            server.clients.defer(partial(self._step, steps, mail, told))
            return
        self._passing_on = None
        self._silent_looks = 0
        self._wait_for(list(told))
        if not self._paused_steps:
            transport.resume_reading()

    def _pass_on(self, mail: MessageBatch) -> Iterator[None]:
        """Take what the server said, in steps."""
        while (reply := self._reader.gets()) is not False:
            if isinstance(reply, hiredis.PushNotification):
                yield from self._heard(mail, reply)
            elif isinstance(reply, hiredis.ReplyError):
                self._refused(str(reply))
            elif reply == b"PONG":
                self.pongs += 1
                self._feeds.confirmed()
            yield

    def _fail(self, error: Exception) -> None:
        if isinstance(error, hiredis.ProtocolError):
            logger.warning("messages of %s are not understood: %s", self.address, error)
        else:
            self._feeds.server.report(error)
        assert self._transport is not None
        self._transport.abort()

    def _heard(self, mail: MessageBatch, push: Sequence[Any]) -> Iterator[None]:
        match push:
            case [b"message", bytes(channel), bytes(text)]:
                yield from self._feeds.pass_on(mail, self, Way.CHANNEL, channel, channel, text)
            case [b"pmessage", bytes(pattern), bytes(channel), bytes(text)]:
                yield from self._feeds.pass_on(mail, self, Way.PATTERN, pattern, channel, text)
            case [b"smessage", bytes(channel), bytes(text)]:
                yield from self._feeds.pass_on(mail, self, Way.SHARD, channel, channel, text)
            case [b"sunsubscribe", bytes(channel), _]:
                self._has[Way.SHARD].discard(channel)  # its slot went; whoever has it now is asked soon
                self._changed[Way.SHARD].add(channel)

    def _refused(self, reason: str) -> None:
        """Try what was refused again at the next look: a slot moved, most likely."""
        logger.warning("%s refuses: %s", self.address, reason)
        self._has[Way.SHARD].clear()
        self._changed[Way.SHARD] |= self.wanted[Way.SHARD]
        if reason.startswith("MOVED"):
            self.cluster.refresh(self.address)

    def _wait_for(self, told: list[Session]) -> None:
        """Read nothing more while clients do not take what they are sent, for a while."""
        if self._transport is None:
            return
        if self._feeds.slow(told) and self._paused_steps * PATIENCE_STEP_S < PATIENCE_S:
            if not self._paused_steps:
                self._transport.pause_reading()
            self._paused_steps += 1
            self._loop.call_later(PATIENCE_STEP_S, self._wait_for, told)
        elif self._paused_steps:
            self._feeds.leave_behind(told)
            self._paused_steps = 0
            self._silent_looks = 0
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        self._transport, self._reader, self._passing_on = None, hiredis.Reader(), None
        self._not_before_s = self._loop.time()
        self._feeds.lost(self)


def _in_parts(verb: bytes, names: Iterable[bytes]) -> Iterator[Request]:
    left = iter(names)
    while some := list(islice(left, NAMES_PER_REQUEST)):
        yield (verb, *some)


class PubsubRelay:
    """All of a proxy's feeds."""

    def __init__(self, applications: Applications, server: ServerContext) -> None:
        self.server = server
        self._applications = applications
        self._hub = server.message_bus.hub
        # By application and address. A server lets one connection be subscribed to so much, then there is another.
        self._feeds: defaultdict[tuple[int, str], list[RelayConnection]] = defaultdict(list)
        self._changed: dict[tuple[Way, bytes], None] = {}  # what clients came to, or left, since `settle`
        self._home: str | None = None
        self._waiting: list[tuple[dict[RelayConnection, int], Callable[[], None]]] = []
        self._epochs: dict[tuple[int, str], tuple[int, int]] = {}
        self._looking: asyncio.TimerHandle | None = None
        self._not_waited_for: set[Session] = set()
        self._is_stopped = False
        self._is_due = False  # `settle` comes with the next turn
        self._asking: list[Callable[[], None]] = []  # want to know when what is wanted by then was taken in
        self._standing: object = None
        self._also_on_change = self._hub.on_change
        self._hub.on_change = self._subscriptions_changed

    def stop(self) -> None:
        """Close all connections."""
        self._is_stopped = True
        if self._looking is not None:
            self._looking.cancel()
        for feed in self._each():
            feed.close()

    def _each(self) -> list[RelayConnection]:
        return [feed for feeds in self._feeds.values() for feed in feeds]

    @property
    def home(self) -> str | None:
        """The server over which messages between clients go; None while none is known."""
        answering = self._answering(0)
        if self._home not in answering:
            self._home = answering[0] if answering else None
        return self._home

    def _answering(self, number: int) -> list[str]:
        cluster = self._applications.each[number]
        return list(dict.fromkeys(cluster.active_server(master) for master in cluster.slots.counts))

    def _subscriptions_changed(self, way: Way, name: bytes) -> None:
        self._also_on_change(way, name)
        self._changed[way, name] = None
        self.settle_soon()

    def settle_soon(self) -> None:
        """Have `settle` called with the next turn of the event loop, for all that comes until then."""
        if not self._is_due and not self._is_stopped:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.settle)

    def settle(self) -> None:
        """Be subscribed to what clients are subscribed to."""
        self._is_due = False
        standing = self._who_answers()
        if standing != self._standing:
            self._standing = standing
            wanted = ((way, name) for feed in self._each() for way, names in feed.wanted.items() for name in names)
            self._changed = dict.fromkeys([*wanted, *((way, name) for way in Way for name in self._hub.names(way))])
        self._assign()
        closed = {feed for feed in self._each() if feed.is_empty}
        for place, feeds in list(self._feeds.items()):
            self._feeds[place] = [feed for feed in feeds if feed not in closed]
            if not self._feeds[place]:
                del self._feeds[place]
        for feed in closed:
            feed.close()
        letters = self.server.config.notify_events
        for feed in self._each():
            feed.settle(letters)
        if self._looking is None and not self._is_stopped and not self._is_empty:
            self._epochs = dict(self._reached())
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        # Who waits for a feed that is closed waits for those that took its place.
        asking = self._asking + [then for missing, then in self._waiting if closed & missing.keys()]
        self._waiting = [row for row in self._waiting if not closed & row[0].keys()]
        self._asking = []
        for then in asking:
            self._wait(then)

    def _who_answers(self) -> object:
        """Return what `_assign` and the requests to servers depend on, beside what clients want."""
        letters = self.server.config.notify_events
        return letters, [(each.slots.version, self._answering(at)) for at, each in enumerate(self._applications.each)]

    @property
    def _is_empty(self) -> bool:
        return self._hub.is_empty and not self._hub.names(Way.SHARD)

    def _assign(self) -> None:
        """Have what clients came to, and left, wanted of the servers that tell of it."""
        changed, self._changed = self._changed, {}
        everywhere = [
            (number, each) for number in range(len(self._applications.each)) for each in self._answering(number)
        ]
        at_home = [] if self.home is None else [(0, self.home)]
        first = self._applications.each[0]
        for way, name in changed:
            places: list[tuple[int, str]] = []
            if name not in self._hub.names(way) or (way is not Way.SHARD and name.startswith(OWN_CHANNELS)):
                pass
            elif way is Way.SHARD:
                owner = first.slots.owners[slot_of(name)]
                places = [] if owner is None else [(0, first.active_server(owner))]
            else:
                places = everywhere if may_be_of_keys(way, name) else at_home
            for place in {*self._feeds, *places}:
                self._want(place, way, name, place in places)

    def _want(self, place: tuple[int, str], way: Way, name: bytes, is_wanted: bool) -> None:
        feeds = self._feeds[place]
        holder = next((feed for feed in feeds if name in feed.wanted[way]), None)
        if holder is None and is_wanted:
            holder = next((feed for feed in feeds if feed.has_room(name)), None)
            if holder is None:
                number, address = place
                holder = RelayConnection(self, self._applications.each[number], address)
                feeds.append(holder)
        if holder is not None:
            holder.want(way, name, is_wanted)

    def _look(self) -> None:
        """Look whether all servers show another epoch, or others answer now."""
        self._looking = None
        if self._is_stopped or self._is_empty:
            return
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        if self._standing != self._who_answers():
            self.settle()
        for feed in self._each():
            feed.check()
            if feed.is_behind:
                feed.settle(self.server.config.notify_events)
        for (number, job), reached in self._reached():
            if self._epochs.get((number, job)) != reached:
                self._epochs[number, job] = reached
                self.server.notifications.announce_epoch(job, reached)

    def _reached(self) -> Iterator[tuple[tuple[int, str], tuple[int, int]]]:
        """Iterate over the epochs of jobs that all shards show."""
        for number, cluster in enumerate(self._applications.each):
            upstreams = [cluster.upstreams.get(ConnectionKey(each, 2, False)) for each in self._answering(number)]
            epochs = [upstream.epochs for upstream in upstreams if upstream is not None and upstream.is_connected]
            if epochs and len(epochs) == len(upstreams):
                for job in set(epochs[0]).intersection(*epochs[1:]):
                    yield (number, job), min(each[job] for each in epochs)

    # -- what feeds tell ----------------------------------------------------------------------------------------------

    def pass_on(
        self, mail: MessageBatch, feed: RelayConnection, way: Way, name: bytes, channel: bytes, text: bytes
    ) -> Iterator[None]:
        """Give a message to those who are subscribed to what it came for, a client at each step."""
        is_of_keys = way is not Way.SHARD and channel.startswith((KEYSPACE, KEYEVENT))
        is_from_home = feed.address == self._home and feed.cluster is self._applications.each[0]
        if channel.startswith(OWN_CHANNELS) or not (is_of_keys or is_from_home or way is Way.SHARD):
            return
        key = text if channel.startswith(KEYEVENT) else channel.removeprefix(KEYSPACE)
        frames: dict[int, bytes] = {}
        for session in self._hub.sessions(way, name):
            if not session.is_subscribed(way, name):
                continue  # not any more
            if is_of_keys and not (session.user.is_unrestricted or session.user.can_read(key)):
                continue
            if session.protocol not in frames:
                frames[session.protocol] = message(way, name, channel, text, session.protocol)
            mail.add(session, frames[session.protocol])
            yield

    def slow(self, told: Sequence[Session]) -> set[Session]:
        """Return those who have more waiting than that at which their requests are not read, if waited for."""
        pause_bytes = self.server.config.output_pause_bytes
        full = {each for each in told if self.server.clients.output_bytes(each.id) > pause_bytes}
        self._not_waited_for -= set(told) - full
        return full - self._not_waited_for

    def leave_behind(self, told: Sequence[Session]) -> None:
        """Wait no more for those who still have too much waiting, until they have not."""
        self._not_waited_for |= self.slow(told)

    def settled(self, then: Callable[[], None]) -> None:
        """Call back once servers have taken in what is wanted by now."""
        self._asking.append(then)
        self.settle_soon()

    def _wait(self, then: Callable[[], None]) -> None:
        missing = {feed: feed.pings for feed in self._each() if feed.pings > feed.pongs}
        if missing:
            self._waiting.append((missing, then))
        else:
            then()

    def confirmed(self) -> None:
        """Look who waited for what a server has taken in."""
        waiting, self._waiting = self._waiting, []
        for missing, then in waiting:
            if any(feed.pongs < pings for feed, pings in missing.items()):
                self._waiting.append((missing, then))
            else:
                then()

    def lost(self, feed: RelayConnection) -> None:
        """Cut those who may have missed something."""
        for way, names in feed.wanted.items():
            for session in [each for name in names for each in self._hub.sessions(way, name)]:
                if session.id in self.server.sessions:
                    self.server.clients.cut(session.id, f"{feed.address}, which its messages come from, is gone")


class _Counted(BackgroundSink):
    """Takes a server's answer to a PUBLISH."""

    def __init__(self, pending: Pending, count: Callable[[int], int]) -> None:
        self._pending = pending
        self._count = count

    def fail(self, index: int, error: Exception) -> None:
        def raised() -> Reply:
            raise error

        self._pending.resolve(raised)

    def receive(self, reply: bytes) -> None:
        """Answer with how many clients there were, or with the error as it is."""
        if reply[:1] == b":":
            self._pending.resolve(lambda: self._count(int(reply[1:])))
        else:
            self._pending.resolve(lambda: Frames(reply))


class ProxyMessageBus(MessageBus):
    """Publishing at a proxy: at its home, from where it comes back to the proxy's own clients as well."""

    def __init__(self, server: ServerContext, applications: Applications, feeds: PubsubRelay) -> None:
        super().__init__(server, server.message_bus.hub)
        self.applications = applications
        self.feeds = feeds

    def publish(self, publisher: Session, way: Way, channel: bytes, text: bytes, *, is_forwarded: bool = True) -> Reply:
        if channel.startswith(OWN_CHANNELS):
            raise PlainError(f"channels that begin with {OWN_CHANNELS.decode()} are the server's own")
        cluster = self.applications.each[0]
        home = self.feeds.home
        if home is None:
            raise ClusterDownError
        check_name(channel)
        found = Found()  # here, and so what the server counts that they came from
        pending = Pending(2 * cluster.timeout_s, _too_late)
        packed = pack((b"SPUBLISH" if way is Way.SHARD else b"PUBLISH", channel, text))
        counted = _Counted(pending, lambda count: max(count - found.names, 0) + found.clients)
        address = None if way is Way.SHARD else home

        def ask() -> None:
            cluster.send(UpstreamRequest(packed, slot_of(channel), 2, cluster.deadline_s(), counted, 0, address))

        self._deliveries.add(self.hub.counting(found, way, channel), lambda: None, ask)
        return pending

    def subscribed(self, session: Session, frames: bytes) -> Reply:
        answered = partial(super().subscribed, session, frames)
        pending = Pending(self.applications.each[0].timeout_s, answered)
        self.feeds.settled(lambda: pending.resolve(answered))
        return pending


def connect_pubsub(applications: Applications, server: ServerContext) -> PubsubRelay:
    """Connect the publishing and the subscriptions of a proxy's clients with the servers."""
    feeds = PubsubRelay(applications, server)
    server.message_bus = ProxyMessageBus(server, applications, feeds)
    return feeds


def _too_late() -> Reply:
    raise PlainError("no server took the message in time")
