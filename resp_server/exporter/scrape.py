"""The values of one scrape, with bounded labels. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from resp_server.exporter.declarations import LABELS, METRICS, OTHER, Kind, Merge, Metric
from resp_server.metrics.stats import TIME_BITS, CommandStats

NS_PER_S = 1e9
# The bounds of the buckets of histograms are 2**N nanoseconds: 1 us to 17 s, each four times the one before.
BUCKET_BITS = range(10, 35, 2)

LabelValues = tuple[str, ...]


@dataclass
class Durations:
    """A histogram: the number of calls by the number of binary digits of their nanoseconds, as in `CommandStats`."""

    nanoseconds: int = 0
    took: list[int] = field(default_factory=lambda: [0] * TIME_BITS)

    @property
    def count(self) -> int:
        """The number of calls."""
        return sum(self.took)

    def buckets(self) -> list[tuple[float, int]]:
        """Return the cumulative counts of the buckets, by their upper bounds in seconds."""
        return [(2**bits / NS_PER_S, sum(self.took[: bits + 1])) for bits in BUCKET_BITS]


class Scrape:
    """Takes values, in the order of the declarations' programs; `families` has them."""

    def __init__(self) -> None:
        self._values: dict[str, dict[LabelValues, float]] = {}
        self._durations: dict[LabelValues, Durations] = {}
        self._seen: dict[tuple[str, str], set[str]] = defaultdict(set)

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add a value; one with the same labels is merged with it, as declared.

        Args:
            name: Without `sparkis_`.
        """
        metric = METRICS[f"sparkis_{name}"]
        at, values = self._labels(metric, labels), self._values.setdefault(metric.name, {})
        values[at] = _merged(metric.merge, values[at], value) if at in values else value

    def add_durations(self, group: str, stats: CommandStats) -> None:
        """Add the durations of a command's calls."""
        at = self._labels(METRICS["sparkis_command_duration_seconds"], {"group": group})
        total = self._durations.setdefault(at, Durations())
        total.nanoseconds += stats.nanoseconds
        total.took = list(map(int.__add__, total.took, stats.took))

    def value(self, name: str) -> float | None:
        """Return the value of a metric without labels; None if it was not added."""
        return self._values.get(f"sparkis_{name}", {}).get(())

    def families(self) -> list[tuple[Metric, Sequence[tuple[LabelValues, float]]]]:
        """Return the metrics that have values, without histograms, in the order of their declarations."""
        return [(metric, list(self._values[name].items())) for name, metric in METRICS.items() if name in self._values]

    def histograms(self) -> list[tuple[Metric, Sequence[tuple[LabelValues, Durations]]]]:
        """Return the histograms."""
        return [
            (metric, list(self._durations.items()))
            for metric in METRICS.values()
            if metric.kind is Kind.HISTOGRAM and self._durations
        ]

    def _labels(self, metric: Metric, labels: dict[str, str]) -> LabelValues:
        if labels.keys() != set(metric.labels):
            raise TypeError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
        bounded: dict[str, str] = {}
        for name in metric.labels:
            bounded[name] = self._bounded(name, labels[name], bounded)
        return tuple(bounded.values())

    def _bounded(self, name: str, value: str, outer: dict[str, str]) -> str:
        """Return a label's value; `other` if there are as many others as the label may have."""
        label = LABELS[name]
        seen = self._seen[name, outer.get(label.within, "")]
        if value not in seen:
            if len(seen) >= label.values_max:
                return OTHER
            seen.add(value)
        return value


def _merged(merge: Merge, one: float, other: float) -> float:
    match merge:
        case Merge.SUM:
            return one + other
        case Merge.LARGEST:
            return max(one, other)
        case Merge.SMALLEST:
            return min(one, other)
