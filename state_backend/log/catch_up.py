"""Catch-up: decides when the state of a query with a new checkpoint becomes visible to readers.

A query with a new checkpoint reads all of its input again. Until it has caught up, its state is incomplete. So the log
holds the new generation back (see `state_backend.log.terms`), and readers keep the old generation. The driver makes the
new generation visible when one of these is true:

    its sources have passed the offsets of the old generation   checked at each commit
    no input is waiting                                         checked once a second, or when the query ends by itself
    `catch_up_timeout` has passed                               checked once a second
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from state_backend.log.log_writer import LogWriter
from state_backend.log.source_offsets import have_passed, may_be_compared
from state_backend.model.clock import Clock, iso_text, now_ms
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.sink")

# The default of `catch_up_timeout`. Until then the new state is incomplete, and the old one is outdated (guess).
CATCH_UP_TIMEOUT_S = 600.0
INCOMPARABLE = " (until no input is waiting: the offsets of its sources cannot be compared with those of the old state)"


def check_timeout(catch_up_timeout: float | None) -> None:
    """Raise DescriptorError if this is neither a number of seconds nor None."""
    if catch_up_timeout is not None and not (isinstance(catch_up_timeout, (int, float)) and catch_up_timeout >= 0):
        raise DescriptorError(f"catch_up_timeout= is a number of seconds, or None, not {catch_up_timeout!r}")


class CatchUp:
    """The catch-up of one query run.

    The thread that commits epochs calls `on_commit`, another thread calls `check`.

    Args:
        timeout_s: The longest time for which a generation is held back; None: no limit.
        is_idle: Tells whether the query looked for input after an epoch, and found none.
    """

    def __init__(
        self,
        writer: LogWriter,
        timeout_s: float | None,
        is_idle: Callable[[int], bool],
        clock: Clock = now_ms,
    ) -> None:
        self._writer = writer
        self._timeout_s = timeout_s
        self._is_idle = is_idle
        self._clock = clock
        if (held_back := writer.held_back) is not None:
            logger.warning(
                "job %s: query %s started with a new checkpoint; readers keep the state of epoch %d, of %s, until the "
                "query has caught up%s%s. To make the new state visible now: sparkis promote --log %s %s",
                writer.job,
                writer.query_id,
                held_back.visible.epoch,
                iso_text(held_back.visible.clock_ms),
                "" if may_be_compared(held_back.visible.offsets) else INCOMPARABLE,
                "" if timeout_s is None else f", at most {timeout_s:g} s",
                writer.log.filesystem.root,
                writer.job,
            )

    @property
    def is_done(self) -> bool:
        """Return whether the query's epochs are visible to readers."""
        return self._writer.held_back is None

    def on_commit(self, offsets: Sequence[str]) -> None:
        """Check the end offsets of an epoch that was just committed."""
        held_back = self._writer.held_back
        if held_back is not None and have_passed(offsets, held_back.visible.offsets):
            self._promote("its sources have passed the offsets of the old state")

    def check(self, *, is_behind: bool = False) -> None:
        """Check whether the input is idle, the timeout has passed, or another process has made the state visible.

        Args:
            is_behind: The query has committed batches that are not in the log yet.
        """
        held_back, last = self._writer.held_back, self._writer.last
        if held_back is None or last is None:
            return
        if self._writer.poll_promotion():
            logger.info("job %s: readers see the new state now: `sparkis promote` made it visible", self._writer.job)
        elif not is_behind and self._is_idle(last.epoch):
            self._promote("no input is waiting")
        elif self._timeout_s is not None and self._clock() - held_back.since_ms >= self._timeout_s * 1000:
            self._promote(f"{self._timeout_s:g} s have passed")

    def _promote(self, reason: str) -> None:
        if self._writer.promote(reason):
            logger.info("job %s: the new state is visible from now on: %s", self._writer.job, reason)
