"""Finds the next epoch of a job in its log. While many epochs wait, they are read ahead."""

from __future__ import annotations

from collections import deque

from state_backend.log.change_log import CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch
from state_backend.model.slot_set import SlotSet

# A listing finds gaps of any width in the chain of epochs, but its cost grows with the log. So there is one listing for
# so many polls without a new epoch.
LISTED_EVERY_POLLS = 60


class EpochSource:
    """The epochs of a job's visible generation, as an applier asks for them."""

    def __init__(self, log: JobLog) -> None:
        self._log = log
        self._quiet_polls = 0
        # The generation that was last read, and when it is to be read again; the epochs of it that were read ahead.
        self._current: CurrentGeneration | None = None
        self._checks_due_s = 0.0
        self._is_checking = True
        self._is_announced = False  # an epoch of the known term was announced after the last step began
        self._postpones_checks = False
        self._ahead: deque[Epoch] = deque()
        self._ahead_count = 1

    @property
    def is_checking(self) -> bool:
        """Whether this step looks for a new writer and for missing epochs, not for the next epoch only."""
        return self._is_checking

    def check_all(self) -> None:
        """Have the next step look for a new writer and for missing epochs."""
        self._checks_due_s = 0.0

    def note_announcement(self, term: int, epoch: int) -> None:
        """Have the next step check all if the epoch is not of the known term (see `Applier.take_announcement`)."""
        is_expected = self._current is not None and term in (0, self._current.term) and epoch >= 0
        if is_expected:
            self._is_announced = True
        else:
            self.check_all()

    def begin_step(self) -> bool:
        """Begin a step; return whether other checks that are due wait for the next step.

        They wait in an object store, whose requests take long: they would delay the announced epoch.
        """
        self._postpones_checks = self._is_announced and self._log.filesystem.checks_interval_s > 0
        self._is_announced = False
        return self._postpones_checks

    def is_check_due(self, now_s: float) -> bool:
        """Return whether it is time to look for a new writer and for missing epochs."""
        return now_s >= self._checks_due_s

    def current(self, now_s: float, *, has_error: bool) -> CurrentGeneration | None:
        """Return the visible generation. It is read again for each epoch, because a new writer may have begun.

        In an object store it is read less often (see `Filesystem.checks_interval_s`): the next epoch of a new writer is
        found in any case if its generation is the same. An error of the last step is a reason to check all.
        """
        if self._ahead and self._current is not None:
            return self._current
        is_held_back = self._current is not None and self._current.held_back is not None
        is_due = self.is_check_due(now_s) and not self._postpones_checks
        self._is_checking = self._current is None or is_held_back or has_error or is_due
        if self._is_checking:
            self._current = self._log.visible()
            self._checks_due_s = now_s + self._log.filesystem.checks_interval_s
        return self._current

    def forget_ahead(self) -> None:
        """Forget the epochs that were read ahead, because another store is being filled."""
        self._ahead.clear()

    def find(self, current: CurrentGeneration, number: int, slots: SlotSet | None) -> Epoch | None:
        """Return an epoch; None if it is not committed yet, or was swept. EpochHoleError if there is a later one.

        Args:
            slots: The slots whose change files are read with the epochs; None for all.
        """
        epoch = self._read(current, number, slots)
        if epoch is None and self._is_checking:
            return self._search_after_gap(current, number)
        return epoch

    def _read(self, current: CurrentGeneration, number: int, slots: SlotSet | None) -> Epoch | None:
        if not self._ahead or self._ahead[0].epoch != number:
            found = self._log.next_epochs(current, number, self._ahead_count, slots)
            is_all = len(found) == self._ahead_count
            self._ahead_count = min(2 * self._ahead_count, self._log.filesystem.reads_at_a_time) if is_all else 1
            self._ahead = deque(found)
        if not self._ahead:
            return None
        epoch = self._ahead.popleft()
        if epoch.term != current.term:
            self._current = None  # a new writer has begun
        return epoch

    def _search_after_gap(self, current: CurrentGeneration, number: int) -> Epoch | None:
        """Search for epochs after a missing one: for the next one at each poll, for all now and then by a listing.

        Return the missing epoch if it has appeared meanwhile.
        """
        self._quiet_polls += 1
        if self._quiet_polls % LISTED_EVERY_POLLS == 1:
            self._log.newest(current)  # raises an error if epochs are missing
        if self._log.epoch(current, number + 1) is None:
            return None
        epoch = self._log.epoch(current, number)  # the epoch may have been written since the first search
        if epoch is None:
            self._log.newest(current)
        return epoch
