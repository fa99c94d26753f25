"""`sparkis status`: the jobs, states, keys, epochs and lag of a server, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from resp_server.net.client import Client
from resp_server.net.tls import add_tls_options, files_of
from state_backend.model.errors import SparkisError

DEFAULT_URL = "redis://127.0.0.1:7379"
DESCRIPTION = "List the jobs of a running server: states, keys, committed and applied epoch, lag."
COLUMNS = ("JOB", "STATE", "KIND", "KEYS", "COMMITTED", "APPLIED", "LAG", "AGE", "CONDITION")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--url", default=DEFAULT_URL, help="redis[s]://[:password@]host:port (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_tls_options(parser, for_server=False)


def run(options: argparse.Namespace) -> int:
    """Print the status; return the exit code."""
    try:
        with Client.from_url(options.url, tls=files_of(options)) as client:
            jobs, core = read(client), core_of(client)
    except SparkisError as error:
        print(f"sparkis status: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(jobs, indent=1))
    elif not jobs:
        print(f"no jobs at {options.url}: nothing has been published to its logs yet", file=sys.stderr)
    else:
        print(table(jobs))
        if core:
            print(f"\nanswered by its {core} core")
    return 0


def read(client: Client) -> list[dict[str, Any]]:
    """Return a map per job: the fields of STATE JOBS and STATE LAG, and the states under `states`."""
    client.call("HELLO", "3")
    lags = {lag["job"]: lag for lag in client.call("STATE", "LAG")}
    jobs = client.call("STATE", "JOBS")
    return [
        job | lags.get(job["name"], {}) | {"states": client.call("STATE", "LIST", job["name"])}
        for job in sorted(jobs, key=lambda job: str(job["name"]))
    ]


def core_of(client: Client) -> str:
    """Return a server's core, compiled or python; empty for a proxy, and where the ACL forbids INFO."""
    try:
        info = client.call("INFO", "server")
    except SparkisError:
        return ""
    found = re.search(r"^sparkis_core:(\w+)", info if isinstance(info, str) else info.decode(), re.MULTILINE)
    return found[1] if found else ""


def table(jobs: Sequence[dict[str, Any]]) -> str:
    """Return a table with a heading and one line per state."""
    rows = [COLUMNS, *(row for job in jobs for row in _rows(job))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _rows(job: dict[str, Any]) -> list[tuple[str, ...]]:
    lag = "-" if job["lag_ms"] is None else f"{job['lag_epochs']} epochs, {job['lag_ms']} ms"
    age = "-" if job["age_ms"] is None else f"{job['age_ms'] / 1000:.1f} s"
    facts = [
        "stale" if job["stale"] else "live",
        "incomplete" if job["incomplete"] else "",
        "" if job["held_back_epoch"] is None else f"epoch {job['held_back_epoch']} of a new generation is held back",
        job["error"],
    ]
    condition = ", ".join(filter(None, facts))
    return [
        (
            job["name"],
            state["name"],
            state["kind"],
            str(state["keys"]),
            str(job["committed"]),
            str(job["applied"]),
            lag,
            age,
            condition,
        )
        for state in job["states"]
    ]
