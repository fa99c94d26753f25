"""`sparkis top`: its options. Only `run` imports what the extra `sparkis[ui]` installs."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sparkis_ui.endpoint_options import add_endpoint_options

if TYPE_CHECKING:
    from sparkis_ui.top.app import Top

NEEDED = ("redis", "textual")
DESCRIPTION = (
    "Show a running endpoint in the terminal, live: jobs, states, the servers of a cluster, commands, users, slow "
    "requests. It is a plain Redis client that only reads."
)
EXAMPLES = """keys:
  1 to 6, tab   choose a table
  < >, r        sort by another column, and the other way round; a click on a heading does both
  /             show the rows that contain a text; Esc shows all again
  p             pause
  ?             help
  q             end

examples:
  sparkis top                                       the server of this machine
  sparkis top --url redis://:password@cache.example:6379 --table servers
  sparkis top --url rediss://proxy:6379 --tls-ca-cert-file ca.pem

A password is best in SPARKIS_PASSWORD. `sparkis status --json` prints the jobs for programs.
"""
TABLE_NAMES = ("jobs", "states", "servers", "commands", "users", "slow")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_endpoint_options(parser)
    parser.add_argument("--table", choices=TABLE_NAMES, default="jobs", help="the first table (default %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Show the endpoint until the user ends it; return the exit code."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"sparkis top: needs {', '.join(missing)}: pip install 'sparkis[ui]'", file=sys.stderr)
        return 1
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(
            "sparkis top: this is no terminal; `sparkis status` prints the same facts, with --json for programs",
            file=sys.stderr,
        )
        return 1
    from sparkis_ui.client import Endpoint
    from sparkis_ui.top.app import Top

    try:
        endpoint = Endpoint.of_options(options)
    except ValueError as error:
        print(f"sparkis top: {error}", file=sys.stderr)
        return 1
    app = Top(endpoint, options.table)
    asyncio.run(_show(app))
    if app.refusal:
        print(f"sparkis top: {app.refusal}", file=sys.stderr)
        return 1
    return 0


async def _show(app: Top) -> None:
    """Show the screen until the user, or a signal, ends it: the terminal is then as it was before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, app.end)
    await app.run_async()
