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
from pathlib import Path
from urllib.parse import quote

from pyspark.sql import SparkSession

from resp_server import children
from resp_server.client import Client
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
CONTROL_TIMEOUT_S = 5.0
# A server that dies is started again at once, and after that with pauses that double up to the longest.
RESTART_PAUSE_S = 1.0
RESTART_PAUSE_S_MAX = 60.0
WAIT_AGAIN_S = 0.1


class ServedEndpoint(endpoints.Endpoint):
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
        self.log = log
        self._temporary = temporary
        self._command = command
        self._environment = environment
        self._token = environment[TOKEN_VARIABLE]
        self._client: Client | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process, ports = self._start(port=None)
        self.port = ports["port"]
        self._control_port = ports["control_port"]
        secret = f":{quote(password, safe='')}@" if password else ""
        self.url = f"redis://{secret}{f'[{host}]' if ':' in host else host}:{self.port}"
        endpoints.add(log, self)
        atexit.register(self.stop)
        self._keeper = threading.Thread(target=self._keep_running, name="sparkis-server", daemon=True)
        self._keeper.start()

    def __repr__(self) -> str:
        return f"ServedEndpoint(port={self.port}, log={self.log!r})"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

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
                    logger.debug("the server at port %d did not answer %s: %s", self.port, words[0], error)
                    self._disconnect()

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
                logger.debug("the server at port %d did not answer WAIT: %s", self.port, error)
            if time.monotonic() >= deadline or self._stopping.is_set():
                return False
            time.sleep(WAIT_AGAIN_S)

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

    def _connect(self) -> Client:
        """Connect to the control listener."""
        return Client("127.0.0.1", self._control_port, password=self._token, timeout_s=CONTROL_TIMEOUT_S)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


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
    temporary = _temporary_folder() if store is None else None
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
    return endpoint


def _temporary_folder() -> Path:
    """Return a folder that goes with this process. It can be made anew from the log at any time."""
    folder = Path(tempfile.mkdtemp(prefix="sparkis-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
