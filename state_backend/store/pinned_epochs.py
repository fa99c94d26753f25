"""Pinned epochs: they stay readable for a moment after there are newer ones.

So several servers, each with its own slots of a job, can reply at one epoch that all of them have. LMDB does not reuse
the pages of a pinned epoch. So only a few epochs are pinned, for a short time, and only while clients use them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from state_backend.store.store import Snapshot

if TYPE_CHECKING:
    from state_backend.store.keyspace import Job, Keyspace

# The number of pinned epochs of each job, including the newest; and how long an epoch stays pinned after the next one.
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
        self.superseded_ms: int | None = None
        self._readers = 0
        self._is_released = False

    def lend(self, clock_ms: int) -> Snapshot:
        """Return a snapshot of the epoch. The caller closes it like any other."""
        self._readers += 1
        return self.snapshot.lend(clock_ms, self._on_close)

    def release(self) -> None:
        """Close the epoch's snapshot as soon as no lent snapshot is open."""
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

    def snapshots_at(
        self, requested: Mapping[str, TermEpoch], clock_ms: int, now_ms: int
    ) -> dict[str, Snapshot] | None:
        """Return snapshots of all jobs at the requested epochs; None if one of them is not pinned.

        requested: an epoch of each job of the keyspace, and of no other job. The call also begins, or prolongs,
        pinning.
        """
        self._until_ms = now_ms + IDLE_MS_MAX
        self.update(now_ms)
        if requested.keys() != self._pinned.keys():
            return None
        found = {job: self._find(job, term_epoch) for job, term_epoch in requested.items()}
        if None in found.values():
            return None
        return {job: pinned.lend(clock_ms) for job, pinned in found.items() if pinned is not None}

    def epochs(self) -> dict[str, list[TermEpoch]]:
        """Return the pinned epochs of each job, the newest last."""
        return {job: [each.term_epoch for each in pinned] for job, pinned in self._pinned.items()}

    def update(self, now_ms: int) -> None:
        """Pin the newest epochs, and release those that were pinned for long enough."""
        if now_ms >= self._until_ms:
            self.close()
            return
        jobs = self._keyspace.jobs
        for name in self._pinned.keys() - jobs.keys():
            self._release_all(self._pinned.pop(name))
        for name, job in jobs.items():
            pinned = self._pinned.setdefault(name, deque())
            if pinned and pinned[-1].generation != job.generation:
                self._release_all(pinned)
            self._pin_newest(pinned, job, now_ms)
            while len(pinned) > EPOCHS_MAX or _is_too_old(pinned[0], now_ms):
                pinned.popleft().release()

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
        if last is not newest and last.term_epoch == newest.term_epoch:
            pinned.pop().release()  # the same epoch in a newer version: keys expired, slots moved, or a copied store
        last.superseded_ms = now_ms if last.term_epoch != newest.term_epoch else None
        pinned.append(newest)

    def _find(self, job: str, term_epoch: TermEpoch) -> _PinnedEpoch | None:
        return next((each for each in self._pinned[job] if each.term_epoch == term_epoch), None)


def _is_too_old(pinned: _PinnedEpoch, now_ms: int) -> bool:
    return pinned.superseded_ms is not None and now_ms - pinned.superseded_ms > PINNED_MS_MAX
