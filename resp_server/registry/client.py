"""A state server's client of its registry: sends reports, carries out directives.

Without a registry the server keeps its slots and topology. Once a second it tries the configured address, the last one,
and those in the records under its log roots (`registry.json`). It never follows a registry of a lower term than the
last one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import hiredis

from resp_server.cluster.topology import Health, Topology, TopologyError
from resp_server.cluster.topology_source import TakeTopology
from resp_server.net.addresses import host_and_port
from resp_server.net.client import pack_request
from resp_server.net.tls import Certificates, reason_of
from resp_server.protocol.errors import WrongLogError
from resp_server.registry.registry_file import RegistryFile, read_registry_file
from resp_server.registry.report import Report
from resp_server.serving.appliers import Appliers
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import SlotSetError, SparkisError
from state_backend.model.slot_set import NONE, SlotSet

logger = logging.getLogger("sparkis.server")

REPORT_EVERY_S = 0.25
# Changes within this time make one report.
REPORT_GAP_S = 0.02
# A registry replies to each report. A registry that is silent for this long counts as lost. The wait has this many
# parts, so that a pause of this process costs one part, not the connection.
SILENT_S = 2.0
SILENT_CHECKS = 8
CONNECT_S_MAX = 1.0
SEARCH_EVERY_S = 1.0
# The longest wait for the records: the storage of a log may hang.
STORAGE_S_MAX = 2.0
READ_BYTES = 64 << 10


class RegistryClientError(SparkisError):
    """The registry refused a request, or its term is too low."""


class _WrongLogError(RegistryClientError):
    """The registry refused this server, because it serves another log."""


@dataclass(frozen=True)
class AdvertisedAddress:
    """The address for clients, and facts about the server. host None: the local end of the registry connection.

    Args:
        zone: Servers of one zone may fail together; empty: the host is the zone.
        driver: The driver that may end this server; empty: none.
    """

    host: str | None
    port: int
    zone: str = ""
    driver: str = ""


class RegistryClient:
    """Keeps this server a member of a registry. Runs on the event loop's thread.

    `on_desired_slots` is called before the appliers get the slots. `on_end` is called when the driver ends its servers;
    None: this is ignored. `on_refused` is called when a registry refuses this server, because it serves another log: it
    must answer nothing until slots are desired again.

    Args:
        certificates: Then the registry has to speak TLS.
    """

    def __init__(
        self,
        member_id: str,
        advertised: AdvertisedAddress,
        take_topology: TakeTopology,
        appliers: Appliers,
        *,
        logs: Sequence[Filesystem],
        address: str | None,
        token: str,
        on_desired_slots: Callable[[SlotSet], None],
        on_end: Callable[[], None] | None = None,
        on_refused: Callable[[], None] = lambda: None,
        certificates: Certificates | None = None,
    ) -> None:
        self._id = member_id
        self._advertised = advertised
        self._take_topology = take_topology
        self._appliers = appliers
        self._logs = logs
        self._configured_address = address
        self._last_address: str | None = None
        self._token = token
        self._on_desired_slots = on_desired_slots
        self._on_end = on_end
        self._on_refused = on_refused
        self._is_refused = False
        self._certificates = certificates
        self._term = 0
        self._topology: Topology | None = None
        self._desired_slots: SlotSet | None = None
        self._is_draining = False
        self._is_joined = False
        self._wake = asyncio.Event()
        self._assigned = asyncio.Event()
        self._reading: asyncio.Future[list[RegistryFile]] | None = None
        self._logged_error = ""

    def report_soon(self) -> None:
        """Send a report soon: owned slots, topology or epochs have changed."""
        self._wake.set()

    async def run(self) -> NoReturn:
        """Find a registry, stay its member, find the next one, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            records = await self._records()
            for address in self._addresses(records):
                try:
                    await self._serve_registry(address)
                except _WrongLogError as error:
                    self._refuse(address, error)
                except (OSError, TimeoutError, EOFError, RegistryClientError, hiredis.ProtocolError) as error:
                    self._log_once(f"no registry at {address}: {reason_of(error) or 'it does not reply'}")
                except Exception:  # a bug; the server must still find a registry
                    logger.exception("internal error in the client of the registry at %s", address)
            if not self._addresses(records):
                self._log_once("no registry is known; looking for registry.json in the log")
            self._serve_from_record(records)
            await asyncio.sleep(max(0.0, started_s + SEARCH_EVERY_S - loop.time()))

    async def drain(self, seconds_max: float) -> None:
        """Hand this server's slots over to other servers; return when they own them, or at once if there are none."""
        self._is_draining = True
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds_max):
                while self._is_needed():
                    self._assigned.clear()
                    await self._assigned.wait()

    def _is_needed(self) -> bool:
        """Return whether this server has slots in the topology, or other servers may still redirect clients to it."""
        if not self._is_joined or self._topology is None:
            return False
        others = [node for node in self._topology.nodes if node.id != self._id and node.health is not Health.FAIL]
        return bool(others) and bool(self._desired_slots or self._topology.node(self._id).slots)

    # -- finding a registry -------------------------------------------------------------------------------------------

    async def _records(self) -> list[RegistryFile]:
        """Return the records in the logs, the newest first; none if the storage is too slow."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(_read_records, self._logs))
        done, _ = await asyncio.wait([self._reading], timeout=STORAGE_S_MAX)
        if not done:
            return []
        records, self._reading = self._reading.result(), None
        return records

    def _addresses(self, records: Sequence[RegistryFile]) -> list[str]:
        """Return the addresses to try, the likeliest first."""
        found = [record.address for record in records if record.term >= self._term]
        return list(dict.fromkeys([*found, *(each for each in (self._configured_address, self._last_address) if each)]))

    def _serve_from_record(self, records: Sequence[RegistryFile]) -> None:
        """After a restart without a reachable registry: serve the topology of the last registry's record."""
        if self._is_refused:
            return
        for record in records:
            topology = record.topology
            if self._desired_slots is not None or topology is None:
                return
            with suppress(TopologyError):
                node = topology.node(self._id)
                logger.warning("no registry can be reached; serving as version %d of the topology", topology.version)
                self._assign(topology, topology.master_of(node).slots)

    def _refuse(self, address: str, error: _WrongLogError) -> None:
        """Own no slots, and answer nothing: this server's stores belong to another log than its registry's."""
        if not self._is_refused:
            logger.error(
                "the registry at %s refuses this server: %s; it answers nothing, and asks again every second",
                address,
                error,
            )
        self._is_refused, self._desired_slots = True, None
        self._on_refused()
        self._appliers.set_desired_slots(NONE)

    def _log_once(self, message: str) -> None:
        """Log why there is no registry, each reason once."""
        if message != self._logged_error:
            self._logged_error = message
            logger.warning("%s; tried again every second", message)

    # -- membership ---------------------------------------------------------------------------------------------------

    async def _serve_registry(self, address: str) -> None:
        """Stay a member of the registry at an address until an error ends the connection."""
        try:
            host, port = host_and_port(address)
        except ValueError as error:
            raise RegistryClientError(str(error)) from None
        async with asyncio.timeout(CONNECT_S_MAX):
            context = None if self._certificates is None else self._certificates.for_server()
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
        here = writer.get_extra_info("sockname")[0]
        reporting: asyncio.Task[None] | None = None
        try:
            writer.write(pack_request("AUTH", self._token))
            reporting = asyncio.create_task(self._report_loop(writer, self._advertised.host or here))
            await self._read_pushes(reader, address)
        finally:
            if self._is_joined:
                logger.warning("lost the registry at %s; still serving clients", address)
            self._is_joined = False
            self._assigned.set()
            if reporting is not None:
                reporting.cancel()
            writer.close()

    async def _report_loop(self, writer: asyncio.StreamWriter, host: str) -> None:
        """Send a report after each change, and at least every `REPORT_EVERY_S` as a heartbeat."""
        with suppress(OSError):
            while True:
                self._wake.clear()
                writer.write(pack_request("REPORT", self._report(host).to_json()))
                await writer.drain()
                await asyncio.sleep(REPORT_GAP_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), REPORT_EVERY_S)

    def _report(self, host: str) -> Report:
        return Report(
            self._id,
            host,
            self._advertised.port,
            self._is_draining,
            self._appliers.has_room,
            -1 if self._topology is None else self._topology.version,
            self._appliers.owned_slots,
            self._appliers.visible,
            self._advertised.zone,
            self._advertised.driver,
            self._appliers.identities,
        )

    async def _read_pushes(self, reader: asyncio.StreamReader, address: str) -> NoReturn:
        replies = hiredis.Reader(notEnoughData=Ellipsis)
        while True:
            data = await _read(reader)
            if not data:
                raise EOFError("it closed the connection")
            replies.feed(data)
            while (reply := replies.gets()) is not Ellipsis:
                if isinstance(reply, hiredis.ReplyError):
                    if (code := str(reply).partition(" "))[0] == WrongLogError.code:
                        raise _WrongLogError(code[2])
                    raise RegistryClientError(f"it refused: {reply}")
                if isinstance(reply, hiredis.PushNotification):
                    self._handle_push(reply, address)

    def _handle_push(self, push: Sequence[Any], address: str) -> None:
        match push:
            case [b"assignment", int(term), bytes(text)]:
                if term < self._term:
                    raise RegistryClientError(f"its term is {term}, below term {self._term} of an earlier registry")
                if not self._is_joined:
                    logger.info("joined the registry at %s, term %d", address, term)
                self._is_refused = False
                self._term, self._last_address, self._is_joined, self._logged_error = term, address, True, ""
                try:
                    directive = json.loads(text)
                    self._assign(Topology.of_json(directive["topology"]), SlotSet.parse(directive["desired_slots"]))
                except (ValueError, KeyError, TypeError, TopologyError, SlotSetError) as error:
                    logger.error("the registry's assignment is invalid and not carried out: %s", error)
            case [b"notice", bytes(job), int(epoch), *term]:
                self._appliers.notice_soon(job.decode(), epoch, *term[:1])
            case [b"end"] if self._on_end is not None:
                self._on_end()

    def _assign(self, topology: Topology, desired_slots: SlotSet) -> None:
        self._take_topology(topology, self._id)
        self._topology = topology
        if desired_slots != self._desired_slots:
            self._desired_slots = desired_slots
            self._on_desired_slots(desired_slots)
            self._appliers.set_desired_slots(desired_slots)
        self._wake.set()
        self._assigned.set()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the next bytes; TimeoutError if the registry is silent for `SILENT_S`."""
    for _ in range(SILENT_CHECKS):
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S / SILENT_CHECKS):
                return await reader.read(READ_BYTES)
    raise TimeoutError


def _read_records(logs: Sequence[Filesystem]) -> list[RegistryFile]:
    """Return the records of log roots, the highest term first."""
    found = []
    for log in logs:
        try:
            record = read_registry_file(log)
        except SparkisError as error:
            logger.warning("%s", error)
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda record: -record.term)
