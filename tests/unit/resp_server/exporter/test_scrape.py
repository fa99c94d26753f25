"""Values of a scrape: bounded labels, merged values, histograms; and their text."""

from __future__ import annotations

import math

import pytest

from resp_server.exporter.declarations import LABELS, METRICS, OTHER, Kind, Merge
from resp_server.exporter.exposition import text_of
from resp_server.exporter.scrape import BUCKET_BITS, NS_PER_S, Histogram, Scrape, durations_of
from resp_server.metrics.stats import CommandStats
from tests.unit.resp_server.exporter.scraped import OPEN_METRICS, samples


def test_label_has_no_more_values_than_it_may_and_rest_is_other() -> None:
    scrape, jobs_max = Scrape(), LABELS["job_name"].values_max
    for number in range(jobs_max + 3):
        scrape.add("job_keys", 10, job_name=f"job{number}")
        scrape.add("job_epoch", 100 - number if number < jobs_max else number, job_name=f"job{number}")
        scrape.add("job_lag_seconds", number, job_name=f"job{number}")
    found = samples(scrape)
    assert len(found) == 3 * (jobs_max + 1)
    assert found["sparkis_job_keys", ("job0",)] == 10
    assert found["sparkis_job_keys", (OTHER,)] == 30
    assert found["sparkis_job_epoch", (OTHER,)] == jobs_max
    assert found["sparkis_job_lag_seconds", (OTHER,)] == jobs_max + 2


def test_bound_of_states_is_one_for_each_job() -> None:
    scrape, states_max = Scrape(), LABELS["state"].values_max
    for job in ("a", "b"):
        for number in range(states_max + 1):
            scrape.add("state_keys", 1, job_name=job, state=f"state{number}")
    found = samples(scrape)
    assert len(found) == 2 * (states_max + 1)
    assert found["sparkis_state_keys", ("a", OTHER)] == found["sparkis_state_keys", ("b", OTHER)] == 1


def test_metric_has_labels_that_it_declares() -> None:
    with pytest.raises(KeyError):
        Scrape().add("no_such_metric", 1)
    with pytest.raises(TypeError, match=r"sparkis_job_keys has the labels \('job_name',\), not \('state',\)"):
        Scrape().add("job_keys", 1, state="s")


def test_histogram_counts_each_call_once_and_its_buckets_only_grow() -> None:
    scrape, fast, slow = Scrape(), CommandStats(), CommandStats()
    fast.count(1000, 1000 * 1023)  # just below the first bound
    fast.count(1, 1024)  # and just above
    slow.count(1, 60_000_000_000)  # longer than the last bound
    scrape.add_histogram("command_duration_seconds", durations_of(fast), group="string")
    scrape.add_histogram("command_duration_seconds", durations_of(slow), group="string")
    scrape.add_histogram("command_duration_seconds", durations_of(slow), group="hash")
    scrape.add_histogram("record_delay_seconds", Histogram((0.5, 2.0), [3, 4, 5], 60.5), job_name="string")
    found = samples(scrape)
    name = "sparkis_command_duration_seconds"
    buckets = [
        found[f"{name}_bucket", ("string", bound)]
        for bound in [*(repr(2**bits / NS_PER_S) for bits in BUCKET_BITS), "+Inf"]
    ]
    assert buckets[0] == 1000 and buckets[1] == 1001 and buckets[-2:] == [1001, 1002]
    assert buckets == sorted(buckets)
    assert found[f"{name}_count", ("string",)] == 1002 and found[f"{name}_count", ("hash",)] == 1
    assert math.isclose(found[f"{name}_sum", ("string",)], (1000 * 1023 + 1024) / NS_PER_S + 60)
    name = "sparkis_record_delay_seconds"
    assert {at: value for at, value in found.items() if at[0].startswith(name)} == {
        (f"{name}_bucket", ("string", "0.5")): 3,
        (f"{name}_bucket", ("string", "2.0")): 7,
        (f"{name}_bucket", ("string", "+Inf")): 12,
        (f"{name}_count", ("string",)): 12,
        (f"{name}_sum", ("string",)): 60.5,
    }


def test_jobs_name_cannot_forge_line() -> None:
    scrape, name = Scrape(), 'a"} 7\nsparkis_forged 1\n\\'
    scrape.add("job_keys", 1, job_name=name)
    assert samples(scrape) == {("sparkis_job_keys", (name,)): 1.0}


def test_older_prometheus_gets_older_format() -> None:
    scrape = Scrape()
    scrape.add("keyspace_hits_total", 3)
    text = text_of(scrape, "text/plain;version=0.0.4")
    assert text.content_type.startswith("text/plain") and b"\nsparkis_keyspace_hits_total 3.0\n" in text.body
    assert b"# EOF" not in text.body and text_of(scrape, OPEN_METRICS).body.endswith(b"# EOF\n")


def test_declarations_follow_rules_of_openmetrics() -> None:
    for name, metric in METRICS.items():
        assert name.startswith("sparkis_") and (metric.kind is Kind.COUNTER) == name.endswith("_total")
        assert set(metric.labels) <= set(LABELS) and not metric.help.endswith(".")
        if metric.kind is Kind.COUNTER:
            assert metric.merge is Merge.SUM
    assert {label for metric in METRICS.values() for label in metric.labels} == set(LABELS)
