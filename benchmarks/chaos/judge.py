"""What readers of the job of `job.py` may see, and what they must not: counted here, told by no clock but the caller's.

Each epoch of the job writes its own number to every key. So one answer tells the epoch that it comes from, and two keys
of one slot, asked for together, must tell the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

JOB = "chaos"
STATE = "epoch"
# Both keys of a group are in one slot. Enough groups to have some in every server's ranges.
GROUPS = 256


def key(group: int, which: str) -> bytes:
    """Return one of the two keys, `a` and `b`, of a group."""
    return f"{JOB}:{STATE}:{{{group}}}{which}".encode()


@dataclass
class Window:
    """What was seen from one moment to the next."""

    began_s: float
    reads: int = 0
    failed: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def wrongly(self) -> str:
        """Say which wrong answers there were; empty if there were none."""
        return ", ".join(f"{count} {what}" for what, count in self.wrong.items())


class Seen:
    """The newest epoch that one connection was told of."""

    def __init__(self) -> None:
        self.epoch = -1


class Judge:
    """Counts answers. Called by one thread only."""

    def __init__(self, now_s: float) -> None:
        self._answered_s = dict.fromkeys(range(GROUPS), now_s)
        self._epochs = dict.fromkeys(range(GROUPS), -1)
        self.newest = -1
        self.window = Window(now_s)

    def begin(self, now_s: float) -> Window:
        """Begin a new window; return the one before, complete."""
        for answered_s in self._answered_s.values():
            self._waited(now_s - max(answered_s, self.window.began_s))
        before, self.window = self.window, Window(now_s)
        return before

    def answered(self, group: int, values: Sequence[bytes | None], seen: Seen, now_s: float) -> None:
        """Take the values of one or more keys, read at one moment: of a slot, or of a transaction."""
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

    def failed(self, reason: str) -> None:
        """Take an error, a connection that broke, or a silence that lasted too long."""
        self.window.failed += 1
        self.window.errors[reason[:80]] += 1

    def uncommitted(self) -> None:
        """Take an answer from an epoch that the log does not have."""
        self.window.wrong["uncommitted"] += 1

    def is_at(self, epoch: int) -> bool:
        """Tell whether each key's last answer was of an epoch, or of a later one."""
        return min(self._epochs.values()) >= epoch

    def _waited(self, waited_s: float) -> None:
        self.window.longest_s = max(self.window.longest_s, waited_s)
