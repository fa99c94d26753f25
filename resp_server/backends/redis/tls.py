"""TLS to an upstream: the CA, the client certificate, and the name that the upstream's certificate must have."""

from __future__ import annotations

import ssl

from resp_server.net.tls import Certificates, TlsFiles, context_for_url

PREFIX = "--upstream-tls-"


class UpstreamTls:
    """The context of connections to an upstream, renewed when a file changes.

    Without a CA the CAs that this machine trusts are used.

    Args:
        server_name: The name in the upstream's certificate; empty: the host of the URL.
    """

    def __init__(self, files: TlsFiles, server_name: str = "") -> None:
        """Load the files; TlsError."""
        self._certificates = Certificates(files, context_for_url)
        self.server_name = server_name

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._certificates.for_server()
