"""The topology: the nodes of a cluster and the slots that each owns, a value that is read from JSON and checked.

    {"version": 1, "nodes": [
        {"host": "10.0.0.1", "port": 7379, "slots": "0-8191"},
        {"host": "10.0.0.2", "port": 7379, "slots": "8192-16383"},
        {"host": "10.0.0.3", "port": 7379, "replica_of": "10.0.0.1:7379"}]}

`host` and `port` are the address that clients connect to; a server may listen on another one. `id` is optional, 40 hex
digits as in Redis; by default it is derived from the address. `replica_of` names another node by its id or address.
`health` is `online` by default. `zone` is optional; servers of one zone may be lost together. Slots without an
owner are allowed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from ipaddress import ip_address
from typing import Any

from resp_server.net.addresses import PORT_MAX, address_of
from state_backend.model.errors import SlotSetError, SparkisError
from state_backend.model.slot_set import NONE, SlotSet

# Standard: the largest cluster that Redis recommends.
NODES_MAX = 1000

NODE_ID = re.compile(r"[0-9a-f]{40}")
# RFC 1123, and underscores, which container names have.
HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")


class TopologyError(SparkisError):
    """A topology that is invalid, or that this server cannot serve."""


class Health(StrEnum):
    """A node's health, in the words of CLUSTER SHARDS."""

    ONLINE = "online"
    LOADING = "loading"
    FAIL = "fail"


@dataclass(frozen=True)
class Node:
    """One server as clients see it. A replica has no slots of its own: it answers for its master's slots."""

    id: str
    host: str
    port: int
    slots: SlotSet = NONE
    replica_of: str | None = None
    health: Health = Health.ONLINE
    zone: str = ""

    @property
    def address(self) -> str:
        """The address that clients connect to, `host:port` as in MOVED."""
        return f"{self.host}:{self.port}"

    @property
    def is_replica(self) -> bool:
        """Return whether the node is a replica."""
        return self.replica_of is not None


@dataclass(frozen=True)
class Topology:
    """All nodes, in their order in the JSON. A higher version replaces a lower one. Made by `of_json` or `parse`."""

    version: int
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        self._check_names()
        for node in self.nodes:
            self._check_master(node)
        self._check_owners()

    @classmethod
    def parse(cls, text: str | bytes) -> Topology:
        """Read a topology from a JSON text; TopologyError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise TopologyError(f"the topology is not JSON: {error}") from None
        return cls.of_json(data)

    @classmethod
    def of_json(cls, data: Any) -> Topology:
        """Read a topology from decoded JSON; TopologyError."""
        version, rows = _fields("the topology", data, {"version": int, "nodes": list}, {})
        if version < 0:
            raise TopologyError(f"the topology's version is {version}; give a number from 0 on")
        if not 1 <= len(rows) <= NODES_MAX:
            raise TopologyError(f"the topology has {len(rows)} nodes; give 1 to {NODES_MAX}")
        nodes = [_node(number, row) for number, row in enumerate(rows, 1)]
        ids = {name: node.id for node in nodes for name in (node.address, address_of(node.host, node.port))}
        return cls(version, tuple(_with_master_id(node, ids) for node in nodes))

    def to_json(self) -> dict[str, Any]:
        """Return the value that `of_json` reads."""
        return {"version": self.version, "nodes": [_row(node) for node in self.nodes]}

    def node(self, name: str) -> Node:
        """Return the node with an id or an address, `host:port` or `[host]:port`; TopologyError if there is none."""
        for node in self.nodes:
            if name in (node.id, node.address, address_of(node.host, node.port)):
                return node
        addresses = ", ".join(node.address for node in self.nodes[:5])
        raise TopologyError(
            f"no node {name!r} in version {self.version} of the topology; its nodes include {addresses}"
        )

    @cached_property
    def by_id(self) -> Mapping[str, Node]:
        """The nodes by their ids."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def masters(self) -> tuple[Node, ...]:
        """The nodes that are not replicas."""
        return tuple(node for node in self.nodes if not node.is_replica)

    @cached_property
    def owners(self) -> Mapping[int, Node]:
        """Each slot's owner; a slot without an owner is missing."""
        found: dict[int, Node] = {}
        for node in self.masters:
            found.update(dict.fromkeys(node.slots, node))
        return found

    def replicas(self, master: Node) -> Iterator[Node]:
        """Iterate over the replicas of a master."""
        return (node for node in self.nodes if node.replica_of == master.id)

    def master_of(self, node: Node) -> Node:
        """Return a replica's master; a master itself."""
        return node if node.replica_of is None else self.by_id[node.replica_of]

    def _check_names(self) -> None:
        for field, names in (
            ("id", [node.id for node in self.nodes]),
            ("address", [node.address for node in self.nodes]),
        ):
            name, count = Counter(names).most_common(1)[0]
            if count > 1:
                raise TopologyError(f"{count} nodes have the {field} {name}; give each its own")

    def _check_master(self, node: Node) -> None:
        if node.replica_of is None:
            return
        master = self.by_id.get(node.replica_of)
        if master is None:
            raise TopologyError(
                f"node {node.address} is a replica of {node.replica_of}, which is not the id or address of a node"
            )
        if master.is_replica:
            raise TopologyError(f"node {node.address} is a replica of {master.address}, which is a replica itself")
        if node.slots:
            raise TopologyError(
                f"node {node.address} is a replica and has slots {node.slots}; a replica has the slots of its master"
            )

    def _check_owners(self) -> None:
        assigned = NONE
        for node in self.masters:
            if node.slots & assigned:
                other = next(master for master in self.masters if master is not node and master.slots & node.slots)
                raise TopologyError(
                    f"slots {node.slots & other.slots} have two owners: {other.address} and {node.address}"
                )
            assigned |= node.slots


