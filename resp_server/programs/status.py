"""`sparkis status`: the jobs of a server with their keys, epochs, rates and lag, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from resp_server.net.children import PASSWORD_VARIABLE
from resp_server.net.client import Client, ErrorReplyError, check_loaded, is_loading
from resp_server.net.tls import files_of
from resp_server.programs.stop import running_server
from resp_server.settings.option_values import whole_number
from resp_server.settings.setting import add_rows, rows_of
from resp_server.settings.tls import Tls
from state_backend.model.errors import SparkisError

DEFAULT_URL = "redis://127.0.0.1:7379"
DESCRIPTION = "List the jobs of a running server: keys, epoch, lag, age and rates, one line per job."
UNKNOWN = "-"
# Columns that the table has only if the fact is known of a job.
SOURCE_LAG, RECORD_DELAY = OPTIONAL_COLUMNS = ("SOURCE LAG", "RECORD DELAY")
JOB_COLUMNS = (
    *("JOB", "STATES", "KEYS", "EPOCH", "LAG", SOURCE_LAG, RECORD_DELAY),
    *("AGE", "EPOCHS/MIN", "CHANGES/MIN", "CONDITION"),
)
STATE_COLUMNS = ("JOB", "STATE", "KIND", "KEYS", "BYTES")
WATCH_S = 2
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    server = parser.add_mutually_exclusive_group()
    server.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="redis[s]://[[user]:password@]host[:port] (default %(default)s); the password may be in "
        f"{PASSWORD_VARIABLE}",
    )
    server.add_argument(
        "--log",
        dest="driver_log",
        metavar="PATH",
        help="ask the server that a driver on this machine started for this log",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="list the states of each job, too")
    parser.add_argument(
        "--watch",
        type=whole_number(1, 86_400, "a number of seconds"),
        nargs="?",
        const=WATCH_S,
        metavar="SECONDS",
        help=f"print again after some seconds ({WATCH_S} if none are given), until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_rows(parser, rows_of(Tls), "status")


def run(options: argparse.Namespace) -> int:
    """Print the status, once or until Ctrl-C; return the exit code."""
    if options.driver_log is not None:
        try:
            options.url = _url_of(options.driver_log)
        except (SparkisError, OSError) as error:
            print(f"sparkis status: {error}", file=sys.stderr)
            return 1
    try:
        code = _print_once(options)
        while options.watch is not None:
            time.sleep(options.watch)
            code = _print_once(options)
    except KeyboardInterrupt:
        return 0
    return code


def _url_of(log: str) -> str:
    """Return the address of the server that a driver on this machine started for a log; SparkisError if none runs."""
    record = running_server(log)
    return f"{'redis' if record.tls is None else 'rediss'}://127.0.0.1:{record.port}"


def _print_once(options: argparse.Namespace) -> int:
    try:
        password = os.environ.get(PASSWORD_VARIABLE)
        with Client.from_url(options.url, tls=files_of(options), other_password=password) as client:
            loading, jobs, version = _loading_text(client), read(client), version_of(client)
    except SparkisError as error:
        hint = _servers_hint(str(error)) or (
            " (--url names another address, --log the log of a job on this machine)"
            if options.url == DEFAULT_URL
            else ""
        )
        print(f"sparkis status: {error}{hint}", file=sys.stderr)
        return 1
    if options.watch is not None and sys.stdout.isatty():
        print(end=CLEAR_SCREEN)
    if options.json:
        print(json.dumps(jobs, indent=1), flush=True)
    elif not jobs and loading:
        print(f"no jobs at {options.url} yet: {loading}", file=sys.stderr)
    elif not jobs:
        print(f"no jobs at {options.url}: nothing has been published to its logs yet", file=sys.stderr)
    else:
        tables = [table(_job_rows(jobs))]
        if options.verbose:
            tables.append(table([STATE_COLUMNS, *(row for job in jobs for row in _state_rows(job))]))
        print("\n\n".join([*tables, *filter(None, (loading, version))]), flush=True)
    return 0


def _servers_hint(error: str) -> str:
    """Return what to do after an error of a proxy that reaches no state server; empty for other errors."""
    if not any(words in error for words in ("cannot be reached", "CLUSTERDOWN", "did not reply to STATE")):
        return ""
    return (
        ". If this is a proxy, it runs, but a state server behind it is away: start that server, or check that the "
        "proxy's host reaches its address. sparkis status --url of another state server shows that server's jobs"
    )


def read(client: Client) -> list[dict[str, Any]]:
    """Return a map per job: the fields of STATE JOBS and STATE LAG, and the states under `states`."""
    client.call("HELLO", "3")
    lags = {lag["job"]: lag for lag in client.call("STATE", "LAG")}
    jobs = client.call("STATE", "JOBS")
    return [
        job | lags.get(job["name"], {}) | {"states": client.call("STATE", "LIST", job["name"])}
        for job in sorted(jobs, key=lambda job: str(job["name"]))
    ]


def _loading_text(client: Client) -> str:
    """Return a line if the server replies LOADING to commands about keys; empty if it does not."""
    try:
        check_loaded(client)
    except ErrorReplyError as error:
        if is_loading(error):
            return f"loading: commands about keys fail until all jobs are readable ({error})"
    return ""


def version_of(client: Client) -> str:
    """Return a line about the server's version and core, compiled or python.

    The version is in HELLO, also where the ACL forbids INFO, or an upstream answers it; then there is no core.
    """
    version = client.call("HELLO", "3")["sparkis_version"]
    try:
        info = client.call("INFO", "server")
    except SparkisError:
        info = ""
    core = re.search(r"^sparkis_core:(\S+)", info if isinstance(info, str) else info.decode(), re.MULTILINE)
    return f"sparkis {version}" + (f", {core[1]} core" if core else "")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _job_rows(jobs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the jobs' table, without optional columns in which nothing is known."""
    rows = [JOB_COLUMNS, *map(_job_row, jobs)]
    columns = zip(*rows, strict=True)
    shown = (column for column in columns if column[0] not in OPTIONAL_COLUMNS or set(column[1:]) - {UNKNOWN})
    return list(zip(*shown, strict=True))


