"""The servers behind a proxy: few connections, which all clients share, and what is asked over them.

To each server there is a connection for what is looked up, and one for what may take long (KEYS, DBSIZE), for either
version of the protocol, opened when first used. What is asked in one turn of the event loop goes out in one write per
connection; replies come in order. A question has a deadline. It is sent at most twice: again only when a connection was
lost under it, which does no harm as everything here only reads. A MOVED changes the map and sends it elsewhere; after
two of those the servers do not agree yet, and it waits a little before each further try.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

from resp_server.errors import ClusterDownError, PlainError, TryAgainError
from resp_server.protocol.requests import Request
from resp_server.router.frames import FrameError, Frames, pack
from resp_server.router.slot_map import SlotMap, parse_nodes

logger = logging.getLogger("sparkis.proxy")

TIMEOUT_S = 1.0
# For what a server answers from all of its keys.
LONG_TIMEOUT_S = 60.0
SENDS_MAX = 2
# At most two turns at once: one stale answer is normal after a move, two mean that servers do not agree yet.
MOVES_AT_ONCE_MAX = 2
PAUSE_S = 0.02
PAUSE_S_MAX = 1.0
# Between two tries at servers that do not agree; they read a changed topology within half a second.
AGREE_PAUSE_S = 0.05
# What may wait at one connection, in questions and in bytes (guess).
ASKS_MAX = 100_000
WAITING_BYTES_MAX = 64 << 20
# The longest reply that is passed on: it is held until it is complete (guess).
REPLY_BYTES_MAX = 256 << 20
CHECKS_PER_TIMEOUT = 10


class TakesReplies(Protocol):
    """Whoever waits for an answer."""

    def put(self, index: int, reply: bytes) -> None:
        """Take the answer to the question of a number."""


@dataclass(slots=True)
class Ask:
    """One question: for a slot's owner, or for a server by its address."""

    packed: bytes
    slot: int
    protocol: int
    deadline_s: float
    whose: TakesReplies
    index: int
    address: str | None = None
    is_long: bool = False
    sends: int = 0
    moves: int = 0

    def refuse(self, error: PlainError | TryAgainError | ClusterDownError) -> None:
        """Answer with an error of the proxy's own."""
        self.whose.put(self.index, b"-%b\r\n" % error.line)


class LaneKey(NamedTuple):
    """Which connection to a server."""

    address: str
    protocol: int
    is_long: bool


class HandshakeError(Exception):
    """A server does not take the proxy as its client."""


@dataclass
class Upstreams:
    """All servers. Runs on the event loop's thread."""

    slots: SlotMap
    password: str | None = None
    timeout_s: float = TIMEOUT_S
    lanes: dict[LaneKey, Lane] = field(default_factory=dict)
    moves: int = 0
    losses: int = 0

    def start(self) -> None:
        """Begin to look after what waits."""
        self._loop = asyncio.get_running_loop()
        self._refreshing: set[str] = set()
        self._is_stopping = False
        self._check()

    def stop(self) -> None:
        """Close all connections."""
        self._is_stopping = True
        self._checking.cancel()
        for lane in list(self.lanes.values()):
            lane.close()

    @property
    def now_s(self) -> float:
        """The clock of deadlines."""
        return self._loop.time()

    def deadline_s(self, is_long: bool = False) -> float:
        """Return until when a question that is asked now may wait."""
        return self.now_s + (LONG_TIMEOUT_S if is_long else self.timeout_s)

    def send(self, ask: Ask) -> None:
        """Ask; the answer comes later, or an error, at once or later."""
        if self._is_stopping:
            ask.refuse(PlainError("the proxy stops"))
            return
        address = ask.address or self.slots.owners[ask.slot]
        if address is None:
            ask.refuse(ClusterDownError())
            return
        key = LaneKey(address, ask.protocol, ask.is_long)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(self, key)
        lane.add(ask)

    def later(self, deadline_s: float, again: Callable[[], None]) -> bool:
        """Call back after a pause; False if that would be past a deadline."""
        if self.now_s + AGREE_PAUSE_S > deadline_s:
            return False
        self._loop.call_later(AGREE_PAUSE_S, again)
        return True

    def facts(self) -> Mapping[str, object]:
        """Return what INFO shows: the version, and each server."""
        rows: dict[str, object] = {"topology_version": self.slots.version, "moves": self.moves, "losses": self.losses}
        for number, (address, slots) in enumerate(self.slots.counts.items()):
            lanes = [lane for lane in self.lanes.values() if lane.key.address == address]
            connections = sum(lane.is_connected for lane in lanes)
            is_up = not any(lane.reason for lane in lanes)
            rows[f"upstream{number}"] = (
                f"addr={address},slots={slots},connections={connections},waiting={sum(lane.waiting for lane in lanes)},"
                f"status={'up' if is_up else 'down'}"
            )
        return rows

    # -- called by lanes ----------------------------------------------------------------------------------------------

    def answered(self, ask: Ask, reply: bytes, address: str) -> None:
        """Pass an answer on; one that sends elsewhere is followed."""
        if reply[:7] != b"-MOVED " or ask.address is not None:
            ask.whose.put(ask.index, reply)
            return
        slot, owner = reply[7:].decode().split()
        self.slots.moved(int(slot), owner)
        self.refresh(address)
        self.moves += 1
        ask.moves += 1
        ask.sends = 0
        if ask.moves <= MOVES_AT_ONCE_MAX:
            self.send(ask)
        elif not self.later(ask.deadline_s, lambda: self.send(ask)):
            ask.refuse(TryAgainError(f"the servers do not agree on who answers slot {ask.slot}"))

    def lost(self, asks: Sequence[Ask], reason: str) -> None:
        """Ask again what went with a connection, of whoever is the owner now, once."""
        self.losses += 1
        now_s = self.now_s
        for ask in asks:
            if ask.sends >= SENDS_MAX or now_s >= ask.deadline_s:
                ask.refuse(PlainError(reason))
            else:
                self.send(ask)

    def refresh(self, address: str) -> None:
        """Ask a server for its topology, unless it is being asked."""
        if address not in self._refreshing:
            self._refreshing.add(address)
            packed = pack((b"CLUSTER", b"NODES"))
            self.send(Ask(packed, 0, 2, self.deadline_s(), Learner(self, address), 0, address))

    def learn(self, reply: bytes, address: str) -> None:
        """Take what a server says of its topology, if that is newer than what is known."""
        self._refreshing.discard(address)
        if reply[:1] != b"$":
            logger.warning("%s does not tell its topology: %s", address, reply[1:200].decode("utf-8", "replace"))
            return
        try:
            version, ranges = parse_nodes(reply.partition(b"\r\n")[2][:-2].decode())
        except ValueError as error:
            logger.warning("%s tells a topology that cannot be read: %s", address, error)
            return
        if self.slots.learn(version, ranges):
            logger.info("version %d of the topology, from %s", version, address)
            self.changed()

    def changed(self) -> None:
        """Ask others what waits for servers that cannot be reached, and let go of those that have gone."""
        known = self.slots.counts
        for key, lane in list(self.lanes.items()):
            if key.address not in known and lane.is_idle:
                lane.close()
                del self.lanes[key]
            elif not lane.is_connected:
                for ask in lane.take_back():
                    self.send(ask)

    def _check(self) -> None:
        self._checking = self._loop.call_later(self.timeout_s / CHECKS_PER_TIMEOUT, self._check)
        for lane in list(self.lanes.values()):
            lane.check(self.now_s)


