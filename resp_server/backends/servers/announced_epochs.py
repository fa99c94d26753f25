"""The epochs that a server has announced over one connection (STATE FOLLOW). Pure.

While no server can read the log of a job, one epoch of the job counts as another (`outages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from resp_server.backends.servers.min_epochs import has_reached
from resp_server.session.epochs import EMPTY_EPOCHS, NO_EPOCHS, REMOVED, Epochs, JobEpoch, ReplyEpochs

Value = TypeVar("Value")


class AnnouncedEpochs:
    """The epochs of a server, by job.

    Attributes:
        counted: The announced epochs as they count.
        reply_epochs: `counted` in the form of a reply's epochs.
        stalled: The jobs whose log the server cannot read, and the epochs of each that the server has.
        held: The epochs that STATE HOLD has requested.
        is_ready: The server has reached the epochs that it had announced before this connection.
    """

    def __init__(self) -> None:
        self.announced: Epochs = EMPTY_EPOCHS
        self.counted: Epochs = EMPTY_EPOCHS
        self.reply_epochs: ReplyEpochs = NO_EPOCHS
        self.stalled: dict[str, list[JobEpoch]] = {}
        self.held: dict[str, JobEpoch] = {}
        self.is_ready = False
        self._announced_before: Epochs = EMPTY_EPOCHS
        # The epochs that the server was asked to look for since the last check.
        self._awaited: dict[str, JobEpoch] = {}

    def begin(self, announced_before: Epochs) -> None:
        """Begin again, for a new socket.

        Args:
            announced_before: The epochs that the server has announced so far.
        """
        self.announced, self.counted, self.reply_epochs = EMPTY_EPOCHS, EMPTY_EPOCHS, NO_EPOCHS
        self.stalled, self.held = {}, {}
        self._announced_before = dict(announced_before)

    def set_counted(self, epochs: ReplyEpochs) -> None:
        """Set the announced epochs as they count."""
        self.reply_epochs, self.counted = epochs, epochs[0]

    def set_epoch(self, job: str, reached: JobEpoch) -> None:
        """Record an epoch that the server announces, or `REMOVED`."""
        others = _without(job, self.announced)
        self.announced = others if reached == REMOVED else {**others, job: reached}
        if self.held.get(job) != reached:
            self.held.pop(job, None)  # the server has left that epoch, so it may have to be requested again

    def set_stalled(self, job: str, epochs: list[JobEpoch] | None) -> None:
        """Record the epochs of a job whose log the server cannot read; None: it can read the log again."""
        self.stalled = _without(job, self.stalled)
        if epochs is not None:
            self.stalled[job] = epochs
        self.held.pop(job, None)

    def set_held(self, job: str, reached: JobEpoch | None) -> None:
        """Record the epoch that STATE HOLD requests; None: it ends."""
        self.held = _without(job, self.held)
        if reached is not None:
            self.held[job] = reached

    def update_readiness(self, removed_jobs: set[str]) -> None:
        """Set `is_ready`, if the server has reached the epochs that it had announced before."""
        self.is_ready = self.is_ready or has_reached(self.counted, self._announced_before, removed_jobs)

    def to_await(self, epochs: Epochs, removed_jobs: set[str]) -> Epochs:
        """Return those of the epochs that the server neither has nor is looking for; it is now asked to."""
        missing = {}
        for job, reached in epochs.items():
            known = max(self.counted.get(job, REMOVED), self._awaited.get(job, REMOVED))
            if known < reached and job not in removed_jobs:
                self._awaited[job] = missing[job] = reached
        return missing

    def forget_awaited(self) -> None:
        """Forget which epochs the server was asked to look for, so that it is asked again."""
        self._awaited.clear()


def _without(job: str, by_job: Mapping[str, Value]) -> dict[str, Value]:
    """Return a mapping without a job."""
    return {name: each for name, each in by_job.items() if name != job}
