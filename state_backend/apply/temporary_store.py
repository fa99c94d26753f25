"""A store that a command builds from a job's log, on this machine's disk, and removes at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from state_backend.apply.applier import Applier
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.model.errors import LogError


@contextmanager
def temporary_store(log: ChangeLog, job: str) -> Iterator[LmdbStore | None]:
    """Yield a store at the last epoch of a job; None if the job has no epoch. LogError if the store cannot be built."""
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sparkis-") as folder:
        applier = Applier(
            log, job, folder, report=lambda event: errors.append(event["error"]) if event.get("error") else None
        )
        try:
            applier.step()
            if errors:
                raise LogError(errors[-1])
            yield applier.store if applier.store is not None and applier.store.applied.epoch >= 0 else None
        finally:
            applier.close()
