"""Writes docs/commands-speed.md and its picture from the rows of the last run.

The page is written by hand, except between `<!-- results of commands -->` and `<!-- end of commands -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.commands.field import drawn
from benchmarks.commands.rows import LOADS, Run, SpeedRow, Timing, load
from benchmarks.page import DOCS
from benchmarks.plots import number

PAGE = DOCS / "commands-speed.md"
PICTURE = DOCS / "images" / "commands.svg"
RESULTS = re.compile(r"(<!-- results of commands -->\n).*?(<!-- end of commands -->)", re.DOTALL)
WORST = 10
# A machine with as much other work, for each processor, gives no numbers to keep.
BUSY = 0.5
ROUNDS = 5


def draw() -> None:
    """Write the page and the picture; nothing if there was no run."""
    run = load()
    if run is not None:
        PAGE.write_text(text_of(PAGE.read_text(), run))
        PICTURE.write_text(drawn(run))


def text_of(page: str, run: Run) -> str:
    """Return the page with a run's results."""
    return RESULTS.sub(lambda found: f"{found[1]}{results(run)}{found[2]}", page)


def results(run: Run) -> str:
    """Return the results as Markdown."""
    picture = f"images/{PICTURE.name}"
    rounds = f"{run.rounds} round{'s' * (run.rounds != 1)}"
    measured = f"{run.measured_at}; {run.took_s / 60:.0f} minutes; {rounds}; {run.machine}."
    parts = [
        *_warning(run),
        f"{run.kept}. {_spread(run)} {measured}",
        f"[![The time of each request, sparkis / redis-server]({picture})]({picture})",
        "Open the picture itself to see the numbers of a square under the pointer.",
        "## The ten worst rows",
        "Those that exceed their budgets most. The processor time is that of all processes that answer, beside Redis'.",
        "\n".join(_worst(sorted(run.rows, key=lambda row: -row.excess)[:WORST])),
        "## Every command",
        "Each cell has the ratio to redis-server's time, with one connection and with 50; ✗: it exceeds its budget.",
        "\n".join(_commands([row for row in run.rows if row.group != row.name])),
        "## Shapes of requests",
        "As above, of 1, 20 and 1,000 elements.",
        "\n".join(_shapes([row for row in run.rows if row.group == row.name])),
    ]
    return "\n\n".join(parts) + "\n"


def _warning(run: Run) -> Iterator[str]:
    """Say why a run is only a trial."""
    reasons = [f"{run.rounds} of {ROUNDS} rounds"] if run.rounds < ROUNDS else []
    if run.busy > BUSY:
        reasons.append(f"a loaded machine, whose processors each had {run.busy:g} other processes to run")
    if reasons:
        trial = f"**These numbers are a trial of {run.measured_at[:10]}: {', '.join(reasons)}.**"
        yield f"{trial} They show what is measured; only large differences mean anything."


def _spread(run: Run) -> str:
    ranges = " and ".join(f"{low:.2f} to {high:.2f} ({name})" for name, (low, high) in run.spread.items())
    return f"A redis-server beside itself has ratios of {ranges}: the spread of the machine."


def _worst(rows: Iterable[SpeedRow]) -> Iterator[str]:
    yield "| | where | ratio, low-high | processor time | sparkis | redis-server | twemproxy | budget |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in rows:
        name = _name(row)
        if row.error:
            yield f"| {name} | {row.place_and_session} | {_cell_of(row.error)} | | | | | {row.budget} |"
            continue
        load, worst = max(zip(LOADS, row.timings, strict=True), key=lambda pair: pair[1].excess)
        times = [_us(worst.ours_us), _us(worst.redis_us), _us(worst.twemproxy_us) if worst.twemproxy_us else ""]
        ratio = f"{_ratio(worst.ratio)}, {_ratio(worst.low)}-{_ratio(worst.high)}"
        cpu = _ratio(worst.cpu_ratio) if worst.cpu_ratio else ""
        cells = (name, f"{row.place_and_session}; {load.name}", ratio, cpu, *times, row.budget)
        yield f"| {' | '.join(cells)} |"


def _commands(rows: Sequence[SpeedRow]) -> Iterator[str]:
    places = list(dict.fromkeys(row.place for row in rows))
    # A node of a cluster has the commands that the others leave out: both share a column.
    columns = [place for place in places if place != "a node of a cluster"]
    yield f"| | budget | {' | '.join(columns)} |"
    yield f"|---|---|{'---|' * len(columns)}"
    by_name: dict[str, dict[str, SpeedRow]] = {}
    for row in rows:
        column = columns[0] if row.place not in columns else row.place
        by_name.setdefault(row.name, {})[column] = row
    for name, found in by_name.items():
        first = next(iter(found.values()))
        note = f" ({first.note})" if first.note else ""
        cells = [_ratios(found[column]) if column in found else "" for column in columns]
        yield f"| `{name}`{note} | {first.budget} | {' | '.join(cells)} |"


def _shapes(rows: Sequence[SpeedRow]) -> Iterator[str]:
    names = list(dict.fromkeys(_name(row) for row in rows))
    by_place: dict[str, dict[str, SpeedRow]] = {}
    for row in rows:
        by_place.setdefault(row.place_and_session, {})[_name(row)] = row
    places = list(by_place)
    yield f"| | {' | '.join(places)} |"
    yield f"|---|{'---|' * len(places)}"
    for name in names:
        yield f"| {name} | {' | '.join(_ratios(by_place[place][name]) for place in places)} |"


def _ratios(row: SpeedRow) -> str:
    if row.error:
        return "fails"
    return ", ".join(map(_marked, row.timings))


def _marked(timing: Timing) -> str:
    return _ratio(timing.ratio) + (" ✗" if timing.excess > 1 else "")


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _us(value: float) -> str:
    return f"{number(value)} µs"


def _name(row: SpeedRow) -> str:
    return f"{row.name} of {row.size:,}" if row.group == row.name else f"`{row.name}`"


def _cell_of(error: str) -> str:
    return error.replace("|", "\\|").replace("\n", " ")[:200]
