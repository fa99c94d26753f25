"""The rows of the benchmark of all commands, and the file that has those of the last run: benchmarks/commands.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent.with_suffix(".json")


class Load(NamedTuple):
    """How requests are sent. depth: the number of requests in one write of a connection."""

    name: str
    connections: int
    depth: int


LOADS = (Load("one connection", 1, 100), Load("50 connections", 50, 16))


@dataclass(frozen=True)
class Timing:
    """The time of a request under a load, in microseconds: medians of the rounds.

    Args:
        ratio: The median of each round's ratio to redis-server, with the lowest and the highest.
        depth: Requests in one write.
        limit: The ratio that the budget allows; None: there is no budget.
        ours_cpu_us: The processor time of all processes that answer, of all rounds; None: it was not measured.
    """

    ours_us: float
    redis_us: float
    ratio: float
    low: float
    high: float
    depth: int
    limit: float | None = None
    twemproxy_us: float | None = None
    ours_cpu_us: float | None = None
    redis_cpu_us: float | None = None

    @property
    def cpu_ratio(self) -> float | None:
        """The processor time, as a multiple of redis-server's."""
        return self.ours_cpu_us / self.redis_cpu_us if self.ours_cpu_us and self.redis_cpu_us else None

    @property
    def excess(self) -> float:
        """The ratio as a multiple of what the budget allows."""
        return 0.0 if self.limit is None else self.ratio / self.limit


@dataclass(frozen=True)
class SpeedRow:
    """A request at a place, under each load of `LOADS`.

    Args:
        name: A command, with arguments if it has several rows, or a shape of requests.
        group: Redis' group of the command, or the shape.
        session: What a connection does before; empty: nothing.
        size: The number of elements.
        budget: The budget in words; empty: there is none.
        note: What is measured at redis-server in its place.
        error: Why there is no number, for example a reply that differs.
    """

    name: str
    group: str
    place: str
    session: str = ""
    size: int = 0
    budget: str = ""
    note: str = ""
    error: str = ""
    timings: Sequence[Timing] = ()

    @property
    def excess(self) -> float:
        """The larger of its loads' multiples of the budget; infinite if it failed."""
        return float("inf") if self.error else max(each.excess for each in self.timings)

    @property
    def is_within_budget(self) -> bool:
        """Whether it keeps its budget under each load."""
        return self.excess <= 1

    @property
    def title(self) -> str:
        """Return the name, a shape's with its size, and where it is measured: `--rows` chooses by it."""
        name = f"{self.name} {self.size}" if self.group == self.name else self.name
        return f"{name} ({self.place_and_session})"

    @property
    def place_and_session(self) -> str:
        """Return its place, with what its connections do before."""
        return f"{self.place}, {self.session}" if self.session else self.place


@dataclass(frozen=True)
class Run:
    """A run of the benchmark.

    Args:
        busy: The average number of processes that wanted a processor before it, for each processor.
        spread: A GET of one redis-server beside itself: the lowest and the highest ratio of a round, by load.
        took_s: Seconds.
    """

    measured_at: str
    machine: str
    rounds: int
    busy: float
    spread: Mapping[str, tuple[float, float]]
    took_s: float
    rows: Sequence[SpeedRow] = field(default_factory=list)

    @property
    def kept(self) -> str:
        """Return how many rows keep their budgets, in words."""
        rows = [row for row in self.rows if row.budget]
        return f"{sum(row.is_within_budget for row in rows)} of {len(rows):,} rows keep their budgets"


def store(run: Run, path: Path = RESULTS) -> None:
    """Write a run, with a row on each line."""
    facts = {name: value for name, value in asdict(run).items() if name != "rows"}
    rows = ",\n".join(json.dumps(_stored(row)) for row in run.rows)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(f'{{"run": {json.dumps(facts)},\n"rows": [\n{rows}\n]}}\n')
    unfinished.replace(path)


def _stored(row: SpeedRow) -> dict[str, object]:
    fields = {name: value for name, value in asdict(row).items() if value not in ("", 0)}
    return fields | {"timings": [{k: v for k, v in asdict(each).items() if v is not None} for each in row.timings]}


def load(path: Path = RESULTS) -> Run | None:
    """Read the last run; None if there was none."""
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    rows = [SpeedRow(**{**row, "timings": [Timing(**each) for each in row["timings"]]}) for row in stored["rows"]]
    return Run(**stored["run"], rows=rows)
