"""`sparkis ui`: serves the page about an endpoint. Only `run` imports what the extra `sparkis[ui]` installs."""

from __future__ import annotations

import argparse
import re
import sys
from importlib.util import find_spec

from sparkis_ui import DEFAULT_PAGE_PORT
from sparkis_ui.endpoint_options import add_endpoint_options

DEFAULT_BIND = "127.0.0.1"
NEEDED = ("redis", "starlette", "jinja2", "uvicorn", "websockets")
DESCRIPTION = (
    "Serve a page in the browser about a running endpoint: jobs, keys and values, changes as they happen, the cluster, "
    "slow requests and clients. It is a plain Redis client that only reads."
)
EXAMPLES = """examples:
  sparkis ui                                        the server of this machine, at http://127.0.0.1:7380
  sparkis ui --url redis://cache.example:6379       any server, proxy, node of a cluster
  sparkis ui --url rediss://proxy:6379 --tls-ca-cert-file ca.pem
  sparkis ui --bind 0.0.0.0 --host-name status.example --page-cert-file page.pem --page-key-file page.key

A password is best in SPARKIS_PASSWORD. Without one, the page asks for user and password if the server wants them;
they stay in this program's memory. A user needs +@read, +@connection and +info, and sees its own keys. Slow requests
and clients need +slowlog, +latency and +client|list.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_endpoint_options(parser)
    parser.add_argument(
        "--port",
        "--page-port",
        type=_port,
        default=DEFAULT_PAGE_PORT,
        help="the page's port (default %(default)s; 0: a free one)",
    )
    parser.add_argument(
        "--bind",
        "--page-bind",
        default=DEFAULT_BIND,
        metavar="ADDRESS",
        help="the page's address (default %(default)s)",
    )
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which browsers may ask for the page, beside localhost and the address; may be repeated",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # it ends with its standard input
    page = parser.add_argument_group("TLS with browsers (https://)")
    page.add_argument("--page-cert-file", metavar="FILE", help="the page's certificate")
    page.add_argument("--page-key-file", metavar="FILE", help="its private key")


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; return the exit code."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"sparkis ui: needs {', '.join(missing)}: pip install 'sparkis[ui]'", file=sys.stderr)
        return 1
    from sparkis_ui.serving import serve

    try:
        serve(options)
    except (ValueError, OSError) as error:
        print(f"sparkis ui: {error}", file=sys.stderr)
        return 1
    return 0


def _port(text: str) -> int:
    if re.fullmatch("[0-9]{1,5}", text) is None or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)
