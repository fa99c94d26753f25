"""The places where all commands are measured: each has sparkis and a redis-server with the same keys.

The servers of a place run while it is measured. One redis-server, which has the states' keys, is the peer of most.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from benchmarks import processes
from benchmarks.commands.data import KEYS, SIZES, STATE_OF, STATES, UPSTREAM, dataset, key, numbered
from benchmarks.commands.measure import OURS, REDIS, TWEMPROXY, Endpoint, Place, Session
from benchmarks.proxy import end_process, start_program, start_state_servers, start_twemproxy
from benchmarks.redis_cluster import start_cluster, tag_of
from benchmarks.servers import LOAD_TIMEOUT_S, BenchmarkError, start_redis
from compat.conformance.certificates import Authority
from compat.conformance.dataset import Dataset
from compat.conformance.dataset_log import dataset_writer, publish
from compat.conformance.servers import free_port, write
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.model.slots import SLOTS

USER, PASSWORD = "tenant", "secret-of-the-tenant"
PATTERNS = " ".join(f"~{prefix}:{name}:*" for prefix in (STATES, UPSTREAM) for name in sorted(STATE_OF.values()))
RULES = f"user default on nopass ~* &* +@all\nuser {USER} on >{PASSWORD} {PATTERNS} &* +@all\n"

PLAIN = Session()
RESP3 = Session("RESP3", ("HELLO 3",))
TRACKING = (
    Session("tracking", ("HELLO 3", "CLIENT TRACKING ON"), is_tracking=True),
    Session("tracking OPTIN", ("HELLO 3", "CLIENT TRACKING ON OPTIN"), is_tracking=True),
    Session("tracking BCAST", ("HELLO 3", "CLIENT TRACKING ON BCAST"), is_tracking=True),
)
WITH_USER = Session("a user with patterns", (f"AUTH {USER} {PASSWORD}",))
ENCRYPTED = Session("TLS", is_encrypted=True)
OTHER_DATABASE = Session("another database", ("SELECT 1",))


class Commands(Enum):
    """Which commands are measured at a place, beside shapes."""

    NONE = auto()
    BEFORE_AN_UPSTREAM = auto()  # all that may reach it
    OF_A_SERVER = auto()  # all but those of a cluster's node
    OF_A_NODE = auto()
    ABOUT_KEYS = auto()


class Setting(NamedTuple):
    """What is measured at a place.

    Args:
        sessions: Those that shapes are measured in.
        more_sessions: Those that `--full` adds.
    """

    place: str
    prefix: str
    commands: Commands = Commands.NONE
    sessions: Sequence[Session] = ()
    more_sessions: Sequence[Session] = ()


# Keys of one node of a Redis Cluster, which is the peer.
OF_A_MASTER = f"{{{tag_of(0)}}}{UPSTREAM}"
SERVER = Setting("serve", STATES, Commands.OF_A_SERVER, (PLAIN, RESP3, *TRACKING, WITH_USER, ENCRYPTED))
NODE = Setting("a node of a cluster", STATES, Commands.OF_A_NODE)
WORKERS = Setting("two workers", STATES, Commands.NONE, (PLAIN,), (RESP3, *TRACKING, WITH_USER, ENCRYPTED))
PURE = Setting("serve, without the compiled core", STATES, Commands.NONE, (PLAIN,), (RESP3, *TRACKING))
OF_STATES = Setting(
    *("with an upstream, a state's key", STATES, Commands.BEFORE_AN_UPSTREAM),
    *((PLAIN, RESP3, TRACKING[0]), (*TRACKING[1:], WITH_USER, ENCRYPTED)),
)
OF_UPSTREAM = Setting(
    *("with an upstream, its key", UPSTREAM, Commands.ABOUT_KEYS),
    *((PLAIN, RESP3, TRACKING[0], OTHER_DATABASE), (*TRACKING[1:], WITH_USER, ENCRYPTED)),
)
PROXY = Setting("a proxy to two servers", STATES, Commands.NONE, (PLAIN, RESP3, TRACKING[0]), TRACKING[1:])
CLUSTER = Setting("Redis Cluster behind", OF_A_MASTER, Commands.NONE, (PLAIN,), (RESP3, *TRACKING))
SETTINGS = (SERVER, NODE, WORKERS, PURE, OF_STATES, OF_UPSTREAM, PROXY, CLUSTER)

Measurable = tuple[Setting, Place]


class Scene:
    """The states' log, and a redis-server with the same keys; `places` starts the servers of each place."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack, self.states = folder, stack, dataset(STATES)
        with dataset_writer(folder / "log") as writer:
            publish(self.states, writer)
        (folder / "users.acl").write_text(RULES)
        self._authority = Authority(folder / "tls")
        self._redis = self._start_redis("states", stack, self.states)

    def places(self, wanted: Sequence[Setting]) -> Iterator[Measurable]:
        """Start each wanted place, and yield it; its servers end when the next one is asked for."""
        starts: Mapping[Callable[[ExitStack], Iterator[Measurable]], Sequence[Setting]] = {
            self._server: [SERVER],
            self._node: [NODE],
            self._workers: [WORKERS],
            self._pure: [PURE],
            self._upstream: [OF_STATES, OF_UPSTREAM],
            self._proxy: [PROXY],
            self._cluster: [CLUSTER],
        }
        for start, settings in starts.items():
            if any(each in wanted for each in settings):
                with ExitStack() as stack:
                    yield from start(stack)

    def _server(self, stack: ExitStack) -> Iterator[Measurable]:
        yield SERVER, self._place(SERVER, self._serve("serve", stack), is_direct=True)

    def _workers(self, stack: ExitStack) -> Iterator[Measurable]:
        yield WORKERS, self._place(WORKERS, self._serve("workers", stack, "--workers", "2"), is_direct=True)

    def _pure(self, stack: ExitStack) -> Iterator[Measurable]:
        with patch.dict(os.environ, {"SPARKIS_PURE": "1"}):
            ours = self._serve("pure", stack)
        yield PURE, self._place(PURE, ours, is_direct=True)._replace(has_budget=False)

    def _node(self, stack: ExitStack) -> Iterator[Measurable]:
        """Start a node that has all slots, beside one of redis-server."""
        options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
        node = self._start_redis("node", stack, None, *options)
        with Connection(node.port) as connection:
            connection.call("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
            their_id = connection.call("CLUSTER", "MYID").value.decode()
            eventually(lambda: b"cluster_state:ok" in connection.call("CLUSTER", "INFO").value)
        _fill(node, self.states)
        port, topology = free_port(), self._folder / "topology.json"
        rows = [{"host": "127.0.0.1", "port": port, "slots": f"0-{SLOTS - 1}"}]
        topology.write_text(json.dumps({"version": 1, "nodes": rows}))
        options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
        ours = self._serve("node", stack, *options, port=port, has_tls=False)
        with Connection(port) as connection:
            ours = ours._replace(node=connection.call("CLUSTER", "MYID").value.decode())
        yield NODE, self._place(NODE, ours, is_direct=True, redis=node._replace(node=their_id))

    def _upstream(self, stack: ExitStack) -> Iterator[Measurable]:
        """Start one address for the states and an upstream, which has keys in another database, too."""
        keys = dataset(UPSTREAM)
        upstream = self._start_redis("upstream", stack, keys)
        _fill(upstream, keys, "SELECT 1")
        url, owners = f"redis://127.0.0.1:{upstream.port}", self._folder / "owners.json"
        ours = self._serve("swap", stack, "--upstream", url, "--ownership", str(owners))
        _wait_for(ours, UPSTREAM)
        yield (
            OF_STATES,
            self._place(OF_STATES, ours, proxied=self._twemproxy("of_states", stack, self._redis), counted=()),
        )
        proxied = self._twemproxy("of_upstream", stack, upstream)
        yield OF_UPSTREAM, self._place(OF_UPSTREAM, ours, redis=upstream, proxied=proxied, counted=(upstream.port,))

    def _proxy(self, stack: ExitStack) -> Iterator[Measurable]:
        """Start a proxy to two state servers, beside twemproxy to two redis-servers."""
        log, folder = self._folder / "log", self._folder / "proxied"
        folder.mkdir()
        _, servers = start_state_servers(stack, folder, log)
        proxy = start_program(stack, "resp_server.programs.proxy", "--log", str(log), "--port", "0", *self._users())
        pids = [pid for each in (proxy, *servers) for pid in processes.serving(each.process.pid)]
        ours = Endpoint(OURS, proxy.port, pids)
        _wait_for(ours, STATES)
        second = self._start_redis("second", stack, self.states)
        proxied = self._twemproxy("proxied", stack, self._redis, second)
        yield PROXY, self._place(PROXY, ours, proxied=proxied, counted=(*(each.port for each in servers), second.port))

    def _cluster(self, stack: ExitStack) -> Iterator[Measurable]:
        """Start one address with a Redis Cluster as its upstream; all keys are at one of its masters."""
        nodes = start_cluster(self._folder / "cluster", stack)
        _fill(Endpoint(REDIS, nodes[0].port), dataset(OF_A_MASTER))
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        ours = self._serve("of_cluster", stack, "--upstream", url, "--ownership", str(self._folder / "cluster.json"))
        _wait_for(ours, OF_A_MASTER)
        redis = Endpoint(REDIS, nodes[0].port, [nodes[0].process.pid])
        yield CLUSTER, self._place(CLUSTER, ours, redis=redis, counted=(redis.port,))

    def _place(
        self,
        setting: Setting,
        ours: Endpoint,
        *,
        is_direct: bool = False,
        redis: Endpoint | None = None,
        proxied: Endpoint | None = None,
        counted: Sequence[int] | None = None,
    ) -> Place:
        ports = (ours.port,) if counted is None else counted
        return Place(setting.place, setting.prefix, is_direct, ours, redis or self._redis, proxied, ports)

    def _users(self) -> Sequence[str]:
        return ("--aclfile", str(self._folder / "users.acl"))

    def _serve(self, name: str, stack: ExitStack, *options: str, port: int = 0, has_tls: bool = True) -> Endpoint:
        """Start `sparkis serve`, and wait until it has the states' keys."""
        tls_port = free_port()
        files = ("--log", str(self._folder / "log"), "--store", str(self._folder / f"store of {name}"))
        tls = ("--tls-port", str(tls_port), *self._authority.options(auth_clients="no"))
        given = (*files, "--port", str(port), *self._users(), *(tls if has_tls else ()), *options)
        server = start_program(stack, "resp_server.programs.serve", *given)
        found = Endpoint(OURS, server.port, (), tls_port, self._authority.context())
        _wait_for(found, STATES)
        return found._replace(pids=processes.serving(server.process.pid))

    def _start_redis(self, name: str, stack: ExitStack, keys: Dataset | None, *options: str) -> Endpoint:
        """Start a redis-server with these keys, which ends with the block."""
        folder = self._folder / f"redis of {name}"
        folder.mkdir()
        (folder / "users.acl").write_text(RULES)
        tls_port = free_port()
        tls = ("--tls-port", str(tls_port), *self._authority.options(auth_clients="no"))
        server = start_redis(folder, "--aclfile", str(folder / "users.acl"), *tls, *options)
        stack.callback(end_process, server.process)
        endpoint = Endpoint(REDIS, server.port, [server.process.pid], tls_port, self._authority.context())
        if keys is not None:
            _fill(endpoint, keys)
        return endpoint

    def _twemproxy(self, name: str, stack: ExitStack, *servers: Endpoint) -> Endpoint:
        folder = self._folder / f"twemproxy {name}"
        folder.mkdir()
        return Endpoint(TWEMPROXY, start_twemproxy(stack, folder, [each.port for each in servers]).port)


def _fill(endpoint: Endpoint, keys: Dataset, *lines: str) -> None:
    """Write keys into a redis-server. lines: what the connection sends before."""
    with Connection(endpoint.port) as connection:
        for line in lines:
            connection.call(*line.split())
        write(connection, keys)


def _wait_for(endpoint: Endpoint, prefix: str) -> None:
    """Wait until an endpoint has the last key of each kind and size."""

    def has_all() -> bool:
        try:
            with Connection(endpoint.port) as connection:
                return all(connection.call("EXISTS", name).value == 1 for name in names)
        except EOFError:
            return False

    names = [numbered(key(prefix, kind, size), KEYS - 1) for kind in STATE_OF for size in SIZES]
    eventually(has_all, awaited="the keys are loaded", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError)
