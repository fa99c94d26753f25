"""The sources of a server's topology: a polled file, or the registry's client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from resp_server.cluster.topology import Topology, TopologyError

logger = logging.getLogger("sparkis.server")

FILE_BYTES_MAX = 1 << 20
# The interval of polling the file (guess: shorter than a person takes to check after writing it).
POLL_S = 0.5


# Serves a topology as the node with an id or an address; TopologyError: the current topology stays.
TakeTopology = Callable[[Topology, str], None]


class TopologySource:
    """The topology that a server serves. Runs on the event loop's thread.

    Args:
        set_topology: Has this process, or its workers, serve as a node of a topology, which has the node's id.
    """

    def __init__(self, set_topology: Callable[[Topology, str], None]) -> None:
        self._set_topology = set_topology
        self._topology: Topology | None = None
        self._node_id = ""

    def take(self, topology: Topology, name: str) -> None:
        """Serve a topology as the node with an id or an address; TopologyError: the current topology stays."""
        node = topology.node(name)
        current = self._topology
        if current is not None:
            if (topology, node.id) == (current, self._node_id):
                return
            if topology.version <= current.version:
                raise TopologyError(
                    f"version {topology.version} of the topology is refused: the current version is "
                    f"{current.version}, with other content; give a new topology a higher version"
                )
        self._set_topology(topology, node.id)
        self._topology, self._node_id = topology, node.id
        logger.info("node %s (%s) of version %d of the topology", node.address, node.id, topology.version)


class TopologyFile:
    """A file with a topology in JSON, for the node with an id or an address."""

    def __init__(self, path: Path, name: str, take: TakeTopology) -> None:
        self._path = path
        self._name = name
        self._take = take
        self._last_content: bytes | str | None = "not read yet"

    def read(self) -> None:
        """Pass the file's topology on if the file changed; TopologyError."""
        try:
            with self._path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            text, reason = None, error.strerror
        if text == self._last_content:
            return
        self._last_content = text
        try:
            if text is None:
                raise TopologyError(f"it cannot be read: {reason}")
            if len(text) > FILE_BYTES_MAX:
                raise TopologyError(f"it is larger than {FILE_BYTES_MAX} bytes")
            self._take(Topology.parse(text), self._name)
        except TopologyError as error:
            raise TopologyError(f"--cluster {self._path}: {error}") from None

    async def follow(self) -> None:
        """Poll the file; invalid content is logged, and the current topology stays."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self.read()
            except TopologyError as error:
                logger.error("%s; the current topology stays in use", error)
