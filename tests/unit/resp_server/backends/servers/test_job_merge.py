"""Reports of several servers, merged: sums that count nothing twice, and the owners of keys."""

from __future__ import annotations

from typing import Any

from resp_server.backends.servers.job_keys import JobKeys
from resp_server.backends.servers.job_merge import (
    job_lines,
    keyspace_line,
    merged_jobs,
    merged_lags,
    merged_states,
)
from resp_server.backends.servers.slot_map import SlotMap
from resp_server.cluster.topology import Topology
from resp_server.commands.fact_merges import shares_of
from state_backend.model.slot_set import ALL, NONE, SlotSet

NOT_HELD_BACK = {"held_back_epoch": None, "held_back_since": None}


def row(**other: Any) -> dict[str, Any]:
    facts = {"name": "j", "keys": 10, "slots": "0-8191", "applied": 4, "committed": 5, "lag_epochs": 1, "lag_ms": 20}
    age = {"committed_at": "2026-01-01T00:00:09.000Z", "age_ms": 1000, "epochs_per_minute": 6, "changes_per_minute": 9}
    return facts | age | {"stale": 0, "incomplete": 0, "skipped_rows": 0, "error": ""} | NOT_HELD_BACK | other


def test_keys_of_disjoint_slots_are_added_up_and_no_key_twice() -> None:
    halves = [SlotSet.parse("0-8191"), SlotSet.parse("8192-16383")]
    assert shares_of(halves) == [1.0, 1.0]
    assert shares_of([ALL, ALL]) == [1.0, 0.0]
    assert shares_of([SlotSet.parse("0-99"), SlotSet.parse("50-149"), NONE]) == [1.0, 0.5, 0.0]


def test_oldest_epoch_is_applied_and_newest_committed() -> None:
    rows = [[row()], [row(applied=3, committed=6, keys=7, slots="8192-16383", stale=1, error="full")], []]
    (merged,) = merged_jobs(rows)
    assert merged == row(keys=17, applied=3, committed=6, lag_epochs=3, stale=1, error="full", slots="0-16383")
    assert [each["name"] for each in merged_jobs([[row()], [row(name="k")]])] == ["j", "k"]


def test_keys_of_states_are_added_up_by_name() -> None:
    whole = row(slots="0-16383", state_names=["s", "t"], state_keys=[8, 2], state_bytes=[0, 0])
    half = row(slots="0-8191", state_names=["t"], state_keys=[5], state_bytes=[0], committed=4)
    assert merged_jobs([[half], [whole]])[0]["state_keys"] == [4, 6]
    (found,) = merged_jobs([[half | {"state_keys": [None]}], [whole]])
    assert (found["state_names"], found["state_keys"]) == (["s", "t"], [4, None])


def test_bytes_of_states_are_taken_from_server_that_reports_them() -> None:
    """Each server reports all slots; one may know an older snapshot, or none."""
    names = {"state_names": ["s", "t"], "state_keys": [1, 1]}
    rows = [row(**names, state_bytes=[None, None]), row(**names, state_bytes=[70, 0])]
    assert merged_jobs([[each] for each in rows])[0]["state_bytes"] == [70, 0]
    assert merged_jobs([[rows[0]], [rows[0]]])[0]["state_bytes"] == [None, None]
    states = [{"name": "s", "kind": "map", "keys": 1, "bytes": size} for size in (None, 70, 60)]
    assert merged_states([[each] for each in states], [1.0, 0.0, 0.0])[0]["bytes"] == 70


def test_unknown_lag_is_unknown_for_all() -> None:
    lag = row(job="j")
    assert merged_lags([[lag], [lag | {"lag_ms": 70}]])[0]["lag_ms"] == 70
    assert merged_lags([[lag], [lag | {"lag_ms": None}]])[0]["lag_ms"] is None


def test_source_lag_is_that_of_server_furthest_behind() -> None:
    def knowing(records: int | None, age_ms: int | None) -> dict[str, Any]:
        return row(job="j", source_lag_records=records, source_lag_age_ms=age_ms)

    older = row(job="j")
    for merged in (merged_jobs, merged_lags):
        (found,) = merged([[older], [knowing(3, 10)], [knowing(5, 20)]])
        assert (found["source_lag_records"], found["source_lag_age_ms"]) == (5, 20)
        (found,) = merged([[knowing(3, 10)], [knowing(None, None)]])
        assert (found["source_lag_records"], found["source_lag_age_ms"]) == (None, None)
        (found,) = merged([[older], [older]])
        assert "source_lag_records" not in found