def _job_row(job: dict[str, Any]) -> tuple[str, ...]:
    facts = [
        "stale" if job["stale"] else "live",
        "incomplete" if job["incomplete"] else "",
        "" if job["held_back_epoch"] is None else f"epoch {job['held_back_epoch']} of a new generation is held back",
        f"{job['skipped_rows']:,} rows skipped" if job["skipped_rows"] else "",
        _before_commit(job),
        job["error"],
    ]
    return (
        job["name"],
        str(len(job["states"])),
        _number(job["keys"]),
        _number(job["applied"]),
        UNKNOWN if job["lag_ms"] is None else f"{job['lag_epochs']} epochs, {job['lag_ms']} ms",
        _source_lag(job),
        _record_delay(job),
        UNKNOWN if job["age_ms"] is None else _duration(job["age_ms"] / 1000),
        _number(job["epochs_per_minute"]),
        _number(job["changes_per_minute"]),
        ", ".join(filter(None, facts)),
    )


def _source_lag(job: dict[str, Any]) -> str:
    """Return how many records the source is ahead, and how long ago it was asked; `UNKNOWN` if nobody knows."""
    if job.get("source_lag_records") is None:  # also a server of an older version
        return UNKNOWN
    return f"{job['source_lag_records']:,} records, {_duration(job['source_lag_age_ms'] / 1000)} ago"


def _record_delay(job: dict[str, Any]) -> str:
    """Return the median and 99th percentile of the times from records to readers; `UNKNOWN` if nobody knows."""
    if job.get("record_delay_p50_ms") is None:  # also a server of an older version
        return UNKNOWN
    return f"p50 {job['record_delay_p50_ms']:,} ms, p99 {job['record_delay_p99_ms']:,} ms"


def _before_commit(job: dict[str, Any]) -> str:
    """Return how many values are not committed yet, beside the committed keys, and their age; empty without any."""
    if not job.get("fresh_keys"):  # also a server of an older version
        return ""
    age = "" if job["fresh_age_ms"] is None else f", {_duration(job['fresh_age_ms'] / 1000)} old"
    share = f" ({job['fresh_keys'] / job['keys']:.0%} of the keys)" if job["keys"] else ""
    return f"{job['fresh_keys']:,} values before their commit{share}{age}{', incomplete' * job['fresh_incomplete']}"


def _state_rows(job: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (job["name"], state["name"], state["kind"], _number(state["keys"]), _number(state["bytes"]))
        for state in job["states"]
    ]


def _number(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)


def _duration(seconds: float) -> str:
    """Return a time in its largest unit with two digits or more: 12.3 s, 90 min, 50 h, 4 d."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    for unit, length in (("min", 60), ("h", 3600)):
        if seconds < 100 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
