"""Other features beside redis-server.

Ranks in a sorted set of a million members, a SCAN of a million keys, thousands of connections, TLS, a user that may
read only some keys, and a client that tracks all keys.
"""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import hiredis

from benchmarks.options import Options
from benchmarks.reads import PIPELINES, Case, measured, uniform
from benchmarks.results import Row, compared_row
from benchmarks.servers import (
    JOB,
    RANK_STATE,
    BenchmarkError,
    RedisServer,
    ServerUnderTest,
    Sparkis,
    both,
    key,
    member,
    temporary_folder,
)
from compat.conformance.certificates import Authority
from compat.conformance.servers import free_port
from resp_server.net.client import Client, ClientError

MEMBERS = 1_000_000
SCANNED_KEYS = 1_000_000
SCAN_COUNT = 1_000
CONNECTIONS = (1_000, 10_000)
# Open files of the load generator or a server, apart from connections (guess).
OTHER_FILES = 200
USER, PASSWORD = "tenant", "secret-of-the-tenant"
SCAN_BUDGET = 1.0
RANK_BUDGETS = {1: 1.0, 16: 1.0}
CONNECTION_BUDGETS = {1: 1.0}
TLS_BUDGETS = {1: 0.9, 16: 1.0, 100: 1.0}
# The minimum rate with checks or tracking, relative to a plain GET of the same server in the same run.
SHARE_OF_PLAIN = 0.9
ANSWER_S_MAX = 30.0
READ_BYTES = 1 << 20


def run(options: Options) -> Iterator[Row]:
    """Yield the rows of all these features."""
    yield from _ranks(options)
    yield from _scan(options)
    yield from _connections(options)
    yield from _tls(options)
    yield from _user(options)
    yield from _tracking(options)


