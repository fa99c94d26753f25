"""What a client of the metrics reads."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from resp_server.exporter.exposition import text_of
from resp_server.exporter.scrape import Scrape

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def samples(scrape: Scrape) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what a client reads: by name and label values."""
    text = text_of(scrape, OPEN_METRICS).body.decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
