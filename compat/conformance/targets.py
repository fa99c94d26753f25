"""The targets of clients: real servers, and sparkis as a server, as nodes of a cluster and through a proxy.

All have the data set. Each can change one live key while a client reads, and can be restarted at its ports.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from compat.conformance.certificates import Authority
from compat.conformance.dataset import Dataset, standard
from compat.conformance.dataset_log import JOB, TEXT, dataset_writer, publish
from compat.conformance.servers import (
    CONTROL_TOKEN,
    Running,
    fill,
    free_port,
    redis_server,
    sparkis_proxy,
    sparkis_server,
    wait_for_keys,
)
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from state_backend.model.slots import slot_of

HOST = "127.0.0.1"

# The slots of the three nodes of each cluster.
SLOTS = ((0, 5460), (5461, 10_922), (10_923, 16_383))

# The key that scenarios change. It has the form of Django's cache keys, so that Django can read it, too.
LIVE = ":1:live"

# A user who may read only the keys of users, and those of one state.
TENANT, TENANT_PASSWORD = "tenant", "of-the-tenant"
TENANT_RULES = (
    "on",
    f">{TENANT_PASSWORD}",
    "~user:*",
    "~job:text:*",
    "+@read",
    "+@connection",
    "+@transaction",
    "+cluster",
    "+command",
)


class Target(Protocol):
    """A server, or several, that a client connects to."""

    name: str

    def at(self) -> dict[str, Any]:
        """Return the fields of `scenario.At` for a client."""

    def put(self, key: str, value: str) -> None:
        """Set a key to a text, and wait until clients can read it."""

    def delete(self, key: str) -> None:
        """Delete a key, and wait until clients no longer find it."""

    def restart(self) -> None:
        """Restart the servers that clients are connected to."""


class Process:
    """A server that can be restarted."""

    def __init__(self, stack: ExitStack, start: Callable[[], AbstractContextManager[Running]]) -> None:
        self._start, self._running = start, ExitStack()
        stack.callback(lambda: self._running.close())
        self.server = self._running.enter_context(start())

    def stop(self) -> None:
        self._running.close()

    def start(self) -> None:
        self._running = ExitStack()
        self.server = self._running.enter_context(self._start())


def owner_of(key: bytes) -> int:
    """Return the index of the cluster node that has a key."""
    slot = slot_of(key)
    return next(at for at, (first, last) in enumerate(SLOTS) if first <= slot <= last)


LIVE_OWNER = owner_of(LIVE.encode())


def call(server: Running, *words: bytes | str | int) -> Any:
    """Send one request; RuntimeError for an error reply."""
    with server.connect() as connection:
        reply = connection.call(*words)
    if reply.is_error:
        raise RuntimeError(f"{words} got the error reply {reply.raw!r}")
    return reply.plain


def wait_for_value(server: Running, key: str, value: str | None) -> None:
    """Wait until a server replies this value for a key; None: until the key is missing."""
    expected = None if value is None else value.encode()
    eventually(lambda: bool(call(server, "GET", key) == expected), awaited=f"{key} to be {value}")


class RealServer:
    """A read-only replica of a real redis-server: it refuses writes, and the primary changes its keys."""

    name = "redis-server"

    def __init__(self, folder: Path, stack: ExitStack, authority: Authority, dataset: Dataset) -> None:
        self._authority, self._dataset = authority, dataset
        folders = [folder / "primary", folder / "replica"]
        for each in folders:
            each.mkdir(parents=True)
        self._primary = stack.enter_context(redis_server(folders[0], "--repl-diskless-sync-delay", "0"))
        fill(self._primary, dataset)
        port, self._tls_port = free_port(), free_port()
        cert, key = authority.issue("redis")
        options = [
            *("--replicaof", f"{HOST} {self._primary.port}", "--repl-diskless-load", "swapdb"),
            *("--tls-port", str(self._tls_port), "--tls-cert-file", str(cert), "--tls-key-file", str(key)),
            *("--tls-ca-cert-file", str(authority.ca), "--tls-auth-clients", "no"),
            *("--user", TENANT, *TENANT_RULES),
        ]
        self._replica = Process(stack, lambda: redis_server(folders[1], *options, port=port))
        wait_for_keys(self._replica.server, len(dataset.keys))

    def at(self) -> dict[str, Any]:
        port = self._replica.server.port
        return _at(port, port, self._tls_port, self._authority, is_cluster=False)

    def put(self, key: str, value: str) -> None:
        call(self._primary, "SET", key, value)
        wait_for_value(self._replica.server, key, value)

    def delete(self, key: str) -> None:
        call(self._primary, "DEL", key)
        wait_for_value(self._replica.server, key, None)

    def restart(self) -> None:
        self._replica.stop()
        self._replica.start()
        eventually(
            lambda: call(self._replica.server, "DBSIZE") >= self._size(), awaited="the replica to be filled again"
        )

    def _size(self) -> int:
        return int(call(self._primary, "DBSIZE"))


class RealCluster:
    """Three real masters with a third of the slots each."""

    name = "a real cluster"
    node_options: Sequence[str] = ()

    def __init__(self, folder: Path, stack: ExitStack, authority: Authority, dataset: Dataset) -> None:
        self._authority = authority
        self.nodes = [stack.enter_context(self._node(folder / str(number))) for number in range(len(SLOTS))]
        for epoch, (server, slots) in enumerate(zip(self.nodes, SLOTS, strict=True), 1):
            call(server, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
            call(server, "CLUSTER", "ADDSLOTSRANGE", *slots)
        for server in self.nodes[1:]:
            self._meet(server)
        eventually(lambda: all(map(self._is_settled, self.nodes)), awaited="the nodes to meet")
        self._fill(dataset)

    @contextmanager
    def _node(self, folder: Path) -> Iterator[Running]:
        folder.mkdir(parents=True)
        options = ("--cluster-enabled", "yes", "--cluster-announce-ip", HOST, "--cluster-port", str(free_port()))
        with redis_server(folder, *options, *self.node_options) as server:
            yield server

    def _meet(self, server: Running) -> None:
        """Have a server that knows no other meet the first node."""
        bus = call(server, "CLUSTER", "NODES").split()[1].partition(b"@")[2]
        call(self.nodes[0], "CLUSTER", "MEET", HOST, server.port, bus)

    @staticmethod
    def _is_settled(server: Running) -> bool:
        is_ok = b"cluster_state:ok" in call(server, "CLUSTER", "INFO")
        return is_ok and len(call(server, "CLUSTER", "SLOTS")) == len(SLOTS)

    def _fill(self, dataset: Dataset) -> None:
        for number, server in enumerate(self.nodes):
            fill(server, dataset.part({key for key in dataset.keys if owner_of(key) == number}))

    def at(self) -> dict[str, Any]:
        owner = LIVE_OWNER
        ports = [node.port for node in self.nodes]
        return _at(ports[owner], ports[owner - 1], 0, self._authority, is_cluster=True)

    def put(self, key: str, value: str) -> None:
        call(self.nodes[owner_of(key.encode())], "SET", key, value)

    def delete(self, key: str) -> None:
        call(self.nodes[owner_of(key.encode())], "DEL", key)

    def restart(self) -> None:
        raise NotImplementedError("for this feature a client at a cluster is compared with one at the real server")


class Log:
    """The log that all our targets read. It has the data set, and the live key."""

    def __init__(self, root: Path, stack: ExitStack, dataset: Dataset) -> None:
        self.root = root
        self.users = root.parent / "users.acl"
        self.users.write_text(f"user default on nopass ~* &* +@all\nuser {TENANT} {' '.join(TENANT_RULES)}\n")
        # The servers that get a notice of each epoch, so that they need not poll for it; and their TLS contexts.
        self.readers: list[tuple[Process, ssl.SSLContext | None]] = []
        self._writer: LogWriter = stack.enter_context(dataset_writer(root))
        publish(dataset, self._writer)

    def put(self, key: str, value: str) -> None:
        self._publish(Change(TEXT, Op.PUT, key.encode(), value=value.encode()))

    def delete(self, key: str) -> None:
        self._publish(Change(TEXT, Op.DELETE, key.encode()))

    def _publish(self, change: Change) -> None:
        self._writer.publish([change])
        for reader, tls in self.readers:
            with Connection(reader.server.control_port, tls=tls) as control:
                control.call("AUTH", CONTROL_TOKEN)
                control.call("NOTICE", JOB, 0)


class Ours:
    """The base class of our targets, which all read one log."""

    def __init__(self, log: Log, authority: Authority) -> None:
        self._log, self._authority = log, authority

    def _live_server(self) -> Running:
        """Return the server that has the live key."""
        raise NotImplementedError

    def put(self, key: str, value: str) -> None:
        self._log.put(key, value)
        wait_for_value(self._live_server(), key, value)

    def delete(self, key: str) -> None:
        self._log.delete(key)
        wait_for_value(self._live_server(), key, None)


class OneProcess(Ours):
    """A target with all keys behind one port, and behind another port with TLS."""

    def __init__(self, log: Log, authority: Authority, process: Process, dataset: Dataset) -> None:
        super().__init__(log, authority)
        self._process, self._keys = process, len(dataset.keys)
        self.wait()

    def _live_server(self) -> Running:
        return self._process.server

    def at(self) -> dict[str, Any]:
        server = self._process.server
        return _at(server.port, server.port, server.tls_port, self._authority, is_cluster=False)

    def restart(self) -> None:
        self._process.stop()
        self._process.start()
        self.wait()

    def wait(self) -> None:
        """Wait until all keys can be read."""
        wait_for_keys(self._process.server, self._keys)


class Server(OneProcess):
    """One server."""

    name = kind = "server"

    def __init__(self, folder: Path, stack: ExitStack, log: Log, authority: Authority, dataset: Dataset) -> None:
        ports = (free_port(), free_port())
        options = ["--tls-port", str(ports[1]), *authority.options(auth_clients="no"), "--aclfile", str(log.users)]
        process = Process(stack, lambda: sparkis_server(folder, log.root, *options, port=ports[0]))
        log.readers.append((process, authority.context()))
        super().__init__(log, authority, process, dataset)


class Nodes(Ours):
    """Three nodes of a cluster with a third of the slots each; and, for TLS, one node with all slots."""

    name, kind = "cluster node", "node"

    def __init__(self, folder: Path, stack: ExitStack, log: Log, authority: Authority, dataset: Dataset) -> None:
        super().__init__(log, authority)
        self.topology = folder / "cluster.json"
        parts = [f"{first}-{last}" for first, last in SLOTS]
        self._nodes = self._start(self.topology, parts, stack, folder)
        log.readers += [(node, None) for node in self._nodes]
        self.proxies: list[Proxy] = []  # the proxies in front of these nodes
        tls = authority.options("node", auth_clients="no")
        self._encrypted = self._start(folder / "tls.json", ["0-16383"], stack, folder / "tls", *tls)[0]
        self._keys = len(dataset.keys)
        self._wait()

    def _start(self, topology: Path, parts: list[str], stack: ExitStack, folder: Path, *options: str) -> list[Process]:
        ports = [free_port() for _ in parts]
        rows = [{"host": HOST, "port": port, "slots": slots} for port, slots in zip(ports, parts, strict=True)]
        folder.mkdir(parents=True, exist_ok=True)
        topology.write_text(json.dumps({"version": 1, "nodes": rows}))

        def starting(port: int) -> Callable[[], AbstractContextManager[Running]]:
            node_options = ("--cluster", str(topology), "--cluster-node", f"{HOST}:{port}", *options)
            node_options += ("--aclfile", str(self._log.users))
            return lambda: sparkis_server(folder / str(port), self._log.root, *node_options, port=port)

        return [Process(stack, starting(port)) for port in ports]

    def _wait(self) -> None:
        eventually(
            lambda: sum(call(node.server, "DBSIZE") for node in self._nodes) >= self._keys,
            awaited="the nodes to have all keys",
        )

    def _live_server(self) -> Running:
        return self._nodes[LIVE_OWNER].server

    def at(self) -> dict[str, Any]:
        owner = LIVE_OWNER
        ports = [node.server.port for node in self._nodes]
        return _at(ports[owner], ports[owner - 1], self._encrypted.server.port, self._authority, is_cluster=True)

    def restart(self) -> None:
        for node in self._nodes:
            node.stop()
        for node in self._nodes:
            node.start()
        self._wait()
        for proxy in self.proxies:
            proxy.wait()


class Proxy(OneProcess):
    """A proxy in front of the nodes."""

    name = kind = "proxy"

    def __init__(self, stack: ExitStack, log: Log, authority: Authority, nodes: Nodes, dataset: Dataset) -> None:
        ports = (free_port(), free_port())
        options = ["--tls-port", str(ports[1]), *authority.options(auth_clients="no", with_ca=False)]
        options += ["--server-tls", "no", "--aclfile", str(log.users)]
        process = Process(stack, lambda: sparkis_proxy(nodes.topology, *options, port=ports[0]))
        super().__init__(log, authority, process, dataset)
        nodes.proxies.append(self)


def _at(port: int, other_port: int, tls_port: int, authority: Authority, *, is_cluster: bool) -> dict[str, Any]:
    return {
        "host": HOST,
        "port": port,
        "is_cluster": is_cluster,
        "other_port": other_port,
        "tls_port": tls_port,
        "ca": str(authority.ca),
        "user": TENANT,
        "password": TENANT_PASSWORD,
        "live": LIVE,
    }


class Targets:
    """All targets. `plain` and `cluster` are real servers; `ours` are compared with them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        dataset = standard()
        authority = Authority(folder / "authority")
        self.plain = RealServer(folder / "real", stack, authority, dataset)
        self.cluster = RealCluster(folder / "real-cluster", stack, authority, dataset)
        log = Log(folder / "log", stack, dataset)
        nodes = Nodes(folder / "nodes", stack, log, authority, dataset)
        server = Server(folder / "server", stack, log, authority, dataset)
        self.ours: list[Server | Nodes | Proxy] = [server, nodes, Proxy(stack, log, authority, nodes, dataset)]


@contextmanager
def running_targets() -> Iterator[Targets]:
    """Run all targets, in a temporary folder."""
    with TemporaryDirectory(prefix="sparkis-conformance-") as folder, ExitStack() as stack:
        yield Targets(Path(folder), stack)
