"""When readers see a generation that was begun while they see an older one: once it has caught up, not half a replay.

A query with a new checkpoint reads all of its input again, and for as long as that takes its sums are those of a while
ago. The log holds such a generation back (see `state_backend.log.terms`). The driver that writes it says in the log
when it has caught up, and all servers go by that:

    its sources are as far as the old generation's were     looked up at each commit
    nothing is waiting any more                             looked up once a second, or when the query ends by itself
    the time is over                                        likewise
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from spark_hooks.publish.offsets import OffsetLog, have_passed
from spark_hooks.sessions import execution_of
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import Clock, iso_text, now_ms
from state_backend.model.errors import DescriptorError

logger = logging.getLogger("sparkis.sink")

# Half a replay is a wrong answer, and so, after a while, is the state of an hour ago (guess).
CATCH_UP_TIMEOUT_S = 600.0
ENDING_TRIGGERS = ("AvailableNowTrigger$", "OneTimeTrigger$")


def check_timeout(catch_up_timeout: float | None) -> None:
    """Refuse what is no time for which readers keep an old state."""
    if catch_up_timeout is not None and not (isinstance(catch_up_timeout, (int, float)) and catch_up_timeout >= 0):
        raise DescriptorError(f"catch_up_timeout= is a number of seconds, or None, not {catch_up_timeout!r}")


class CatchingUp:
    """Watches one run of a query on the driver. `committed` is told by the thread of its batches, `look` by another.

    timeout_s: how long a generation is held back at most; None: until it has caught up, or `sparkis promote`.
    """

    def __init__(
        self,
        writer: LogWriter,
        timeout_s: float | None,
        query: StreamingQuery | None,
        offsets: OffsetLog,
        clock: Clock = now_ms,
    ) -> None:
        self._writer = writer
        self._timeout_s = timeout_s
        self._query = query
        self._offsets = offsets
        self._clock = clock
        if (held := writer.held) is not None:
            logger.warning(
                "job %s: query %s began anew (a new checkpoint); readers keep the state of epoch %d, of %s, until it "
                "has caught up%s. To show the new state now: sparkis promote --log %s %s",
                writer.job,
                writer.query_id,
                held.shown.epoch,
                iso_text(held.shown.clock_ms),
                "" if timeout_s is None else f", at most {timeout_s:g} s",
                writer.log.filesystem.root,
                writer.job,
            )

    @property
    def is_over(self) -> bool:
        """Tell whether readers are to see what is written."""
        return self._writer.held is None

    def committed(self, offsets: Sequence[str]) -> None:
        """Take where the sources end in an epoch that was committed."""
        held = self._writer.held
        if held is not None and have_passed(offsets, held.shown.offsets):
            self._show("its sources are as far as those of the old one were")

    def look(self, *, is_behind: bool = False) -> None:
        """Look whether nothing is waiting, or the time is over; whether somebody else had it shown.

        is_behind: batches that the query has committed are not in the log yet.
        """
        held, last = self._writer.held, self._writer.last
        if held is None or last is None:
            return
        if self._writer.is_shown_by_others():
            logger.info("job %s: the new state is shown, by `sparkis promote`", self._writer.job)
        elif not is_behind and self._is_idle(last.epoch):
            self._show("nothing is waiting to be read")
        elif self._timeout_s is not None and self._clock() - held.since_ms >= self._timeout_s * 1000:
            self._show(f"{self._timeout_s:g} s have passed")

    def _show(self, why: str) -> None:
        if self._writer.show(why):
            logger.info("job %s: readers see the new state from now on: %s", self._writer.job, why)

    def _is_idle(self, epoch: int) -> bool:
        """Tell whether Spark looked for input after the last epoch, and found none."""
        if self._query is None:
            return False
        try:
            if self._query.isActive:
                status = self._query.status
                return status["message"].startswith("Waiting for") and not status["isDataAvailable"]
            execution = execution_of(self._query)
            ends_by_itself = execution.trigger().getClass().getSimpleName() in ENDING_TRIGGERS
            # One that is stopped leaves the plan of a batch that did not run.
            return ends_by_itself and self._query.exception() is None and self._offsets.ends_at(epoch)
        except (PySparkException, Py4JError, OSError):  # Spark itself has stopped
            return False
