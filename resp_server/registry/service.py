"""The registry: a listener for servers, watchers and drivers, and the loop that turns reports into directives.

    AUTH token                   +OK; anything else first ends the connection (see `token_port`)
    REPORT json                  +OK; a state server's report (see `report`); from now on the connection is the server's
                                 or -WRONGLOG if the server serves another log (see `own_log`)
    WATCH                        +OK; the topology is pushed now and after each change
    NOTICE job epoch [term]      +OK; every server is notified to check the job's log
    WAIT job epoch timeout_ms    :1 when every owner of slots serves that epoch or a later one, :0 after the timeout
    MEMBERS                      a map for each server
    LOG                          the path of the registry's log, and its identity; empty: it has none yet
    END driver                   +OK; the servers started for this driver hand their slots over, for at most four
                                 seconds, and are requested to end

    > assignment term json       to a server: {"topology": ..., "desired_slots": "0-8191"}: what to serve and to load
    > topology term json         to watchers
    > notice job epoch [term]    to a server
    > end                        to a server, see END

Everything is RESP3. Runs on one event loop; only the log is read, and the record written, in threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, NoReturn

from resp_server.cluster.topology import NODES_MAX, Topology
from resp_server.limits import REGISTRY_PEER_BYTES_MAX
from resp_server.net.addresses import address_of
from resp_server.net.tls import Certificates
from resp_server.net.transports import AwakeClock
from resp_server.protocol.errors import GenericError, WrongLogError
from resp_server.protocol.replies import OK, Push, Reply, encode
from resp_server.protocol.request_parser import Request
from resp_server.registry.assignment import Assignment
from resp_server.registry.moved_slots import MovedSlots
from resp_server.registry.own_log import OwnLog
from resp_server.registry.registry_file import FencedError, RegistryLease
from resp_server.registry.report import DRAIN_S_MAX, Report, ReportError
from resp_server.registry.sharding import Member
from resp_server.serving.token_port import AuthenticatedConnection, TokenPort
from state_backend.model.errors import SparkisError
from state_backend.model.slot_set import NONE

logger = logging.getLogger("sparkis.registry")

PROTOCOL = 3
CONNECTIONS_MAX = 4 * NODES_MAX
WAIT_MS_MAX = 600_000

# A server reports four times a second; one that is silent for this long has failed.
SILENT_S = 1.0
# The connection of a server or watcher that repeats its requests is closed when nothing has come for this long: the
# network may have dropped it, and then neither end is told (guess: longer than a process is stopped for by intention).
PEER_SILENT_S = 15.0
# Servers that join within this time are admitted together.
ADMIT_AFTER_S = 0.5
# Servers look for a new registry once a second; a new registry waits this long for the servers of its topology.
SETTLE_S = 2.0
# The wait for servers if the record has no topology but servers report one, or if all servers that have joined are
# outside the record's topology.
REBUILD_S = 1.5
TICK_S = 0.05
# Directives are sent after the topology is stored, or after this time.
SAVE_S_MAX = 0.5
CHECK_EVERY_S = 1.0
# The conditions of servers, for metrics.
CONDITIONS = ("connected", "silent", "draining", "away")


class RegistryStatus(NamedTuple):
    """The numbers of a registry, for metrics.

    Args:
        servers: Their number by condition.
        slots: The number of slots of each server that has some.
        moving_slots: Slots that servers are to get, and have not loaded yet.
        moved_slots, failovers: Since the registry took over.
    """

    term: int
    topology_version: int
    servers: Mapping[str, int]
    slots: Mapping[str, int]
    moving_slots: int
    moved_slots: int
    failovers: int


class RegistryConnection(AuthenticatedConnection):
    """One connection: of a server, a watcher or a driver."""

    def __init__(self, registry: Registry, writer: asyncio.StreamWriter, now_s: float) -> None:
        self._registry = registry
        self._writer = writer
        self.is_watching = False
        # Whether the peer repeats its requests: a server or a watcher does, a driver does not.
        self.has_heartbeat = False
        self.last_seen_s = now_s
        # The last topology version sent, and the desired slots sent with it.
        self.sent: tuple[int, str] = (-1, "")

    def send(self, message: bytes) -> None:
        """Send bytes; a peer that does not read is disconnected."""
        if self._writer.is_closing():
            return
        self._writer.write(message)
        if self._writer.transport.get_write_buffer_size() > REGISTRY_PEER_BYTES_MAX:
            logger.warning("a connection is closed: its peer does not read")
            self._writer.transport.abort()

    async def answer(self, request: Request) -> bytes:
        """Answer a request."""
        return encode(await self._registry.answer(self, request), PROTOCOL)

    def connection_ended(self) -> None:
        """Handle the loss of the connection."""
        self._registry.disconnected(self)

    @property
    def address(self) -> str:
        """The peer's end of the connection, for the log."""
        host, port, *_ = self._writer.get_extra_info("peername") or ("a closed connection", 0)
        return address_of(host, port)

    def close(self) -> None:
        """Close the connection at once: the network may never take the unsent bytes."""
        self._writer.transport.abort()


