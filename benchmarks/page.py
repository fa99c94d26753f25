"""Writes the tables of docs/performance.md, and docs/plots/, from results.json.

The page is written by hand, except between `<!-- results of PART -->` and `<!-- end of PART -->`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.plots import Curve, curves, dots, number
from benchmarks.results import Row, load

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PLOTS = DOCS / "performance.md", DOCS / "plots"
PART = re.compile(r"(<!-- results of (\w+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)

RATIO = "beside the peer: 1 is as good, dashed is the budget"
# Plots of medians and spread: title, unit. A row with a series is on a curve instead.
DOTS = {
    "reads": ("Reads per second, sparkis / redis-server", RATIO),
    "proxy": ("Through a proxy, requests per second, sparkis / twemproxy", RATIO),
    "surface": ("The rest of the surface, requests per second, sparkis / redis-server", RATIO),
    "updates": ("Spark rows per second until readable, sparkis / redis-server", RATIO),
    "delay": ("From the end of the last task to the first read", "ms; dashed is the budget"),
    "memory": ("Bytes per key, sparkis / redis-server", RATIO + "; less is better"),
    "startup": ("From start to first answer, sparkis / redis-server loading its own file", RATIO + "; less is better"),
    "split": ("Time of a GET in the serving process", "us a request"),
}
# Curves: file, part, title, x, y. Their lines are the series of that part whose names begin with the file's name.
CURVES = (
    ("scaling-rate", "GET per second by the number of keys, pipeline 16", "keys", "GET/s"),
    ("scaling-memory", "Bytes per key by the number of keys", "keys", "bytes/key"),
    ("scaling-apply", "Time to apply an epoch by the number of its changes", "changes", "ms"),
)


class Cells(NamedTuple):
    """A row as text."""

    ours: str
    peer: str
    ratio: str
    spread: str
    budget: str
    cpu: str


def cells(row: Row) -> Cells:
    """Return a row as text, for the page and for the terminal."""
    sign = "≥" if row.better == "more" else "≤"
    return Cells(
        ours=number(row.ours),
        peer="" if row.peer is None else number(row.peer),
        ratio="" if row.ratio is None else f"{row.ratio:.2f}",
        spread="" if row.low is None or row.high is None else _spread(row.low, row.high, row.ratio is not None),
        budget="" if row.budget is None else f"{sign} {number(row.budget)}",
        cpu="" if row.ours_cpu_us is None else f"{row.ours_cpu_us:.2f} / {row.peer_cpu_us or 0:.2f}",
    )


def _spread(low: float, high: float, is_ratio: bool) -> str:
    if low == high:  # one round, or one number of many
        return ""
    return f"{low:.2f}-{high:.2f}" if is_ratio else f"{number(low)}-{number(high)}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows of a part as Markdown, with the machine that they were measured on."""
    if not rows:
        return "Not measured yet.\n"
    has_cpu = any(row.ours_cpu_us is not None for row in rows)
    has_peer = any(row.peer is not None for row in rows)
    head = ["", "sparkis", *(["peer", "ratio"] if has_peer else []), "low-high", "budget"]
    head += ["CPU µs each, ours / peer"] if has_cpu else []
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        text = cells(row)
        mark = {True: " ✓", False: " ✗", None: ""}[row.is_within_budget]
        found = [_named(row), f"{text.ours} {row.unit}", *([text.peer, text.ratio] if has_peer else [])]
        found += [text.spread, text.budget + mark, *([text.cpu] if has_cpu else [])]
        lines.append(f"| {' | '.join(found)} |")
    return "\n".join(lines) + "\n\n" + measured(rows)


def _named(row: Row) -> str:
    more = description(row)
    return f"{row.name} ({more})" if more else row.name


def description(row: Row) -> str:
    """Return the remarks about a row."""
    peer = "" if row.peer is None or row.peer_name == "redis-server" else f"peer: {row.peer_name}"
    return "; ".join(filter(None, (row.note, peer)))


def measured(rows: Sequence[Row]) -> str:
    """Return when, how often and on which machine the rows were measured; rows of another machine are listed."""
    lines = []
    for machine in dict.fromkeys(row.machine for row in rows):
        of_machine = [row for row in rows if row.machine == machine]
        times = sorted(row.measured_at for row in of_machine)
        when = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
        rounds = sorted({row.rounds for row in of_machine})
        subject = "" if len(of_machine) == len(rows) else f"{of_machine[0].name} to {of_machine[-1].name}: "
        description = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        lines.append(f"{subject}{when}; {description} round{'s' * (description != '1')}; {machine}.\n")
    return "\n".join(lines)


def text_of(page: str, rows: Sequence[Row]) -> str:
    """Return a page with new tables."""

    def part(found: re.Match[str]) -> str:
        of_part = [row for row in rows if row.part == found[2]]
        plots = "".join(f"![{title}](plots/{name}.svg)\n\n" for name, title in _plots_of(found[2], of_part))
        return f"{found[1]}{plots}{table(of_part)}{found[3]}"

    return PART.sub(part, page)


def _plots_of(part: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
    drawn = drawings(rows)
    titles = {part: DOTS[part][0]} if part in DOTS else {}
    titles |= {name: title for name, title, _, _ in CURVES}
    return [(name, titles[name]) for name in drawn]


def drawings(rows: Sequence[Row]) -> dict[str, str]:
    """Return the plots of the rows, by file name."""
    drawn = {}
    for part, (title, unit) in DOTS.items():
        of_part = [row for row in rows if row.part == part and not row.series]
        # Numbers of different units have no common axis; ratios have.
        of_part = [row for row in of_part if row.ratio is not None] or of_part
        if of_part:
            drawn[part] = dots(title, of_part, unit)
    for name, title, x_title, y_title in CURVES:
        lines = _lines([row for row in rows if row.series.startswith(name)])
        if lines:
            drawn[name] = curves(title, lines, x_title, y_title)
    return drawn


def _lines(rows: Sequence[Row]) -> list[Curve]:
    """Return the lines of one plot: one per series, and one for its peer if it has one."""
    lines: dict[str, Curve] = {}
    for row in sorted(rows, key=lambda row: row.x or 0.0):
        assert row.x is not None
        name = row.series.partition(": ")[2] or "sparkis"
        lines.setdefault(name, Curve(name)).points.append((row.x, row.ours))
        if row.peer is not None:
            lines.setdefault(row.peer_name or "peer", Curve(row.peer_name or "peer")).points.append((row.x, row.peer))
    return list(lines.values())


def draw() -> None:
    """Write the page and the plots."""
    rows = load()
    PAGE.write_text(text_of(PAGE.read_text(), rows))
    PLOTS.mkdir(exist_ok=True)
    drawn = drawings(rows)
    for name, svg in drawn.items():
        (PLOTS / f"{name}.svg").write_text(svg)
    for stale in set(PLOTS.glob("*.svg")) - {PLOTS / f"{name}.svg" for name in drawn}:
        stale.unlink()
