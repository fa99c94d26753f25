"""The tables of `sparkis top`: their rows and their order."""

from __future__ import annotations

from typing import Any

import pytest

from sparkis_ui import facts
from sparkis_ui.polling import Cluster, EndpointState
from sparkis_ui.top.command import TABLE_NAMES
from sparkis_ui.top.tables import AS_THEY_COME, BAD, GOOD, ROWS_MAX, TABLES, WARNING, Order, Table, rows_of, summary_of

NODES = (
    '{"nodes": [{"id": "a", "host": "h", "port": 1, "slots": "0-9,20", "zone": "z"},'
    ' {"host": "h", "port": 2, "replica_of": "a", "health": "loading"}, {"host": "h", "port": 3}]}'
)

UNKNOWN = "\N{EN DASH}"


def table(name: str) -> Table:
    """Return a table by its name."""
    return next(each for each in TABLES if each.name == name)


def job(name: str, **fields: Any) -> dict[str, Any]:
    """Return a row of STATE JOBS."""
    return {"name": name.encode(), "keys": 5, "applied": 3, "age_ms": 1200, "lag_epochs": 0, "lag_ms": 0, **fields}


def state_with(*jobs: dict[str, Any]) -> EndpointState:
    """Return facts with some jobs."""
    return EndpointState(at_s=1_000_000.0, jobs=facts.jobs_of(jobs))


def texts(name: str, known: EndpointState, order: Order = AS_THEY_COME, pattern: str = "") -> list[list[str]]:
    """Return the texts of a table's rows."""
    rows, _ = rows_of(table(name), known, order, pattern)
    assert {len(cells) for _, cells in rows} <= {len(table(name).columns)}
    return [[cell.text for cell in cells] for _, cells in rows]


def test_options_name_all_tables() -> None:
    assert tuple(each.name for each in TABLES) == TABLE_NAMES


@pytest.mark.parametrize("each", TABLES, ids=lambda each: each.name)
def test_table_without_facts_has_no_rows(each: Table) -> None:
    assert rows_of(each, EndpointState()) == ([], 0)


def test_jobs_that_fail_come_first_with_their_errors() -> None:
    known = state_with(job("b"), job("c", error=b"disk full"), job("a", stale=True), job("d", held_back_epoch=7))
    rows, _ = rows_of(table("jobs"), known)
    assert [(cells[0].text, cells[1].text, cells[1].severity, cells[-1].text) for _, cells in rows] == [
        ("c", "failing", BAD, "disk full"),
        ("a", "stale", BAD, ""),
        ("d", "held back", WARNING, "epoch 7 of a new generation is held back"),
        ("b", "live", GOOD, ""),
    ]


def test_number_column_sorts_largest_first_and_unknown_last() -> None:
    known = state_with(job("a", keys=2), job("b", keys=10), job("c", keys=7), job("d", age_ms=None), job("e", age_ms=1))
    jobs = table("jobs")
    keys, age = 3, 8
    assert [jobs.columns[column].title for column in (keys, age)] == ["KEYS", "AGE"]
    by_keys = Order().by(jobs, keys)
    assert [row[0] for row in texts("jobs", known, by_keys)] == ["b", "c", "d", "e", "a"]
    assert [row[0] for row in texts("jobs", known, by_keys.by(jobs, keys))] == ["a", "d", "e", "c", "b"]
    assert [row[0] for row in texts("jobs", known, Order().by(jobs, age))][-2:] == ["e", "d"]
    assert [row[0] for row in texts("jobs", known, Order().by(jobs, age).by(jobs, age))] == ["e", "a", "b", "c", "d"]


def test_heading_shows_order() -> None:
    jobs = table("jobs")
    by_name = Order().by(jobs, 0)
    assert by_name.title_of(jobs, 0) == "JOB ▲" and by_name.title_of(jobs, 3) == "KEYS"
    assert by_name.by(jobs, 0).title_of(jobs, 0) == "JOB ▼"
    assert by_name.by(jobs, 3).title_of(jobs, 3) == "KEYS ▼"


