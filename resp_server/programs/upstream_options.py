"""The options of programs with an upstream, a Redis of the team's own."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from resp_server.command.ours import denied
from resp_server.command.policy import Denial
from resp_server.net.tls import TlsError, TlsFiles
from resp_server.programs.command_line import Mistakes, whole_number
from resp_server.upstream.ownership import Ownership, OwnershipError
from resp_server.upstream.pinned import PINNED_MAX
from resp_server.upstream.pool import CONNECTIONS, TIMEOUT_S
from resp_server.upstream.rules import RulesFile
from resp_server.upstream.tls import PREFIX, UpstreamTls
from resp_server.upstream.upstream import Upstream, upstream_at
from resp_server.upstream.url import UpstreamUrl

MS_PER_S = 1000
TIMEOUT_MS_MAX = 60_000
# More than one Redis can serve faster than fewer (guess).
CONNECTIONS_MAX = 64
PINNED_CONNECTIONS_MAX = 65_536
# A URL with a password is better given here than on the command line, which every user of the machine can read.
VARIABLE = "SPARKIS_UPSTREAM"
TLS_OPTIONS = (
    "upstream_tls_ca_cert_file",
    "upstream_tls_cert_file",
    "upstream_tls_key_file",
    "upstream_tls_server_name",
)


def add_url_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where an upstream is, and how long to wait for it."""
    parser.add_argument(
        "--upstream",
        default=os.environ.get(VARIABLE),
        metavar="URL",
        help="a Redis that has all keys that no state owns: redis[s]://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], "
        "redis[s]+cluster://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...], "
        "redis[s]+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/MASTER[/DATABASE] or "
        f"unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE] (default: {VARIABLE} of the environment)",
    )
    parser.add_argument(
        "--upstream-timeout",
        type=whole_number(1, TIMEOUT_MS_MAX, "a number of milliseconds"),
        default=int(TIMEOUT_S * MS_PER_S),
        metavar="MS",
        help="the silence of the upstream, in milliseconds, after which it counts as failed (default %(default)s)",
    )
    group = parser.add_argument_group("TLS to the upstream, with --upstream rediss://...")
    ca, cert, key, server_name = (f"--{name.replace('_', '-')}" for name in TLS_OPTIONS)
    group.add_argument(ca, metavar="FILE", help="the CA of the upstream's certificate (default: this machine's CAs)")
    group.add_argument(cert, metavar="FILE", help="the certificate to present to the upstream")
    group.add_argument(key, metavar="FILE", help="its private key")
    group.add_argument(server_name, metavar="NAME", help="the name in the upstream's certificate (default: the host)")


