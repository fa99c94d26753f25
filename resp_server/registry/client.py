"""A state server's link to its registry: it reports what the server is and has, and does what it is told.

Without a registry everything stays as it is, for as long as it takes: the server answers on, and looks once a second
for a registry at the address it was given, at the last one, and at those that stand under its log roots
(`registry.json`). It never follows one of a lower term than it did before.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import hiredis

from resp_server.cluster.topology import Health, Topology, TopologyError
from resp_server.net.addresses import host_and_port
from resp_server.net.tls import Certificates, why
from resp_server.registry.record import Record, read_record
from resp_server.registry.report import Report
from resp_server.serving.appliers import Visible
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import KeyGroupsError, SparkisError
from state_backend.model.key_groups import KeyGroups

logger = logging.getLogger("sparkis.server")

REPORT_EVERY_S = 0.25
# What changes fast is told together.
REPORT_GAP_S = 0.02
# A registry answers each report; one that is silent for this long, and at this many looks, is as good as none. A look
# that ends because this process itself stood still is one.
SILENT_S = 2.0
SILENT_LOOKS = 8
CONNECT_S_MAX = 1.0
LOOK_EVERY_S = 1.0
# The storage of a log may hang.
LOOK_S_MAX = 2.0
READ_BYTES = 64 << 10


class LinkError(SparkisError):
    """The registry refused something, or is not one to follow."""


class Holds(Protocol):
    """Whoever holds slots: the appliers of this server."""

    def want(self, slots: KeyGroups) -> None:
        """Hold these slots and no others."""

    async def notice(self, job: str) -> None:
        """Look at a job's log now."""

    @property
    def held(self) -> KeyGroups:
        """The wanted slots that can be answered."""

    @property
    def visible(self) -> Mapping[str, Visible]:
        """What readers see of each job."""

    @property
    def have_room(self) -> bool:
        """Tell whether the stores can be written, and could for a while."""


class Shows(Protocol):
    """Whoever shows topologies."""

    def take(self, topology: Topology, name: str) -> None:
        """Show a topology as its node of an id; TopologyError, and then what was shown is kept."""


@dataclass(frozen=True)
class Advertised:
    """Where clients find this server. host None: where the registry sees it from, the near end of the connection.

    zone: servers of one may be lost together; empty: those of its host. driver: who may end it, if anybody.
    """

    host: str | None
    port: int
    zone: str = ""
    driver: str = ""


