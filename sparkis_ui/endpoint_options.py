"""The options that name an endpoint, of both commands. Imports nothing that the extra `sparkis[ui]` installs."""

from __future__ import annotations

import argparse

DEFAULT_URL = "redis://127.0.0.1:7379"


def add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `client.Endpoint.of_options` needs."""
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help="the endpoint: redis[s]://[[user]:password@]host[:port] (default %(default)s)",
    )
    tls = parser.add_argument_group("TLS with the endpoint (rediss://)")
    tls.add_argument("--tls-cert-file", metavar="FILE", help="the certificate to present")
    tls.add_argument("--tls-key-file", metavar="FILE", help="its private key")
    tls.add_argument(
        "--tls-ca-cert-file",
        metavar="FILE",
        help="the CA that must have signed the endpoint's certificate (default: those of this machine)",
    )
