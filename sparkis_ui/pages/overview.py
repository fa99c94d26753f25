"""Overview: jobs, the failing and stale ones first, and graphs of the endpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparkis_ui import charts, text
from sparkis_ui.facts import integer
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.polling import POINTS_MIN, TURN_S

GRAPHS = (
    ("reads", "Reads per second", text.short),
    ("age", "Age of the oldest live job", text.duration),
    ("epochs", "Epochs per minute", text.short),
    ("changes", "Changes per minute", text.short),
)
SORTS = ("name", "keys", "age", "epochs", "changes")


class Shown(NamedTuple):
    """A graph with its texts."""

    title: str
    now: str
    highest: str
    graph: charts.Graph


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    hub, facts = request.hub, request.hub.facts
    jobs = facts.jobs
    sort = request.query.text("sort")
    if sort in SORTS:
        jobs = sorted(jobs, key=lambda job: _sort_key(job, sort))
    graphs = []
    for name, title, unit in GRAPHS:
        made = charts.graph(hub.series.of(name), slots=POINTS_MIN)
        graphs.append(Shown(title, unit(made.last), unit(made.highest), made))
    hits, misses = (integer(facts.info.get(name)) or 0 for name in ("keyspace_hits", "keyspace_misses"))
    return {
        "jobs": jobs,
        "graphs": graphs,
        "window": f"{max(POINTS_MIN, len(hub.series.of('keys'))) * TURN_S / 60:.0f} min",
        "sort": sort,
        "ages": {job.name: charts.graph(hub.series.of(f"age of {job.name}"), slots=POINTS_MIN) for job in jobs},
        "states": facts.states,
        "to_look_at": sum(job.condition not in ("live", "past") for job in jobs),
        "keys": sum(job.keys for job in jobs),
        "store_bytes": sum(job.store_bytes or 0 for job in jobs),
        "hit_rate": f"{100 * hits / (hits + misses):.1f} %" if hits + misses else text.UNKNOWN,
        "uptime_ms": (integer(facts.info.get("uptime_in_seconds")) or 0) * 1000,
    }


def _sort_key(job: Any, sort: str) -> Any:
    values = {
        "keys": -job.keys,
        "age": job.age_ms or 0,
        "epochs": -(job.epochs_per_minute or 0),
        "changes": -(job.changes_per_minute or 0),
    }
    return (values.get(sort, 0), job.name)


PAGE = Page("overview", "Overview", read, ("states",), key="1")