@dataclass
class MemberState:
    """A state server: its last report, with the time by the registry's clock."""

    report: Report
    join_order: int
    first_seen_s: float
    last_seen_s: float
    peer: RegistryConnection | None
    is_admitted: bool = False
    is_silent: bool = False
    is_ending: bool = False

    @property
    def is_alive(self) -> bool:
        """Return whether the server reports."""
        return self.peer is not None and not self.is_silent

    @property
    def can_take_over(self) -> bool:
        """Return whether the server is alive and neither ending nor draining."""
        return self.is_alive and not (self.is_ending or self.report.is_draining)

    def to_member(self, now_s: float, *, has_jobs: bool = True) -> Member:
        """Return the server as the planner sees it now, with or without its jobs."""
        report = self.report
        return Member(
            report.id,
            report.host,
            report.port,
            self.join_order,
            report.owned_slots,
            report.topology_version,
            0.0 if self.is_alive else max(now_s - self.last_seen_s, 0.001),
            self.is_ending or report.is_draining,
            self.peer is not None,
            report.jobs if has_jobs else {},
            report.zone,
            report.has_room,
        )


class Registry:
    """Answers the verbs; keeps assignment, record and members consistent."""

    def __init__(self, lease: RegistryLease, token: str, certificates: Certificates | None = None) -> None:
        record = lease.record
        self._lease = lease
        self._term = record.term
        self._port = TokenPort(
            "the registry",
            token,
            self._accept,
            peers_max=CONNECTIONS_MAX,
            protocol=PROTOCOL,
            certificates=certificates,
        )
        self._assignment = Assignment(record.replicas, record.topology)
        self._members: dict[str, MemberState] = {}
        self._peers: set[RegistryConnection] = set()
        self._waiters: set[tuple[str, int, asyncio.Future[None]]] = set()
        self._join_count = 0
        # This clock stops while the process is stopped, so that servers do not seem silent when it resumes.
        self._clock = AwakeClock(2 * TICK_S)
        self._wake = asyncio.Event()
        self._saved = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._last_members: dict[str, Member] | None = None
        self._settles_at_s: float | None = None
        self._moves = MovedSlots()
        self._own_log = OwnLog(lease.filesystem)
        self._is_awaited = asyncio.Event()  # a report is to be compared with the log
        self._refused: dict[str, Report] = {}  # the last reports of servers of another log

    @property
    def term(self) -> int:
        """The term: registries of one log are numbered by it."""
        return self._term

    def status(self) -> RegistryStatus:
        """Return the registry's present knowledge."""
        topology, members = self._assignment.topology, self._members.values()
        missing = [
            self._assignment.desired_slots(name) - member.report.owned_slots for name, member in self._members.items()
        ]
        return RegistryStatus(
            self._term,
            -1 if topology is None else topology.version,
            dict.fromkeys(CONDITIONS, 0) | Counter(_condition(member) for member in members),
            {} if topology is None else {node.address: len(node.slots) for node in topology.masters if node.slots},
            sum(map(len, missing)),
            self._moves.slots,
            self._moves.failovers,
        )

    async def start(self, listener: socket.socket) -> None:
        """Accept connections, once the log's identity was read."""
        with suppress(SparkisError):  # logged by `_read_log`
            await asyncio.to_thread(self._own_log.read, ())
        self._port.start(listener)

    async def stop(self) -> None:
        """Stop listening; close all connections."""
        self._port.close()

    async def run(self) -> NoReturn:
        """Plan and send directives until cancelled; FencedError when another registry has taken over."""
        tasks = [asyncio.create_task(each) for each in (self._decide(), self._renew_lease(), self._read_log())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        raise AssertionError("no task returns")

    # -- deciding -----------------------------------------------------------------------------------------------------

    async def _decide(self) -> None:
        now_s = self._clock.tick()
        if self._assignment.topology is not None:
            self._settles_at_s = now_s + SETTLE_S
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()
            now_s = self._clock.tick()
            self._close_silent(now_s)
            self._check_members(now_s)
            if not self._is_settling(now_s) and self._update(now_s):
                await self._save()
            self._send_directives()

    def _close_silent(self, now_s: float) -> None:
        """Close the connections whose peers have stopped to repeat their requests."""
        for peer in self._peers:
            if peer.has_heartbeat and now_s - peer.last_seen_s > PEER_SILENT_S:
                peer.has_heartbeat = False
                logger.warning("%s has been silent for %g s; its connection is closed", peer.address, PEER_SILENT_S)
                peer.close()

    def _check_members(self, now_s: float) -> None:
        """Mark silent servers, admit new ones, remove servers that will not return."""
        for member in self._members.values():
            if member.peer is not None and not member.is_silent and now_s - member.last_seen_s > SILENT_S:
                member.is_silent = True
                logger.warning("server %s is silent", _label(member.report))
        joining = [member for member in self._members.values() if not member.is_admitted]
        if joining:
            is_rebuilt = self._assignment.topology is None and any(
                member.report.topology_version >= 0 for member in joining
            )
            first_seen_s = min(member.first_seen_s for member in joining)
            if now_s - first_seen_s >= (REBUILD_S if is_rebuilt else ADMIT_AFTER_S):
                for member in joining:
                    member.is_admitted = True
        for name, member in list(self._members.items()):
            if member.peer is None and not (member.is_admitted and self._assignment.includes(name)):
                del self._members[name]
                logger.info("server %s is removed", _label(member.report))

    def _is_settling(self, now_s: float) -> bool:
        """Return whether servers of the inherited topology may still be looking for this registry."""
        if self._settles_at_s is None:
            return False
        topology = self._assignment.topology
        assert topology is not None
        missing = [node for node in topology.nodes if node.id not in self._members]
        are_new = len(missing) == len(topology.nodes) and bool(self._members)
        if missing and now_s < self._settles_at_s - (SETTLE_S - REBUILD_S if are_new else 0):
            return True
        self._settles_at_s = None
        return False

    def _update(self, now_s: float) -> bool:
        """Update the assignment if any member changed; return whether there is a new topology."""
        admitted = {name: member for name, member in self._members.items() if member.is_admitted}
        # Epochs change all the time, and matter only while a move of slots waits for them.
        has_jobs = self._assignment.waits_for_epochs
        current = {name: member.to_member(now_s, has_jobs=has_jobs) for name, member in admitted.items()}
        if current == self._last_members:
            return False
        before = self._assignment.topology
        is_new = self._assignment.update({name: member.to_member(now_s) for name, member in admitted.items()})
        self._last_members = None if is_new else current
        topology = self._assignment.topology
        if is_new and topology is not None:
            self._moves.count(before, topology, {name for name, member in admitted.items() if member.is_alive})
            nodes = ", ".join(f"{node.address} {node.slots or 'none'}" for node in topology.masters[:10])
            logger.info("version %d of the topology: %s", topology.version, nodes)
        return is_new

    def _send_directives(self) -> None:
        """Push new directives to servers and new topologies to watchers."""
        for name, member in self._members.items():
            peer, directive = member.peer, self._assignment.directive_for(name)
            if peer is None or directive is None or self._settles_at_s is not None:
                continue
            desired_slots = str(directive.desired_slots)
            if peer.sent != (directive.topology.version, desired_slots):
                peer.sent = (directive.topology.version, desired_slots)
                text = b'{"topology": %b, "desired_slots": "%b"}' % (_json(directive.topology), desired_slots.encode())
                peer.send(_push(b"assignment", self._term, text))
        released = self._assignment.released
        if released is None:
            return
        for peer in self._peers:
            if peer.is_watching and peer.sent[0] != released.version:
                peer.sent = (released.version, "")
                peer.send(_push(b"topology", self._term, _json(released)))

    # -- the record ---------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Wait until the topology is stored, for a limited time: readers should not depend on storage."""
        self._saved.clear()
        self._unsaved.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._saved.wait(), SAVE_S_MAX)

    async def _renew_lease(self) -> None:
        """Store each new topology, and check the record once a second; FencedError."""
        last_error = ""
        while True:
            self._unsaved.clear()
            try:
                await asyncio.to_thread(self._lease.renew, self._assignment.topology)
                last_error = ""
            except FencedError:
                raise
            except SparkisError as error:
                if str(error) != last_error:
                    logger.error("%s; the record stays as it is", error)
                last_error = str(error)
            if not self._unsaved.is_set():
                self._saved.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._unsaved.wait(), CHECK_EVERY_S)

    async def _read_log(self) -> None:
        """Read what reports are compared with: once a second, and when there is something new to compare."""
        last_error = ""
        while True:
            self._is_awaited.clear()
            reports = [*(member.report for member in self._members.values()), *self._refused.values()]
            try:
                await asyncio.to_thread(self._own_log.read, reports)
                last_error = ""
            except SparkisError as error:
                if str(error) != last_error:
                    logger.error("%s; servers are compared with what was read before", error)
                last_error = str(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_awaited.wait(), CHECK_EVERY_S)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, writer: asyncio.StreamWriter) -> RegistryConnection:
        peer = RegistryConnection(self, writer, self._clock())
        self._peers.add(peer)
        return peer

    def disconnected(self, peer: RegistryConnection) -> None:
        """Handle the loss of a connection."""
        self._peers.discard(peer)
        for member in self._members.values():
            if member.peer is peer:
                member.peer = None
                member.last_seen_s = self._clock()
                level = logging.INFO if member.is_ending else logging.WARNING
                logger.log(level, "server %s has disconnected", _label(member.report))
        self._wake.set()

    async def answer(self, peer: RegistryConnection, request: Request) -> Reply:
        """Answer a request of a peer that has authenticated."""
        peer.last_seen_s = self._clock()
        try:
            match [bytes(request[0]).upper(), *(bytes(word).decode() for word in request[1:])]:
                case [b"REPORT", str(text)]:
                    return self._accept_report(peer, Report.parse(text))
                case [b"WATCH"]:
                    peer.has_heartbeat = peer.is_watching = True
                    self._wake.set()
                    return OK
                case [b"NOTICE", str(job), str(epoch), *_] if len(request) <= 4:
                    self._notice(job, int(epoch), *map(int, request[3:]))
                    return OK
                case [b"WAIT", str(job), str(epoch), str(timeout_ms)]:
                    return await self._wait(job, int(epoch), min(int(timeout_ms), WAIT_MS_MAX) / 1000)
                case [b"MEMBERS"]:
                    return self._list_members()
                case [b"LOG"]:
                    return [self._lease.filesystem.root.encode(), (self._own_log.identity or "").encode()]
                case [b"END", str(driver)] if driver:
                    members = self._members.values()
                    await self._end_servers([member for member in members if member.report.driver == driver])
                    return OK
        except ReportError as error:
            return GenericError(str(error))
        except ValueError as error:
            return GenericError(f"a number is needed: {error}")
        verbs = "REPORT json, WATCH, NOTICE job epoch [term], WAIT job epoch timeout_ms, MEMBERS, LOG, END driver"
        return GenericError(f"not a request of a registry; there are {verbs}")

    def _accept_report(self, peer: RegistryConnection, report: Report) -> Reply:
        if refusal := self._own_log.refusal(report, self._is_alive):
            return self._refuse(peer, report, refusal)
        self._refused.pop(report.id, None)
        if self._own_log.awaits(report):
            self._is_awaited.set()
            topology = self._assignment.topology
            node = None if topology is None else topology.by_id.get(report.id)
            if node is None or not node.slots:  # no client may be sent to it before
                report = replace(report, owned_slots=NONE)
        now_s = self._clock()
        member = self._members.get(report.id)
        address = report.address
        if member is None or not member.is_alive or member.report.address != address:
            for other in self._members.values():
                if other.is_alive and other is not member and other.report.address == address:
                    return GenericError(
                        f"server {other.report.id} is at {address} already; give this one another address"
                    )
        if member is None:
            if len(self._members) >= NODES_MAX:
                return GenericError(f"there are {NODES_MAX} servers already")
            self._join_count += 1
            member = MemberState(report, self._join_count, now_s, now_s, peer, self._assignment.includes(report.id))
            self._members[report.id] = member
            logger.info("server %s has joined, with slots %s", _label(report), report.owned_slots or "none")
        if member.peer is not peer:
            if member.peer is not None:
                member.peer.close()  # the server has a newer connection
            member.peer = peer
        peer.has_heartbeat = True
        if member.is_silent:
            logger.info("server %s reports again", _label(report))
        if report != member.report or member.is_silent:
            self._wake.set()
        member.report, member.last_seen_s, member.is_silent = report, now_s, False
        for job, epoch, reached in self._waiters:
            if not reached.done() and self._is_visible(job, epoch):
                reached.set_result(None)
        return OK

    def _is_alive(self, server: str) -> bool:
        return server in self._members and self._members[server].is_alive

    def _refuse(self, peer: RegistryConnection, report: Report, refusal: str) -> Reply:
        """Refuse a server of another log. If it was a member, its slots get other owners, as after a disconnect."""
        if report.id not in self._refused:
            logger.error("%s", refusal)
        self._refused[report.id] = report
        if len(self._refused) > NODES_MAX:
            del self._refused[next(iter(self._refused))]
        member = self._members.get(report.id)
        if member is not None and member.peer is peer:
            self.disconnected(peer)
        return WrongLogError(refusal)

    def _notice(self, job: str, epoch: int, *term: int) -> None:
        _send(self._members.values(), Push((b"notice", job.encode(), epoch, *term)))

    async def _end_servers(self, ending: Collection[MemberState]) -> None:
        """Request servers to end. If others stay, these take over first, for `DRAIN_S_MAX` at most."""
        for member in ending:
            member.is_ending = True
        self._wake.set()
        others_stay = False
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S_MAX):
                while any(map(self._is_needed, ending)) and any(
                    member.can_take_over for member in self._members.values()
                ):
                    others_stay = True
                    await asyncio.sleep(TICK_S)
        if others_stay:
            await self._save()
        _send(ending, Push((b"end",)))

    def _is_needed(self, member: MemberState) -> bool:
        """Return whether a server has slots in the topology, or other servers may still redirect clients to it."""
        name, topology = member.report.id, self._assignment.topology
        node = None if topology is None else topology.by_id.get(name)
        is_owner = node is not None and bool(node.slots)
        return is_owner or (member.is_alive and bool(self._assignment.desired_slots(name)))

    async def _wait(self, job: str, epoch: int, timeout_s: float) -> int:
        if self._is_visible(job, epoch):
            return 1
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (job, epoch, reached)
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(reached, timeout_s)
            return 1
        except TimeoutError:
            return 0
        finally:
            self._waiters.discard(waiter)

    def _is_visible(self, job: str, epoch: int) -> bool:
        """Return whether readers see an epoch of a job, or a later one, at all owners of slots."""
        topology = self._assignment.topology
        owners = [] if topology is None else [node.id for node in topology.masters if node.slots]
        reports = [self._members[name].report for name in owners if name in self._members]
        return (
            bool(owners)
            and len(reports) == len(owners)
            and all(job in report.jobs and report.jobs[job].epoch >= epoch for report in reports)
        )

    def _list_members(self) -> Reply:
        topology = self._assignment.topology
        nodes = {} if topology is None else topology.by_id
        rows = []
        for name, member in self._members.items():
            node, report = nodes.get(name), member.report
            rows.append(
                {
                    b"id": name.encode(),
                    b"address": report.address.encode(),
                    b"connected": int(member.peer is not None),
                    b"role": b"none" if node is None else b"replica" if node.is_replica else b"master",
                    b"health": b"none" if node is None else node.health.encode(),
                    b"slots": b"" if node is None else str(node.slots).encode(),
                    b"owned_slots": str(report.owned_slots).encode(),
                    b"desired_slots": str(self._assignment.desired_slots(name)).encode(),
                    b"topology_version": report.topology_version,
                    b"driver": report.driver.encode(),
                    b"jobs": json.dumps({job: seen._asdict() for job, seen in report.jobs.items()}).encode(),
                }
            )
        return rows


def _condition(member: MemberState) -> str:
    if member.peer is None:
        return "away"
    if member.is_silent:
        return "silent"
    return "draining" if member.is_ending or member.report.is_draining else "connected"


def _send(servers: Iterable[MemberState], push: Push) -> None:
    message = encode(push, PROTOCOL)
    for member in servers:
        if member.peer is not None:
            member.peer.send(message)


def _label(report: Report) -> str:
    return f"{report.address} ({report.id[:8]})"


@lru_cache(maxsize=4)
def _json(topology: Topology) -> bytes:
    return json.dumps(topology.to_json()).encode()


def _push(kind: bytes, term: int, text: bytes) -> bytes:
    return encode(Push((kind, term, text)), PROTOCOL)
