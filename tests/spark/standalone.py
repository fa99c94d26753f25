"""Spark's own cluster manager: a master and workers, each a process that starts executors as processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

from compat.waiting import WAIT_S_MAX, eventually


class Daemon:
    """A Spark daemon with its log."""

    def __init__(self, log: Path, name: str, *arguments: str) -> None:
        self._log = log
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [f"{_find_spark_home()}/bin/spark-class", f"org.apache.spark.deploy.{name}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, pattern: str) -> str:
        """Return the first group of the first match in its log."""
        eventually(
            lambda: self._log.read_text(errors="replace"),
            lambda said: re.search(pattern, said),
            processes=[self.process],
        )
        found = re.search(pattern, self._log.read_text(errors="replace"))
        assert found is not None
        return found[1]

    def end(self) -> None:
        """End the daemon as Spark's scripts do."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WAIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def standalone(folder: Path, workers: int) -> Iterator[str]:
    """Run a master and workers of one core each while the block runs; yield the master's URL."""
    daemons: list[Daemon] = []
    try:
        options = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        master = Daemon(folder / "master.log", "master.Master", *options)
        daemons.append(master)
        url = master.wait_for(r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            own = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"worker-{number}"))
            worker = Daemon(folder / f"worker-{number}.log", "worker.Worker", *options, *own, url)
            daemons.append(worker)
        for worker in daemons[1:]:
            worker.wait_for(r"(Successfully registered with master)")
        yield url
    finally:
        for daemon in reversed(daemons):
            daemon.end()
