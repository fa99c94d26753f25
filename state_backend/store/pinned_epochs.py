"""Pinned epochs: they stay readable for a moment after there are newer ones.

So several servers, each with its own slots of a job, can reply at one epoch that all of them have. LMDB does not reuse
the pages of a pinned epoch. So only a few epochs are pinned, and only while clients use them.

An epoch is released when another one comes long enough after its successor. No time alone releases it: while the log
cannot be read no epoch comes, and the servers that stopped at different epochs keep one that all of them have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from state_backend.store.store import Snapshot

if TYPE_CHECKING:
    from state_backend.store.keyspace import Job, Keyspace, SnapshotAt

# The number of pinned epochs of each job, including the newest; and for how long after its successor an epoch stays
# pinned, if newer ones come.
EPOCHS_MAX = 8
PINNED_MS_MAX = 2_000
# Without a request for so long, all epochs are released.
IDLE_MS_MAX = 10_000

# A job's term and epoch.
TermEpoch = tuple[int, int]


class _PinnedEpoch:
    """One epoch of a job, and how many snapshots of it are open."""

    def __init__(self, job: Job, snapshot: Snapshot) -> None:
        self.generation = job.generation
        self.store = job.store
        self.snapshot = snapshot
        self.term_epoch = snapshot.applied.term, snapshot.applied.epoch
        self.since_ms = 0
        self._readers = 0
        self._is_released = False

    def at_time(self, clock_ms: int) -> Snapshot:
        """Return a snapshot of the epoch. The caller closes it like any other."""
        self._readers += 1
        return self.snapshot.at_time(clock_ms, self._on_close)

    def release(self) -> None:
        """Close the epoch's snapshot as soon as no such snapshot is open."""
        self._is_released = True
        self._close_if_unused()

    def _on_close(self) -> None:
        self._readers -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_released and not self._readers:
            self.snapshot.close()


class PinnedEpochs:
    """The epochs of a keyspace's jobs that are pinned in this process. Call `update` at every new epoch."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._pinned: dict[str, deque[_PinnedEpoch]] = {}  # the newest last
        self._until_ms = 0
        self._version = -1  # the keyspace's, when the jobs were last compared

    def snapshots_at(
        self, requested: Mapping[str, TermEpoch], clock_ms: int, now_ms: int
    ) -> dict[str, Snapshot] | None:
        """Return snapshots of all jobs at the requested epochs; None if one of them is not pinned.

        Args:
            requested: An epoch of each job of the keyspace, and of no other job. The call also begins, or prolongs,
                pinning.
        """
        self._until_ms = now_ms + IDLE_MS_MAX
        self._update_all(now_ms)
        if requested.keys() != self._pinned.keys():
            return None
        found = {job: self._find(job, term_epoch) for job, term_epoch in requested.items()}
        if None in found.values():
            return None
        return {job: pinned.at_time(clock_ms) for job, pinned in found.items() if pinned is not None}

    def epochs(self) -> dict[str, list[TermEpoch]]:
        """Return the pinned epochs of each job, the newest last."""
        return {job: self.epochs_of(job) for job in self._pinned}

    def epochs_of(self, job: str) -> list[TermEpoch]:
        """Return the pinned epochs of a job, the newest last."""
        return [each.term_epoch for each in self._pinned.get(job, ())]

    def snapshots_of(self, job: str, term_epoch: TermEpoch) -> SnapshotAt | None:
        """Return what makes snapshots of an epoch, as long as it is pinned or one of them is open; None: it is not."""
        found = self._find(job, term_epoch)
        return None if found is None else found.at_time

    def keep(self, now_ms: int) -> None:
        """Begin to pin epochs, with the newest ones, or go on for a while."""
        is_begun = now_ms < self._until_ms
        self._until_ms = now_ms + IDLE_MS_MAX
        if not is_begun:
            self._update_all(now_ms)

    def release_unused(self, now_ms: int) -> None:
        """Release all epochs if nobody has asked for them for a while."""
        if now_ms >= self._until_ms:
            self.close()

    def _update_all(self, now_ms: int) -> None:
        self._forget_removed()
        for job in self._keyspace.jobs:
            self.update(job, now_ms)

    def update(self, name: str, now_ms: int) -> None:
        """Pin the newest epoch of a job, and release those that were pinned for long enough."""
        if now_ms >= self._until_ms:
            self.close()
            return
        self._forget_removed()
        job = self._keyspace.jobs.get(name)
        if job is None:
            return
        pinned = self._pinned.setdefault(name, deque())
        if pinned and pinned[-1].generation != job.generation:
            self._release_all(pinned)
        self._pin_newest(pinned, job, now_ms)
        while len(pinned) > EPOCHS_MAX or _is_too_old(pinned):
            pinned.popleft().release()

    def _forget_removed(self) -> None:
        """Release the epochs of jobs that are no longer served."""
        if self._version != self._keyspace.version:
            self._version = self._keyspace.version
            for gone in self._pinned.keys() - self._keyspace.jobs.keys():
                self._release_all(self._pinned.pop(gone))

    def close(self) -> None:
        """Release all epochs."""
        for pinned in self._pinned.values():
            self._release_all(pinned)
        self._pinned.clear()

    @staticmethod
    def _release_all(pinned: deque[_PinnedEpoch]) -> None:
        while pinned:
            pinned.pop().release()

    @staticmethod
    def _pin_newest(pinned: deque[_PinnedEpoch], job: Job, now_ms: int) -> None:
        newest = _PinnedEpoch(job, job.store.snapshot(now_ms))
        last = pinned[-1] if pinned else newest
        if last.store is newest.store and last.snapshot.version == newest.snapshot.version and last is not newest:
            newest.release()
            return
        newest.since_ms = now_ms
        if last is not newest and last.term_epoch == newest.term_epoch:
            pinned.pop().release()  # the same epoch in a newer version: keys expired, slots moved, or a copied store
            newest.since_ms = last.since_ms
        pinned.append(newest)

    def _find(self, job: str, term_epoch: TermEpoch) -> _PinnedEpoch | None:
        return next((each for each in self._pinned.get(job, ()) if each.term_epoch == term_epoch), None)


def _is_too_old(pinned: deque[_PinnedEpoch]) -> bool:
    """Return whether the newest epoch came long after the successor of the oldest one."""
    return len(pinned) > 1 and pinned[-1].since_ms - pinned[1].since_ms > PINNED_MS_MAX
