"""A node of a cluster answers as a real one that has the same slots: here of three real nodes that know each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running, free_port, redis_server, sparkis_server
from compat.conformance.wire import Words, replies_to, scanned
from compat.waiting import eventually

# Of the data set: keys of both masters' slots, and of slots that nobody has.
RANGES = ((0, 5000), (5001, 12_000))


class Trio:
    """Three real nodes, and one of ours in the place of each: all tell clients the real ones' addresses."""

    def __init__(self, theirs: list[Running], ours: list[Running]) -> None:
        self.theirs, self.ours = theirs, ours

    def both(self, at: int, greeting: str, *requests: Words) -> tuple[list[bytes], list[bytes]]:
        """Return what the real node and ours answer, each on one new connection."""
        answers = []
        for server in (self.theirs[at], self.ours[at]):
            with server.connect() as connection:
                connection.call("HELLO", greeting)
                answers.append([connection.call(*request).raw for request in requests])
        return answers[0], answers[1]


def _nodes(server: Running) -> dict[str, list[str]]:
    with server.connect() as connection:
        lines = connection.call("CLUSTER", "NODES").plain.decode().splitlines()
    return {line.split()[0]: line.split() for line in lines}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset) -> Iterator[Trio]:
    options = (
        *("--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"),
        *("--cluster-require-full-coverage", "no", "--cluster-port"),
    )
    folders = [tmp_path_factory.mktemp("node") for _ in range(3)]
    with (
        redis_server(folders[0], *options, str(free_port())) as first,
        redis_server(folders[1], *options, str(free_port())) as second,
        redis_server(folders[2], *options, str(free_port())) as replica,
    ):
        theirs = [first, second, replica]
        ids = []
        for epoch, server in enumerate(theirs, 1):
            with server.connect() as connection:
                ids.append(connection.call("CLUSTER", "MYID").plain.decode())
                assert connection.call("CLUSTER", "SET-CONFIG-EPOCH", str(epoch)).plain == b"OK"
        for server, slots in zip(theirs[:2], RANGES, strict=True):
            with server.connect() as connection:
                assert connection.call("CLUSTER", "ADDSLOTSRANGE", *map(str, slots)).plain == b"OK"
        for server in theirs[1:]:
            bus = _nodes(server)[ids[theirs.index(server)]][1].partition("@")[2]
            with first.connect() as connection:
                connection.call("CLUSTER", "MEET", "127.0.0.1", str(server.port), bus)
        eventually(lambda: all(set(_nodes(server)) == set(ids) for server in theirs), awaited="the nodes have met")
        with replica.connect() as connection:
            assert connection.call("CLUSTER", "REPLICATE", ids[0]).plain == b"OK"
        eventually(lambda: all(_is_settled(server, ids) for server in theirs), awaited="the replica follows")
        topology = {
            "version": 3,
            "nodes": [
                {"id": ids[0], "host": "127.0.0.1", "port": first.port, "slots": "0-5000"},
                {"id": ids[1], "host": "127.0.0.1", "port": second.port, "slots": "5001-12000"},
                {"id": ids[2], "host": "127.0.0.1", "port": replica.port, "replica_of": ids[0]},
            ],
        }
        path = tmp_path_factory.mktemp("topology") / "cluster.json"
        path.write_text(json.dumps(topology))
        stores = [tmp_path_factory.mktemp("store") for _ in range(3)]
        given = [("--cluster", str(path), "--cluster-node", each) for each in ids]
        with (
            sparkis_server(stores[0], dataset_log, *given[0]) as ours_first,
            sparkis_server(stores[1], dataset_log, *given[1]) as ours_second,
            sparkis_server(stores[2], dataset_log, *given[2]) as ours_replica,
        ):
            _fill(first, dataset, RANGES[0])
            _fill(second, dataset, RANGES[1])
            eventually(lambda: _size(replica) == _size(first), awaited="the replica is filled")
            yield Trio(theirs, [ours_first, ours_second, ours_replica])


def _is_settled(server: Running, ids: list[str]) -> bool:
    with server.connect() as connection:
        info = connection.call("CLUSTER", "INFO").plain
        slots = connection.call("CLUSTER", "SLOTS").plain
    nodes = _nodes(server)
    is_known = nodes[ids[2]][3] == ids[0] and all("connected" in line for line in nodes.values())
    return b"cluster_state:ok" in info and is_known and len(slots) == 2 and len(slots[0]) == 4


def _size(server: Running) -> Any:
    with server.connect() as connection:
        return connection.call("DBSIZE").plain


