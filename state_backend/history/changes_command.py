"""`sparkis changes JOB --log LOG`: the changes of a job in their order, from a log."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

from state_backend.history.feed import LAST_ID, Entry, Feed, Span
from state_backend.history.whole_values import shown_key
from state_backend.log.change_log import ChangeLog, JobLog
from state_backend.log.feed_mark import NO_ENTRY, FeedId
from state_backend.log.time_travel import AS_OF_HELP, AsOf, moment_of
from state_backend.model.clock import iso_text
from state_backend.model.errors import LogError, SparkisError

DESCRIPTION = """\
Show every change of a job in order, as far back as its log reaches. Needs no server and no Spark."""
# The interval of looking for new epochs with --follow.
FOLLOW_S = 0.2
# Longer values are cut on a terminal; --json prints them in full.
SHOWN_CHARACTERS_MAX = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument(
        "--from", dest="start", type=_as_of, metavar="TIME", help=f"the first epoch: {AS_OF_HELP} (default: the oldest)"
    )
    parser.add_argument("--state", metavar="STATE", help="only the changes of this state")
    parser.add_argument("--follow", action="store_true", help="wait for new changes, until interrupted")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")


def _as_of(text: str) -> AsOf:
    try:
        return AsOf.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Print the changes; return the exit code."""
    try:
        log = ChangeLog(options.log)
        job = log.job(options.job)
        start = _start(log, job, options.start, options.state)
        for entry in changes(job, start, options.state, follows=options.follow):
            print(_json_line(entry) if options.json else _line(entry), flush=options.follow)
    except SparkisError as error:
        print(f"sparkis changes: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def changes(job: JobLog, start: FeedId, state: str | None, *, follows: bool) -> Iterator[Entry]:
    """Iterate over the entries of a job's feed from an id on; `follows`: wait for new ones, for ever."""
    feed: Feed | None = None
    generation = ""
    while True:
        current = job.visible()
        newest = None if current is None else job.end(current)
        if current is not None and newest is not None:
            if feed is None or generation != current.generation:
                feed, generation = Feed(job, current), current.generation
            for entry in feed.entries(Span(start, LAST_ID, newest.epoch, state)):
                yield entry
                start = FeedId(entry.id.ms, entry.id.n + 1)
        if not follows:
            return
        time.sleep(FOLLOW_S)


def _start(log: ChangeLog, job: JobLog, as_of: AsOf | None, state: str | None) -> FeedId:
    """Return the first id to show; LogError if there is no such job, state or epoch."""
    current = job.visible()
    if current is None:
        raise log.no_such_job(job.job)
    names = [each.name for each in job.description(current.generation).states]
    if state not in (None, *names):
        raise LogError(f"job {job.job!r} has no state {state!r}; states: {', '.join(names)}")
    if as_of is None:
        return NO_ENTRY
    if as_of.at_ms is not None:
        return FeedId(as_of.at_ms, 0)
    epoch = job.epoch(current, moment_of(job, as_of).epoch)
    if epoch is None or epoch.feed is None:
        raise LogError(
            f"job {job.job!r}: the log has no changes of epoch {as_of.epoch} to list, as an older version wrote it"
        )
    return FeedId(epoch.feed.feed_ms, 0)


def _named(entry: Entry) -> Iterator[tuple[str, bytes]]:
    for name, value in zip(entry.fields[::2], entry.fields[1::2], strict=True):
        yield name.decode(errors="surrogateescape"), value


def _json_line(entry: Entry) -> str:
    """Return an entry as a JSON object; a field of bytes that are no text has `_hex` after its name."""
    found: dict[str, object] = {"id": str(entry.id)}
    for name, value in _named(entry):
        try:
            found[name] = value.decode()
        except UnicodeDecodeError:
            found[f"{name}_hex"] = value.hex()
    return json.dumps(found)


def _line(entry: Entry) -> str:
    fields = dict(_named(entry))
    op, epoch = fields.pop("op").decode(), fields.pop("epoch").decode()
    what = shown_key(fields.pop("key", fields.pop("state", b"")))
    fields.pop("state", None)
    text = " ".join(f"{name}={shown_key(value)}" for name, value in fields.items())
    if len(text) > SHOWN_CHARACTERS_MAX:
        text = f"{text[:SHOWN_CHARACTERS_MAX]}..."
    return f"{iso_text(entry.id.ms)}  epoch {epoch:<8}  {op:<7} {what}  {text}".rstrip()
