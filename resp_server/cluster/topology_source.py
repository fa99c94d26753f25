"""Which topology a server shows, and where it learns of a new one: a file that is read again, or whoever tells it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from resp_server.cluster.topology import Topology, TopologyError

logger = logging.getLogger("sparkis.server")

FILE_BYTES_MAX = 1 << 20
# How long a new content of the file goes unseen (guess: a person who wrote it looks next).
LOOK_EVERY_S = 0.5


class ShowsTopology(Protocol):
    """Whoever answers clients: this process, or worker processes."""

    def show_topology(self, topology: Topology, node_id: str) -> None:
        """Answer as this node of this topology from now on. The node is one of it."""


class TakesTopology(Protocol):
    """Whoever a topology is read for."""

    def take(self, topology: Topology, name: str) -> None:
        """Take it as its node of an id or an address; TopologyError, and then what was shown is kept."""


class TopologySource:
    """The topology that is shown. Runs on the event loop's thread."""

    def __init__(self, server: ShowsTopology) -> None:
        self._server = server
        self._topology: Topology | None = None
        self._node_id = ""

    def take(self, topology: Topology, name: str) -> None:
        """Show a topology as its node of an id or an address; TopologyError, and then what was shown is kept."""
        node = topology.node(name)
        shown = self._topology
        if shown is not None:
            if (topology, node.id) == (shown, self._node_id):
                return
            if topology.version <= shown.version:
                raise TopologyError(
                    f"version {topology.version} of the topology is not shown: version {shown.version} is, with "
                    "another content; give a new one a higher version"
                )
        self._server.show_topology(topology, node.id)
        self._topology, self._node_id = topology, node.id
        logger.info("node %s (%s) of version %d of the topology", node.address, node.id, topology.version)


class TopologyFile:
    """A file with a topology in JSON, which holds for the node of an id or an address."""

    def __init__(self, path: Path, name: str, membership: TakesTopology) -> None:
        self._path = path
        self._name = name
        self._membership = membership
        self._seen: bytes | str | None = "not read yet"

    def read(self) -> None:
        """Show what the file says; TopologyError if that cannot be."""
        try:
            with self._path.open("rb") as file:
                text = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            text, reason = None, error.strerror
        if text == self._seen:
            return
        self._seen = text
        try:
            if text is None:
                raise TopologyError(f"it cannot be read: {reason}")
            if len(text) > FILE_BYTES_MAX:
                raise TopologyError(f"it is larger than {FILE_BYTES_MAX} bytes")
            self._membership.take(Topology.parse(text), self._name)
        except TopologyError as error:
            raise TopologyError(f"--cluster {self._path}: {error}") from None

    async def follow(self) -> None:
        """Read the file again and again; what is wrong with a new content is logged, and the one before stays."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self.read()
            except TopologyError as error:
                logger.error("%s; what was shown before is kept", error)
