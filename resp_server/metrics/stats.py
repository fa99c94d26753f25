"""The counters of a server, for INFO. Only the event loop's thread changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

# Error codes are ours, so this limit only guards against a bug; it is the limit of Redis.
ERROR_CODES_MAX = 128
# Durations are counted by their number of binary digits; none has more.
TIME_BITS = 64

# The fields of Stats that are plain numbers.
SUMS = (
    "connections_received",
    "connections_rejected",
    "input_bytes",
    "output_bytes",
    "hits",
    "misses",
    "commands_per_second",
    "input_bytes_per_second",
    "output_bytes_per_second",
    "closed_for_input",
    "closed_for_output",
    "internal_errors",
    "reads",
    "writes",
    "rounds",
    "rounds_ns",
    "rounds_per_second",
    "rounds_ns_per_second",
)


@dataclass(slots=True)
class CommandStats:
    """One command's counters. A rejected call did not run (arity, NOAUTH, READONLY); a failed call replied an error.

    Each call of a batch counts with the mean of the batch.

    Args:
        took: The histogram of durations: the number of calls by the number of binary digits of their nanoseconds.
    """

    calls: int = 0
    nanoseconds: int = 0
    rejected: int = 0
    failed: int = 0
    took: list[int] = field(default_factory=lambda: [0] * TIME_BITS)

    def count(self, calls: int, nanoseconds: int) -> None:
        """Count one or more calls, and their total duration."""
        self.calls += calls
        self.nanoseconds += nanoseconds
        self.took[(nanoseconds // calls).bit_length()] += calls

    def uncount(self) -> None:
        """Take back one count of a call that is counted twice, such as by the forwarder and by its caller."""
        self.calls -= 1

    def add(self, other: CommandStats) -> None:
        """Add the counters of another process."""
        self.calls += other.calls
        self.nanoseconds += other.nanoseconds
        self.rejected += other.rejected
        self.failed += other.failed
        self.took = list(map(int.__add__, self.took, other.took))

    def to_json(self) -> dict[str, Any]:
        """Return the counters as JSON."""
        return {
            "calls": self.calls,
            "nanoseconds": self.nanoseconds,
            "rejected": self.rejected,
            "failed": self.failed,
            "took": self.took.copy(),
        }

    def reset(self) -> None:
        """Count from zero again."""
        self.calls = self.nanoseconds = self.rejected = self.failed = 0
        self.took[:] = [0] * TIME_BITS

    def percentile_ns(self, percent: float) -> float:
        """Return an estimated percentile of the durations, interpolated within a bucket of the histogram."""
        rank, seen = sum(self.took) * percent / 100, 0
        for bits, count in enumerate(self.took):
            if count and seen + count >= rank:
                least = 1 << bits >> 1
                return least + (rank - seen) / count * least
            seen += count
        return 0.0

    @property
    def is_used(self) -> bool:
        """Return whether any counter is set."""
        return bool(self.calls or self.rejected or self.failed)


@dataclass
class Stats:
    """One server's counters since its start."""

    connections_received: int = 0
    connections_rejected: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    hits: int = 0
    misses: int = 0
    commands: dict[str, CommandStats] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    commands_per_second: float = 0.0
    input_bytes_per_second: float = 0.0
    output_bytes_per_second: float = 0.0
    closed_for_input: int = 0
    closed_for_output: int = 0
    # Unexpected exceptions; each is in the log under an id.
    internal_errors: int = 0
    denied: Counter[str] = field(default_factory=Counter)
    # System calls that read or wrote client bytes, and rounds of the event loop that read or wrote sockets.
    reads: int = 0
    writes: int = 0
    rounds: int = 0
    rounds_ns: int = 0
    rounds_per_second: float = 0.0
    rounds_ns_per_second: float = 0.0
    # Functions that add the counts of compiled code since their last call.
    collectors: list[Callable[[], None]] = field(default_factory=list)
    _sample: tuple[float, int, int, int, int, int] = (0.0, 0, 0, 0, 0, 0)

    def collect(self) -> None:
        """Add the counts of compiled code."""
        for add in self.collectors:
            add()

    def command_stats(self, command: str) -> CommandStats:
        """Return a command's counters, by its name in the command table."""
        found = self.commands.get(command)
        if found is None:
            found = self.commands[command] = CommandStats()
        return found

    def count_error(self, code: str, count: int = 1) -> None:
        """Count error replies under their code."""
        errors = self.errors
        if code in errors or len(errors) < ERROR_CODES_MAX:
            errors[code] += count

    @property
    def round_ns(self) -> float:
        """The mean duration of a round of the event loop, by the last sample."""
        return self.rounds_ns_per_second / (self.rounds_per_second or 1.0)

    @property
    def calls(self) -> int:
        """The number of executed commands."""
        return sum(command_stats.calls for command_stats in self.commands.values())

    def add(self, other: Stats) -> None:
        """Add the counters of another process."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for command, theirs in other.commands.items():
            self.command_stats(command).add(theirs)
        self.errors.update(other.errors)
        self.denied.update(other.denied)

    def reset(self) -> None:
        """Count from zero again; the `CommandStats` objects stay the same."""
        self.collect()
        for command_stats in self.commands.values():
            if (
                command_stats.calls or command_stats.rejected or command_stats.failed
            ):  # not `is_used`: there are hundreds
                command_stats.reset()
        for name in SUMS:
            setattr(self, name, 0)
        self.errors.clear()
        self.denied.clear()
        self._sample = (self._sample[0], 0, 0, 0, 0, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the counters as JSON, for another process of the server."""
        self.collect()
        commands = {name: stats.to_json() for name, stats in self.commands.items() if stats.is_used}
        counted = {"commands": commands, "errors": dict(self.errors), "denied": dict(self.denied)}
        return {name: getattr(self, name) for name in SUMS} | counted

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Parse the output of `to_json`."""
        commands = {name: CommandStats(**command_stats) for name, command_stats in row["commands"].items()}
        stats = cls(commands=commands, errors=Counter(row["errors"]), denied=Counter(row["denied"]))
        for name in SUMS:
            setattr(stats, name, row[name])
        return stats

    def sample(self, seconds: float) -> None:
        """Compute the rates since the last sample; called about once a second."""
        self.collect()
        then, calls, input_bytes, output_bytes, rounds, rounds_ns = self._sample
        self._sample = (seconds, self.calls, self.input_bytes, self.output_bytes, self.rounds, self.rounds_ns)
        elapsed = seconds - then
        if elapsed > 0:
            self.commands_per_second = (self.calls - calls) / elapsed
            self.input_bytes_per_second = (self.input_bytes - input_bytes) / elapsed
            self.output_bytes_per_second = (self.output_bytes - output_bytes) / elapsed
            self.rounds_per_second = (self.rounds - rounds) / elapsed
            self.rounds_ns_per_second = (self.rounds_ns - rounds_ns) / elapsed
