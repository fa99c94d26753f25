"""A thousand connections that track what they read, while epochs of a million changes, and of some thousand, come."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from resp_server.push.tracking_table import CLIENT_OF_KEY_BYTES, INVALIDATION_BYTES_PER_CHANGE_MAX, KEY_OVERHEAD_BYTES
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.large.conftest import WAIT_S_MAX, memory_mb, publish_values, reading

pytestmark = pytest.mark.large

CLIENTS = 1000
KEYS = 1_000_000
CHANGED_EVERY = 250
STATES = (StateDescriptor("v", key="k", value="v"),)
PROGRAM = Path(__file__).with_name("tracking_clients.py")


def key(number: int) -> bytes:
    return b"job:v:%08d" % number


@contextmanager
def tracking_clients(port: int, count: int) -> Iterator[Callable[..., dict[str, Any]]]:
    """Connect clients from a process of their own; a call has them do something, and returns what they saw."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(port), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def do(*words: object) -> dict[str, Any]:
        if words:
            process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
            process.stdin.flush()
        seen: dict[str, Any] = json.loads(process.stdout.readline())
        assert not seen["wrong"]
        del seen["wrong"]
        return seen

    try:
        do()
        yield do
    finally:
        process.stdin.close()
        try:
            process.wait(WAIT_S_MAX)
        finally:
            process.kill()
            process.stdout.close()


class Peak:
    """The most that a process had of its own memory, looked at 50 times a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_over = Event()
        self._thread = Thread(target=self._look)
        self.before_mb = self.own_mb = memory_mb(pid)["own"]

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def growth_mb(self) -> int:
        return self.own_mb - self.before_mb

    def _look(self) -> None:
        while not self._is_over.wait(0.02):
            self.own_mb = max(self.own_mb, memory_mb(self._pid)["own"])


def test_large_epochs_invalidate_1000_clients(tmp_path: Path, report: Any, serve_measured: Callable[..., Any]) -> None:
    log = tmp_path / "log"
    (tmp_path / "keys").write_bytes(b"\n".join(key(number) for number in range(0, KEYS, 50)))
    with LogWriter(log, "job", STATES) as writer:
        publish_values(writer, KEYS, "0:")
        with serve_measured(log) as server:
            server.until("DBSIZE", reply=b":%d\r\n" % KEYS)
            with reading(server.port, tmp_path / "keys") as latencies:
                cpu = [0.0]  # of the server until the last look

                def measure(what: str, **numbers: object) -> None:
                    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
                    now = (int(fields[11]) + int(fields[12])) / 100
                    report(what, **numbers, cpu_s=now - cpu[0])
                    cpu[0] = now
                    report("reads of others meanwhile", **latencies(), **server.turns())

                def change_all(epoch: int) -> None:
                    publish_values(writer, KEYS, f"{epoch}:")

                def change_some(epoch: int) -> None:
                    writer.publish(
                        Change("v", Op.PUT, key(number), None, b"%d:%08d" % (epoch, number))
                        for number in range(0, KEYS, CHANGED_EVERY)
                    )

                latencies()
                change_all(1)
                server.until("GET", key(1), reply=b"$10\r\n1:00000001\r\n")
                measure("a million changes, and nobody tracks")
                with tracking_clients(server.port, CLIENTS) as do, Peak(server.pid) as peak:
                    do("track")
                    read = do("read")
                    measure("all read", **read, growth_mb=peak.growth_mb)
                    for epoch, change, every in (
                        (2, change_some, CHANGED_EVERY),
                        (3, change_all, 1),
                        (4, change_some, CHANGED_EVERY),
                        (5, change_all, 1),
                    ):
                        do("read")
                        measure("all read again", growth_mb=peak.growth_mb)
                        do("expect", epoch, every)
                        change(epoch)
                        seen = do("told")
                        assert seen["clients_told"] == CLIENTS
                        measure(f"{KEYS // every} changes", **seen, growth_mb=peak.growth_mb)
                        do("ask")
                        measure("all ask once")
                    report("memory", before=peak.before_mb, peak=peak.own_mb, now=server.memory())
                    report("applier", **server.applier_memory())
                    # What is remembered of each key, ready replies, and what one change brings to all clients together.
                    table_bytes = read["held"] * (len(key(0)) + KEY_OVERHEAD_BYTES + CLIENT_OF_KEY_BYTES)
                    bytes_max = table_bytes + INVALIDATION_BYTES_PER_CHANGE_MAX
                    assert peak.growth_mb <= bytes_max >> 20
