"""Tests of real sizes, which take minutes and gigabytes; run only with `-m large` (`make test-large`).

Results are asserted; times and memory are printed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from compat.conformance.servers import Running, sparkis_server
from compat.conformance.wire import LAST_COMMAND, LAST_REPLY, request
from compat.waiting import eventually
from state_backend.codec.row_encoding import hash_positions_of
from state_backend.log.epochs import EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.records import RUN_ROWS_MAX, Op, schema

WAIT_S_MAX = 600.0
SERVER = Path(__file__).with_name("measured_server.py")
READER = Path(__file__).with_name("latency.py")


class Report:
    """Prints measurements at once, so that a long test shows its progress."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, what: str, **numbers: object) -> None:
        shown = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
        )
        print(f"{self._name}: {what}: {shown}", flush=True)

    @contextmanager
    def timed(self, what: str, count: int = 0) -> Iterator[None]:
        """Print how long a block took, and per one of `count`."""
        started = perf_counter()
        yield
        took_s = perf_counter() - started
        self(what, seconds=took_s, **({"microseconds_each": took_s * 1e6 / count} if count else {}))


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    return Report(request.node.name)


def memory_mb(pid: int) -> dict[str, int]:
    """Return a process's memory and its peak; `own` is without pages of mapped files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    names = {"own": "RssAnon", "of_files": "RssFile", "peak": "VmHWM"}
    return {name: int(status[field].split()[0]) >> 10 for name, field in names.items() if field in status}


class Measured:
    """A server whose longest turn is measured, and a client of it."""

    def __init__(self, server: Running, folder: Path, report: Report) -> None:
        self.server = server
        self.port = server.port
        self.pid = server.process.pid
        self._out = folder / "turns.json"
        self._report = report
        self._socket = socket.create_connection(("127.0.0.1", server.port), WAIT_S_MAX)

    @property
    def applier_pid(self) -> int:
        """The process that writes the store."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(children[0])

    def turns(self) -> dict[str, float]:
        """Return the longest turn since the last call, in ms: by the clock, and by processor time."""
        self._out.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        eventually(lambda: self.ask("PING") and self._out.exists())  # a signal alone does not wake the server's loop
        return dict(json.loads(self._out.read_text()))

    def ask(self, *words: bytes | str | int, show: str = "") -> bytes:
        """Return the reply to a request as it was sent.

        With `show`, print when its first and its last byte came, and the server's longest turn meanwhile.
        """
        if show:
            self.turns()
        started = perf_counter()
        self._socket.sendall(request(*words) + request(LAST_COMMAND))
        data = bytearray(self._socket.recv(1))
        first_s = perf_counter() - started
        while not data.endswith(LAST_REPLY):
            data += self._socket.recv(1 << 20)
        whole_s = perf_counter() - started
        if show:
            self._report(show, first_ms=first_s * 1e3, whole_ms=whole_s * 1e3, bytes=len(data), **self.turns())
        return bytes(data[: -len(LAST_REPLY)])

    def wait_for(self, what: str, *words: bytes | str | int, reply: bytes) -> None:
        """Print the time from now until a request has this reply."""
        with self._report.timed(what):
            self.until(*words, reply=reply)

    def memory(self) -> dict[str, int]:
        """Return the server's memory in MB."""
        return memory_mb(self.pid)

    def applier_memory(self) -> dict[str, int]:
        """Return the applier's memory in MB."""
        return memory_mb(self.applier_pid)

    def until(self, *words: bytes | str | int, reply: bytes) -> None:
        """Repeat a request until its reply is this one."""
        eventually(lambda: self.ask(*words), lambda found: found == reply, f"{words}", timeout_s=WAIT_S_MAX)


@pytest.fixture
def serve_measured(tmp_path: Path, report: Report) -> Iterator[Callable[..., Any]]:
    """Serve a log by a process that measures its turns."""

    @contextmanager
    def served(log: Path, *options: str) -> Iterator[Measured]:
        os.environ["MEASURED_TO"] = str(tmp_path / "turns.json")
        with sparkis_server(tmp_path / "stores", log, *options, program=(str(SERVER),)) as server:
            yield Measured(server, tmp_path, report)

    return served


@contextmanager
def reading(port: int, keys: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """Read keys one by one in a process of its own; a call returns the latencies in ms since the last call."""
    process = subprocess.Popen(
        [sys.executable, str(READER), str(port), str(keys)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def latencies() -> dict[str, float]:
        process.stdin.write(b"\n")
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))

    try:
        yield latencies
    finally:
        process.stdin.close()
        process.wait(WAIT_S_MAX)
        process.stdout.close()


def publish_values(writer: LogWriter, count: int, value: str) -> None:
    """Commit an epoch that puts `job:v:<number>` for so many numbers, a column at a time as the sink writes rows."""
    rows = 0

    def runs() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for start in range(0, count, RUN_ROWS_MAX):
            numbers = np.char.zfill(np.arange(start, min(count, start + RUN_ROWS_MAX)).astype(np.str_), 8)
            keys = pa.array(np.char.add("job:v:", numbers), pa.string()).cast(pa.binary())
            n = len(keys)
            run = pa.RecordBatch.from_arrays(
                [
                    pa.array(hash_positions_of(keys)),
                    pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int16)), pa.array(["v"], pa.string())),
                    pa.array(np.full(n, int(Op.PUT), np.uint8)),
                    keys,
                    pa.nulls(n, pa.binary()),
                    pa.array(np.char.add(value, numbers), pa.string()).cast(pa.binary()),
                    pa.nulls(n, pa.int64()),
                ],
                schema=schema(),
            )
            rows += n
            yield run.take(pc.sort_indices(run.column("position")))

    number = writer.last.epoch + 1 if writer.last else 0
    file = writer.change_files(number).write_file(runs())
    writer.commit(number, EpochContent(files=[file], rows=rows, digest=number), clock_ms=now_ms())
