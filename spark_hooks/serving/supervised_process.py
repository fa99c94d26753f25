"""A child process of the driver that is started again when it dies, and ends with the driver."""

from __future__ import annotations

import json
import logging
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.serve")

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
# A child that dies is started again at once, and after that with pauses that double up to the longest.
RESTART_PAUSE_S = 1.0
RESTART_PAUSE_S_MAX = 60.0


class SupervisedProcess:
    """A child that prints one line of JSON when it listens, with its `port`, and ends when its input does.

    what         what it is, in messages: "the sparkis server"
    on_restart   called with what it said, whenever it was started again; on the same port
    last_words   by exit code: an end that is the last one, and what is said then
    """

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_restart: Callable[[dict[str, Any]], None] = lambda said: None,
        last_words: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._what = what
        self._command = list(command)
        self._environment = dict(environment)
        self._on_restart = on_restart
        self._last_words = last_words
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._process, self.said = self._start(port=None)
        self.port: int = self.said["port"]
        self._keeper = threading.Thread(target=self._keep_running, name=what.replace(" ", "-"), daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Its process id, which is another one after each start."""
        return self._process.pid

    def stop(self) -> None:
        """End it; may be called twice."""
        self._stopping.set()
        with self._starting:
            process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self, port: int | None) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """Start it, on a given port if it had one; SparkisError if it ends or stays silent too long."""
        process = subprocess.Popen(
            [*self._command, *([] if port is None else ["--port", str(port)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a shell is the driver's to handle; the end of its input ends the child
        )
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            process.kill()
            process.wait()
            at = "" if port is None else f" at port {port}"
            raise SparkisError(f"{self._what} did not start{at}; the line above tells why (is the port in use?)")
        said: dict[str, Any] = json.loads(line)
        return process, said

    def _keep_running(self) -> None:
        """Start it again when it dies: at once, then after pauses that double."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code = self._process.wait()
            if self._stopping.is_set():
                return
            if code in self._last_words:
                logger.error("%s has ended: %s", self._what, self._last_words[code])
                return
            logger.warning("%s at port %d died; starting it again", self._what, self.port)
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
        process, said = self._start(self.port)
        with self._starting:
            self._process, self.said = process, said
        if self._stopping.is_set():
            process.kill()
            process.wait()
            return
        self._on_restart(said)
