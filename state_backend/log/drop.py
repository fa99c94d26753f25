"""`sparkis drop`: removes a job from a log for good.

The job's last term records the drop, and is never removed. So servers can distinguish a dropped job, whose keys they
remove, from a job whose folder they cannot reach, which they continue to serve as stale. A query that starts under the
name again begins with an empty state.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from state_backend.log.change_log import ChangeLog
from state_backend.log.fencing import begin, claim, new_candidate, seal
from state_backend.log.filesystems import Filesystem
from state_backend.log.garbage_collector import sweep_job
from state_backend.log.terms import Term, TermReason
from state_backend.model.clock import now_ms
from state_backend.model.errors import SparkisError

DESCRIPTION = """\
Remove a job and all of its state from a log for good; servers stop serving it. Stop its query first. Needs no server
and no Spark."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument(
        "--force", action="store_true", help="remove the job even while a query writes it; that query fails"
    )
    parser.add_argument("job", metavar="JOB", help="the job's name")


def run(options: argparse.Namespace) -> int:
    """Drop; return the exit code."""
    try:
        print(drop(options.log, options.job, is_forced=options.force))
    except SparkisError as error:
        print(f"sparkis drop: {error}", file=sys.stderr)
        return 1
    return 0


def drop(root: str | Path | Filesystem, job: str, *, is_forced: bool = False) -> str:
    """Drop a job and return one line about it; JobInUseError if it is being written, unless `is_forced`.

    An interrupted drop leaves the job either unchanged or dropped; a second run removes the remaining files.
    """
    log = ChangeLog(root)
    job_log = log.job(job)
    if job_log.current() is None:
        if job_log.dropped() is None:
            raise log.no_such_job(job)
        sweep_job(job_log, now_ms())
        return f"job {job} was dropped already"
    claimed = claim(job_log.terms, new_candidate("", "sparkis drop"), is_forced=is_forced)
    feed_after = job_log.feed_end(seal(job_log.terms, claimed))
    begin(job_log.terms, Term(claimed.term, TermReason.DROP, claimed.writer, feed_after=feed_after), claimed)
    sweep_job(job_log, now_ms())
    return f"job {job} is dropped"
