"""What a server that only reads stores has in its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.fork_server import STARTS
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.client import Client
from state_backend.log.epochs import EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of


def publish(log: Path, query_id: str, value: bytes) -> None:
    writer = LogWriter(log, "job", [StateDescriptor("s", key="key", value="value")], query_id)
    _, inline = writer.change_files(0).write(runs_of([Change("s", Op.PUT, b"job:s:1", None, value)], ["s"]))
    writer.commit(0, EpochContent(files=[], inline=[inline] if inline else [], rows=1, digest=0), clock_ms=1)


class Running:
    """A server process of a log with one key."""

    def __init__(self, folder: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "resp_server.programs.serve",
            "--child",
            "--port",
            "0",
            "--log",
            str(folder / "log"),
        ]
        command += ["--store", str(folder / "store")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=children.environment() | {STARTS: "yes"}
        )
        assert self.process.stdout is not None
        self.client = Client("127.0.0.1", json.loads(self.process.stdout.readline())["port"], timeout_s=30)

    def mapped(self) -> str:
        """Return what is mapped in the process, as the system tells it."""
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.communicate(timeout=30)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    publish(tmp_path / "log", "q1", b"1")
    server = Running(tmp_path)
    assert server.client.call("GET", "job:s:1") == "1"
    yield server
    server.stop()


def test_server_that_reads_stores_loads_neither_arrow_nor_numpy(running: Running) -> None:
    assert running.client.call("SCAN", "0") == ["0", ["job:s:1"]]
    assert "job_job:" in running.client.call("INFO")
    assert "lmdb" in running.mapped()
    assert "libarrow" not in running.mapped()
    assert "numpy" not in running.mapped()


def test_replaced_store_is_closed_without_any_request(running: Running, tmp_path: Path) -> None:
    assert "/q1.1.0/data.mdb" in running.mapped()
    publish(tmp_path / "log", "q2", b"2")
    eventually(running.mapped, lambda mapped: "/q2" in mapped)
    eventually(running.mapped, lambda mapped: "/q1" not in mapped, "the end of the map of the store before")
    assert running.client.call("GET", "job:s:1") == "2"
