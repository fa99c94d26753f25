"""The group `Tls`, in a module of its own: clients have these options, and import little."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from resp_server.settings.setting import ATTACH, CLIENTS, REGISTRY, SERVERS, Value, documented, setting

WITH_CERTIFICATE = (*SERVERS, REGISTRY, ATTACH)


def of_tls(
    initial: Value, help: str, *, programs: tuple[str, ...] = (*WITH_CERTIFICATE, *CLIENTS), **known: Any
) -> Value:
    """Declare a setting of TLS."""
    return setting(initial, help, programs, prefix="tls-", section="tls", title="TLS", **known)


@documented
@dataclass(frozen=True, kw_only=True)
class Tls:
    """The PEM files with which all ports of `sparkis.serve` speak TLS only; each process reads them on its own host.

    Examples:
        >>> sparkis.Tls(cert_file="server.crt", key_file="server.key", ca_cert_file="ca.crt").cert_file
        'server.crt'
    """

    cert_file: str | Path | None = of_tls(
        None,
        "the certificate to present; with it the port speaks TLS",
        spark="tls.certFile",
        note="Its chain, if any, follows it in the file ([tls.md](tls.md))",
        in_program={each: {"help": "the certificate to present"} for each in CLIENTS},
        metavar="FILE",
    )
    key_file: str | Path | None = of_tls(
        None, "its private key", spark="tls.keyFile", note="Not encrypted", metavar="FILE"
    )
    ca_cert_file: str | Path | None = of_tls(
        None,
        "the CA that must have signed the certificates of peers",
        spark="tls.caCertFile",
        note="Peers: clients, other sparkis processes",
        metavar="FILE",
    )
    auth_clients: Literal["yes", "no", "optional"] | None = of_tls(
        None,
        "whether clients must present a certificate of that CA (default: yes if a CA is given)",
        programs=WITH_CERTIFICATE,
        spark="tls.authClients",
        choices=("yes", "no", "optional"),
    )
