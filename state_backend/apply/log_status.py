"""The status of a job's log beside its applied epochs: a generation that is held back, snapshots, folders."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from state_backend.apply import snapshots
from state_backend.log import promotion
from state_backend.log.change_log import CurrentGeneration, JobLog
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.applier")

NOTHING_HELD_BACK: dict[str, int | None] = {"held_back_epoch": None, "held_back_since_ms": None}
# The time between two look-ups of the newest snapshot, which any server of the log may have written: half of the time
# after which an idle job's process ends (guess).
SNAPSHOT_INTERVAL_S = 30.0


class LogStatus:
    """The status of a job's log, as of the last `look`."""

    def __init__(self, log: JobLog) -> None:
        self._log = log
        self._snapshot_generation, self._snapshot_due_s = "", 0.0
        self.term = 0
        self.held_back = NOTHING_HELD_BACK
        self.folders: list[str] = []  # the local ones to watch
        # The bytes of each state in the newest snapshot; None: there is no snapshot, or it does not say.
        self.state_bytes: Mapping[str, int] | None = None

    @property
    def is_held_back(self) -> bool:
        """Whether a generation is held back."""
        return self.held_back is not NOTHING_HELD_BACK

    def look(self, current: CurrentGeneration, now_s: float, *, has_written_snapshot: bool) -> None:
        """Look at the log of a generation.

        Args:
            now_s: The time by a monotonic clock.
            has_written_snapshot: Whether this server has written a snapshot since the last look.
        """
        self._find_held_back(current.held_back)
        self._find_state_bytes(current, now_s, has_written_snapshot)
        self.term = current.term
        self.folders = self._log.folders_to_watch(current)

    def last_number(self) -> int:
        """Return the number of the newest epoch in the log; -1 if it is unknown. For reports of an error."""
        with suppress(SparkisError):
            current = self._log.current()
            if current is not None:
                return max(self._log.numbers(current.generation), default=-1)
        return -1

    def _find_held_back(self, held_back: str | None) -> None:
        """Find the last epoch of a generation that is held back. Its epochs are applied once it is visible."""
        if held_back is None:
            self.held_back = NOTHING_HELD_BACK
            return
        if not self.is_held_back:
            logger.info("job %s: generation %s is held back until it has caught up", self._log.job, held_back)
        newest = max(self._log.numbers(held_back), default=-1)
        self.held_back = {"held_back_epoch": newest, "held_back_since_ms": promotion.since_ms(self._log, held_back)}

    def _find_state_bytes(self, current: CurrentGeneration, now_s: float, has_written_snapshot: bool) -> None:
        """Look the newest snapshot up, now and then and after this server has written one."""
        is_known = current.generation == self._snapshot_generation and now_s < self._snapshot_due_s
        if is_known and not has_written_snapshot:
            return
        self._snapshot_generation, self._snapshot_due_s = current.generation, now_s + SNAPSHOT_INTERVAL_S
        with suppress(SparkisError):  # no epoch needs the snapshot
            manifest = snapshots.newest(self._log, current)
            self.state_bytes = None if manifest is None else manifest.state_bytes
