"""A topology: its file, its errors, the replies of a node about it, and the redirects of clients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from resp_server.cluster import replies as texts
from resp_server.cluster.node_view import NodeView
from resp_server.cluster.topology import Topology, TopologyError
from resp_server.cluster.topology_source import TopologyFile, TopologySource
from resp_server.commands import command_table
from resp_server.protocol.errors import ReplyError

A, B, R = "10.0.0.1:7379", "b.example.org:7380", "10.0.0.1:7381"
ID = "0123456789abcdef0123456789abcdef01234567"
NODES: list[dict[str, Any]] = [
    {"id": ID, "host": "10.0.0.1", "port": 7379, "slots": "0-5000,5002"},
    {"host": "b.example.org", "port": 7380, "slots": "5001,8192-16383"},
    {"host": "10.0.0.1", "port": 7381, "replica_of": A},
]


def topology_of(version: int = 3, **of_first: Any) -> Topology:
    return Topology.of_json({"version": version, "nodes": [{**NODES[0], **of_first}, *NODES[1:]]})


def test_topology_round_trip() -> None:
    topology = topology_of()
    assert Topology.parse(json.dumps(topology.to_json())) == topology
    assert [node.address for node in topology.nodes] == [A, B, R]
    assert topology.node(R).replica_of == ID
    assert topology.node(topology.node(B).id) is topology.node(B)


def test_node_is_found_by_its_ipv6_address_with_brackets_or_without() -> None:
    nodes = [
        {"host": "2001:db8::12", "port": 7379, "slots": "0-16383"},
        {"host": "2001:db8::13", "port": 7379, "replica_of": "[2001:db8::12]:7379"},
        {"host": "2001:db8::14", "port": 7379, "replica_of": "2001:db8::12:7379"},
    ]
    topology = Topology.of_json({"version": 1, "nodes": nodes})
    master = topology.node("[2001:db8::12]:7379")
    assert master is topology.node("2001:db8::12:7379") is topology.nodes[0]
    assert {node.replica_of for node in topology.nodes[1:]} == {master.id}


def test_id_that_is_left_out_follows_from_address() -> None:
    ids = [node.id for node in topology_of().nodes]
    assert ids == [node.id for node in topology_of(version=9).nodes]
    assert len(set(ids)) == 3
    assert all(len(each) == 40 for each in ids)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"host": ""}, "node 1: host '' is neither"),
        ({"host": "a b"}, "node 1: host 'a b' is neither"),
        ({"host": "10.0.0.256"}, "node 1: host '10.0.0.256' is neither"),
        ({"host": "0.0.0.0"}, "node 1: host 0.0.0.0 is a wildcard address"),
        ({"host": 5}, "node 1: host is 5, not of type str"),
        ({"port": 0}, "node 1: port 0 is not from 1"),
        ({"port": True}, "node 1: port is True, not of type int"),
        ({"id": "x"}, "node 1: id 'x' is not 40 hex digits"),
        ({"slots": "0-16384"}, "node 1: 0-16384 is no range of slots"),
        ({"slots": "all"}, "node 1: 'all' in 'all' is no range"),
        ({"slots": "0-9000"}, "slots 5001,8192-9000 have two owners: 10.0.0.1:7379 and b.example.org:7380"),
        ({"health": "well"}, "node 1: health 'well' is not one of online, loading, fail"),
        ({"slot": "1"}, "node 1 has an unknown field 'slot'; the fields are host, port, id"),
        ({"port": 7381}, "2 nodes have the address 10.0.0.1:7381"),
        ({"replica_of": "nobody"}, "node 10.0.0.1:7379 is a replica of nobody, which is not the id"),
        ({"replica_of": B}, "node 10.0.0.1:7379 is a replica and has slots"),
        ({"replica_of": B, "slots": ""}, "node 10.0.0.1:7381 is a replica of 10.0.0.1:7379, which is a replica itself"),
    ],
)
def test_mistake_of_node_is_named(row: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(TopologyError) as found:
        topology_of(**row)
    assert complaint in str(found.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "the topology is not JSON"),
        ("[]", "the topology is not a JSON object but []"),
        ('{"version": 1}', "the topology has no field 'nodes'"),
        ('{"version": "1", "nodes": []}', "the topology: version is '1', not of type int"),
        ('{"version": -1, "nodes": []}', "the topology's version is -1"),
        ('{"version": 1, "nodes": []}', "the topology has 0 nodes"),
        ('{"version": 1, "nodes": [{"host": "a"}]}', "node 1 has no field 'port'"),
        ('{"version": 1, "nodes": ["a"]}', "node 1 is not a JSON object but 'a'"),
    ],
)
def test_mistake_of_text_is_named(text: str, complaint: str) -> None:
    with pytest.raises(TopologyError) as found:
        Topology.parse(text)
    assert complaint in str(found.value)


def test_nodes_are_listed_as_redis_lists_them() -> None:
    topology = topology_of(health="fail")
    (a, b, r) = (node.id for node in topology.nodes)
    assert texts.nodes(NodeView(topology, R)).splitlines() == [
        f"{a} 10.0.0.1:7379@17379 master,fail - 0 0 3 disconnected 0-5000 5002",
        f"{b} b.example.org:7380@17380 master - 0 0 3 connected 5001 8192-16383",
        f"{r} 10.0.0.1:7381@17381 myself,slave {a} 0 0 3 connected",
    ]


def test_slots_are_in_order_with_owner_before_its_replicas() -> None:
    topology = topology_of()
    ends = [[b"10.0.0.1", 7379], [b"b.example.org", 7380], [b"10.0.0.1", 7381]]
    a, b, r = ([*end, node.id.encode(), {}] for end, node in zip(ends, topology.nodes, strict=True))
    expected = [[0, 5000, a, r], [5001, 5001, b], [5002, 5002, a, r], [8192, 16383, b]]
    assert texts.slots(NodeView(topology, A)) == expected == texts.slots(NodeView(topology, B))


@pytest.mark.parametrize("health", ["loading", "fail"])
def test_replica_that_cannot_answer_is_no_endpoint(health: str) -> None:
    rows = [*NODES[:2], {**NODES[2], "health": health}]
    standing = NodeView(Topology.of_json({"version": 1, "nodes": rows}), A)
    assert [len(row) for row in texts.slots(standing)] == [3, 3, 3, 3]
    assert texts.shards(standing)[0][b"nodes"][1][b"health"] == health.encode()


def test_slots_of_failed_owner_are_counted_apart() -> None:
    lines = texts.info(NodeView(topology_of(health="fail"), B)).split("\r\n")
    assert lines[:5] == [
        "cluster_state:ok",
        "cluster_slots_assigned:13195",
        "cluster_slots_ok:8193",
        "cluster_slots_pfail:0",
        "cluster_slots_fail:5002",
    ]


def test_shard_has_one_id() -> None:
    ids = [texts.shard_id(NodeView(topology_of(), name)) for name in (A, B, R)]
    assert ids[0] == ids[2] != ids[1]


# Slots: foo 12182 (B's), bar 5061 (nobody's), {a} 15495 (B's), b 3300 (A's).
@pytest.mark.parametrize(
    ("name", "is_readonly", "request_sent", "expected"),
    [
        (A, False, b"GET b", None),
        (A, False, b"GET foo", "MOVED 12182 b.example.org:7380"),
        (A, False, b"GET bar", "CLUSTERDOWN Hash slot not served"),
        (A, False, b"MGET b foo", "CROSSSLOT Keys in request don't hash to the same slot"),
        (A, False, b"MGET foo b", "CROSSSLOT Keys in request don't hash to the same slot"),
        (A, False, b"MGET bar foo", "CLUSTERDOWN Hash slot not served"),
        (A, False, b"MGET {foo}1 {foo}2", "MOVED 12182 b.example.org:7380"),
        (A, False, b"MGET {b}1 {b}2", None),
        (A, False, b"STATE MGET b {b}1", None),
        (B, False, b"STATE MGET foo {a}", None),
        (A, False, b"STATE MGET b foo", "MOVED 12182 b.example.org:7380"),
        (A, False, b"STATE MGET bar foo", "CLUSTERDOWN Hash slot not served"),
        (R, True, b"STATE MGET b foo", "MOVED 12182 b.example.org:7380"),
        (A, False, b"SET foo 1", "MOVED 12182 b.example.org:7380"),
        (A, False, b"SET b 1", None),
        (A, False, b"PING foo", None),
        (A, True, b"GET foo", "MOVED 12182 b.example.org:7380"),
        (R, False, b"GET b", "MOVED 3300 10.0.0.1:7379"),
        (R, True, b"GET b", None),
        (R, True, b"SET b 1", "MOVED 3300 10.0.0.1:7379"),
        (R, True, b"GET foo", "MOVED 12182 b.example.org:7380"),
        (R, False, b"DBSIZE", None),
    ],
)
def test_clients_are_sent_to_owner(name: str, is_readonly: bool, request_sent: bytes, expected: str | None) -> None:
    request = request_sent.split()
    facts = command_table().find(request).facts
    standing = NodeView(topology_of(), name)
    if expected is None:
        standing.check(facts, request, is_readonly)
        return
    with pytest.raises(ReplyError) as found:
        standing.check(facts, request, is_readonly)
    assert found.value.line == expected.encode()


class Shown:
    """Whoever is told of topologies."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def set_topology(self, topology: Topology, node_id: str) -> None:
        assert topology.node(node_id).address == B
        self.versions.append(topology.version)


