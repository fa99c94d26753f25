"""TLS: the contexts of a process, loaded from PEM files, and loaded again when the files change.

A process has two contexts:

    server   presents the certificate to clients and to other sparkis processes, and may require theirs
    client   for connections to other sparkis processes: presents the same certificate, and accepts the certificates
             that the CA signed; without a CA, only a certificate that equals its own

Between sparkis processes the host name in a certificate is not checked, because the addresses of servers change.
`context_for_url` does check it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resp_server.net.listeners import ACCEPT_PAUSE_S, accept_all, accept_clients
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.tls")

CERT_OPTION, KEY_OPTION, CA_OPTION = "--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"
AUTH_CLIENTS_OPTION = "--tls-auth-clients"
VERIFY_MODES = {"yes": ssl.CERT_REQUIRED, "no": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL}
CERTIFICATE_BEGINS, CERTIFICATE_ENDS = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
KEY_ENDS = "PRIVATE KEY-----"
# OpenSSL's errors for a key that does not match the certificate: for a key of the same type; for one of another type,
# in OpenSSL 3 and in OpenSSL 1.
KEY_MISMATCHES = ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED", "KEY_TYPE_MISMATCH")

# A handshake takes two round trips and a few milliseconds. A slow one delays no other client; it only counts as one of
# the handshakes in progress (guess).
HANDSHAKE_S_MAX = 10.0
HANDSHAKE_BYTES = 16384  # read at a time

# The TLS object of a connection, its input (encrypted bytes received), and its output (encrypted bytes to send).
EncryptedStream = tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]


class TlsError(SparkisError):
    """A certificate, a key or a CA cannot be used."""


@dataclass(frozen=True)
class TlsFiles:
    """The paths of PEM files on the machine of the process that loads them. Processes pass on paths, never contents.

    Args:
        auth_clients: Whether clients must present a certificate that the CA signed: `yes`, `no` or `optional`; None:
            `yes` if there is a CA.
        prefix: How the options begin that name these files, for errors.
    """

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    auth_clients: str | None = None
    prefix: str = "--tls-"

    def __post_init__(self) -> None:
        """TlsError for options that contradict each other."""
        if (self.cert is None) != (self.key is None):
            names = self.key_option, self.cert_option
            missing, present = names if self.key is None else names[::-1]
            raise TlsError(f"{present} needs {missing}: give a certificate together with its private key")
        if self.auth_clients not in (None, *VERIFY_MODES):
            raise TlsError(f"{AUTH_CLIENTS_OPTION} is one of {', '.join(VERIFY_MODES)}, not {self.auth_clients!r}")
        if self.auth_clients in ("yes", "optional") and self.ca is None:
            raise TlsError(
                f"{AUTH_CLIENTS_OPTION} {self.auth_clients} needs {CA_OPTION}, the CA that signs clients' certificates"
            )

    @property
    def cert_option(self) -> str:
        """The option that names the certificate."""
        return f"{self.prefix}cert-file"

    @property
    def key_option(self) -> str:
        """The option that names the private key."""
        return f"{self.prefix}key-file"

    @property
    def ca_option(self) -> str:
        """The option that names the CA."""
        return f"{self.prefix}ca-cert-file"

    def arguments(self) -> list[str]:
        """Return these files as command line options for a child process."""
        options_with_values = (
            (CERT_OPTION, self.cert),
            (KEY_OPTION, self.key),
            (CA_OPTION, self.ca),
            (AUTH_CLIENTS_OPTION, self.auth_clients),
        )
        return [word for option, value in options_with_values if value is not None for word in (option, value)]

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """Whether clients must present a certificate."""
        return VERIFY_MODES[self.auth_clients or ("no" if self.ca is None else "yes")]


def files_of(options: argparse.Namespace) -> TlsFiles | None:
    """Return the files that the options name, or None if they name none; TlsError if they contradict each other."""
    found = TlsFiles(
        options.tls_cert_file,
        options.tls_key_file,
        options.tls_ca_cert_file,
        getattr(options, "tls_auth_clients", None),
    )
    return None if found == TlsFiles() else found


def server_files_of(options: argparse.Namespace) -> TlsFiles | None:
    """Return the files of a process that only serves, after loading them once as a check; TlsError."""
    found = files_of(options)
    if found is None:
        return None
    if found.cert is None:
        raise TlsError(f"without {CERT_OPTION} and {KEY_OPTION} there is no TLS port; give both, or no TLS options")
    server_context(found)
    return found


# -- contexts ---------------------------------------------------------------------------------------------------------


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context for accepted connections; TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_certificate(context, files)
    if files.ca is not None:
        _trust(context, files)
    context.verify_mode = files.verify_mode
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context for connections to other sparkis processes; TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    if files.cert is not None:
        _load_certificate(context, files)
    if files.ca is not None:
        _trust(context, files)
    elif files.cert is not None:
        # Trust the certificate without its chain: the chain's CAs have signed other certificates, too.
        own = _read(files.cert_option, files.cert, CERTIFICATE_BEGINS).partition(CERTIFICATE_BEGINS)[2]
        own = CERTIFICATE_BEGINS + own.partition(CERTIFICATE_ENDS)[0] + CERTIFICATE_ENDS + "\n"
        context.load_verify_locations(cadata=own)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def context_for_url(files: TlsFiles | None) -> ssl.SSLContext:
    """Return the context for a server named by a user; it checks the host name. TlsError.

    Without a CA, the CAs that this machine trusts are used.
    """
    context = ssl.create_default_context()
    if files is not None and files.ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _trust(context, files)
    if files is not None and files.cert is not None:
        _load_certificate(context, files)
    return context


def _load_certificate(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert is not None and files.key is not None

    def no_password() -> str:
        raise TlsError(
            f"{files.key_option} {files.key} is encrypted; give an unencrypted one: openssl pkey -in ... -out ..."
        )

    _read(files.cert_option, files.cert, CERTIFICATE_BEGINS)
    _read(files.key_option, files.key, KEY_ENDS)
    try:
        context.load_cert_chain(files.cert, files.key, no_password)
    except ssl.SSLError as error:
        if error.reason in KEY_MISMATCHES:
            raise TlsError(
                f"{files.key_option} {files.key} does not match {files.cert_option} {files.cert}; give the key of that "
                "certificate; in the certificate file, put the server's certificate before its chain"
            ) from None
        raise TlsError(
            f"{files.cert_option} {files.cert} and {files.key_option} {files.key} cannot be used: "
            f"{error.reason or error}; both must be PEM files"
        ) from None


def _trust(context: ssl.SSLContext, files: TlsFiles) -> None:
    option, path = files.ca_option, files.ca
    assert path is not None
    _read(option, path, CERTIFICATE_BEGINS)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsError(f"{option} {path} cannot be used: {error.reason or error}; give a PEM file") from None


def _read(option: str, path: str, sign: str) -> str:
    try:
        text = Path(path).read_bytes().decode("ascii", "ignore")
    except OSError as error:
        raise TlsError(
            f"{option} {path}: {error.strerror}; give the path of a PEM file that user {os.geteuid()} can read"
        ) from None
    if sign not in text:
        raise TlsError(f"{option} {path} is not a PEM file with {sign!r}; give a PEM file")
    return text


class Certificates:
    """The contexts of a process, renewed when a file changes. Invalid new files are logged, and the old contexts stay.

    Each new connection checks the files for changes: three system calls of some microseconds, where a handshake takes a
    millisecond.

    Args:
        client: Makes the context for connections to servers. Open connections are not affected.
    """

    def __init__(self, files: TlsFiles, client: Callable[[TlsFiles], ssl.SSLContext] = client_context) -> None:
        """Load the files; TlsError."""
        self._files = files
        self._make_client = client
        self._seen = self._stamps()
        self._read()

    def for_client(self) -> ssl.SSLContext:
        """Return the context for an accepted connection."""
        self._renew()
        assert self._server is not None
        return self._server

    def for_server(self) -> ssl.SSLContext:
        """Return the context for a connection to a server."""
        self._renew()
        return self._client

    def _read(self) -> None:
        server = None if self._files.cert is None else server_context(self._files)
        self._client = self._make_client(self._files)
        self._server = server

    def _stamps(self) -> list[tuple[int, ...] | None]:
        """Return (mtime, size, inode) of each file, to detect a change; None for a missing file."""
        seen: list[tuple[int, ...] | None] = []
        for path in (self._files.cert, self._files.key, self._files.ca):
            try:
                found = None if path is None else os.stat(path)
            except OSError:
                found = None
            seen.append(None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino))
        return seen

    def _renew(self) -> None:
        seen = self._stamps()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._read()
        except TlsError as error:
            logger.error("%s; the earlier files stay in use", error)
        else:
            logger.info("reloaded the TLS files")


def certificates_of(files: TlsFiles | None) -> Certificates | None:
    """Load the files, if there are any; TlsError."""
    return None if files is None else Certificates(files)


def reason_of(error: BaseException) -> str:
    """Return the reason for a connection's error, for log lines and error texts."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = str(error.reason or error)
        return "it does not speak TLS" if reason == "WRONG_VERSION_NUMBER" else f"TLS: {reason}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# -- accepted connections ---------------------------------------------------------------------------------------------


