"""`sparkis compact`: writes a snapshot of each job of a log, without a server, and removes the files that it covers."""

from __future__ import annotations

import argparse
import math
import sys

from state_backend.apply.compactor import compact
from state_backend.apply.temporary_store import temporary_store
from state_backend.log.change_log import ChangeLog
from state_backend.log.garbage_collector import RETENTION_MS
from state_backend.model.clock import MS_PER_MINUTE, now_ms
from state_backend.model.errors import LogError, SparkisError

DESCRIPTION = (
    "Write a snapshot of each job of a log, and remove the files that it supersedes. Needs no server and no Spark."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument("--job", action="append", metavar="NAME", help="only this job; may be repeated")
    parser.add_argument(
        "--retention",
        type=_minutes,
        default=RETENTION_MS / MS_PER_MINUTE,
        metavar="MINUTES",
        help="how far back the log can be read, also by readers that are behind (default %(default)g)",
    )


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < math.inf:  # a time in the future would sweep files that are being written
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes, 0 or more")
    return minutes


def run(options: argparse.Namespace) -> int:
    """Compact; return the exit code."""
    try:
        jobs = ChangeLog(options.log).jobs()
        unknown = sorted(set(options.job or ()) - set(jobs))
        if unknown or not jobs:
            found = ", ".join(jobs) or "none"
            raise LogError(f"the log {options.log} has no job {', '.join(unknown) or 'at all'}; jobs: {found}")
        for job in options.job or jobs:
            print(compact_log(options.log, job, int(options.retention * MS_PER_MINUTE)))
    except SparkisError as error:
        print(f"sparkis compact: {error}", file=sys.stderr)
        return 1
    return 0


def compact_log(root: str, job: str, retention_ms: int) -> str:
    """Compact one job's log and return one line about it.

    The state is built in a temporary store on this machine's disk, from the newest snapshot on.
    """
    with temporary_store(ChangeLog(root), job) as store:
        if store is None:
            return f"job {job}: no epoch yet, nothing to do"
        with store.snapshot(now_ms()) as snapshot:
            return compact(ChangeLog(root).job(job), snapshot, retention_ms, now_ms())
