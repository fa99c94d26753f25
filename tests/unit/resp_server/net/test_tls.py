"""Certificates, keys and CAs: refused files, trust, and changed files."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from compat.conformance.certificates import Authority
from resp_server.net.tls import Certificates, TlsError, TlsFiles, client_context, reason_of, server_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.issue("server")
    return made


def files(authority: Authority, name: str = "server", *, ca: bool = True, auth_clients: str | None = None) -> TlsFiles:
    cert, key = authority.folder / f"{name}.crt", authority.folder / f"{name}.key"
    if not cert.exists():
        authority.issue(name)
    return TlsFiles(str(cert), str(key), str(authority.ca) if ca else None, auth_clients)


def meet(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Do a handshake in memory, and exchange a byte."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(there, back, server_side=True)
    asking = client.wrap_bio(back, there, server_hostname="127.0.0.1")
    todo = [asking.do_handshake, serving.do_handshake, lambda: asking.write(b"?"), lambda: serving.read(1)]
    for _ in range(20):
        if not todo:
            return
        left = []
        for step in todo:
            try:
                step()
            except ssl.SSLWantReadError:
                left.append(step)
        todo = left
    raise AssertionError("they do not come to an end")


def test_parts_of_one_ca_trust_each_other(authority: Authority):
    meet(server_context(files(authority)), client_context(files(authority, "other")))


def test_part_of_another_ca_is_refused_as_client_and_as_server(authority: Authority, tmp_path: Path):
    stranger = files(Authority(tmp_path), "stranger")
    for server, client in ((files(authority), stranger), (stranger, files(authority))):
        with pytest.raises(ssl.SSLCertVerificationError) as refused:
            meet(server_context(server), client_context(client))
        assert reason_of(refused.value).startswith("its certificate is refused: ")


def test_part_without_ca_trusts_only_its_own_certificate(authority: Authority):
    own = files(authority, ca=False)
    meet(server_context(own), client_context(own))
    with pytest.raises(ssl.SSLCertVerificationError):
        meet(server_context(files(authority, "sister", ca=False)), client_context(own))


def test_client_shows_its_configured_certificate(authority: Authority):
    anybody = client_context(TlsFiles(ca=str(authority.ca)))
    for auth_clients in ("no", "optional"):
        meet(server_context(files(authority, auth_clients=auth_clients)), anybody)
    meet(server_context(files(authority, ca=False)), client_context(TlsFiles(ca=str(authority.ca))))
    for given in ("yes", None):
        with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
            meet(server_context(files(authority, auth_clients=given)), anybody)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("cert", None, None, None), "--tls-cert-file needs --tls-key-file"),
        ((None, "key", None, None), "--tls-key-file needs --tls-cert-file"),
        (("cert", "key", None, "yes"), "--tls-auth-clients yes needs --tls-ca-cert-file"),
        (("cert", "key", None, "optional"), "--tls-auth-clients optional needs --tls-ca-cert-file"),
        (("cert", "key", "ca", "perhaps"), "--tls-auth-clients is one of yes, no, optional, not 'perhaps'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: tuple[str | None, ...], error: str):
    with pytest.raises(TlsError, match=error):
        TlsFiles(*given)


def test_tls_files_become_options_of_other_processes():
    assert TlsFiles("c", "k", "a", "no").arguments() == [
        *("--tls-cert-file", "c", "--tls-key-file", "k"),
        *("--tls-ca-cert-file", "a", "--tls-auth-clients", "no"),
    ]


def test_files_of_no_use_are_named_with_their_option(authority: Authority, tmp_path: Path):
    cert, key, ca = (str(authority.folder / name) for name in ("server.crt", "server.key", "ca.crt"))
    other = str(authority.issue("another")[1])
    torn = tmp_path / "torn.crt"
    torn.write_text(Path(cert).read_text().replace("M", "", 1))
    encrypted = tmp_path / "encrypted.key"
    plain = load_pem_private_key(Path(key).read_bytes(), None)
    encrypted.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    of_another_kind = tmp_path / "rsa.key"
    of_another_kind.write_bytes(
        generate_private_key(65_537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    for wrong, error in (
        (TlsFiles(str(tmp_path / "none"), key), f"--tls-cert-file {tmp_path}/none: No such file or directory; give"),
        (TlsFiles(str(tmp_path), key), f"--tls-cert-file {tmp_path}: Is a directory"),
        (TlsFiles(key, key), f"--tls-cert-file {key} is not a PEM file with"),
        (TlsFiles(cert, cert), f"--tls-key-file {cert} is not a PEM file with"),
        (TlsFiles(cert, other), f"--tls-key-file {other} does not match --tls-cert-file {cert}"),
        (
            TlsFiles(cert, str(of_another_kind)),
            f"--tls-key-file {of_another_kind} does not match --tls-cert-file {cert}",
        ),
        (TlsFiles(cert, str(encrypted)), f"--tls-key-file {encrypted} is encrypted"),
        (TlsFiles(str(torn), key), f"--tls-cert-file {torn} and --tls-key-file {key} cannot be used"),
        (TlsFiles(cert, key, str(torn)), f"--tls-ca-cert-file {torn} cannot be used"),
        (TlsFiles(cert, key, key), f"--tls-ca-cert-file {key} is not a PEM file with"),
    ):
        with pytest.raises(TlsError) as refused:
            server_context(wrong)
        assert str(refused.value).startswith(error)
    server_context(TlsFiles(cert, key, ca))


def test_changed_certificates_are_reloaded_unless_invalid(authority: Authority, caplog: pytest.LogCaptureFixture):
    certificates = Certificates(files(authority, "changing"))
    before = certificates.for_client(), certificates.for_server()
    assert (certificates.for_client(), certificates.for_server()) == before

    cert, _ = authority.issue("changing")
    after = certificates.for_client(), certificates.for_server()
    assert after[0] is not before[0] and after[1] is not before[1]

    cert.unlink()
    with caplog.at_level(logging.ERROR):
        assert [certificates.for_client() for _ in range(3)] == 3 * [after[0]]
    (error,) = caplog.messages
    assert str(cert) in error and error.endswith("the earlier files stay in use")

    authority.issue("changing")
    assert certificates.for_client() is not after[0]
