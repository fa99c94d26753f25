"""Epochs that stay readable for a moment after there are newer ones.

So that several servers, each with its own part of a job, can answer at an epoch that all of them have. To hold an epoch
keeps the pages of it that newer ones replaced from being used again: so only a few are held, not for long, and only
while somebody asks for any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from state_backend.store.store import Snapshot

if TYPE_CHECKING:
    from state_backend.store.keyspace import Job, Keyspace

# Of each job, the newest one included; an older one for so long at most after the next one was seen.
EPOCHS_MAX = 8
HELD_MS_MAX = 2_000
# Nothing is held once nobody has asked for so long.
WANTED_MS = 10_000

# A job's term and epoch.
Reached = tuple[int, int]


class _Held:
    """One epoch of a job, and how many read it now."""

    def __init__(self, job: Job, snapshot: Snapshot) -> None:
        self.generation = job.generation
        self.store = job.store
        self.snapshot = snapshot
        self.reached = snapshot.applied.term, snapshot.applied.epoch
        self.superseded_ms: int | None = None
        self._readers = 0
        self._is_let_go = False

    def lend(self, clock_ms: int) -> Snapshot:
        """Return a view of it, to be closed like any other."""
        self._readers += 1
        return self.snapshot.lend(clock_ms, self._released)

    def let_go(self) -> None:
        """Close it once nobody reads it."""
        self._is_let_go = True
        self._close_if_free()

    def _released(self) -> None:
        self._readers -= 1
        self._close_if_free()

    def _close_if_free(self) -> None:
        if self._is_let_go and not self._readers:
            self.snapshot.close()


class PinnedEpochs:
    """The epochs of a keyspace that are held in this process. `look` has to be called at every new one."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._held: dict[str, deque[_Held]] = {}  # the newest last
        self._until_ms = 0

    def take(self, wanted: Mapping[str, Reached], clock_ms: int, now_ms: int) -> dict[str, Snapshot] | None:
        """Return views of all jobs at the epochs wanted, and have such be held from now on; None if one is not there.

        There has to be one of each job that is shown, and none besides.
        """
        self._until_ms = now_ms + WANTED_MS
        self.look(now_ms)
        if wanted.keys() != self._held.keys():
            return None
        found = {job: self._find(job, reached) for job, reached in wanted.items()}
        if None in found.values():
            return None
        return {job: held.lend(clock_ms) for job, held in found.items() if held is not None}

    def held(self) -> dict[str, list[Reached]]:
        """Return which epochs of each job can be taken, the newest last."""
        return {job: [each.reached for each in held] for job, held in self._held.items()}

    def look(self, now_ms: int) -> None:
        """Hold the newest epochs as well, and let go of what is held for long enough."""
        if now_ms >= self._until_ms:
            self.close()
            return
        jobs = self._keyspace.jobs
        for name in self._held.keys() - jobs.keys():
            self._let_go(self._held.pop(name))
        for name, job in jobs.items():
            held = self._held.setdefault(name, deque())
            if held and held[-1].generation != job.generation:
                self._let_go(held)
            self._hold_newest(held, job, now_ms)
            while len(held) > EPOCHS_MAX or _is_over(held[0], now_ms):
                held.popleft().let_go()

    def close(self) -> None:
        """Let go of everything."""
        for held in self._held.values():
            self._let_go(held)
        self._held.clear()

    @staticmethod
    def _let_go(held: deque[_Held]) -> None:
        while held:
            held.pop().let_go()

    @staticmethod
    def _hold_newest(held: deque[_Held], job: Job, now_ms: int) -> None:
        newest = _Held(job, job.store.snapshot(now_ms))
        last = held[-1] if held else newest
        if last.store is newest.store and last.snapshot.version == newest.snapshot.version and last is not newest:
            newest.let_go()
            return
        if last is not newest and last.reached == newest.reached:
            held.pop().let_go()  # expired keys were removed, slots have moved, or the store was copied
        last.superseded_ms = now_ms if last.reached != newest.reached else None
        held.append(newest)

    def _find(self, job: str, reached: Reached) -> _Held | None:
        return next((each for each in self._held[job] if each.reached == reached), None)


def _is_over(held: _Held, now_ms: int) -> bool:
    return held.superseded_ms is not None and now_ms - held.superseded_ms > HELD_MS_MAX