def test_filter_keeps_rows_that_contain_text_in_any_case() -> None:
    known = state_with(job("flights"), job("weather", stale=True))
    assert [row[0] for row in texts("jobs", known, pattern="FLI")] == ["flights"]
    assert [row[0] for row in texts("jobs", known, pattern="stale")] == ["weather"]
    assert texts("jobs", known, pattern="none") == []


def test_first_rows_of_many_are_shown_and_all_counted() -> None:
    known = state_with(*(job(f"{number:04}", keys=number) for number in range(ROWS_MAX + 20)))
    rows, count = rows_of(table("jobs"), known, Order().by(table("jobs"), 3))
    assert (len(rows), count) == (ROWS_MAX, ROWS_MAX + 20)
    assert rows[0][0] == f"{ROWS_MAX + 19:04}"


def test_states_have_their_key_formats() -> None:
    known = state_with(job("a", state_names=[b"s", b"t"], key_formats=[b"a:s:<k>", b"t/<k>"]))
    state = {"name": b"t", "kind": b"hash", "keys": 4}
    known.states = {"a": facts.states_of([state, state | {"name": b"s", "bytes": 2048}])}
    assert texts("states", known) == [
        ["a", "t", "hash", "4", UNKNOWN, "t/<k>"],
        ["a", "s", "hash", "4", "2.05 kB", "a:s:<k>"],
    ]


def test_servers_have_roles_and_silent_ones_reason() -> None:
    known = state_with()
    known.cluster = Cluster(
        nodes=facts.nodes_of(NODES),
        info={"h:1": {"connected_clients": "3", "used_memory": "2048"}},
        jobs={"h:1": facts.jobs_of([job("a", lag_ms=30), job("b", lag_ms=1500)])},
        errors={"h:3": "redis://h:3 does not answer"},
    )
    assert texts("servers", known) == [
        ["h:1", "online", "master", "z", "11", "10", "1.5 s", UNKNOWN, "3", "2.05 kB", ""],
        ["h:2", "loading", "replica of h:1", "h", "0", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, ""],
        [
            "h:3",
            "unreachable",
            "master",
            "h",
            "0",
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            UNKNOWN,
            "redis://h:3 does not answer",
        ],
    ]


def test_command_shows_its_share_of_time() -> None:
    known = state_with()
    known.commands = facts.commands_of(
        {
            "cmdstat_get": "calls=30,usec=30,usec_per_call=1.00,rejected_calls=1,failed_calls=2",
            "cmdstat_state|jobs": "calls=1,usec=10,usec_per_call=10.00",
        }
    )
    assert texts("commands", known) == [
        ["GET", "30", "1.0 µs", "75.0%", "3"],
        ["STATE JOBS", "1", "10.0 µs", "25.0%", "0"],
    ]


def test_users_and_slow_requests_are_shown() -> None:
    known = state_with()
    lines = b"id=1 user=ada cmd=get idle=0 flags=t tot-cmds=%d tot-net-in=0 tot-net-out=0\n"
    before, now = (facts.Listing(facts.clients_of(lines % count), at_s) for count, at_s in ((1, 1.0), (5, 3.0)))
    known.users = facts.users_of(now, before)
    known.slow = facts.slow_requests_of([(1, 60, 25_000, [b"KEYS", b"*"], b"127.0.0.1:9", b"web")])
    assert texts("users", known) == [["ada", "1", "1", "2", "0 B", "0 B", "1", "0", "0 B", "get"]]
    assert texts("slow", known) == [["25 ms", "00:01:00 UTC", "KEYS *", "127.0.0.1:9", "web"]]


def test_summary_counts_problems_and_omits_unknown_numbers() -> None:
    known = state_with(job("a"), job("b", stale=True))
    known.info = {"keyspace_hits": "3", "keyspace_misses": "1"}
    latest = {"keys": 1200.0, "age": 1500.0}
    summary = dict(summary_of(known, latest.get))
    assert summary["jobs, 1 to look at"] == "2" and summary["hits"] == "75.0%"
    assert summary["keys"] == "1.2 k" and summary["oldest"] == "1.5 s" and summary["requests/s"] == UNKNOWN
