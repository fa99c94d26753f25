"""The jobs that clients can read, updated by the events of the appliers.

The events of a job arrive in the order in which its applier sends them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.slot_set import NONE
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore

logger = logging.getLogger("sparkis.server")

# A line of JSON from an applier (see `state_backend.apply.applier`).
ApplierEvent = Mapping[str, Any]


class JobCatalog(ABC):
    """The jobs in the processes that answer clients: in this process, or in its workers."""

    @abstractmethod
    def announce(self, job: str) -> None:
        """Add a job that a log has and that is not open yet: reads of its keys get LOADING."""

    @abstractmethod
    async def open(self, job: str, event: ApplierEvent) -> None:
        """Serve a job from a store, in all processes at once. SparkisError: no process serves the store.

        If the job was not served before, reads of its keys get that error.
        """

    @abstractmethod
    def remove(self, job: str) -> None:
        """Remove a job: its keys no longer exist."""

    @abstractmethod
    def hide(self, job: str) -> None:
        """Close a job's damaged store: reads of its keys get LOADING until another store is opened."""

    @abstractmethod
    def update(self, job: str, fields: ApplierEvent) -> None:
        """Update fields of a `Job`, such as `is_stale` and `error`."""


class ReportedCatalog(JobCatalog):
    """Another catalog, and reports of the stores that it serves, for a process that reads them as well.

    Args:
        report: Gets `{"event": "open", "job", "of"}` when a store is served, with the applier's event, and `{"event":
            "forget", "job"}` when a job's store must not be read any more.
    """

    def __init__(self, catalog: JobCatalog, report: Callable[[Mapping[str, Any]], None]) -> None:
        self._catalog, self._report = catalog, report

    def announce(self, job: str) -> None:
        self._catalog.announce(job)

    async def open(self, job: str, event: ApplierEvent) -> None:
        await self._catalog.open(job, event)
        self._report({"event": "open", "job": job, "of": event})

    def remove(self, job: str) -> None:
        self._report({"event": "forget", "job": job})
        self._catalog.remove(job)

    def hide(self, job: str) -> None:
        self._report({"event": "forget", "job": job})
        self._catalog.hide(job)

    def update(self, job: str, fields: ApplierEvent) -> None:
        self._catalog.update(job, fields)


class LocalJobCatalog(JobCatalog):
    """The jobs in the keyspace of this process. Runs on the event loop's thread."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._stores: dict[str, LmdbStore] = {}

    def announce(self, job: str) -> None:
        self._keyspace.refuse(job, None)

    async def open(self, job: str, event: ApplierEvent) -> None:
        try:
            self.serve(self.prepare(job, event))
        except Exception as error:
            self.refuse(job, str(error))
            raise

    def update(self, job: str, fields: ApplierEvent) -> None:
        if fields.get("error"):
            self.refuse(job, fields["error"])
        served = self._keyspace.jobs.get(job)
        if served is not None:
            updated = self._keyspace.jobs[job] = replace(served, **fields)
            if updated.fresh is not None and updated.is_stale:
                updated.fresh.clear()
            elif updated.fresh is not None:
                updated.fresh.settle(updated.store.applied.epoch)
            self._keyspace.on_epoch(job)

    def hide(self, job: str) -> None:
        served = self._keyspace.jobs.get(job)
        if served is not None:
            nothing = MemoryStore(served.generation)
            nothing.own(NONE)  # reads of keys in slots that the store does not own get LOADING
            self._keyspace.put(replace(served, store=nothing))
            self._stores.pop(job, None)

    def remove(self, job: str) -> None:
        self._keyspace.remove(job)
        self._stores.pop(job, None)

    def refuse(self, job: str, reason: str) -> None:
        """Reply with an error to reads of a job's keys, unless the job is served."""
        self._keyspace.refuse(job, reason)

    def prepare(self, job: str, event: ApplierEvent) -> Job:
        """Open a store and return its job, ready for `serve`.

        StoreError if the store cannot be opened, DescriptorError if the job's keys could be another job's.
        """
        states = [StateDescriptor.from_json(stored) for stored in event["states"]]
        path = Path(event["path"])
        store = self._stores.get(job)
        is_new = store is None or store.path != path
        if store is None or is_new:
            store = LmdbStore(path, event["generation"], is_reader=True, as_of_ms=event.get("as_of_ms"))
        served = self._keyspace.jobs.get(job)
        made = Job(
            job,
            event["generation"],
            states,
            store,
            is_incomplete=event["is_incomplete"],
            skipped_rows=event.get("skipped_rows", 0),
            renamed_from=event["renamed_from"],
            as_of_ms=event.get("as_of_ms"),
            log=event.get("log", ""),
            log_id=event.get("log_id", ""),
            fresh=None if is_new or served is None else served.fresh,
        )
        try:
            self._keyspace.check(made)
        except Exception:
            if is_new:
                store.close()
            raise
        return made

    def serve(self, job: Job) -> None:
        """Serve a prepared job. The previous store is dropped; LMDB closes it when its last snapshot is closed."""
        assert isinstance(job.store, LmdbStore)
        self._keyspace.put(job)
        self._stores[job.name] = job.store
        for removed_job in self._stores.keys() - self._keyspace.jobs.keys():
            del self._stores[removed_job]

    def drop(self, job: Job) -> None:
        """Close the store of a prepared job that will not be served."""
        if job.store is not self._stores.get(job.name):
            job.store.close()
