"""Every served command, and one of each shape over sizes and paths, beside redis-server: no request is left out.

Each row is a request at a place: at `sparkis serve`, at one address with an upstream, through a proxy. Its time is
compared with that of redis-server, and of twemproxy where a proxy stands between; with the time without tracking, if
its connection tracks. A reply that differs fails the row. The rows are generated from the command table;
docs/commands-speed.md shows all of them.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime

from benchmarks.commands.data import dataset
from benchmarks.commands.measure import OURS, Place, Session, measured
from benchmarks.commands.places import PLAIN, RESP3, SETTINGS, Commands, Measurable, Scene, Setting
from benchmarks.commands.requests import Exchange, exchanges, shapes
from benchmarks.commands.rows import LOADS, Run, SpeedRow, store
from benchmarks.options import Options
from benchmarks.results import Row, machine
from benchmarks.servers import BenchmarkError, temporary_folder
from compat.conformance.differential import Address, judge_of
from compat.conformance.judge import Judge

ROWS_MAX = 1_000
# The exchange that one redis-server answers beside itself.
CONTROL = "GET"


def planned(
    setting: Setting, *, is_full: bool, rows: re.Pattern[str] | None = None
) -> Iterator[tuple[Session, Exchange]]:
    """Yield what is measured at a place: commands first, then shapes, those of a session that tracks last.

    rows: Yield only those whose title matches. A session that tracks is compared with RESP3 if that is there, too.
    """
    for session, exchange in _all(setting, is_full=is_full):
        row = SpeedRow(exchange.name, exchange.group, setting.place, session.name, exchange.size)
        if rows is None or rows.search(row.title):
            yield session, exchange


def _all(setting: Setting, *, is_full: bool) -> Iterator[tuple[Session, Exchange]]:
    for exchange in exchanges(setting.prefix):
        if _is_measured(exchange, setting.commands):
            yield PLAIN, exchange
    sessions = [*setting.sessions, *(setting.more_sessions if is_full else ())]
    for session in sorted(sessions, key=lambda each: each.is_tracking):
        for exchange in shapes(setting.prefix):
            yield session, exchange


def _is_measured(exchange: Exchange, commands: Commands) -> bool:
    match commands:
        case Commands.BEFORE_AN_UPSTREAM:
            return not exchange.is_denied
        case Commands.OF_A_SERVER:
            return exchange.group != "cluster"
        case Commands.OF_A_NODE:
            return exchange.group == "cluster"
        case Commands.ABOUT_KEYS:
            return bool(exchange.counted[0])
        case Commands.NONE:
            return False


def run(options: Options) -> Iterator[Row]:
    """Measure all rows, print them, and store them in a file of their own; yield none."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    began_s, began = time.monotonic(), datetime.now(UTC)
    rows: list[SpeedRow] = []
    spread: Mapping[str, tuple[float, float]] = {}
    with temporary_folder() as folder, ExitStack() as stack:
        scene = Scene(folder, stack)
        wanted = [each for each in SETTINGS if any(planned(each, is_full=options.is_full, rows=options.rows))]
        for setting, place in scene.places(wanted):
            judge = _judge(place)
            if not rows:
                spread = _spread(setting, place, judge, options)
            for row in _rows((setting, place), judge, options):
                options.report("")
                print(line(row), flush=True)
                rows.append(row)
    if options.is_written:
        found = Run(
            measured_at=f"{began:%Y-%m-%d %H:%M} UTC",
            machine=machine(),
            rounds=options.rounds,
            busy=round(busy, 1),
            spread=spread,
            took_s=round(time.monotonic() - began_s),
            rows=rows,
        )
        store(found)
    if failed := [f"{row.title}: {row.error}" for row in rows if row.error]:
        raise BenchmarkError("\n".join([f"{len(failed)} rows have no number:", *failed]))
    yield from ()


def _judge(place: Place) -> Judge:
    theirs, ours = (Address("127.0.0.1", each.port) for each in (place.redis, place.ours))
    return judge_of(theirs, ours, dataset(place.prefix))


def _rows(at: Measurable, judge: Judge, options: Options) -> Iterator[SpeedRow]:
    setting, place = at
    without_tracking: dict[tuple[str, int], dict[str, float]] = {}
    for session, exchange in planned(setting, is_full=options.is_full, rows=options.rows):
        options.report(f"{exchange.name}, {place.name}")
        plain_us = without_tracking.get((exchange.name, exchange.size)) if session.is_tracking else None
        row = measured(exchange, place, session, judge, options, plain_us)
        if session is RESP3 and not row.error:
            times = zip(LOADS, row.timings, strict=True)
            without_tracking[exchange.name, exchange.size] = {load.name: timing.ours_us for load, timing in times}
        yield row


def _spread(setting: Setting, place: Place, judge: Judge, options: Options) -> Mapping[str, tuple[float, float]]:
    """Measure a redis-server beside itself; return the lowest and the highest ratio of a round, by load."""
    redis = place.redis
    alone = place._replace(name="itself", ours=redis._replace(name=OURS), twemproxy=None, counted=(redis.port,))
    (get,) = (each for each in exchanges(setting.prefix) if each.name == CONTROL)
    row = measured(get, alone, PLAIN, judge, options)
    if row.error:
        raise BenchmarkError(row.error)
    return {load.name: (timing.low, timing.high) for load, timing in zip(LOADS, row.timings, strict=True)}


def line(row: SpeedRow) -> str:
    """Return a row as a line of text."""
    start = f"{row.title:72}"
    if row.error:
        return f"{start}{row.error}"
    times = "".join(
        f"{each.ours_us:>9.4g} {each.redis_us:>8.4g} {each.ratio:>7.2f} {f'{each.low:.2f}-{each.high:.2f}':15}"
        f"CPU {each.cpu_ratio or 0:<7.2f}"
        for each in row.timings
    )
    mark = "" if row.is_within_budget else "missed"
    return f"{start}{times}{row.budget:32} {mark}"
