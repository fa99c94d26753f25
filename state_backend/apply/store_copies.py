"""Decides when a store is replaced by a copy without free pages."""

from __future__ import annotations

# A store with fewer bytes in free pages is not copied: the pages are soon used again, or are not worth a copy (guess).
COMPACT_ABOVE_BYTES = 64 << 20
# The time between two copies. While epochs come, a store soon has as many free pages again after a copy (measured:
# twice the pages of the state with epochs that rewrite everything, three times with readers that pin eight epochs of
# 1 % of the keys). A copy takes a second for a million keys, and no epoch is applied meanwhile.
COMPACT_PAUSE_S = 300.0
# Copying the store of an idle job delays no epoch. So fewer free pages are enough: a COMPACT_IDLE_SHARE-th of the used
# pages, and at least COMPACT_IDLE_ABOVE_BYTES.
COMPACT_IDLE_SHARE = 8
COMPACT_IDLE_ABOVE_BYTES = 4 << 20


class StoreCopies:
    """The copies of one job's stores. Times are of any one clock."""

    def __init__(self) -> None:
        self._above_bytes = COMPACT_ABOVE_BYTES
        self._pause_ends_s = 0.0

    def is_due(self, used: int, free: int, now_s: float, *, is_idle: bool) -> bool:
        """Return whether a store has more free pages than used ones; for the store of an idle job, fewer are enough.

        Within COMPACT_PAUSE_S of a copy, only the store of an idle job is copied again.

        Args:
            used: The bytes of its used pages.
            free: The bytes of its free pages.
        """
        is_early = now_s < self._pause_ends_s
        if is_idle and not is_early and free >= max(used // COMPACT_IDLE_SHARE, COMPACT_IDLE_ABOVE_BYTES):
            return True
        return free >= max(used, self._above_bytes) and (is_idle or not is_early)

    def begin(self, free: int, now_s: float) -> None:
        """Record that a copy begins. If it fails, the next try waits until the free pages have doubled."""
        self._above_bytes = 2 * free
        self._pause_ends_s = now_s + COMPACT_PAUSE_S

    def end(self) -> None:
        """Record that the copy has succeeded."""
        self._above_bytes = COMPACT_ABOVE_BYTES
