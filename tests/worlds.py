"""Worlds: states and a real Redis behind one address, and a second Redis, the reference, that has the keys of both.

A world has the same states whatever answers for them (a proxy before two servers, or `sparkis serve`) and whatever the
upstream is (a single Redis, one with TLS, a master that sentinels know, a Redis Cluster). The reference has the
upstream's keys, and the states' keys with the states' values. So one rule says what each client of a world is answered:
what the reference answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from compat.conformance.certificates import Authority
from compat.conformance.servers import Running, free_port, redis_server, sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.nodes import HALVES, Nodes
from tests.server.redis_cluster import RedisCluster
from tests.server.sentinels import Sentinels

JOB = "job"
STATES = [
    StateDescriptor("speed", key="car", value="kmh"),
    StateDescriptor("apdex", key_format="dash/<account>/apdex", value="score"),
    StateDescriptor("facts", key="account", field="metric", value="n"),
    StateDescriptor("ids", key="k", member="m"),
    StateDescriptor("top", key="k", member="m", score="s"),
]
# Clients know the speeds by another name, too, and each fact as a key of its own.
RULES = """
[[rule]]
keys = "car/<car>"
owner = "state"
state_key = "job:speed:<car>"

[[rule]]
keys = "fact/<account>/<metric>"
owner = "state"
state_key = "job:facts:<account>"
field = "<metric>"

[[rule]]
keys = "cached:<client>:<n>"
owner = "upstream"
cache = "tracking"
"""
CARS, ACCOUNTS, METRICS = range(4), (b"7", b"8"), (b"errors", b"users")
MEMBERS = (b"a", b"b", b"c")
OLD = b"an old copy"
# A key that a state owns and does not have; the upstream has a copy of it.
ABSENT = b"job:speed:absent"


class Written(NamedTuple):
    """One change of a state, and the commands that do the same at the reference."""

    change: Change
    commands: tuple[tuple[bytes, ...], ...]

    @property
    def keys(self) -> list[bytes]:
        """The keys that it changes, by all names that clients know."""
        return [command[1] for command in self.commands]


def speed(car: int, value: bytes | None) -> Written:
    """Set a car's speed; None: remove it."""
    key, name = b"job:speed:%d" % car, b"car/%d" % car
    if value is None:
        return Written(Change("speed", Op.DELETE, key), ((b"DEL", key), (b"DEL", name)))
    return Written(Change("speed", Op.PUT, key, value=value), ((b"SET", key, value), (b"SET", name, value)))


def apdex(account: bytes, value: bytes) -> Written:
    """Set an account's apdex."""
    key = b"dash/%b/apdex" % account
    return Written(Change("apdex", Op.PUT, key, value=value), ((b"SET", key, value),))


def fact(account: bytes, metric: bytes, value: bytes) -> Written:
    """Set a field of an account's facts."""
    key, name = b"job:facts:%b" % account, b"fact/%b/%b" % (account, metric)
    return Written(Change("facts", Op.PUT, key, metric, value), ((b"HSET", key, metric, value), (b"SET", name, value)))


def score(member: bytes, value: int) -> Written:
    """Set a member's score."""
    text = b"%d" % value
    return Written(Change("top", Op.PUT, b"job:top:1", member, text), ((b"ZADD", b"job:top:1", text, member),))


def beginning() -> list[Written]:
    """Return the changes of the first epoch."""
    changes = [speed(car, b"%d" % (car * 10)) for car in CARS] + [apdex(account, b"0.9") for account in ACCOUNTS]
    changes += [fact(account, metric, b"1") for account in ACCOUNTS for metric in METRICS]
    changes += [score(member, at) for at, member in enumerate(MEMBERS)]
    changes += [
        Written(Change("ids", Op.PUT, b"job:ids:1", member, b""), ((b"SADD", b"job:ids:1", member),))
        for member in MEMBERS
    ]
    return changes


class Upstream(NamedTuple):
    """A team's Redis: the URL and the options for it, and its servers, masters first."""

    url: str
    options: tuple[str, ...]
    nodes: list[Running]


def single(folder: Path, stack: ExitStack) -> Upstream:
    """Start one Redis."""
    server = stack.enter_context(redis_server(folder))
    return Upstream(f"redis://127.0.0.1:{server.port}", (), [server])


def with_tls(folder: Path, stack: ExitStack) -> Upstream:
    """Start one Redis with TLS, which asks for a certificate."""
    authority, port = Authority(folder), free_port()
    authority.issue("upstream")
    options = ("--tls-port", str(port), *authority.options("upstream", auth_clients="yes"))
    server = stack.enter_context(redis_server(folder, *options))
    certificate, key = authority.issue("proxy")
    given = {"ca-cert-file": authority.ca, "cert-file": certificate, "key-file": key}
    return Upstream(
        f"rediss://127.0.0.1:{port}",
        tuple(word for name, path in given.items() for word in (f"--upstream-tls-{name}", str(path))),
        [server],
    )


