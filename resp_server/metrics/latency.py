"""Slow events, for LATENCY: per event the longest time of each second, as in Redis' latency monitor. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Standard: Redis' own limit.
SAMPLES_MAX = 160
# The names of events are ours, so this limit only guards against a bug.
EVENTS_MAX = 32

# (second since 1970, the longest time in it in milliseconds)
LatencySample = tuple[int, int]


@dataclass
class LatencyTimeSeries:
    """The samples of one kind of event, as in LATENCY HISTORY."""

    max_ms: int = 0
    samples: deque[LatencySample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def add(self, second: int, milliseconds: int) -> None:
        """Record one event; only the longest of each second is stored."""
        self.max_ms = max(self.max_ms, milliseconds)
        if self.samples and self.samples[-1][0] == second:
            milliseconds = max(milliseconds, self.samples.pop()[1])
        self.samples.append((second, milliseconds))


class LatencyEvents:
    """The events of a process since the start, or since they were reset."""

    def __init__(self) -> None:
        self.by_name: dict[str, LatencyTimeSeries] = {}

    def add(self, name: str, now_ms: int, milliseconds: int) -> None:
        """Record an event of this duration."""
        if name in self.by_name or len(self.by_name) < EVENTS_MAX:
            self.by_name.setdefault(name, LatencyTimeSeries()).add(now_ms // 1000, milliseconds)

    def reset(self, names: Iterable[str]) -> int:
        """Remove events; return the number of removed kinds."""
        return sum([self.by_name.pop(name, None) is not None for name in names])

    def to_json(self) -> dict[str, tuple[int, list[LatencySample]]]:
        """Return the events as JSON, for another process of the server."""
        return {name: (event.max_ms, list(event.samples)) for name, event in self.by_name.items()}

    @classmethod
    def merged(cls, of_processes: Iterable[Mapping[str, tuple[int, Sequence[LatencySample]]]]) -> LatencyEvents:
        """Merge the events of several processes: the longest of each second."""
        total = cls()
        for events in of_processes:
            for name, (max_ms, samples) in events.items():
                event = total.by_name.setdefault(name, LatencyTimeSeries())
                event.max_ms = max(event.max_ms, max_ms)
                longest = dict(event.samples)
                for second, milliseconds in samples:
                    longest[second] = max(milliseconds, longest.get(second, 0))
                event.samples = deque(sorted(longest.items()), maxlen=SAMPLES_MAX)
        return total
