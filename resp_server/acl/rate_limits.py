"""Rate limits of users: commands and bytes per second, as token buckets.

A user above its limit gets no errors, as clients would only retry. Its connections are not read until tokens are
available again, so the client is slowed down to the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

# A full bucket has tokens for so many seconds: the burst after an idle time (guess: enough for a client's start).
BURST_S = 1.0
# A connection pauses at least for this long, so that a limit costs few timers.
PAUSE_S_MIN = 0.02
# A paused connection checks again after this long at most: other connections of its user may have closed.
PAUSE_S_MAX = 1.0


@dataclass(frozen=True)
class RateLimit:
    """The limits of one user; None: no limit."""

    user: str
    commands_per_s: float | None = None
    bytes_per_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        """Parse USER=COMMANDS[,BYTES], either of which may be empty; ValueError."""
        user, equals, rates = text.rpartition("=")
        commands, comma, size = rates.partition(",")
        if not user or not equals or not (commands or size) or (comma and not size):
            raise ValueError(
                f"{text!r} is not a limit: write USER=COMMANDS, USER=COMMANDS,BYTES or USER=,BYTES, each a second"
            )
        return cls(user, _rate(commands, text), _rate(size, text))

    def shared_by(self, processes: int) -> RateLimit:
        """Return the limit of each of several processes that share this one."""

        def part(rate: float | None) -> float | None:
            return None if rate is None else rate / processes

        return RateLimit(self.user, part(self.commands_per_s), part(self.bytes_per_s))


def _rate(text: str, limit: str) -> float | None:
    if text and (not text.isascii() or not text.isdecimal() or not int(text)):
        raise ValueError(f"{text!r} in the limit {limit!r} is not a whole number above 0")
    return float(text) if text else None


class TokenBucket:
    """A token bucket. It may go below zero, as the size of a reply is known only after the request was admitted."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._tokens_max = max(1.0, per_s * BURST_S)
        self._tokens = self._tokens_max
        self._refilled_s: float | None = None

    def tokens(self, now_s: float) -> float:
        """Return the available tokens."""
        if self._refilled_s is not None:
            self._tokens = min(self._tokens_max, self._tokens + max(0.0, now_s - self._refilled_s) * self._per_s)
        self._refilled_s = now_s
        return self._tokens

    def consume(self, amount: float) -> None:
        """Remove used tokens."""
        self._tokens -= amount

    def wait_s(self, tokens: float, now_s: float) -> float:
        """Return the seconds until so many tokens are available."""
        return max(0.0, tokens - self.tokens(now_s)) / self._per_s


class RateLimiter:
    """The rate limiter of one user, shared by all its connections to this process."""

    def __init__(self, limit: RateLimit, clock_s: Callable[[], float] = monotonic) -> None:
        self.limit = limit
        self._clock_s = clock_s
        self._commands = None if limit.commands_per_s is None else TokenBucket(limit.commands_per_s)
        self._bytes = None if limit.bytes_per_s is None else TokenBucket(limit.bytes_per_s)

    def allowed_requests(self, requests_max: int) -> int:
        """Return how many requests may be processed now, up to `requests_max`."""
        now_s = self._clock_s()
        if self._bytes is not None and self._bytes.tokens(now_s) <= 0:
            return 0
        return requests_max if self._commands is None else max(0, min(requests_max, int(self._commands.tokens(now_s))))

    def pause_s(self) -> float:
        """Return for how many seconds a connection without available tokens pauses."""
        now_s = self._clock_s()
        waits = [0.0 if bucket is None else bucket.wait_s(1.0, now_s) for bucket in (self._commands, self._bytes)]
        return min(PAUSE_S_MAX, max(PAUSE_S_MIN, *waits))

    def consume(self, commands: int, size: int) -> None:
        """Count commands, and the bytes of requests and replies."""
        if self._commands is not None:
            self._commands.consume(commands)
        if self._bytes is not None:
            self._bytes.consume(size)
