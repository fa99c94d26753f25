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
from compat.conformance.wire import Connection, requests
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
# Clients know the speeds by two other names, and each fact as a key of its own. A reload changes the first name.
RULES = """
[[rule]]
keys = "{car}/<car>"
owner = "state"
state_key = "job:speed:<car>"

[[rule]]
keys = "fact/<account>/<metric>"
owner = "state"
state_key = "job:facts:<account>"
field = "<metric>"

[[rule]]
keys = "board/<car>"
owner = "prefer-state"
state_key = "job:speed:<car>"

[[rule]]
keys = "ghost/<car>"
owner = "shadow"
state_key = "job:speed:<car>"

[[rule]]
keys = "cached:<client>:<n>"
owner = "upstream"
cache = "tracking"
"""
# A Redis Cluster has only one database.
RULES_OF_DATABASES = """
[[rule]]
keys = "base/<account>"
owner = "state"
state_key = "dash/<account>/apdex"
database = 2

[[rule]]
name = "cached in database 1, too"
keys = "cached:<client>:<n>"
owner = "upstream"
cache = "tracking"
database = 1
"""
CARS, ACCOUNTS, METRICS = range(4), (b"7", b"8"), (b"errors", b"users")
MEMBERS = (b"a", b"b", b"c")
OLD = b"an old copy"
# A key that a state owns and does not have; the upstream has a copy of it.
ABSENT = b"job:speed:absent"
Command = tuple[bytes, ...]


class Written(NamedTuple):
    """One change of a state, and the commands that do the same at the reference.

    keys: all names of the key in database 0, the state's own first.
    """

    change: Change
    commands: tuple[Command, ...]
    keys: tuple[bytes, ...]


def put(state: str, keys: tuple[bytes, ...], value: bytes | None) -> Written:
    """Set a string, by all of its names; None: remove it."""
    if value is None:
        return Written(Change(state, Op.DELETE, keys[0]), tuple((b"DEL", key) for key in keys), keys)
    return Written(Change(state, Op.PUT, keys[0], value=value), tuple((b"SET", key, value) for key in keys), keys)


def speed(car: int, value: bytes | None) -> Written:
    """Set a car's speed; None: remove it."""
    return put("speed", tuple(name % car for name in (b"job:speed:%d", b"car/%d", b"board/%d")), value)


def apdex(account: bytes, value: bytes) -> Written:
    """Set an account's apdex, which has another name in database 2."""
    made = put("apdex", (b"dash/%b/apdex" % account,), value)
    return made._replace(
        commands=(*made.commands, (b"SELECT", b"2"), (b"SET", b"base/" + account, value), (b"SELECT", b"0"))
    )


def fact(account: bytes, metric: bytes, value: bytes) -> Written:
    """Set a field of an account's facts."""
    key, name = b"job:facts:%b" % account, b"fact/%b/%b" % (account, metric)
    commands = ((b"HSET", key, metric, value), (b"SET", name, value))
    return Written(Change("facts", Op.PUT, key, metric, value), commands, (key, name))


def score(member: bytes, value: int) -> Written:
    """Set a member's score."""
    text, key = b"%d" % value, b"job:top:1"
    return Written(Change("top", Op.PUT, key, member, text), ((b"ZADD", key, text, member),), (key,))


def identity(member: bytes) -> Written:
    """Add a member to a set."""
    key = b"job:ids:1"
    return Written(Change("ids", Op.PUT, key, member, b""), ((b"SADD", key, member),), (key,))


