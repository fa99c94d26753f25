"""Checks the replies that readers of `job.py`'s job get, and counts wrong ones. Times are the caller's.

Each epoch of the job writes its own number, and the key, to every key. So a value tells its epoch and its key, and keys
of one slot that are read together must have one epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

JOB = "chaos"
# The value of a key, and a hash with this value in each of its fields.
STATE, PAIR = "epoch", "pair"
FIELDS = ("first", "second")
# Both keys of a group are in one slot. Enough groups to have some in every server's ranges.
GROUPS = 256


def key(group: int, member: str, state: str = STATE) -> bytes:
    """Return one of the two keys, `a` and `b`, of a group."""
    return f"{JOB}:{state}:{{{group}}}{member}".encode()


def text(epoch: int, name: bytes) -> bytes:
    """Return the value of a key at an epoch."""
    return b"%d %b" % (epoch, name.rpartition(b":")[2])


# A key that was read, and its value, or that of a field.
Found = tuple[bytes, bytes | None]


@dataclass
class Window:
    """The counts of one period."""

    began_s: float
    reads: int = 0
    failed: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    went_back: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0

    def wrong_replies(self) -> str:
        """Return the counts of wrong replies as text; empty if there are none."""
        return ", ".join(f"{count} {what}" for what, count in self.wrong.items())


class ReaderPosition:
    """The newest epoch that one connection has read. went_back_at: the number of the fault that set it back last."""

    def __init__(self) -> None:
        self.epoch = -1
        self.went_back_at = 0


class Judge:
    """Counts replies. Called by one thread only."""

    def __init__(self, now_s: float) -> None:
        self._answered_s = dict.fromkeys(range(GROUPS), now_s)
        self._epochs = dict.fromkeys(range(GROUPS), -1)
        self._steps_back = 0
        self.newest = -1
        self.window = Window(now_s)

    def begin(self, now_s: float) -> Window:
        """Begin a new window; return the last one, complete."""
        for answered_s in self._answered_s.values():
            self._waited(now_s - max(answered_s, self.window.began_s))
        before, self.window = self.window, Window(now_s)
        return before

    def allow_step_back(self) -> None:
        """Let each connection go back once from now on: the log's storage is away, and owners agree on an epoch."""
        self._steps_back += 1

    def record_reply(
        self, group: int, found: Sequence[Found], seen: ReaderPosition, now_s: float, *, is_one_epoch: bool = True
    ) -> None:
        """Record what was read together. is_one_epoch: keys of a slot, or of a transaction."""
        self.window.reads += 1
        self._waited(now_s - self._answered_s[group])
        self._answered_s[group] = now_s
        epochs = []
        for name, value in found:
            number = b"" if value is None else value.split(b" ")[0]
            if value is None:
                self.window.wrong["missing"] += 1
            elif not number.isdigit() or value != text(int(number), name):
                self.window.wrong["foreign"] += 1
            else:
                epochs.append(int(number))
        if len(epochs) < len(found):
            return
        if is_one_epoch and len(set(epochs)) > 1:
            self.window.wrong["torn"] += 1
        self._compare(min(epochs), seen)
        seen.epoch = max(seen.epoch, *epochs)
        self._epochs[group] = max(epochs)
        self.newest = max(self.newest, *epochs)

    def _compare(self, epoch: int, seen: ReaderPosition) -> None:
        if epoch >= seen.epoch:
            return
        if seen.went_back_at == self._steps_back:
            self.window.wrong["backward"] += 1
            return
        seen.went_back_at, seen.epoch = self._steps_back, epoch
        self.window.went_back += 1

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
