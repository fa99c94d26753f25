"""A Redis Cluster as the upstream: a pool of connections to each master, and the table of the slots.

The table is read (`slot_table_reader.py`) at the start, after each MOVED, after each failure of a node, and every few
seconds once replies are cached here or by clients: a cached reply gets no MOVED. MOVED and ASK are followed here, so no
client sees them. A client's requests about one slot keep their order: they go over one connection, and a node's
redirects come in the order of its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from resp_server.backends.redis.cluster_requests import Part, Plan, first_slot, least_of, name_at, plan_of
from resp_server.backends.redis.connection import UpstreamConnection, UpstreamRequest
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.role import AnyRole
from resp_server.backends.redis.slot_table import Redirect, SlotTable, redirect_in
from resp_server.backends.redis.slot_table_reader import SlotTableReader
from resp_server.backends.redis.tracking import Tracking
from resp_server.backends.redis.url import UpstreamAddress, UpstreamUrl
from resp_server.backends.retries import UPSTREAM_REDIRECTS_MAX
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.spec import CommandSpec
from resp_server.protocol.errors import GenericError, ReplyError, TryAgainError
from resp_server.protocol.replies import Reply
from resp_server.protocol.request_parser import LongRequest, Request
from resp_server.raw_replies.answers import Answer, ReplyFuture, all_of, merge_answers, run_in_steps, run_into
from resp_server.raw_replies.packing import Packed, pack_in_steps
from resp_server.raw_replies.raw_reply import RawReply, Steps
from resp_server.raw_replies.reply_sinks import Defer, Merge, ReplySink, merge_or_error
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.epochs import NO_EPOCHS, ReplyEpochs
from state_backend.model.slots import SLOTS

logger = logging.getLogger("sparkis.proxy")

ASKING = pack((b"ASKING",))
# Standard: the largest cluster that Redis recommends, and replicas that became masters.
NODES_MAX = 2000
# CLIENT TRACKING needs pushes.
TRACKING_PROTOCOL = 3
# The pause before a node that left the cluster is looked at again: its last replies may be missing.
RETIRED_S = 1.0


class UpstreamCluster:
    """The connections to the nodes of a Redis Cluster. Runs on the event loop's thread. As `UpstreamPool`."""

    def __init__(self, url: UpstreamUrl, pool_at: Callable[[UpstreamUrl], UpstreamPool]) -> None:
        self.url = url
        self.on_facts: Callable[[Mapping[str, CommandSpec]], None] | None = None
        self.on_hello: Callable[[Mapping[bytes, Reply]], None] = lambda fields: None
        self.on_state_lost: Callable[[int, str], None] = lambda client, reason: None
        self.on_moved: Callable[[Collection[int]], None] = lambda clients: None
        self.on_push: Callable[[int, RawReply], None] = lambda client, frame: None
        self.defer: Defer
        self.poller: Any = None
        self.dedicated_connections: Mapping[int, object] | None = None
        self._pool_at = pool_at
        self._nodes: dict[UpstreamAddress, UpstreamPool] = {}
        self._tracked: dict[int, list[Tracking]] = {}
        self._table = SlotTable([None] * SLOTS)
        self._reader = SlotTableReader(self._addresses, self._send_to, self._take_table)
        self._losses = self._outages = 0  # of nodes that left
        self._retiring: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Read the table."""
        self._loop = asyncio.get_running_loop()
        self._reader.start()

    def stop(self) -> None:
        """Close all connections."""
        self._reader.stop()
        if self._retiring is not None:
            self._retiring.cancel()
        for node in self._nodes.values():
            node.on_failed = _ignore
            node.stop()

    @property
    def node_count(self) -> int:
        """The number of masters, each with keys of its own."""
        return len(self._table.masters) or 1

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

        True: parts of it are sent later, so that the client's later requests have to wait.
        """
        plan = plan_of(routed, request)
        is_one_part = isinstance(plan, Plan) and len(plan.parts) == 1 and not plan.on_all_masters
        if isinstance(plan, Plan) and is_one_part and type(request) is not LongRequest:
            (part,) = plan.parts
            self._send_part(client, protocol, part.slot, pack(part.request), routed.is_read, sink, index, caching)
            return False
        is_sent = False

        async def answer() -> Answer:
            nonlocal is_sent
            try:
                sent = self._send_parts(client, protocol, plan, routed.is_read, caching)
                merge, takes_errors, replies = await run_in_steps(sent, self.defer)
            finally:
                is_sent = True
            if not takes_errors:
                return await merge_answers(replies, merge, self.defer)
            answers = await all_of(replies)
            return Answer(await run_in_steps(merge_or_error(merge, [each.reply for each in answers]), self.defer))

        run_into(answer(), sink, index)
        return not is_sent

    def _send_parts(
        self, client: int, protocol: int, found: Plan | Steps[Plan], is_read: bool, caching: bytes
    ) -> Steps[tuple[Merge, bool, Sequence[ReplyFuture]]]:
        """Send the parts of a request; return how to merge the replies, whether that takes errors, and the replies."""
        plan = (yield from found) if isinstance(found, Generator) else found
        replies: list[ReplyFuture] = []
        if plan.on_all_masters:
            nodes = [self._node(master) for master in self._table.masters]
            if not nodes:
                raise self._unreachable()
            whole = pack(plan.parts[0].request)
            for node in nodes:
                replies.append(ReplyFuture())
                node.send(client, protocol, whole, replies[-1], 0, is_read=is_read)
            return plan.merge, plan.takes_errors, replies
        for number, part in enumerate(plan.parts):
            packed = yield from pack_in_steps(part.request)
            plan.parts[number] = Part(part.slot, ())  # to free all at once would take too long
            replies.append(ReplyFuture())
            self._send_part(client, protocol, part.slot, packed, is_read, replies[-1], 0, caching)
        return plan.merge, plan.takes_errors, replies

    def _send_part(
        self,
        client: int,
        protocol: int,
        slot: int | None,
        packed: Packed,
        is_read: bool,
        sink: ReplySink,
        index: int,
        caching: bytes,
        *,
        is_blocking: bool = False,
    ) -> None:
        masters = self._table.masters
        if not masters:
            sink.fail(index, self._unreachable())
            return
        # A slot without a node: any node replies CLUSTERDOWN.
        address = (None if slot is None else self._table.master_of(slot)) or masters[0]
        request = _ClusterRequest(self, client, protocol, packed, sink, index, is_read, address)
        request.caching, request.is_blocking = caching, is_blocking
        request.send(address)

    def send_to_node(self, node: int, client: int, protocol: int, packed: bytes, sink: ReplySink, index: int) -> None:
        """Send a read about all keys of a master."""
        masters = self._table.masters
        if node < len(masters):
            self._node(masters[node]).send(client, protocol, packed, sink, index, is_read=True)
        else:
            sink.fail(index, self._unreachable())

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
        """Send a blocking command over the client's own connection to a node; ReplyError if that is not possible."""
        if routed.policy.waits_for_writes:
            self._wait(client, protocol, pack(request), sink, index)
            return
        slot = first_slot(routed, request)

        async def answer() -> Answer:
            packed = await run_in_steps(pack_in_steps(request), self.defer)
            reply = ReplyFuture()
            self._send_part(client, protocol, slot, packed, False, reply, 0, caching, is_blocking=True)
            return await reply

        run_into(answer(), sink, index)

    def _wait(self, client: int, protocol: int, packed: bytes, sink: ReplySink, index: int) -> None:
        """Send WAIT or WAITAOF to all masters; the reply is the least of theirs.

        WAIT counts the writes of its own connection, and SPUBLISH is none in a Redis Cluster. So a key that expires
        after a millisecond is written before it.
        """
        masters = list(self._table.masters)
        if not masters:
            raise self._unreachable()
        replies = []
        for address in masters:
            first_write = pack((b"SET", name_at(self._table, address), b"", b"PX", b"1"))
            replies.append(ReplyFuture())
            self._node(address).send_blocking(
                client, protocol, packed, replies[-1], 0, is_about_writes=True, first_write=first_write
            )
        run_into(merge_answers(replies, least_of, self.defer), sink, index)

    def for_database(self, number: int) -> UpstreamCluster:
        """Raise the error of a Redis Cluster, which has one database."""
        raise GenericError("SELECT is not allowed in cluster mode")

    def for_login(self, user: bytes, password: bytes) -> UpstreamCluster:
        """Return the connections for another login, with the same table at first."""
        made = UpstreamCluster(self.url.with_login(user, password), self._pool_at)
        made._table = SlotTable([self._table.master_of(slot) for slot in range(SLOTS)])
        made.on_state_lost, made.defer, made.poller = self.on_state_lost, self.defer, self.poller
        made.on_moved = self.on_moved
        return made

    def connection_for_forwarder(self, client: int, protocol: int) -> NodeConnections | None:
        """Return the connections to all nodes; None: no node is known."""
        return NodeConnections(self, self._table, client, protocol) if self._table.masters else None

    def node_connection(self, address: UpstreamAddress, client: int, protocol: int) -> UpstreamConnection | None:
        """Return the connection to a node for a client's forwardable requests; None: they take the general path."""
        return self._node(address).connection_for_forwarder(client, protocol)

    def _follow_of(self, address: UpstreamAddress) -> Callable[[UpstreamRequest, int, int], None]:
        """Return what makes a request that was sent to a node follow redirects."""

        def follow(request: UpstreamRequest, client: int, protocol: int) -> None:
            sink, index, is_read = request.sink, request.index, request.is_read
            followed = _ClusterRequest(self, client, protocol, request.packed, sink, index, is_read, address)
            followed.replies_before, request.sink = request.replies_before, followed

        return follow

    @property
    def is_down(self) -> bool:
        """Return whether a node cannot be reached."""
        return not self._table.masters or any(node.breaker.is_open for node in self._nodes.values())

    @property
    def is_unused(self) -> bool:
        """Return whether there are no connections."""
        return not self._nodes

    @property
    def pools(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes."""
        return list(self._nodes.values())

    @property
    def masters(self) -> Sequence[UpstreamPool]:
        """The pools of all nodes that have keys."""
        return [self._node(each) for each in (*self._table.masters, *self._table.joined)]

    def begin_tracking(self, client: int, tracking: Tracking) -> None:
        """Have a client, whose CLIENT TRACKING all nodes have confirmed, track keys at nodes that join later."""
        self._tracked.setdefault(client, []).append(tracking)
        self._track(client)  # at masters that have joined meanwhile
        self.notice_moves()

    def notice_moves(self) -> None:
        """Read the table every few seconds from now on."""
        self._reader.poll()

    def end_tracking(self, client: int) -> None:
        """Have a client track no keys at nodes that join later."""
        self._tracked.pop(client, None)

    def _moved(self) -> None:
        """Handle that keys have moved: clients that track keys do so at all masters, and forget what they cached."""
        for client in list(self._tracked):
            self._track(client)
        if self._tracked:
            self.on_moved(list(self._tracked))

    def _track(self, client: int) -> None:
        """Have a client track keys at all masters; it is disconnected if that is not possible."""
        try:
            for node in self.masters:
                node.track(client, TRACKING_PROTOCOL)
        except ReplyError as error:
            self.on_state_lost(client, f"a node of the upstream does not track keys: {error}")

    def pool_of(self, routed: OverlayCommand, request: Request) -> UpstreamPool:
        """Return the pool of the node that has a request's keys, by the first one; ReplyError if none is known."""
        masters = self._table.masters
        if not masters:
            raise self._unreachable()
        slot = first_slot(routed, request)
        return self._node((None if slot is None else self._table.master_of(slot)) or masters[0])

    def pool_of_slot(self, slot: int) -> UpstreamPool:
        """Return the pool of the node that has a slot; ReplyError if none is known."""
        address = self._table.master_of(slot)
        if address is None:
            raise self._unreachable()
        return self._node(address)

    @property
    def message_pool(self) -> UpstreamPool | None:
        """The pool of a node that sends all messages of channels, as each node does; None: no node is known."""
        return self._node(self._table.masters[0]) if self._table.masters else None

    def checked(self, reply: RawReply) -> RawReply:
        """Return the reply to a request that was sent to such a pool. A redirect becomes an error to try again."""
        if type(reply) is bytes and reply.startswith((b"-MOVED ", b"-ASK ", b"-EXECABORT ")):
            self._reader.read_soon()
            if reply[:2] != b"-E":
                return b"-%b\r\n" % TryAgainError("the slot of the keys moves to another node of the upstream").line
        return reply

    def send_to(self, address: UpstreamAddress, request: _ClusterRequest, prefix: bytes) -> None:
        """Send a request to a node, right after another one."""
        node, client, protocol, packed = self._node(address), request.client, request.protocol, request.packed
        if request.is_blocking:
            node.send_blocking(client, protocol, packed, request, 0, prefix=prefix)
            return
        sent = UpstreamRequest(
            packed, request, 0, request.is_read, prefix=prefix, replies_before=request.replies_before
        )
        node.add(client, protocol, sent)

    def redirected(self, redirect: Redirect) -> None:
        """Handle a MOVED: the slot has another master; or an ASK: another node has some keys of the slot."""
        if redirect.is_ask:
            self._table.join(redirect.address)
        elif self._table.master_of(redirect.slot) != redirect.address:
            self._table.move(redirect.slot, redirect.address)
            self._reader.read_soon()
            self._moved()

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO."""
        nodes = list(self._nodes.values())
        down = [node for node in nodes if node.breaker.is_open]
        return {
            "upstream": self.url.address,
            "upstream_status": "down" if self.is_down else "up",
            "upstream_error": down[0].breaker.reason if down else self._reader.error,
            "upstream_nodes": len(self._table.masters),
            "upstream_nodes_down": len(down),
            "upstream_connections": sum(node.shared.open_count for node in nodes),
            "upstream_waiting": sum(node.waiting for node in nodes),
            "upstream_losses": self._losses + sum(node.losses for node in nodes),
            "upstream_outages": self._outages + sum(node.breaker.times_opened for node in nodes),
            "upstream_pinned": sum(len(node.dedicated) for node in nodes),
            "upstream_blocked": sum(node.dedicated.blocked for node in nodes),
        }

    def _addresses(self) -> Sequence[UpstreamAddress]:
        """Return the addresses of the masters, and of the nodes in the URL."""
        return list(dict.fromkeys([*self._table.masters, *self.url.seeds]))

    def _send_to(self, address: UpstreamAddress, packed: bytes, sink: ReplySink, index: int) -> None:
        """Send a read of the proxy itself to a node."""
        self._node(address).send(0, 2, packed, sink, index, is_read=True)

    def _unreachable(self) -> TryAgainError:
        return TryAgainError(f"the upstream {self.url.address} cannot be reached: {self._reader.error}")

    def _node(self, address: UpstreamAddress) -> UpstreamPool:
        node = self._nodes.get(address)
        if node is None:
            if len(self._nodes) >= NODES_MAX:
                raise TryAgainError("the upstream's nodes name too many other nodes")
            node = self._nodes[address] = self._pool_at(self.url.at(address))
            node.on_failed, node.on_state_lost = self._reader.read_soon, self.on_state_lost
            node.on_push = lambda client, frame: self.on_push(client, frame)
            node.on_moved = lambda clients: self.on_moved(clients)
            node.poller, node.defer, node.role, node.tracked = self.poller, self.defer, AnyRole(), self._tracked
            node.shared.follow = node.dedicated.follow = self._follow_of(address)
            node.start()
        return node

    def _take_table(self, table: SlotTable) -> None:
        """Take the table that a node has replied."""
        before, self._table = self._table, table
        if not set(table.masters) <= set(before.masters):
            self._cut_subscribers()
        if list(before.masters) != list(table.masters):
            logger.info("the masters of the upstream are %s", ", ".join(map(str, table.masters)))
            for number, address in enumerate(table.masters):
                node = self._node(address)
                node.on_facts, node.on_hello = None if number else self.on_facts, self.on_hello
                if not number:
                    node.request_facts()
        if not table.has_owners_of(before) or list(before.masters) != list(table.masters):
            self._moved()
        self._retire()

    def _cut_subscribers(self) -> None:
        """Disconnect the clients that have subscribed at all masters: there is another one now."""
        dedicated = [each for node in self._nodes.values() for each in node.dedicated if each.is_at_all_masters]
        for client in {each.client for each in dedicated}:
            self.on_state_lost(client, "the upstream has another master, which it is not subscribed at")

    def _retire(self) -> None:
        """Close the connections to nodes that are no masters, once their last replies have arrived."""
        if self._retiring is not None:
            self._retiring.cancel()
            self._retiring = None
        masters = set(self._table.masters)
        for address, node in [item for item in self._nodes.items() if item[0] not in masters]:
            if node.waiting:
                self._retiring = self._loop.call_later(RETIRED_S, self._retire)
                continue
            del self._nodes[address]
            self._losses += node.losses
            self._outages += node.breaker.times_opened
            node.on_failed = _ignore
            for client in [each.client for each in node.dedicated if each.is_listening or each.is_monitor]:
                self.on_state_lost(client, "the node that it is subscribed at is no master of the upstream any more")
            tracking = {abs(each.client) for each in node.dedicated if each.is_tracking}
            node.stop()
            self.on_moved(tracking)  # the node had keys that they read after an ASK, or was a master


def _ignore() -> None:
    """Do nothing about a failure."""


class NodeConnections:
    """A client's connections to the nodes, for the forwarder."""

    __slots__ = ("_client", "_cluster", "_protocol", "_table")

    def __init__(self, cluster: UpstreamCluster, table: SlotTable, client: int, protocol: int) -> None:
        self._cluster, self._table, self._client, self._protocol = cluster, table, client, protocol

    @property
    def has_watched(self) -> bool:
        """Whether the client watches keys at a node."""
        found = (pool.dedicated.get(self._client) for pool in self._cluster.pools)
        return any(each is not None and each.has_watched for each in found)

    @property
    def node_numbers(self) -> bytes:
        """For each slot the number of its node; 0: it has none."""
        return self._table.numbers

    def node_connection(self, number: int) -> UpstreamConnection | None:
        """Return the connection to a node; None: there is none now."""
        address = self._table.numbered(number)
        return None if address is None else self._cluster.node_connection(address, self._client, self._protocol)


class _ClusterRequest(ReplySink):
    """A request to a node of the cluster, which may be redirected to another node.

    Attributes:
        caching: The client's CLIENT CACHING, which is sent before the request to each node, but not with ASKING: a node
            forgets each of the two when it gets the other one.
        replies_before: Of a transaction, see `UpstreamRequest`. It does not follow an ASK, which is about one command.
    """

    __slots__ = (
        "_cluster",
        "_index",
        "_is_asking",
        "_node",
        "_redirects",
        "_sink",
        "caching",
        "client",
        "is_blocking",
        "is_read",
        "packed",
        "protocol",
        "replies_before",
    )

    def __init__(
        self,
        cluster: UpstreamCluster,
        client: int,
        protocol: int,
        packed: Packed,
        sink: ReplySink,
        index: int,
        is_read: bool,
        node: UpstreamAddress,
    ) -> None:
        self._node = node
        self._cluster, self._sink, self._index = cluster, sink, index
        self.client, self.protocol, self.packed = client, protocol, packed
        self.is_read, self.is_blocking, self.caching = is_read, False, b""
        self._is_asking = False
        self._redirects = self.replies_before = 0

    def send(self, address: UpstreamAddress, *, is_asking: bool = False) -> None:
        """Send the request to a node."""
        self._node, self._is_asking = address, is_asking
        self._cluster.send_to(address, self, ASKING if is_asking else self.caching)

    def put(self, index: int, reply: RawReply, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Take a node's reply: follow a redirect, pass on anything else."""
        redirect = redirect_in(reply, self._node) if type(reply) is bytes and reply[:1] == b"-" else None
        if redirect is None or (redirect.is_ask and self.replies_before):
            self._sink.put(self._index, self._cluster.checked(reply) if self.replies_before else reply)
            if self._is_asking and self.caching:  # the client may cache keys that the node does not track for it
                self._cluster.on_moved([self.client])
            return
        try:
            self._follow(redirect)
        except Exception as error:
            self.fail(0, error)

    def _follow(self, redirect: Redirect) -> None:
        self._redirects += 1
        if self._redirects > UPSTREAM_REDIRECTS_MAX:
            raise TryAgainError(f"the upstream's nodes do not agree about slot {redirect.slot}")
        self._cluster.redirected(redirect)
        self.send(redirect.address, is_asking=redirect.is_ask)

    def fail(self, index: int, error: Exception) -> None:
        """Pass on an exception."""
        self._sink.fail(self._index, error)
