"""The registry's listener, and the turn in which what members said becomes what they are told.

    AUTH token                   +OK; anything else before it ends the connection (see `token_port`)
    REPORT json                  +OK; what a state server is and has (see `report`); the connection is then its own
    WATCH                        +OK; the topology is pushed, at once and whenever it changes
    NOTICE job epoch             +OK; every server is told to look at the job's log
    WAIT job epoch timeout_ms    :1 when every owner of slots shows that epoch or a later one, :0 after that time
    MEMBERS                      a map for each server
    END driver                   +OK; the servers that were started for this driver hand over to those that stay, for at
                                 most four seconds, and are told to end

    > assignment term json       to a server: {"topology": ..., "wanted": "0-8191"}, to show and to hold
    > topology term json         to who watches
    > notice job epoch           to a server
    > end                        to a server, see END

All of it in RESP3. Runs on one event loop; only the record is written in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from resp_server.cluster.topology import NODES_MAX, Topology
from resp_server.net.awake import AwakeClock
from resp_server.net.tls import Certificates
from resp_server.protocol.errors import PlainError
from resp_server.protocol.replies import OK, Push, Reply, encode
from resp_server.protocol.request_parser import Request
from resp_server.registry.assignment import Assignment
from resp_server.registry.record import FencedError, Place
from resp_server.registry.report import DRAIN_S_MAX, Report, ReportError
from resp_server.registry.sharding import Member
from resp_server.serving.token_port import TokenPort
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.registry")

PROTOCOL = 3
# More waits to be sent only where nobody reads.
WAITING_BYTES_MAX = 4 << 20
CONNECTIONS_MAX = 4 * NODES_MAX
WAIT_MS_MAX = 600_000

# A server reports four times a second; one that is silent for this long has failed.
SILENT_S = 1.0
# Servers that come together are taken in together.
GATHER_S = 0.5
# Servers look for a new registry once a second: how long it waits for all that are known before it decides anything.
SETTLE_S = 2.0
# The same where nothing is known but that servers were in a cluster before, or where none but new ones have come.
REBUILD_S = 1.5
TICK_S = 0.05
# What is told is written down first, unless that takes longer.
SAVE_S_MAX = 0.5
LOOK_EVERY_S = 1.0


class Connection:
    """One connection of a server, of who watches, or of a driver."""

    def __init__(self, registry: Registry, writer: asyncio.StreamWriter) -> None:
        self._registry = registry
        self._writer = writer
        self.is_watching = False
        self.told: tuple[int, str] = (-1, "")  # the version, and the slots wanted

    def send(self, message: bytes) -> None:
        """Send bytes; whoever does not read them is cut off."""
        if self._writer.is_closing():
            return
        self._writer.write(message)
        if self._writer.transport.get_write_buffer_size() > WAITING_BYTES_MAX:
            logger.warning("a connection that reads nothing is closed")
            self._writer.transport.abort()

    async def answer(self, request: Request) -> bytes:
        """Answer a request."""
        return encode(await self._registry.answer(self, request), PROTOCOL)

    def lost(self) -> None:
        """Take in that it is gone."""
        self._registry.lose(self)

    def close(self) -> None:
        """End it."""
        self._writer.close()


@dataclass
class Known:
    """A state server: what it said last, and when, by the registry's clock."""

    report: Report
    joined: int
    since_s: float
    heard_s: float
    connection: Connection | None
    is_admitted: bool = False
    is_silent: bool = False
    is_ending: bool = False

    @property
    def is_here(self) -> bool:
        """Tell whether it was heard just now."""
        return self.connection is not None and not self.is_silent

    @property
    def stays(self) -> bool:
        """Tell whether it is here, and does not want to go."""
        return self.is_here and not (self.is_ending or self.report.wants_nothing)

    def member(self, now_s: float, *, has_jobs: bool = True) -> Member:
        """Return it as it counts now, with its jobs or without."""
        report = self.report
        return Member(
            report.id,
            report.host,
            report.port,
            self.joined,
            report.held,
            report.shown,
            0.0 if self.is_here else max(now_s - self.heard_s, 0.001),
            self.is_ending or report.wants_nothing,
            self.connection is not None,
            report.jobs if has_jobs else {},
            report.zone,
            report.has_room,
        )


