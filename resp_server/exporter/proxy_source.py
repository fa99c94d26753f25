"""Where the values of a proxy's scrape come from: the proxy itself, and its servers' STATE JOBS. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from resp_server.backends.servers.job_merge import merged_jobs, rows_in
from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.backends.servers.state_clusters import JOBS, StateClusters
from resp_server.commands.fact_merges import Row
from resp_server.commands.info import stats_of_process
from resp_server.exporter.samples import add_clients, add_jobs, add_process, add_state_cluster, add_upstream
from resp_server.exporter.scrape import Scrape
from resp_server.exporter.sources import Readiness, Source
from resp_server.raw_replies.answers import await_in_task
from resp_server.raw_replies.raw_reply import as_bytes, is_error
from resp_server.serving.server import Server
from state_backend.model.slots import SLOTS

# A server that does not list its jobs in this time is left out of a scrape.
LISTING_S_MAX = 2.0


class ProxySource(Source):
    """A proxy.

    Args:
        upstream_fields: INFO's fields about its upstream; None: it has none.
    """

    def __init__(
        self, server: Server, clusters: StateClusters, upstream_fields: Callable[[], Mapping[str, object]] | None
    ) -> None:
        self._context = server.context
        self._clusters = clusters
        self._upstream_fields = upstream_fields

    async def scrape(self) -> Scrape:
        scrape, context = Scrape(), self._context
        total = stats_of_process(context)
        add_process(scrape, total, context.process.started_ms)
        add_clients(scrape, total, context.config.maxclients)
        add_jobs(scrape, await self._listed_jobs())
        for cluster in self._clusters:
            add_state_cluster(scrape, cluster.info_fields(), SLOTS - sum(cluster.slots.counts.values()))
        if self._upstream_fields is not None:
            add_upstream(scrape, self._upstream_fields())
        return scrape

    async def readiness(self) -> Readiness:
        is_known = all(cluster.slots.is_complete for cluster in self._clusters)
        if self._upstream_fields is not None:  # the upstream's keys are answered without states, too
            is_known = bool(self._upstream_fields()["ownership_known"])
        lags_ms = {job["name"]: job["lag_ms"] for job in await self._listed_jobs()}
        return Readiness(is_loading=not is_known, lags_ms=lags_ms)

    async def _listed_jobs(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of STATE JOBS, one for each job, of all servers that answer for slots, and in time."""
        listed = [
            _list_jobs(cluster, address)
            for cluster in self._clusters
            for address in sorted({cluster.active_server(master) for master in cluster.slots.counts})
        ]
        return merged_jobs([jobs for jobs in await asyncio.gather(*listed) if jobs is not None])


async def _list_jobs(cluster: StateCluster, address: str) -> Sequence[Row] | None:
    """Return the rows of a server's STATE JOBS; None for a server that does not list its jobs in time."""
    with suppress(Exception):
        async with asyncio.timeout(LISTING_S_MAX):
            reply = as_bytes((await await_in_task(cluster.ask(address, JOBS, is_long=True))).reply)
            return None if is_error(reply) else rows_in(reply)
    return None
