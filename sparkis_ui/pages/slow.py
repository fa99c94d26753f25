"""Slow & clients: the slowest requests, latency events, the costliest commands, users and connections."""

from __future__ import annotations

from typing import Any

from sparkis_ui import charts, text
from sparkis_ui.facts import CLIENTS_SHOWN_MAX, integer
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.polling import CLIENTS_LISTED_MAX, POINTS_MIN

COMMANDS_SHOWN_MAX = 20


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    facts, user = request.hub.facts, request.query.text("user")
    listed = [client for client in facts.clients if not user or client.get("user") == user]
    graph = charts.graph(request.hub.series.of("requests"), slots=POINTS_MIN)
    return {
        "slow": facts.slow,
        "events": facts.events,
        "commands": facts.commands[:COMMANDS_SHOWN_MAX],
        "users": facts.users,
        "user": user,
        "clients": listed[:CLIENTS_SHOWN_MAX],
        "client_count": len(listed),
        "connected": integer(facts.info.get("connected_clients")) or 0,
        "listed_max": CLIENTS_LISTED_MAX,
        "refusal": facts.errors.get("clients", ""),
        "requests": graph,
        "requests_now": text.short(graph.last),
    }


PAGE = Page("slow", "Slow & clients", read, ("clients",), key="5")
