"""The sources of a state cluster's topology: a file, a registry, a registry's record under a log's root, or one server.

The proxy uses the newest topology, from a source or from a server. If a source fails, its last topology stays in use.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import hiredis

from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.cluster.single_node import single_node_topology
from resp_server.cluster.topology import Topology, TopologyError
from resp_server.cluster.topology_source import TopologyFile
from resp_server.net.addresses import address_of
from resp_server.net.tls import reason_of
from resp_server.raw_replies.reply_splitter import pack
from state_backend.apply.store_log import StoreLog
from state_backend.log.checked_json import checked_object
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.proxy")

# The interval of polling a log, and the pause before reconnecting to a registry.
POLL_S = 1.0
RECORD = "registry.json"
READ_BYTES_MAX = 64 << 10
# A topology of a thousand nodes takes some 200 KB.
REPLY_BYTES_MAX = 4 << 20
REACH_S_MAX = 5.0
# A registry replies to each WATCH. It gets one after a second of silence, and is lost after some seconds. The wait has
# parts, so that a pause of this process costs one part, not the connection.
SILENT_S = 1.0
SILENT_CHECKS_MAX = 4


class ProxyTopologySource(ABC):
    """The source of one state cluster's topology."""

    name: str
    cluster: StateCluster

    def begin(self) -> None:  # noqa: B027  (only a file is read before the start)
        """Read the source before the proxy serves clients; SparkisError if it cannot be read."""

    @abstractmethod
    async def follow(self) -> None:
        """Follow the source's changes until cancelled."""


class FileTopologySource(ProxyTopologySource):
    """A file with a topology."""

    def __init__(self, path: str) -> None:
        self.name = f"the topology {path}"
        self._file = TopologyFile(Path(path), "", self.take)

    def begin(self) -> None:
        self._file.read()

    async def follow(self) -> None:
        await self._file.follow()

    def take(self, topology: Topology, name: str) -> None:
        """Apply a topology; TopologyError if it is older than the current one."""
        current = self.cluster.slots
        if not self.cluster.apply_topology(topology, "the file") and topology.version < current.version:
            raise TopologyError(
                f"version {topology.version} of the topology is older than the servers' {current.version}"
            )


class ServerTopologySource(ProxyTopologySource):
    """A single server with all slots, at an address that does not change.

    Args:
        is_loaded: Set once the server has all jobs. An earlier list of jobs would be incomplete, and the missing jobs'
            keys would count as the upstream's.
    """

    def __init__(self, address: str, is_loaded: asyncio.Event) -> None:
        self.name = f"the server {address}"
        self._address = address
        self._is_loaded = is_loaded

    async def follow(self) -> None:
        await self._is_loaded.wait()
        self.cluster.apply_topology(single_node_topology(self._address), self.name)


class LogTopologySource(ProxyTopologySource):
    """A registry's record under a log's root; the registry itself need not run.

    The record of a leftover or a copy may have the addresses of servers that serve another log now. So servers have to
    report the identity of this log. It is read again while servers are refused: the log may have been begun anew.
    """

    def __init__(self, filesystem: Filesystem) -> None:
        self.name = f"the log {filesystem.root}"
        self._filesystem = filesystem
        self._seen: bytes | None = None
        self._problem = ""

    async def follow(self) -> None:
        while True:
            problem = ""
            try:
                stored = await asyncio.to_thread(self._filesystem.read, RECORD)
                if stored != self._seen or self.cluster.log is None or self.cluster.refused_logs:
                    self.cluster.log = await asyncio.to_thread(StoreLog.of_log, self._filesystem)
                if stored is not None and stored != self._seen:
                    self._seen = stored
                    self._take(stored)
            except SparkisError as error:
                problem = str(error)
            if problem and problem != self._problem:
                logger.error("%s; the current topology stays in use", problem)
            self._problem = problem
            await asyncio.sleep(POLL_S)

    def _take(self, stored: bytes) -> None:
        try:
            record = checked_object(stored)
            if record["topology"] is not None:  # None: no server has registered yet
                self.cluster.apply_topology(Topology.of_json(record["topology"]), RECORD, int(record["term"]))
        except (ValueError, KeyError, TypeError, TopologyError) as error:
            raise TopologyError(f"{self._filesystem.root}/{RECORD} is not a registry's record: {error}") from None


WATCH = pack((b"WATCH",))


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the next bytes of a registry; TimeoutError if it replies to no WATCH."""
    for _ in range(SILENT_CHECKS_MAX):
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S):
                return await reader.read(READ_BYTES_MAX)
        writer.write(WATCH)
    raise TimeoutError


class RegistryTopologySource(ProxyTopologySource):
    """A registry, which sends each new topology. A connection over which nothing comes is replaced."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.name = f"the registry {address_of(host, port)}"
        self._host, self._port = host, port
        self._token = token
        self._problem = ""

    async def follow(self) -> None:
        while True:
            try:
                await self._watch()
                problem = "it closed the connection"
            except (OSError, TimeoutError, hiredis.HiredisError, ValueError, TopologyError) as error:
                problem = reason_of(error) or "it does not reply"
            if problem != self._problem:
                logger.error("%s: %s; the current topology stays in use", self.name, problem)
            self._problem = problem
            await asyncio.sleep(POLL_S)

    async def _watch(self) -> None:
        async with asyncio.timeout(REACH_S_MAX):
            certificates = self.cluster.access.certificates
            context = None if certificates is None else certificates.for_server()
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        try:
            writer.write(pack((b"AUTH", self._token.encode())) + WATCH)
            replies = hiredis.Reader(encoding="utf-8")
            unread = 0
            while data := await _read(reader, writer):
                replies.feed(data)
                unread += len(data)
                while (reply := replies.gets()) is not False:
                    unread = 0
                    self._take(reply)
                if unread > REPLY_BYTES_MAX:
                    raise ValueError("it sends more than a topology")
        finally:
            writer.close()

    def _take(self, reply: object) -> None:
        match reply:
            case hiredis.ReplyError():
                raise ValueError(f"it replied {reply}")
            case ["topology", term, str(text)]:
                self._problem = ""
                self.cluster.apply_topology(Topology.parse(text), self.name, int(str(term)))