@dataclass
class Learner:
    """Takes CLUSTER NODES."""

    upstreams: Upstreams
    address: str

    def put(self, index: int, reply: bytes) -> None:
        self.upstreams.learn(reply, self.address)


class Lane:
    """One connection to a server, opened again when it is lost; and what waits for it."""

    def __init__(self, upstreams: Upstreams, key: LaneKey) -> None:
        self._upstreams = upstreams
        self.key = key
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Ask] = []
        self._unsent_bytes = 0
        self._waiting: deque[Ask] = deque()
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._not_before_s = 0.0
        self._down_since_s: float | None = None
        self._heard_s = 0.0
        self.reason = ""

    @property
    def is_connected(self) -> bool:
        """Tell whether there is a connection."""
        return self._link is not None

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing waits."""
        return not self._unsent and not self._waiting

    @property
    def waiting(self) -> int:
        """How many questions wait for an answer."""
        return len(self._unsent) + len(self._waiting)

    def add(self, ask: Ask) -> None:
        """Ask with the next write."""
        if self.waiting >= ASKS_MAX or self._held_bytes() + len(ask.packed) > WAITING_BYTES_MAX:
            ask.refuse(PlainError(f"too much waits to be asked of {self.key.address}"))
            return
        if self._is_given_up():
            ask.refuse(PlainError(self.reason))
            return
        self._unsent.append(ask)
        self._unsent_bytes += len(ask.packed)
        if self._link is None:
            self._connect_soon()
        elif len(self._unsent) == 1:
            self._loop.call_soon(self._flush)

    def take_back(self) -> list[Ask]:
        """Return what was not sent, and forget it."""
        asks, self._unsent, self._unsent_bytes = self._unsent, [], 0
        return asks

    def check(self, now_s: float) -> None:
        """Cut a connection that brings nothing; refuse what has waited too long for one."""
        if self._link is not None:
            if self._waiting and now_s > max(self._waiting[0].deadline_s, self._heard_s + self._upstreams.timeout_s):
                self._link.cut(f"{self.key.address} did not answer in time")
        elif self._unsent and any(ask.deadline_s <= now_s for ask in self._unsent):
            reason = self.reason or f"{self.key.address} cannot be reached in time"
            for ask in self.take_back():
                if ask.deadline_s <= now_s:
                    ask.refuse(PlainError(reason))
                else:
                    self.add(ask)

    def close(self) -> None:
        """End the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.cut("the connection is not needed any more")

    def heard(self, replies: Sequence[bytes]) -> None:
        """Take replies in the order of the questions."""
        self._heard_s = self._loop.time()
        self._pause_s = 0.0
        waiting, answered, address = self._waiting, self._upstreams.answered, self.key.address
        if len(replies) > len(waiting):
            raise FrameError("more replies than questions")
        for reply in replies:
            ask = waiting.popleft()
            if reply[:1] == b"-":
                answered(ask, reply, address)
            else:
                ask.whose.put(ask.index, reply)

    def gone(self, reason: str) -> None:
        """Take in that the connection is lost."""
        self._link = None
        self._heard_s = 0.0
        asks = [*self._waiting, *self.take_back()]
        self._waiting.clear()
        self._failed(reason)
        log = logger.warning if asks else logger.info
        log("lost the connection to %s with %d questions: %s", self.key.address, len(asks), reason)
        self._upstreams.lost(asks, reason)

    def _held_bytes(self) -> int:
        return self._unsent_bytes + (self._link.output_bytes if self._link is not None else 0)

    def _flush(self) -> None:
        if self._link is None or not self._unsent:
            return
        asks = self.take_back()
        for ask in asks:
            ask.sends += 1
        self._waiting.extend(asks)
        self._link.write(b"".join([ask.packed for ask in asks]))

    def _is_given_up(self) -> bool:
        """Tell whether to refuse at once: unreachable for longer than a question may wait, and not tried just now."""
        return (
            self._down_since_s is not None
            and self._link is None
            and self._loop.time() < self._not_before_s
            and self._loop.time() - self._down_since_s > self._upstreams.timeout_s
        )

    def _connect_soon(self) -> None:
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        host, _, port = self.key.address.rpartition(":")
        try:
            await asyncio.sleep(self._not_before_s - self._loop.time())
            async with asyncio.timeout(self._upstreams.timeout_s):
                _, link = await self._loop.create_connection(lambda: Link(self), host, int(port))
                try:
                    await link.greet(self.key.protocol, self._upstreams.password)
                except BaseException:
                    link.forget()
                    raise
        except (OSError, HandshakeError, FrameError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error) or "it does not answer"
            self._failed(f"{self.key.address} cannot be reached: {text}")
            if self._is_given_up():
                for ask in self.take_back():
                    ask.refuse(PlainError(self.reason))
        else:
            self._link, self._down_since_s, self.reason = link, None, ""
            self._loop.call_soon(self._flush)
        finally:
            self._connecting = None
        if self._link is None and self._unsent:
            self._connect_soon()

    def _failed(self, reason: str) -> None:
        now_s = self._loop.time()
        if self._down_since_s is None:
            self._down_since_s = now_s
        self.reason = reason
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), PAUSE_S_MAX)