def _fill(server: Running, dataset: Dataset, slots: tuple[int, int]) -> None:
    """Write what a node may hold of the data set; it refuses the rest."""
    first, last = slots
    with server.connect() as connection:
        for key, value in dataset.strings.items():
            reply = connection.call("SET", key, value)
            slot = connection.call("CLUSTER", "KEYSLOT", key).plain
            assert reply.is_error != (first <= slot <= last)
        for key, fields in dataset.hashes.items():
            connection.call("HSET", key, *(part for pair in fields.items() for part in pair))
        for key, elements in dataset.lists.items():
            connection.call("RPUSH", key, *elements)
        for key, members in dataset.sets.items():
            connection.call("SADD", key, *members)
        for key, scores in dataset.sorted_sets.items():
            connection.call("ZADD", key, *(part for member, score in scores.items() for part in (score, member)))
        for key, at_ms in dataset.expire_at_ms.items():
            connection.call("PEXPIREAT", key, str(at_ms))


NODES = pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "second", "replica"])
PROTOCOLS = pytest.mark.parametrize("protocol", ["2", "3"])


@NODES
@PROTOCOLS
def test_cluster_slots_equals_redis_to_byte(trio: Trio, at: int, protocol: str) -> None:
    with trio.theirs[0].connect() as connection:
        ids = [row.split()[0] for row in connection.call("CLUSTER", "NODES").plain.decode().splitlines()]
    replica_id = next(line[0] for line in _nodes(trio.theirs[0]).values() if "slave" in line[2])
    requests: list[Words] = [
        *([b"CLUSTER", name] for name in (b"SLOTS", b"MYID")),
        *([b"CLUSTER", b"COUNT-FAILURE-REPORTS", each.encode()] for each in ids),
        *([b"CLUSTER", b"KEYSLOT", key] for key in (b"foo", b"", b"a{}b{c}", b"{a}b")),
        *([b"CLUSTER", b"REPLICAS", word] for word in (b"nope", b"x y", replica_id.encode())),
        [b"CLUSTER", b"SLAVES", b"nope"],
        [b"CLUSTER", b"COUNT-FAILURE-REPORTS", b"nope"],
    ]
    theirs, ours = trio.both(at, protocol, *requests)
    assert ours == theirs


# What only gossip and replication know: pings, the length of a stream, numbers of messages.
GOSSIP = [
    (re.compile(rb"(replication-offset\r\n):\d+"), rb"\1:0"),
    (re.compile(rb" \d+ \d+ (\d+) connected"), rb" 0 0 \1 connected"),
    (re.compile(rb"(cluster_stats_messages_\w+):\d+\r\n(?!total)"), b""),
    (re.compile(rb"cluster_stats_messages_(sent|received):\d+\r\n"), b""),
    # A master's epoch is its own there; here, all have the topology's.
    (re.compile(rb"(0 0) \d+ (connected)"), rb"\1 0 \2"),
    (re.compile(rb"(cluster_my_epoch):\d+"), rb"\1:0"),
    (re.compile(rb"(cluster_current_epoch):\d+"), rb"\1:0"),
    (re.compile(rb"@\d+ "), b"@0 "),
    (re.compile(rb"^([=$])\d+\r\n(txt:)?"), rb"\1\2\r\n"),
]


def _alike(raw: bytes) -> bytes:
    for pattern, replacement in GOSSIP:
        raw = pattern.sub(replacement, raw)
    return raw


@NODES
@PROTOCOLS
def test_cluster_nodes_and_info_differ_only_in_facts_of_gossip(trio: Trio, at: int, protocol: str) -> None:
    master_id = next(line[0] for line in _nodes(trio.theirs[0]).values() if "0-5000" in line)
    theirs, ours = trio.both(
        at, protocol, [b"CLUSTER", b"NODES"], [b"CLUSTER", b"INFO"], [b"CLUSTER", b"REPLICAS", master_id.encode()]
    )
    lines = [[sorted(_alike(each[0]).splitlines()), *map(_alike, each[1:])] for each in (theirs, ours)]
    lines = [[each[0], each[1], re.sub(rb"\$\d+\r\n", b"$\r\n", each[2])] for each in lines]
    assert lines[1] == lines[0]


@NODES
@PROTOCOLS
def test_cluster_shards_equals_redis(trio: Trio, at: int, protocol: str) -> None:
    (theirs,), (ours,) = trio.both(at, protocol, [b"CLUSTER", b"SHARDS"])
    marker = rb"(?=\*2\r\n\$5|\*4\r\n\$5|%2\r\n\$5)"
    nodes = rb"(?=\*14\r\n\$2\r\nid|%7\r\n\$2\r\nid)"

    def parts(raw: bytes) -> list[list[bytes]]:
        return sorted(sorted(re.split(nodes, part)) for part in re.split(marker, _alike(raw)))

    assert parts(ours) == parts(theirs)


