"""The options of metrics and health, which all servers have, and their listener."""

from __future__ import annotations

import argparse

from resp_server.exporter.exposition import check_installed
from resp_server.exporter.listener import MetricsListener
from resp_server.exporter.sources import Source
from resp_server.programs.command_line import Mistakes, http_address, seconds


def add_metrics_options(parser: argparse.ArgumentParser, *, has_jobs: bool = True) -> None:
    """Add the options to a program. has_jobs: it has jobs, which may lag."""
    parser.add_argument(
        "--metrics",
        type=http_address,
        metavar="[HOST:]PORT",
        help="answer /metrics, /livez and /readyz by HTTP (default: do not; the default HOST is loopback); needs "
        "sparkis[metrics]",
    )
    if not has_jobs:
        parser.set_defaults(ready_lag_max=None)
        return
    parser.add_argument(
        "--ready-lag-max",
        type=seconds,
        metavar="SECONDS",
        help="with --metrics: /readyz says no if a job's clients read an epoch that is older than the committed one by "
        "more than this (default: any lag will do)",
    )


def check_metrics(options: argparse.Namespace) -> None:
    """Raise CommandLineError if the options make no sense here."""
    mistakes = Mistakes()
    if options.metrics is not None:
        with mistakes.noted():
            check_installed()
    elif options.ready_lag_max is not None:
        mistakes.add("--ready-lag-max is for /readyz, so it needs --metrics; give both, or neither")
    mistakes.raise_if_any()


def listener_of(options: argparse.Namespace, source: Source) -> MetricsListener:
    """Return the listener that the options describe; it is to be started first, and stopped last."""
    return MetricsListener(source, options.metrics, options.ready_lag_max)