def of_sentinels(folder: Path, stack: ExitStack) -> Upstream:
    """Start a master, its replica, and three sentinels."""
    sentinels = Sentinels(folder, stack)
    return Upstream(sentinels.url, (), [sentinels.master])


def cluster(folder: Path, stack: ExitStack) -> Upstream:
    """Start a Redis Cluster of three masters."""
    nodes = RedisCluster(folder, stack)
    return Upstream(nodes.url, (), nodes.nodes)


UPSTREAMS: Mapping[str, Callable[[Path, ExitStack], Upstream]] = {
    "single": single,
    "TLS": with_tls,
    "Sentinel": of_sentinels,
    "cluster": cluster,
}
PROGRAMS = ("proxy", "serve")


class World:
    """A program with states and an upstream, and the reference. port: the program's."""

    def __init__(self, folder: Path, stack: ExitStack, program: str, upstream: str, *options: str) -> None:
        for name in ("upstream", "reference", "served"):
            (folder / name).mkdir()
        self.log = folder / "log"
        self.upstream = UPSTREAMS[upstream](folder / "upstream", stack)
        self.reference = stack.enter_context(redis_server(folder / "reference"))
        self._changes = beginning()
        self.clear()
        with LogWriter(self.log, JOB, STATES, "first") as writer:
            writer.publish([each.change for each in self._changes])
        rules = folder / "rules.toml"
        rules.write_text(RULES)
        given = ("--upstream", self.upstream.url, "--ownership", str(folder / "owners.json"), "--routes", str(rules))
        self.running = self._start(program, folder, stack, *given, *self.upstream.options, *options)
        with self.connect() as client:
            for key in {each.keys[0] for each in self._changes}:
                eventually(lambda key=key: client.call("EXISTS", key).plain == 1)  # type: ignore[misc]
            eventually(lambda: client.call("EXISTS", "none").plain == 0)

    def _start(self, program: str, folder: Path, stack: ExitStack, *options: str) -> Running:
        if program == "serve":
            return stack.enter_context(sparkis_server(folder / "served", self.log, *options, is_loaded=False))
        nodes = Nodes(folder, stack, *HALVES)
        for at in range(len(HALVES)):
            nodes.start(at)
        return nodes.start_proxy(*options)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.running.port

    @property
    def copies(self) -> int:
        """The number of old copies that the upstream has."""
        return len({each.keys[0] for each in self._changes}) + 1

    def aliases(self) -> int:
        """Return the number of the reference's keys that are other names of states' keys."""
        with self.reference.connect() as direct:
            found = direct.call("EXISTS", *{name for each in self._changes for name in each.keys[1:]}).plain
        assert isinstance(found, int)
        return found

    def connect(self) -> Connection:
        """Connect as a client does."""
        return self.running.connect()

    def clear(self) -> None:
        """Remove what clients have written: the upstream has only copies of states' keys, the reference only these."""
        for node in [*self.upstream.nodes, self.reference]:
            with node.connect() as direct:
                for line in ("FLUSHALL", "FUNCTION FLUSH", "SCRIPT FLUSH", "CONFIG SET notify-keyspace-events KEA"):
                    assert direct.call(*line.split()).plain == b"OK"
        for key in {ABSENT, *(each.keys[0] for each in self._changes)}:
            self._copy(key)
        self._refer(self._changes)

    def _copy(self, key: bytes) -> None:
        for node in self.upstream.nodes:  # of a cluster, the key's master takes it
            with node.connect() as direct:
                direct.call("SET", key, OLD)

    def _refer(self, changes: Iterable[Written]) -> None:
        with self.reference.connect() as direct:
            for each in changes:
                for command in each.commands:
                    assert not direct.call(*command).is_error, command

    def publish(self, *changes: Written) -> None:
        """Publish an epoch, and wait until the program shows it; the reference changes after it."""
        with LogWriter(self.log, JOB, STATES, "first") as writer:
            epoch = writer.publish([each.change for each in changes])
        with self.connect() as client:
            eventually(lambda: self._shown(client), lambda shown: shown >= epoch)
        self._changes += changes
        self._refer(changes)

    @staticmethod
    def _shown(client: Connection) -> int:
        (lag,) = client.call("STATE", "LAG").plain
        return int(dict(zip(lag[::2], lag[1::2], strict=True))[b"applied"])
