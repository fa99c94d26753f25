"""The listener of metrics and health, and the check of its options."""

from __future__ import annotations

import argparse

from resp_server.exporter.exposition import check_installed
from resp_server.exporter.listener import MetricsListener
from resp_server.exporter.sources import Source
from resp_server.programs.command_line import Mistakes


def check_metrics(options: argparse.Namespace) -> None:
    """Raise CommandLineError if the options make no sense here."""
    mistakes = Mistakes()
    if options.metrics is not None:
        with mistakes.noted():
            check_installed()
    elif ready_lag_max_of(options) is not None:
        mistakes.add("--ready-lag-max is for /readyz, so it needs --metrics; give both, or neither")
    mistakes.raise_if_any()


def listener_of(options: argparse.Namespace, source: Source) -> MetricsListener:
    """Return the listener that the options describe; it is to be started first, and stopped last."""
    return MetricsListener(source, options.metrics, ready_lag_max_of(options))


def ready_lag_max_of(options: argparse.Namespace) -> float | None:
    """Return the lag with which a program is not ready; a registry has no jobs, and so no lag."""
    return getattr(options, "ready_lag_max", None)
