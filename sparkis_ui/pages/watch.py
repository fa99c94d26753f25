"""Watch: keys, patterns and leaderboards, updated with each change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sparkis_ui import charts, text
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.pages.cluster import masters
from sparkis_ui.watching import KEYS_MAX, PATTERNS_MAX, POINTS_MIN, Watched


class Row(NamedTuple):
    """A line of a card.

    Args:
        moved: The number of ranks that a member has gained.
    """

    name: bytes
    value: str
    whole: str
    graph: charts.Graph
    moved: int


class Card(NamedTuple):
    """A watched key."""

    watched: Watched
    rows: Sequence[Row]
    remove: str


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    watcher, keys, patterns = request.hub.watcher, request.query.all("key"), request.query.all("pattern")
    watcher.want(keys, patterns, await masters(request.hub))
    found = [key for pattern in patterns for key in watcher.matching(pattern) if key not in keys]
    shown = [watcher.keys[key] for key in dict.fromkeys([*keys, *found]) if key in watcher.keys]
    return {
        "cards": [_card(each, keys, patterns) for each in shown],
        "keys": keys,
        "patterns": patterns,
        "events": watcher.events_of(patterns),
        "is_full": watcher.is_full,
        "limits": (KEYS_MAX, PATTERNS_MAX),
        "error": watcher.error,
        "without": {
            pattern: text.link("/watch", key=keys, pattern=[each for each in patterns if each != pattern])
            for pattern in patterns
        },
    }


def _card(watched: Watched, keys: list[bytes], patterns: list[bytes]) -> Card:
    rows = [
        Row(
            name,
            text.number(value) if isinstance(value, float) else text.rounded(value),
            repr(value) if isinstance(value, float) else text.shown(value, 200),
            charts.graph(list(watched.numbers.get(name, ())), slots=POINTS_MIN, from_zero=False),
            _moved(watched, name),
        )
        for name, value in watched.rows
    ]
    if watched.kind in ("set", "list"):
        series = list(watched.numbers.get(b"", ()))
        graph = charts.graph(series, slots=POINTS_MIN, from_zero=False)
        rows.insert(0, Row(b"elements", text.number(watched.length), "", graph, 0))
    rest = [key for key in keys if key != watched.key]
    remove = text.link("/watch", key=rest, pattern=patterns) if watched.key in keys else ""
    return Card(watched, rows, remove)


def _moved(watched: Watched, name: bytes) -> int:
    before = watched.ranks_before.get(name)
    return 0 if before is None else before - watched.ranks[name]


PAGE = Page("watch", "Watch", read, follows_changes=True, key="3")