def beginning() -> list[Written]:
    """Return the changes of the first epoch."""
    changes = [speed(car, b"%d" % (car * 10)) for car in CARS] + [apdex(account, b"0.9") for account in ACCOUNTS]
    changes += [fact(account, metric, b"1") for account in ACCOUNTS for metric in METRICS]
    changes += [score(member, at) for at, member in enumerate(MEMBERS)]
    return changes + [identity(member) for member in MEMBERS]


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
        self.log, self._rules = folder / "log", folder / "rules.toml"
        self.is_cluster = upstream == "cluster"
        # A pause has no other effect: the nodes of a cluster and sentinels would see a failure.
        self.may_pause = upstream in ("single", "TLS")
        self.upstream = UPSTREAMS[upstream](folder / "upstream", stack)
        self.reference = stack.enter_context(redis_server(folder / "reference"))
        # The last change of each key, or of each field.
        self._changes = {(each.change.key, each.change.field): each for each in beginning()}
        self.cars = b"car"
        # All names of the keys that changed last: servers report a change over each of their connections, maybe later.
        self.last_changed: set[bytes] = set()
        self.clear()
        with LogWriter(self.log, JOB, STATES, "first") as writer:
            writer.publish([each.change for each in self._changes.values()])
        self._write_rules()
        given = (
            "--upstream",
            self.upstream.url,
            "--ownership",
            str(folder / "owners.json"),
            "--routes",
            str(self._rules),
        )
        self.running = self._start(program, folder, stack, *given, *self.upstream.options, *options)
        with self.connect() as client:
            for key in {each.keys[0] for each in self._changes.values()}:
                eventually(lambda key=key: client.call("EXISTS", key).plain == 1)  # type: ignore[misc]
            eventually(lambda: client.call("EXISTS", "none").plain == 0)

    def _start(self, program: str, folder: Path, stack: ExitStack, *options: str) -> Running:
        if program == "serve":
            return stack.enter_context(sparkis_server(folder / "served", self.log, *options, is_loaded=False))
        nodes = Nodes(folder, stack, *HALVES)
        for at in range(len(HALVES)):
            nodes.start(at)
        return nodes.start_proxy(*options)

    def _write_rules(self) -> None:
        rules = RULES.replace("{car}", self.cars.decode())
        self._rules.write_text(rules if self.is_cluster else rules + RULES_OF_DATABASES)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.running.port

    def uncounted(self, database: int) -> int:
        """Return how many keys DBSIZE counts less than the reference has: states' other names, but not old copies."""
        copies = {each.keys[0] for each in self._changes.values()} | {ABSENT}
        names = [b"base/" + account for account in ACCOUNTS] if database == 2 else []
        if database == 0:
            names = [self._named(key) for each in self._changes.values() for key in each.keys[1:]]
        with self.reference.connect() as direct:
            direct.call("SELECT", database)
            found = direct.call("EXISTS", *names, "none").plain
        assert isinstance(found, int)
        return found - (len(copies) if database == 0 else 0)

    def connect(self) -> Connection:
        """Connect as a client does."""
        return self.running.connect()

    def clear(self) -> None:
        """Remove what clients have written: the upstream has only copies of states' keys, the reference only these."""
        for node in [*self.upstream.nodes, self.reference]:
            with node.connect() as direct:
                for line in ("FLUSHALL", "FUNCTION FLUSH", "SCRIPT FLUSH", "CONFIG SET notify-keyspace-events KEA"):
                    assert direct.call(*line.split()).plain == b"OK"
        copied = {ABSENT, *(each.keys[0] for each in self._changes.values())}
        for node in self.upstream.nodes:  # of a cluster, the key's master takes it
            with node.connect() as direct:
                direct.send(requests([b"SET", key, OLD] for key in copied))
                assert [direct.read() for _ in copied]
        self._refer(self._changes.values())

    def _refer(self, changes: Iterable[Written]) -> None:
        commands = [[*map(self._named, command)] for each in changes for command in each.commands]
        with self.reference.connect() as direct:
            direct.send(requests(commands))
            for command in commands:
                assert not direct.read().is_error, command

    def _named(self, word: bytes) -> bytes:
        return word.replace(b"car/", self.cars + b"/") if word.startswith(b"car/") else word

    def publish(self, *changes: Written) -> None:
        """Publish an epoch, and wait until the program shows it; the reference changes after it.

        A key that is not there is not removed: states invalidate it nevertheless, and a Redis does not.
        """
        changes = tuple(each for each in changes if not (each.change.op is Op.DELETE and self._is_absent(each)))
        keys = {key for each in changes for key in each.keys}
        self.last_changed = keys | {key.replace(b"car/", b"cars/") for key in keys}
        with LogWriter(self.log, JOB, STATES, "first") as writer:
            epoch = writer.publish([each.change for each in changes])
        with self.connect() as client:
            eventually(lambda: self._shown(client), lambda shown: shown >= epoch)
        self._changes |= {(each.change.key, each.change.field): each for each in changes}
        self._refer(changes)

    def _is_absent(self, written: Written) -> bool:
        return self._changes[(written.change.key, written.change.field)].change.op is Op.DELETE

    @staticmethod
    def _shown(client: Connection) -> int:
        (lag,) = client.call("STATE", "LAG").plain
        return int(dict(zip(lag[::2], lag[1::2], strict=True))[b"applied"])

    def rename(self) -> None:
        """Give the cars another name, by other rules: `car/1` is `cars/1` then, or the other way round."""
        before, self.cars = self.cars, b"cars" if self.cars == b"car" else b"car"
        self._write_rules()
        with self.connect() as client, self.reference.connect() as direct:
            assert not client.call("STATE", "RELOAD").is_error
            direct.send(requests([b"RENAME", b"%b/%d" % (before, car), b"%b/%d" % (self.cars, car)] for car in CARS))
            assert [direct.read() for _ in CARS]  # an error for a car without a speed
