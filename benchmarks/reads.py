"""Reads beside redis-server.

The load generator sends requests over 50 connections to both in turns, while one key in a hundred changes every second.
GET: uniform (all keys), hot (one key in a thousand), and uniform with one miss in ten requests; MGET of 100 keys;
HGETALL of maps of 10 fields; LRANGE of lists of 100 elements. Then GET without the compiled core, and with one and two
serving processes. `many` measures GET of a million keys and more.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median

from benchmarks import load
from benchmarks.options import Options
from benchmarks.results import Row, compared_row
from benchmarks.servers import (
    JOB,
    LIST_STATE,
    LISTS,
    MAP_STATE,
    MAPS,
    STATE,
    BenchmarkError,
    RedisServer,
    ServerUnderTest,
    Sparkis,
    both,
    supports_workers,
)

CLIENTS = 50
PIPELINES = (1, 16, 100)
# Requests per round, by pipeline depth; a round takes about 1.5 seconds (guess; on two cores of 2024).
REQUESTS = {1: 100_000, 16: 600_000, 100: 1_000_000}
# By pipeline depth.
GET_BUDGETS = {1: 1.0, 16: 1.6, 100: 2.0}
MGET_BUDGETS = dict.fromkeys(PIPELINES, 2.0)
PURE_BUDGETS = {1: 0.5, 16: 0.3, 100: 0.3}
COLLECTION_BUDGETS = {16: 1.5, 100: 1.5}
WORKERS = (1, 2)


@dataclass(frozen=True)
class Case:
    """A request, with random numbers below `key_range`. cost: relative to a GET (guess).

    user: name and password; None: the default user. authority: the CA file for a TLS connection; None: no TLS.
    budgets: the minimum ratio to redis-server, by pipeline depth.
    """

    name: str
    words: tuple[str, ...]
    key_range: int
    cost: int = 1
    clients: int = CLIENTS
    user: tuple[str, str] | None = None
    authority: Path | None = None
    budgets: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """One server, one round: requests per second, and microseconds of the server's processor time per request."""

    rate: float
    cpu_us: float


def uniform(keys: int) -> Case:
    """GET of random keys, each with the same probability."""
    return Case("GET uniform", ("GET", f"{JOB}:{STATE}:__rand_int__"), keys, budgets=GET_BUDGETS)


