"""Where programs run: each place at sparkis, and the real servers that it is compared with.

| place    | sparkis                                                  | compared with                                |
| upstream | one address with an upstream: `proxy`, and `serve`        | a redis-server alone                         |
| server   | a state server, which only reads                          | a read-only replica of a redis-server        |
| tls      | the same over TLS, with an ACL user                       | the same replica over TLS, with an ACL user  |
| cluster  | a registry and two state servers, of which one is killed  | a Redis Cluster, of which a master is killed |

A program of a cluster's client gets the address of one node, which goes on.
All have the same states. With an upstream, and at a redis-server alone, programs have keys of their own, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from compat.client_programs.runs import Place
from compat.conformance.assigned import Assigned
from compat.conformance.certificates import Authority
from compat.conformance.dataset import Dataset
from compat.conformance.dataset_log import TEXT, dataset_writer, publish
from compat.conformance.servers import (
    Running,
    fill,
    free_port,
    redis_server,
    sparkis_proxy,
    sparkis_server,
    wait_for_keys,
)
from compat.conformance.targets import (
    HOST,
    SLOTS,
    TENANT,
    TENANT_PASSWORD,
    Log,
    Ours,
    RealCluster,
    RealServer,
    Server,
    call,
    owner_of,
)
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.model.records import Change, Op

UPSTREAM, SERVER, TLS, CLUSTER = PLACES = ("upstream", "server", "tls", "cluster")
TEXTS = 300
NOTIFICATIONS = ("CONFIG", "SET", "notify-keyspace-events", "KEA")


def states() -> Dataset:
    """Return the keys of the job's states."""
    strings = {b"job:text:%03d" % number: b"%d" % number for number in range(TEXTS)}
    return Dataset(
        strings={**strings, b"job:text:long": b"0123456789" * 10_000, b"job:text:utf8": "žluťoučký kůň 🐎".encode()},
        hashes={
            b"job:map:flight": {b"from": b"PRG", b"to": b"LHR", b"delay": b"12"},
            b"job:map:large": {b"field:%04d" % number: b"%d" % number for number in range(1_500)},
        },
        lists={b"job:list:alerts": [b"wind", b"snow", b"wind", b"ice"]},
        sets={b"job:set:airports": [b"PRG", b"LHR", b"JFK"]},
        sorted_sets={b"job:ranks:delays": {b"PRG": b"1.5", b"LHR": b"12", b"JFK": b"3"}},
    )


def variables(place: str, port: int, **others: str) -> dict[str, str]:
    """Return what a program finds in its environment."""
    return {"PLACE": place, "REDIS_HOST": HOST, "REDIS_PORT": str(port), **others}


class Alone:
    """A redis-server with the states' keys."""

    name = "redis-server alone"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        self._redis = stack.enter_context(redis_server(folder))
        self.empty()

    def environment(self) -> dict[str, str]:
        return variables(UPSTREAM, self._redis.port)

    def empty(self) -> None:
        """Remove what a program has left, and write the states' keys again."""
        _empty(self._redis)
        fill(self._redis, states())

    def put(self, key: str, value: str) -> None:
        call(self._redis, "SET", key, value)

    def delete(self, key: str) -> None:
        call(self._redis, "DEL", key)

    def kill(self, key: str) -> None:
        raise NotImplementedError("only a cluster's server is killed")


