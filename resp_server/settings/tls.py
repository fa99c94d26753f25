"""The group `Tls`, in a module of its own: clients have these options, and import little."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from resp_server.settings.setting import ATTACH, CLIENTS, REGISTRY, SERVERS, documented, setting

WITH_CERTIFICATE = (*SERVERS, REGISTRY, ATTACH)


@documented
@dataclass(frozen=True, kw_only=True)
class Tls:
    """The PEM files with which all ports of `sparkis.serve` speak TLS only; each process reads them on its own host."""

    cert_file: str | Path | None = setting(
        None,
        "the certificate to present; with it the port speaks TLS",
        (*WITH_CERTIFICATE, *CLIENTS),
        option="tls-cert-file",
        section="tls",
        title="TLS",
        spark="tls.certFile",
        page="the certificate, followed by its chain, if any: the port speaks [TLS](tls.md)",
        in_program={each: {"help": "the certificate to present"} for each in CLIENTS},
        metavar="FILE",
    )
    key_file: str | Path | None = setting(
        None,
        "its private key",
        (*WITH_CERTIFICATE, *CLIENTS),
        option="tls-key-file",
        section="tls",
        title="TLS",
        spark="tls.keyFile",
        page="its private key, not encrypted",
        metavar="FILE",
    )
    ca_cert_file: str | Path | None = setting(
        None,
        "the CA that must have signed the certificates of peers",
        (*WITH_CERTIFICATE, *CLIENTS),
        option="tls-ca-cert-file",
        section="tls",
        title="TLS",
        spark="tls.caCertFile",
        page="the CA of certificates of clients and of other sparkis processes",
        metavar="FILE",
    )
    auth_clients: Literal["yes", "no", "optional"] | None = setting(
        None,
        "whether clients must present a certificate of that CA (default: yes if a CA is given)",
        WITH_CERTIFICATE,
        option="tls-auth-clients",
        section="tls",
        title="TLS",
        spark="tls.authClients",
        page="whether clients need a certificate of that CA. Default: `yes` if there is a CA, else `no`",
        choices=("yes", "no", "optional"),
    )