def _ranks(options: Options) -> Iterator[Row]:
    members = max(100, int(MEMBERS * options.scale))
    name, middle = key(0, RANK_STATE), members // 2
    cases = [
        Case("ZREVRANGE, the first 10", ("ZREVRANGE", name, "0", "9"), 1, cost=2, budgets=RANK_BUDGETS),
        Case(
            f"ZREVRANGE, 10 from rank {middle:,}",
            ("ZREVRANGE", name, str(middle), str(middle + 9)),
            1,
            cost=4,
            budgets=RANK_BUDGETS,
        ),
        Case("ZRANK", ("ZRANK", name, "member:__rand_int__"), members, cost=4, budgets=RANK_BUDGETS),
        Case("ZSCORE", ("ZSCORE", name, "member:__rand_int__"), members, cost=2, budgets=RANK_BUDGETS),
    ]
    with both(options.keys, has_maps_and_lists=False, members=members) as servers:
        for words in (["ZREVRANGE", name, "0", "9"], ["ZREVRANGE", name, str(middle), str(middle + 9)]):
            _check_same(servers, words)
        for number in range(0, members, max(1, members // 100)):
            _check_same(servers, ["ZRANK", name, member(number)])
        for case in cases:
            for pipeline in PIPELINES:
                note = f"a sorted set of {members:,} members"
                row_name = f"{case.name}, pipeline {pipeline}"
                yield measured(row_name, servers, case, pipeline, options, note=note, part="surface")


def _check_same(servers: tuple[ServerUnderTest, ServerUnderTest], words: list[str]) -> None:
    found = []
    for server in servers:
        with Client("127.0.0.1", server.port) as client:
            found.append(client.call(*words))
    if found[0] != found[1] or found[0] in (None, []):
        raise BenchmarkError(f"{' '.join(words)}: {found[0]!r}, and redis-server has {found[1]!r}")


def _scan(options: Options) -> Iterator[Row]:
    keys = max(1000, int(SCANNED_KEYS * options.scale))
    with both(keys, has_maps_and_lists=False) as servers:
        rounds = []
        for number in range(options.rounds):
            options.report(f"SCAN of all keys: round {number + 1} of {options.rounds}")
            order = servers if number % 2 == 0 else servers[::-1]
            found = {server.name: _scan_rate(server, keys) for server in order}
            rounds.append((found[servers[0].name], found[servers[1].name]))
        yield compared_row(
            "SCAN of all keys",
            "surface",
            rounds,
            unit="keys/s",
            better="more",
            budget=SCAN_BUDGET,
            note=f"{keys:,} keys, COUNT {SCAN_COUNT:,}, one connection; nothing changes meanwhile",
        )


def _scan_rate(server: ServerUnderTest, keys: int) -> float:
    """Return the keys per second that a SCAN returns to one client; BenchmarkError if it misses some."""
    seen: set[str] = set()
    cursor, began_s = "0", time.perf_counter()
    with Client("127.0.0.1", server.port, timeout_s=ANSWER_S_MAX) as client:
        while True:
            cursor, found = client.call("SCAN", cursor, "COUNT", str(SCAN_COUNT))
            seen.update(found)
            if cursor == "0":
                break
    took_s = time.perf_counter() - began_s
    if len(seen) != keys:
        raise BenchmarkError(f"{server.name}: a SCAN returned {len(seen):,} keys of {keys:,}")
    return keys / took_s


def _connections(options: Options) -> Iterator[Row]:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = str(max(CONNECTIONS) + OTHER_FILES)
    with both(
        options.keys, has_maps_and_lists=False, ours=("--maxclients", limit), peers=("--maxclients", limit)
    ) as servers:
        for count in CONNECTIONS:
            if count + OTHER_FILES > most:
                raise BenchmarkError(f"{count:,} connections need as many open files; `ulimit -n` is {most:,}")
            case = replace(uniform(options.keys), clients=count, budgets=CONNECTION_BUDGETS)
            name = f"GET uniform, {count:,} connections"
            yield measured(name, servers, case, 1, options, note=f"{options.keys:,} keys, pipeline 1", part="surface")


def _tls(options: Options) -> Iterator[Row]:
    with temporary_folder() as folder:
        authority = Authority(folder)
        files = ("--tls-cert-file", "--tls-key-file")
        paths = [str(path) for path in authority.issue("server")]
        tls_options = [word for pair in zip(files, paths, strict=True) for word in pair]
        ports = free_port(), free_port()
        ours = (*tls_options, "--tls-port", str(ports[0]))
        peers = (
            *tls_options,
            "--tls-ca-cert-file",
            str(authority.ca),
            "--tls-auth-clients",
            "no",
            "--tls-port",
            str(ports[1]),
        )
        with both(options.keys, has_maps_and_lists=False, ours=ours, peers=peers, tls=authority.context()) as servers:
            for server, port in zip(servers, ports, strict=True):
                server.tls_port = port
            case = replace(uniform(options.keys), authority=authority.ca, budgets=TLS_BUDGETS)
            for pipeline in PIPELINES:
                name = f"GET uniform, TLS, pipeline {pipeline}"
                note = f"{options.keys:,} keys, the connections are made before"
                yield measured(name, servers, case, pipeline, options, note=note, part="surface")


def _user(options: Options) -> Iterator[Row]:
    with temporary_folder() as folder:
        rules = folder / "users.acl"
        rules.write_text(
            f"user default on nopass ~* &* +@all\nuser {USER} on >{PASSWORD} resetchannels ~{JOB}:* -@all +@read\n"
        )
        given = ("--aclfile", str(rules))
        with both(options.keys, has_maps_and_lists=False, ours=given, peers=given) as servers:
            _check_denied(servers)
            plain = [
                _measured_plain(servers, pipeline, options, "the same server's default user") for pipeline in PIPELINES
            ]
            yield from plain
            case = replace(uniform(options.keys), user=(USER, PASSWORD), budgets=_shares_of(plain))
            for pipeline in PIPELINES:
                name = f"GET uniform, a user with a key pattern, pipeline {pipeline}"
                yield measured(name, servers, case, pipeline, options, note=f"{options.keys:,} keys", part="surface")


def _measured_plain(servers: tuple[Sparkis, RedisServer], pipeline: int, options: Options, of: str) -> Row:
    """Measure the plain row that another row is compared with."""
    case = replace(uniform(options.keys), budgets={})
    name = f"GET uniform, {of}, pipeline {pipeline}"
    return measured(name, servers, case, pipeline, options, note=f"{options.keys:,} keys", part="surface")


def _shares_of(plain: Sequence[Row]) -> dict[int, float]:
    """Return budgets relative to the plain rows, by pipeline depth."""
    return {
        pipeline: round(SHARE_OF_PLAIN * row.judged_value, 2) for pipeline, row in zip(PIPELINES, plain, strict=True)
    }


def _check_denied(servers: tuple[ServerUnderTest, ServerUnderTest]) -> None:
    for server in servers:
        with Client("127.0.0.1", server.port) as client:
            client.call("AUTH", USER, PASSWORD)
            for words in (["GET", "other:value:1"], ["INFO"]):
                try:
                    client.call(*words)
                except ClientError as error:
                    if "NOPERM" in str(error):
                        continue
                    raise
                raise BenchmarkError(f"{server.name}: the user may {' '.join(words)}")


def _tracking(options: Options) -> Iterator[Row]:
    with both(options.keys, has_maps_and_lists=False) as servers:
        plain = [_measured_plain(servers, pipeline, options, "before a client tracks") for pipeline in PIPELINES]
        yield from plain
        case = replace(uniform(options.keys), budgets=_shares_of(plain))
        with _tracks(servers) as push_counts:
            for pipeline in PIPELINES:
                name = f"GET uniform, beside a client that tracks all keys, pipeline {pipeline}"
                note = f"{options.keys:,} keys, BCAST"
                yield measured(name, servers, case, pipeline, options, note=note, part="surface")
            silent = [name for name, count in push_counts.items() if not count]
            if silent:
                raise BenchmarkError(f"a tracking client of {', '.join(silent)} got no invalidation")


@contextmanager
def _tracks(servers: tuple[ServerUnderTest, ServerUnderTest]) -> Iterator[dict[str, int]]:
    """Run a client of each server that tracks all keys within the block; yield the numbers of received pushes."""
    push_counts = {server.name: 0 for server in servers}
    clients = [_Tracker(server, push_counts) for server in servers]
    try:
        yield push_counts
    finally:
        for client in clients:
            client.stop()


class _Tracker(threading.Thread):
    """A client that tracks every key, and reads all invalidations."""

    def __init__(self, server: ServerUnderTest, push_counts: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self._name, self._push_counts = server.name, push_counts
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.sendall(b"HELLO 3\r\nCLIENT TRACKING ON BCAST\r\n")
        self.start()

    def run(self) -> None:
        replies = hiredis.Reader()
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:
                return
            if not data:
                return
            replies.feed(data)
            while (reply := replies.gets()) is not False:
                self._push_counts[self._name] += isinstance(reply, hiredis.PushNotification)

    def stop(self) -> None:
        """Disconnect."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self._socket.close()