class Link(asyncio.Protocol):
    """A lane's socket."""

    _transport: asyncio.Transport

    def __init__(self, lane: Lane) -> None:
        self._lane: Lane | None = lane
        self._frames = Frames(REPLY_BYTES_MAX)
        self._greeting: asyncio.Future[None] | None = None
        self._greetings = 0
        self._is_lost = False
        self._reason = f"{lane.key.address} closed the connection"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = self._transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def greet(self, protocol: int, password: str | None) -> None:
        """Say who asks; HandshakeError if the server refuses."""
        words: list[Request] = [] if password is None else [(b"AUTH", password.encode())]
        words += [(b"HELLO", b"%d" % protocol), (b"CLIENT", b"SETNAME", b"sparkis-proxy")]
        self._greetings = len(words)
        self._greeting = asyncio.get_running_loop().create_future()
        self._transport.write(b"".join(map(pack, words)))
        await self._greeting
        self._greeting = None
        if self._is_lost:
            raise HandshakeError(self._reason)

    @property
    def output_bytes(self) -> int:
        """What waits to be sent."""
        return self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send."""
        self._transport.write(data)

    def cut(self, reason: str) -> None:
        """End the connection now; what waits for it is told."""
        self._reason = reason
        self._transport.abort()
        self._tell_lane()

    def forget(self) -> None:
        """End the connection; nobody is told."""
        self._lane = None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            replies = self._frames.feed(data)
            if self._greetings:
                self._greeted(replies)
            elif self._lane is not None:
                self._lane.heard(replies)
        except (FrameError, ValueError) as error:
            self._fail(f"what came is not understood: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._fail(self._reason if error is None else f"{self._reason}: {error}")

    def _greeted(self, replies: Sequence[bytes]) -> None:
        self._greetings -= len(replies)
        refusal = next((reply for reply in replies if reply[:1] == b"-"), None)
        assert self._greeting is not None
        if self._greeting.done():
            return
        if refusal is not None:
            self._greeting.set_exception(HandshakeError(refusal[1:-2].decode("utf-8", "replace")))
        elif not self._greetings:
            self._greeting.set_result(None)

    def _fail(self, reason: str) -> None:
        if self._greeting is not None:
            if not self._greeting.done():
                self._greeting.set_exception(HandshakeError(reason))
        else:
            self.cut(reason)

    def _tell_lane(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.gone(self._reason)
