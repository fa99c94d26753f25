"""The results of benchmarks: rows, merged by name into results.json; the page and plots are made of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Literal

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Row:
    """One line of the results.

    part: the part of the benchmark that yields the row. ratio: ours / peer, the median over rounds, with its lowest and
    highest; without a peer, low and high are those of `ours`. budget: a limit of the ratio, or without a peer of
    `ours`; `better` says whether it is a minimum or a maximum. series and x: the row's point on a curve.
    """

    name: str
    part: str
    ours: float
    unit: str
    better: Literal["more", "less"]
    peer: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    budget: float | None = None
    rounds: int = 1
    ours_cpu_us: float | None = None
    peer_cpu_us: float | None = None
    peer_name: str = ""
    note: str = ""
    series: str = ""
    x: float | None = None
    measured_at: str = ""
    machine: str = ""

    @property
    def judged_value(self) -> float:
        """The number that the budget limits: the ratio, or `ours` without a peer."""
        return self.ours if self.ratio is None else self.ratio

    @property
    def is_within_budget(self) -> bool | None:
        """Return whether the row keeps its budget; None if it has none."""
        if self.budget is None:
            return None
        return self.judged_value >= self.budget if self.better == "more" else self.judged_value <= self.budget


def rounded(number: float) -> float:
    """Return a number rounded to four significant digits."""
    return float(f"{number:.4g}")


def compared_row(
    name: str,
    part: str,
    pairs: Sequence[tuple[float, float]],
    *,
    unit: str,
    better: Literal["more", "less"],
    budget: float | None = None,
    peer_name: str = "redis-server",
    ours_cpu_us: float | None = None,
    peer_cpu_us: float | None = None,
    note: str = "",
    series: str = "",
    x: float | None = None,
) -> Row:
    """Make a row from rounds; each round is a pair of numbers, ours and the peer's."""
    ratios = [ours / peer for ours, peer in pairs]
    row = Row(
        name=name,
        part=part,
        ours=rounded(median(ours for ours, _ in pairs)),
        peer=rounded(median(peer for _, peer in pairs)),
        ratio=rounded(median(ratios)),
        low=rounded(min(ratios)),
        high=rounded(max(ratios)),
        unit=unit,
        better=better,
        budget=budget,
        peer_name=peer_name,
        rounds=len(pairs),
        ours_cpu_us=None if ours_cpu_us is None else rounded(ours_cpu_us),
        peer_cpu_us=None if peer_cpu_us is None else rounded(peer_cpu_us),
        note=note,
        series=series,
        x=x,
    )
    return _stamped(row)


def single_row(
    name: str,
    part: str,
    measured: Sequence[float],
    *,
    unit: str,
    better: Literal["more", "less"] = "less",
    budget: float | None = None,
    note: str = "",
    series: str = "",
    x: float | None = None,
) -> Row:
    """Make a row from rounds without a peer."""
    row = Row(
        name=name,
        part=part,
        ours=rounded(median(measured)),
        low=rounded(min(measured)),
        high=rounded(max(measured)),
        unit=unit,
        better=better,
        budget=budget,
        rounds=len(measured),
        note=note,
        series=series,
        x=x,
    )
    return _stamped(row)


def _stamped(row: Row) -> Row:
    return replace(row, measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", machine=machine())


@cache
def machine() -> str:
    """Return a description of the machine: cores, memory, versions."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    redis = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    redis_version = next(word[2:] for word in redis.split() if word.startswith("v="))
    return (
        f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, redis-server {redis_version}, Spark {version('pyspark')}, "
        f"LMDB {version('lmdb')} (Python binding), pyarrow {version('pyarrow')}"
    )


def write_section(page: Path, name: str, text: str) -> None:
    """Write the part of a page between the comments that begin and end a section of this name."""
    begin, end = f"<!-- results of {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}{text}{end}{after}")


def load(path: Path = RESULTS) -> list[Row]:
    """Read all rows."""
    return [Row(**stored) for stored in json.loads(path.read_text())] if path.exists() else []


def merge(rows: Iterable[Row], path: Path = RESULTS) -> list[Row]:
    """Replace rows by name, and add new ones after the last of their part; write and return all."""
    merged = load(path)
    for row in rows:
        at = next((i for i, each in enumerate(merged) if each.name == row.name), None)
        if at is not None:
            merged[at] = row
            continue
        after = max((i + 1 for i, each in enumerate(merged) if each.part == row.part), default=len(merged))
        merged.insert(after, row)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps([stored(row) for row in merged], indent=1) + "\n")
    unfinished.replace(path)
    return merged


def stored(row: Row) -> dict[str, object]:
    """Return a row as JSON for the file, without empty fields."""
    always_stored = ("name", "part", "ours", "peer", "ratio", "unit")
    return {name: value for name, value in asdict(row).items() if name in always_stored or value not in (None, "")}