def add_upstream_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an upstream to a command."""
    add_url_options(parser)
    parser.add_argument(
        "--ownership",
        type=Path,
        metavar="FILE",
        help="with --upstream: the file that records which keys belong to states, also to those of stopped jobs",
    )
    parser.add_argument(
        "--new-jobs",
        choices=("wait", "take"),
        default="wait",
        help="with --upstream: if the upstream has keys of a new job, wait for `sparkis confirm JOB`, or let the job's "
        "states take these keys at once (default %(default)s)",
    )
    parser.add_argument(
        "--routes",
        type=Path,
        metavar="FILE",
        help="with --upstream: rules (TOML) about the owners of keys, which come before the jobs' key formats; "
        "reloaded by SIGHUP and by `sparkis reload`",
    )
    parser.add_argument(
        "--upstream-connections",
        type=whole_number(1, CONNECTIONS_MAX, "a number of connections"),
        default=CONNECTIONS,
        metavar="N",
        help="the shared connections to each database of the upstream for each version of the protocol "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--upstream-pinned",
        type=whole_number(1, PINNED_CONNECTIONS_MAX, "a number of connections"),
        default=PINNED_MAX,
        metavar="N",
        help="the connections to the upstream that one client has alone, for its blocking commands; beyond N they are "
        "an error (default %(default)s)",
    )
    parser.add_argument(
        "--transactions",
        choices=("mixed", "strict"),
        default="mixed",
        help="with --upstream: mixed: EXEC runs a transaction with keys of both sides, although they are not read at "
        "the same instant; strict: EXEC refuses it (default %(default)s)",
    )
    parser.add_argument(
        "--upstream-auth",
        choices=("proxy", "client"),
        default="proxy",
        help="with --upstream: proxy: all requests run as the URL's user; client: each client logs in at the upstream, "
        "which checks its AUTH (default %(default)s)",
    )
    parser.add_argument(
        "--copiers",
        choices=("refuse", "report"),
        default="refuse",
        help="with --upstream and rules of prefer-state: whether the proxy ends a few seconds after its start if a "
        "program still copies such keys, or only reports it (default %(default)s)",
    )
    parser.add_argument(
        "--upstream-allow",
        type=_denied_command,
        action="append",
        metavar="COMMAND",
        help="with --upstream: pass a command on to the upstream that is refused otherwise, such as 'CONFIG SET'; may "
        "be repeated",
    )


def _denied_command(text: str) -> str:
    """Return the name of a command that may be allowed, such as `config|set`; ArgumentTypeError."""
    name = "|".join(text.lower().split())
    allowable = denied(Denial.UNLESS_ALLOWED)
    if name not in allowable:
        names = ", ".join(sorted(each.replace("|", " ").upper() for each in allowable))
        raise argparse.ArgumentTypeError(f"{text!r} is none of {names}")
    return name


def swap_of(options: argparse.Namespace) -> tuple[Upstream, Ownership] | None:
    """Return the upstream and the owners of keys; None without an upstream; CommandLineError."""
    mistakes = Mistakes()
    if not options.upstream:
        for name in _given(options):
            mistakes.add(f"--{name.replace('_', '-')} has no use without --upstream")
        mistakes.raise_if_any()
        return None
    with mistakes.noted():
        upstream = upstream_of(options, options.upstream_connections, options.upstream_pinned)
    if options.upstream_auth == "client" and (options.requirepass or options.requirepass_file or options.aclfile):
        mistakes.add("with --upstream-auth client the upstream has the users; give neither a password nor --aclfile")
    if options.ownership is None:
        # A program may not expect a variable that is meant for another one.
        source = f" ({VARIABLE} in the environment)" if options.upstream == os.environ.get(VARIABLE) else ""
        mistakes.add(
            f"--upstream{source} needs --ownership FILE: without it a restarted proxy would answer a stopped job's "
            "keys with the upstream's old copies"
        )
    with mistakes.noted():
        ownership = _ownership(options)
    mistakes.raise_if_any()
    return upstream, ownership


def _given(options: argparse.Namespace) -> list[str]:
    """Return the options about an upstream that differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_upstream_options(parser)
    defaults = vars(parser.parse_args([]))
    return [name for name, default in defaults.items() if name != "upstream" and getattr(options, name) != default]


def _ownership(options: argparse.Namespace) -> Ownership:
    """Return the owners of keys; ValueError for the file of owners, RulesError."""
    rules_file = None if options.routes is None else RulesFile(options.routes)
    try:
        return Ownership(options.ownership, checks_new=options.new_jobs == "wait", rules_file=rules_file)
    except OwnershipError as error:
        raise ValueError(f"--ownership: {error}") from None


def upstream_of(options: argparse.Namespace, connections: int = 1, pinned_max: int = 0) -> Upstream:
    """Return the upstream of `add_url_options`; CommandLineError."""
    mistakes, url = Mistakes(), None
    try:
        url = UpstreamUrl.parse(options.upstream)
    except ValueError as error:
        mistakes.add(f"--upstream: {error}")
    with mistakes.noted():
        tls = _tls(options, url)
    mistakes.raise_if_any()
    assert url is not None
    return upstream_at(url, options.upstream_timeout / MS_PER_S, connections, tls, pinned_max)


def _tls(options: argparse.Namespace, url: UpstreamUrl | None) -> UpstreamTls | None:
    """Return the TLS of connections to the upstream; TlsError. url: None if the URL itself is a mistake."""
    ca, cert, key, server_name = (getattr(options, name) for name in TLS_OPTIONS)
    is_given = any((ca, cert, key, server_name))
    if url is not None and is_given and not url.is_tls:
        raise TlsError(f"the options {PREFIX}... need an upstream with TLS: --upstream rediss://...")
    if is_given or (url is not None and url.is_tls):
        return UpstreamTls(TlsFiles(cert, key, ca, prefix=PREFIX), server_name or "")
    return None
