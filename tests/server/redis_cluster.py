"""A real Redis Cluster of three masters, as processes of a test."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from compat.conformance.servers import Running, free_port, redis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.model.slots import SLOTS, slot_of

# A failover begins after this time without an answer. Nodes find each other sooner with a short time; afterwards a busy
# machine must not seem to be a lost node.
NODE_TIMEOUT_MS = 1000
PATIENT_TIMEOUT_MS = 5_000


class RedisCluster:
    """The masters have a third of the slots each; replicas are started by name of their master."""

    def __init__(self, folder: Path, stack: ExitStack, masters: int = 3, tls: Sequence[str] = ()) -> None:
        """Start the masters. tls: options of certificates; the nodes then have TLS ports, too."""
        self._folder, self._stack, self._tls = folder, stack, tls
        self.tls_ports: list[int] = []
        self._bus_ports: dict[int, int] = {}
        self.nodes = [self._start() for _ in range(masters)]
        bounds = [SLOTS * at // masters for at in range(masters + 1)]
        for at, node in enumerate(self.nodes):
            self.call(node, "CLUSTER", "ADDSLOTSRANGE", bounds[at], bounds[at + 1] - 1)
        for at, node in enumerate(self.nodes[1:], 1):
            self.call(node, "CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            self._meet(node)
        self.wait_until_ok()
        self._set_timeout(PATIENT_TIMEOUT_MS)

    def _set_timeout(self, timeout_ms: int) -> None:
        for node in self.nodes:
            self.call(node, "CONFIG", "SET", "cluster-node-timeout", timeout_ms)

    @property
    def url(self) -> str:
        """The URL for `--upstream`."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _start(self) -> Running:
        bus_port = free_port()
        folder = self._folder / str(bus_port)
        folder.mkdir()
        options = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port), "--repl-diskless-sync-delay", "0")
        if self._tls:
            self.tls_ports.append(free_port())
            options += ("--tls-cluster", "yes", "--tls-port", str(self.tls_ports[-1]), *self._tls)
        server = redis_server(folder, *options, "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
        node = self._stack.enter_context(server)
        self._bus_ports[node.port] = bus_port
        return node

    def _meet(self, node: Running) -> None:
        first = self.nodes[0]
        self.call(node, "CLUSTER", "MEET", "127.0.0.1", first.port, self._bus_ports[first.port])

    def add_node(self) -> Running:
        """Start a master without slots."""
        node = self._start()
        self._meet(node)
        for each in self.nodes:  # no slot can be moved to a node that is unknown
            eventually(lambda each=each: self.id(node).encode() in self.call(each, "CLUSTER", "NODES"))  # type: ignore[misc]
        eventually(lambda: b"cluster_state:ok" in self.call(node, "CLUSTER", "INFO"))
        self.nodes.append(node)
        self._set_timeout(PATIENT_TIMEOUT_MS)
        return node

    def start_replica(self, master: Running) -> Running:
        """Start a replica, and wait until it has the master's data. From now on a lost master is soon replaced."""
        self._set_timeout(NODE_TIMEOUT_MS)
        node = self._start()
        self._meet(node)
        eventually(lambda: self.call(node, "CLUSTER", "REPLICATE", self.id(master)) == b"OK")
        eventually(lambda: b"master_link_status:up" in self.call(node, "INFO", "replication"))
        self.wait_until_ok()
        return node

    def wait_until_ok(self) -> None:
        """Wait until all masters that run see all masters."""
        for node in self.nodes:
            if node.process.poll() is None:
                eventually(lambda node=node: b"cluster_state:ok" in self.call(node, "CLUSTER", "INFO"))  # type: ignore[misc]

    @staticmethod
    def call(node: Running, *words: object) -> bytes:
        """Return a node's reply to one request."""
        with node.connect() as connection:
            found = connection.call(*words).plain  # type: ignore[arg-type]
            return found if isinstance(found, bytes) else str(found).encode()

    def flush(self) -> None:
        """Remove all keys."""
        for node in self.nodes:
            self.call(node, "FLUSHALL")

    def id(self, node: Running) -> str:
        """Return a node's id."""
        return self.call(node, "CLUSTER", "MYID").decode()

    def master_of(self, key: str) -> Running:
        """Return the master that has a key's slot, by its own word."""
        for node in self.nodes:
            with node.connect() as connection:
                if not connection.call("EXISTS", key).is_error:
                    return node
        raise LookupError(key)

    def begin_move(self, key: str, target: Running) -> Connection:
        """Begin to move the slot of a key; return a connection to the source."""
        source, slot = self.master_of(key), slot_of(key.encode())
        self.call(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id(source))
        self.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id(target))
        return source.connect()

    def move_key(self, source: Connection, key: str, target: Running) -> None:
        """Move one key of a slot that is being moved."""
        assert source.call("MIGRATE", "127.0.0.1", target.port, key, 0, 10_000).plain in (b"OK", b"NOKEY")

    def end_move(self, key: str, target: Running) -> None:
        """End the move of a slot: at the target first."""
        slot, owner = slot_of(key.encode()), self.id(target)
        for node in (target, *(each for each in self.nodes if each is not target)):
            self.call(node, "CLUSTER", "SETSLOT", slot, "NODE", owner)

    def move(self, key: str, target: Running) -> None:
        """Move the slot of a key, and the key."""
        with self.begin_move(key, target) as source:
            self.move_key(source, key, target)
        self.end_move(key, target)