def cases(keys: int) -> list[Case]:
    """Return the cases for this number of keys."""
    value, packed, items = (f"{JOB}:{state}:__rand_int__" for state in (STATE, MAP_STATE, LIST_STATE))
    return [
        uniform(keys),
        Case("GET hot", ("GET", value), max(1, keys // 1000), budgets=dict.fromkeys(PIPELINES, 1.0)),
        Case("GET 10% miss", ("GET", value), keys * 10 // 9, budgets=GET_BUDGETS),
        Case("MGET 100 uniform", ("MGET", *[value] * 100), keys, cost=40, budgets=MGET_BUDGETS),
        Case("HGETALL 10 fields", ("HGETALL", packed), MAPS, cost=4, budgets=COLLECTION_BUDGETS),
        Case("LRANGE 100 elements", ("LRANGE", items, "0", "99"), LISTS, cost=10, budgets=COLLECTION_BUDGETS),
    ]


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each case and pipeline depth."""
    keys = f"{options.keys:,} keys"
    with both(options.keys) as servers:
        for case in cases(options.keys):
            for pipeline in PIPELINES:
                yield measured(f"{case.name}, pipeline {pipeline}", servers, case, pipeline, options, note=keys)
    yield from _in_python(options)
    if supports_workers():
        yield from _workers(options)


def _in_python(options: Options) -> Iterator[Row]:
    """Yield rows of a server without the compiled core."""
    case = replace(uniform(options.keys), budgets=PURE_BUDGETS)
    with both(options.keys, has_maps_and_lists=False, is_pure=True) as servers:
        for pipeline in PIPELINES:
            name = f"GET uniform, in Python alone, pipeline {pipeline}"
            yield measured(name, servers, case, pipeline, options, note=f"{options.keys:,} keys")


def _workers(options: Options) -> Iterator[Row]:
    """Yield rows of one and two serving processes. The load generator needs a core, too; redis-server uses only one."""
    for workers in WORKERS:
        with both(options.keys, workers=workers, has_maps_and_lists=False) as servers:
            for pipeline in PIPELINES:
                name = f"GET uniform, {workers} worker{'s' * (workers > 1)}, pipeline {pipeline}"
                note = f"{options.keys:,} keys; redis-server has one"
                case = replace(uniform(options.keys), budgets={})
                yield measured(name, servers, case, pipeline, options, note=note)


def measured(
    name: str,
    servers: tuple[Sparkis, RedisServer],
    case: Case,
    pipeline: int,
    options: Options,
    *,
    note: str,
    series: str = "",
    x: float | None = None,
    part: str = "reads",
) -> Row:
    """Measure one case in rounds, the servers in turns."""
    requests = max(case.clients * pipeline, int(REQUESTS[pipeline] * options.scale / case.cost))
    random = Random(2)
    rounds: list[tuple[Round, ...]] = []
    for number in range(options.rounds):
        options.report(f"{name}: round {number + 1} of {options.rounds}")
        order = servers if number % 2 == 0 else servers[::-1]  # alternate the order
        found = {server.name: round_of(server, case, pipeline, requests, random) for server in order}
        rounds.append(tuple(found[server.name] for server in servers))
    return compared_row(
        name,
        part,
        [(ours.rate, peer.rate) for ours, peer in rounds],
        unit="requests/s",
        better="more",
        budget=case.budgets.get(pipeline),
        peer_name=servers[1].name,
        ours_cpu_us=median(ours.cpu_us for ours, _ in rounds),
        peer_cpu_us=median(peer.cpu_us for _, peer in rounds),
        note=note,
        series=series,
        x=x,
    )


def round_of(server: ServerUnderTest, case: Case, pipeline: int, requests: int, random: Random) -> Round:
    """Send the requests while keys change; then check the server's count of them, and some of its values."""
    name = case.words[0].lower()
    with server.changing():
        calls, cpu_s = server.calls(name), server.cpu_s()
        rate = benchmark(server.tls_port if case.authority else server.port, case, pipeline, requests)
        used_s, counted = server.cpu_s() - cpu_s, server.calls(name) - calls
    if not requests <= counted <= requests + case.clients * pipeline:  # only complete pipelines are sent
        raise BenchmarkError(f"{server.name} counted {counted} {name} of {requests} sent: the benchmark is invalid")
    server.check_sample(random)
    return Round(rate, used_s / counted * 1e6)


def benchmark(port: int, case: Case, pipeline: int, requests: int) -> float:
    """Send the requests from a separate process; return the replies per second."""
    if case.authority:
        return _redis_benchmark(port, case, case.authority, pipeline, requests)
    try:
        return load.rate(
            port,
            case.words,
            clients=case.clients,
            pipeline=pipeline,
            requests=requests,
            key_range=case.key_range,
            user=case.user,
        )
    except load.NotMeasuredError as error:
        raise BenchmarkError(f"nothing was measured: {error}") from None


def _redis_benchmark(port: int, case: Case, authority: Path, pipeline: int, requests: int) -> float:
    """Do the same with redis-benchmark, over TLS, which the load generator does not support."""
    command = ["redis-benchmark", "-p", str(port), "-c", str(case.clients), "-P", str(pipeline), "-n", str(requests)]
    command += ["-r", str(case.key_range), "--tls", "--cacert", str(authority), "--csv", *case.words]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return float(list(csv.DictReader(done.stdout.splitlines()))[-1]["rps"])
    except (IndexError, KeyError, ValueError):
        raise BenchmarkError(f"redis-benchmark did not measure: {(done.stderr or done.stdout)[:500]}") from None
