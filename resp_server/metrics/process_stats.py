"""The counters of a process for INFO, and their sum over the processes of one server."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from resp_server.metrics.stats import Stats

# The usage of the calling thread, the event loop's, where the system measures it.
THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Standard: seven numbers of at most 20 digits.
STATM_BYTES_MAX = 256


@dataclass
class ProcessStats:
    """The counters and resource usage of processes. A memory page that several processes map counts for each."""

    clients: int = 0
    resident_bytes: int = 0
    resident_bytes_peak: int = 0
    user_s: float = 0.0
    system_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
    watching: int = 0
    watched_keys: int = 0
    paused: int = 0  # clients that CLIENT PAUSE stopped
    started_bytes: int = 0  # resident memory at the start
    private_bytes: int = 0  # memory that is not mapped from a file, or that was mapped at the start
    output_bytes: int = 0  # unsent replies and pushes
    largest_output_bytes: int = 0  # of one client
    children_user_s: float = 0.0
    children_system_s: float = 0.0
    thread_user_s: float = 0.0
    thread_system_s: float = 0.0
    tracking: int = 0
    tracked_keys: int = 0  # a key that is tracked at several processes counts in each
    tracked_items: int = 0
    tracked_prefixes: int = 0
    subscribed: int = 0
    channels: int = 0  # of pub/sub; a channel at several processes counts in each
    patterns: int = 0
    shard_channels: int = 0

    @classmethod
    def of_this_process(cls, stats: Stats, clients: int = 0, started: Memory | None = None) -> Self:
        """Return the stats of the calling process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        now = memory_now()
        resident = now.resident_bytes or peak
        before = now if started is None else started
        children, thread = map(resource.getrusage, (resource.RUSAGE_CHILDREN, THREAD))
        return cls(
            clients,
            resident,
            max(peak, resident),
            used.ru_utime,
            used.ru_stime,
            stats,
            started_bytes=before.resident_bytes,
            private_bytes=resident - now.mapped_bytes + before.mapped_bytes,
            children_user_s=children.ru_utime,
            children_system_s=children.ru_stime,
            thread_user_s=thread.ru_utime,
            thread_system_s=thread.ru_stime,
        )

    @classmethod
    def total(cls, each_process: Iterable[Self]) -> Self:
        """Return the sum of several processes' stats."""
        total = cls()
        for each in each_process:
            largest_bytes = max(total.largest_output_bytes, each.largest_output_bytes)
            for name in vars(total).keys() - {"stats"}:
                setattr(total, name, getattr(total, name) + getattr(each, name))
            total.largest_output_bytes = largest_bytes
            total.stats.add(each.stats)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return the stats as JSON, for another process of the server."""
        return {**vars(self), "stats": self.stats.to_json()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Parse the output of `to_json`."""
        return cls(**{**row, "stats": Stats.from_json(row["stats"])})


class Memory(NamedTuple):
    """The resident memory of a process, and the part of it that is mapped from files."""

    resident_bytes: int
    mapped_bytes: int


def memory_now() -> Memory:
    """Return the memory of this process; zeros where the system does not report it."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # `open` takes three times as long
    except OSError:
        return Memory(0, 0)
    try:
        pages = os.read(file, STATM_BYTES_MAX).split()
    finally:
        os.close(file)
    return Memory(int(pages[1]) * PAGE_BYTES, int(pages[2]) * PAGE_BYTES)
