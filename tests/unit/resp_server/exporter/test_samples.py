"""From INFO's fields to values."""

from __future__ import annotations

from resp_server.backends.overlay.shadow_counts import ShadowCounts
from resp_server.exporter.listener import reasons_of
from resp_server.exporter.samples import UPSTREAM_NUMBERS, add_jobs, add_state_cluster, add_upstream
from resp_server.exporter.scrape import Scrape
from resp_server.exporter.sources import Readiness
from tests.unit.resp_server.exporter.scraped import samples


def test_servers_of_several_state_clusters_are_distinguished_by_address() -> None:
    scrape = Scrape()
    for number in (1, 2):
        server = (
            f"addr=10.0.0.{number}:7400,slots=16384,connections=2,waiting=3,status={'up' if number == 1 else 'down'}"
        )
        add_state_cluster(scrape, {"topology_version": 4 + number, "moves": 1, "losses": 2, "server0": server}, 10)
    found = samples(scrape)
    assert found["sparkis_proxy_server_up", ("10.0.0.1:7400",)] == 1
    assert found["sparkis_proxy_server_up", ("10.0.0.2:7400",)] == 0
    assert found["sparkis_proxy_moves_total", ()] == 2 and found["sparkis_proxy_slots_unserved", ()] == 20
    assert found["sparkis_topology_version", ()] == 5


def test_shadow_rule_may_have_commas_and_each_outcome_is_counted() -> None:
    scrape, counts = Scrape(), ShadowCounts(compared=3, skipped=1)
    rule = "cars, compared=9"
    text = f"rule={rule}," + ",".join(f"{name}={count}" for name, count in counts.fields().items())
    add_upstream(scrape, {"upstream_status": "down", **dict.fromkeys(UPSTREAM_NUMBERS, 0), "shadow0": text})
    found = samples(scrape)
    assert found["sparkis_upstream_up", ()] == 0
    assert found["sparkis_shadow_compared_total", (rule,)] == 3
    outcomes = {labels[0] for name, labels in found if name == "sparkis_shadow_outcomes_total"}
    assert outcomes == {outcome.value for outcome in counts.outcomes}


def test_job_without_visible_epoch_has_no_age() -> None:
    row = {
        "name": "job", "keys": None, "applied": -1, "committed": 6, "lag_epochs": 7, "lag_ms": None, "age_ms": None,
        "epochs_per_minute": 60, "changes_per_minute": 600, "stale": 0, "incomplete": 0, "skipped_rows": 7,
        "held_back_epoch": 3,
        "error": "full", "store_bytes": 100, "state_names": ["a"], "state_keys": [None], "state_bytes": [None],
    }  # fmt: skip
    scrape = Scrape()
    add_jobs(scrape, [row])
    found = {name.removeprefix("sparkis_"): value for (name, _), value in samples(scrape).items()}
    assert found["jobs"] == 1 and found["job_epoch"] == -1
    assert found["job_held_back"] == found["job_failing"] == 1
    assert not {"job_keys", "job_age_seconds", "job_lag_seconds", "state_keys", "state_bytes"} & found.keys()
    assert not {"source_lag_records", "source_lag_age_seconds"} & found.keys()


def test_unknown_bytes_of_states_are_omitted() -> None:
    row = {
        "name": "job", "keys": 3, "applied": 1, "committed": 1, "lag_epochs": 0, "lag_ms": 0, "age_ms": 0,
        "epochs_per_minute": 0, "changes_per_minute": 0, "stale": 0, "incomplete": 0, "skipped_rows": 0,
        "held_back_epoch": None,
        "error": "", "store_bytes": 100, "state_names": ["a", "b"], "state_keys": [1, 2], "state_bytes": [0, None],
    }  # fmt: skip
    scrape = Scrape()
    add_jobs(scrape, [row])
    found = {labels: value for (name, labels), value in samples(scrape).items() if name == "sparkis_state_bytes"}
    assert found == {("job", "a"): 0}


def test_server_is_ready_once_it_has_loaded_and_lags_within_its_limit() -> None:
    assert reasons_of(Readiness(is_loading=True, lags_ms={}), None) == ["loading"]
    behind = Readiness(is_loading=False, lags_ms={"a": 5000, "b": 5001, "c": None})
    assert reasons_of(behind, None) == []
    assert reasons_of(behind, 5.0) == ["job b: 5.001 s behind", "job c: no epoch is visible yet"]
    assert reasons_of(behind, 0.0)[0] == "job a: 5 s behind"
