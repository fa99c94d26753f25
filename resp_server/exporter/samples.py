"""Turns the facts of INFO and STATE JOBS into the values of a scrape. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from resp_server.commands import command_table
from resp_server.exporter.declarations import OTHER
from resp_server.exporter.scrape import NS_PER_S, Histogram, Scrape, durations_of
from resp_server.metrics.process_stats import ProcessStats
from resp_server.metrics.stats import Stats
from resp_server.native import CORE
from state_backend import VERSION
from state_backend.apply.record_delays import BOUNDS_MS
from state_backend.model.clock import MS_PER_S

# Fields of a query's progress, and their metrics with the factor to the metric's unit.
PROGRESS = {
    "batch": ("query_batch", 1.0),
    "batch_duration_ms": ("query_batch_duration_seconds", 1 / MS_PER_S),
    "input_rows": ("query_input_rows", 1.0),
    "input_rows_per_second": ("query_input_rows_per_second", 1.0),
    "processed_rows_per_second": ("query_processed_rows_per_second", 1.0),
    "state_rows": ("query_state_rows", 1.0),
    "state_memory_bytes": ("query_state_memory_bytes", 1.0),
}
# Plain numbers of a job, by the names of STATE JOBS, and their metrics.
JOB_NUMBERS = {
    "lag_epochs": "job_lag_epochs",
    "epochs_per_minute": "job_epochs_per_minute",
    "changes_per_minute": "job_changes_per_minute",
    "stale": "job_stale",
    "incomplete": "job_incomplete",
    "skipped_rows": "job_skipped_rows",
    "store_bytes": "job_store_bytes",
}
# The same of INFO's section about an upstream.
UPSTREAM_NUMBERS = {
    "upstream_connections": "upstream_connections",
    "upstream_waiting": "upstream_requests_waiting",
    "upstream_pinned": "upstream_pinned_connections",
    "upstream_blocked": "upstream_blocked_clients",
    "upstream_losses": "upstream_losses_total",
    "upstream_outages": "upstream_outages_total",
    "ownership_known": "ownership_known",
    "owned_key_formats": "owned_key_formats",
    "dropped_writes": "dropped_writes_total",
    "copied_writes": "copied_writes_total",
    "cache_hits": "cache_hits_total",
    "cache_misses": "cache_misses_total",
    "cache_evicted": "cache_evicted_total",
    "cache_invalidated": "cache_invalidated_total",
    "cache_entries": "cache_entries",
    "cache_bytes": "cache_bytes",
}
# A rule's name may contain commas; the counts after it do not.
SHADOW = re.compile(r"rule=(?P<rule>.*),(?P<counts>compared=.*)")
SHADOW_NUMBERS = {
    "compared": "shadow_compared_total",
    "skipped": "shadow_skipped_total",
    "failed": "shadow_failed_total",
}
# The lags of a side, which STATE SHADOW has; they are not outcomes.
LAG_COUNTS = re.compile(r".*_(was_behind|behind_ms|behind_ms_max|behind_epochs_max)")


def add_process(scrape: Scrape, total: ProcessStats, started_ms: int) -> None:
    """Add the values that every program has."""
    scrape.add("build_info", 1, version=VERSION, core=CORE)
    scrape.add("start_time_seconds", started_ms / MS_PER_S)
    scrape.add("resident_memory_bytes", total.resident_bytes)
    scrape.add("private_memory_bytes", min(total.private_bytes, total.resident_bytes))
    scrape.add("cpu_seconds_total", total.user_s + total.children_user_s, mode="user")
    scrape.add("cpu_seconds_total", total.system_s + total.children_system_s, mode="system")


def add_clients(scrape: Scrape, total: ProcessStats, clients_max: int) -> None:
    """Add the clients and their requests."""
    stats = total.stats
    scrape.add("connected_clients", total.clients)
    scrape.add("clients_max", clients_max)
    scrape.add("connections_received_total", stats.connections_received)
    scrape.add("connections_rejected_total", stats.connections_rejected)
    scrape.add("clients_closed_total", stats.closed_for_input, reason="input")
    scrape.add("clients_closed_total", stats.closed_for_output, reason="output")
    scrape.add("received_bytes_total", stats.input_bytes)
    scrape.add("sent_bytes_total", stats.output_bytes)
    scrape.add("unsent_bytes", total.output_bytes)
    scrape.add("tracking_clients", total.tracking)
    scrape.add("tracked_keys", total.tracked_keys)
    scrape.add("subscribed_clients", total.subscribed)
    scrape.add("internal_errors_total", stats.internal_errors)
    scrape.add("keyspace_hits_total", stats.hits)
    scrape.add("keyspace_misses_total", stats.misses)
    scrape.add("event_loop_rounds_total", stats.rounds)
    scrape.add("event_loop_seconds_total", stats.rounds_ns / NS_PER_S)
    for error, count in sorted(stats.errors.items()):
        scrape.add("errors_total", count, error=error)
    for reason in ("auth", "command", "key", "channel"):
        scrape.add("access_denied_total", stats.denied[reason], reason=reason)
    _add_commands(scrape, stats)


def _add_commands(scrape: Scrape, stats: Stats) -> None:
    groups = _groups()
    for name, command in sorted(stats.commands.items()):
        group = groups.get(name, OTHER)
        scrape.add_histogram("command_duration_seconds", durations_of(command), group=group)
        scrape.add("commands_failed_total", command.failed, group=group)
        scrape.add("commands_rejected_total", command.rejected, group=group)


@cache
def _groups() -> Mapping[str, str]:
    return {each.name: each.facts.group for each in command_table().with_subcommands()}


def add_server(scrape: Scrape, facts: Mapping[str, Any]) -> None:
    """Add a server's jobs and states.

    Args:
        facts: The facts of `commands.job_facts`.
    """
    scrape.add("jobs", len(facts["jobs"]))
    scrape.add("jobs_unreadable", facts["unreadable"])
    scrape.add("slots", facts["slots"])
    for job in facts["jobs"]:
        name = job["name"]
        add_job(scrape, job)
        _add_source_lag(scrape, job, job["source_lags"].items())
        _add_record_delays(scrape, job)
        scrape.add("job_keys", sum(job["states"].values()), job_name=name)
        scrape.add("job_epoch", job["epoch"], job_name=name)
        scrape.add("job_committed_epoch", job["committed_epoch"], job_name=name)
        scrape.add("job_held_back", job["held_back"], job_name=name)
        scrape.add("job_failing", job["failing"], job_name=name)
        scrape.add("job_applied_epochs_total", job["applied_epochs"], job_name=name)
        scrape.add("job_apply_seconds_total", job["apply_ns"] / NS_PER_S, job_name=name)
        scrape.add("job_expired_keys_total", job["expired_keys"], job_name=name)
        scrape.add("job_store_free_bytes", job["store_free_bytes"], job_name=name)
        for state, keys in job["states"].items():
            scrape.add("state_keys", keys, job_name=name, state=state)
            if job["state_bytes"] is not None:
                scrape.add("state_bytes", job["state_bytes"].get(state, 0), job_name=name, state=state)
        for fact, (metric, factor) in PROGRESS.items():
            if (number := _number(job["progress"].get(fact))) is not None:
                scrape.add(metric, number * factor, job_name=name)


def add_job(scrape: Scrape, job: Mapping[str, Any]) -> None:
    """Add the facts that have one name in `commands.job_facts` and STATE JOBS."""
    for field, metric in JOB_NUMBERS.items():
        scrape.add(metric, job[field], job_name=job["name"])
    for field, metric in (("lag_ms", "job_lag_seconds"), ("age_ms", "job_age_seconds")):
        if job[field] is not None:  # None: no epoch is visible yet
            scrape.add(metric, job[field] / MS_PER_S, job_name=job["name"])


def _add_source_lag(scrape: Scrape, job: Mapping[str, Any], lags: Iterable[tuple[str, int]]) -> None:
    """Add how far a job is behind its sources.

    Args:
        lags: By "<topic>/<partition>" or by topic, as in STATE JOBS.
    """
    if job.get("source_lag_age_ms") is None:  # also a server of an older version
        return
    scrape.add("source_lag_age_seconds", job["source_lag_age_ms"] / MS_PER_S, job_name=job["name"])
    for name, records in lags:
        topic, _, partition = name.partition("/")
        scrape.add("source_lag_records", records, job_name=job["name"], topic=topic, partition=partition or "all")


def _add_record_delays(scrape: Scrape, job: Mapping[str, Any]) -> None:
    if (delays := job["record_delays"]) is not None:
        bounds = tuple(bound / MS_PER_S for bound in BOUNDS_MS)
        histogram = Histogram(bounds, delays["counts"], delays["sum_ms"] / MS_PER_S)
        scrape.add_histogram("record_delay_seconds", histogram, job_name=job["name"])


def add_listed_jobs(scrape: Scrape, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Add the jobs behind a proxy.

    Args:
        jobs: The rows of STATE JOBS, a row for each job.
    """
    scrape.add("jobs", len(jobs))
    for job in sorted(jobs, key=lambda row: str(row["name"])):
        name = job["name"]
        add_job(scrape, job)
        lags = zip(job.get("source_partitions", ()), job.get("source_partition_lags", ()), strict=True)
        _add_source_lag(scrape, job, lags)
        scrape.add("job_keys", job["keys"] or 0, job_name=name)
        scrape.add("job_epoch", job["applied"], job_name=name)
        scrape.add("job_committed_epoch", job["committed"], job_name=name)
        scrape.add("job_held_back", job["held_back_epoch"] is not None, job_name=name)
        scrape.add("job_failing", bool(job["error"]), job_name=name)
        for state, keys in zip(job["state_names"], job["state_keys"], strict=True):
            scrape.add("state_keys", keys or 0, job_name=name, state=state)
        for state, size in zip(job["state_names"], job["state_bytes"], strict=True):
            if size is not None:
                scrape.add("state_bytes", size, job_name=name, state=state)


