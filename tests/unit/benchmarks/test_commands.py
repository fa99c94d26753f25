"""The benchmark of all commands: its rows, their budgets, its file, and its page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.commands import ROWS_MAX, line, planned, speed_page
from benchmarks.commands.budgets import Budget, Work, budget_of, work_of
from benchmarks.commands.data import SIZES, STATES, dataset
from benchmarks.commands.field import drawn, said
from benchmarks.commands.places import NODE, OF_STATES, OF_UPSTREAM, SERVER, SETTINGS
from benchmarks.commands.requests import exchanges, served, shapes
from benchmarks.commands.rows import Run, SpeedRow, Timing, load, store
from resp_server.commands import command_table

SVG = "{http://www.w3.org/2000/svg}"
FAST = Timing(ours_us=0.5, redis_us=1.0, ratio=0.5, low=0.4, high=0.6, limit=1.5, depth=100)
SLOW = Timing(
    ours_us=40.0,
    redis_us=1.0,
    ratio=40.0,
    low=30.0,
    high=50.0,
    limit=2.0,
    depth=16,
    twemproxy_us=1.2,
    ours_cpu_us=3.0,
    redis_cpu_us=1.5,
)
WITHIN_BUDGET = SpeedRow("GET", "string", "serve", size=20, budget="≤ 1.5 x redis", timings=[FAST, FAST])
OVER_BUDGET = replace(WITHIN_BUDGET, name="HLEN", group="hash", timings=[FAST, SLOW])
FAILED = replace(WITHIN_BUDGET, name="TIME", group="server", timings=[], error="TIME: the reply is a | b")
OF_SHAPES = replace(WITHIN_BUDGET, name="range", group="range", session="TLS")
RUN = Run(
    "2026-11-27 13:00 UTC",
    "2 cores",
    5,
    0.1,
    {"one connection": (0.9, 1.1)},
    1700,
    [WITHIN_BUDGET, OVER_BUDGET, FAILED, OF_SHAPES],
)


def test_every_served_command_has_row_at_server() -> None:
    measured = {exchange.name for setting in (SERVER, NODE) for _, exchange in planned(setting, is_full=False)}
    assert {" ".join(command.name.upper().split("|")) for command in served()} <= measured
    assert len(served()) == sum(
        each.handler is not None and not each.name.startswith("state|") for each in command_table().with_subcommands()
    )


def test_every_command_about_keys_has_row_for_each_backend_of_one_address() -> None:
    about_keys = {each.name for each in exchanges(STATES) if each.counted[0]}
    for setting in (OF_STATES, OF_UPSTREAM):
        assert about_keys <= {exchange.name for _, exchange in planned(setting, is_full=False)}


def test_rows_are_at_most_a_thousand_and_each_is_there_once() -> None:
    rows = [
        (setting.place, session.name, exchange.name, exchange.size)
        for setting in SETTINGS
        for session, exchange in planned(setting, is_full=False)
    ]
    assert len(set(rows)) == len(rows) <= ROWS_MAX


def test_full_plan_contains_short_plan() -> None:
    for setting in SETTINGS:
        few, all_rows = ({str(row) for row in planned(setting, is_full=is_full)} for is_full in (False, True))
        assert few <= all_rows


def test_rows_are_chosen_by_pattern_of_their_titles() -> None:
    chosen = re.compile(r"^(GET|RESET|point 20) \((serve|with an upstream, its key)\)")
    found = [
        (setting.place, exchange.name)
        for setting in SETTINGS
        for _, exchange in planned(setting, is_full=False, rows=chosen)
    ]
    of_both = [(setting.place, name) for setting in (SERVER, OF_UPSTREAM) for name in ("GET", "point")]
    assert sorted(found) == sorted([*of_both, (SERVER.place, "RESET")])


def test_requests_about_keys_have_keys_of_data_set() -> None:
    keys = set(dataset(STATES).keys)
    for exchange in [*exchanges(STATES), *shapes(STATES)]:
        if not exchange.counted[0] or exchange.group == "stream":  # no state is a stream
            continue
        command = command_table().get(exchange.counted[0].encode())
        assert command is not None
        found = [
            words[at]
            for words in exchange.numbered(7)
            if words[0].lower().decode() == command.name.partition("|")[0]
            for at, _ in command.keys_in(words)
        ]
        assert found, exchange.name
        assert set(found) <= keys, exchange.name


@pytest.mark.parametrize(
    ("name", "work"),
    [
        *(
            (name, Work.POINT)
            for name in ("get", "hlen", "zscore", "zrank", "zcount", "ttl", "object|encoding", "geodist")
        ),
        *(
            (name, Work.ELEMENTS)
            for name in ("hgetall", "lrange", "zrange", "smembers", "hscan", "mget", "exists", "dump")
        ),
        *((name, Work.OTHER) for name in ("sinter", "zunion", "sort_ro", "geosearch", "lcs", "zintercard")),
        *((name, Work.OWN) for name in ("ping", "select", "client|id", "time", "dbsize", "scan", "spublish", "multi")),
        ("exec", Work.TRANSACTION),
        ("info", Work.INFO_ALL),
    ],
)
def test_command_has_work_of_its_row(name: str, work: Work) -> None:
    command = command_table().get(name.encode())
    assert command is not None
    assert work_of(command) is work


@pytest.mark.parametrize("work", Work)
@pytest.mark.parametrize("is_direct", [True, False])
def test_all_work_has_budget(work: Work, is_direct: bool) -> None:
    assert budget_of(work, is_direct=is_direct).limit_us(1.0, None) > 0


def test_budget_is_largest_of_its_limits() -> None:
    budget = Budget(2.0, 1.5, us=10.0)
    assert budget.text == "≤ 2 x redis or 1.5 x twemproxy or 10 µs"
    assert budget.limit_us(20.0, None) == 40.0
    assert budget.limit_us(20.0, 30.0) == 45.0
    assert budget.limit_us(1.0, 1.0) == 10.0


def test_row_keeps_its_budget_if_it_does_under_each_load() -> None:
    assert WITHIN_BUDGET.is_within_budget
    assert not OVER_BUDGET.is_within_budget
    assert not FAILED.is_within_budget
    assert OVER_BUDGET.excess == 20.0
    assert line(OVER_BUDGET).endswith("missed")
    assert line(FAILED).endswith("a | b")


def test_run_is_read_as_it_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "commands.json"
    assert load(path) is None
    store(RUN, path)
    found = load(path)
    assert found is not None
    assert list(found.rows) == list(RUN.rows)
    assert (found.rounds, found.took_s, found.machine) == (5, 1700, "2 cores")
    assert len(path.read_text().splitlines()) == len(RUN.rows) + 3  # a row on each line


def test_page_and_picture_show_last_run() -> None:
    run = load()
    assert run is not None
    written = speed_page.PAGE.read_text()
    assert speed_page.text_of(written, run) == written, "run: python -m benchmarks page"
    assert speed_page.PICTURE.read_text() == drawn(run), "run: python -m benchmarks page"


def test_page_has_worst_rows_first_and_all_in_tables() -> None:
    shown = speed_page.results(RUN)
    assert shown.startswith("2 of 4 rows keep their budgets.")
    worst, commands, of_shapes = shown.split("\n## ")[1:]
    assert worst.index("`TIME`") < worst.index("`HLEN`") < worst.index("`GET`")
    assert "TIME: the reply is a \\| b" in worst
    assert "| `HLEN` | serve; 50 connections | 40, 30-50 | 2.00 | 40 µs | 1 µs | 1.2 µs | ≤ 1.5 x redis |" in worst
    assert "| `HLEN` | ≤ 1.5 x redis | 0.50, 40 ✗ |" in commands
    assert "| range of 20 | 0.50, 0.50 |" in of_shapes


def test_run_of_loaded_machine_or_of_few_rounds_is_called_trial() -> None:
    assert "trial" not in speed_page.results(RUN)
    assert "a trial of 2026-11-27: 1 of 5 rounds." in speed_page.results(replace(RUN, rounds=1))
    assert "a loaded machine" in speed_page.results(replace(RUN, busy=4.5))


def test_picture_shows_halves_missed_budgets_and_failures() -> None:
    root = ElementTree.fromstring(drawn(RUN))
    squares = {each.findtext(f"{SVG}title"): each for each in root.iter(f"{SVG}g")}
    assert set(squares) == {said(row) for row in RUN.rows}
    halves = [[rect.get("class") for rect in squares[said(row)].iter(f"{SVG}rect")] for row in RUN.rows]
    assert halves == [["r0", "r0"], ["r0", "r6", "missed"], [], ["r0", "r0"]]
    assert len(list(squares[said(FAILED)].iter(f"{SVG}line"))) == 2
    assert "prefers-color-scheme: dark" in drawn(RUN)


def test_shapes_have_each_size() -> None:
    sizes: dict[str, list[int]] = {}
    for exchange in shapes(STATES):
        sizes.setdefault(exchange.name, []).append(exchange.size)
    assert set(map(tuple, sizes.values())) == {SIZES}
    assert len(sizes) == 7
