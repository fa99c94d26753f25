"""Serving from a driver: a server process beside it that ends with it.

    endpoint = sparkis.serve(spark)      endpoint.url, endpoint.stop()

The server follows the session's change log like any other server. What the driver adds: it tells the server of each
epoch at once, and can wait until the epoch can be read.
"""

from __future__ import annotations

import atexit
import json
import logging
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote

from pyspark.sql import SparkSession

from resp_server import children
from resp_server.control import TOKEN_VARIABLE
from resp_server.process import PASSWORD_VARIABLE, WORKERS_MAX
from spark_hooks import endpoints
from spark_hooks.sink import LOG_SETTING
from state_backend.change_log import check_writable
from state_backend.errors import SparkisError
from state_backend.filesystems import open_filesystem

logger = logging.getLogger("sparkis.serve")

DEFAULT_LOG = "sparkis-log"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
# A server that dies is started again at once, and after that with pauses that double up to the longest.
RESTART_PAUSE_S = 1.0
RESTART_PAUSE_S_MAX = 60.0


class ServedEndpoint(endpoints.ControlledEndpoint):
    """A server process beside the driver. `url` is what a Redis client connects to; `log` the log that it follows.

    A server that dies is started again on the same port, with the store it had.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        *,
        log: str,
        host: str,
        password: str | None,
        temporary: Path | None,
    ) -> None:
        super().__init__()
        self.log = log
        self._temporary = temporary
        self.address_file = _temporary_folder("server") / "address.json"  # nobody else can look into the folder
        self._command = command
        self._environment = environment
        self._token = environment[TOKEN_VARIABLE]
        self._process, ports = self._start(port=None)
        self.port = ports["port"]
        self._control_port = ports["control_port"]
        self._address().write(self.address_file)
        secret = f":{quote(password, safe='')}@" if password else ""
        self.url = f"redis://{secret}{f'[{host}]' if ':' in host else host}:{self.port}"
        endpoints.add(log, self)
        atexit.register(self.stop)
        self._keeper = threading.Thread(target=self._keep_running, name="sparkis-server", daemon=True)
        self._keeper.start()

    def __repr__(self) -> str:
        return f"ServedEndpoint(port={self.port}, log={self.log!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """End the server; clients are disconnected. The log stays as it is."""
        self._stopping.set()
        atexit.unregister(self.stop)
        endpoints.remove(self.log, self)
        with self._lock:
            self._disconnect()
            process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(self.address_file.parent, ignore_errors=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _start(self, port: int | None) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
        """Start a server, on a given port if it had one; SparkisError if it ends or stays silent too long."""
        process = subprocess.Popen(
            [*self._command, *([] if port is None else ["--port", str(port)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a shell is the driver's to handle; the end of its input ends the server
        )
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            process.kill()
            process.wait()
            at = "" if port is None else f" at port {port}"
            raise SparkisError(f"the sparkis server did not start{at}; the line above tells why (is the port in use?)")
        ports: dict[str, int] = json.loads(line)
        return process, ports

    def _keep_running(self) -> None:
        """Start the server again when it dies: at once, then after pauses that double."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            self._process.wait()
            if self._stopping.is_set():
                return
            logger.warning("the sparkis server at port %d died; starting it again", self.port)
            if time.monotonic() - began_s > RESTART_PAUSE_S_MAX:
                pause_s = 0.0
            is_told = False
            while not self._stopping.wait(pause_s):
                pause_s = min(max(2 * pause_s, RESTART_PAUSE_S), RESTART_PAUSE_S_MAX)
                try:
                    self._start_again()
                    break
                except SparkisError as error:
                    if not is_told:  # it may go on for hours
                        logger.error("%s; tried again after pauses of up to %d s", error, RESTART_PAUSE_S_MAX)
                    is_told = True

    def _start_again(self) -> None:
        process, ports = self._start(self.port)
        with self._lock:
            self._process, self._control_port = process, ports["control_port"]
            self._disconnect()
        if self._stopping.is_set():
            process.kill()
        with suppress(OSError):  # the folder goes with the endpoint; who finds no address does without notices
            self._address().write(self.address_file)

    def _address(self) -> endpoints.ControlAddress:
        return endpoints.ControlAddress(self._control_port, self._token)


def serve(
    spark: SparkSession,
    *,
    log: str | Path | None = None,
    port: int = 0,
    bind: str | Sequence[str] = ("127.0.0.1",),
    password: str | None = None,
    store: str | Path | None = None,
    role: str = "master",
    workers: int = 1,
) -> ServedEndpoint:
    """Start a server beside this driver and make its log the session's; return where it is.

    log       the change log's root: the setting spark.sparkis.log, else the folder `sparkis-log` in the working folder
    port      0 takes a free one
    bind      where to listen, one address or several; beyond loopback set a password, or only this machine is answered
    password  what clients must send with AUTH
    store     a folder to keep the server's store in over restarts; a temporary one unless given
    role      `master`, or `slave` for clients that should know that nothing can be written
    workers   processes that serve the port; each can keep a core busy

    The server is a process of its own without a JVM; it ends with the driver. Raises SparkisError if it does not start.
    ValueError for a number of workers that is none.
    """
    if not 1 <= workers <= WORKERS_MAX:
        raise ValueError(f"workers={workers!r}: give a number of processes from 1 to {WORKERS_MAX}")
    root = open_filesystem(log or spark.conf.get(LOG_SETTING, None) or DEFAULT_LOG).root
    check_writable(root)
    hosts = [bind] if isinstance(bind, str) else list(bind)
    temporary = _temporary_folder("store") if store is None else None
    command = [sys.executable, "-m", "resp_server.process", "--child", "--compact", "--log", root, "--port", str(port)]
    command += ["--bind", *hosts, "--role", role, "--loglevel", "warning", "--store", str(temporary or store)]
    command += ["--workers", str(workers)]
    environment = children.environment() | {TOKEN_VARIABLE: secrets.token_hex(16)}
    environment.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        environment[PASSWORD_VARIABLE] = password
    host = "127.0.0.1" if hosts[0] == "0.0.0.0" else hosts[0]
    endpoint = ServedEndpoint(command, environment, log=root, host=host, password=password, temporary=temporary)
    spark.conf.set(LOG_SETTING, root)
    spark.conf.set(endpoints.ADDRESS_SETTING, str(endpoint.address_file))
    return endpoint


def _temporary_folder(what: str) -> Path:
    """Return a folder that goes with this process."""
    folder = Path(tempfile.mkdtemp(prefix=f"sparkis-{what}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
