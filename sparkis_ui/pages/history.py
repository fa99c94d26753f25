"""History: the values that a key had, as far back as the log of its job can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparkis_ui import charts, text
from sparkis_ui.client import RequestError
from sparkis_ui.facts import fields_of, integer, text_of
from sparkis_ui.page import Page, PageRequest

COUNT = 50
COUNT_MAX = 500
ELEMENTS_SHOWN = 12


class Moment(NamedTuple):
    """A value that the key had from an epoch on.

    Args:
        differs: The fields or members whose values changed in this epoch.
    """

    epoch: int | None
    at: str
    value: str
    pairs: Sequence[tuple[str, str]]
    differs: frozenset[str]
    is_oldest: bool
    is_gone: bool


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    key, count = request.query.raw("key"), request.query.integer("count", COUNT, COUNT_MAX) or COUNT
    rows: list[dict[str, Any]] = []
    error = ""
    if key:
        try:
            rows = [fields_of(row) for row in await request.hub.client.execute("STATE", "HISTORY", key, "COUNT", count)]
        except (RequestError, TimeoutError) as refusal:
            error = str(refusal) or "the history took too long"
    numbers = [text.numeric(row["value"]) if isinstance(row.get("value"), bytes) else None for row in reversed(rows)]
    return {
        "key": key,
        "count": count,
        "count_max": COUNT_MAX,
        "moments": moments_of(rows),
        "graph": charts.graph(numbers, from_zero=False),
        "error": error,
    }


def moments_of(rows: Sequence[Mapping[str, Any]]) -> list[Moment]:
    """Return the moments of STATE HISTORY's rows, the newest first. The oldest one differs in nothing."""
    pairs = [_pairs(row.get("value"), text_of(row.get("kind") or "")) for row in rows]
    before = [*pairs[1:], *pairs[-1:]]
    return [_moment(row, now, dict(old)) for row, now, old in zip(rows, pairs, before, strict=True)]


def _moment(row: Mapping[str, Any], pairs: list[tuple[str, str]], before: dict[str, str]) -> Moment:
    value = row.get("value")
    return Moment(
        integer(row.get("epoch")),
        text_of(row.get("committed_at") or ""),
        text.shown(value, 400) if isinstance(value, bytes) else "",
        pairs[:ELEMENTS_SHOWN],
        frozenset(name for name, each in pairs if before.get(name) != each),
        bool(row.get("is_oldest")),
        value is None,
    )


def _pairs(value: Any, kind: str) -> list[tuple[str, str]]:
    """Return the fields of a map, the members of a sorted set with their scores, the elements of a list or set."""
    if isinstance(value, Mapping):
        return [(text.shown(name, 80), text.shown(each, 120)) for name, each in value.items()]
    if not isinstance(value, list | tuple | set):
        return []
    items = list(value)
    if items and all(isinstance(item, list | tuple) and len(item) == 2 for item in items):
        return [(text.shown(name, 80), text.shown(each, 120)) for name, each in items]
    if kind in ("map", "sorted-set"):
        return [
            (text.shown(name, 80), text.shown(each, 120)) for name, each in zip(items[::2], items[1::2], strict=False)
        ]
    return [(str(index), text.shown(item, 120)) for index, item in enumerate(items)]


PAGE = Page("history", "History", read, is_live=False)
