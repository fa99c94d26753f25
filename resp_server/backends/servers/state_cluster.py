"""The state servers of one cluster: routing of requests, handling of errors and of lost connections.

For each protocol version, a server has one connection for look-ups, one for long requests such as KEYS and DBSIZE, and
one for STATE HISTORY (`server_connection`); and others for clients that read committed values only. A request has a
deadline; until then it may be sent again (`retries`). A MOVED updates the slot map.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import ne

from resp_server.backends.retries import (
    AGREE_PAUSE_S,
    REDIRECTS_AT_ONCE_MAX,
    RetryPauses,
    is_passing,
    may_send_again,
)
from resp_server.backends.servers.cluster_epochs import ClusterEpochs
from resp_server.backends.servers.job_keys import JobKeys
from resp_server.backends.servers.long_replies import LongReplies
from resp_server.backends.servers.min_epochs import MinEpochs
from resp_server.backends.servers.replica_choice import ActiveServerChange, ActiveServers
from resp_server.backends.servers.requests import ConnectionKey, ServerRequest
from resp_server.backends.servers.server_access import ServerAccess
from resp_server.backends.servers.server_connection import ServerConnection
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.backends.servers.slot_connections import SlotConnections
from resp_server.backends.servers.slot_map import NO_TERM, SlotMap
from resp_server.backends.servers.stalled_jobs import StalledJobs
from resp_server.cluster.topology import Topology, TopologyError
from resp_server.pipeline.histories import HISTORIES_MAX
from resp_server.protocol.errors import ClusterDownError, GenericError, TryAgainError, internal_error
from resp_server.raw_replies.answers import ReplyFuture, in_background
from resp_server.raw_replies.raw_reply import as_bytes
from resp_server.raw_replies.reply_sinks import Defer
from resp_server.raw_replies.reply_splitter import PING, pack
from resp_server.session.epochs import NO_EPOCHS, Epochs, JobEpoch, ReplyEpochs, latest
from resp_server.session.session import RESP2, RESP3
from state_backend.apply.store_log import StoreLog
from state_backend.model.slots import SLOTS

logger = logging.getLogger("sparkis.proxy")

TOPOLOGY = pack((b"STATE", b"TOPOLOGY"))


@dataclass
class StateCluster:
    """All servers of one state cluster. Runs on the event loop's thread.

    Args:
        log: The log that the servers have to serve; None: any.
        refused_logs: The servers of other logs, and why each was refused.
        follows_keys: Servers have to report changed keys.
        on_changed: Is called with changed keys; None: any key may have changed.
        on_new_job: Is called for a new job, and for a job with a new writer, because its states may have changed.
        defer: Calls back in a later round of the event loop. The proxy sets its own function when it starts.
        stores: The stores of the only server, if it is on this machine and reports them.
    """

    name: str = "the application"
    access: ServerAccess = field(default_factory=ServerAccess)
    slots: SlotMap = field(default_factory=SlotMap)
    keys: JobKeys = field(default_factory=JobKeys)
    connections: dict[ConnectionKey, ServerConnection] = field(default_factory=dict)
    epochs: ClusterEpochs = field(default_factory=ClusterEpochs)
    moves: int = 0
    losses: int = 0
    log: StoreLog | None = None
    refused_logs: dict[str, str] = field(default_factory=dict)
    follows_keys: bool = False
    on_changed: Callable[[Sequence[bytes] | None], None] = lambda keys: None
    on_new_job: Callable[[StateCluster, str], object] = lambda cluster, address: None
    defer: Defer = lambda run: asyncio.get_running_loop().call_soon(run)
    stores: ServerStores | None = None

    def __post_init__(self) -> None:
        self._is_stopping = False
        self._pauses = RetryPauses()
        self._refreshing: set[str] = set()
        self._server_addresses: frozenset[str] = frozenset()
        self._active, self._min_epochs = ActiveServers(), MinEpochs()
        # By protocol version, so that replies are forwarded unchanged.
        self.slot_connections = {
            protocol: SlotConnections(
                self.slots,
                self._min_epochs,
                self.epochs,
                partial(self._main_connection, protocol=protocol),
                partial(self._main_connection, protocol=protocol, opens=True),
            )
            for protocol in (RESP2, RESP3)
        }
        self.stalled_jobs = StalledJobs(
            self.name, self.epochs, self.connections, self._connections_of_owners, self._invalidate_slot_connections
        )
        self.long_replies = LongReplies(partial(self.deadline_s, True))

    def start(self) -> None:
        """Start the checks of connections and waiting requests."""
        self.access.start()
        self._check()

    def stop(self) -> None:
        """Close all connections."""
        self._is_stopping = True
        self._checking.cancel()
        self._pauses.stop()
        for connection in list(self.connections.values()):
            connection.close()
        self.long_replies.stop()

    def deadline_s(self, is_long: bool = False) -> float:
        """Return the deadline of a request that is sent now."""
        return self.access.deadline_s(is_long)

    def send(self, request: ServerRequest) -> None:
        """Send a request; its sink gets the reply later, or an error at once or later."""
        try:
            self._send(request)
        except Exception as error:
            request.fail_all(error)

    def _send(self, request: ServerRequest) -> None:
        if self._is_stopping:
            request.refuse(GenericError("the proxy stops"))
            return
        address = request.address
        if address is None:
            master = request.master or self.slots.owners[request.slot]
            if master is None:
                request.refuse(ClusterDownError())
                return
            address = self._active.of(master)
            if request.master is None:
                request.min_epochs = self._min_epochs.by_slot[request.slot]
            else:
                request.min_epochs = self.slot_connections[RESP2].min_epochs_of(master)
            if not self.epochs.is_aligned:
                of_client = self.epochs.client_min_epochs(request.sink.seen_epochs(request.index))
                request.min_epochs = latest(request.min_epochs, of_client)
        key = ConnectionKey(address, request.protocol, request.is_long, request.is_history, request.is_committed)
        connection = self.connection(key)
        if request.is_history and connection.pending_count >= HISTORIES_MAX:
            request.refuse(TryAgainError(f"{HISTORIES_MAX} histories are being read at {address}; retry in a moment"))
        else:
            connection.add(request)

    def send_again(self, request: ServerRequest) -> None:
        """Send a request that has a reply already again, as a new request."""
        request.sends = request.redirects = 0
        request.queued_until_s = None
        self.send(request)

    def connection(self, key: ConnectionKey) -> ServerConnection:
        """Return a connection; it may not be open yet."""
        connection = self.connections.get(key)
        if connection is None:
            connection = self.connections[key] = ServerConnection(self, key)
            self.epochs.of_connections[key] = connection.announced
        return connection

    def _invalidate_slot_connections(self) -> None:
        if self._is_stopping:  # no further request is sent
            return
        for connection in self.slot_connections.values():
            connection.invalidate()

    def _main_connection(self, master: str, protocol: int = RESP2, *, opens: bool = False) -> ServerConnection | None:
        """Return the connection for look-ups to the active server of a master's shard.

        Args:
            opens: Open it if no request has done so.
        """
        key = ConnectionKey(self._active.of(master), protocol, False)
        if opens and key not in self.connections and not self._is_stopping:
            self.connection(key).connect()
        return self.connections.get(key)

    def _connections_of_owners(self) -> Iterator[ServerConnection | None]:
        """Iterate over the look-up connections to the active server of each shard that has slots."""
        return map(self._main_connection, self.slots.counts)

    def _usable_epochs(self, address: str) -> Epochs | None:
        """Return the epochs of a server; None: it can take no requests."""
        connection = self.connections.get(ConnectionKey(address, RESP2, False))
        return connection.epochs if connection is not None and connection.is_usable else None

    def has_server(self, address: str) -> bool:
        """Return whether a server belongs to this state cluster."""
        return address in self._server_addresses

    def active_server(self, master: str) -> str:
        """Return the server that answers for a master's shard now."""
        return self._active.of(master)

    async def pause(self, deadline_s: float, pause_s: float = AGREE_PAUSE_S) -> bool:
        """Pause before a retry; return False at once if the deadline would be over then, or the proxy stops."""
        return self.access.clock() + pause_s <= deadline_s and await self._pauses.pause(pause_s)

    async def _send_after_pause(self, request: ServerRequest, error: bytes, epochs: ReplyEpochs = NO_EPOCHS) -> None:
        """Send a request again after a pause; if its deadline would be over then, its sink gets an error."""
        try:
            if await self.pause(request.deadline_s):
                self.send(request)
            else:
                request.sink.put(request.index, error, epochs)
        except Exception as raised:
            request.fail_all(raised)

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO: the topology's version, and each server."""
        rows: dict[str, object] = {
            "topology_version": self.slots.version,
            "moves": self.moves,
            "losses": self.losses,
        }
        answering = {self.active_server(master): master for master in self.slots.counts}
        for number, address in enumerate(self.slots.addresses):
            connections = [connection for connection in self.connections.values() if connection.key.address == address]
            is_up = not any(connection.reason for connection in connections)
            rows[f"server{number}"] = (
                f"addr={address},slots={self.slots.counts.get(answering.get(address, ''), 0)},"
                f"connections={sum(connection.is_connected for connection in connections)},"
                f"waiting={sum(connection.pending_count for connection in connections)},"
                f"status={'up' if is_up else 'down'}"
            )
        return rows

    # -- the topology -------------------------------------------------------------------------------------------------

    def apply_topology(self, topology: Topology, source: str, term: int = NO_TERM) -> bool:
        """Apply a topology; return False if it is not newer than the current one."""
        before = self._active.of_slots(self.slots.owners)
        if not self.slots.apply(topology, term):
            return False
        self._active.set_replicas(self.slots.replicas)
        logger.info(
            "%s: version %d of the topology, from %s: %d servers with slots",
            self.name,
            topology.version,
            source,
            len(self.slots.counts),
        )
        self._choose()
        self._raise_min_epochs_of_moved(before)
        self._server_addresses = frozenset(self.slots.addresses)
        for address in self.slots.addresses:
            self.connection(ConnectionKey(address, RESP2, False)).connect()
        gone = {*filter(None, before)} - {*self._active.of_slots(self.slots.owners)}
        self._apply_choice(self._choose(), gone)
        return True

    def ask(self, address: str, packed: bytes, *, is_long: bool = False) -> ReplyFuture:
        """Send a request of the proxy itself to a server."""
        future = ReplyFuture()
        self.send(ServerRequest(packed, 0, 2, self.deadline_s(), future, 0, address, is_long=is_long))
        return future

    def refresh(self, address: str) -> None:
        """Request a server's topology, unless such a request is pending; apply it if it is newer."""
        if address not in self._refreshing:
            in_background(self._refresh(address))

    async def _refresh(self, address: str) -> None:
        self._refreshing.add(address)
        try:
            reply = as_bytes((await self.ask(address, TOPOLOGY)).reply)
        finally:
            self._refreshing.discard(address)
        if reply[:1] != b"$":
            logger.warning("%s refused to send its topology: %s", address, reply[1:200].decode("utf-8", "replace"))
            return
        try:
            self.apply_topology(Topology.parse(reply.partition(b"\r\n")[2][:-2]), address)
        except TopologyError as error:
            logger.warning("%s sent an invalid topology: %s", address, error)

    def _raise_min_epochs_of_moved(self, before: Sequence[str | None]) -> None:
        """Raise the minimum epochs of the slots whose active server has changed."""
        moved: dict[str, list[int]] = {}
        for slot in compress(range(SLOTS), map(ne, before, self._active.of_slots(self.slots.owners))):
            was = before[slot]
            if was is not None:
                moved.setdefault(was, []).append(slot)
        for address, slots in moved.items():
            self.tracking_lost()
            self._min_epochs.raise_to(slots, dict(self.epochs.newest_announced_by(address)))

    # -- events of connections ----------------------------------------------------------------------------------------

    def on_topology_version(self, version: int, address: str) -> None:
        """Handle a server's report of its topology version."""
        if version > self.slots.version:
            self.refresh(address)

    def on_epoch(self, connection: ServerConnection, job: str, reached: JobEpoch) -> None:
        """Handle a server's epoch of a job."""
        self.epochs.record(connection.key.address, job, reached)
        if self.keys.epoch_reported(job, reached):
            self.on_new_job(self, connection.key.address)
        if connection.is_connected:
            connection.send_queued()
            if any(each.is_some_slot_behind for each in self.slot_connections.values()):
                self._invalidate_slot_connections()
        if self.stores is not None:
            self.stores.epoch_announced()

    def state_changed(self, connection: ServerConnection) -> None:
        """Handle a connection that was opened, or a failed attempt to open it."""
        if self._is_stopping:
            return
        self._choose_active()
        # Not for connections for long requests. A long reply takes over its connection, and its request must not be
        # sent again over the next connection.
        if connection.is_connected and not connection.key.is_long:
            self.on_new_job(self, connection.key.address)
        if connection.is_connected:
            for other in self.connections.values():
                if other.key.address == connection.key.address:
                    other.wake()
        if not connection.is_connected and (not connection.is_idle or self._stays_open(connection.key)):
            connection.connect()

    def cut_silent_server(self, address: str) -> None:
        """Close all connections to a server that does not reply."""
        for connection in list(self.connections.values()):
            if connection.key.address == address:
                connection.cut_silent()

    def reason_to_give_up(self, connection: ServerConnection) -> str | None:
        """Return the reason why the server of a connection takes no requests for now; None: it may take some.

        The connection for look-ups decides for all: it is the one that is opened again and again.
        """
        main = self.connections.get(ConnectionKey(connection.key.address, 2, False), connection)
        return main.reason if main.is_given_up and not connection.is_connected else None

    def error_received(self, request: ServerRequest, reply: bytes, connection: ServerConnection) -> None:
        """Send a request again after a MOVED or an error that will pass; pass any other error to the sink."""
        try:
            if request.address is not None:
                request.sink.put(request.index, reply)
            elif reply[:7] == b"-MOVED ":
                self._follow_moved(request, reply, connection.key.address)
            elif is_passing(reply) and not request.is_long:
                in_background(self._send_after_pause(request, reply, connection.reply_epochs))
            else:
                request.sink.put(request.index, reply, connection.reply_epochs)
        except Exception as error:
            request.fail_all(error)

    def resend_lost(self, requests: Sequence[ServerRequest], reason: str) -> None:
        """Send the requests of a lost connection again, to the servers that are active now."""
        self.losses += 1
        self._choose_active()
        now_s = self.access.clock()
        for request in requests:
            if may_send_again(request.sends) and now_s < request.deadline_s:
                self.send(request)
            else:
                request.refuse(GenericError(reason))
        for connection in self.connections.values():
            if self._stays_open(connection.key) and not self._is_stopping:
                connection.connect()

    def follow_keys(self, is_on: bool) -> None:
        """Have all servers report changed keys from the next request on, or stop it."""
        self.follows_keys = is_on
        for connection in self.connections.values():
            connection.follow()

    async def followed(self) -> None:
        """Wait until all connected servers have answered `follow_keys`; the others report keys once they are."""
        answers = []
        for each in [connection for connection in self.connections.values() if connection.is_connected]:
            answers.append(ReplyFuture())
            each.send(PING, ServerRequest(PING, 0, 2, self.deadline_s(), answers[-1], 0, each.key.address))
        for answer in answers:
            with suppress(Exception):  # a lost connection: the server reports keys once it is connected
                await answer

    def tracking_lost(self) -> None:
        """Invalidate all keys, because a server no longer reports changes of keys that clients read before."""
        if self.follows_keys:
            self.on_changed(None)

    def _follow_moved(self, request: ServerRequest, reply: bytes, address: str) -> None:
        try:
            slot, owner = reply[7:].decode().split()
            was = self.slots.owners[int(slot)]
        except (ValueError, IndexError):  # the request is in no queue any more, so it has to get a reply here
            request.refuse(GenericError(f"{address} sent a malformed MOVED"))
            return
        if was != owner:
            if was is not None:
                self.tracking_lost()
                self._min_epochs.raise_to([int(slot)], dict(self.epochs.newest_announced_by(self._active.of(was))))
            self.slots.moved(int(slot), owner)
            self._invalidate_slot_connections()
        self.refresh(address)
        self.moves += 1
        request.redirects += 1
        request.sends = 0
        if request.redirects <= REDIRECTS_AT_ONCE_MAX:
            self.send(request)
        else:
            error = TryAgainError(f"the servers do not agree on the owner of slot {request.slot}")
            in_background(self._send_after_pause(request, b"-%b\r\n" % error.line))

    # -- the active servers -------------------------------------------------------------------------------------------

    def _stays_open(self, key: ConnectionKey) -> bool:
        """Return whether a connection stays open without requests: the server announces its epochs over it."""
        is_main = key.protocol == RESP2 and not (key.is_long or key.is_committed)
        return is_main and key.address in self._server_addresses

    def _choose_active(self) -> None:
        """Choose the active servers, send them requests that are queued for other servers, and drop removed servers."""
        self._apply_choice(self._choose())

    def _choose(self) -> Sequence[ActiveServerChange]:
        """Choose each shard's active server; return the shards where it has changed."""
        changes = self._active.choose(self._usable_epochs, self.access.clock())
        for change in changes:
            logger.info("%s: %s answers for the shard of %s", self.name, change.active, change.master)
        return changes

    def _apply_choice(self, changes: Sequence[ActiveServerChange], gone: Collection[str] = ()) -> None:
        """Raise the minimum epochs of slots with another active server, and send this server their requests.

        Args:
            gone: Servers that answer for no slot any more, by a new topology. They may be mute.
        """
        for change in changes:
            self.tracking_lost()
            slots = [slot for slot, owner in enumerate(self.slots.owners) if owner == change.master]
            self._min_epochs.raise_to(slots, dict(self.epochs.newest_announced_by(change.before)))
        self._invalidate_slot_connections()
        replaced = {*gone, *(change.before for change in changes)}
        for key, connection in list(self.connections.items()):
            if key.address not in self._server_addresses and connection.is_idle:
                connection.close()
                self.connections.pop(key, None)
                self.epochs.of_connections.pop(key, None)
            elif not connection.is_usable or key.address in replaced:
                for request in connection.take_queued():
                    self.send(request)
            if key.address in replaced and not key.is_long:
                self._send_elsewhere(connection.take_sent(), key.address)

    def _send_elsewhere(self, requests: Sequence[ServerRequest], before: str) -> None:
        """Send requests in flight to the servers that are active now. The server before may never reply to them."""
        for request in requests:
            if request.address is None:
                request.sends -= 1  # no connection was lost
                self.send(request)
            else:  # it stands for a part of a request, which is sent again as a whole
                request.refuse(GenericError(f"{before} was replaced before it replied"))

    def _check(self) -> None:
        access = self.access
        self._checking = asyncio.get_running_loop().call_later(access.check_s, self._check)
        now_s = access.clock.tick()
        self._forget_removed_jobs(now_s)
        # The silence of a server is detected earlier if another server can answer.
        replaceable = self._active.replaceable(self._usable_epochs)
        for connection in list(self.connections.values()):
            is_hurried = connection.key.address in replaceable and not connection.key.is_long
            try:
                connection.check(now_s, access.timeout_s / 2 if is_hurried else access.timeout_s)
            except Exception as error:  # the other connections have to be checked, too
                internal_error(error)
        self.long_replies.check(now_s)
        if self.stores is not None:
            self.stores.release_old_epochs()
        self.stalled_jobs.agree()
        changes = self._choose()
        if changes:
            self._apply_choice(changes)

    def _forget_removed_jobs(self, now_s: float) -> None:
        """Drop jobs that no server has announced for a while."""
        reported = {job for each in self.connections.values() if each.is_connected for job in each.epochs}
        for job in self.epochs.find_removed_jobs(now_s, reported):
            self.keys.remove(job)
            logger.info("%s: job %s was removed", self.name, job)