class Upstreamed(Ours):
    """An address for the states and for an upstream. name: the program."""

    def __init__(self, name: str, folder: Path, stack: ExitStack, log: Log, authority: Authority) -> None:
        super().__init__(log, authority)
        self.name, self._folder = name, folder
        folder.mkdir()
        self._upstream = stack.enter_context(redis_server(folder))
        self.empty()
        given = ("--upstream", f"redis://{HOST}:{self._upstream.port}", "--ownership", str(folder / "owners.json"))
        start = self._serve if name == "serve" else self._proxy
        self._address = start(stack, *given)
        with self._address.connect() as client:
            eventually(lambda: not client.call("GET", "none").is_error, awaited="the upstream's keys")
        wait_for_keys(self._address, len(states().keys))

    def _serve(self, stack: ExitStack, *given: str) -> Running:
        return stack.enter_context(sparkis_server(self._folder / "store", self._log.root, *given, is_loaded=False))

    def _proxy(self, stack: ExitStack, *given: str) -> Running:
        port, topology = free_port(), self._folder / "topology.json"
        topology.write_text(json.dumps({"version": 1, "nodes": [{"host": HOST, "port": port, "slots": "0-16383"}]}))
        place = ("--cluster", str(topology), "--cluster-node", f"{HOST}:{port}")
        stack.enter_context(sparkis_server(self._folder / "store", self._log.root, *place, port=port))
        return stack.enter_context(sparkis_proxy(topology, *given))

    def environment(self) -> dict[str, str]:
        return variables(UPSTREAM, self._address.port)

    def empty(self) -> None:
        """Remove what a program has left."""
        _empty(self._upstream)

    def _live_server(self) -> Running:
        return self._address

    def kill(self, key: str) -> None:
        raise NotImplementedError("only a cluster's server is killed")


class Reading:
    """A server that only reads, without or with TLS and an ACL user."""

    def __init__(self, server: RealServer | Server, place: str) -> None:
        self.name, self._server, self._place = server.name, server, place
        self.put, self.delete = server.put, server.delete
        with Connection(server.at()["port"]) as client:
            client.call(*NOTIFICATIONS)

    def environment(self) -> dict[str, str]:
        at = self._server.at()
        if self._place == SERVER:
            return variables(SERVER, at["port"])
        user = {"REDIS_USER": TENANT, "REDIS_PASSWORD": TENANT_PASSWORD}
        return variables(TLS, at["tls_port"], REDIS_CA=at["ca"], **user)

    def kill(self, key: str) -> None:
        raise NotImplementedError("only a cluster's server is killed")


