"""Announces a writer's epochs to servers that cannot watch its log: to the log's registry, and to given addresses.

An announcement is a hint: a server that gets it looks at the log, and nothing of the hint is served. Servers also look
by themselves, so an announcement may be late, lost or false. `announce` only notes the newest epoch of a job, and a
thread for each address sends it. So an address that is away delays no commit, and no other address.
"""

from __future__ import annotations

import atexit
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from resp_server.net.addresses import host_and_port
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client
from resp_server.net.tls import TlsFiles, client_context
from resp_server.registry.registry_file import read_registry_file
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.announcements")

# The limit of connecting, and of each wait for a reply; a thread waits, not a commit (guess).
REPLY_TIMEOUT_S = 2.0
# The pause after a failure. What is announced meanwhile is sent after it (guess).
RETRY_PAUSE_S = 1.0
# The time between two looks for the record of a registry while there is none (guess: a look may cost money).
RECORD_PAUSE_S = 10.0
# How long the end of the process waits for announcements that are being sent (guess).
EXIT_WAIT_S = 0.5


class Announcer:
    """Announces the epochs of one log. Any thread may call `announce`, which returns at once and raises no error.

    Args:
        log: The root of the log. Its registry is found by the record in the log.
        addresses: The addresses of `sparkis serve --announcements`, as `HOST:PORT`.
        token: The secret that the servers and this process share. Default: `SPARKIS_CONTROL_TOKEN` in the environment;
            without one, nothing is announced to a registry.
        tls: The files of TLS, if the servers have a certificate.
        to_registry: Announce to the log's registry, too.

    Raises:
        ValueError: An address is not HOST:PORT, or there are addresses and no token.

    Examples:
        >>> announcer = sparkis.Announcer(path, [])
        >>> states = [sparkis.StateDescriptor("price", key="ticker", value="price")]
        >>> with sparkis.LogWriter(path, "market", states, announce=announcer.announce) as writer:
        ...     writer.publish([sparkis.Change("price", sparkis.Op.PUT, b"market:price:ACME", value=b"12.5")])
        0
    """

    def __init__(
        self,
        log: str | os.PathLike[str],
        addresses: Sequence[str] = (),
        *,
        token: str | None = None,
        tls: TlsFiles | None = None,
        to_registry: bool = True,
    ) -> None:
        for address in addresses:
            host_and_port(address)
        token = token or os.environ.get(TOKEN_VARIABLE)
        if addresses and not token:
            raise ValueError(
                f"epochs cannot be announced to {', '.join(addresses)} without a token: set {TOKEN_VARIABLE} to the "
                f"same secret here and at the servers"
            )
        context = None if tls is None else client_context(tls)
        self._targets: list[_Target] = []
        if token:
            self._targets = [_Target(address, partial(str, address), token, context) for address in addresses]
        if token and to_registry:
            self._targets.append(_Target("the registry", _RegistryFinder(str(log)), token, context))
        atexit.register(self.close)

    def announce(self, job: str, term: int, epoch: int) -> None:
        """Announce an epoch that was committed, by the writer of a term. Epoch -1: the writer begins."""
        for target in self._targets:
            target.put(job, term, epoch)

    def close(self) -> None:
        """Send the waiting announcements, for a short time, and end. Later announcements are not sent."""
        atexit.unregister(self.close)
        ends_s = time.monotonic() + EXIT_WAIT_S
        for target in self._targets:
            target.stop(max(0.0, ends_s - time.monotonic()))


class _RegistryFinder:
    """Finds the address of a log's registry. Storage may hang, so only the thread that sends calls it."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._next_look_s = 0.0

    def __call__(self) -> str | None:
        """Return the address in the record; None if there is no record, or there was none a moment ago."""
        if time.monotonic() < self._next_look_s:
            return None
        record = read_registry_file(open_filesystem(self._log))
        if record is None:
            self._next_look_s = time.monotonic() + RECORD_PAUSE_S
        return None if record is None else record.address


class _Target:
    """One receiver of announcements, and the thread that sends them. The thread starts with the first one."""

    def __init__(self, name: str, find: Callable[[], str | None], token: str, tls: ssl.SSLContext | None) -> None:
        self._name = name
        self._find = find
        self._token = token
        self._tls = tls
        self._client: Client | None = None
        self._has_failed = False
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[int, int]] = {}  # the newest (term, epoch) by job
        self._has_pending = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, job: str, term: int, epoch: int) -> None:
        """Have the thread send an epoch, in place of an earlier one that waits."""
        with self._lock:
            self._pending[job] = term, epoch
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name=f"sparkis-announce-{self._name}", daemon=True)
                self._thread.start()
        self._has_pending.set()

    def stop(self, timeout_s: float) -> None:
        """Send what waits once more, and end the thread; wait for that for some time."""
        self._stopping.set()
        self._has_pending.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._has_pending.wait()
            self._has_pending.clear()
            with self._lock:
                pending, self._pending = self._pending, {}
            if not self._send(pending):
                self._stopping.wait(RETRY_PAUSE_S)
                with self._lock:
                    self._pending = pending | self._pending
                    if self._pending and self._has_failed:
                        self._has_pending.set()
            if self._stopping.is_set():
                break
        self._disconnect()

    def _send(self, pending: dict[str, tuple[int, int]]) -> bool:
        """Send announcements; False if they were not received. The second attempt has a new connection."""
        for is_last in (self._client is None, True):
            try:
                if self._client is None and not self._connect():
                    return True  # there is no registry
                assert self._client is not None
                for job, (term, epoch) in pending.items():
                    self._client.call("NOTICE", job, str(epoch), str(term))
            except (SparkisError, OSError, ValueError) as error:
                self._disconnect()
                if is_last:
                    self._log_failure(error)
                    return False
            else:
                if self._has_failed:
                    logger.info("epochs are announced to %s again", self._name)
                self._has_failed = False
                return True
        return False

    def _connect(self) -> bool:
        address = self._find()
        if address is None:
            return False
        host, port = host_and_port(address)
        self._client = Client(host, port, password=self._token, timeout_s=REPLY_TIMEOUT_S, tls=self._tls)
        return True

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _log_failure(self, error: Exception) -> None:
        """Log the first of several failures: epochs are only late."""
        if not self._has_failed:
            logger.warning("epochs are not announced to %s: %s; its servers poll the log", self._name, error)
        self._has_failed = True
