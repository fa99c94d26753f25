"""A small synchronous Redis client for `sparkis status` and control requests, where speed does not matter."""

from __future__ import annotations

import re
import socket
import ssl
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import hiredis

from resp_server.net.addresses import address_of
from resp_server.net.children import PASSWORD_VARIABLE
from resp_server.net.tls import TlsFiles, context_for_url, reason_of
from state_backend.model.errors import SparkisError

DEFAULT_PORT = 6379
TIMEOUT_S = 5.0
READ_BYTES = 65_536


def pack_request(*arguments: str | bytes) -> bytes:
    """Return an encoded request."""
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]  # its stub has a tuple of one
    return packed


def without_login(url: str) -> str:
    """Return a URL without its user and password; the URL may be malformed."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)


class ClientError(SparkisError):
    """The server cannot be reached, or its reply is an error."""


class ErrorReplyError(ClientError):
    """The server's reply is an error."""


class Client:
    """One connection, for one thread.

    Args:
        timeout_s: The limit of connecting, and of each wait for bytes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        username: str | None = None,
        password: str | None = None,
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address_of(host, port)
        self._timeout_s = timeout_s
        self._has_received = False
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace", replyError=ClientError)
        try:
            self._socket = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise ClientError(
                f"cannot connect to {self.address}: {error.strerror or error}; is a server there?"
            ) from None
        if tls is not None:
            self._encrypt(tls, host)
        if password is not None:
            self.call("AUTH", *([username] if username else []), password)

    @classmethod
    def from_url(
        cls, url: str, timeout_s: float = TIMEOUT_S, tls: TlsFiles | None = None, other_password: str | None = None
    ) -> Client:
        """Connect to `redis://[[user]:password@]host[:port]`; ClientError for any other URL.

        Args:
            other_password: Used if the URL has none. `rediss://` means TLS. Then `tls` has the client's certificate,
                and the CA if this machine does not trust it.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError:  # its text may have a part of a password with `/` or `#`
            host, port = None, DEFAULT_PORT
        if not host or parts.scheme not in ("redis", "rediss"):
            raise ClientError(
                f"{without_login(url)!r} is not a URL of the form redis://[:password@]host[:port], or rediss://... for "
                "TLS; special characters of a password are written as %XX, and an IPv6 address is in brackets"
            )
        if tls is not None and parts.scheme == "redis":
            raise ClientError(f"{without_login(url)!r} is not a TLS URL: write rediss://, or give no TLS files")
        password = other_password or None if parts.password is None else unquote(parts.password)
        context = context_for_url(tls) if parts.scheme == "rediss" else None
        return cls(host, port, username=parts.username or None, password=password, timeout_s=timeout_s, tls=context)

    def _encrypt(self, tls: ssl.SSLContext, host: str) -> None:
        plain = self._socket
        try:
            self._socket = tls.wrap_socket(plain, server_hostname=host)
        except OSError as error:
            plain.close()
            raise ClientError(f"cannot connect to {self.address}: {reason_of(error)}") from None

    def call(self, *arguments: str | bytes, timeout_s: float | None = None) -> Any:
        """Send one command and return its reply; ClientError if the reply is an error or too late."""
        self._socket.settimeout(self._timeout_s if timeout_s is None else timeout_s)
        try:
            self._socket.sendall(pack_request(*arguments))
            while (reply := self._reader.gets()) is False:
                received = self._socket.recv(READ_BYTES)
                if not received:
                    raise ClientError(f"{self.address} closed the connection{self._hint()}")
                self._has_received = True
                self._reader.feed(received)
        except OSError as error:
            raise ClientError(f"{self.address} did not reply to {arguments[0]!s}: {reason_of(error)}") from None
        if isinstance(reply, ClientError):
            if str(reply).startswith("NOAUTH"):  # Redis' text for HELLO is about its own arguments
                raise ErrorReplyError(f"{self.address} wants a password: give it in the URL, or in {PASSWORD_VARIABLE}")
            raise ErrorReplyError(f"{self.address}: {reply}")
        return reply

    def _hint(self) -> str:
        """Return a hint for a connection that closes before its first reply: perhaps only one side speaks TLS."""
        if self._has_received:
            return ""
        is_encrypted = isinstance(self._socket, ssl.SSLSocket)
        return ": does it ask for a certificate?" if is_encrypted else ": does it speak TLS (rediss://)?"

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_loaded(client: Client) -> None:
    """Raise the server's ErrorReplyError if it does not answer commands about keys yet, or does not answer PING.

    A proxy with an upstream answers PING before it knows whose keys are, and then replies LOADING to `STATE OWNER`.
    Other servers, and users without this command, get another error, which says nothing about keys.
    """
    client.call("PING")
    try:
        client.call("STATE", "OWNER", "sparkis")
    except ErrorReplyError as error:
        if is_loading(error):
            raise


def is_loading(error: ErrorReplyError) -> bool:
    """Return whether an error is the reply LOADING."""
    return ": LOADING " in str(error)
