"""The text of a scrape, by `prometheus_client`, which is an extra: OpenMetrics, or Prometheus' older format."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from resp_server.exporter.declarations import Metric as Declared
from resp_server.exporter.scrape import Histogram, LabelValues, Scrape
from state_backend.model.errors import SparkisError

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Text(NamedTuple):
    """A text, and its media type."""

    content_type: str
    body: bytes


class MissingExtraError(SparkisError):
    """The package `prometheus_client` is not installed."""


def check_installed() -> None:
    """Raise MissingExtraError if the extra `metrics` is not installed."""
    if find_spec("prometheus_client") is None:
        raise MissingExtraError("--metrics needs prometheus_client: pip install 'sparkis[metrics]'")


def text_of(scrape: Scrape, accept: str) -> Text:
    """Return the text in the format that a request's header `Accept` prefers. Takes milliseconds: not on the loop."""
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return Text(content_type, encode(_Collected(scrape)))


class _Collected:
    """A scrape in the form that the encoders of `prometheus_client` take."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import Metric

        for declared, values in self._scrape.families():
            metric = Metric(declared.family, declared.help, declared.kind)
            for at, value in values:
                metric.add_sample(declared.name, _labels(declared, at), float(value))
            yield metric
        for declared, histograms in self._scrape.histograms():
            metric = Metric(declared.family, declared.help, declared.kind)
            for at, histogram in histograms:
                _add_histogram(metric, _labels(declared, at), histogram)
            yield metric


def _labels(declared: Declared, values: LabelValues) -> dict[str, str]:
    return dict(zip(declared.labels, values, strict=True))


def _add_histogram(metric: Metric, labels: dict[str, str], histogram: Histogram) -> None:
    for bound, count in histogram.buckets():
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": repr(bound)}, count)
    metric.add_sample(f"{metric.name}_bucket", {**labels, "le": "+Inf"}, histogram.count)
    metric.add_sample(f"{metric.name}_count", labels, histogram.count)
    metric.add_sample(f"{metric.name}_sum", labels, histogram.total)