def add_state_cluster(scrape: Scrape, fields: Mapping[str, object], unserved: int) -> None:
    """Add a proxy's servers.

    Args:
        fields: INFO's of one application.
        unserved: Its slots without a server.
    """
    scrape.add("topology_version", _number(fields["topology_version"]) or 0)
    scrape.add("proxy_moves_total", _number(fields["moves"]) or 0)
    scrape.add("proxy_server_losses_total", _number(fields["losses"]) or 0)
    scrape.add("proxy_slots_unserved", unserved)
    for name, value in fields.items():
        if re.fullmatch(r"server\d+", name):
            server = dict(part.split("=", 1) for part in str(value).split(","))
            address = server["addr"]
            scrape.add("proxy_server_up", server["status"] == "up", server=address)
            scrape.add("proxy_server_slots", int(server["slots"]), server=address)
            scrape.add("proxy_server_connections", int(server["connections"]), server=address)
            scrape.add("proxy_server_requests_waiting", int(server["waiting"]), server=address)


def add_upstream(scrape: Scrape, fields: Mapping[str, object]) -> None:
    """Add a proxy's upstream.

    Args:
        fields: INFO's of the proxy.
    """
    scrape.add("upstream_up", fields["upstream_status"] == "up")
    for field, metric in UPSTREAM_NUMBERS.items():
        scrape.add(metric, _number(fields[field]) or 0)
    for name, value in fields.items():
        if re.fullmatch(r"shadow\d+", name) and (found := SHADOW.fullmatch(str(value))):
            _add_shadow(scrape, found["rule"], dict(part.split("=", 1) for part in found["counts"].split(",")))


def _add_shadow(scrape: Scrape, rule: str, counts: Mapping[str, str]) -> None:
    for name, count in counts.items():
        if name in SHADOW_NUMBERS:
            scrape.add(SHADOW_NUMBERS[name], int(count), rule=rule)
        elif not LAG_COUNTS.fullmatch(name):
            scrape.add("shadow_outcomes_total", int(count), rule=rule, outcome=name)


def _number(value: object) -> float | None:
    """Return a number, also one that is written as text; None for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