class RegistryClient:
    """Runs on the event loop's thread. `on_wanted` is called with what the server is to hold, first before it does.

    `on_end` is called when the driver ends its servers; without it that is not for this one. With `certificates` the
    registry has to speak TLS.
    """

    def __init__(
        self,
        member_id: str,
        advertised: Advertised,
        membership: Shows,
        appliers: Holds,
        *,
        logs: Sequence[Filesystem],
        address: str | None,
        token: str,
        on_wanted: Callable[[KeyGroups], None],
        on_end: Callable[[], None] | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self._id = member_id
        self._advertised = advertised
        self._membership = membership
        self._followers = appliers
        self._logs = logs
        self._given = address
        self._last: str | None = None
        self._token = token
        self._on_wanted = on_wanted
        self._on_end = on_end
        self._certificates = certificates
        self._term = 0
        self._shown: Topology | None = None
        self._wanted: KeyGroups | None = None
        self._wants_nothing = False
        self._is_joined = False
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._reading: asyncio.Future[list[Record]] | None = None
        self._notices: dict[str, asyncio.Task[None]] = {}
        self._told_error = ""

    def changed(self) -> None:
        """Report soon: what is held, shown or seen is another."""
        self._wake.set()

    async def run(self) -> NoReturn:
        """Find a registry, be its member, find the next one, until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            records = await self._records()
            for address in self._addresses(records):
                try:
                    await self._join(address)
                except (OSError, TimeoutError, EOFError, LinkError, hiredis.ProtocolError) as error:
                    self._tell(f"no registry at {address}: {why(error) or 'it does not answer'}")
                except Exception:  # our own bug; without a link this server would never be told anything again
                    logger.exception("internal error in the link to the registry at %s", address)
            if not self._addresses(records):
                self._tell("no registry is known; looking for registry.json in the log")
            self._stand_by(records)
            await asyncio.sleep(max(0.0, began_s + LOOK_EVERY_S - loop.time()))

    async def drain(self, seconds_max: float) -> None:
        """Ask that others take over what this server has, and wait until they have; not if there is nobody."""
        self._wants_nothing = True
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds_max):
                while self._is_needed():
                    self._moved.clear()
                    await self._moved.wait()

    def _is_needed(self) -> bool:
        """Tell whether this server shows slots, or holds some that others may still send clients here for."""
        if not self._is_joined or self._shown is None:
            return False
        others = [node for node in self._shown.nodes if node.id != self._id and node.health is not Health.FAIL]
        return bool(others) and bool(self._wanted or self._shown.node(self._id).slots)

    # -- finding one --------------------------------------------------------------------------------------------------

    async def _records(self) -> list[Record]:
        """Return what registries wrote into the logs, the newest first; nothing where storage does not answer."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(_read_records, self._logs))
        done, _ = await asyncio.wait([self._reading], timeout=LOOK_S_MAX)
        if not done:
            return []
        records, self._reading = self._reading.result(), None
        return records

    def _addresses(self, records: Sequence[Record]) -> list[str]:
        """Return where a registry may be, the likeliest first."""
        found = [record.address for record in records if record.term >= self._term]
        return list(dict.fromkeys([*found, *(each for each in (self._given, self._last) if each)]))

    def _stand_by(self, records: Sequence[Record]) -> None:
        """Serve as the last registry wrote it down, where none is there to ask: this server was started again."""
        for record in records:
            topology = record.topology
            if self._wanted is not None or topology is None:
                return
            with suppress(TopologyError):
                node = topology.node(self._id)
                logger.warning("no registry can be reached; serving as version %d of the topology", topology.version)
                self._assign(topology, topology.master_of(node).slots)

    def _tell(self, message: str) -> None:
        """Say once why there is no registry."""
        if message != self._told_error:
            self._told_error = message
            logger.warning("%s; tried again every second", message)

    # -- being a member -----------------------------------------------------------------------------------------------

    async def _join(self, address: str) -> None:
        """Be a member of the registry at an address, until that ends by an error."""
        try:
            host, port = host_and_port(address)
        except ValueError as error:
            raise LinkError(str(error)) from None
        async with asyncio.timeout(CONNECT_S_MAX):
            context = None if self._certificates is None else self._certificates.for_server()
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
        here = writer.get_extra_info("sockname")[0]
        reporting: asyncio.Task[None] | None = None
        try:
            writer.write(_packed("AUTH", self._token))
            reporting = asyncio.create_task(self._keep_reporting(writer, self._advertised.host or here))
            await self._listen(reader, address)
        finally:
            if self._is_joined:
                logger.warning("the registry at %s is gone; answering on", address)
            self._is_joined = False
            self._moved.set()
            if reporting is not None:
                reporting.cancel()
            writer.close()

    async def _keep_reporting(self, writer: asyncio.StreamWriter, host: str) -> None:
        """Report what is new at once, and that this server lives all the time."""
        with suppress(OSError):
            while True:
                self._wake.clear()
                writer.write(_packed("REPORT", self._report(host).to_json()))
                await writer.drain()
                await asyncio.sleep(REPORT_GAP_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), REPORT_EVERY_S)

    def _report(self, host: str) -> Report:
        return Report(
            self._id,
            host,
            self._advertised.port,
            self._wants_nothing,
            self._followers.have_room,
            -1 if self._shown is None else self._shown.version,
            self._followers.held,
            self._followers.visible,
            self._advertised.zone,
            self._advertised.driver,
        )

    async def _listen(self, reader: asyncio.StreamReader, address: str) -> NoReturn:
        replies = hiredis.Reader(notEnoughData=Ellipsis)
        while True:
            data = await _read(reader)
            if not data:
                raise EOFError("it closed the connection")
            replies.feed(data)
            while (reply := replies.gets()) is not Ellipsis:
                if isinstance(reply, hiredis.ReplyError):
                    raise LinkError(f"it says {reply}")
                if isinstance(reply, hiredis.PushNotification):
                    self._take(reply, address)

    def _take(self, push: Sequence[Any], address: str) -> None:
        match push:
            case [b"assignment", int(term), bytes(text)]:
                if term < self._term:
                    raise LinkError(f"its term is {term}, and there was one of term {self._term}")
                if not self._is_joined:
                    logger.info("joined the registry at %s, term %d", address, term)
                self._term, self._last, self._is_joined, self._told_error = term, address, True, ""
                try:
                    told = json.loads(text)
                    self._assign(Topology.of_json(told["topology"]), KeyGroups.parse(told["wanted"]))
                except (ValueError, KeyError, TypeError, TopologyError, KeyGroupsError) as error:
                    logger.error("what the registry assigns cannot be: %s", error)
            case [b"notice", bytes(job), int(_)]:
                self._notice(job.decode())
            case [b"end"] if self._on_end is not None:
                self._on_end()

    def _notice(self, job: str) -> None:
        """Have a job's log looked at. That may take long where storage hangs: once at a time, and nobody waits."""
        under_way = self._notices.get(job)
        if under_way is None or under_way.done():
            self._notices[job] = asyncio.create_task(self._followers.notice(job))

    def _assign(self, topology: Topology, wanted: KeyGroups) -> None:
        self._membership.take(topology, self._id)
        self._shown = topology
        if wanted != self._wanted:
            self._wanted = wanted
            self._on_wanted(wanted)
            self._followers.want(wanted)
        self._wake.set()
        self._moved.set()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return what comes next; TimeoutError where a registry is silent."""
    for _ in range(SILENT_LOOKS):
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S / SILENT_LOOKS):
                return await reader.read(READ_BYTES)
    raise TimeoutError


def _packed(*words: str) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # its stub has a tuple of one word
    return packed


def _read_records(logs: Sequence[Filesystem]) -> list[Record]:
    """Return the records of log roots, that of the highest term first."""
    found = []
    for log in logs:
        try:
            record = read_record(log)
        except SparkisError as error:
            logger.warning("%s", error)
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda record: -record.term)
