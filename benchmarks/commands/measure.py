"""Measures the time of a request at sparkis beside redis-server, and beside twemproxy where it takes the request.

Before its time is measured, the replies of both are compared; after it, the server's count of the command with the
number sent. Each connection sends a pipeline, waits for all of its replies, and sends the next one, as in `load.pyx`.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from benchmarks import processes
from benchmarks.commands.budgets import TRACKING, Budget, budget_of
from benchmarks.commands.data import KEYS
from benchmarks.commands.requests import Exchange
from benchmarks.commands.rows import LOADS, Load, SpeedRow, Timing
from benchmarks.options import Options
from benchmarks.results import rounded
from benchmarks.servers import BenchmarkError
from compat.conformance.judge import Judge, command_of
from compat.conformance.wire import Connection, NotAReplyError, Reply, requests

# The time of a measurement (guess: most rows have twenty, so that all take less than half an hour).
MEASUREMENT_US = 25_000
# A pipeline of all connections may take this long and have this many bytes; otherwise it is shorter.
BATCH_US_MAX = 200_000
BATCH_BYTES_MAX = 32 << 20
# Connections of a request after which a connection sends nothing more.
LAST_CONNECTIONS = 100
PROBES = 3
# What twemproxy cannot do before a request. The request is the same work for a proxy, so its peer is sent it without.
NOT_OF_TWEMPROXY = ("HELLO 3", "SELECT 1")
OURS, REDIS, TWEMPROXY = "sparkis", "redis-server", "twemproxy"
# The number of the key whose replies are compared.
COMPARED = 7
# Replies about the server itself or its clients, or in no order: only their types are compared; tests compare more.
OF_THE_SERVER = frozenset(
    {
        *(f"acl|{name}" for name in ("genpass", "getuser", "help", "list")),
        *(f"cluster|{name}" for name in ("getkeysinslot", "help", "info", "links", "myid", "myshardid", "nodes")),
        *(f"cluster|{name}" for name in ("replicas", "shards", "slaves", "slots")),
        *(f"latency|{name}" for name in ("help", "histogram")),
        *(f"memory|{name}" for name in ("doctor", "help", "malloc-stats", "stats")),
        *("client|list", "command|count", "lastsave", "lolwut", "pubsub|help", "slowlog|get", "slowlog|len"),
    }
)


class Endpoint(NamedTuple):
    """A server's port, and its port for TLS.

    Args:
        pids: The processes that answer there, without those that apply logs.
        node: Its id in a cluster.
    """

    name: str
    port: int
    pids: Sequence[int] = ()
    tls_port: int = 0
    tls: ssl.SSLContext | None = None
    node: str = ""


class Session(NamedTuple):
    """What a connection does before it is measured."""

    name: str = ""
    lines: Sequence[str] = ()
    is_encrypted: bool = False
    is_tracking: bool = False


class Place(NamedTuple):
    """The servers that a request is sent to.

    Args:
        counted: The ports of all servers that count ours, beside those of the redis-server; empty: ours is not counted,
            because the INFO of one address with an upstream counts the upstream's requests.
        has_budget: Its times are compared with a budget.
    """

    name: str
    prefix: str
    is_direct: bool
    ours: Endpoint
    redis: Endpoint
    twemproxy: Endpoint | None
    counted: Sequence[int]
    has_budget: bool = True


class Subject:
    """An exchange at one endpoint, with its connections."""

    def __init__(self, endpoint: Endpoint, session: Session, exchange: Exchange, stack: ExitStack) -> None:
        self.name, self.exchange = endpoint.name, exchange.of_node(endpoint.node) if endpoint.node else exchange
        self._endpoint, self._session, self._stack = endpoint, session, stack
        self._packed, self._numbers_at = self.exchange.packed()
        self.sent = 0
        self.begin()
        self._connections: list[Connection] = []
        with self._connect() as connection:
            self.replies = self._replies(connection)
        self._reply_bytes = sum(len(each.raw) for each in self.replies)

    def begin(self) -> None:
        """Measure the processor time from now on."""
        self._run_ns = self._exchanges = 0

    @property
    def cpu_us(self) -> float:
        """The processor time of an exchange since `begin`, in microseconds."""
        return self._run_ns / 1000 / self._exchanges

    def _connect(self) -> Connection:
        encrypted = self._session.is_encrypted
        port, tls = (self._endpoint.tls_port, self._endpoint.tls) if encrypted else (self._endpoint.port, None)
        connection = Connection(port, tls=tls)
        # The time to accept a connection is no part of the request's: after the reply to PING it is accepted.
        accepted = [("PING",)] if self.exchange.is_last else []
        for words in (*(line.split() for line in self._session.lines), *self.exchange.before, *accepted):
            reply = connection.call(*words)
            if reply.is_error:
                connection.__exit__()
                raise BenchmarkError(f"{self.name} replied {reply.raw!r} to {' '.join(words)}")
        return connection

    def _replies(self, connection: Connection) -> list[Reply]:
        words = self.exchange.numbered(COMPARED)
        self.sent += 1
        connection.send(requests(words))
        return [connection.read() for _ in words]

    def batch_bytes(self) -> int:
        """Return the bytes of the exchange, with those of its replies."""
        return len(self._packed) + self._reply_bytes

    def first_us(self) -> float:
        """Return the time of one exchange alone."""
        one = Load("", 1, 1)
        return min(self.us(one, 1, 1) for _ in range(PROBES))

    def us(self, load: Load, depth: int, count: int) -> float:
        """Send `count` exchanges, or a few more, and return the microseconds for each."""
        connections, size = self._connected(load), depth * load.connections
        batches = max(1, -(-count // size))
        send = self._send_encrypted if self._session.is_encrypted else self._send
        before_ns = sum(map(processes.run_ns, self._endpoint.pids))
        took_s = send(connections, depth, batches * size)
        self._run_ns += sum(map(processes.run_ns, self._endpoint.pids)) - before_ns
        self._exchanges += batches * size
        self.sent += batches * size
        return took_s / (batches * size) * 1e6

    def _connected(self, load: Load) -> Sequence[Connection]:
        if self.exchange.is_last:
            self._close()
        while len(self._connections) < load.connections:
            self._connections.append(self._stack.enter_context(self._connect()))
        return self._connections[: load.connections]

    def _close(self) -> None:
        for each in self._connections:
            each.__exit__()
        self._connections.clear()

    def _send(self, connections: Sequence[Connection], depth: int, count: int) -> float:
        from benchmarks.native import load  # it is not compiled everywhere

        try:
            _, took_s, size = load.send_all(
                [each.fileno() for each in connections],
                self._packed,
                self._numbers_at,
                depth,
                count,
                KEYS,
                int.from_bytes(os.urandom(8)),
                replies=len(self.exchange.requests),
                takes_errors=any(_has_error(each) for each in self.replies),
            )
        except load.LoadError as error:
            raise BenchmarkError(f"{self.name}: {error}") from None
        has_equal_replies = not self.exchange.is_open and not self._session.is_tracking  # to which pushes may come
        if has_equal_replies and size != count * self._reply_bytes:
            raise BenchmarkError(f"{self.name} sent {size:,} bytes of replies instead of {count * self._reply_bytes:,}")
        return took_s

    def _send_encrypted(self, connections: Sequence[Connection], depth: int, count: int) -> float:
        """Do the same over TLS, which the load generator does not speak: all connections send, then all are read."""
        batch = requests(self.exchange.numbered(COMPARED)) * depth
        size = self._reply_bytes * depth
        began_s = time.perf_counter()
        for _ in range(count // (depth * len(connections))):
            for each in connections:
                each.send(batch)
            for each in connections:
                each.read_bytes(size)
        return time.perf_counter() - began_s


def _has_error(reply: Reply) -> bool:
    return reply.is_error or (reply.type == "*" and any(map(_has_error, reply.value or ())))


def measured(
    exchange: Exchange,
    place: Place,
    session: Session,
    judge: Judge,
    options: Options,
    plain_us: Mapping[str, float] | None = None,
) -> SpeedRow:
    """Measure one row. plain_us: the times of the same without tracking, by load, for a session that tracks."""
    budget = budget_of(exchange.work, is_direct=place.is_direct) if place.has_budget else None
    text = f"≤ {TRACKING:g} x without tracking" if plain_us else budget.text if budget else ""
    row = SpeedRow(exchange.name, exchange.group, place.name, session.name, exchange.size, text)
    try:
        with ExitStack() as stack:
            subjects, note = _subjects(exchange, place, session, judge, stack)
            is_divided = exchange.is_split and len(place.counted) > 1
            if note or is_divided or subjects[0].replies[0].is_error:  # not all servers count errors
                exchange = replace(exchange, counted=("", 0))
            before = _count(exchange, place)
            for each in subjects:
                each.sent = 0
            timings = []
            for load in LOADS:
                depth, rounds = _rounds(subjects, load, options)
                limit_us = TRACKING * plain_us[load.name] if plain_us else None
                timing = _timing(rounds, depth, budget, limit_us)
                our_us, their_us = (rounded(each.cpu_us) for each in subjects[:2])
                timings.append(replace(timing, ours_cpu_us=our_us, redis_cpu_us=their_us))
            sent = sum(each.sent for each in subjects if place.counted or each.name != OURS)
            _check_count(_count(exchange, place) - before, exchange, place, sent)
    except (BenchmarkError, OSError, EOFError, NotAReplyError) as error:
        return replace(row, error=str(error) or type(error).__name__)
    return replace(row, note=note, timings=timings)


def _subjects(
    exchange: Exchange, place: Place, session: Session, judge: Judge, stack: ExitStack
) -> tuple[list[Subject], str]:
    """Return the exchange at ours, at redis-server, and at twemproxy; BenchmarkError if a reply differs. And a note."""
    ours, theirs = (Subject(each, session, exchange, stack) for each in (place.ours, place.redis))
    if exchange.stand_in and theirs.replies[0].is_error and not ours.replies[0].is_error:
        stood_in = replace(exchange, requests=(exchange.stand_in,), is_open=True)
        return [ours, Subject(place.redis, session, stood_in, stack)], f"beside {' '.join(exchange.stand_in[:2])}"
    for words, their, our in zip(exchange.numbered(COMPARED), theirs.replies, ours.replies, strict=True):
        # With an upstream, what is about all keys, or about the server, is about both sides.
        is_of_both = not place.is_direct and not exchange.counted[0] and their.type == our.type
        if not (is_of_both or is_same(judge, words, their, our)):
            name = b" ".join(words[:2]).decode()
            raise BenchmarkError(f"{name}: {our.raw[:80]!r} is the reply, and {their.raw[:80]!r} that of redis-server")
    subjects = [ours, theirs]
    if place.twemproxy and exchange.counted[0]:
        with suppress(BenchmarkError, OSError, EOFError):  # it takes only some commands
            plain = session._replace(lines=[line for line in session.lines if line not in NOT_OF_TWEMPROXY])
            proxied, direct = (Subject(each, plain, exchange, stack) for each in (place.twemproxy, place.redis))
            if [each.raw for each in proxied.replies] == [each.raw for each in direct.replies]:
                subjects.append(proxied)
    return subjects, ""


def is_same(judge: Judge, words: Sequence[bytes], theirs: Reply, ours: Reply) -> bool:
    """Return whether two replies are the same, as far as they can be, or differ as a deviation says."""
    name = full_name(words)
    if name in OF_THE_SERVER or command_of(words) in OF_THE_SERVER:
        return theirs.type == ours.type
    return judge.is_same(words, theirs, ours) or judge.deviations.explains(name, theirs, ours)


def full_name(words: Sequence[bytes]) -> str:
    """Return the first two words, as the name of a subcommand."""
    return b"|".join(words[:2]).decode("latin-1").lower()


def _rounds(subjects: Sequence[Subject], load: Load, options: Options) -> tuple[int, list[dict[str, float]]]:
    """Return the requests in a write, and the times of each round by the subjects' names."""
    depth = _fitting(subjects, load)
    if subjects[0].exchange.is_last:
        load, depth = load._replace(connections=LAST_CONNECTIONS), 1
    counts = {}
    for each in subjects:
        warm_us = each.us(load, depth, 1)
        counts[each.name] = max(1, int(MEASUREMENT_US * options.scale / warm_us)) if not each.exchange.is_last else 1
        each.begin()
    rounds = []
    for number in range(options.rounds):
        order = subjects if number % 2 == 0 else subjects[::-1]  # alternate the order
        rounds.append({each.name: each.us(load, depth, counts[each.name]) for each in order})
    return depth, rounds


