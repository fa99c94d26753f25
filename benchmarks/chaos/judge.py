"""Checks the replies that readers of `job.py`'s job get, and counts wrong ones. Times are the caller's.

Each epoch of the job writes its own number to every key. So a value is the number of its epoch, and two keys of one
slot that are read together must have the same value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

JOB = "chaos"
STATE = "epoch"
# Both keys of a group are in one slot. Enough groups to have some in every server's ranges.
GROUPS = 256


def key(group: int, member: str) -> bytes:
    """Return one of the two keys, `a` and `b`, of a group."""
    return f"{JOB}:{STATE}:{{{group}}}{member}".encode()


@dataclass
class Window:
    """The counts of one period."""

    began_s: float
    reads: int = 0
    failed: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def wrong_replies(self) -> str:
        """Return the counts of wrong replies as text; empty if there are none."""
        return ", ".join(f"{count} {what}" for what, count in self.wrong.items())


class ReaderPosition:
    """The newest epoch that one connection has read."""

    def __init__(self) -> None:
        self.epoch = -1


class Judge:
    """Counts replies. Called by one thread only."""

    def __init__(self, now_s: float) -> None:
        self._answered_s = dict.fromkeys(range(GROUPS), now_s)
        self._epochs = dict.fromkeys(range(GROUPS), -1)
        self.newest = -1
        self.window = Window(now_s)

    def begin(self, now_s: float) -> Window:
        """Begin a new window; return the last one, complete."""
        for answered_s in self._answered_s.values():
            self._waited(now_s - max(answered_s, self.window.began_s))
        before, self.window = self.window, Window(now_s)
        return before

    def record_reply(self, group: int, values: Sequence[bytes | None], seen: ReaderPosition, now_s: float) -> None:
        """Record the values of keys that were read together: keys of a slot, or of a transaction."""
        self.window.reads += 1
        self._waited(now_s - self._answered_s[group])
        self._answered_s[group] = now_s
        if None in values:
            self.window.wrong["missing"] += 1
            return
        epochs = [int(value) for value in values if value is not None]
        if len(set(epochs)) > 1:
            self.window.wrong["torn"] += 1
        if min(epochs) < seen.epoch:
            self.window.wrong["backward"] += 1
        seen.epoch = max(seen.epoch, *epochs)
        self._epochs[group] = max(epochs)
        self.newest = max(self.newest, *epochs)

    def record_failure(self, reason: str) -> None:
        """Record an error, a broken connection or a timeout."""
        self.window.failed += 1
        self.window.errors[reason[:80]] += 1

    def record_uncommitted(self) -> None:
        """Record a reply from an epoch that the log does not have."""
        self.window.wrong["uncommitted"] += 1

    def is_at(self, epoch: int) -> bool:
        """Return whether each key was last read at this epoch or a later one."""
        return min(self._epochs.values()) >= epoch

    def _waited(self, waited_s: float) -> None:
        self.window.longest_s = max(self.window.longest_s, waited_s)