class RealNodes(RealCluster):
    """A Redis Cluster of three masters with a replica each."""

    # Nodes learn of each other's roles within the timeout. A master that a busy machine stops for seconds stays.
    node_options = ("--cluster-node-timeout", "5000", "--repl-diskless-sync-delay", "0")

    def __init__(self, folder: Path, stack: ExitStack, authority: Authority) -> None:
        super().__init__(folder, stack, authority, states())
        names = {node.port: call(node, "CLUSTER", "MYID") for node in self.nodes}
        self._replicas = [stack.enter_context(self._node(folder / f"replica{at}")) for at in range(len(SLOTS))]
        for master, replica in zip(self.nodes, self._replicas, strict=True):
            self._meet(replica)
            eventually(partial(_replicates, replica, names[master.port]), awaited="a replica to know its master")
        eventually(lambda: all(map(_has_replica, self.nodes)), awaited="the masters to know their replicas")
        # A client that does not know a master's replica may fail when it takes over: phpredis 5.3 ends with a signal.
        eventually(lambda: all(map(_knows_replicas, self._running())), awaited="the nodes to know all replicas")

    def environment(self) -> dict[str, str]:
        return variables(CLUSTER, self.nodes[0].port)

    def put(self, key: str, value: str) -> None:
        call(self._owner(key), "SET", key, value)

    def delete(self, key: str) -> None:
        call(self._owner(key), "DEL", key)

    def kill(self, key: str) -> None:
        """Kill a key's master. Its replica takes over at once: the nodes' own time for it depends on the load."""
        master, replica = self._owner(key), self._replicas[owner_of(key.encode())]
        _kill(master)
        call(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
        ports = {node.port for node in self.nodes if node is not master} | {replica.port}
        eventually(
            lambda: all(self._is_settled(node) and _masters(node) == ports for node in self._running()),
            awaited="the nodes to know the new master",
        )

    def _owner(self, key: str) -> Running:
        """Return the server that has a key: its master, or what replaces it."""
        at = owner_of(key.encode())
        return self.nodes[at] if self.nodes[at].process.poll() is None else self._replicas[at]

    def _running(self) -> Sequence[Running]:
        return [node for node in (*self.nodes, *self._replicas) if node.process.poll() is None]


class StateServers:
    """A registry and two state servers."""

    name = "two state servers"

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        log = folder / "dataset"
        with dataset_writer(log) as writer:
            publish(states(), writer)
        self._servers = Assigned(folder, log, 0, stack)
        for slots in (("0-16383",), ("0-8191", "8192-16383")):
            self._servers.start()
            self._servers.wait_for(*slots)
        self._writer = stack.enter_context(dataset_writer(folder / "log"))

    def environment(self) -> dict[str, str]:
        return variables(CLUSTER, self._servers.port(0))

    def put(self, key: str, value: str) -> None:
        self._publish(Change(TEXT, Op.PUT, key.encode(), value=value.encode()))
        eventually(lambda: self._value(key) == value.encode(), awaited=f"{key} to be {value}")

    def delete(self, key: str) -> None:
        self._publish(Change(TEXT, Op.DELETE, key.encode()))
        eventually(lambda: self._value(key) is None, awaited=f"{key} to be deleted")

    def kill(self, key: str) -> None:
        _kill(self._owner(key))

    def _publish(self, change: Change) -> None:
        self._writer.publish([change])

    def _value(self, key: str) -> bytes | None:
        value = call(self._owner(key), "GET", key)
        assert value is None or isinstance(value, bytes)
        return value

    def _owner(self, key: str) -> Running:
        """Return the server that answers for a key."""
        for server in self._servers.servers:
            if server.process.poll() is None:
                with server.connect() as client:
                    if not client.call("GET", key).is_error:
                        return server
        raise RuntimeError(f"no server answers for {key}")


class Pair(NamedTuple):
    """A place at sparkis, and the real server or cluster that it is compared with."""

    place: str
    real: Place
    ours: Sequence[Place]


class Places:
    """All places. Those of a cluster are started for each program, which kills a server."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._clusters = folder, 0
        self._authority = Authority(folder / "authority")
        log = Log(folder / "log", stack, states())
        self._alone = Alone(folder / "alone", stack)
        self._upstreamed = [Upstreamed(each, folder / each, stack, log, self._authority) for each in ("proxy", "serve")]
        self._real = RealServer(folder / "real", stack, self._authority, states())
        self._server = Server(folder / "server", stack, log, self._authority, states())

    @contextmanager
    def pair(self, place: str) -> Iterator[Pair]:
        """Return a place for one program, without what other programs have left."""
        with ExitStack() as stack:
            if place == UPSTREAM:
                self._alone.empty()
                for each in self._upstreamed:
                    each.empty()
                yield Pair(place, self._alone, self._upstreamed)
            elif place == CLUSTER:
                self._clusters += 1
                folder = self._folder / f"cluster{self._clusters}"
                real = RealNodes(folder / "real", stack, self._authority)
                yield Pair(place, real, [StateServers(folder, stack)])
            else:
                yield Pair(place, Reading(self._real, place), [Reading(self._server, place)])


@contextmanager
def running_places() -> Iterator[Places]:
    """Run all places, in a temporary folder."""
    with TemporaryDirectory(prefix="client-programs-") as folder, ExitStack() as stack:
        yield Places(Path(folder), stack)


def _empty(redis: Running) -> None:
    for words in (("FLUSHALL",), ("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH"), NOTIFICATIONS):
        call(redis, *words)


def _replicates(replica: Running, master: bytes) -> bool:
    """Have a server replicate a master, once it knows it."""
    if master not in call(replica, "CLUSTER", "NODES"):
        return False
    call(replica, "CLUSTER", "REPLICATE", master)
    return True


def _has_replica(node: Running) -> bool:
    return b"state=online" in call(node, "INFO", "replication")


def _knows_replicas(node: Running) -> bool:
    return [len(servers) for _first, _last, *servers in call(node, "CLUSTER", "SLOTS")] == [2] * len(SLOTS)


def _masters(node: Running) -> set[int]:
    """Return the ports of the masters that a node knows for slots."""
    return {master[1] for _first, _last, master, *_replicas in call(node, "CLUSTER", "SLOTS")}


def _kill(server: Running) -> None:
    server.process.kill()
    server.process.wait()
