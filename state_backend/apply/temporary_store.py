"""A store that a command builds from a job's log, on this machine's disk, and removes at its end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from state_backend.apply.applier import Applier
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.log.time_travel import Moment, PastLog
from state_backend.model.clock import Clock, now_ms
from state_backend.model.errors import LogError
from state_backend.store.store import Snapshot


@contextmanager
def temporary_store(log: ChangeLog, job: str, clock: Clock = now_ms) -> Iterator[LmdbStore | None]:
    """Yield a store at the last epoch of a job; None if the job has no epoch. LogError if the store cannot be built.

    Args:
        clock: Decides which keys are removed because they have expired.
    """
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sparkis-") as folder:
        applier = Applier(
            log,
            job,
            folder,
            report=lambda event: errors.append(event["error"]) if event.get("error") else None,
            clock=clock,
        )
        try:
            applier.step()
            if errors:
                raise LogError(errors[-1])
            yield applier.store if applier.store is not None and applier.store.applied.epoch >= 0 else None
        finally:
            applier.close()


@contextmanager
def past_snapshot(log: ChangeLog, job: str, moment: Moment) -> Iterator[Snapshot]:
    """Yield a snapshot of a job at a past moment. LogError if the log does not have the moment any more."""
    with temporary_store(PastLog(log, {job: moment}), job, lambda: moment.clock_ms) as store:
        if store is None or store.applied.epoch != moment.epoch:
            raise LogError(f"job {job!r}: the log no longer has epoch {moment.epoch}; read a newer one")
        with store.snapshot(moment.clock_ms) as snapshot:
            yield snapshot
