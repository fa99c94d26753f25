"""The record of a registry under the log's root: servers find the registry by it, and the next registry starts from it.

    registry.json   {"format": 1, "sparkis": "0.1.0", "term": 3, "address": "10.0.0.1:7377", "replicas": 1,
                     "topology": {...} or null, "checksum": ...}

Of two registries the one of the lower term ends when it reads the other's record. Two of the same term, which started
together, differ in their addresses. Reading and writing may take long: never on the event loop's thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from resp_server.cluster.topology import Topology, TopologyError
from state_backend.log.checked_json import checked_object, with_checksum
from state_backend.log.filesystems import Filesystem
from state_backend.model.errors import LogCorruptError, NewerFormatError, SparkisError
from state_backend.model.formats import WRITER, check_format

logger = logging.getLogger("sparkis.registry")

RECORD_FILE = "registry.json"
FORMAT = 1


class FencedError(SparkisError):
    """Another registry has taken over."""


@dataclass(frozen=True)
class RegistryFile:
    """The content of `registry.json`."""

    term: int
    address: str
    replicas: int
    topology: Topology | None = None

    @classmethod
    def parse(cls, stored: bytes, where: str) -> RegistryFile:
        """Read a record; LogCorruptError, NewerFormatError."""
        try:
            fields = checked_object(stored)
            check_format(fields, FORMAT, where)
            topology = None if fields["topology"] is None else Topology.of_json(fields["topology"])
            return cls(int(fields["term"]), str(fields["address"]), int(fields["replicas"]), topology)
        except (ValueError, KeyError, TypeError, AttributeError, TopologyError) as error:
            raise LogCorruptError(
                f"{where} is not a registry's record ({error}); remove it: a registry writes a new one"
            ) from None

    def to_bytes(self) -> bytes:
        """Return the JSON that `parse` reads."""
        topology = None if self.topology is None else self.topology.to_json()
        fields = {"term": self.term, "address": self.address, "replicas": self.replicas, "topology": topology}
        return with_checksum({"format": FORMAT, **WRITER, **fields}, indent=1)


def read_registry_file(filesystem: Filesystem) -> RegistryFile | None:
    """Return the record, None if there is none; LogUnavailableError, LogCorruptError, NewerFormatError."""
    stored = filesystem.read(RECORD_FILE)
    return None if stored is None else RegistryFile.parse(stored, f"{filesystem.root}/{RECORD_FILE}")


class RegistryLease:
    """A registry's right to be the only one of its log: acquired at the start, renewed by reading the record again."""

    def __init__(self, filesystem: Filesystem, own: RegistryFile) -> None:
        self._filesystem = filesystem
        self._own = own

    @classmethod
    def acquire(cls, filesystem: Filesystem, address: str, replicas: int) -> RegistryLease:
        """Take the next term and store it; LogUnavailableError, NewerFormatError. A corrupt record is replaced."""
        try:
            before = read_registry_file(filesystem)
        except LogCorruptError as error:
            logger.error("%s", error)
            before = None
        topology = None if before is None else before.topology
        lease = cls(filesystem, RegistryFile(1 if before is None else before.term + 1, address, replicas, topology))
        lease._write()
        return lease

    @property
    def filesystem(self) -> Filesystem:
        """The log's root."""
        return self._filesystem

    @property
    def record(self) -> RegistryFile:
        """This registry's record, stored or about to be."""
        return self._own

    def renew(self, topology: Topology | None) -> None:
        """Store a topology if it is new; FencedError if the record is another registry's, LogUnavailableError."""
        try:
            found = read_registry_file(self._filesystem)
        except NewerFormatError as error:
            raise FencedError(f"a newer registry has taken over: {error}") from None
        except LogCorruptError as error:
            logger.error("%s", error)
            found = None
        own = self._own
        if found is not None and (found.term > own.term or (found.term == own.term and found.address != own.address)):
            raise FencedError(
                f"another registry, at {found.address}, has taken over with term {found.term}; this one has {own.term}"
            )
        self._own = replace(own, topology=topology)
        if found != self._own:
            self._write()

    def _write(self) -> None:
        self._filesystem.replace(RECORD_FILE, self._own.to_bytes())
