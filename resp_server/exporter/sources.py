"""Where the values of a scrape come from: a server, or its workers. Runs on the event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from resp_server.commands.info import stats_of_process
from resp_server.commands.job_query import jobs_query
from resp_server.exporter.samples import add_clients, add_process, add_server
from resp_server.exporter.scrape import Scrape
from resp_server.metrics.process_stats import ProcessStats
from resp_server.serving.server import Server
from resp_server.workers.master import Workers


class Readiness(NamedTuple):
    """The facts that decide whether a server is ready.

    Args:
        is_loading: Clients may not come yet.
        lags_ms: Of each job, how much older the epoch that clients read is than the committed one; None: they read none
            yet.
    """

    is_loading: bool
    lags_ms: Mapping[str, int | None]


class Source(ABC):
    """A program with metrics and health."""

    @abstractmethod
    async def scrape(self) -> Scrape:
        """Return all values."""

    @abstractmethod
    async def readiness(self) -> Readiness:
        """Return what readiness depends on."""


class ServerSource(Source):
    """A server of one process.

    Args:
        loading: Counts slots that it has to load.
    """

    def __init__(self, server: Server, loading: Callable[[], int] | None = None) -> None:
        self._context = server.context
        self._loading = loading

    async def scrape(self) -> Scrape:
        scrape, context = Scrape(), self._context
        total = stats_of_process(context)
        answer = jobs_query.respond(context, None)
        add_process(scrape, total, context.process.started_ms)
        add_clients(scrape, total, context.config.maxclients)
        add_server(scrape, answer)
        if self._loading is not None:
            scrape.add("slots_loading", self._loading())
            scrape.add("topology_version", answer["topology_version"])
        return scrape

    async def readiness(self) -> Readiness:
        return _readiness_of(jobs_query.respond(self._context, None))


class WorkersSource(Source):
    """A server with workers: the sum of all processes. All workers have the same jobs, so one of them reports these."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def scrape(self) -> Scrape:
        scrape, workers = Scrape(), self._workers
        rows = await workers.query("process stats")
        total = ProcessStats.total(map(ProcessStats.from_json, rows))
        add_process(scrape, total, workers.started_ms)
        add_clients(scrape, total, workers.clients_max)
        for answer in (await workers.query("jobs", workers_max=1))[:1]:
            add_server(scrape, answer)
        return scrape

    async def readiness(self) -> Readiness:
        found = await self._workers.query("jobs", workers_max=1)
        return _readiness_of(found[0]) if found else Readiness(is_loading=True, lags_ms={})


def _readiness_of(answer: Mapping[str, Any]) -> Readiness:
    return Readiness(is_loading=answer["is_loading"], lags_ms={job["name"]: job["lag_ms"] for job in answer["jobs"]})