def _fields(subject: str, data: Any, required: Mapping[str, type], optional: Mapping[str, type]) -> list[Any]:
    """Return the fields of a JSON object, the required ones first; None for a missing optional one; TopologyError."""
    if not isinstance(data, dict):
        raise TopologyError(f"{subject} is not a JSON object but {data!r:.80}")
    kinds = {**required, **optional}
    unknown = data.keys() - kinds.keys()
    if unknown:
        raise TopologyError(f"{subject} has an unknown field {min(unknown)!r}; the fields are {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name in data and type(data[name]) is not kind:
            raise TopologyError(f"{subject}: {name} is {data[name]!r:.80}, not of type {kind.__name__}")
        if name in required and name not in data:
            raise TopologyError(f"{subject} has no field {name!r}")
    return [data.get(name) for name in kinds]


def _node(number: int, row: Any) -> Node:
    subject = f"node {number}"
    host, port, node_id, slots, replica_of, health, zone = _fields(
        subject,
        row,
        {"host": str, "port": int},
        {"id": str, "slots": str, "replica_of": str, "health": str, "zone": str},
    )
    _check_host(subject, host)
    if not 1 <= port <= PORT_MAX:
        raise TopologyError(f"{subject}: port {port} is not from 1 to {PORT_MAX}")
    if node_id is None:
        node_id = hashlib.sha1(f"{host}:{port}".encode(), usedforsecurity=False).hexdigest()
    elif not NODE_ID.fullmatch(node_id):
        raise TopologyError(
            f"{subject}: id {node_id!r:.80} is not 40 hex digits in lower case; leave it out to use a derived id"
        )
    if health is not None and health not in list(Health):
        raise TopologyError(f"{subject}: health {health!r:.80} is not one of {', '.join(Health)}")
    try:
        groups = SlotSet.parse(slots or "")
    except SlotSetError as error:
        raise TopologyError(f"{subject}: {error}") from None
    return Node(node_id, host, port, groups, replica_of, Health(health or Health.ONLINE), zone or "")


def _check_host(subject: str, host: str) -> None:
    """Refuse a host that no client can connect to. Other characters would also break the lines of CLUSTER NODES."""
    try:
        address = ip_address(host)
    except ValueError:
        # A malformed IPv4 address is no host name either.
        if HOST_NAME.fullmatch(host) and not re.fullmatch(r"[0-9.]+", host):
            return
        raise TopologyError(f"{subject}: host {host!r:.80} is neither an IP address nor a host name") from None
    if address.is_unspecified:
        raise TopologyError(f"{subject}: host {host} is a wildcard address; give the address that clients connect to")


def _with_master_id(node: Node, ids: Mapping[str, str]) -> Node:
    if node.replica_of is None or node.replica_of not in ids:
        return node
    return replace(node, replica_of=ids[node.replica_of])


def _row(node: Node) -> dict[str, Any]:
    row: dict[str, Any] = {"id": node.id, "host": node.host, "port": node.port}
    if node.slots:
        row["slots"] = str(node.slots)
    if node.replica_of is not None:
        row["replica_of"] = node.replica_of
    if node.health is not Health.ONLINE:
        row["health"] = str(node.health)
    if node.zone:
        row["zone"] = node.zone
    return row
