"""A server: its listening sockets, its clients, and the timers that check on them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any

from resp_server import native
from resp_server.acl.users import Users
from resp_server.client.connection import Connection, ConnectionHost
from resp_server.client.round import Round
from resp_server.client.turn_scheduler import TurnScheduler
from resp_server.client.write_queue import WriteQueue
from resp_server.cluster.node_view import NodeView
from resp_server.cluster.topology import Topology
from resp_server.commands import command_table
from resp_server.commands.client import client_line
from resp_server.net.addresses import address_of
from resp_server.net.listeners import LEAVE_S, PolledListener, add_client, leave_port
from resp_server.net.tls import Certificates, TlsListener, accept_tls
from resp_server.net.transports import keep_alive
from resp_server.pipeline.context import ServerContext
from resp_server.pipeline.immediate import ImmediatePipeline
from resp_server.pipeline.pipeline import Pipeline
from resp_server.protocol.errors import DeniedError, GenericError, ReplyError
from resp_server.push.clients import Clients
from resp_server.serving.epoch_notifier import EpochNotifier
from resp_server.serving.invalidation_sender import InvalidationSender
from resp_server.serving.listening_ports import listen_at_ports
from resp_server.session.session import Session
from resp_server.session.tracking import TrackingState
from resp_server.settings.server import ServerConfig
from state_backend import log_lines
from state_backend.model.clock import Clock, now_ms
from state_backend.store.keyspace import Keyspace

log = logging.getLogger("sparkis.clients")

SWEEP_SECONDS = 1.0
# While the server drains: a client without requests is closed after this time; how often the server looks (guesses).
QUIET_S_MAX = 1.0
DRAIN_POLL_S = 0.02


class Server(Clients, ConnectionHost):
    """Answers clients from a keyspace.

    Runs on the event loop that `start` is called on; the keyspace is changed on that loop's thread only.

    Args:
        pipeline: Returns what answers the requests, of a context.
        has_peer_processes: Other processes answer at the same port. A client's request may then follow a reply of
            theirs, so the view is renewed for each input buffer and not once per round.
    """

    def __init__(
        self,
        keyspace: Keyspace,
        config: ServerConfig,
        pipeline: Callable[[ServerContext], Pipeline],
        clock: Clock = now_ms,
        connection: Callable[[Server], Connection] = Connection,
        *,
        has_peer_processes: bool = False,
    ) -> None:
        self.context = ServerContext(config, keyspace, command_table(), clock, clients=self)
        self.pipeline = pipeline(self.context)
        self._connect = connection
        self.turn_scheduler = TurnScheduler(self.context.renew, has_peer_processes=has_peer_processes)
        self._has_peer_processes = has_peer_processes
        self.write_queue = WriteQueue()
        self.add_to_round: Callable[[Connection], None] | None = None
        if isinstance(self.pipeline, ImmediatePipeline) and self.pipeline.compiled is None:
            self.add_to_round = Round(self.context, self.pipeline, self.turn_scheduler, self.write_queue).add
        self._connections: dict[int, Connection] = {}
        # The oldest first; some may have authenticated since.
        self._unauthenticated: dict[int, Connection] = {}
        self._next_id = 1
        self._listeners: list[asyncio.Server | TlsListener | PolledListener] = []
        self._sockets: list[socket.socket] = []  # of the listeners
        self._sweep: asyncio.TimerHandle | None = None
        self._poller: Any = None
        self._invalidations = InvalidationSender(self.context, self._connections)
        self._epochs = EpochNotifier(self.context, self._invalidations)

    @property
    def users(self) -> Users:
        """The users and their rules."""
        return self.context.users

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Change settings, given as fields of ServerConfig."""
        self.context.configure(changes)

    def reload_users(self) -> None:
        """Read the ACL file again, for all connections; AccessError for a bad file, and then nothing changes."""
        self.users.load()
        self.context.apply_user_changes()

    @property
    def run_id(self) -> str:
        """A name for this run of the server."""
        return self.context.process.run_id

    @property
    def port(self) -> int:
        """The port that the server listens on; known after `start`."""
        return self.context.process.port

    @property
    def tls_port(self) -> int:
        """The TLS port, which may be the only port; 0: there is none."""
        return self.context.process.tls_port

    async def start(self) -> None:
        """Listen. OSError if an address cannot be bound; a loopback address that the machine does not have is skipped.

        TlsError for a certificate that cannot be used.
        """
        config = self.context.config
        certificates = None if config.tls is None else Certificates(config.tls)
        plain, encrypted = listen_at_ports(config)
        self._sockets = [*plain, *encrypted]
        self.context.process.port = (plain or encrypted)[0].getsockname()[1]
        self.begin_polling()
        if self._poller is not None:
            self._listeners += [PolledListener(self._poller, each, lambda: self._connect(self)) for each in plain]
            plain = []
        for each in plain:
            self._listeners.append(
                await asyncio.get_running_loop().create_server(
                    lambda: self._connect(self), sock=each, backlog=config.tcp_backlog
                )
            )
        if certificates is not None:
            self.context.process.tls_port = encrypted[0].getsockname()[1]
            for each in encrypted:
                self._listeners.append(TlsListener(each, partial(self._take_encrypted, certificates), self._admits))
        self.start_sweeping()

    def begin_polling(self) -> None:
        """Use the compiled core's epoll for clients' sockets, if it is built; call on the event loop.

        A proxy does so before it connects to servers, so that their sockets are on the same epoll.
        """
        if native.sockets is not None and self._poller is None:
            self._poller = native.sockets.Poller(
                asyncio.get_running_loop(), self.context, self.pipeline.compiled, self._has_peer_processes
            )
            self.pipeline.poll(self._poller)

    async def _take_encrypted(self, certificates: Certificates, client: socket.socket) -> bool:
        return await self.take(client, lambda: self._connect(self), certificates)

    async def take(
        self, client: socket.socket, connect: Callable[[], Connection], certificates: Certificates | None = None
    ) -> bool:
        """Add an accepted client, with TLS if there are certificates; False if its handshake fails.

        OSError if the client has disconnected.
        """
        if certificates is not None:
            return await accept_tls(client, connect, certificates, self._poller)
        if self._poller is not None:
            add_client(self._poller, client, connect())
        else:
            await asyncio.get_running_loop().connect_accepted_socket(connect, client)
        return True

    def _admits(self, handshakes: int) -> bool:
        """Return whether one more client may begin a handshake, beside those in progress.

        It may take the place of the oldest client without a login. A refused one is counted.
        """
        stats = self.context.stats
        has_room = len(self._connections) + handshakes < self.context.config.maxclients
        if not has_room and not self._make_room():
            stats.connections_received += 1
            stats.connections_rejected += 1
            return False
        return True

    def _make_room(self) -> bool:
        """Cut the oldest client that has not authenticated; False if all have."""
        while self._unauthenticated:
            session_id = next(iter(self._unauthenticated))
            connection = self._unauthenticated.pop(session_id)
            if not connection.session.is_authenticated:
                self.cut(session_id, "it has not authenticated, and the connection limit is reached")
                return True
        return False

    def set_up_log(self, levels: str, line_format: str) -> None:
        """Log with other levels, or in another format, from now on."""
        log_lines.set_up(levels, line_format)

    async def drain(self, seconds_max: float) -> None:
        """Stop listening, and close each client after the replies to its requests; return when all are closed.

        It takes at most `seconds_max`. Clients that have connected before are served. A client that is active gets the
        reply to one more request: it sees the end right after that reply, before it sends the next request. A client
        that sends none for `QUIET_S_MAX` is closed.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + seconds_max
        await self._stop_listening()
        quiet_s = loop.time() + QUIET_S_MAX
        while (self._connections or self._has_handshakes) and loop.time() < ends_s:
            for connection in list(self._connections.values()):
                connection.finish()
                idle_ms = self.context.clock() - connection.session.active_ms
                if (loop.time() > quiet_s or idle_ms > QUIET_S_MAX * 1000) and connection.is_quiet:
                    connection.close()
            await asyncio.sleep(DRAIN_POLL_S)

    async def _stop_listening(self) -> None:
        """Close the listening sockets after accepting all clients that have connected."""
        if self.context.config.shares_port and self._listeners:
            for each in self._sockets:
                leave_port(each)
            await asyncio.sleep(LEAVE_S)
        await asyncio.sleep(DRAIN_POLL_S)  # for the event loop's own listeners, which accept clients as they come
        for listener in self._listeners:
            if isinstance(listener, (TlsListener, PolledListener)):
                listener.finish()
            else:
                listener.close()
        self._sockets.clear()

    def cut_clients(self) -> None:
        """Close all clients at once."""
        for connection in list(self._connections.values()):
            connection.output.abort("the server ends at once")

    @property
    def _has_handshakes(self) -> bool:
        return any(isinstance(listener, TlsListener) and listener.is_busy for listener in self._listeners)

    async def stop(self) -> None:
        """Stop listening, send pending replies, close all connections; takes at most `stop_ms_max`."""
        self.context.message_bus.cluster_bus.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._sweep is not None:
            self._sweep.cancel()
        self._epochs.stop()
        self._invalidations.stop()
        for connection in list(self._connections.values()):
            connection.close()
        ends = asyncio.get_running_loop().time() + self.context.config.stop_ms_max / 1000
        while self._connections and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.01)
        for connection in list(self._connections.values()):
            connection.output.abort("the server stops")
        await asyncio.sleep(0)
        await self.context.histories.stop()
        self.pipeline.stop()
        if self._poller is not None:
            self._poller.close()
            await asyncio.sleep(0)
        self.context.close()

    def set_loading(self, is_loading: bool) -> None:
        """Answer commands about keys with LOADING, or normally."""
        self.context.is_loading = is_loading

    def set_topology(self, topology: Topology, node_id: str) -> None:
        """Answer as this node of a cluster from now on."""
        self.context.become_node(NodeView(topology, node_id))

    def watch_event_demand(self, then: Callable[[bool], None]) -> None:
        """Call back now, and whenever appliers have to start or stop storing the events of keys."""
        self.context.notifications.on_demand_change = then
        then(self.context.notifications.is_needed)

    def watch_awaited_epochs(self, then: Callable[[str, int, int], None]) -> None:
        """Call back with a job, an epoch and its term, when a request at a proxy waits for this epoch here."""
        self.context.epochs.on_awaited = then

    async def settled(self) -> None:
        """Return once earlier changes apply to all clients: in a single process, at once."""

    # -- called by connections ----------------------------------------------------------------------------------------

    def admit(self, transport: asyncio.Transport) -> ReplyError | None:
        """Return the error for a client that is not admitted, or None."""
        stats, config = self.context.stats, self.context.config
        stats.connections_received += 1
        if len(self._connections) >= config.maxclients and not self._make_room():
            stats.connections_rejected += 1
            return GenericError("max number of clients reached")
        is_nopass = self.context.users.default.is_nopass
        if config.protected_mode and is_nopass and not is_local(transport.get_extra_info("peername")):
            stats.connections_rejected += 1
            return DeniedError()
        return None

    def session_of(self, transport: asyncio.Transport, session_id: int | None = None) -> Session:
        """Make the session of a new client, with the next id unless it has one already."""
        config = self.context.config
        _keep_alive(transport, config.tcp_keepalive)
        if session_id is None:
            session_id, self._next_id = self._next_id, self._next_id + 1
        address, local = (_address(transport.get_extra_info(name)) for name in ("peername", "sockname"))
        session = Session(session_id, address, local, self.context.users.default, self.context.clock())
        session.set_observed(self.context.observation.is_on)
        if self.context.cluster is not None:
            session.set_at_replica(self.context.cluster.is_replica)
        return session

    def add(self, connection: Connection) -> None:
        """Register a new client."""
        self._connections[connection.session.id] = connection
        if not connection.session.is_authenticated:
            self._unauthenticated[connection.session.id] = connection
        self.context.sessions[connection.session.id] = connection.session
        if connection.session.is_observed is not self.context.observation.is_on:  # it has changed during a handshake
            connection.session.set_observed(self.context.observation.is_on)

    def remove(self, session_id: int) -> None:
        """Remove a client whose connection ended."""
        self._connections.pop(session_id, None)
        self._unauthenticated.pop(session_id, None)
        session = self.context.sessions.pop(session_id, None)
        if session is not None:
            self.context.leave(session)

    def keep_sending_epochs(self, connection: Connection) -> None:
        """Report new epochs to a client for as long as it follows the server."""
        self._epochs.follow(connection)

    # -- called by commands and pushes (see `push.clients.Clients`) ---------------------------------------------------

    def push(self, session_id: int, frames: bytes) -> None:
        connection = self._connections.get(session_id)
        if connection is not None:
            connection.push(frames)

    def push_invalidations(self, tracking_state: TrackingState) -> None:
        self._invalidations.send_to(tracking_state)

    def has_all_replies(self, session_id: int) -> bool:
        connection = self._connections.get(session_id)
        return connection is not None and connection.reply.has_arrived

    def waits_for_reply(self, session_id: int) -> bool:
        connection = self._connections.get(session_id)
        return connection is not None and connection.reply.pending is not None

    def cut(self, session_id: int, reason: str = "CLIENT KILL") -> None:
        connection = self._connections.get(session_id)
        if connection is not None:
            self.remove(session_id)
            connection.output.cut(reason)

    def resume(self) -> None:
        for connection in self._connections.values():
            connection.resume()

    def output_bytes(self, session_id: int) -> int:
        connection = self._connections.get(session_id)
        return 0 if connection is None else connection.output.size_bytes

    def describe(self, session: Session) -> str:
        return client_line(self.context, session, self.context.clock())

    def defer(self, run: Callable[[], None]) -> object:
        return self.turn_scheduler.defer(run)

    # -- once a second ------------------------------------------------------------------------------------------------

    def start_sweeping(self) -> None:
        """Start the sweep that runs once a second."""
        loop = asyncio.get_running_loop()
        # A late sweep shows for how long the loop was blocked.
        if self._sweep is not None:
            late_ms = int((loop.time() - self._sweep.when()) * 1000)
            self.context.observation.slow_requests.record_event("event-loop", late_ms)
        self._sweep = loop.call_later(SWEEP_SECONDS, self.start_sweeping)
        self.context.stats.sample(loop.time())
        self.sweep(self.context.clock())

    def sweep(self, now_ms: int) -> None:
        """Close idle clients, and end replies that take too long."""
        self.context.keep_epochs(now_ms, is_followed=self._epochs.is_followed)
        self.context.observation.pause.remaining_ms()
        self.context.observation.monitors.announce()
        self.context.release_fresh_epochs()
        config = self.context.config
        idle_ms_max, limits = config.timeout * 1000, config.request_limits
        for connection in list(self._connections.values()):
            connection.check(now_ms, limits)
            if connection.session.is_subscriber or connection.reply.is_blocking:
                continue  # it may be silent
            if idle_ms_max and now_ms - connection.session.active_ms > idle_ms_max:
                connection.close()


def is_local(peername: object) -> bool:
    """Return whether a peer is on this machine: a loopback address, or a Unix socket."""
    if not isinstance(peername, tuple):
        return True
    address = ip_address(str(peername[0]).partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _address(name: object) -> str:
    if not isinstance(name, tuple):
        return str(name)
    return address_of(*name[:2])


def _keep_alive(transport: asyncio.Transport, seconds: int) -> None:
    sock = transport.get_extra_info("socket")
    if seconds and sock is not None:
        keep_alive(sock, seconds)
