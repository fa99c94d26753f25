"""The numbers of a process that INFO shows, and their sum over the processes of one server."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from resp_server.stats import Stats


@dataclass
class Numbers:
    """What processes counted and used. Pages that several of them map are counted in each."""

    clients: int = 0
    resident_bytes: int = 0
    resident_bytes_peak: int = 0
    user_s: float = 0.0
    system_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
    watching: int = 0
    watched_keys: int = 0
    tracking: int = 0
    tracked_keys: int = 0  # those of several processes count in each
    tracked_items: int = 0
    tracked_prefixes: int = 0
    subscribed: int = 0
    channels: int = 0  # of pub/sub; those at several processes count in each
    patterns: int = 0
    shard_channels: int = 0

    @classmethod
    def of_this_process(cls, stats: Stats, clients: int = 0) -> Self:
        """Return the numbers of the process that calls."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        resident = _resident_bytes() or peak
        return cls(clients, resident, max(peak, resident), used.ru_utime, used.ru_stime, stats)

    @classmethod
    def total(cls, parts: Iterable[Self]) -> Self:
        """Add the numbers of several processes up."""
        whole = cls()
        for part in parts:
            whole.clients += part.clients
            whole.watching += part.watching
            whole.watched_keys += part.watched_keys
            whole.tracking += part.tracking
            whole.tracked_keys += part.tracked_keys
            whole.tracked_items += part.tracked_items
            whole.tracked_prefixes += part.tracked_prefixes
            whole.subscribed += part.subscribed
            whole.channels += part.channels
            whole.patterns += part.patterns
            whole.shard_channels += part.shard_channels
            whole.resident_bytes += part.resident_bytes
            whole.resident_bytes_peak += part.resident_bytes_peak
            whole.user_s += part.user_s
            whole.system_s += part.system_s
            whole.stats.add(part.stats)
        return whole

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as another process of the server is told them."""
        return {**vars(self), "stats": self.stats.to_json()}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Return what `to_json` made."""
        return cls(**{**told, "stats": Stats.from_json(told["stats"])})


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
