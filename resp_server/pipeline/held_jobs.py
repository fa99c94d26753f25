"""Jobs whose log cannot be read here: such a job may be read at an earlier epoch, which all of its servers have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from resp_server.session.epochs import JobEpoch, epochs_text
from state_backend.model.clock import Clock
from state_backend.store.keyspace import Job, Keyspace, KeyspaceView, SnapshotAt
from state_backend.store.pinned_epochs import PinnedEpochs
from state_backend.store.store import Snapshot


class _HeldEpoch(NamedTuple):
    """An epoch at which a job is read for a while. The snapshot keeps it readable."""

    generation: str
    snapshot_at: SnapshotAt
    snapshot: Snapshot


class HeldJobs:
    """The jobs of one process whose log cannot be read, and those of them that are read at an earlier epoch."""

    def __init__(
        self, keyspace: Keyspace, pinned_epochs: PinnedEpochs, clock: Clock, view: Callable[[], KeyspaceView]
    ) -> None:
        self._keyspace = keyspace
        self._pinned_epochs = pinned_epochs
        self._clock = clock
        self._view = view
        self._stalled: set[str] = set()  # their log cannot be read here, so they get no newer epoch
        self._held: dict[str, _HeldEpoch] = {}

    def note(self, job: str) -> bool:
        """Note whether the log of a job can be read; return whether that is new.

        If it can be read again, the job is read at its newest epoch again.
        """
        served = self._keyspace.jobs.get(job)
        is_stalled = served is not None and bool(served.error)
        if is_stalled == (job in self._stalled):
            return False
        if is_stalled:
            self._stalled.add(job)
        else:
            self._stalled.remove(job)
            self.release(job)
        return True

    def hold(self, job: str, term_epoch: JobEpoch) -> bool:
        """Read a job at an earlier epoch for as long as its log cannot be read; return False if it is not pinned."""
        snapshot_at = self._pinned_epochs.snapshots_of(job, term_epoch)
        if job not in self._stalled or snapshot_at is None:
            return False
        self.release(job)
        self._held[job] = _HeldEpoch(self._keyspace.jobs[job].generation, snapshot_at, snapshot_at(self._clock()))
        self._view().hold(job, snapshot_at)
        return True

    def release(self, job: str) -> None:
        """Read a job at its newest epoch again, if it is held at an earlier one."""
        if job in self._held:
            self._view().release(job)
            self._held.pop(job).snapshot.close()

    def hold_in(self, view: KeyspaceView, jobs: Mapping[str, Job]) -> None:
        """Let a new view of these jobs read them at the epochs at which they are held."""
        for job in self._held.keys() & jobs.keys():
            if self._held[job].generation == jobs[job].generation:
                view.hold(job, self._held[job].snapshot_at)

    def stalled_epochs(self) -> dict[str, bytes]:
        """Return the epochs at which each job can be read whose log cannot be, as arguments of STATE FOLLOW's push."""
        if not self._stalled:
            return {}
        newest = self._view().term_epochs()
        found = {job: self._pinned_epochs.epochs_of(job) for job in self._stalled & newest.keys()}
        read = {job: [] if reached is None else [reached] for job, reached in newest.items()}
        return {job: epochs_text(pinned or read[job]) for job, pinned in found.items()}
