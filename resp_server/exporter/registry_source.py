"""Where the values of a registry's scrape come from."""

from __future__ import annotations

from resp_server.exporter.samples import add_process
from resp_server.exporter.scrape import Scrape
from resp_server.exporter.sources import Readiness, Source
from resp_server.metrics.process_stats import ProcessStats
from resp_server.metrics.stats import Stats
from resp_server.registry.service import Registry
from state_backend.model.clock import now_ms
from state_backend.model.slots import SLOTS


class RegistrySource(Source):
    """A registry. `registry` is None while this one is a standby. A standby is ready: standing by is its task."""

    def __init__(self) -> None:
        self.registry: Registry | None = None
        self._started_ms = now_ms()

    async def scrape(self) -> Scrape:
        scrape = Scrape()
        add_process(scrape, ProcessStats.of_this_process(Stats()), self._started_ms)
        scrape.add("registry_leader", self.registry is not None)
        if self.registry is None:
            return scrape
        status = self.registry.status()
        scrape.add("registry_term", status.term)
        scrape.add("topology_version", status.topology_version)
        scrape.add("registry_slots_unowned", SLOTS - sum(status.slots.values()))
        scrape.add("registry_slots_moving", status.moving_slots)
        scrape.add("registry_moved_slots_total", status.moved_slots)
        scrape.add("registry_failovers_total", status.failovers)
        for condition, count in status.servers.items():
            scrape.add("registry_servers", count, condition=condition)
        for server, slots in status.slots.items():
            scrape.add("registry_server_slots", slots, server=server)
        return scrape

    async def readiness(self) -> Readiness:
        return Readiness(is_loading=False, lags_ms={})
