"""Real certificates for tests, issued by a test authority."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import trustme


@dataclass
class Authority:
    """A certificate authority and its certificates, as PEM files in a folder."""

    folder: Path
    _ca: trustme.CA = field(default_factory=trustme.CA, repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca = self.folder / "ca.crt"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Write a certificate for hosts, this machine unless given, and its key; files of that name are replaced."""
        made = self._ca.issue_cert(*(hosts or ("127.0.0.1", "localhost")))
        cert, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        # Each file is complete at any time. They match once both are written.
        for path, pems in ((key, [made.private_key_pem]), (cert, made.cert_chain_pems)):
            new = path.with_suffix(".new")
            new.write_bytes(b"".join(pem.bytes() for pem in pems))
            os.replace(new, path)
        return cert, key

    def options(self, name: str = "server", *, auth_clients: str | None = None, with_ca: bool = True) -> list[str]:
        """Return a program's TLS options with a certificate of that name, which is issued if needed."""
        cert, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not cert.exists():
            self.issue(name)
        given = ["--tls-cert-file", str(cert), "--tls-key-file", str(key)]
        given += ["--tls-ca-cert-file", str(self.ca)] if with_ca else []
        return given + (["--tls-auth-clients", auth_clients] if auth_clients else [])

    def client(self, name: str | None = None) -> dict[str, str]:
        """Return redis-py's arguments to trust this authority and to present a certificate."""
        given = {"ssl_ca_certs": str(self.ca)}
        if name is not None:
            cert, key = self.issue(name)
            given |= {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}
        return given

    def context(self) -> ssl.SSLContext:
        """Return an SSL context for a client."""
        return ssl.create_default_context(cafile=str(self.ca))
