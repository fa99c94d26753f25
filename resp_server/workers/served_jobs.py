"""The served jobs as a master knows them, to bring a new worker up to date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from resp_server.serving.job_catalog import ApplierEvent
from resp_server.workers.channel import Line
from state_backend.lmdb.store import SUSPECT


class ServedJobs:
    """The open stores of jobs, the reasons of those that are not served, and the fields of all."""

    def __init__(self) -> None:
        # The reason why no worker serves a job; None: it is not open yet.
        self._unavailable: dict[str, str | None] = {}
        self._open: dict[str, ApplierEvent] = {}
        self._fields: dict[str, dict[str, Any]] = {}

    @property
    def open_events(self) -> Mapping[str, ApplierEvent]:
        """The appliers' events that opened the jobs' stores."""
        return self._open

    def announced(self, job: str) -> None:
        """Record a job that is not open yet."""
        self._unavailable[job] = None

    def opened(self, job: str, event: ApplierEvent) -> None:
        """Record that all workers have opened a job's store."""
        self._open[job] = event
        self._unavailable.pop(job, None)

    def refused(self, job: str, reason: str) -> None:
        """Record why a job cannot be opened; an open store stays."""
        if job not in self._open:
            self._unavailable[job] = reason

    def hidden(self, job: str) -> None:
        """Record that a job's store was closed, because it is damaged."""
        if self._open.pop(job, None) is not None:
            self._unavailable[job] = None

    def removed(self, job: str) -> None:
        """Forget a job."""
        for jobs in (self._unavailable, self._open, self._fields):
            jobs.pop(job, None)

    def updated(self, job: str, fields: ApplierEvent) -> None:
        """Record changed fields of a job."""
        if fields.get("error"):
            self.refused(job, fields["error"])
        self._fields.setdefault(job, {}).update(fields)

    def lines(self) -> Iterator[Line]:
        """Iterate over the lines that tell a new worker of all jobs, after it has opened the stores."""
        for job, reason in self._unavailable.items():
            yield {"event": "found", "job": job, "reason": reason}
        for job, fields in self._fields.items():
            yield {"event": "update", "job": job, "fields": fields}

    def suspect_stores(self) -> None:
        """Have all stores verified: a signal ended a worker, and a damaged file causes such signals (SIGBUS)."""
        for event in self._open.values():
            with suppress(OSError):
                (Path(event["path"]) / SUSPECT).touch()
