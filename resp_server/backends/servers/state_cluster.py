"""The servers of one application: routing of requests, handling of errors and of lost connections.

For each protocol version, a server has one connection for look-ups, one for long requests such as KEYS and DBSIZE, and
one for STATE HISTORY (`server_connection`). A request has a deadline. It is sent at most twice, the second time only
after its connection was lost. That is safe, because all requests only read. A MOVED updates the slot map and redirects
the request. After two redirects, or if a server is not ready, the proxy pauses before it sends the request again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, pairwise
from operator import ne
from typing import Any

from resp_server.backends.servers.job_keys import JobKeys
from resp_server.backends.servers.min_epochs import MinEpochs, has_reached
from resp_server.backends.servers.outages import CommonEpoch, Outages, newest_common
from resp_server.backends.servers.replica_choice import ReplicaChoice
from resp_server.backends.servers.requests import PING, SENDS_MAX, ServerRequest
from resp_server.backends.servers.server_connection import (
    REPLY_BYTES_MAX,
    ConnectionKey,
    ServerConnection,
    ServerProtocol,
)
from resp_server.backends.servers.server_stores import ServerStores
from resp_server.backends.servers.slot_map import NO_TERM, SlotMap
from resp_server.cluster.topology import Topology, TopologyError
from resp_server.forwarding.answers import Called, ReplyFuture, in_background
from resp_server.forwarding.raw_replies import RawReply, as_bytes
from resp_server.forwarding.reply_splitter import pack
from resp_server.forwarding.reply_stages import Defer
from resp_server.net.connecting import connected
from resp_server.net.tls import Certificates
from resp_server.net.transports import AwakeClock
from resp_server.pipeline.histories import HISTORIES_MAX
from resp_server.protocol.errors import ClusterDownError, GenericError, TryAgainError, internal_error
from resp_server.session.epoch_feed import EMPTY_EPOCHS, REMOVED, Epochs, JobEpoch, ReplyEpochs, latest
from state_backend.apply.store_log import StoreLog
from state_backend.model.slots import SLOTS

logger = logging.getLogger("sparkis.proxy")

TOPOLOGY = pack((b"STATE", b"TOPOLOGY"))
TIMEOUT_S = 1.0
# For requests about all of a server's keys, and for long replies.
LONG_TIMEOUT_S = 60.0
# Redirects that are followed without a pause: one MOVED is normal after slots moved, two mean that servers disagree.
REDIRECTS_AT_ONCE_MAX = 2
# The pause before a request is sent again to servers that disagree or are not ready.
AGREE_PAUSE_S = 0.05
CHECKS_PER_TIMEOUT = 10
# A job that no server announces for this long counts as removed. Then no request waits for its epochs (guess).
REMOVED_AFTER_S = 5.0
# Errors of a server or a shard that will soon be able to answer.
RETRY_ERRORS = (b"-LOADING ", b"-CLUSTERDOWN ", b"-TRYAGAIN ")
# The compiled forwarder numbers connections with one byte.
OPEN_CONNECTIONS_MAX = 254
CLOSED = bytes(4 * SLOTS)


@dataclass
class StateCluster:
    """All servers of one application. Runs on the event loop's thread.

    Args:
        connection_numbers, open_connections: The number of a key's connection, by the CRC of the key, and the
            connections by number; 0: the request takes the general path.
        seen: The newest epochs that each server ever announced.
        newest: The newest epochs of any server.
        is_aligned: All ready servers are at `newest`, so the epochs of no client rule out a server.
    """

    name: str = "the application"
    password: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S
    slots: SlotMap = field(default_factory=SlotMap)
    keys: JobKeys = field(default_factory=JobKeys)
    connections: dict[ConnectionKey, ServerConnection] = field(default_factory=dict)
    seen: dict[str, dict[str, JobEpoch]] = field(default_factory=dict)
    newest: Epochs = field(default_factory=lambda: EMPTY_EPOCHS)
    is_aligned: bool = True
    outages: Outages = field(default_factory=Outages)
    removed_jobs: set[str] = field(default_factory=set)
    moves: int = 0
    losses: int = 0
    connection_numbers: bytes = CLOSED
    open_connections: list[ServerConnection | None] = field(default_factory=lambda: [None])
    # None: no TLS. Otherwise all servers have to use TLS.
    certificates: Certificates | None = field(default=None, repr=False)
    # The log that the servers have to serve; None: any. The servers of other logs, and why each was refused.
    log: StoreLog | None = None
    refused_logs: dict[str, str] = field(default_factory=dict)
    # Servers have to report changed keys. `on_changed` is called with the keys; None: any key may have changed.
    follows_keys: bool = False
    on_changed: Callable[[Sequence[bytes] | None], None] = lambda keys: None
    # Called for a new job, and for a job with a new writer, because its states may have changed.
    on_new_job: Callable[[StateCluster, str], object] = lambda cluster, address: None
    # Calls back in a later round of the event loop. The proxy sets its own function when it starts.
    defer: Defer = lambda run: asyncio.get_running_loop().call_soon(run)
    # The stores of the only server, if it is on this machine and reports them.
    stores: ServerStores | None = None
    # The compiled core's poller, which polls clients' and servers' sockets; None: asyncio does.
    poller: Any = None

    def start(self) -> None:
        """Start the checks of connections and waiting requests."""
        self._loop = asyncio.get_running_loop()
        # This clock stands still while the process is stopped. So servers do not seem silent afterwards, and requests
        # do not expire.
        self.clock = AwakeClock(2 * self.timeout_s / CHECKS_PER_TIMEOUT, self._loop.time)
        self._refreshing: set[str] = set()
        self._is_stopping = False
        self._server_addresses: frozenset[str] = frozenset()
        self._min_epochs = MinEpochs()
        self._shards: dict[str, ReplicaChoice] = {}
        self._master_min_epochs: dict[str, Epochs] = {}
        self._has_connection_numbers = True
        self._is_some_slot_behind = False
        self._unreported_since_s: dict[str, float] = {}
        self._newest_shared: ReplyEpochs = (self.newest,)
        self._long_replies = LongReplies(self)
        self._check()

    def at_end_of_round(self, then: Callable[[], None]) -> None:
        """Call back at the end of this round of the event loop; without a poller, in the next round."""
        if self.poller is not None:
            self.poller.call_before_flush(then)
        else:
            self._loop.call_soon(then)

    async def connect(
        self, make: Callable[[], ServerProtocol], host: str, port: int, context: ssl.SSLContext | None
    ) -> ServerProtocol:
        """Return a new connection to a server."""
        if context is not None or self.poller is None:
            return (await self._loop.create_connection(make, host, port, ssl=context))[1]
        made = make()
        self.poller.add(await connected(self._loop, (host, port)), made)
        return made

    def stop(self) -> None:
        """Close all connections."""
        self._is_stopping = True
        self._checking.cancel()
        for connection in list(self.connections.values()):
            connection.close()
        self._long_replies.stop()

    @property
    def now_s(self) -> float:
        """The time of the clock for deadlines."""
        return self.clock()

    def deadline_s(self, is_long: bool = False) -> float:
        """Return the deadline of a request that is sent now."""
        return self.clock() + (LONG_TIMEOUT_S if is_long else self.timeout_s)

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
            address = self.active_server(master)
            request.min_epochs = (
                self._min_epochs.by_slot[request.slot] if request.master is None else self._min_epochs_of(master)
            )
            if not self.is_aligned:
                request.min_epochs = latest(
                    request.min_epochs, self.client_min_epochs(request.sink.seen_epochs(request.index))
                )
        key = ConnectionKey(address, request.protocol, request.is_long, request.is_history)
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
        return connection

    def has_server(self, address: str) -> bool:
        """Return whether a server belongs to this application."""
        return address in self._server_addresses

    def active_server(self, master: str) -> str:
        """Return the server that answers for a master's shard now."""
        shard = self._shards.get(master)
        return master if shard is None else shard.active

    def retry_later(self, deadline_s: float, retry: Callable[[], None]) -> bool:
        """Call back after a pause; return False if the deadline would be over then, or the proxy stops."""
        can_pause = self._can_pause(deadline_s)
        if can_pause:
            self._loop.call_later(AGREE_PAUSE_S, retry)
        return can_pause

    async def pause(self, deadline_s: float) -> bool:
        """Pause before a retry; return False at once if the deadline would be over then, or the proxy stops."""
        can_pause = self._can_pause(deadline_s)
        if can_pause:
            await Called(partial(self._loop.call_later, AGREE_PAUSE_S))
        return can_pause

    def _can_pause(self, deadline_s: float) -> bool:
        return not self._is_stopping and self.now_s + AGREE_PAUSE_S <= deadline_s

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields of INFO: the topology's version, and each server."""
        rows: dict[str, object] = {
            "topology_version": self.slots.version,
            "moves": self.moves,
            "losses": self.losses,
        }
        answering = {self.active_server(master): master for master in self.slots.counts}
        for number, address in enumerate(self._addresses()):
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
        before = self._active_by_slot()
        if not self.slots.apply(topology, term):
            return False
        masters = self.slots.replicas.items()
        self._shards = {
            master: ReplicaChoice(master, replicas, self.active_server(master))
            for master, replicas in masters
            if replicas
        }
        logger.info(
            "%s: version %d of the topology, from %s: %d servers with slots",
            self.name,
            topology.version,
            source,
            len(self.slots.counts),
        )
        self._choose()
        self._raise_min_epochs_of_moved(before)
        self._server_addresses = frozenset(self._addresses())
        for address in self._addresses():
            self.connection(ConnectionKey(address, 2, False)).connect()
        self._choose_active()
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

    def _addresses(self) -> list[str]:
        """Return the addresses of all servers."""
        replicas = [each for some in self.slots.replicas.values() for each in some]
        return list(dict.fromkeys([*self.slots.counts, *self.slots.replicas, *replicas]))

    def _active_by_slot(self) -> list[str | None]:
        by_master: dict[str | None, str | None] = {None: None}
        for master in set(self.slots.owners):
            by_master[master] = None if master is None else self.active_server(master)
        return list(map(by_master.__getitem__, self.slots.owners))

    def _raise_min_epochs_of_moved(self, before: Sequence[str | None]) -> None:
        """Raise the minimum epochs of the slots whose active server has changed."""
        moved: dict[str, list[int]] = {}
        for slot in compress(range(SLOTS), map(ne, before, self._active_by_slot())):
            was = before[slot]
            if was is not None:
                moved.setdefault(was, []).append(slot)
        for address, slots in moved.items():
            self.tracking_lost()
            self._min_epochs.raise_to(slots, dict(self.seen.get(address, EMPTY_EPOCHS)))

    # -- jobs whose log cannot be read --------------------------------------------------------------------------------

    def agree_on_epochs(self) -> None:
        """Read each job whose log no server can read at the newest epoch that all servers have."""
        common: dict[str, CommonEpoch] = {}
        for job in {job for connection in self.connections.values() for job in connection.stalled}:
            held = newest_common(self._stalled_epochs(job))
            if held is not None:
                common[job] = CommonEpoch(held, max(held, self.newest.get(job, REMOVED)))
        if common != self.outages.common:
            self._set_common_epochs(common)
        self._hold_epochs()

    def _set_common_epochs(self, common: dict[str, CommonEpoch]) -> None:
        for job in common.keys() | self.outages.common.keys():
            self._log_outage(job, common.get(job))
        self.outages.common = common
        for connection in self.connections.values():
            connection.count_epochs()
        self.check_alignment()
        for connection in list(self.connections.values()):
            if connection.is_connected:
                connection.send_queued()
        self._invalidate_connection_numbers()

    def _stalled_epochs(self, job: str) -> list[list[JobEpoch]]:
        """Return the epochs that each reachable owner of slots has; none if one of them can read the log."""
        found: list[list[JobEpoch]] = []
        for master in self.slots.counts:
            connection = self.connections.get(ConnectionKey(self.active_server(master), 2, False))
            if connection is None or not connection.is_connected:
                continue
            if job not in connection.stalled:
                return []
            found.append(connection.stalled[job])
        return found

    def _hold_epochs(self) -> None:
        """Have each server that is further than the others answer from the epoch that all have."""
        for connection in self.connections.values():
            for job in connection.stalled.keys() | connection.held.keys():
                common = self.outages.common.get(job)
                if common is None:
                    connection.hold(job, None)
                elif connection.announced.get(job) != common.held and common.held in connection.stalled.get(job, ()):
                    connection.hold(job, common.held)

    def _log_outage(self, job: str, common: CommonEpoch | None) -> None:
        before = self.outages.common.get(job)
        if common is None:
            logger.info("%s: job %s is read at the newest epochs again", self.name, job)
        elif before is None or before.held != common.held:
            logger.warning(
                "%s: no server can read the log of job %s; it is read at epoch %d of term %d, which all servers have",
                self.name,
                job,
                common.held[1],
                common.held[0],
            )

    # -- events of connections ----------------------------------------------------------------------------------------

    def on_topology_version(self, version: int, address: str) -> None:
        """Handle a server's report of its topology version."""
        if version > self.slots.version:
            self.refresh(address)

    def shared_epochs(self, epochs: Epochs) -> ReplyEpochs:
        """Return an object with these epochs, the same one for all servers that have reached the newest epochs."""
        newest = latest(self.newest, epochs)
        if newest != self.newest:
            self.newest, self._newest_shared = newest, (newest,)
        return self._newest_shared if epochs == self.newest else (epochs,)

    def log_refused(self, address: str, reason: str) -> None:
        """Log a server of another log, once."""
        if self.refused_logs.get(address) != reason:
            self.refused_logs[address] = reason
            logger.error("server %s is refused: %s; its keys are errors", address, reason)

    def check_alignment(self) -> None:
        """Update `is_aligned`: whether all ready servers have reached the newest epochs."""
        ready = [connection for connection in self.connections.values() if connection.is_ready]
        self.is_aligned = all(connection.reply_epochs is self._newest_shared for connection in ready)

    def client_min_epochs(self, seen: Epochs) -> Epochs:
        """Return the epochs that a client has seen, of this application's jobs."""
        return seen if seen is self.newest else {job: seen[job] for job in seen.keys() & self.newest.keys()}

    def is_ready(self, server: ConnectionKey) -> bool:
        """Return whether a server can take requests."""
        connection = self.connections.get(server)
        return connection is not None and connection.is_ready

    def announced(self, server: ConnectionKey, job: str) -> JobEpoch | None:
        """Return the newest epoch of a job that a server is known to have; None: it does not serve the job."""
        connection, seen = self.connections.get(server), self.seen.get(server.address, EMPTY_EPOCHS)
        if connection is None or job not in connection.epochs or job not in seen:
            return None
        return max(connection.epochs[job], seen[job])

    def raise_to(self, server: ConnectionKey, job: str, reached: JobEpoch) -> None:
        """Note that clients may see an epoch of a server's store before the server announces it."""
        self.seen[server.address][job] = reached
        self.shared_epochs({job: reached})
        self.check_alignment()

    def on_epoch(self, connection: ServerConnection, job: str, reached: JobEpoch) -> None:
        """Handle a server's epoch of a job."""
        self.check_alignment()
        seen = self.seen.setdefault(connection.key.address, {})
        if reached == REMOVED:
            seen.pop(job, None)
        elif reached > seen.get(job, REMOVED):
            seen[job] = reached
        self.removed_jobs.discard(job)
        self._unreported_since_s.pop(job, None)
        if self.keys.epoch_reported(job, reached):
            self.on_new_job(self, connection.key.address)
        if connection.is_connected:
            connection.send_queued()
            if self._is_some_slot_behind:
                self._invalidate_connection_numbers()
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
        """Follow a MOVED, send a request again after one of `RETRY_ERRORS`, and pass any other error to the sink."""
        try:
            if request.address is not None:
                request.sink.put(request.index, reply)
            elif reply[:7] == b"-MOVED ":
                self._follow_moved(request, reply, connection.key.address)
            elif request.is_long or not (
                reply.startswith(RETRY_ERRORS) and self.retry_later(request.deadline_s, lambda: self.send(request))
            ):
                request.sink.put(request.index, reply, connection.reply_epochs)
        except Exception as error:
            request.fail_all(error)

    def resend_lost(self, requests: Sequence[ServerRequest], reason: str) -> None:
        """Send the requests of a lost connection again, to the servers that are active now."""
        self.losses += 1
        self._choose_active()
        now_s = self.now_s
        for request in requests:
            if request.sends >= SENDS_MAX or now_s >= request.deadline_s:
                request.refuse(GenericError(reason))
            else:
                self.send(request)
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
        for each in [each for each in self.connections.values() if each.is_connected]:
            answers.append(ReplyFuture())
            each.send(PING, ServerRequest(PING, 0, 2, self.deadline_s(), answers[-1], 0, each.key.address))
        for answer in answers:
            with suppress(Exception):  # a lost connection: the server reports keys once it is connected
                await answer

    def tracking_lost(self) -> None:
        """Invalidate all keys, because a server no longer reports changes of keys that clients read before."""
        if self.follows_keys:
            self.on_changed(None)

    def detach_long_reply(self, link: ServerProtocol, request: ServerRequest, epochs: ReplyEpochs) -> None:
        """Leave a socket to the long reply to a request.

        Args:
            epochs: The reply's.
        """
        self._long_replies.take(link, request, epochs)

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
                self._min_epochs.raise_to([int(slot)], dict(self.seen.get(self.active_server(was), EMPTY_EPOCHS)))
            self.slots.moved(int(slot), owner)
            self._invalidate_connection_numbers()
        self.refresh(address)
        self.moves += 1
        request.redirects += 1
        request.sends = 0
        if request.redirects <= REDIRECTS_AT_ONCE_MAX:
            self.send(request)
        elif not self.retry_later(request.deadline_s, lambda: self.send(request)):
            request.refuse(TryAgainError(f"the servers do not agree on the owner of slot {request.slot}"))

    # -- the active servers -------------------------------------------------------------------------------------------

    def _stays_open(self, key: ConnectionKey) -> bool:
        """Return whether a connection stays open without requests: the server announces its epochs over it."""
        return key.protocol == 2 and not key.is_long and key.address in self._server_addresses

    def _choose_active(self) -> None:
        """Choose the active servers, send them requests that are queued for other servers, and drop removed servers."""
        self._apply_choice(self._choose())

    def _apply_choice(self, changed: Mapping[str, str]) -> None:
        """Apply a choice.

        Args:
            changed: By master, the former active server of each shard whose active server changed.
        """
        self._raise_min_epochs(changed)
        self._invalidate_connection_numbers()
        replaced = set(changed.values())
        for key, connection in list(self.connections.items()):
            if key.address not in self._server_addresses and connection.is_idle:
                connection.close()
                self.connections.pop(key, None)
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

    def _choose(self) -> dict[str, str]:
        """Choose each shard's active server; return the former one, by master, of each shard where it changed."""
        changed: dict[str, str] = {}
        for shard in self._shards.values():
            connections = {each: self.connections.get(ConnectionKey(each, 2, False)) for each in shard.servers}
            epochs = {
                each: connection.epochs
                for each, connection in connections.items()
                if connection is not None and connection.is_usable
            }
            before = shard.active
            if shard.choose(epochs, self.now_s) != before:
                logger.info("%s: %s answers for the shard of %s", self.name, shard.active, shard.master)
                changed[shard.master] = before
        return changed

    def _raise_min_epochs(self, changed: Mapping[str, str]) -> None:
        """Raise the minimum epochs of the slots of shards whose active server changed."""
        for master, before in changed.items():
            self.tracking_lost()
            slots = [slot for slot, owner in enumerate(self.slots.owners) if owner == master]
            self._min_epochs.raise_to(slots, dict(self.seen.get(before, EMPTY_EPOCHS)))

    def _min_epochs_of(self, master: str) -> Epochs:
        """Return the joint minimum epochs of all slots of a master."""
        if not self._has_connection_numbers:
            self._build_connection_numbers()
        return self._master_min_epochs.get(master, EMPTY_EPOCHS)

    def _invalidate_connection_numbers(self) -> None:
        """Clear `connection_numbers`. It is rebuilt soon; requests that arrive before take the general path."""
        self.connection_numbers = CLOSED
        if self._has_connection_numbers:
            self._has_connection_numbers = False
            self._loop.call_soon(self._build_connection_numbers)

    def _build_connection_numbers(self) -> None:
        if self._has_connection_numbers:
            return
        self._has_connection_numbers = True
        numbers = bytearray(SLOTS)
        connections: list[ServerConnection | None] = [None]
        by_master: dict[str, Epochs] = {}
        numbers_of_ranges: dict[tuple[str, int], int] = {}
        is_behind = False
        # Runs of slots make this fast. Each change of a connection rebuilds the numbers, and no request is answered
        # during that time.
        for first, end in pairwise(sorted({0, *self.slots.ends, *self._min_epochs.ends})):
            master, min_epochs = self.slots.owners[first], self._min_epochs.by_slot[first]
            if master is None:
                continue
            number = numbers_of_ranges.get((master, id(min_epochs)))
            if number is None:
                connection = self.connections.get(ConnectionKey(self.active_server(master), 2, False))
                is_ready = connection is not None and connection.is_ready
                is_open = (
                    is_ready
                    and connection is not None
                    and has_reached(connection.epochs, min_epochs, self.removed_jobs)
                )
                is_behind |= is_ready and not is_open
                number = 0
                if is_open and (connection in connections or len(connections) <= OPEN_CONNECTIONS_MAX):
                    if connection not in connections:
                        connections.append(connection)
                    number = connections.index(connection)
                numbers_of_ranges[master, id(min_epochs)] = number
                by_master[master] = latest(by_master.get(master, EMPTY_EPOCHS), min_epochs)
            if number:
                numbers[first:end] = bytes([number]) * (end - first)
        self.connection_numbers, self.open_connections, self._master_min_epochs = (
            bytes(numbers) * 4,
            connections,
            by_master,
        )
        self._is_some_slot_behind = is_behind

    def _check(self) -> None:
        self._checking = self._loop.call_later(self.timeout_s / CHECKS_PER_TIMEOUT, self._check)
        now_s = self.clock.tick()
        self._forget_removed_jobs(now_s)
        replaceable = self._replaceable()
        for connection in list(self.connections.values()):
            is_hurried = connection.key.address in replaceable and not connection.key.is_long
            try:
                connection.check(now_s, self.timeout_s / 2 if is_hurried else self.timeout_s)
            except Exception as error:  # the other connections have to be checked, too
                internal_error(error)
        self._long_replies.check(now_s)
        if self.stores is not None:
            self.stores.release_old_epochs()
        self.agree_on_epochs()
        changed = self._choose()
        if changed:
            self._apply_choice(changed)

    def _replaceable(self) -> set[str]:
        """Return the active servers that another server can replace. Their silence is detected earlier."""
        found = set()
        for shard in self._shards.values():
            others = [
                self.connections.get(ConnectionKey(each, 2, False)) for each in shard.servers if each != shard.active
            ]
            if any(connection is not None and connection.is_usable for connection in others):
                found.add(shard.active)
        return found

    def _forget_removed_jobs(self, now_s: float) -> None:
        """Drop jobs that no server has announced for a while: they were removed or renamed."""
        epochs = {
            job for connection in self.connections.values() if connection.is_connected for job in connection.epochs
        }
        for job in {job for seen in self.seen.values() for job in seen} - epochs - self.removed_jobs:
            if now_s - self._unreported_since_s.setdefault(job, now_s) > REMOVED_AFTER_S and epochs:
                self.removed_jobs.add(job)
                self.keys.remove(job)
                for seen in self.seen.values():
                    seen.pop(job, None)
                self._forget_newest(job)
                logger.info("%s: job %s was removed", self.name, job)

    def _forget_newest(self, job: str) -> None:
        self.newest = {name: reached for name, reached in self.newest.items() if name != job}
        self._newest_shared = (self.newest,)
        for connection in self.connections.values():
            connection.reply_epochs = self.shared_epochs(connection.epochs)
        self.check_alignment()


