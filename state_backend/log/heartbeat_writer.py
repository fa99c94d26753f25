"""Writes the heartbeats by which readers learn that a job is live."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from state_backend.log.checked_json import with_checksum
from state_backend.log.fencing import check_in_charge
from state_backend.log.terms import Claim, Terms
from state_backend.model.errors import FencedWriterError, SparkisError

logger = logging.getLogger("sparkis.log")

# How often a writer looks whether a heartbeat is due.
HEARTBEAT_INTERVAL_S = 1.0


class HeartbeatWriter:
    """The heartbeats of one writer of a job. Thread-safe."""

    def __init__(self, terms: Terms, claim: Claim) -> None:
        self._terms = terms
        self._claim = claim
        self._count = 0
        self._last_status: tuple[bool, bool] | None = None  # (is_running, is_final) of the last heartbeat
        self._sources: Mapping[str, Any] | None = None
        self._due_s = 0.0
        self._lock = threading.RLock()
        self._closed = threading.Event()

    def use_claim(self, claim: Claim) -> None:
        """Write the next heartbeats for another term of the same writer."""
        self._claim = claim

    def mark_begun(self) -> None:
        """Have the next heartbeat written at once, because a term has begun, which has had none."""
        self._last_status = None

    def start_thread(self) -> None:
        """Write heartbeats in a thread until `close`, the end of the last user of this object, or a newer writer."""
        arguments = (weakref.ref(self), self._closed, self._terms.job)
        name = f"sparkis-heartbeat-{self._terms.job}"
        threading.Thread(target=_send_heartbeats, args=arguments, name=name, daemon=True).start()

    def close(self) -> None:
        """Mark the job as ended."""
        self._closed.set()
        self.send(is_running=False)

    def send(
        self, *, is_running: bool = True, is_final: bool = False, sources: Mapping[str, Any] | None = None
    ) -> bool:
        """Write a heartbeat if one is due; if a newer writer has claimed the job, write none and return False.

        Args:
            sources: The newest offsets of the query's sources (see `source_lag`); None: as in the last heartbeat.
        """
        with self._lock:
            status, now_s = (is_running, is_final), time.monotonic()
            if status == self._last_status and now_s < self._due_s:
                return True
            try:
                check_in_charge(self._terms, self._claim)
            except FencedWriterError:
                return False
            filesystem = self._terms.filesystem
            interval_s = filesystem.heartbeat_interval_s
            self._count += 1
            heartbeat = {
                "writer": self._claim.writer,
                "count": self._count,
                "interval_s": interval_s,
                "is_running": is_running,
            }
            heartbeat |= {"is_final": True} if is_final else {}
            self._sources = sources or self._sources
            heartbeat |= {"sources": self._sources} if self._sources else {}
            path = self._terms.heartbeat_path(self._claim.term)
            filesystem.replace(path, with_checksum(heartbeat), is_durable=False)
            self._last_status, self._due_s = status, now_s + interval_s - 1.0
            return True

    def repeat(self) -> bool:
        """Write a heartbeat if the job is live; return whether this writer is to write others."""
        with self._lock:
            if self._closed.is_set():
                return False
            is_live = self._last_status in (None, (True, False))
            return not is_live or self.send()


def _send_heartbeats(writing: weakref.ref[HeartbeatWriter], closed: threading.Event, job: str) -> None:
    """Write heartbeats until the writer is closed, forgotten or fenced."""
    while (heartbeats := writing()) is not None:
        try:
            if not heartbeats.repeat():
                return
        except SparkisError as error:  # the next commit meets the same error
            logger.debug("no heartbeat for job %s: %s", job, error)
        del heartbeats  # so that the end of its last user ends this thread
        if closed.wait(HEARTBEAT_INTERVAL_S):
            return
