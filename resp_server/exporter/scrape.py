"""The values of one scrape, with bounded labels. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from resp_server.exporter.declarations import LABELS, METRICS, OTHER, Merge, Metric
from resp_server.metrics.stats import TIME_BITS, CommandStats

NS_PER_S = 1e9
# The bounds of the durations of commands are 2**N nanoseconds: 1 us to 17 s, each four times the one before.
BUCKET_BITS = range(10, 35, 2)

LabelValues = tuple[str, ...]


@dataclass
class Histogram:
    """The number of values in each bucket, by the buckets' upper bounds, and the sum of the values.

    Args:
        counts: One more than bounds: the last bucket has the values above all bounds.
    """

    bounds: tuple[float, ...]
    counts: Sequence[int]
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[float, int]]:
        """Return the cumulative counts of the buckets, by their upper bounds."""
        return list(zip(self.bounds, accumulate(self.counts), strict=False))

    def joined(self, other: Histogram) -> Histogram:
        """Return the histogram of the values of both, which have the same bounds."""
        counts = list(map(int.__add__, self.counts, other.counts))
        return Histogram(self.bounds, counts, self.total + other.total)


def durations_of(stats: CommandStats) -> Histogram:
    """Return the histogram of a command's calls, in seconds."""
    edges = [0, *(bits + 1 for bits in BUCKET_BITS), TIME_BITS]
    counts = [sum(stats.took[first:end]) for first, end in pairwise(edges)]
    return Histogram(tuple(2**bits / NS_PER_S for bits in BUCKET_BITS), counts, stats.nanoseconds / NS_PER_S)


class Scrape:
    """Takes values, in the order of the declarations' programs; `families` has them."""

    def __init__(self) -> None:
        self._values: dict[str, dict[LabelValues, float]] = {}
        self._histograms: dict[str, dict[LabelValues, Histogram]] = {}
        self._seen: dict[tuple[str, str], set[str]] = defaultdict(set)

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add a value; one with the same labels is merged with it, as declared.

        Args:
            name: Without `sparkis_`.
        """
        metric = METRICS[f"sparkis_{name}"]
        at, values = self._labels(metric, labels), self._values.setdefault(metric.name, {})
        values[at] = _merged(metric.merge, values[at], value) if at in values else value

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add a histogram; it is joined with one that has the same labels.

        Args:
            name: Without `sparkis_`.
        """
        metric = METRICS[f"sparkis_{name}"]
        at, values = self._labels(metric, labels), self._histograms.setdefault(metric.name, {})
        values[at] = values[at].joined(histogram) if at in values else histogram

    def value(self, name: str) -> float | None:
        """Return the value of a metric without labels; None if it was not added."""
        return self._values.get(f"sparkis_{name}", {}).get(())

    def families(self) -> list[tuple[Metric, Sequence[tuple[LabelValues, float]]]]:
        """Return the metrics that have values, without histograms, in the order of their declarations."""
        return [(metric, list(self._values[name].items())) for name, metric in METRICS.items() if name in self._values]

    def histograms(self) -> list[tuple[Metric, Sequence[tuple[LabelValues, Histogram]]]]:
        """Return the histograms, in the order of their declarations."""
        found = self._histograms
        return [(metric, list(found[name].items())) for name, metric in METRICS.items() if name in found]

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
