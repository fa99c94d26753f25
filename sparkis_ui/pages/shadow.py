"""Shadow: how the states compare with the upstream, and who owns which keys, at a proxy with an upstream."""

from __future__ import annotations

from typing import Any

from sparkis_ui.page import Page, PageRequest

COUNTS = ("compared", "equal", "different", "missing_in_upstream", "missing_in_state", "skipped", "failed")


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    facts = request.hub.facts
    return {
        "rules": facts.shadow,
        "owners": facts.owners,
        "counts": COUNTS,
        "error": facts.errors.get("shadow", ""),
        "has_upstream": facts.has_upstream,
    }


PAGE = Page("shadow", "Shadow", read, ("shadow",), key="6")