def test_only_higher_topology_version_is_applied() -> None:
    shown = Shown()
    membership = TopologySource(shown.set_topology)
    membership.take(topology_of(3), B)
    membership.take(topology_of(3), B)
    for version in (2, 3):
        with pytest.raises(
            TopologyError, match=f"version {version} of the topology is refused: the current version is 3"
        ):
            membership.take(topology_of(version, slots="0-10"), B)
    membership.take(topology_of(4, slots="0-10"), B)
    with pytest.raises(TopologyError, match="no node 'nobody' in version 5"):
        membership.take(topology_of(5), "nobody")
    assert shown.versions == [3, 4]


def test_wrong_topology_file_is_refused(tmp_path: Path) -> None:
    shown, path = Shown(), tmp_path / "cluster.json"
    file = TopologyFile(path, B, TopologySource(shown.set_topology).take)
    with pytest.raises(TopologyError, match=r"cluster\.json: it cannot be read: No such file"):
        file.read()
    file.read()  # said once
    path.write_text(json.dumps(topology_of(1).to_json()))
    file.read()
    path.write_text("{")
    with pytest.raises(TopologyError, match=r"cluster\.json: the topology is not JSON"):
        file.read()
    path.write_text(json.dumps(topology_of(2).to_json()))
    file.read()
    assert shown.versions == [1, 2]
