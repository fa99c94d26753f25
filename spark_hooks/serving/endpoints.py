"""Endpoints: the servers of this driver, to which a sink announces each new epoch.

A sink works without endpoints, because servers look at the log by themselves (`apply.poll_schedule`). With an endpoint,
a sink announces each epoch at once, and can wait until the epoch is readable. Under Spark Connect the sink and
`sparkis.serve` run in different processes: there the sink finds the server by an address file on this machine, which
the setting `ADDRESS_SETTING` names.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import quote

from resp_server.net.addresses import address_of
from resp_server.net.client import Client
from resp_server.net.tls import TlsFiles, client_context
from resp_server.registry.announcer import Announcer
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import DescriptorError, SparkisError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("sparkis.serve")

LOG_SETTING = "spark.sparkis.log"
ADDRESS_SETTING = "spark.sparkis.server"
ANNOUNCE_SETTING = "spark.sparkis.announce"
CONTROL_TIMEOUT_S = 5.0
WAIT_RETRY_S = 0.1


class Endpoint(ABC):
    """A server, or a set of servers, as a sink sees it."""

    @abstractmethod
    def announce(self, job: str, epoch: int, term: int) -> None:
        """Announce a committed epoch to the servers. Never raises an error: the servers also poll the log.

        Args:
            epoch: -1 if a writer begins.
        """

    @abstractmethod
    def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Wait until the epoch or a later one is readable; False if it is not after `timeout_s`."""


class ControlAddress(NamedTuple):
    """The address of a control listener, its token, and the files of TLS or None."""

    port: int
    token: str
    host: str = "127.0.0.1"
    tls: TlsFiles | None = None

    def write(self, path: Path) -> None:
        """Write the address, token included, into a file. Other users must not be able to read its folder."""
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(self._asdict() | {"tls": None if self.tls is None else asdict(self.tls)}))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> ControlAddress:
        """Read an address file; OSError if the file is missing: the server was stopped, or runs on another machine."""
        fields = json.loads(path.read_text())
        tls = fields.pop("tls")
        return cls(**fields, tls=None if tls is None else TlsFiles(**tls))


