"""A job at rest: its applier process has ended, because there was nothing to apply for a while.

Until then, the server polls the log at the applier's own intervals, and restarts the applier at the first change. A
process that only waits would take a hundred times the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from state_backend.apply.heartbeats import HeartbeatWatch
from state_backend.lmdb.store import SUSPECT
from state_backend.log.change_log import ChangeLog
from state_backend.log.source_lag import SourceLag
from state_backend.model.errors import SparkisError


class IdleJob:
    """Polls the log of a job at rest.

    Attributes:
        is_stale, source_lag: As in the applier's reports.
    """

    def __init__(self, root: str, job: str, event: Mapping[str, Any]) -> None:
        self._log = ChangeLog(root).job(job)
        self._generation = event["generation"], event["log_term"]
        self._epoch = event["applied"]
        self._suspect = Path(event["path"]) / SUSPECT
        self._heartbeats = HeartbeatWatch(was_alive=not event["is_stale"])
        self.is_stale = event["is_stale"]
        self._source_lag = SourceLag(event["source_offsets"])
        self.source_lag = event["source_lag"]

    @property
    def poll_interval_s(self) -> float:
        """The first interval between polls."""
        return self._log.filesystem.probe_interval_s

    @property
    def poll_interval_s_max(self) -> float:
        """The longest interval between polls."""
        return self._log.filesystem.probe_interval_s_max

    def has_work(self) -> bool:
        """Poll, and return whether the applier is needed. An error is work, too: the applier reports it."""
        try:
            current = self._log.visible()
            if current is None or current.held_back or (current.generation, current.term) != self._generation:
                return True
            heartbeat = self._log.heartbeat()
            self.is_stale, self.source_lag = self._heartbeats.is_stale(heartbeat), self._source_lag.of(heartbeat)
            # Also the epoch after the next: the next one may be missing, which is an error.
            epochs = (self._epoch + 1, self._epoch + 2)
            return self._suspect.exists() or any(self._log.has_file(current.generation, epoch) for epoch in epochs)
        except (SparkisError, OSError):
            return True
