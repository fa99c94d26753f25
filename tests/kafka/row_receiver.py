"""Receives the rows that `RowSender`, in a JVM, sends as a query emits them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyspark

from tests.kafka.broker import BUILD
from tests.kafka.truth import NO_FACTS, Facts

SOURCE = Path(__file__).with_name("RowSender.java")
SPARK_JARS = Path(pyspark.__file__).parent / "jars"


def row_sender_jar() -> Path:
    """Return the jar of RowSender, which is compiled if its source is newer."""
    jar, classes = BUILD / "row-sender.jar", BUILD / "row-sender"
    if not jar.exists() or jar.stat().st_mtime < SOURCE.stat().st_mtime:
        bin_ = Path(os.environ["JAVA_HOME"]) / "bin"
        compile_ = [bin_ / "javac", "--release", "17", "-cp", f"{SPARK_JARS}/*", "-d", classes, SOURCE]
        subprocess.run(compile_, check=True, capture_output=True)
        subprocess.run([bin_ / "jar", "cf", jar, "-C", classes, "."], check=True, capture_output=True)
    return jar


class RowReceiver:
    """The rows of each batch, by the run of the query and the partition that sent them last.

    A run that opens a batch again voids what earlier runs sent for it.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._run_of: dict[int, str] = {}
        self._rows: dict[int, dict[int, dict[int, tuple[int, int, int]]]] = defaultdict(dict)
        self._complete: dict[int, set[int]] = defaultdict(set)
        self.voided = self.received = 0
        self.hops_ms: list[float] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r", encoding="utf-8") as lines:
            _, run, batch, partition = next(lines).split("\t")
            rows = self._open(run, int(batch), int(partition))
            for line in lines:
                kind, *cells = line.rstrip("\n").split("\t")
                with self._lock:
                    if kind == "close":
                        if self._run_of[int(batch)] == run:
                            self._complete[int(batch)].add(int(partition))
                        connection.sendall(b"all\n")
                        return
                    rows[int(cells[1][1:])] = int(cells[2]), int(cells[3]), int(cells[4])
                    self.received += 1
                    self.hops_ms.append(time.time() * 1000 - int(cells[0]))

    def _open(self, run: str, batch: int, partition: int) -> dict[int, tuple[int, int, int]]:
        with self._lock:
            if self._run_of.setdefault(batch, run) != run:
                self._run_of[batch] = run
                self.voided += sum(map(len, self._rows[batch].values()))
                self._rows[batch].clear()
                self._complete[batch].clear()
            rows = self._rows[batch][partition] = {}
            return rows

    def states(self, batches: int, partitions: int) -> list[Facts]:
        """Return the state after each of so many batches, of which all rows of all partitions must have come."""
        state: list[Any] = list(NO_FACTS)
        found: list[Facts] = []
        for batch in range(batches):
            assert self._complete[batch] == set(range(partitions)), f"batch {batch}: {self._complete[batch]}"
            for rows in self._rows[batch].values():
                for key, facts in rows.items():
                    state[key] = facts
            found.append(tuple(state))
        return found

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()
