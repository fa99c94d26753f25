"""`sparkis health`: whether a server is ready for clients, or alive, as an exit code for probes."""

from __future__ import annotations

import argparse
import http.client
import os
import sys

from resp_server.net.addresses import address_of
from resp_server.net.children import PASSWORD_VARIABLE
from resp_server.net.client import Client, ErrorReplyError, check_loaded
from resp_server.net.tls import files_of
from resp_server.settings.option_values import http_address, seconds
from resp_server.settings.setting import add_rows, rows_of
from resp_server.settings.tls import Tls
from state_backend.model.errors import SparkisError

READY, NOT_READY, NO_ANSWER = 0, 1, 3
DEFAULT_URL = "redis://127.0.0.1:7379"
# A server delays a reply for up to a second before it is LOADING.
TIMEOUT_S = 4.0
BODY_BYTES_MAX = 64 << 10

DESCRIPTION = "Ask a server whether clients may come, or whether it is alive; the exit code is the answer."
EXAMPLES = """\
exit codes: 0 yes; 1 it answers, and says no (the reason is printed); 2 the command line is wrong; 3 nobody answers

examples:
  SPARKIS_PASSWORD=secret sparkis health --url redis://127.0.0.1:7379 --lag-max 30
  sparkis health --metrics 127.0.0.1:9379
  sparkis health --metrics 127.0.0.1:9379 --live
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    server = parser.add_mutually_exclusive_group()
    server.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="ask by PING, and a proxy with an upstream whether it knows the owners of keys: "
        f"redis[s]://[[user]:password@]host[:port] (default %(default)s); the password may be in {PASSWORD_VARIABLE}",
    )
    server.add_argument(
        "--metrics", type=http_address, metavar="[HOST:]PORT", help="ask /readyz of a server's --metrics instead"
    )
    parser.add_argument("--live", action="store_true", help="ask only whether the process answers")
    parser.add_argument(
        "--lag-max",
        type=seconds,
        metavar="SECONDS",
        help="with --url: say no if a job's clients read an epoch that is older than the committed one by more than "
        "this (--metrics: the server's --ready-lag-max decides)",
    )
    parser.add_argument(
        "--timeout",
        dest="answer_timeout",
        type=seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="the wait for an answer (default 4)",
    )
    add_rows(parser, rows_of(Tls), "health")


def run(options: argparse.Namespace) -> int:
    """Query the server, print the reason if it is not ready or alive, and return the exit code."""
    try:
        reason = _reason_by_http(options) if options.metrics is not None else _reason_by_redis(options)
    except ErrorReplyError as error:
        reason = str(error)
    except (SparkisError, OSError, http.client.HTTPException) as error:
        print(f"sparkis health: {error}", file=sys.stderr)
        return NO_ANSWER
    if reason:
        print(f"sparkis health: {reason}", file=sys.stderr)
    return NOT_READY if reason else READY


def _reason_by_http(options: argparse.Namespace) -> str:
    """Return the reason by /readyz or /livez; empty: ready, or alive. OSError, HTTPException: no reply."""
    connection = http.client.HTTPConnection(options.metrics.host, options.metrics.port, timeout=options.answer_timeout)
    try:
        connection.request("GET", "/livez" if options.live else "/readyz")
        response = connection.getresponse()
        body = response.read(BODY_BYTES_MAX).decode("utf-8", "replace").strip()
    except OSError as error:
        raise OSError(f"cannot connect to {address_of(*options.metrics)}: {error.strerror or error}") from None
    finally:
        connection.close()
    return "" if response.status == http.client.OK else body or f"status {response.status}"


def _reason_by_redis(options: argparse.Namespace) -> str:
    """Return the reason by PING and STATE LAG; empty: ready, or alive. SparkisError, OSError: no reply."""
    password = os.environ.get(PASSWORD_VARIABLE)
    with Client.from_url(options.url, options.answer_timeout, files_of(options), password) as client:
        try:
            check_loaded(client)
        except ErrorReplyError:
            if options.live:
                return ""  # an error reply, such as LOADING, proves that the server is alive
            raise
        if options.live or options.lag_max is None:
            return ""
        client.call("HELLO", "3")
        try:
            lags = client.call("STATE", "LAG")
        except ErrorReplyError:
            raise
        except SparkisError as error:  # a proxy replies an error later than this program waits
            return f"PING is answered, but STATE LAG is not, so the state servers may be away: {error}"
    behind = [lag for lag in lags if lag["lag_ms"] is None or lag["lag_ms"] > options.lag_max * 1000]
    return "; ".join(
        f"job {lag['job']}: no epoch is visible yet"
        if lag["lag_ms"] is None
        else f"job {lag['job']}: {lag['lag_ms'] / 1000:g} s behind"
        for lag in behind
    )
