"""A child process of the driver: restarted when it dies, ended with the driver."""

from __future__ import annotations

import json
import logging
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from state_backend.model.errors import SparkisError

logger = logging.getLogger("sparkis.serve")

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
# A child that dies is restarted at once; further failures are followed by pauses that double up to the longest.
RESTART_PAUSE_S = 1.0
RESTART_PAUSE_S_MAX = 60.0


class SupervisedProcess:
    """A child process that prints one line of JSON, with its `port`, when it listens, and ends when its stdin closes.

    label        the name of the process in messages: "the sparkis server"
    on_restart   called with the content of that line after each restart; the port stays the same
    log_file     where the process writes its messages, so that it can outlive this one; None: to this process' stderr
    final_exits  exit codes after which the process is not restarted, with the message to log for each
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_restart: Callable[[dict[str, Any]], None] = lambda ready_report: None,
        final_exits: Mapping[int, str] = MappingProxyType({}),
        log_file: Path | None = None,
    ) -> None:
        self._label = label
        self._command = list(command)
        self._environment = dict(environment)
        self._on_restart = on_restart
        self._final_exits = final_exits
        self._log_file = log_file
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._process, self.ready_report = self._start(port=None)
        self.port: int = self.ready_report["port"]
        self._monitor = threading.Thread(target=self._run, name=label.replace(" ", "-"), daemon=True)
        self._monitor.start()

    @property
    def pid(self) -> int:
        """The process id; each restart changes it."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended and will not be restarted."""
        return not self._monitor.is_alive()

    def stop(self) -> None:
        """End the process; may be called twice."""
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

    def abandon(self) -> None:
        """Do not restart the process when it ends."""
        self._stopping.set()

    def _start(self, port: int | None) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """Start the process and return it with its JSON line; SparkisError if it ends or is not ready in time.

        Args:
            port: The port of the process before, or None at the first start.
        """
        log = None if self._log_file is None else self._log_file.open("ab")
        with log or nullcontext():
            process = subprocess.Popen(
                [*self._command, *([] if port is None else ["--port", str(port)])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in a shell is for the driver, which closes the child's stdin
            )
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if readable else b""
        if not line:
            process.kill()
            process.wait()
            at = "" if port is None else f" at port {port}"
            raise SparkisError(f"{self._label} did not start{at}{self._reason()}")
        ready_report: dict[str, Any] = json.loads(line)
        return process, ready_report

    def _reason(self) -> str:
        """Return why the process did not start, from the last line of its log file."""
        if self._log_file is None:
            return "; the line above has the reason (is the port in use?)"
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else f"; {self._log_file} has no reason"

    def _run(self) -> None:
        """Restart the process whenever it dies."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code = self._process.wait()
            if self._stopping.is_set():
                return
            if code in self._final_exits:
                logger.error("%s has ended: %s", self._label, self._final_exits[code])
                return
            logger.warning("%s at port %d died; restarting it", self._label, self.port)
            if time.monotonic() - began_s > RESTART_PAUSE_S_MAX:
                pause_s = 0.0
            is_reported = False
            while not self._stopping.wait(pause_s):
                pause_s = min(max(2 * pause_s, RESTART_PAUSE_S), RESTART_PAUSE_S_MAX)
                try:
                    self._restart()
                    break
                except SparkisError as error:
                    if not is_reported:  # once: the failures may go on for hours
                        logger.error("%s; retried after pauses of up to %d s", error, RESTART_PAUSE_S_MAX)
                    is_reported = True

    def _restart(self) -> None:
        process, ready_report = self._start(self.port)
        with self._starting:
            self._process, self.ready_report = process, ready_report
        if self._stopping.is_set():
            process.kill()
            process.wait()
            return
        self._on_restart(ready_report)
