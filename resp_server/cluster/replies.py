"""The replies of CLUSTER, in the shapes of Redis 7, made from a `NodeView`. Pure.

There is no gossip: fields that only gossip fills (pings, messages, offsets) are zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from resp_server.cluster.node_view import NodeView
from resp_server.cluster.topology import Health, Node
from resp_server.protocol.replies import Reply

# Standard: the distance of Redis' cluster bus port from the client port. No bus port is open here.
BUS_PORT_OFFSET = 10_000


def slots(view: NodeView) -> Reply:
    """Return CLUSTER SLOTS: the ranges in order, each with its owner and the replicas that can answer."""
    topology = view.topology
    rows = [(first, last, node) for node in topology.masters for first, last in node.slots.ranges]
    return [
        [first, last, *(_endpoint(each) for each in (node, *_online(topology.replicas(node))))]
        for first, last, node in sorted(rows, key=lambda row: row[0])
    ]


def _online(nodes: Iterator[Node]) -> Iterator[Node]:
    return (node for node in nodes if node.health is Health.ONLINE)


def _endpoint(node: Node) -> Reply:
    return [node.host.encode(), node.port, node.id.encode(), {}]


def shards(view: NodeView) -> Reply:
    """Return CLUSTER SHARDS: each master's slots, and the master with its replicas."""
    topology = view.topology
    return [
        {
            b"slots": [end for bounds in master.slots.ranges for end in bounds],
            b"nodes": [_shard_node(each) for each in (master, *topology.replicas(master))],
        }
        for master in topology.masters
    ]


def _shard_node(node: Node) -> Reply:
    return {
        b"id": node.id.encode(),
        b"port": node.port,
        b"ip": node.host.encode(),
        b"endpoint": node.host.encode(),
        b"role": b"replica" if node.is_replica else b"master",
        b"replication-offset": 0,
        b"health": node.health.encode(),
    }


def shard_id(view: NodeView) -> str:
    """Return CLUSTER MYSHARDID: the id that a master and its replicas share."""
    return hashlib.sha1(f"shard of {view.master.id}".encode(), usedforsecurity=False).hexdigest()


def nodes(view: NodeView) -> str:
    """Return CLUSTER NODES: a line for each node."""
    return "".join(f"{node_line(view, node)}\n" for node in view.topology.nodes)


def node_line(view: NodeView, node: Node) -> str:
    """Return the line of CLUSTER NODES for one node."""
    has_failed = node.health is Health.FAIL
    flags = ["myself"] * (node is view.myself) + ["slave" if node.is_replica else "master"] + ["fail"] * has_failed
    words = [
        node.id,
        f"{node.address}@{node.port + BUS_PORT_OFFSET}",
        ",".join(flags),
        node.replica_of or "-",
        "0 0",
        str(view.topology.version),
        "disconnected" if has_failed and node is not view.myself else "connected",
        *(str(first) if first == last else f"{first}-{last}" for first, last in node.slots.ranges),
    ]
    return " ".join(words)


def info(view: NodeView) -> str:
    """Return CLUSTER INFO. The cluster is ok as long as some slots can be answered: a failed slot affects no other."""
    masters = view.topology.masters
    assigned = sum(len(node.slots) for node in masters)
    failed = sum(len(node.slots) for node in masters if node.health is Health.FAIL)
    facts = {
        "cluster_state": "ok" if assigned > failed else "fail",
        "cluster_slots_assigned": assigned,
        "cluster_slots_ok": assigned - failed,
        "cluster_slots_pfail": 0,
        "cluster_slots_fail": failed,
        "cluster_known_nodes": len(view.topology.nodes),
        "cluster_size": sum(1 for node in masters if node.slots),
        "cluster_current_epoch": view.topology.version,
        "cluster_my_epoch": view.topology.version,
        "cluster_stats_messages_sent": 0,
        "cluster_stats_messages_received": 0,
        "total_cluster_links_buffer_limit_exceeded": 0,
    }
    return "".join(f"{name}:{value}\r\n" for name, value in facts.items())