class LongReply:
    """A long reply with a socket of its own, buffered until it is complete."""

    def __init__(
        self,
        others: LongReplies,
        link: ServerProtocol,
        request: ServerRequest,
        epochs: ReplyEpochs,
        deadline_s: float,
    ) -> None:
        self.link = link
        self._epochs = epochs
        self.deadline_s = deadline_s
        self.buffered_bytes = 0
        self._others = others
        self._request = request

    def receive_replies(self, replies: Sequence[RawReply]) -> None:
        """Pass the reply to the sink, and close the socket: the requests after it were sent again over another one."""
        self._others.remove(self)
        self.link.forget()
        try:
            self._request.sink.put(self._request.index, replies[0], self._epochs)
        except Exception as error:
            self._request.fail_all(error)

    def disconnected(self, reason: str) -> None:
        """Reply with an error."""
        self._others.remove(self)
        self._request.refuse(GenericError(reason))


class LongReplies:
    """The long replies that are being received. Together they buffer at most `REPLY_BYTES_MAX`."""

    def __init__(self, cluster: StateCluster) -> None:
        self._cluster = cluster
        self._all: list[LongReply] = []
        self._buffered_bytes = 0

    def take(self, link: ServerProtocol, request: ServerRequest, epochs: ReplyEpochs) -> None:
        """Take over a socket whose next reply is long. It is read when the buffers of all long replies have room."""
        if link.partial_bytes > REPLY_BYTES_MAX:
            link.forget()
            request.refuse(GenericError(f"a reply is larger than {REPLY_BYTES_MAX} bytes"))
            return
        reply = LongReply(self, link, request, epochs, self._cluster.deadline_s(is_long=True))
        self._all.append(reply)
        link.set_receiver(reply)
        link.pause(True)
        self._start_reading()

    def remove(self, reply: LongReply) -> None:
        """Remove a reply that is complete or lost."""
        self._all.remove(reply)
        self._buffered_bytes -= reply.buffered_bytes
        self._start_reading()

    def check(self, now_s: float) -> None:
        """Close the sockets of replies that take too long, or exceed the room in the buffers."""
        for reply in list(self._all):
            if now_s > reply.deadline_s:
                reply.link.cut("a long reply was not complete in time")
            elif reply.buffered_bytes and reply.link.partial_bytes > reply.buffered_bytes:
                grown = reply.link.partial_bytes - reply.buffered_bytes
                if self._buffered_bytes + grown > REPLY_BYTES_MAX:
                    reply.link.cut("too many long replies were requested at once")
                else:
                    self._buffered_bytes += grown
                    reply.buffered_bytes += grown

    def stop(self) -> None:
        """Close the sockets of all long replies."""
        for reply in list(self._all):
            reply.link.cut("the proxy stops")

    def _start_reading(self) -> None:
        for reply in self._all:
            if not reply.buffered_bytes and self._buffered_bytes + reply.link.partial_bytes <= REPLY_BYTES_MAX:
                reply.buffered_bytes = reply.link.partial_bytes
                self._buffered_bytes += reply.buffered_bytes
                reply.link.pause(False)
