"""Makes a held-back generation visible to readers: the file `<job>/<generation>/visible.json`, created once.

A query with a new checkpoint reads all of its input again. Until it has caught up, its state is incomplete. So its
terms mark the generation as held back, and readers continue to see the generation before (`JobLog.visible`). The
generation's writer creates the file, or a person does with `sparkis promote`. All servers read the same file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from state_backend.log.change_log import ChangeLog, CurrentGeneration, JobLog
from state_backend.log.checked_json import with_checksum
from state_backend.log.epochs import FORMAT, Epoch
from state_backend.log.filesystems import Filesystem
from state_backend.model.clock import now_ms
from state_backend.model.errors import LogError, SparkisError
from state_backend.model.formats import WRITER
from state_backend.model.generations import first_term

DESCRIPTION = """\
Make the state of a query with a new checkpoint visible now. Otherwise it is held back until the query has caught up,
and readers see the old state. Needs no server and no Spark; servers switch once they have applied the new state."""


class HeldBack(NamedTuple):
    """A held-back generation.

    Args:
        since_ms: When the generation began.
    """

    visible: Epoch
    since_ms: int


def held_back(log: JobLog) -> HeldBack | None:
    """Return the held-back generation of a job; None if readers see the generation that is being written."""
    visible = log.visible()
    if visible is None or visible.held_back is None:
        return None
    last = log.end(visible)
    return None if last is None else HeldBack(last, since_ms(log, visible.held_back))


def since_ms(log: JobLog, generation: str) -> int:
    """Return when a generation began, in milliseconds since 1970 UTC, by the clock of its driver; 0 if unknown."""
    began = first_term(generation)
    claim = None if began is None else log.terms.claim(began)
    return 0 if claim is None else claim.since_ms


def make_visible(log: JobLog, current: CurrentGeneration, reason: str) -> bool:
    """Make a generation visible to readers; False if it was visible before."""
    content = {"format": FORMAT, **WRITER, "reason": reason, "clock_ms": now_ms()}
    return log.filesystem.create(log.promotion_path(current.generation), with_checksum(content))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument("job", metavar="JOB", help="the job's name")


def run(options: argparse.Namespace) -> int:
    """Promote; return the exit code."""
    try:
        print(promote(options.log, options.job))
    except SparkisError as error:
        print(f"sparkis promote: {error}", file=sys.stderr)
        return 1
    return 0


def promote(root: str | Path | Filesystem, job: str) -> str:
    """Make the newest state of a job visible and return one line about it; LogError if none is held back."""
    log = ChangeLog(root)
    promoted = log.job(job)
    current = promoted.current()
    if current is None:
        raise log.no_such_job(job)
    last = promoted.newest(current)
    if held_back(promoted) is None:
        raise LogError(f"job {job!r}: nothing is held back; readers see generation {current.generation}")
    if last is None:
        raise LogError(f"job {job!r}: generation {current.generation} has no epoch yet; wait for its first one")
    make_visible(promoted, current, "sparkis promote")
    return f"job {job}: readers see generation {current.generation} from now on, at epoch {last.epoch}"