class Registry:
    """Answers the verbs, and keeps assignment, record and members in step."""

    def __init__(self, place: Place, token: str, certificates: Certificates | None = None) -> None:
        record = place.record
        self._place = place
        self._term = record.term
        self._port = TokenPort(
            "the registry",
            token,
            self._take_in,
            peers_max=CONNECTIONS_MAX,
            protocol=PROTOCOL,
            certificates=certificates,
        )
        self._assignment = Assignment(record.replicas, record.topology)
        self._known: dict[str, Known] = {}
        self._connections: set[Connection] = set()
        self._waiting: set[tuple[str, int, asyncio.Future[None]]] = set()
        self._joined = 0
        # Nobody is silent, and no time to wait for anybody passes, while this process does not listen.
        self._clock = AwakeClock(2 * TICK_S)
        self._wake = asyncio.Event()
        self._saved = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._stepped: dict[str, Member] | None = None
        self._settles_at_s: float | None = None

    @property
    def term(self) -> int:
        """Which one it is, of all registries that this log has had."""
        return self._term

    async def start(self, listener: socket.socket) -> None:
        """Take connections."""
        self._port.start(listener)

    async def stop(self) -> None:
        """Stop listening, and let everybody go."""
        self._port.close()

    async def run(self) -> NoReturn:
        """Decide and tell until it is cancelled; FencedError when another registry has taken over."""
        tasks = [asyncio.create_task(each) for each in (self._decide(), self._keep_record())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        raise AssertionError("both go on for ever")

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
            self._look(now_s)
            if not self._is_settling(now_s) and self._step(now_s):
                await self._save()
            self._tell()

    def _look(self, now_s: float) -> None:
        """See who is silent, take in who has come, and forget who is gone for good."""
        for known in self._known.values():
            if known.connection is not None and not known.is_silent and now_s - known.heard_s > SILENT_S:
                known.is_silent = True
                logger.warning("server %s is silent", _name(known.report))
        waiting = [known for known in self._known.values() if not known.is_admitted]
        if waiting:
            is_rebuilt = self._assignment.topology is None and any(known.report.shown >= 0 for known in waiting)
            since_s = min(known.since_s for known in waiting)
            if now_s - since_s >= (REBUILD_S if is_rebuilt else GATHER_S):
                for known in waiting:
                    known.is_admitted = True
        for name, known in list(self._known.items()):
            if known.connection is None and not (known.is_admitted and self._assignment.keeps(name)):
                del self._known[name]
                logger.info("server %s is forgotten", _name(known.report))

    def _is_settling(self, now_s: float) -> bool:
        """Tell whether servers of the topology that was taken over may still be looking for this registry."""
        if self._settles_at_s is None:
            return False
        topology = self._assignment.topology
        assert topology is not None
        missing = [node for node in topology.nodes if node.id not in self._known]
        are_strangers = len(missing) == len(topology.nodes) and bool(self._known)
        if missing and now_s < self._settles_at_s - (SETTLE_S - REBUILD_S if are_strangers else 0):
            return True
        self._settles_at_s = None
        return False

    def _step(self, now_s: float) -> bool:
        """Decide anew if anything is different; return whether there is a new topology."""
        admitted = {name: known for name, known in self._known.items() if known.is_admitted}
        # Epochs move all the time, and matter to nothing else that may change.
        has_jobs = self._assignment.waits_for_epochs
        seen = {name: known.member(now_s, has_jobs=has_jobs) for name, known in admitted.items()}
        if seen == self._stepped:
            return False
        is_new = self._assignment.step({name: known.member(now_s) for name, known in admitted.items()})
        self._stepped = None if is_new else seen
        topology = self._assignment.topology
        if is_new and topology is not None:
            nodes = ", ".join(f"{node.address} {node.slots or 'none'}" for node in topology.masters[:10])
            logger.info("version %d of the topology: %s", topology.version, nodes)
        return is_new

    def _tell(self) -> None:
        """Push what is new to servers and to who watches."""
        for name, known in self._known.items():
            connection, told = known.connection, self._assignment.told(name)
            if connection is None or told is None or self._settles_at_s is not None:
                continue
            wanted = str(told.wanted)
            if connection.told != (told.topology.version, wanted):
                connection.told = (told.topology.version, wanted)
                text = b'{"topology": %b, "wanted": "%b"}' % (_text(told.topology), wanted.encode())
                connection.send(_push(b"assignment", self._term, text))
        released = self._assignment.released
        if released is None:
            return
        for connection in self._connections:
            if connection.is_watching and connection.told[0] != released.version:
                connection.told = (released.version, "")
                connection.send(_push(b"topology", self._term, _text(released)))

    # -- the record ---------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Have the topology written down, and wait for that, but not long: who reads does not wait for storage."""
        self._saved.clear()
        self._unsaved.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._saved.wait(), SAVE_S_MAX)

    async def _keep_record(self) -> None:
        """Write the topology down when it is new, and look at the file once a second; FencedError."""
        last_error = ""
        while True:
            self._unsaved.clear()
            try:
                await asyncio.to_thread(self._place.keep, self._assignment.topology)
                last_error = ""
            except FencedError:
                raise
            except SparkisError as error:
                if str(error) != last_error:
                    logger.error("%s; going on without it", error)
                last_error = str(error)
            if not self._unsaved.is_set():
                self._saved.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._unsaved.wait(), LOOK_EVERY_S)

    # -- connections --------------------------------------------------------------------------------------------------

    def _take_in(self, writer: asyncio.StreamWriter) -> Connection:
        connection = Connection(self, writer)
        self._connections.add(connection)
        return connection

    def lose(self, connection: Connection) -> None:
        """Take in that a connection is gone."""
        self._connections.discard(connection)
        for known in self._known.values():
            if known.connection is connection:
                known.connection = None
                known.heard_s = self._clock()
                logger.log(
                    logging.INFO if known.is_ending else logging.WARNING, "server %s is gone", _name(known.report)
                )
        self._wake.set()

    async def answer(self, connection: Connection, request: Request) -> Reply:
        """Answer a request of whoever has the token."""
        try:
            match [bytes(request[0]).upper(), *(bytes(word).decode() for word in request[1:])]:
                case [b"REPORT", str(text)]:
                    return self._take(connection, Report.parse(text))
                case [b"WATCH"]:
                    connection.is_watching = True
                    self._wake.set()
                    return OK
                case [b"NOTICE", str(job), str(epoch)]:
                    self._notice(job, int(epoch))
                    return OK
                case [b"WAIT", str(job), str(epoch), str(timeout_ms)]:
                    return await self._wait(job, int(epoch), min(int(timeout_ms), WAIT_MS_MAX) / 1000)
                case [b"MEMBERS"]:
                    return self._members()
                case [b"END", str(driver)] if driver:
                    await self._end([known for known in self._known.values() if known.report.driver == driver])
                    return OK
        except ReportError as error:
            return PlainError(str(error))
        except ValueError as error:
            return PlainError(f"a number is needed: {error}")
        verbs = "REPORT json, WATCH, NOTICE job epoch, WAIT job epoch timeout_ms, MEMBERS, END driver"
        return PlainError(f"not a request of a registry; there are {verbs}")

    def _take(self, connection: Connection, report: Report) -> Reply:
        now_s = self._clock()
        known = self._known.get(report.id)
        address = _address(report)
        if known is None or not known.is_here or _address(known.report) != address:  # else the address is its own
            for other in self._known.values():
                if other.is_here and other is not known and _address(other.report) == address:
                    return PlainError(
                        f"server {other.report.id} is at {address} already; give this one another address"
                    )
        if known is None:
            if len(self._known) >= NODES_MAX:
                return PlainError(f"there are {NODES_MAX} servers already")
            self._joined += 1
            known = Known(report, self._joined, now_s, now_s, connection, self._assignment.keeps(report.id))
            self._known[report.id] = known
            logger.info("server %s has come, with slots %s", _name(report), report.held or "none")
        if known.connection is not connection:
            if known.connection is not None:
                known.connection.close()  # the same server, over a newer connection
            known.connection = connection
        if known.is_silent:
            logger.info("server %s is heard again", _name(report))
        if report != known.report or known.is_silent:
            self._wake.set()
        known.report, known.heard_s, known.is_silent = report, now_s, False
        for job, epoch, reached in self._waiting:
            if not reached.done() and self._is_shown(job, epoch):
                reached.set_result(None)
        return OK

    def _notice(self, job: str, epoch: int) -> None:
        _send(self._known.values(), Push((b"notice", job.encode(), epoch)))

    async def _end(self, ending: Collection[Known]) -> None:
        """End servers; where others stay, once these have taken over and that is written down, or it takes too long."""
        for known in ending:
            known.is_ending = True
        self._wake.set()
        are_left = False
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S_MAX):
                while any(map(self._is_needed, ending)) and any(known.stays for known in self._known.values()):
                    are_left = True
                    await asyncio.sleep(TICK_S)
        if are_left:
            await self._save()
        _send(ending, Push((b"end",)))

    def _is_needed(self, known: Known) -> bool:
        """Tell whether a server owns slots, or holds some that others may still send clients there for."""
        name, topology = known.report.id, self._assignment.topology
        node = None if topology is None else topology.by_id.get(name)
        is_owner = node is not None and bool(node.slots)
        return is_owner or (known.is_here and bool(self._assignment.wanted(name)))

    async def _wait(self, job: str, epoch: int, timeout_s: float) -> int:
        if self._is_shown(job, epoch):
            return 1
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (job, epoch, reached)
        self._waiting.add(waiting)
        try:
            await asyncio.wait_for(reached, timeout_s)
            return 1
        except TimeoutError:
            return 0
        finally:
            self._waiting.discard(waiting)

    def _is_shown(self, job: str, epoch: int) -> bool:
        """Tell whether all owners of slots show an epoch of a job, or a later one."""
        topology = self._assignment.topology
        owners = [] if topology is None else [node.id for node in topology.masters if node.slots]
        reports = [self._known[name].report for name in owners if name in self._known]
        return (
            bool(owners)
            and len(reports) == len(owners)
            and all(job in report.jobs and report.jobs[job].epoch >= epoch for report in reports)
        )

    def _members(self) -> Reply:
        topology = self._assignment.topology
        nodes = {} if topology is None else topology.by_id
        rows = []
        for name, known in self._known.items():
            node, report = nodes.get(name), known.report
            rows.append(
                {
                    b"id": name.encode(),
                    b"address": _address(report).encode(),
                    b"connected": int(known.connection is not None),
                    b"role": b"none" if node is None else b"replica" if node.is_replica else b"master",
                    b"health": b"none" if node is None else node.health.encode(),
                    b"slots": b"" if node is None else str(node.slots).encode(),
                    b"held": str(report.held).encode(),
                    b"wanted": str(self._assignment.wanted(name)).encode(),
                    b"shown": report.shown,
                    b"driver": report.driver.encode(),
                    b"jobs": json.dumps({job: seen._asdict() for job, seen in report.jobs.items()}).encode(),
                }
            )
        return rows


def _send(servers: Iterable[Known], push: Push) -> None:
    message = encode(push, PROTOCOL)
    for known in servers:
        if known.connection is not None:
            known.connection.send(message)


def _name(report: Report) -> str:
    return f"{_address(report)} ({report.id[:8]})"


def _address(report: Report) -> str:
    return f"{report.host}:{report.port}"


@lru_cache(maxsize=4)
def _text(topology: Topology) -> bytes:
    return json.dumps(topology.to_json()).encode()


def _push(kind: bytes, term: int, text: bytes) -> bytes:
    return encode(Push((kind, term, text)), PROTOCOL)
