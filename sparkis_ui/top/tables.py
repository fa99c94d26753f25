"""The tables of `sparkis top`: their columns, the order of their rows, and the line above them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparkis_ui import facts
from sparkis_ui.facts import Job
from sparkis_ui.polling import EndpointState
from sparkis_ui.text import clock, duration, number, short, size

ROWS_MAX = 500  # a table with more rows shows its first ones, in its order

# Severities of the conditions of jobs and servers.
GOOD, WARNING, BAD = "good", "warning", "bad"
SEVERITIES = {"live": GOOD, "online": GOOD, "failing": BAD, "stale": BAD, "unreachable": BAD}


@dataclass(frozen=True)
class Cell:
    """A cell of a row.

    Args:
        value: Rows are sorted by it; None sorts last.
    """

    text: str
    value: Any = None
    severity: str = ""


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        is_number: Shown at the right, and sorted from the largest.
    """

    title: str
    is_number: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        groups: The groups of facts that it needs (`polling.TURNS`).
        rows: Returns each row's name, which is the same in each turn, and its cells.
    """

    name: str
    title: str
    groups: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: Callable[[EndpointState], Iterable[tuple[str, Sequence[Cell]]]]
    empty: str


@dataclass(frozen=True)
class Order:
    """The order of a table's rows.

    Args:
        column: Rows are sorted by it; None: rows stay in the order of the facts.
    """

    column: int | None = None
    is_reversed: bool = False

    def by(self, table: Table, column: int) -> Order:
        """Return the order by a column; by the same column again, the other way round."""
        if column == self.column:
            return Order(column, not self.is_reversed)
        return Order(column, table.columns[column].is_number)

    def title_of(self, table: Table, column: int) -> str:
        """Return a column's title, with an arrow if the rows are sorted by it."""
        title = table.columns[column].title
        return title if column != self.column else f"{title} {'▼' if self.is_reversed else '▲'}"


AS_THEY_COME = Order()


def rows_of(
    table: Table, found: EndpointState, order: Order = AS_THEY_COME, pattern: str = ""
) -> tuple[list[tuple[str, list[Cell]]], int]:
    """Return a table's first rows in an order, and the number of all rows."""
    rows = [(name, list(cells)) for name, cells in table.rows(found)]
    if pattern:
        wanted = pattern.casefold()
        rows = [row for row in rows if any(wanted in cell.text.casefold() for cell in row[1])]
    if (column := order.column) is not None:
        known = [row for row in rows if row[1][column].value is not None]
        unknown = [row for row in rows if row[1][column].value is None]
        rows = sorted(known, key=lambda row: row[1][column].value, reverse=order.is_reversed) + unknown
    return rows[:ROWS_MAX], len(rows)


def _text(text: str) -> Cell:
    return Cell(text, text.casefold() or None)


def _integer(value: int | None) -> Cell:
    return Cell(number(value), value)


def _condition(text: str) -> Cell:
    return Cell(text, text, SEVERITIES.get(text, WARNING))


def _time(ms: float | None) -> Cell:
    return Cell(duration(ms), ms)


def _jobs(found: EndpointState) -> Iterable[tuple[str, Sequence[Cell]]]:
    for job in found.jobs:
        yield (
            job.name,
            (
                _text(job.name),
                _condition(job.condition),
                _integer(len(job.states)),
                _integer(job.keys),
                _integer(job.applied),
                _integer(job.lag_epochs),
                _integer(job.source_lag_records),
                _time(job.record_delay_p99_ms),
                _time(job.age_ms),
                _integer(job.epochs_per_minute),
                _integer(job.changes_per_minute),
                Cell(size(job.store_bytes), job.store_bytes),
                _text(_remark(job)),
            ),
        )


def _remark(job: Job) -> str:
    if job.error:
        return job.error
    if job.held_back_epoch is not None:
        return f"epoch {job.held_back_epoch} of a new generation is held back"
    if job.skipped_rows:
        return f"{job.skipped_rows:,} rows are left out"
    if job.fresh_keys:
        return f"{job.fresh_keys:,} values before their commit{' (incomplete)' * job.is_fresh_incomplete}"
    return f"as of {job.as_of}" if job.as_of else ""


def _states(found: EndpointState) -> Iterable[tuple[str, Sequence[Cell]]]:
    for job in found.jobs:
        formats = dict(zip(job.states, job.key_formats, strict=False))
        for state in found.states.get(job.name, ()):
            cells = (
                _text(job.name),
                _text(state.name),
                _text(state.kind),
                _integer(state.keys),
                Cell(size(state.bytes), state.bytes),
                _text(formats.get(state.name, "")),
            )
            yield f"{job.name}\0{state.name}", cells


def _servers(found: EndpointState) -> Iterable[tuple[str, Sequence[Cell]]]:
    cluster = found.cluster
    masters = {node.id: node.address for node in cluster.nodes}
    for node in cluster.nodes:
        info, jobs = cluster.info.get(node.address, {}), cluster.jobs.get(node.address, [])
        error = cluster.errors.get(node.address, "")
        lags = [job.lag_ms for job in jobs if job.lag_ms is not None]
        memory = facts.integer(info.get("used_memory"))
        yield (
            node.address,
            (
                _text(node.address),
                _condition("unreachable" if error else node.health),
                _text(f"replica of {masters.get(node.replica_of, node.replica_of)}" if node.replica_of else "master"),
                _text(node.zone),
                _integer(node.slot_count),
                _integer(sum(job.keys for job in jobs) if jobs else None),
                _time(max(lags, default=None)),
                _integer(facts.integer(info.get("instantaneous_ops_per_sec"))),
                _integer(facts.integer(info.get("connected_clients"))),
                Cell(size(memory), memory),
                _text(error),
            ),
        )


