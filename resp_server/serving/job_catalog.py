"""What appliers tell, and the jobs that a process shows because of it.

Events of one job come in the order in which its applier sends them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.key_groups import NONE
from state_backend.store.keyspace import Job, Keyspace
from state_backend.store.memory_store import MemoryStore

logger = logging.getLogger("sparkis.server")

# What an applier sends: a line of JSON (see `state_backend.apply.applier`).
Event = Mapping[str, Any]


class JobCatalog(ABC):
    """Whoever answers clients from stores: this process, or worker processes."""

    @abstractmethod
    def found(self, job: str) -> None:
        """Have reads of a job's keys told to come again: a log has it, and it is not opened yet."""

    @abstractmethod
    async def open(self, job: str, event: Event) -> None:
        """Show a store from now on, everywhere at once; raises SparkisError, and then it is shown nowhere.

        If the job was not shown before, its keys are answered with that error.
        """

    @abstractmethod
    def forget(self, job: str) -> None:
        """Show nothing of a job any more: its keys do not exist."""

    @abstractmethod
    def hide(self, job: str) -> None:
        """Close a job's store, which is damaged: reads of its keys are told to come again until another is shown."""

    @abstractmethod
    def tell(self, job: str, known: Event) -> None:
        """Write down what is known of a job: fields of `Job`, such as `is_stale` and `error`."""


class LocalJobCatalog(JobCatalog):
    """The jobs in the keyspace of this process. Runs on the event loop's thread."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._stores: dict[str, LmdbStore] = {}

    def found(self, job: str) -> None:
        self._keyspace.refuse(job, None)

    async def open(self, job: str, event: Event) -> None:
        try:
            self.show(self.prepare(job, event))
        except Exception as error:
            self.refuse(job, str(error))
            raise

    def tell(self, job: str, known: Event) -> None:
        if known.get("error"):
            self.refuse(job, known["error"])
        shown = self._keyspace.jobs.get(job)
        if shown is not None:
            self._keyspace.jobs[job] = replace(shown, **known)
            self._keyspace.on_epoch()

    def hide(self, job: str) -> None:
        shown = self._keyspace.jobs.get(job)
        if shown is not None:
            nothing = MemoryStore(shown.generation)
            nothing.own(NONE)  # a key in a slot that its store does not own is answered with LOADING
            self._keyspace.put(replace(shown, store=nothing))
            self._stores.pop(job, None)

    def forget(self, job: str) -> None:
        self._keyspace.remove(job)
        self._stores.pop(job, None)

    def refuse(self, job: str, reason: str) -> None:
        """Answer a job's keys with an error, unless it is shown."""
        self._keyspace.refuse(job, reason)

    def prepare(self, job: str, event: Event) -> Job:
        """Open a store and return the job as it is to be shown.

        StoreError if the store cannot be opened, DescriptorError if its keys could be another job's.
        """
        states = [StateDescriptor.from_json(stored) for stored in event["states"]]
        path = Path(event["path"])
        store = self._stores.get(job)
        is_new = store is None or store.path != path
        if store is None or is_new:
            store = LmdbStore(path, event["generation"], is_reader=True)
        made = Job(
            job,
            event["generation"],
            states,
            store,
            is_incomplete=event["is_incomplete"],
            renamed_from=event["renamed_from"],
        )
        try:
            self._keyspace.check(made)
        except Exception:
            if is_new:
                store.close()
            raise
        return made

    def show(self, job: Job) -> None:
        """Show what was prepared. The store before is dropped: LMDB closes it when the last snapshot of it is gone."""
        assert isinstance(job.store, LmdbStore)
        self._keyspace.put(job)
        self._stores[job.name] = job.store
        for gone in self._stores.keys() - self._keyspace.jobs.keys():
            del self._stores[gone]

    def drop(self, job: Job) -> None:
        """Let go of what was prepared and is not to be shown."""
        if job.store is not self._stores.get(job.name):
            job.store.close()
