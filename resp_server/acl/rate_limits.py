"""How much a user may ask: commands and bytes a second, by buckets that fill up as time passes.

A user that is over its rate is not answered with errors, which clients would meet by asking again: its connections are
not read until there is room, so that it is slowed down to its rate and notices nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

# What a bucket holds: so much may be asked at once after a pause (guess: a client's start, and no more).
BURST_S = 1.0
# A connection rests for this long at least, so that a user's limit costs few timers.
PAUSE_S_MIN = 0.02
# A connection that rests looks again after this long at most: others of its user may have given up.
PAUSE_S_MAX = 1.0


@dataclass(frozen=True)
class RateLimit:
    """What one user may ask; None: as much as it likes."""

    user: str
    commands_per_s: float | None = None
    bytes_per_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        """Read USER=COMMANDS[,BYTES], either of which may be empty; ValueError."""
        user, equals, rates = text.rpartition("=")
        commands, comma, size = rates.partition(",")
        if not user or not equals or not (commands or size) or (comma and not size):
            raise ValueError(
                f"{text!r} is no limit: write USER=COMMANDS, USER=COMMANDS,BYTES or USER=,BYTES, each a second"
            )
        return cls(user, _rate(commands, text), _rate(size, text))

    def shared_by(self, processes: int) -> RateLimit:
        """Return the part of one of several processes."""

        def part(rate: float | None) -> float | None:
            return None if rate is None else rate / processes

        return RateLimit(self.user, part(self.commands_per_s), part(self.bytes_per_s))


def _rate(text: str, limit: str) -> float | None:
    if text and (not text.isascii() or not text.isdecimal() or not int(text)):
        raise ValueError(f"{text!r} in the limit {limit!r} is not a whole number above 0")
    return float(text) if text else None


class TokenBucket:
    """Fills at a rate, up to what it holds; may be emptied to below nothing by what was not known before."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._tokens_max = max(1.0, per_s * BURST_S)
        self._tokens = self._tokens_max
        self._refilled_s: float | None = None

    def tokens(self, now_s: float) -> float:
        """Return what is in it."""
        if self._refilled_s is not None:
            self._tokens = min(self._tokens_max, self._tokens + max(0.0, now_s - self._refilled_s) * self._per_s)
        self._refilled_s = now_s
        return self._tokens

    def consume(self, amount: float) -> None:
        """Take out what was used."""
        self._tokens -= amount

    def wait_s(self, tokens: float, now_s: float) -> float:
        """Return how long it takes until so much is in it."""
        return max(0.0, tokens - self.tokens(now_s)) / self._per_s


class RateLimiter:
    """What one user has left, over all its connections to this process."""

    def __init__(self, limit: RateLimit, clock_s: Callable[[], float] = monotonic) -> None:
        self.limit = limit
        self._clock_s = clock_s
        self._commands = None if limit.commands_per_s is None else TokenBucket(limit.commands_per_s)
        self._bytes = None if limit.bytes_per_s is None else TokenBucket(limit.bytes_per_s)

    def allowed_requests(self, requests_max: int) -> int:
        """Return how many requests may be answered now, at most so many."""
        now_s = self._clock_s()
        if self._bytes is not None and self._bytes.tokens(now_s) <= 0:
            return 0
        return requests_max if self._commands is None else max(0, min(requests_max, int(self._commands.tokens(now_s))))

    def pause_s(self) -> float:
        """Return how long a connection that has no room rests."""
        now_s = self._clock_s()
        waits = [0.0 if bucket is None else bucket.wait_s(1.0, now_s) for bucket in (self._commands, self._bytes)]
        return min(PAUSE_S_MAX, max(PAUSE_S_MIN, *waits))

    def consume(self, commands: int, size: int) -> None:
        """Count what was asked and answered."""
        if self._commands is not None:
            self._commands.consume(commands)
        if self._bytes is not None:
            self._bytes.consume(size)