def _fitting(subjects: Sequence[Subject], load: Load) -> int:
    """Return the load's depth, or a smaller one if its pipelines would take too long, or too much memory."""
    slowest_us = max(each.first_us() for each in subjects)
    largest_bytes = max(each.batch_bytes() for each in subjects)
    most = min(BATCH_US_MAX / slowest_us, BATCH_BYTES_MAX / largest_bytes) / load.connections
    return max(1, min(load.depth, int(most)))


def _timing(rounds: Sequence[Mapping[str, float]], depth: int, budget: Budget | None, limit_us: float | None) -> Timing:
    ours, theirs, proxied = ([each.get(name, 0.0) for each in rounds] for name in (OURS, REDIS, TWEMPROXY))
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    redis_us, twemproxy_us = median(theirs), median(proxied) or None
    if budget and not limit_us:
        limit_us = budget.limit_us(redis_us, twemproxy_us)
    return Timing(
        rounded(median(ours)),
        rounded(redis_us),
        rounded(median(ratios)),
        rounded(min(ratios)),
        rounded(max(ratios)),
        depth,
        rounded(limit_us / redis_us) if limit_us else None,
        rounded(twemproxy_us) if twemproxy_us else None,
    )


def _count(exchange: Exchange, place: Place) -> int:
    """Return how many calls of the exchange's command the servers have counted; 0 if they are not compared."""
    name = exchange.counted[0]
    return sum(_calls(port, name) for port in {*place.counted, place.redis.port}) if name else 0


def _calls(port: int, name: str) -> int:
    with Connection(port) as connection:
        lines: list[bytes] = connection.call("INFO", "commandstats").value.splitlines()
    start = f"cmdstat_{name}:calls=".encode()
    return sum(int(line.removeprefix(start).partition(b",")[0]) for line in lines if line.startswith(start))


def _check_count(counted: int, exchange: Exchange, place: Place, sent: int) -> None:
    """Raise BenchmarkError if servers have not counted what was sent; a split request counts for each of its parts."""
    expected = sent * exchange.counted[1]
    if exchange.counted[0] and not expected <= counted <= expected * max(1, len(place.counted)):
        raise BenchmarkError(f"the servers counted {counted:,} {exchange.counted[0]} of {expected:,} sent")
