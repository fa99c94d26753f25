"""The servers that this driver knows of, and how a sink tells them of a new epoch.

A sink and the servers of its log need not know each other: servers look at the log once a second by themselves. An
endpoint of the same process is told at once, and can be waited for. So is one that wrote down its address, in a file on
this machine (`ADDRESS_SETTING` names it): under Spark Connect the sink runs in another process than `sparkis.serve`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote

from resp_server.net.addresses import address_of
from resp_server.net.client import Client
from resp_server.net.tls import TlsFiles, client_context
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.serve")

LOG_SETTING = "spark.sparkis.log"
ADDRESS_SETTING = "spark.sparkis.server"
CONTROL_TIMEOUT_S = 5.0
WAIT_AGAIN_S = 0.1


class Endpoint(ABC):
    """A place where state can be read, as the sink sees it."""

    @abstractmethod
    def notice(self, job: str, epoch: int) -> None:
        """Tell of a committed epoch. Never raises: the servers find it by themselves."""

    @abstractmethod
    def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Return whether the epoch, or a later one, can be read; wait for it that long."""


class ControlAddress(NamedTuple):
    """Where a control listener is, as this machine reaches it, and what it must be told first; with TLS, the files."""

    port: int
    token: str
    host: str = "127.0.0.1"
    tls: TlsFiles | None = None

    def write(self, path: Path) -> None:
        """Write the address down; the folder should be one that others cannot read."""
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(self._asdict() | {"tls": None if self.tls is None else asdict(self.tls)}))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> ControlAddress:
        """Read an address; OSError if there is none (the server was stopped, or is of another machine)."""
        given = json.loads(path.read_text())
        tls = given.pop("tls")
        return cls(**given, tls=None if tls is None else TlsFiles(**tls))


class ControlledEndpoint(Endpoint):
    """A server that is told through its control listener."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @abstractmethod
    def _address(self) -> ControlAddress:
        """Return where the server listens now; it may have moved since it was asked last."""

    def notice(self, job: str, epoch: int) -> None:
        """Tell the server of a committed epoch. Never raises: it finds the epoch by itself within a second."""
        words = ("NOTICE", job, str(epoch))
        with self._lock:
            for _ in range(2):  # a second time only on a new connection
                try:
                    if self._client is None:
                        self._client = self._connect()
                    self._client.call(*words)
                    return
                except (SparkisError, OSError) as error:
                    logger.debug("%r did not answer %s: %s", self, words[0], error)
                    self._disconnect()
                    self._look_anew()

    def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Return whether an epoch can be read; wait for it that long."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000))
            try:
                with self._connect() as client:  # of its own: another query's notices must not wait for this
                    reached = client.call(
                        "WAIT", job, str(epoch), str(left_ms), timeout_s=timeout_s + CONTROL_TIMEOUT_S
                    )
                return bool(reached == 1)
            except (SparkisError, OSError) as error:  # it may be starting again
                logger.debug("%r did not answer WAIT: %s", self, error)
            if time.monotonic() >= deadline or self._stopping.is_set():
                return False
            time.sleep(WAIT_AGAIN_S)

    def _look_anew(self) -> None:
        """Find out where the server is; called when a notice was not answered. For most `_address` knows."""

    def _connect(self) -> Client:
        """Connect to the control listener."""
        address = self._address()
        tls = None if address.tls is None else client_context(address.tls)
        return Client(address.host, address.port, password=address.token, timeout_s=CONTROL_TIMEOUT_S, tls=tls)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class ServedEndpoint(ControlledEndpoint):
    """The servers that `serve` started. It is a context manager whose end is `stop`.

    Attributes:
        url: The URL that a Redis client connects to, with the password if there is one.
        log: The root of the change log that is served.
        port: The port in `url`.
        registry: The registry's `host:port` where servers are placed on executors, else None.
    """

    log: str
    port: int
    url: str
    registry: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(port={self.port}, log={self.log!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def stop(self) -> None:
        """Stop the servers; clients are disconnected, the log stays as it is. It may be called twice."""


def url_of(host: str, port: int, password: str | None, tls: TlsFiles | None = None) -> str:
    """Return the URL that Redis clients take."""
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"{'redis' if tls is None else 'rediss'}://{secret}{address_of(host, port)}"


class DescribedEndpoint(ControlledEndpoint):
    """A server of another process of this machine, by the file that has its address."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __repr__(self) -> str:
        return f"DescribedEndpoint({str(self._path)!r})"

    def _address(self) -> ControlAddress:
        return ControlAddress.read(self._path)


_endpoints: dict[str, list[Endpoint]] = {}


def _root(log: str) -> str:
    return open_filesystem(log).root


def add(log: str, endpoint: Endpoint) -> None:
    """Make an endpoint known to the sinks of a log."""
    _endpoints.setdefault(_root(log), []).append(endpoint)


def remove(log: str, endpoint: Endpoint) -> None:
    """Forget an endpoint."""
    known = _endpoints.get(_root(log), [])
    if endpoint in known:
        known.remove(endpoint)


def of_log(log: str) -> list[Endpoint]:
    """Return the endpoints that serve a log."""
    return list(_endpoints.get(_root(log), ()))
