"""Reads beside redis-server: redis-benchmark (50 connections) against both in turns, while one key in a hundred changes
every second. GET: uniform (every key alike), hot (one key in a thousand), and uniform with one request in ten a miss;
MGET of 100 keys; HGETALL of maps of 10 fields.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median

from benchmarks.servers import JOB, MAP_STATE, MAPS, STATE, Served, start_both

CLIENTS = 50
PIPELINES = (1, 16, 100)
# So many requests that a round takes about two seconds (guess; on two cores of 2024).
REQUESTS = {1: 100_000, 16: 400_000, 100: 1_000_000}


@dataclass(frozen=True)
class Case:
    """What redis-benchmark sends, with random numbers below `key_range`; `cost` is beside that of one GET (guess)."""

    name: str
    words: tuple[str, ...]
    key_range: int
    cost: int = 1


def cases(keys: int) -> list[Case]:
    """Return the cases for a state of so many keys."""
    value, packed = f"{JOB}:{STATE}:__rand_int__", f"{JOB}:{MAP_STATE}:__rand_int__"
    return [
        Case("GET uniform", ("GET", value), keys),
        Case("GET hot", ("GET", value), max(1, keys // 1000)),
        Case("GET 10% miss", ("GET", value), keys * 10 // 9),
        Case("MGET 100 uniform", ("MGET", *[value] * 100), keys, cost=40),
        Case("HGETALL 10 fields", ("HGETALL", packed), MAPS, cost=4),
    ]


@dataclass(frozen=True)
class Round:
    """One server, one round: requests per second, and microseconds of the server's processor time per request."""

    rate: float
    cpu_us: float


@dataclass(frozen=True)
class Row:
    """A line of the results: medians over the rounds, and the lowest and highest ratio of a pair of rounds."""

    name: str
    ours: float
    peer: float
    ratio: float
    unit: str
    ratio_low: float
    ratio_high: float
    ours_cpu_us: float
    peer_cpu_us: float


def run_round(server: Served, case: Case, pipeline: int, requests: int) -> Round:
    """Send the requests and check that the server counted as many."""
    name = case.words[0].lower()
    calls, cpu_s = server.calls(name), server.cpu_s()
    command = ["redis-benchmark", "-p", str(server.port), "-c", str(CLIENTS), "-P", str(pipeline), "-n", str(requests)]
    command += ["-r", str(case.key_range), "--csv", *case.words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = float(printed.splitlines()[-1].split(",")[1].strip('"'))
    used_s = server.cpu_s() - cpu_s
    counted = server.calls(name) - calls
    if not requests <= counted <= requests + CLIENTS * pipeline:
        raise SystemExit(f"{server.name} counted {counted} {name} of {requests} sent: the benchmark is void")
    return Round(rate, used_s / counted * 1e6)


def read_rows(keys: int, rounds: int, scale: float, report: Callable[[str], None]) -> Iterator[Row]:
    """Yield a row per case and pipeline depth."""
    ours, peer, folder = start_both(keys)
    random = Random(2)
    try:
        for server in (ours, peer):
            server.start_changes()
        for case in cases(keys):
            for pipeline in PIPELINES:
                requests = max(CLIENTS * pipeline, int(REQUESTS[pipeline] * scale / case.cost))
                pairs: list[tuple[Round, Round]] = []
                for number in range(rounds):
                    report(f"{case.name}, pipeline {pipeline}: round {number + 1} of {rounds}")
                    pairs.append((_measured(ours, case, pipeline, requests, random),
                                  _measured(peer, case, pipeline, requests, random)))  # fmt: skip
                yield _row(f"{case.name}, pipeline {pipeline}", pairs)
    finally:
        ours.stop()
        peer.stop()
        folder.cleanup()


def _measured(server: Served, case: Case, pipeline: int, requests: int, random: Random) -> Round:
    server.pause(False)
    measured = run_round(server, case, pipeline, requests)
    server.check_sample(random)
    server.pause(True)
    return measured


def _row(name: str, pairs: list[tuple[Round, Round]]) -> Row:
    ratios = [ours.rate / peer.rate for ours, peer in pairs]
    return Row(
        name=name,
        ours=round(median(ours.rate for ours, _ in pairs)),
        peer=round(median(peer.rate for _, peer in pairs)),
        ratio=round(median(ratios), 3),
        unit="requests/s",
        ratio_low=round(min(ratios), 3),
        ratio_high=round(max(ratios), 3),
        ours_cpu_us=round(median(ours.cpu_us for ours, _ in pairs), 2),
        peer_cpu_us=round(median(peer.cpu_us for _, peer in pairs), 2),
    )