def test_record_delay_is_longest_that_server_measured() -> None:
    def knowing(p50_ms: int | None, p99_ms: int | None) -> dict[str, Any]:
        return row(job="j", record_delay_p50_ms=p50_ms, record_delay_p99_ms=p99_ms)

    older = row(job="j")
    for merged in (merged_jobs, merged_lags):
        (found,) = merged([[older], [knowing(3, 10)], [knowing(None, None)], [knowing(2, 20)]])
        assert (found["record_delay_p50_ms"], found["record_delay_p99_ms"]) == (3, 20)
        (found,) = merged([[older], [knowing(None, None)]])
        assert found["record_delay_p50_ms"] is found["record_delay_p99_ms"] is None
        (found,) = merged([[older]])
        assert "record_delay_p50_ms" not in found


def test_merged_job_is_as_old_and_incomplete_as_its_worst_part() -> None:
    older = row(committed_at="2026-01-01T00:00:02.500Z", age_ms=7500, incomplete=1)
    unknown = row(committed_at=None, age_ms=None)
    for merged in (merged_jobs, merged_lags):
        (found,) = merged([[row(job="j")], [older | {"job": "j"}]])
        assert (found["committed_at"], found["age_ms"], found["incomplete"]) == (*older_age(older), 1)
        (found,) = merged([[older | {"job": "j"}], [unknown | {"job": "j"}]])
        assert (found["committed_at"], found["age_ms"]) == (None, None)
    assert "committed_at=2026-01-01T00:00:02.500Z,age_ms=7500,stale=0,incomplete=1,held_back_epoch=none," in job_lines(
        [older]
    )
    assert "committed_at=unknown,age_ms=unknown," in job_lines([unknown])


def test_generation_held_back_by_any_server_is_shown() -> None:
    since = "2026-01-01T00:00:02.500Z"
    held = [row(job="j", held_back_epoch=epoch, held_back_since=since) for epoch in (0, 2)]
    for merged in (merged_jobs, merged_lags):
        (found,) = merged([[row(job="j")], *([each] for each in held)])
        assert (found["held_back_epoch"], found["held_back_since"]) == (2, since)
        assert "incomplete=0,held_back_epoch=2,keys=" in job_lines([found])


def older_age(facts: dict[str, Any]) -> tuple[str, int]:
    return facts["committed_at"], facts["age_ms"]


def test_states_are_counted_by_their_names() -> None:
    rows = [{"name": "s", "kind": "map", "keys": 4}, {"name": "t", "kind": "value", "keys": 1}]
    assert merged_states([rows, rows], [1.0, 0.5]) == [
        {"name": "s", "kind": "map", "keys": 6, "bytes": None},
        {"name": "t", "kind": "value", "keys": 2, "bytes": None},
    ]


def test_line_of_database_is_added_up_and_left_out_without_keys() -> None:
    text = "# Keyspace\r\ndb0:keys=4,expires=1,avg_ttl=0,subexpiry=2\r\n"
    assert keyspace_line([text, text, "# Keyspace\r\n"], [1.0, 1.0, 1.0]) == (
        "db0:keys=8,expires=2,avg_ttl=0,subexpiry=4\r\n"
    )
    assert keyspace_line(["# Keyspace\r\n"], [1.0]) == ""


def test_mean_time_to_live_counts_by_keys_that_expire() -> None:
    texts = ["db0:keys=9,expires=3,avg_ttl=100,subexpiry=0\r\n", "db0:keys=9,expires=1,avg_ttl=500,subexpiry=0\r\n"]
    assert keyspace_line(texts, [1.0, 1.0]) == "db0:keys=18,expires=4,avg_ttl=200,subexpiry=0\r\n"
    assert keyspace_line(texts, [1.0, 0.0]) == "db0:keys=9,expires=3,avg_ttl=100,subexpiry=0\r\n"


def test_key_belongs_to_job_of_its_name_or_format() -> None:
    keys = JobKeys()
    assert not keys.is_complete
    assert keys.epoch_reported("a", (1, 0))
    assert not keys.epoch_reported("a", (1, 5))
    assert keys.job_of(b"a:value:1") == "a"
    assert keys.job_of(b"plane/1") is None
    keys.set_formats({"a": ["a:value:<k>", "plane/<k>"]})
    assert keys.is_complete
    assert keys.job_of(b"plane/1") == "a"
    assert keys.epoch_reported("a", (2, 6))  # another writer, whose states may be others
    assert not keys.is_complete
    keys.remove("a")
    assert keys.job_of(b"a:value:1") is keys.job_of(b"plane/1") is None


def test_versions_begin_anew_with_registry_of_higher_term_only() -> None:
    def topology(version: int, port: int) -> Topology:
        return Topology.of_json({"version": version, "nodes": [{"host": "h", "port": port, "slots": "0-16383"}]})

    slots = SlotMap()
    assert slots.apply(topology(5, 1))
    assert not slots.apply(topology(4, 2), 1)
    assert slots.apply(topology(6, 2), 1)
    assert slots.apply(topology(7, 3))
    assert slots.apply(topology(2, 4), 2)
    assert not slots.apply(topology(9, 5), 1)
    assert slots.owners[0] == "h:4"
