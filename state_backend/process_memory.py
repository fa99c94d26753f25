"""Tells how much memory this process could allocate, and returns freed memory to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _malloc_trim() -> Callable[[int], Any]:
    try:
        trim: Callable[[int], Any] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return lambda pad_bytes: 0
    return trim


def release_free_memory() -> None:
    """Make glibc return its unused pages to the system; with other C libraries, do nothing.

    LMDB allocates every page that a transaction writes with malloc, and glibc retains freed pages. After an epoch of
    4 million changes, 430 of the process's 490 MiB are such pages (measured). Returning them takes 5 ms.
    """
    _malloc_trim()(0)


def available_bytes() -> int:
    """Return how many bytes this process could allocate now; 0 if it is unknown.

    The smaller one of the system's available memory and the free memory of the process's control group.
    """
    rows = [line.split() for line in _lines("/proc/meminfo")]
    found = [int(row[1]) << 10 for row in rows if row[:1] == ["MemAvailable:"]]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        numbers = [each for path in (limit, used) for each in _lines(path) if each.isdigit()]
        if len(numbers) == 2:
            found.append(max(0, int(numbers[0]) - int(numbers[1])))
    return min(found, default=0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
