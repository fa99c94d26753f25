"""Replies of servers, also of older and newer ones, as facts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkis_ui import facts

ROW = {b"name": b"j", b"state_names": [b"s"], b"key_formats": [b"j:s:<k>"], b"keys": 3, b"age_ms": 5, b"error": b""}


def job(**fields: Any) -> facts.Job:
    (made,) = facts.jobs_of([ROW | {name.encode(): value for name, value in fields.items()}])
    return made


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ({}, "live"),
        ({"stale": 1}, "stale"),
        ({"stale": 1, "error": b"no space"}, "failing"),
        ({"lag_ms": facts.LAG_MS_MAX + 1}, "behind"),
        ({"lag_ms": facts.LAG_MS_MAX}, "live"),
        ({"held_back_epoch": 0}, "held back"),
        ({"incomplete": 1}, "incomplete"),
        ({"as_of": b"2026-01-01"}, "past"),
    ],
)
def test_condition_of_job_is_its_worst_problem(fields: dict[str, Any], condition: str) -> None:
    assert job(**fields).condition == condition


def test_jobs_with_problems_are_first() -> None:
    rows = [{b"name": b"b"}, {b"name": b"a"}, {b"name": b"z", b"stale": 1}, {b"name": b"y", b"error": b"x"}]
    assert [each.name for each in facts.jobs_of(rows)] == ["y", "z", "a", "b"]


def test_skipped_rows_are_fact_of_job() -> None:
    assert (job(skipped_rows=3).skipped_rows, job().skipped_rows) == (3, 0)


def test_unknown_source_lag_is_not_zero() -> None:
    known = job(source_lag_records=0, source_lag_age_ms=5)
    assert (known.source_lag_records, known.source_lag_age_ms) == (0, 5)
    assert job().source_lag_records is job(source_lag_records=None).source_lag_records is None
    delays = job(record_delay_p50_ms=0, record_delay_p99_ms=7)
    assert (delays.record_delay_p50_ms, delays.record_delay_p99_ms) == (0, 7)
    assert job().record_delay_p50_ms is job(record_delay_p99_ms=None).record_delay_p99_ms is None


def test_uncommitted_values_are_fact_of_job() -> None:
    fresh = job(fresh_keys=3, fresh_age_ms=70, fresh_incomplete=1)
    assert (fresh.fresh_keys, fresh.fresh_age_ms, fresh.is_fresh_incomplete) == (3, 70, True)
    assert (job().fresh_keys, job().fresh_age_ms, job().is_fresh_incomplete) == (0, None, False)


def test_older_server_leaves_facts_out() -> None:
    (made,) = facts.jobs_of([{b"name": b"j", b"a new field": 1}])
    assert (made.keys, made.age_ms, made.store_bytes, made.states) == (0, None, None, ())


def test_reply_in_resp2_is_read_too() -> None:
    assert facts.fields_of([b"name", b"j", b"keys", 3]) == {"name": b"j", "keys": 3}
    assert facts.fields_of(None) == {}


def test_names_in_replies_have_no_invisible_characters() -> None:
    assert job(error=b"\x1b[31mred\x00").error == r"\x1b[31mred\x00"
    (client,) = facts.clients_of("id=1 name=a\u202eb cmd=get".encode())
    assert client == {"id": "1", "name": r"a\u202eb", "cmd": "get"}


def test_info_is_map_of_its_lines() -> None:
    assert facts.info_of(b"# Server\r\nuptime_in_seconds:5\r\n\r\nkey:a:b\r\n") == {
        "uptime_in_seconds": "5",
        "key": "a:b",
    }


def topology(*slots: str) -> bytes:
    nodes = [{"host": "h", "port": at, "slots": text, "zone": "z"} for at, text in enumerate(slots, 1)]
    return json.dumps({"nodes": nodes}).encode()


def test_node_owns_slots_of_its_ranges() -> None:
    first, second = facts.nodes_of(topology("0-100,200", ""))
    assert first.slots == ((0, 100), (200, 200))
    assert (first.slot_count, second.slot_count) == (102, 0)
    assert (first.address, first.zone, first.health) == ("h:1", "z", "online")


def test_moves_are_ranges_whose_owner_is_another_one() -> None:
    before, after = (
        facts.nodes_of(topology(*slots)) for slots in (("0-99", "100-199"), ("0-49,100-119", "50-99,120-199"))
    )
    assert facts.moves_of(before, after) == [(50, 99, "h:1", "h:2"), (100, 119, "h:2", "h:1")]
    assert facts.moves_of(before, before) == []
    assert facts.moves_of(facts.nodes_of(topology("5-6")), facts.nodes_of(topology("5"))) == [(6, 6, "h:1", "")]


def test_slowest_request_is_first() -> None:
    reply = [[1, 100, 20, [b"GET", b"a"]], [2, 101, 900, [b"SCAN", b"0"], b"1.2.3.4:5", b"app"]]
    slow = facts.slow_requests_of(reply)
    assert [(each.request, each.client, each.name) for each in slow] == [
        ("SCAN 0", "1.2.3.4:5", "app"),
        ("GET a", "", ""),
    ]


def test_command_that_took_most_time_is_first() -> None:
    info = {
        "cmdstat_get": "calls=100,usec=100,usec_per_call=1.00,rejected_calls=1,failed_calls=2",
        "cmdstat_state|jobs": "calls=10,usec=500,usec_per_call=50.00",
        "other": "x",
    }
    assert facts.commands_of(info) == [facts.Command("state|jobs", 10, 50.0, 0), facts.Command("get", 100, 1.0, 3)]


def test_clients_are_counted_by_user() -> None:
    lines = [
        "id=1 user=app idle=0 flags=t sub=0 psub=1 omem=10 cmd=get",
        "id=2 user=app idle=60 flags=N sub=0 psub=0 omem=5 cmd=get",
        "id=3 user=ops idle=1 flags=N cmd=info",
    ]
    app, ops = facts.users_of(facts.Listing(facts.clients_of("\n".join(lines).encode()), 0.0))
    assert app == facts.User("app", 2, 1, 1, 1, 15, "get")
    assert (ops.name, ops.clients, ops.active) == ("ops", 1, 1)


def listing(at_s: float, *clients: tuple[int, str, int]) -> facts.Listing:
    """Return a listing of clients (id, user, requests so far), with ten bytes in and a hundred out for each request."""
    lines = [f"id={i} user={user} tot-net-in={n * 10} tot-net-out={n * 100} tot-cmds={n}" for i, user, n in clients]
    return facts.Listing(facts.clients_of("\n".join(lines).encode()), at_s)


def test_rates_of_users_are_differences_of_two_listings() -> None:
    before = listing(10.0, (1, "app", 100), (2, "app", 50), (3, "gone", 7), (4, "ops", 9))
    now = listing(12.0, (1, "app", 300), (2, "app", 50), (4, "ops", 9), (5, "new", 30))
    rates = {user.name: user.requests_per_s for user in facts.users_of(now, before)}
    assert rates == {"app": 100.0, "ops": 0.0, "new": 15.0}
    (app, *_) = facts.users_of(now, before)
    assert (app.input_per_s, app.output_per_s) == (1_000.0, 10_000.0)


def test_clients_of_server_that_was_started_again_count_whole() -> None:
    (app,) = facts.users_of(listing(12.0, (1, "app", 30)), listing(10.0, (1, "app", 100)))
    assert app.requests_per_s == 15.0


def test_one_listing_and_server_that_does_not_count_give_no_rates() -> None:
    (app,) = facts.users_of(listing(12.0, (1, "app", 30)))
    assert (app.requests_per_s, app.input_per_s, app.output_per_s) == (None, None, None)
    old = facts.Listing(facts.clients_of(b"id=1 user=app cmd=get"), 10.0)
    (app,) = facts.users_of(facts.Listing(old.clients, 12.0), old)
    assert (app.requests_per_s, app.input_per_s, app.output_per_s) == (None, None, None)


def test_rows_are_texts_except_linked_key() -> None:
    row = {b"rule": b"r", b"samples": [{b"key": b"a\xff", b"upstream": b"b\xff", b"epoch": 7}]}
    assert facts.rows_of([row]) == [{"rule": "r", "samples": [{"key": b"a\xff", "upstream": r"b\xff", "epoch": 7}]}]
