"""The place of an epoch in its job's change feed, as the epoch's file has it (see `history.feed`).

The entries of an epoch have ids of one millisecond, `feed_ms`, numbered from 1. Ids grow for ever: over restarts of the
query, new generations, rewinds and clocks that went back. So a term has the id of the last entry before it, because
the generation that listed that entry may be removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class FeedId(NamedTuple):
    """The id of an entry: milliseconds since 1970 UTC, and its number among those of its epoch. Shown as `ms-n`."""

    ms: int
    n: int

    def __str__(self) -> str:
        return f"{self.ms}-{self.n}"


NO_ENTRY = FeedId(0, 0)


def is_listed(state: str) -> bool:
    """Return whether the feed has entries of a state; it has none of sparkis' own, such as `_progress`."""
    return not state.startswith("_")


@dataclass(frozen=True)
class FeedMark:
    """What an epoch's file says of its entries. Epochs of older versions have none, and are in no feed.

    Args:
        after: The last entry before this epoch, in any generation; it may no longer be listed.
        entries: The number of entries of this epoch.
        total: The number of entries of its generation's epochs up to this one.
        reset: The reason (`terms.TermReason`) of the generation that this epoch begins, if the job had another before.
    """

    feed_ms: int
    after: FeedId
    entries: int
    total: int
    reset: str | None = None

    @classmethod
    def of(cls, clock_ms: int, after: FeedId, entries: int, total: int, reset: str | None) -> FeedMark:
        """Make the mark of the next epoch: its milliseconds are its clock's, or more if ids are ahead of that."""
        return cls(max(clock_ms, after.ms + 1), after, entries, total, reset)

    @property
    def end(self) -> FeedId:
        """The last entry up to this epoch's end."""
        return FeedId(self.feed_ms, self.entries) if self.entries else self.after

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the epoch's file."""
        content: dict[str, Any] = {
            "feed_ms": self.feed_ms,
            "feed_after": list(self.after),
            "feed_entries": self.entries,
            "feed_total": self.total,
        }
        return content if self.reset is None else content | {"feed_reset": self.reset}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> FeedMark | None:
        """Read the fields of an epoch's file; None if it has none."""
        if "feed_ms" not in stored:
            return None
        after = FeedId(*stored["feed_after"])
        return cls(stored["feed_ms"], after, stored["feed_entries"], stored["feed_total"], stored.get("feed_reset"))
