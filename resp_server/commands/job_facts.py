"""The facts of a job, one row for each: how a server finds it, and what a proxy makes of several servers' facts.

STATE JOBS, STATE LAG, INFO, metrics and health are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resp_server.acl.visibility import VisibleJob
from resp_server.commands.fact_merges import (
    Row,
    behind_in_epochs,
    bytes_of_states,
    error_texts,
    keys_of_states,
    largest,
    largest_known,
    largest_unless_unknown,
    least,
    of_furthest_from_source,
    of_held_back,
    of_newest,
    of_oldest,
    sum_without_overlap,
    total,
    union_of_slots,
)
from resp_server.protocol.replies import Reply
from state_backend.model.clock import iso_text
from state_backend.store.uncommitted import FreshFacts


@dataclass(frozen=True)
class Fact:
    """A fact of a job.

    Args:
        name: Its field in STATE JOBS.
        of: Returns it at a clock reading.
        merged: Returns it for several servers, from their rows that have it.
        is_in_lag: STATE LAG has it, too.
    """

    name: str
    of: Callable[[VisibleJob, int], Any]
    merged: Callable[[Sequence[Row], str], Any]
    is_in_lag: bool = False


def _lag(
    name: str, of: Callable[[VisibleJob, int], Any], merged: Callable[[Sequence[Row], str], Any] = largest
) -> Fact:
    return Fact(name, of, merged, is_in_lag=True)


def _committed_at(visible: VisibleJob, now_ms: int) -> str | None:
    """Return when the epoch that clients read was committed, by its writer's clock; None before the first epoch."""
    return _time(visible.applied.clock_ms) if visible.applied.epoch >= 0 else None


def _age_ms(visible: VisibleJob, now_ms: int) -> int | None:
    """Return the age of the epoch that clients read, by this server's clock; None before the first epoch."""
    return max(0, now_ms - visible.applied.clock_ms) if visible.applied.epoch >= 0 else None


def _lag_ms(visible: VisibleJob, now_ms: int) -> int | None:
    """Return how much older the epoch that clients read is than the committed one; None before the first epoch."""
    job, applied = visible.job, visible.applied
    if job.committed_epoch <= applied.epoch:
        return 0
    return max(0, job.committed_clock_ms - applied.clock_ms) if applied.epoch >= 0 else None


def _source_lag(name: str, of: Callable[[Mapping[str, Any], int], Any], *, unknown: Any = None) -> Fact:
    """Return a fact about how far a job is behind its sources (see `log.source_lag`)."""

    def found(visible: VisibleJob, now_ms: int) -> Any:
        return unknown if visible.job.source_lag is None else of(visible.job.source_lag, now_ms)

    return _lag(name, found, of_furthest_from_source)


def _record_delay(name: str, percentile: str) -> Fact:
    def found(visible: VisibleJob, now_ms: int) -> Any:
        return None if visible.job.record_delays is None else visible.job.record_delays[percentile]

    return _lag(name, found, largest_known)


def _fresh(name: str, of: Callable[[FreshFacts, int], Any], merged: Callable[[Sequence[Row], str], Any]) -> Fact:
    """Return a fact about the values that are not committed yet."""
    return _lag(name, lambda visible, now_ms: of(visible.fresh, now_ms), merged)


def _time(clock_ms: int | None) -> str | None:
    return None if clock_ms is None else iso_text(clock_ms)