async def accept_tls(
    client: socket.socket, protocol: Callable[[], asyncio.Protocol], certificates: Certificates, poller: Any = None
) -> bool:
    """Do the TLS handshake with a client and connect it to a protocol; if it fails, close the socket and return False.

    Args:
        poller: The compiled core's poller, which then encrypts and decrypts. None: asyncio does.
    """
    context = certificates.for_client()
    try:
        if poller is None:
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, client, ssl=context, ssl_handshake_timeout=HANDSHAKE_S_MAX
            )
        else:
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                secured = await _handshake(client, context)
            poller.add_encrypted(client, protocol(), *secured)
    except OSError as error:  # includes ssl.SSLError
        level = logging.INFO if isinstance(error, ssl.SSLError) else logging.DEBUG
        logger.log(level, "a client's TLS handshake failed: %s", reason_of(error))
        client.close()
        return False
    except asyncio.CancelledError:
        client.close()
        raise
    return True


async def _handshake(client: socket.socket, context: ssl.SSLContext) -> EncryptedStream:
    """Do the server's side of a handshake. OSError if it fails, for example for the client's certificate."""
    loop = asyncio.get_running_loop()
    client.setblocking(False)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    is_done = False
    while not is_done:
        try:
            tls.do_handshake()
            is_done = True
        except ssl.SSLWantReadError:
            pass
        finally:
            if outgoing.pending:  # also after a failed handshake: the alert tells the client why
                await loop.sock_sendall(client, outgoing.read())
        if not is_done:
            received = await loop.sock_recv(client, HANDSHAKE_BYTES)
            if not received:
                raise ConnectionResetError("it closed the connection during the handshake")
            incoming.write(received)
    return tls, incoming, outgoing


