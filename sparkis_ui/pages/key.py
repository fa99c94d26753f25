"""One key: its value, a page at a time, its time to live, where it is, and how to read it from programs."""

from __future__ import annotations

from typing import Any

from sparkis_ui import text
from sparkis_ui.client import RequestError
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.values import TEXT_BYTES, read_value

JSON_DEPTH_MAX = 30
JSON_ITEMS_MAX = 200  # of one object or array


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    query = request.query
    key, at, pattern = query.raw("key"), query.text("at"), query.raw("filter")
    value, error = None, ""
    try:
        name = ("value", key, at, pattern)
        value = await request.hub.once(name, lambda: read_value(request.hub.client, key, at, pattern))
    except RequestError as refusal:
        error = str(refusal)
    rows = value.rows if value else []
    scores = [abs(row[2]) for row in rows] if value and value.kind == "zset" else []
    return {
        "key": key,
        "value": value,
        "error": error,
        "at": at,
        "filter": pattern,
        "top": max(scores, default=1.0) or 1.0,
        "json_limits": (JSON_DEPTH_MAX, JSON_ITEMS_MAX),
        "text_bytes": TEXT_BYTES,
        "code": text.code_of(value.kind, key, request.hub.endpoint.url) if value else {},
    }


PAGE = Page("key", "Key", read)