# In the order of STATE JOBS.
FACTS = (
    Fact("name", lambda visible, now_ms: visible.job.name, of_newest),
    Fact("generation", lambda visible, now_ms: visible.job.generation, of_newest),
    Fact("states", lambda visible, now_ms: len(visible.states), of_newest),
    Fact("keys", lambda visible, now_ms: visible.keys, sum_without_overlap),
    _lag("applied", lambda visible, now_ms: visible.applied.epoch, least),
    _lag("committed", lambda visible, now_ms: visible.job.committed_epoch),
    _lag("lag_epochs", lambda visible, now_ms: visible.job.lag_epochs(visible.applied), behind_in_epochs),
    _lag("lag_ms", _lag_ms, largest_unless_unknown),
    _lag("committed_at", _committed_at, of_oldest),
    _lag("age_ms", _age_ms, of_oldest),
    _lag("epochs_per_minute", lambda visible, now_ms: visible.job.per_minute(now_ms)[0]),
    _lag("changes_per_minute", lambda visible, now_ms: visible.job.per_minute(now_ms)[1]),
    _lag("stale", lambda visible, now_ms: int(visible.job.is_stale)),
    _lag("incomplete", lambda visible, now_ms: int(visible.job.is_incomplete)),
    _lag("skipped_rows", lambda visible, now_ms: visible.job.skipped_rows),
    _source_lag("source_lag_records", lambda lag, now_ms: lag["records"]),
    _source_lag("source_lag_at", lambda lag, now_ms: _time(lag["at_ms"])),
    _source_lag("source_lag_age_ms", lambda lag, now_ms: max(0, now_ms - lag["at_ms"])),
    _source_lag("source_partitions", lambda lag, now_ms: [*lag["partitions"]], unknown=[]),
    _source_lag("source_partition_lags", lambda lag, now_ms: [*lag["partitions"].values()], unknown=[]),
    _record_delay("record_delay_p50_ms", "p50_ms"),
    _record_delay("record_delay_p99_ms", "p99_ms"),
    _fresh("fresh_keys", lambda fresh, now_ms: fresh.keys, total),
    _fresh("fresh_batch", lambda fresh, now_ms: fresh.batch, largest_known),
    _fresh(
        "fresh_age_ms",
        lambda fresh, now_ms: None if fresh.since_ms is None else max(0, now_ms - fresh.since_ms),
        largest_known,
    ),
    _fresh("fresh_incomplete", lambda fresh, now_ms: int(fresh.is_incomplete), largest),
    _lag("held_back_epoch", lambda visible, now_ms: visible.job.held_back_epoch, of_held_back),
    _lag("held_back_since", lambda visible, now_ms: _time(visible.job.held_back_since_ms), of_held_back),
    _lag("as_of", lambda visible, now_ms: _time(visible.job.as_of_ms), of_newest),
    _lag("error", lambda visible, now_ms: visible.error, error_texts),
    Fact("slots", lambda visible, now_ms: str(visible.snapshot.owned_slots), union_of_slots),
    Fact("store_bytes", lambda visible, now_ms: visible.file_bytes[0], total),
    Fact("state_names", lambda visible, now_ms: [state.name for state in visible.states], of_newest),
    Fact(
        "key_formats",
        lambda visible, now_ms: [state.format_for(visible.job.name).text for state in visible.states],
        of_newest,
    ),
    Fact(
        "state_keys", lambda visible, now_ms: [visible.keys_of(state.name) for state in visible.states], keys_of_states
    ),
    Fact(
        "state_bytes",
        lambda visible, now_ms: [visible.bytes_of(state.name) for state in visible.states],
        bytes_of_states,
    ),
)

# The fields of a job's line in INFO, and their facts.
INFO_FIELDS = {
    "epoch": "applied",
    "committed_epoch": "committed",
    "lag_epochs": "lag_epochs",
    "lag_ms": "lag_ms",
    "committed_at": "committed_at",
    "age_ms": "age_ms",
    "stale": "stale",
    "incomplete": "incomplete",
    "held_back_epoch": "held_back_epoch",
    "keys": "keys",
    "store_bytes": "store_bytes",
    "as_of": "as_of",
    "fresh_keys": "fresh_keys",
    "fresh_batch": "fresh_batch",
    "fresh_age_ms": "fresh_age_ms",
}
INFO_FACTS = tuple(fact for fact in FACTS if fact.name in INFO_FIELDS.values())
# What INFO says of a fact that a job does not have; `unknown`, if it is not here.
INFO_NONE = {"held_back_epoch": "none"}


def row_of(visible: VisibleJob, now_ms: int) -> Row:
    """Return the row of STATE JOBS."""
    return {fact.name: fact.of(visible, now_ms) for fact in FACTS}


def lag_row_of(visible: VisibleJob, now_ms: int) -> Row:
    """Return the row of STATE LAG."""
    return {"job": visible.job.name} | {fact.name: fact.of(visible, now_ms) for fact in FACTS if fact.is_in_lag}


def info_row_of(visible: VisibleJob, now_ms: int) -> Row:
    """Return the facts of a job's line in INFO."""
    return {fact.name: fact.of(visible, now_ms) for fact in INFO_FACTS}


def merged_row(rows: Sequence[Row], others: Row) -> Row:
    """Merge several servers' rows of a job.

    Args:
        others: The row with what is no fact of this version. A fact that no server knows is left out.
    """
    merged = dict(others)
    for fact in FACTS:
        if having := [row for row in rows if fact.name in row]:
            merged[fact.name] = fact.merged(having, fact.name)
    return merged


def info_text(row: Row) -> str:
    """Return a job's line in INFO, without its name."""
    found = {field: row.get(name) for field, name in INFO_FIELDS.items()}
    if found["as_of"] is None:
        del found["as_of"]
    if found["fresh_batch"] is None:  # no value is shown before its commit
        found = {field: value for field, value in found.items() if not field.startswith("fresh_")}
    return ",".join(
        f"{field}={INFO_NONE.get(field, 'unknown') if value is None else value}" for field, value in found.items()
    )


def reply_of(rows: Iterable[Row]) -> Reply:
    """Return rows as a reply: texts as bytes."""
    return [{name.encode(): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return [_plain(each) for each in value] if isinstance(value, list) else value