class TlsListener:
    """Accepts the TLS connections of a listening socket. Runs on the event loop's thread.

    asyncio's own servers never change their context; here each connection gets the current one.

    Args:
        take: Does the handshake on an accepted socket; returns whether it succeeded.
        admits: Gets the number of handshakes in progress; returns False if a new connection is to be closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        take: Callable[[socket.socket], Coroutine[Any, Any, bool]],
        admits: Callable[[int], bool],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._take = take
        self._admits = admits
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[bool]] = set()
        self._is_closed = False
        self._listen()

    @property
    def is_busy(self) -> bool:
        """Return whether handshakes are in progress."""
        return bool(self._handshakes)

    def finish(self) -> None:
        """Accept the clients that have connected, and stop listening; handshakes go on."""
        for client in accept_all(self._listener):
            self._begin(client)
        self._stop_listening()

    def close(self) -> None:
        """Stop accepting, and cancel the handshakes in progress; open connections stay."""
        self._stop_listening()
        for task in self._handshakes:
            task.cancel()

    def _stop_listening(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._listen)

    def _accept(self) -> None:
        for client in accept_clients(self._listener, self._pause):
            self._begin(client)

    def _begin(self, client: socket.socket) -> None:
        if not self._admits(len(self._handshakes)):
            client.close()
            return
        client.setblocking(False)
        task = self._loop.create_task(self._take(client))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