@NODES
@PROTOCOLS
@pytest.mark.parametrize("before", [(), ("READONLY",), ("READONLY", "READWRITE"), ("ASKING",), ("READONLY", "RESET")])
def test_each_key_is_answered_or_its_owner_named(
    trio: Trio, dataset: Dataset, at: int, protocol: str, before: tuple[str, ...]
) -> None:
    keys = [key for key in dataset.keys if len(key) < 1000][::7]
    reads: list[Words] = []
    for key, other in pairwise(keys):
        reads += [
            [b"GET", key],
            [b"TYPE", key],
            [b"HGET", key, b"field"],
            [b"LRANGE", key, b"0", b"1"],
            [b"MGET", key, other],
            [b"EXISTS", key, key],
            [b"OBJECT", b"HELP"],
            [b"GET", key, other],
            [b"MGET", b"{%b}1" % other.replace(b"}", b""), b"{%b}2" % other.replace(b"}", b"")],
        ]
    theirs, ours = trio.both(at, protocol, *([word.encode()] for word in before), *reads)
    wrong = [
        (request, their, our)
        for request, their, our in zip(reads, theirs[len(before) :], ours[len(before) :], strict=True)
        if our != their and request[0] != b"OBJECT"
    ]
    assert wrong == []


@NODES
@PROTOCOLS
@pytest.mark.parametrize("before", [(), ("READONLY",)], ids=["", "READONLY"])
def test_transactions_at_node_are_run_or_redirected_as_by_redis(
    trio: Trio, dataset: Dataset, at: int, protocol: str, before: tuple[str, ...]
) -> None:
    keys = [key for key in dataset.strings if len(key) < 1000][::9]
    requests: list[Words] = [[word.encode()] for word in before]
    for key, other in pairwise(keys):
        requests += [
            *([b"MULTI"], [b"GET", key], [b"TYPE", key], [b"EXEC"]),
            *([b"MULTI"], [b"GET", key], [b"GET", other], [b"EXEC"]),
            *([b"MULTI"], [b"PING"], [b"STRLEN", key], [b"EXISTS", key, other], [b"EXEC"], [b"EXEC"]),
            *([b"WATCH", key], [b"WATCH", key, other], [b"MULTI"], [b"PING"], [b"EXEC"]),
        ]
    theirs, ours = trio.both(at, protocol, *requests)
    assert ours == theirs
    assert any(b"CROSSSLOT" in reply for reply in ours) or (at == 2 and not before)


@NODES
def test_writes_of_others_slots_are_sent_to_them(trio: Trio, at: int) -> None:
    theirs, ours = trio.both(at, "2", [b"SET", b"foo", b"1"], [b"SET", b"{a}", b"1"], [b"DEL", b"foo", b"bar"])
    foreign = [their for their in theirs if their.startswith((b"-MOVED", b"-CLUSTERDOWN", b"-CROSSSLOT"))]
    assert [our for their, our in zip(theirs, ours, strict=True) if their in foreign] == foreign


@NODES
@PROTOCOLS
def test_refusals_are_those_of_cluster(trio: Trio, at: int, protocol: str) -> None:
    requests: list[Words] = [
        [b"SELECT", b"0"],
        [b"SELECT", b"1"],
        [b"SELECT", b"99"],
        [b"SELECT", b"x"],
        [b"CLUSTER", b"COUNTKEYSINSLOT", b"x"],
        [b"CLUSTER", b"COUNTKEYSINSLOT", b"16384"],
        [b"CLUSTER", b"COUNTKEYSINSLOT", b"-1"],
        [b"CLUSTER", b"GETKEYSINSLOT", b"0", b"-1"],
        [b"CLUSTER", b"GETKEYSINSLOT", b"x", b"-1"],
        [b"CLUSTER", b"GETKEYSINSLOT", b"0", b"x"],
        [b"CLUSTER", b"NOPE"],
        [b"CLUSTER", b"KEYSLOT"],
        [b"READONLY", b"x"],
        [b"CONFIG", b"GET", b"cluster-enabled"],
    ]
    theirs, ours = trio.both(at, protocol, *requests)
    assert ours == theirs


@NODES
def test_keys_of_its_slots_are_listed_and_counted(trio: Trio, dataset: Dataset, at: int) -> None:
    slots = range(0, 16_384, 31)
    found = []
    for server in (trio.theirs[at], trio.ours[at]):
        with server.connect() as connection:
            counts = [connection.call("CLUSTER", "COUNTKEYSINSLOT", str(slot)).plain for slot in slots]
            listed = [sorted(connection.call("CLUSTER", "GETKEYSINSLOT", str(slot), "9").plain) for slot in slots]
            keys = scanned(connection, "COUNT", 100)
            sizes = connection.call("DBSIZE").plain, len(keys), len(set(keys))
            random = connection.call("RANDOMKEY").plain in keys
            found.append((counts, listed, sorted(connection.call("KEYS", "*").plain), sorted(keys), sizes, random))
    assert found[1] == found[0]
    assert 0 < found[1][4][0] < len(dataset.keys)