class ControlledEndpoint(Endpoint):
    """A server that gets announcements through its control listener."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @abstractmethod
    def _address(self) -> ControlAddress:
        """Return the current address of the control listener; a restart may have changed it."""

    def announce(self, job: str, epoch: int, term: int) -> None:
        """Announce a committed epoch to the server. Never raises an error: the server also polls the log."""
        words = ("NOTICE", job, str(epoch), str(term))
        with self._lock:
            for _ in range(2):  # the second attempt has a new connection
                try:
                    if self._client is None:
                        self._client = self._connect()
                    self._client.call(*words)
                    return
                except (SparkisError, OSError) as error:
                    logger.debug("%r did not answer %s: %s", self, words[0], error)
                    self._disconnect()
                    self._rediscover()

    def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Wait until the epoch or a later one is readable; False if it is not after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_ms = max(0, int((deadline - time.monotonic()) * 1000))
            try:
                # A separate connection, so that announcements of other queries need not wait.
                with self._connect() as client:
                    reached = client.call(
                        "WAIT", job, str(epoch), str(remaining_ms), timeout_s=timeout_s + CONTROL_TIMEOUT_S
                    )
                return bool(reached == 1)
            except (SparkisError, OSError) as error:  # the server may be restarting
                logger.debug("%r did not answer WAIT: %s", self, error)
            if time.monotonic() >= deadline or self._stopping.is_set():
                return False
            time.sleep(WAIT_RETRY_S)

    def _rediscover(self) -> None:
        """Look up the server's address again after a failed announcement. A no-op if `_address` is always current."""

    def _connect(self) -> Client:
        address = self._address()
        tls = None if address.tls is None else client_context(address.tls)
        return Client(address.host, address.port, password=address.token, timeout_s=CONTROL_TIMEOUT_S, tls=tls)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class ServedEndpoint(ControlledEndpoint):
    """The servers that `serve` started; a context manager that calls `stop` at its end.

    Attributes:
        url: The URL for Redis clients, with the password if there is one.
        log: The root of the served change log.
        port: The port in `url`.
        registry: The registry's `host:port` with placement `executors`, else None.
        tls: The files of TLS, or None.
    """

    log: str
    port: int
    url: str
    registry: str | None = None
    tls: TlsFiles | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(port={self.port}, log={self.log!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def stop(self) -> None:
        """Stop the servers. Clients are disconnected, the log stays unchanged. A second call does nothing."""


def url_of(host: str, port: int, password: str | None, tls: TlsFiles | None = None) -> str:
    """Return the URL for Redis clients."""
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"{'redis' if tls is None else 'rediss'}://{secret}{address_of(host, port)}"


class AddressFileEndpoint(ControlledEndpoint):
    """A server that another process of this machine started; a file has its address."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __repr__(self) -> str:
        return f"AddressFileEndpoint({str(self._path)!r})"

    def _address(self) -> ControlAddress:
        return ControlAddress.read(self._path)


_endpoints: dict[str, list[Endpoint]] = {}
_announcers: dict[str, Announcer] = {}
_announced_to: dict[str, tuple[tuple[str, ...], TlsFiles | None]] = {}


def _root(log: str) -> str:
    return open_filesystem(log).root


def add(log: str, endpoint: Endpoint) -> None:
    """Register an endpoint for the sinks of a log."""
    _endpoints.setdefault(_root(log), []).append(endpoint)


def remove(log: str, endpoint: Endpoint) -> None:
    """Unregister an endpoint."""
    registered = _endpoints.get(_root(log), [])
    if endpoint in registered:
        registered.remove(endpoint)


def of_log(log: str) -> list[Endpoint]:
    """Return the registered endpoints of a log."""
    return list(_endpoints.get(_root(log), ()))


def announce(log: str, job: str, epoch: int, term: int) -> None:
    """Announce a committed epoch to all endpoints of a log, and to the servers of other machines."""
    for endpoint in of_log(log):
        endpoint.announce(job, epoch, term)
    if (announcer := _announcers.get(_root(log))) is not None:
        announcer.announce(job, term, epoch)


def announce_to(log: str, addresses: str, tls: TlsFiles | None = None) -> None:
    """Announce the epochs of a log to its registry and to addresses from now on; ValueError.

    Args:
        addresses: The setting `ANNOUNCE_SETTING`, `HOST:PORT` with spaces or commas between them. A log in a local
            folder needs a registry or an address only if its servers run on other machines.
    """
    root, wanted = _root(log), tuple(addresses.replace(",", " ").split())
    if _announced_to.get(root) == (wanted, tls):
        return
    has_registry = any(isinstance(each, ServedEndpoint) and each.registry for each in of_log(root))
    announcer = Announcer(root, wanted, tls=tls, to_registry=not has_registry)
    before = _announcers.pop(root, None)
    _announcers[root], _announced_to[root] = announcer, (wanted, tls)
    if before is not None:
        before.close()


def announce_as_set(session: SparkSession | None, log: str) -> None:
    """Announce the epochs of a log as a session's settings say, from now on; DescriptorError. See `announce_to`."""

    addresses = "" if session is None else session.conf.get(ANNOUNCE_SETTING, None) or ""
    try:
        announce_to(log, addresses, None if session is None else tls_files_of(session))
    except ValueError as error:
        raise DescriptorError(f"{ANNOUNCE_SETTING}: {error}") from None


def tls_files_of(session: SparkSession) -> TlsFiles | None:
    """Return the files with which a session connects to servers elsewhere, or None; TlsError."""
    cert, key, ca = (
        session.conf.get(f"spark.sparkis.tls.{name}", None) for name in ("certFile", "keyFile", "caCertFile")
    )
    files = TlsFiles(cert, key, ca)
    return None if files == TlsFiles() else files


def wait(log: str, job: str, epoch: int, timeout_s: float) -> bool:
    """Wait until an epoch or a later one is readable at all endpoints of a log; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    return all(endpoint.wait(job, epoch, max(0.0, deadline - time.monotonic())) for endpoint in of_log(log))
