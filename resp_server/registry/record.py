"""What a registry writes down under the log's root, so that servers find it, and so that another one can go on from it.

    registry.json   {"term": 3, "address": "10.0.0.1:7377", "replicas": 1, "topology": {...} or null}

Of two registries the one of the lower term ends when it sees the other's record. Two of one term (both began at once)
tell each other apart by their addresses. Reading and writing may take long: not for the event loop's thread.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from resp_server.cluster.topology import Topology, TopologyError
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import LogCorruptError, SparkisError

logger = logging.getLogger("sparkis.registry")

FILE = "registry.json"


class FencedError(SparkisError):
    """Another registry has taken this one's place."""


@dataclass(frozen=True)
class Record:
    """One content of the file."""

    term: int
    address: str
    replicas: int
    topology: Topology | None = None

    @classmethod
    def parse(cls, stored: bytes, where: str) -> Record:
        """Read a content; LogCorruptError."""
        try:
            given: Any = json.loads(stored)
            topology = None if given["topology"] is None else Topology.of_json(given["topology"])
            return cls(int(given["term"]), str(given["address"]), int(given["replicas"]), topology)
        except (ValueError, KeyError, TypeError, TopologyError) as error:
            raise LogCorruptError(
                f"{where} is not what a registry wrote ({error}); remove it, and a registry makes it anew"
            ) from None

    def to_bytes(self) -> bytes:
        """Return what `parse` reads."""
        topology = None if self.topology is None else self.topology.to_json()
        given = {"term": self.term, "address": self.address, "replicas": self.replicas, "topology": topology}
        return json.dumps(given, indent=1).encode() + b"\n"


def read_record(filesystem: Filesystem) -> Record | None:
    """Return what is written down, or None if nothing is; LogUnavailableError, LogCorruptError."""
    stored = filesystem.read(FILE)
    return None if stored is None else Record.parse(stored, f"{filesystem.root}/{FILE}")


class Place:
    """A registry's right to be the one of its log: taken at the start, kept by looking at the file."""

    def __init__(self, filesystem: Filesystem, mine: Record) -> None:
        self._filesystem = filesystem
        self._mine = mine

    @classmethod
    def take(cls, filesystem: Filesystem, address: str, replicas: int) -> Place:
        """Take the next term and write it down; LogUnavailableError. A file that is of no use is written anew."""
        try:
            before = read_record(filesystem)
        except LogCorruptError as error:
            logger.error("%s", error)
            before = None
        topology = None if before is None else before.topology
        place = cls(filesystem, Record(1 if before is None else before.term + 1, address, replicas, topology))
        place._write()
        return place

    @property
    def record(self) -> Record:
        """What is to be written down now."""
        return self._mine

    def keep(self, topology: Topology | None) -> None:
        """Write a topology down if it is not; FencedError if the file is another registry's, LogUnavailableError."""
        try:
            found = read_record(self._filesystem)
        except LogCorruptError as error:
            logger.error("%s", error)
            found = None
        mine = self._mine
        if found is not None and (
            found.term > mine.term or (found.term == mine.term and found.address != mine.address)
        ):
            raise FencedError(
                f"another registry, at {found.address}, has taken over with term {found.term}; this one has {mine.term}"
            )
        self._mine = replace(mine, topology=topology)
        if found != self._mine:
            self._write()

    def _write(self) -> None:
        self._filesystem.replace(FILE, self._mine.to_bytes())