@NODES
def test_hello_info_and_role_show_cluster_mode(trio: Trio, at: int) -> None:
    replies = []
    for server in (trio.theirs[at], trio.ours[at]):
        with server.connect() as connection:
            greeting = connection.call("HELLO", "3").plain
            hello = dict(zip(greeting[::2], greeting[1::2], strict=True))
            info = connection.call("INFO").plain.decode()
            role = connection.call("ROLE").plain
        kept = ("redis_mode", "cluster_enabled", "role", "master_host", "master_port", "connected_slaves")
        lines = [line for line in info.splitlines() if line.partition(":")[0] in kept]
        replies.append((hello[b"mode"], hello[b"role"], sorted(lines), role[0], role[1:3] if at == 2 else len(role[2])))
    assert replies[1] == replies[0]


@NODES
def test_reader_of_replicas_is_marked_in_list_of_clients(trio: Trio, at: int) -> None:
    requests: list[Words] = [
        [b"CLIENT", b"INFO"],
        [b"READONLY"],
        [b"CLIENT", b"INFO"],
        [b"RESET"],
        [b"CLIENT", b"INFO"],
    ]
    theirs, ours = trio.both(at, "2", *requests)
    flags = [[re.findall(rb"flags=(\w+)", reply) for reply in each] for each in (theirs, ours)]
    assert flags[1] == flags[0]


@NODES
@PROTOCOLS
def test_nothing_is_queued_after_transactions_first_error(trio: Trio, at: int, protocol: str) -> None:
    for wrong in ([b"NOPE"], [b"GET"], [b"CLIENT", b"NOPE"], [b"MGET", b"foo", b"bar"]):
        requests: list[Words] = [[b"MULTI"], [b"GET", b"plain"], wrong, [b"GET", b"{b}"], [b"GET", b"{c}"], [b"EXEC"]]
        theirs, ours = trio.both(at, protocol, *requests)
        assert ours == theirs
        assert ours[-1].startswith(b"-EXECABORT")


@NODES
@PROTOCOLS
def test_places_are_found_or_their_owners_named(trio: Trio, at: int, protocol: str) -> None:
    keys = [b"geo:cities", b"geo:edges", b"geo:many", b"geo:near", b"geo:odd"]
    requests: list[Words] = [[b"READONLY"]] if at == 2 else []
    for key in keys:
        requests += [
            [b"GEOPOS", key, b"Palermo", b"at:00007", b"a"],
            [b"GEODIST", key, b"Palermo", b"Suva", b"km"],
            [b"GEOSEARCH", key, b"FROMLONLAT", b"13.4", b"38.1", b"BYRADIUS", b"9000", b"km", b"WITHDIST", b"ASC"],
            [b"GEORADIUS_RO", key, b"0", b"1", b"500", b"mi", b"WITHCOORD"],
            [b"GEORADIUS", key, b"13.4", b"38.1", b"500", b"mi", b"STORE", b"elsewhere"],
        ]
    theirs, ours = trio.both(at, protocol, *requests)
    writes = [number for number, each in enumerate(requests) if each[0] == b"GEORADIUS"]
    for number in writes:  # theirs would be made at a master that has both keys
        assert theirs[number].startswith((b"-MOVED", b"-CROSSSLOT", b"-CLUSTERDOWN"))
    assert ours == theirs
    assert any((b"at:" if at == 1 else b"origin") in reply for reply in ours)


@NODES
@PROTOCOLS
def test_discarded_transaction_is_redirected_as_by_redis(trio: Trio, dataset: Dataset, at: int, protocol: str) -> None:
    keys = [key for key in dataset.strings if len(key) < 1000][::9]
    pipeline: list[Words] = [[b"HELLO", protocol.encode()]]
    for key, other in pairwise(keys):
        pipeline += [
            *([b"MULTI"], [b"GET", key], [b"GET", other], [b"DISCARD"]),
            *([b"MULTI"], [b"EXISTS", key, other], [b"PING"], [b"DISCARD"]),
            *([b"WATCH", key], [b"MULTI"], [b"GET", key], [b"EXEC"]),
            *([b"WATCH", key], [b"MULTI"], [b"PING"], [b"DISCARD"]),
            *([b"WATCH", key], [b"MULTI"], [b"WATCH", key], [b"PING"], [b"EXEC"]),
            *([b"MULTI"], [b"CLUSTER", b"COUNTKEYSINSLOT", b"12"], [b"EXEC"]),
        ]
    theirs, ours = (
        [each.raw for each in replies_to(server.port, pipeline)] for server in (trio.theirs[at], trio.ours[at])
    )
    assert ours[1:] == theirs[1:]
