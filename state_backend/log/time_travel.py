"""A job's log as of a past epoch: which epochs can still be read, and a log that ends at one of them.

A state can be read at an epoch if the log has a snapshot of that epoch or an earlier one, and all epochs between them.
While the first epoch is in the log, every epoch can be read. Once it was swept, the oldest readable epoch is that of
the oldest snapshot after which no epoch is missing. `garbage_collector` decides how far back that is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple, Self

from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.epochs import Epoch
from state_backend.model.clock import iso_text, now_ms
from state_backend.model.errors import LogError
from state_backend.model.slot_set import SlotSet

# Whole numbers below this are epochs, others are times in seconds since 1970. With an epoch a second, a job reaches
# this number after 30 years.
EPOCHS_MAX = 1_000_000_000
WHOLE_NUMBER = re.compile(r"[0-9]{1,15}")
SECONDS = re.compile(r"[0-9]{1,12}\.[0-9]{1,9}")
AS_OF_HELP = "an epoch's number, or a time: ISO 8601, UTC without an offset, or seconds since 1970"


class Moment(NamedTuple):
    """A job at a past epoch.

    Args:
        clock_ms: What expires by this time has expired.
    """

    generation: str
    epoch: int
    clock_ms: int


class ReadableEpochs(NamedTuple):
    """The epochs at which a job's state can be read.

    Args:
        starts_at_first_epoch: `first` is the first epoch of the job's generation.
    """

    generation: CurrentGeneration
    first: Epoch
    last: Epoch
    starts_at_first_epoch: bool


@dataclass(frozen=True)
class AsOf:
    """A point in the past: an epoch's number, or a time in milliseconds since 1970 UTC."""

    epoch: int | None = None
    at_ms: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an epoch's number or a time (see `AS_OF_HELP`); ValueError for any other text."""
        if WHOLE_NUMBER.fullmatch(text) and int(text) < EPOCHS_MAX:
            return cls(epoch=int(text))
        if WHOLE_NUMBER.fullmatch(text) or SECONDS.fullmatch(text):
            return cls(at_ms=round(float(text) * 1000))
        try:
            return cls.of_time(datetime.fromisoformat(text))
        except (ValueError, OverflowError):
            raise ValueError(f"{text!r} is not {AS_OF_HELP}") from None

    @classmethod
    def of_time(cls, time: datetime) -> Self:
        """Return the point at a time; one without a zone is in UTC."""
        return cls(at_ms=int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))

    @classmethod
    def of(cls, given: int | str | datetime) -> Self:
        """Convert an argument `as_of`; ValueError for an invalid one."""
        if isinstance(given, datetime):
            return cls.of_time(given)
        if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
            return cls(epoch=given)
        if isinstance(given, str):
            return cls.parse(given)
        raise ValueError(f"{given!r} is neither an epoch's number, a datetime nor a text in ISO 8601")


def readable_epochs(log: JobLog) -> ReadableEpochs | None:
    """Return the epochs at which a job can be read; None if it has no epoch. Lists the log, and reads a few files."""
    current = log.visible()
    last = None if current is None else log.end(current)
    if current is None or last is None:
        return None
    first = log.first(current)
    if first is not None and first.previous is None:
        return ReadableEpochs(current, first, last, starts_at_first_epoch=True)
    begin = last.epoch if first is None else first.epoch - 1
    bases = [snapshot for snapshot in log.complete_snapshots(current) if begin <= snapshot.epoch <= last.epoch]
    if not bases:
        raise LogError(
            f"job {log.job!r}: the log {log.filesystem.root} begins at epoch {begin + 1}, and has no snapshot to begin "
            f"with; restore the missing files from a copy"
        )
    return ReadableEpochs(current, bases[-1], last, starts_at_first_epoch=False)


def moment_of(log: JobLog, as_of: AsOf | None) -> Moment:
    """Return the moment that `as_of` selects: an epoch, the newest epoch committed by a time, or for None the newest.

    The clock reading is the epoch's own, the time, or now. LogError, with the reason, if the log has no such epoch.
    """
    readable = readable_epochs(log)
    if readable is None:
        raise BeforeFirstEpochError(f"the log {log.filesystem.root} has no epoch of a job {log.job!r}")
    generation, first, last = readable.generation.generation, readable.first, readable.last
    if as_of is None:
        return Moment(generation, last.epoch, now_ms())
    if as_of.epoch is not None:
        if as_of.epoch > last.epoch:
            raise LogError(f"job {log.job!r}: epoch {as_of.epoch} is not committed; the last one is {last.epoch}")
        if as_of.epoch < first.epoch:
            raise _too_early(log, readable, f"epoch {as_of.epoch}")
        return Moment(generation, as_of.epoch, _epoch(log, readable, as_of.epoch).clock_ms)
    assert as_of.at_ms is not None
    if as_of.at_ms < first.clock_ms:
        raise _too_early(log, readable, iso_text(as_of.at_ms))
    numbers = range(first.epoch, last.epoch + 1)
    found = numbers[bisect_right(numbers, as_of.at_ms, key=lambda number: _epoch(log, readable, number).clock_ms) - 1]
    return Moment(generation, found, min(as_of.at_ms, now_ms()))


def _epoch(log: JobLog, readable: ReadableEpochs, number: int) -> Epoch:
    if number == readable.first.epoch:
        return readable.first
    epoch = readable.last if number == readable.last.epoch else log.epoch(readable.generation, number)
    if epoch is None:
        raise LogError(f"job {log.job!r}: epoch {number} was swept from the log a moment ago; read a newer one")
    return epoch


def _too_early(log: JobLog, readable: ReadableEpochs, point: str) -> LogError:
    first = f"epoch {readable.first.epoch}, of {iso_text(readable.first.clock_ms)}"
    if readable.starts_at_first_epoch:
        return BeforeFirstEpochError(f"job {log.job!r}: {point} is before the first epoch of its state, {first}")
    return LogError(
        f"job {log.job!r}: {point} cannot be read any more: the log reaches back to {first}, and has no older snapshot "
        f"with all epochs after it; read that epoch or a later one"
    )


class BeforeFirstEpochError(LogError):
    """A time or an epoch before the first epoch of a job's state, which may be still to come."""


class PastJobLog(JobLog):
    """The log of a job as it was when an epoch was its last."""

    def __init__(self, log: JobLog, moment: Moment) -> None:
        super().__init__(log.filesystem, log.job)
        self.moment = moment

    def visible(self) -> CurrentGeneration | None:
        current = super().visible()
        if current is not None and current.generation != self.moment.generation:
            raise LogError(f"job {self.job!r}: its state was replaced by generation {current.generation}")
        return current

    def epoch(self, current: CurrentGeneration, number: int) -> Epoch | None:
        return super().epoch(current, number) if number <= self.moment.epoch else None

    def next_epochs(
        self, current: CurrentGeneration, number: int, count: int, slots: SlotSet | None = None
    ) -> list[Epoch]:
        return super().next_epochs(current, number, min(count, self.moment.epoch + 1 - number), slots)

    def numbers(self, generation: str) -> list[int]:
        return [number for number in super().numbers(generation) if number <= self.moment.epoch]

    def snapshot_numbers(self, generation: str) -> list[int]:
        return [number for number in super().snapshot_numbers(generation) if number <= self.moment.epoch]


class PastLog(ChangeLog):
    """A change log whose jobs end at past moments."""

    def __init__(self, log: ChangeLog, moments: dict[str, Moment]) -> None:
        super().__init__(log.filesystem)
        self._jobs |= {job: PastJobLog(log.job(job), moment) for job, moment in moments.items()}
