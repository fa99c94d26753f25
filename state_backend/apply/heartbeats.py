"""Whether a job's writer is alive, by its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from state_backend.log.change_log import JobLog
from state_backend.log.fencing import HEARTBEATS_MISSED_MAX
from state_backend.model.errors import SparkisError


class HeartbeatWatch:
    """Watches a writer's heartbeats by this process's own clock, because clocks of machines differ.

    Args:
        was_alive: Another process saw a heartbeat just now.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, was_alive: bool = False) -> None:
        self._clock = clock
        self._last: tuple[object, object] = (None, None)
        self._changed_at_s = clock() if was_alive else float("-inf")

    def is_stale(self, heartbeat: dict[str, Any]) -> bool:
        """Return whether the writer has stopped, or has sent no heartbeat for too long, given its last heartbeat."""
        count = (heartbeat.get("writer"), heartbeat.get("count"))
        if count != self._last and heartbeat:
            is_first = self._last == (None, None)
            self._last = count
            if not is_first:  # the first heartbeat may be as old as the log: wait for the next
                self._changed_at_s = self._clock()
        if heartbeat.get("is_final"):
            return False
        silent_s_max = HEARTBEATS_MISSED_MAX * heartbeat.get("interval_s", 1.0)
        return not heartbeat.get("is_running") or self._clock() - self._changed_at_s > silent_s_max


class HeartbeatPolls:
    """Reads the last heartbeat of a job's writer, again only when there may be a new one: a read may cost money."""

    def __init__(self, log: JobLog) -> None:
        self._log = log
        self._last: dict[str, Any] = {}
        self._writer = ""  # the writer that was asked for last
        self._pause_s = self._due_s = 0.0

    def last(self, writer: str, now_s: float) -> dict[str, Any]:
        """Return the last heartbeat, which may be one of the writer before; LogError.

        Args:
            now_s: The time by a monotonic clock.
        """
        if self._writer != writer:
            self._writer, self._pause_s, self._due_s = writer, 0.0, 0.0
        if self.is_due(now_s):
            self._last = self._log.heartbeat()
            usual_s = (self._last.get("interval_s", self._log.filesystem.heartbeat_interval_s) - 1.0) / 2
            # The first heartbeat of a new writer may be about to come, or may never come.
            is_expected = self._last.get("writer") != writer
            self._pause_s = min(2 * self._pause_s + 0.5, usual_s) if is_expected else usual_s
            self._due_s = now_s + self._pause_s
        return self._last

    def is_due(self, now_s: float) -> bool:
        """Return whether the writer that was asked for last may have sent a new heartbeat."""
        return now_s >= self._due_s


class WriterHeartbeats:
    """The heartbeats of a job's writer, as an applier reads them in each of its steps."""

    def __init__(self, log: JobLog) -> None:
        self._polls, self._watch = HeartbeatPolls(log), HeartbeatWatch()
        self._last: dict[str, Any] | None = None

    def poll(self, writer: str, now_s: float) -> None:
        """Read the last heartbeat, if there may be a new one; an error is as no heartbeat. See `HeartbeatPolls`."""
        self._last = None
        with suppress(SparkisError):
            self._last = self._polls.last(writer, now_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether a poll would read."""
        return self._polls.is_due(now_s)

    def is_stale(self) -> bool:
        """Return whether the writer has stopped, or has sent no heartbeat for too long, by the last poll."""
        return self._last is None or self._watch.is_stale(self._last)

    @property
    def last(self) -> dict[str, Any]:
        """The heartbeat of the last poll; empty if there was none."""
        return self._last or {}
