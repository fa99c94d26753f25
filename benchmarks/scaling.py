"""Curves: GET per second and memory by number of keys, and the time to apply an epoch by its number of changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.memory import Footprint, RedisFootprint, wait_until_at_rest
from benchmarks.options import Options
from benchmarks.reads import measured, uniform
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import (
    JOB,
    BenchmarkError,
    RedisServer,
    Sparkis,
    both,
    load_log,
    publish,
    runs_of_values,
    temporary_folder,
)
from state_backend.apply.applier import Applier
from state_backend.log.change_log import ChangeLog

KEYS = 100_000  # the points of more keys come from `many`
CHANGES, CHANGES_IF_FULL = (1_000, 10_000, 100_000, 1_000_000), (5_000_000,)
STORE_KEYS = 1_000_000
PIPELINE = 16
# By the number of keys; with fewer keys, the processes take more memory than the keys.
MEMORY_BUDGETS = {1_000_000: 1.5, 10_000_000: 1.3}


def run(options: Options) -> Iterator[Row]:
    """Yield the points of the curves."""
    keys = max(1000, int(KEYS * options.scale))
    options.report(f"scaling: loading {keys:,} keys")
    with both(keys, has_maps_and_lists=False) as servers:
        yield from points(servers, keys, options)
    sizes = (*CHANGES, *(CHANGES_IF_FULL if options.is_full else ()))
    yield from _apply([max(1, int(changes * options.scale)) for changes in sizes], options)


def points(servers: tuple[Sparkis, RedisServer], keys: int, options: Options) -> Iterator[Row]:
    """Yield the rate, and the memory after it: while the keys change, and when the job is at rest."""
    name, x = f"GET uniform, {keys:,} keys", float(keys)
    case = replace(uniform(keys), budgets={})
    yield measured(
        name, servers, case, PIPELINE, options,
        note=f"pipeline {PIPELINE}", series="scaling-rate", x=x, part="scaling",
    )  # fmt: skip
    ours, peer = servers

    def memory(name: str, budget: float | None = None, series: str = "") -> Row:
        pair = (Footprint.measure(ours).all_bytes / keys, RedisFootprint.measure(peer).used_bytes / keys)
        return compared_row(
            name,
            "scaling",
            [pair],
            unit="bytes/key",
            better="less",
            budget=budget,
            peer_name="redis-server's used_memory",
            series=series,
            x=x,
        )

    yield memory(f"store file and processes while keys change, {keys:,} keys")
    options.report(f"{keys:,} keys: waiting until the job is at rest")
    wait_until_at_rest(ours)
    yield memory(f"store file and processes, {keys:,} keys", MEMORY_BUDGETS.get(keys), "scaling-memory")


def _apply(sizes: list[int], options: Options) -> Iterator[Row]:
    """Yield the time from an applier's poll of the log until readers see the epoch."""
    status: dict[str, Any] = {}

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "status":
            status.update(event, at_s=time.perf_counter())

    keys = max(1000, int(STORE_KEYS * options.scale))
    random = np.random.default_rng(4)
    with temporary_folder() as folder:
        writer = load_log(folder / "log", keys, has_maps_and_lists=False)
        applier = Applier(ChangeLog(folder / "log"), JOB, folder / "store", report)
        (folder / "store" / JOB).mkdir(parents=True)
        try:
            applier.step()
            for turn, changes in enumerate(sizes):
                found = []
                for number in range(options.rounds):
                    options.report(f"scaling: applying {changes:,} changes, round {number + 1} of {options.rounds}")
                    numbers = random.permutation(max(keys, changes))[:changes]
                    epoch = publish(writer, runs_of_values(numbers, turn * options.rounds + number + 1))
                    started_s = time.perf_counter()
                    applier.step()
                    if status.get("applied") != epoch or status["error"]:
                        raise BenchmarkError(f"epoch {epoch} was not applied: {status}")
                    found.append((status["at_s"] - started_s) * 1000)
                note = f"{max(keys, changes):,} keys; {min(found) / changes * 1000:.2f} us a change at best"
                yield single_row(
                    f"apply {changes:,} changes", "scaling", found, unit="ms",
                    note=note, series="scaling-apply", x=float(changes),
                )  # fmt: skip
        finally:
            applier.close()
