"""The numbers of several processes, added up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields

from resp_server.metrics.process_stats import ProcessStats
from resp_server.metrics.stats import CommandStats, Stats


def some(factor: int) -> ProcessStats:
    stats = Stats(
        connections_received=factor,
        connections_rejected=2 * factor,
        input_bytes=3 * factor,
        output_bytes=4 * factor,
        hits=5 * factor,
        misses=6 * factor,
        commands={"get": CommandStats(factor, 10 * factor, 1, 2), f"only{factor}": CommandStats(1)},
        errors=Counter({"ERR": factor, f"CODE{factor}": 1}),
        commands_per_second=0.5 * factor,
    )
    return ProcessStats(factor, 100 * factor, 200 * factor, 0.25 * factor, 0.5 * factor, stats)


def test_numbers_are_added_up() -> None:
    total = ProcessStats.total([some(1), some(2), some(4)])
    assert (total.clients, total.resident_bytes, total.resident_bytes_peak) == (7, 700, 1400)
    assert (total.user_s, total.system_s) == (1.75, 3.5)
    stats = total.stats
    assert (stats.connections_received, stats.connections_rejected, stats.input_bytes) == (7, 14, 21)
    assert (stats.output_bytes, stats.hits, stats.misses, stats.commands_per_second) == (28, 35, 42, 3.5)
    assert stats.commands["get"] == CommandStats(7, 70, 3, 6)
    assert stats.commands["only2"] == CommandStats(1)
    assert stats.calls == 10
    assert stats.errors == {"ERR": 7, "CODE1": 1, "CODE2": 1, "CODE4": 1}


def test_each_number_is_added_up_but_most_that_waits_for_one_client() -> None:
    names = [each.name for each in fields(ProcessStats) if each.name != "stats"]
    parts = [ProcessStats(**{name: factor * at for at, name in enumerate(names, 1)}) for factor in (5, 2)]
    expected = {name: 7 * at for at, name in enumerate(names, 1)}
    expected["largest_output_bytes"] = parts[0].largest_output_bytes
    assert ProcessStats.total(parts) == ProcessStats(**expected)


def test_statistics_survive_transfer() -> None:
    parsed = json.loads(json.dumps(some(3).to_json()))
    assert ProcessStats.from_json(parsed) == some(3)


def test_adding_up_leaves_parts_as_they_are() -> None:
    part = some(2)
    ProcessStats.total([part, part])
    assert part == some(2)


def test_process_reports_its_own_numbers() -> None:
    own = ProcessStats.of_this_process(Stats(), clients=3)
    assert own.clients == 3
    assert own.resident_bytes_peak >= own.resident_bytes > 1 << 20
    assert own.user_s > 0