def _commands(found: EndpointState) -> Iterable[tuple[str, Sequence[Cell]]]:
    total_us = sum(command.calls * command.us_per_call for command in found.commands) or 1.0
    for each in found.commands:
        share = each.calls * each.us_per_call / total_us
        cells = (
            _text(each.name.replace("|", " ").upper()),
            _integer(each.calls),
            Cell(f"{each.us_per_call:.1f} µs", each.us_per_call),
            Cell(f"{share:.1%}", share),
            _integer(each.failed),
        )
        yield each.name, cells


def _users(found: EndpointState) -> Iterable[tuple[str, Sequence[Cell]]]:
    for user in found.users:
        cells = (
            _text(user.name),
            _integer(user.clients),
            _integer(user.active),
            Cell(short(user.requests_per_s), user.requests_per_s),
            Cell(size(user.input_per_s), user.input_per_s),
            Cell(size(user.output_per_s), user.output_per_s),
            _integer(user.tracking),
            _integer(user.subscribed),
            Cell(size(user.waiting_bytes), user.waiting_bytes),
            _text(user.commands),
        )
        yield user.name, cells


def _slow(found: EndpointState) -> Iterable[tuple[str, Sequence[Cell]]]:
    for index, each in enumerate(found.slow):
        cells = (
            Cell(duration(each.duration_us / 1000), each.duration_us),
            Cell(f"{clock(each.at_s)} UTC", each.at_s),
            _text(each.request),
            _text(each.client),
            _text(each.name),
        )
        yield f"{each.at_s} {each.duration_us} {index}", cells


def _number(title: str) -> Column:
    return Column(title, is_number=True)


TABLES = (
    Table(
        "jobs",
        "Jobs",
        ("jobs",),
        (
            Column("JOB"),
            Column("CONDITION"),
            *map(_number, ("STATES", "KEYS", "EPOCH", "BEHIND", "SOURCE LAG", "RECORD P99", "AGE")),
            *map(_number, ("EPOCHS/MIN", "CHANGES/MIN", "STORE")),
            Column("REMARK"),
        ),
        _jobs,
        "no jobs: nothing has been published to the server's logs yet",
    ),
    Table(
        "states",
        "States",
        ("jobs", "states"),
        (Column("JOB"), Column("STATE"), Column("KIND"), _number("KEYS"), _number("BYTES"), Column("KEY FORMAT")),
        _states,
        "no states: nothing has been published to the server's logs yet",
    ),
    Table(
        "servers",
        "Servers",
        ("jobs", "cluster"),
        (
            Column("SERVER"),
            Column("CONDITION"),
            Column("ROLE"),
            Column("ZONE"),
            *map(_number, ("SLOTS", "KEYS", "LAG", "REQUESTS/S", "CLIENTS", "MEMORY")),
            Column("REMARK"),
        ),
        _servers,
        "no cluster: the endpoint is a single server",
    ),
    Table(
        "commands",
        "Commands",
        ("clients",),
        (Column("COMMAND"), *map(_number, ("CALLS", "TIME/CALL", "TIME", "FAILED"))),
        _commands,
        "no command has been called yet",
    ),
    Table(
        "users",
        "Users",
        ("clients",),
        (
            Column("USER"),
            *map(_number, ("CLIENTS", "ACTIVE", "REQUESTS/S", "IN/S", "OUT/S", "TRACKING", "SUBSCRIBED", "WAITING")),
            Column("COMMANDS"),
        ),
        _users,
        "no client is listed: there are more than 1,000, or CLIENT LIST is not allowed",
    ),
    Table(
        "slow",
        "Slow requests",
        ("clients",),
        (_number("TIME"), _number("WHEN"), Column("REQUEST"), Column("CLIENT"), Column("NAME")),
        _slow,
        "no slow requests: CONFIG GET slowlog-log-slower-than shows which ones are",
    ),
)


def summary_of(found: EndpointState, latest: Callable[[str], float | None]) -> list[tuple[str, str]]:
    """Return the numbers above the tables as (name, text)."""
    info = found.info
    hits, misses = (facts.integer(info.get(f"keyspace_{name}")) for name in ("hits", "misses"))
    share = None if not hits and not misses else (hits or 0) / ((hits or 0) + (misses or 0))
    to_look_at = sum(job.condition not in ("live", "past") for job in found.jobs)
    return [
        ("jobs" + (f", {to_look_at} to look at" if to_look_at else ""), number(len(found.jobs))),
        ("keys", short(latest("keys"))),
        ("epochs/min", short(latest("epochs"))),
        ("changes/min", short(latest("changes"))),
        ("oldest", duration(latest("age"))),
        ("requests/s", short(latest("requests"))),
        ("reads/s", short(latest("reads"))),
        ("hits", number(None) if share is None else f"{share:.1%}"),
        ("sent", f"{size(latest('out'))}/s"),
        ("clients", number(latest("clients"))),
    ]
