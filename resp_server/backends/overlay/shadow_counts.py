"""The results of a rule's comparisons: counts, how far behind each backend was, and samples of differences. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from resp_server.backends.routing.shadow_compare import Outcome
from resp_server.protocol.replies import Reply

SAMPLES_MAX = 8
BACKENDS = ("state", "upstream")


class Lag(NamedTuple):
    """How far a backend was behind the other one.

    Args:
        epochs: That the job committed in that time; None: unknown.
    """

    backend: str
    ms: int
    epochs: int | None


@dataclass
class Difference:
    """A difference.

    Args:
        epoch: The epoch of the key's job in the state's reply; None: unknown.
        upstream, state: The values, or what differs of them.
        taken_s: Monotonic.
        lag: How far the backend was behind that caught up later; None: none has caught up yet.
    """

    outcome: Outcome
    key: bytes
    command: str
    upstream: str
    state: str
    epoch: int | None
    taken_s: float
    lag: Lag | None = None

    def row(self, now_s: float) -> Reply:
        """Return a map for STATE SHADOW.

        Args:
            now_s: The time by the monotonic clock.
        """
        lag = self.lag
        return {
            b"outcome": self.outcome.value.encode(),
            b"key": self.key,
            b"command": self.command.encode(),
            b"upstream": self.upstream.encode(),
            b"state": self.state.encode(),
            b"epoch": self.epoch,
            b"age_ms": int((now_s - self.taken_s) * 1000),
            b"behind": None if lag is None else lag.backend.encode(),
            b"behind_ms": None if lag is None else lag.ms,
            b"behind_epochs": None if lag is None else lag.epochs,
        }


@dataclass
class BackendLags:
    """How often, and how far, a backend was behind."""

    count: int = 0
    ms_sum: int = 0
    ms_max: int = 0
    epochs_max: int = 0

    def add(self, lag: Lag) -> None:
        """Count a lag."""
        self.count += 1
        self.ms_sum += lag.ms
        self.ms_max = max(self.ms_max, lag.ms)
        self.epochs_max = max(self.epochs_max, lag.epochs or 0)

    def fields(self, backend: str) -> Mapping[str, int]:
        """Return the numbers by name."""
        return {
            f"{backend}_was_behind": self.count,
            f"{backend}_behind_ms": self.ms_sum // max(self.count, 1),
            f"{backend}_behind_ms_max": self.ms_max,
            f"{backend}_behind_epochs_max": self.epochs_max,
        }


@dataclass
class ShadowCounts:
    """The comparisons of one rule.

    Args:
        lags: How far each backend was behind, where it was.
        skipped: Reads that were not compared.
    """

    compared: int = 0
    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    lags: dict[str, BackendLags] = field(default_factory=lambda: {backend: BackendLags() for backend in BACKENDS})
    skipped: int = 0
    failed: int = 0
    samples: deque[Difference] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def count(self, outcome: Outcome) -> None:
        """Count a comparison."""
        self.compared += 1
        self.outcomes[outcome] += 1

    def fields(self) -> Mapping[str, int]:
        """Return the counts by name."""
        return {
            "compared": self.compared,
            **{outcome.value: count for outcome, count in self.outcomes.items()},
            **{name: number for backend, lags in self.lags.items() for name, number in lags.fields(backend).items()},
            "skipped": self.skipped,
            "failed": self.failed,
        }
