"""`sparkis history KEY --log LOG`: the values that a key had, with their epochs and times, from a log."""

from __future__ import annotations

import argparse
import json
import re
import sys

from state_backend.history.key_history import Version, history_of
from state_backend.history.limits import COUNT_DEFAULT, COUNT_MAX
from state_backend.history.whole_values import value_in_json
from state_backend.log.change_log import ChangeLog
from state_backend.model.clock import iso_text
from state_backend.model.errors import LogError, SparkisError

DESCRIPTION = (
    "Show the values that a key had, the newest first, as far back as the log reaches. Needs no server and no Spark."
)
# Longer values are cut on a terminal; --json prints them in full.
SHOWN_CHARACTERS_MAX = 100


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("key", metavar="KEY", help="the Redis key")
    parser.add_argument("--log", required=True, metavar="PATH", help="a log root")
    parser.add_argument(
        "--count", type=_count, default=COUNT_DEFAULT, metavar="N", help="versions (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= COUNT_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of versions from 1 to {COUNT_MAX}")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Print the history; return the exit code: 1 if the key never existed."""
    try:
        key = options.key.encode("utf-8", "surrogateescape")
        log = ChangeLog(options.log)
        job = job_of(log, key)
        found = history_of(log.job(job), key, options.count)
    except SparkisError as error:
        print(f"sparkis history: {error}", file=sys.stderr)
        return 1
    if not found:
        print(f"sparkis history: job {job} had no key {options.key!r}, as far back as its log reaches", file=sys.stderr)
        return 1
    for version in found:
        print(_json_line(version) if options.json else _line(version))
    return 0


def job_of(log: ChangeLog, key: bytes) -> str:
    """Return the job whose key formats match a key; LogError if there is none."""
    jobs = log.jobs()
    for name in jobs:
        current = log.job(name).visible()
        for state in () if current is None else log.job(name).description(current.generation).states:
            if re.match(state.format_for(name).pattern(), key, re.DOTALL):
                return name
    raise LogError(
        f"no state of the log {log.filesystem.root} makes keys like {key.decode(errors='replace')!r}; jobs: "
        f"{', '.join(jobs) or 'none'}"
    )


def _json_line(version: Version) -> str:
    return json.dumps(
        {
            "epoch": version.epoch,
            "committed_at": iso_text(version.clock_ms),
            "kind": version.kind,
            **value_in_json(version.value),
            "is_oldest": version.is_oldest,
        }
    )


def _line(version: Version) -> str:
    made = value_in_json(version.value)
    text = f"hex {json.dumps(made['value_hex'])}" if "value_hex" in made else json.dumps(made["value"])
    text = "(no key)" if version.value is None else text
    if len(text) > SHOWN_CHARACTERS_MAX:
        text = f"{text[:SHOWN_CHARACTERS_MAX]}..."
    since = "or before " if version.is_oldest else ""
    return f"{iso_text(version.clock_ms)}  epoch {version.epoch:<8}  {since}{text}"
