"""Writes docs/clients-speed.md from the stored rows.

The page is written by hand, except between `<!-- results of clients -->` and `<!-- end of clients -->`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.clients.places import PLACES
from benchmarks.page import DOCS, PART, measured
from benchmarks.results import Row, load

PAGE = DOCS / "clients-speed.md"


def draw() -> None:
    """Write the page."""
    PAGE.write_text(text_of(PAGE.read_text(), load()))


def text_of(page: str, rows: Sequence[Row]) -> str:
    """Return the page with new tables."""
    of_clients = [row for row in rows if row.part == "clients"]
    return PART.sub(lambda found: f"{found[1]}{tables(of_clients)}{found[3]}", page)


def tables(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: the lowest ratios of each client at each place, and a table for each place."""
    if not rows:
        return "Not measured yet.\n"
    found = {_names(row): row for row in rows}
    clients = {_names(row)[0]: row.note for row in rows}
    parts = [
        "\n".join(_lowest(found, clients)),
        *("\n".join([f"### {place[0].upper()}{place[1:]}", "", *_at(place, found, clients)]) for place in PLACES),
        measured(rows),
    ]
    return "\n\n".join(parts)


Names = tuple[str, str, str]


def _names(row: Row) -> Names:
    """Return the names of a row's client, place and workload."""
    client, place, workload = row.name.split(", ")
    return client, place, workload


def _lowest(rows: dict[Names, Row], clients: dict[str, str]) -> Iterator[str]:
    yield f"| lowest ratio of a workload | {' | '.join(PLACES)} |"
    yield "|---|" + "---|" * len(PLACES)
    for client, version in clients.items():
        cells = []
        for place in PLACES:
            ratios = [(row.ratio or 0.0, name[2], row) for name, row in rows.items() if name[:2] == (client, place)]
            ratio, workload, row = min(ratios, default=(0.0, "", None))
            cells.append(f"{ratio:.2f}{_mark(row)}: {workload}" if row else "")
        yield f"| {client} {version} | {' | '.join(cells)} |"


def _at(place: str, rows: dict[Names, Row], clients: dict[str, str]) -> Iterator[str]:
    workloads = list(dict.fromkeys(name[2] for name in rows if name[1] == place))
    yield f"| | {' | '.join(workloads)} |"
    yield "|---|" + "---:|" * len(workloads)
    for client in clients:
        yield f"| {client} | {' | '.join(_cell(rows.get((client, place, each))) for each in workloads)} |"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.ratio:.2f}{_mark(row)} ({_us(row.ours_cpu_us)} / {_us(row.peer_cpu_us)})"


def _mark(row: Row) -> str:
    return "" if row.is_within_budget else " ✗"


def _us(value: float | None) -> str:
    return f"{value:.1f}" if value is not None and value < 10 else f"{value or 0:,.0f}"
