"""A server beside the driver that outlives the driver for a while. The next driver of the log takes it over.

A driver finds the server of its log by a record on this machine (see `resp_server.serving.server_file`). It holds a
lease, a connection to the server's control port (see `resp_server.serving.driver_leases`). If the server dies while a
driver holds a lease, the driver that started it restarts it, or the one that took it over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client
from resp_server.net.tls import TlsFiles
from resp_server.programs.executor_supervisor import start_of
from resp_server.serving.server_file import ServerFile, folder_of, last_port, locked
from spark_hooks.serving.endpoints import ControlAddress
from spark_hooks.serving.supervised_process import STOP_TIMEOUT_S, SupervisedProcess
from state_backend import VERSION
from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.serve")

# The interval of the requests that renew the lease, and the pause before the next attempt to reach a lost server.
LEASE_S = 1.0
POLL_S = 0.02


class DetachedServer:
    """The server of one log.

    Args:
        command: Without port, store and linger time.
        port: 0: the last one, or any free one.
        linger_s: How long the server stays without a driver.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        *,
        log: str,
        port: int,
        store: str | None,
        tls: TlsFiles | None,
        linger_s: float,
    ) -> None:
        self._log, self._tls, self._linger_s = log, tls, linger_s
        self.on_change: Callable[[], None] = lambda: None
        self.folder = folder_of(log)
        self._environment = environment
        self._command = [*command, "--child", "--linger", str(linger_s), "--record", str(self.folder)]
        self._command += ["--store", store or str(self.folder / "store")]
        self._options = _options_of(command, environment, port, store)
        self._process: SupervisedProcess | None = None  # None: another driver started it
        self._stopping = threading.Event()
        self._lease: Client | None = None
        with locked(self.folder):
            if not self._take_over():
                self._start(port or _if_free(last_port(self.folder)))
                self._take_lease()
        self._thread = threading.Thread(target=self._keep_lease, name="sparkis-lease", daemon=True)
        self._thread.start()

    @property
    def is_taken_over(self) -> bool:
        """Whether another driver started the server."""
        return self._process is None

    @property
    def address(self) -> ControlAddress:
        """The current address of the control port."""
        return ControlAddress(self.record.control_port, self.record.token, tls=self._tls)

    def lifetime_text(self, *, outlives_exit: bool) -> str:
        """Return a log line that says where the server is and when it ends.

        Args:
            outlives_exit: Also the driver's exit.
        """
        verb = "took over the server of" if self.is_taken_over else "started a server for"
        when = "the driver's end" if outlives_exit else "a crash of the driver"
        stays = "for ever" if self._linger_s == math.inf else f"{self._linger_s:g} s"
        end = f"it stays {stays} after {when}" if self._linger_s else "it ends with the driver"
        return (
            f"{verb} {self._log} at port {self.record.port}; {end}. To end it at once: "
            f"endpoint.stop(), or: sparkis stop --log {self._log}. Its messages: {self.folder / 'server.log'}"
        )

    def has_options(self, command: Sequence[str], environment: dict[str, str], port: int, store: str | None) -> bool:
        """Return whether the server has these options and has not been stopped."""
        options = _options_of(command, environment, port, store)
        return self._options == options and ServerFile.read(self.folder) is not None

    def set_linger(self, linger_s: float) -> None:
        """Change how long the server stays without a driver; the server gets the new time within a second."""
        self._linger_s = linger_s

    def stop(self) -> None:
        """End the server at once, unless another driver has a lease. May be called twice."""
        if self._stopping.is_set():
            return
        self._end_thread()
        if self._process is not None:
            self._process.abandon()
        record = self.record
        others = self._request_end(record)
        self.leave()
        if others:
            logger.info("the server of %s stays: %d other drivers use it", self._log, others)
        elif self._process is not None:
            self._process.stop()
        else:
            _wait_for_end_of(record)

    def _request_end(self, record: ServerFile) -> int:
        """Request a server's end, again while it lives without an answer: a state server behind a proxy may restart.

        Return how many other drivers have a lease of it.
        """
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while True:
            try:
                with record.connect() as client:
                    # This driver's lease is another connection.
                    return int(client.call("STOP", "1" if self._lease is not None else "0"))
            except (SparkisError, OSError):
                if record.start is None or start_of(record.pid) != record.start or time.monotonic() > deadline_s:
                    return 0
                time.sleep(POLL_S)

    def leave(self) -> None:
        """Release the lease: the server ends after its linger time, unless another driver has a lease."""
        self._end_thread()
        if self._process is not None:
            self._process.abandon()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _end_thread(self) -> None:
        """End the thread that keeps the lease, so that it takes no other lease and starts no server."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _take_over(self) -> bool:
        """Take a lease of the log's running server, if it has the same options; return whether it has.

        A server with other options is ended if no driver has a lease of it; SparkisError if a driver has.
        """
        record = ServerFile.read(self.folder)
        if record is None:
            return False
        others = 0
        with suppress(SparkisError, OSError):  # the server ends, or has ended without removing its record
            if record.options == self._options:
                self.record = record
                self._take_lease()
                return True
            with record.connect() as client:
                others = client.call("STOP", "0")
            logger.warning("the server of %s at port %d had other options", self._log, record.port)
        if others:
            raise SparkisError(
                f"the log {self._log} is served with other options at port {record.port}, for another driver "
                f"(the server is process {record.pid}). Pass the same options, or end that server: "
                f"sparkis stop --log {self._log}"
            )
        _wait_for_end_of(record)
        return False

    def _start(self, port: int) -> None:
        token = secrets.token_hex(16)
        log_file = self.folder / "server.log"
        log_file.write_bytes(b"")
        self._process = SupervisedProcess(
            "the sparkis server",
            [*self._command, "--port", str(port)],
            self._environment | {TOKEN_VARIABLE: token},
            lambda ready_report: self._write_record(ready_report, token),
            final_exits={0: f"it was ended, by a signal or by: sparkis stop --log {self._log}"},
            log_file=log_file,
        )
        self._write_record(self._process.ready_report, token)

    def _write_record(self, ready_report: dict[str, Any], token: str) -> None:
        assert self._process is not None
        port, control_port = ready_report["port"], ready_report["control_port"]
        pid = self._process.pid
        record = ServerFile(self._log, pid, start_of(pid), port, control_port, token, self._options, self._tls)
        record.write(self.folder)
        self.record = record
        self.on_change()

    def _take_lease(self) -> None:
        client = self.record.connect()
        client.call("LEASE", str(self._linger_s))
        self._lease = client

    def _keep_lease(self) -> None:
        """Renew the lease once a second. If the server was replaced, take a lease of the new one."""
        failures = 0
        while not self._stopping.wait(LEASE_S):
            try:
                if self._lease is None:
                    self._take_lease()
                else:
                    self._lease.call("LEASE", str(self._linger_s))
                failures = 0
            except (SparkisError, OSError):
                if self._lease is not None:
                    self._lease.close()
                    self._lease = None
                failures += 1
                self._find_server(failures)

    def _find_server(self, failures: int) -> None:
        """Find the log's server by its record: give up if it was ended, replace it if it died.

        Args:
            failures: In a row. The driver that started a server restarts it at once; other drivers wait for one failure
                more.
        """
        record = ServerFile.read(self.folder)
        if record is None or record.options != self._options:
            if self._process is None or self._process.has_ended:
                logger.warning("the server of %s was ended; call sparkis.serve again for another one", self._log)
                self._stopping.set()
        elif record != self.record:
            self.record = record
            self.on_change()
        elif self._process is None and failures > 1 and start_of(record.pid) != record.start:
            self._replace(is_first_attempt=failures == 2)

    def _replace(self, *, is_first_attempt: bool) -> None:
        """Start a server in place of the dead one, unless another driver has already done so."""
        with locked(self.folder):
            if ServerFile.read(self.folder) == self.record:
                try:
                    self._start(self.record.port)
                except SparkisError as error:
                    logger.log(logging.ERROR if is_first_attempt else logging.DEBUG, "%s; it is tried again", error)


def _options_of(command: Sequence[str], environment: dict[str, str], port: int, store: str | None) -> str:
    """Return the options that two drivers of one server must share, with a hash of passwords and other settings."""
    found = sorted(f"{name}={value}" for name, value in environment.items() if name.startswith("SPARKIS_"))
    secrets_hash = hashlib.blake2b("\0".join(found).encode(), digest_size=16).hexdigest()
    return json.dumps([VERSION, *command, port, store, secrets_hash])


def _if_free(port: int) -> int:
    """Return a port if it is free, else 0."""
    if port:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    return 0


def _wait_for_end_of(record: ServerFile) -> None:
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while record.start is not None and start_of(record.pid) == record.start and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def seconds_of(linger: float | None) -> float:
    """Return the linger time of an argument; None: for ever. ValueError for a negative one."""
    if linger is None:
        return math.inf
    if linger < 0 or math.isnan(linger):
        raise ValueError(f"linger={linger!r}: give a number of seconds, 0 or more, or None for ever")
    return float(linger)
