"""Cluster: the servers, the 16,384 slots and their moves, and the paths of a row and of a request with live numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparkis_ui import charts, text
from sparkis_ui.facts import Node, integer
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.polling import Hub

COLOURS = 8


class Server(NamedTuple):
    """A server's line.

    Args:
        number: Its colour.
        master: The address of a replica's master.
    """

    node: Node
    number: int
    master: str
    squares: str
    keys: int
    lag_ms: int
    lag_epochs: int
    reads: str
    clients: str
    memory: str
    error: str


async def masters(hub: Hub) -> list[Node]:
    """Return the masters of the cluster of which the endpoint is a node; none for any other endpoint."""
    if hub.facts.info.get("cluster_enabled") != "1" or hub.facts.has_upstream:
        return []
    await hub.poll(("cluster",))
    cluster = hub.facts.cluster
    return [node for node in cluster.nodes if not node.replica_of and node.slots] if not cluster.through else []


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    hub, facts = request.hub, request.hub.facts
    cluster = facts.cluster
    servers = _servers(hub)
    jobs = facts.jobs
    owned = sum(server.node.slot_count for server in servers)
    zones: dict[str, list[Server]] = {}
    for server in servers:
        zones.setdefault(server.node.zone, []).append(server)
    moved = [(first, last) for at_s, first, last, _, _ in hub.moves if facts.at_s - at_s < 30]
    return {
        "servers": servers,
        "zones": zones,
        "through": cluster.through,
        "owned": owned,
        "moves": [(text.clock(at_s), *move) for at_s, *move in hub.moves],
        "moved": charts.slot_squares(moved),
        "columns": charts.GRID_COLUMNS,
        "lines": charts.SLOTS // charts.GRID_COLUMNS,
        "error": facts.errors.get("cluster", ""),
        "changes": text.short(sum(job.changes_per_minute or 0 for job in jobs if not job.is_stale)),
        "epochs": text.short(sum(job.epochs_per_minute or 0 for job in jobs if not job.is_stale)),
        "running": sum(not job.is_stale for job in jobs),
        "lag_ms": max((job.lag_ms or 0 for job in jobs), default=0),
        "age_ms": max((job.age_ms or 0 for job in jobs if not job.is_stale), default=None),
        "keys": sum(job.keys for job in jobs),
        "store_bytes": sum(job.store_bytes or 0 for job in jobs),
        "requests": text.short(_last(hub, "requests")),
        "reads": text.short(_last(hub, "reads")),
        "out": text.size(_last(hub, "out")),
        "clients": text.short(_last(hub, "clients")),
        "is_proxy": bool(cluster.through) or facts.has_upstream,
    }


def _last(hub: Hub, name: str) -> float | None:
    return next(iter(hub.series.of(name)[-1:]), None)


def _servers(hub: Hub) -> list[Server]:
    cluster = hub.facts.cluster
    by_id = {node.id: node.address for node in cluster.nodes}
    by_id |= {address: address for address in by_id.values()}
    found = []
    for number, node in enumerate(cluster.nodes):
        info, jobs = cluster.info.get(node.address, {}), cluster.jobs.get(node.address, [])
        found.append(
            Server(
                node,
                number % COLOURS,
                by_id.get(node.replica_of, node.replica_of),
                charts.slot_squares(node.slots),
                sum(job.keys for job in jobs),
                max((job.lag_ms or 0 for job in jobs), default=0),
                max((job.lag_epochs for job in jobs), default=0),
                text.short(integer(info.get("instantaneous_ops_per_sec"))),
                text.short(integer(info.get("connected_clients"))),
                text.size(integer(info.get("used_memory"))),
                cluster.errors.get(node.address, ""),
            )
        )
    return found


PAGE = Page("cluster", "Cluster", read, ("cluster",), key="4")
