"""A process that shows itself as the only node of a Redis Cluster, so that clients of a cluster need no change."""

from __future__ import annotations

from functools import lru_cache

from resp_server.cluster.node_view import NodeView
from resp_server.cluster.topology import Topology
from resp_server.net.addresses import host_and_port

# Addresses at which a process is reached.
ADDRESSES_MAX = 64


def single_node_topology(address: str) -> Topology:
    """Return the topology of one node with all slots."""
    host, port = host_and_port(address)
    return Topology.of_json({"version": 1, "nodes": [{"host": host, "port": port, "slots": "0-16383"}]})


@lru_cache(ADDRESSES_MAX)
def single_node(address: str) -> NodeView:
    """Return the view of a node with all slots, at the address that a client has connected to."""
    topology = single_node_topology(address)
    return NodeView(topology, topology.nodes[0].address)
