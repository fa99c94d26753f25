"""Shadow: how the states compare with the upstream, and who owns which keys, at a proxy with an upstream."""

from __future__ import annotations

from typing import Any

from sparkis_ui.view import Page, View

COUNTS = ("compared", "equal", "different", "missing_in_upstream", "missing_in_state", "skipped", "failed")


async def read(view: View) -> dict[str, Any]:
    """Return what the page shows."""
    facts = view.hub.facts
    return {
        "rules": facts.shadow,
        "owners": facts.owners,
        "counts": COUNTS,
        "error": facts.errors.get("shadow", ""),
        "has_upstream": facts.has_upstream,
    }


PAGE = Page("shadow", "Shadow", read, ("shadow",), key="6")
