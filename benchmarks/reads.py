"""GET beside redis-server: redis-benchmark (50 connections) against both in turns, while one key in a hundred changes
every second. Cases: uniform (every key alike), hot (one key in a thousand), and uniform with one request in ten a miss.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import median

from benchmarks.servers import JOB, STATE, Served, start_both

CLIENTS = 50
PIPELINES = (1, 16, 100)
# So many requests that a round takes about two seconds (guess; on two cores of 2024).
REQUESTS = {1: 100_000, 16: 400_000, 100: 1_000_000}


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


def run_round(server: Served, pipeline: int, key_range: int, requests: int) -> Round:
    """Send the requests and check that the server counted as many."""
    calls, cpu_s = server.calls("get"), server.cpu_s()
    command = ["redis-benchmark", "-p", str(server.port), "-c", str(CLIENTS), "-P", str(pipeline), "-n", str(requests)]
    command += ["-r", str(key_range), "--csv", "GET", f"{JOB}:{STATE}:__rand_int__"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = float(printed.splitlines()[-1].split(",")[1].strip('"'))
    used_s = server.cpu_s() - cpu_s
    counted = server.calls("get") - calls
    if not requests <= counted <= requests + CLIENTS * pipeline:
        raise SystemExit(f"{server.name} counted {counted} GETs of {requests} sent: the benchmark is void")
    return Round(rate, used_s / counted * 1e6)


def get_rows(keys: int, rounds: int, scale: float, report: Callable[[str], None]) -> Iterator[Row]:
    """Yield a row per case and pipeline depth."""
    ours, peer, folder = start_both(keys)
    random = Random(2)
    try:
        for server in (ours, peer):
            server.start_changes()
        for case, key_range in (("uniform", keys), ("hot", max(1, keys // 1000)), ("10% miss", keys * 10 // 9)):
            for pipeline in PIPELINES:
                requests = int(REQUESTS[pipeline] * scale)
                pairs: list[tuple[Round, Round]] = []
                for number in range(rounds):
                    report(f"GET {case}, pipeline {pipeline}: round {number + 1} of {rounds}")
                    pairs.append((_measured(ours, pipeline, key_range, requests, random),
                                  _measured(peer, pipeline, key_range, requests, random)))  # fmt: skip
                yield _row(f"GET {case}, pipeline {pipeline}", pairs)
    finally:
        ours.stop()
        peer.stop()
        folder.cleanup()


def _measured(server: Served, pipeline: int, key_range: int, requests: int, random: Random) -> Round:
    server.pause(False)
    measured = run_round(server, pipeline, key_range, requests)
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
