"""The options of programs with an upstream, a Redis of the team's own."""

from __future__ import annotations

import argparse
import os

from resp_server.backends.redis.tls import PREFIX, UpstreamTls
from resp_server.backends.redis.upstream import Upstream as UpstreamRedis
from resp_server.backends.redis.upstream import upstream_at
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.backends.routing.ownership import Ownership, OwnershipError
from resp_server.backends.routing.rules_file import RulesFile
from resp_server.net.tls import TlsError, TlsFiles
from resp_server.programs.command_line import Mistakes
from resp_server.settings.groups import UPSTREAM_VARIABLE, Upstream
from resp_server.settings.setting import SERVE, rows_of
from state_backend.model.clock import MS_PER_S

TLS_OPTIONS = (
    "upstream_tls_ca_cert_file",
    "upstream_tls_cert_file",
    "upstream_tls_key_file",
    "upstream_tls_server_name",
)


def overlay_of(options: argparse.Namespace) -> tuple[UpstreamRedis, Ownership] | None:
    """Return the upstream and the owners of keys; None without an upstream; CommandLineError."""
    mistakes = Mistakes()
    if not options.upstream:
        for row in rows_of(Upstream):
            if row.dest != "upstream" and getattr(options, row.dest) != row.arguments_in(SERVE)["default"]:
                mistakes.add(f"--{row.option} has no use without --upstream")
        mistakes.raise_if_any()
        return None
    with mistakes.noted():
        upstream = upstream_of(options, options.upstream_connections, options.upstream_pinned)
    if options.upstream_auth == "client" and (options.requirepass or options.requirepass_file or options.aclfile):
        mistakes.add("with --upstream-auth client the upstream has the users; give neither a password nor --aclfile")
    if options.ownership is None:
        # A program may not expect a variable that is meant for another one.
        is_inherited = options.upstream == os.environ.get(UPSTREAM_VARIABLE)
        source = f" ({UPSTREAM_VARIABLE} in the environment)" if is_inherited else ""
        mistakes.add(
            f"--upstream{source} needs --ownership FILE: without it a restarted proxy would answer a stopped job's "
            "keys with the upstream's old copies"
        )
    with mistakes.noted():
        ownership = _ownership(options)
    mistakes.raise_if_any()
    return upstream, ownership


def _ownership(options: argparse.Namespace) -> Ownership:
    """Return the owners of keys; ValueError for the file of owners, RulesError."""
    rules_file = None if options.routes is None else RulesFile(options.routes)
    try:
        return Ownership(options.ownership, checks_new=options.new_jobs == "wait", rules_file=rules_file)
    except OwnershipError as error:
        raise ValueError(f"--ownership: {error}") from None


def upstream_of(options: argparse.Namespace, connections: int = 1, dedicated_max: int = 0) -> UpstreamRedis:
    """Return the upstream of the options; CommandLineError."""
    mistakes, url = Mistakes(), None
    try:
        url = UpstreamUrl.parse(options.upstream)
    except ValueError as error:
        mistakes.add(f"--upstream: {error}")
    with mistakes.noted():
        tls = _tls(options, url)
    mistakes.raise_if_any()
    assert url is not None
    return upstream_at(url, options.upstream_timeout / MS_PER_S, connections, tls, dedicated_max)


def _tls(options: argparse.Namespace, url: UpstreamUrl | None) -> UpstreamTls | None:
    """Return the TLS of connections to the upstream; TlsError.

    Args:
        url: None if the URL itself is a mistake.
    """
    ca, cert, key, server_name = (getattr(options, name) for name in TLS_OPTIONS)
    is_given = any((ca, cert, key, server_name))
    if url is not None and is_given and not url.is_tls:
        raise TlsError(f"the options {PREFIX}... need an upstream with TLS: --upstream rediss://...")
    if is_given or (url is not None and url.is_tls):
        return UpstreamTls(TlsFiles(cert, key, ca, prefix=PREFIX), server_name or "")
    return None
