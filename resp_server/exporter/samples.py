"""Turns the fields of INFO and STATE JOBS into the values of a scrape. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
Row = Mapping[str, Any]


def _number_of(field: str, factor: float = 1.0) -> Callable[[Row], float | None]:
    """Return what finds a number in a job's row; None: the server does not know it, or is of a version without it."""

    def found(row: Row) -> float | None:
        return None if row.get(field) is None else row[field] * factor

    return found


# The metrics of a job, and their values in its row of STATE JOBS. A server's own rows have more (`commands.job_query`).
JOB_METRICS: Mapping[str, Callable[[Row], float | None]] = {
    "job_keys": _number_of("keys"),
    "job_epoch": _number_of("applied"),
    "job_committed_epoch": _number_of("committed"),
    "job_lag_epochs": _number_of("lag_epochs"),
    "job_lag_seconds": _number_of("lag_ms", 1 / MS_PER_S),
    "job_age_seconds": _number_of("age_ms", 1 / MS_PER_S),
    "job_epochs_per_minute": _number_of("epochs_per_minute"),
    "job_changes_per_minute": _number_of("changes_per_minute"),
    "job_stale": _number_of("stale"),
    "job_incomplete": _number_of("incomplete"),
    "job_skipped_rows": _number_of("skipped_rows"),
    "job_held_back": lambda row: row["held_back_epoch"] is not None,
    "job_failing": lambda row: bool(row["error"]),
    "job_store_bytes": _number_of("store_bytes"),
    "job_store_free_bytes": _number_of("store_free_bytes"),
    "job_applied_epochs_total": _number_of("applied_epochs"),
    "job_apply_seconds_total": _number_of("apply_ns", 1 / NS_PER_S),
    "job_expired_keys_total": _number_of("expired_keys"),
    "source_lag_age_seconds": _number_of("source_lag_age_ms", 1 / MS_PER_S),
    "job_fresh_keys": _number_of("fresh_keys"),
    "job_fresh_age_seconds": _number_of("fresh_age_ms", 1 / MS_PER_S),
    "job_fresh_incomplete": _number_of("fresh_incomplete"),
}
# Fields of INFO's section about an upstream, and their metrics.
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
# The lags of a backend, which STATE SHADOW has; they are not outcomes.
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


def add_server(scrape: Scrape, answer: Mapping[str, Any]) -> None:
    """Add a server's jobs and states.

    Args:
        answer: That of `commands.job_query`.
    """
    add_jobs(scrape, answer["jobs"])
    scrape.add("jobs_unreadable", answer["unreadable"])
    scrape.add("slots", answer["slots"])
    for job in answer["jobs"]:
        _add_record_delays(scrape, job)
        for field, (metric, factor) in PROGRESS.items():
            if (number := _number(job["progress"].get(field))) is not None:
                scrape.add(metric, number * factor, job_name=job["name"])


def add_jobs(scrape: Scrape, rows: Sequence[Row]) -> None:
    """Add jobs by their rows of STATE JOBS."""
    scrape.add("jobs", len(rows))
    for row in sorted(rows, key=lambda row: str(row["name"])):
        name = row["name"]
        for metric, value_of in JOB_METRICS.items():
            if (value := value_of(row)) is not None:
                scrape.add(metric, value, job_name=name)
        for metric in ("state_keys", "state_bytes"):
            for state, number in zip(row["state_names"], row[metric], strict=True):
                if number is not None:
                    scrape.add(metric, number, job_name=name, state=state)
        lags = zip(row.get("source_partitions", ()), row.get("source_partition_lags", ()), strict=True)
        for partition_name, records in lags:  # "<topic>/<partition>", or a topic
            topic, _, partition = partition_name.partition("/")
            scrape.add("source_lag_records", records, job_name=name, topic=topic, partition=partition or "all")


def _add_record_delays(scrape: Scrape, job: Row) -> None:
    if (delays := job["record_delays"]) is not None:
        bounds = tuple(bound / MS_PER_S for bound in BOUNDS_MS)
        histogram = Histogram(bounds, delays["counts"], delays["sum_ms"] / MS_PER_S)
        scrape.add_histogram("record_delay_seconds", histogram, job_name=job["name"])


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
