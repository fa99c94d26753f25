"""A value of 512 MB through a proxy with an upstream, both ways; and other clients meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

import pytest

from compat.conformance.servers import Running
from resp_server.backends.routing.long_arguments import VALUE_BYTES_MAX
from tests.server.conftest import Peer
from tests.server.overlay import Overlay

pytestmark = pytest.mark.large

PIECE = bytes(range(256)) * 4096


def test_value_of_512_mb_passes_through_proxy(tmp_path: Path, report: Any) -> None:
    with ExitStack() as stack:
        overlay = Overlay(tmp_path, stack)
        writer, reader = Peer(overlay.proxy.port), Peer(overlay.proxy.port)
        before, head = peak_bytes(overlay.proxy), b"$%d\r\n" % VALUE_BYTES_MAX
        with OthersMeasured(overlay.proxy, stack) as waits, report.timed("SET"):
            writer.send(b"*3\r\n$3\r\nSET\r\n$1\r\nv\r\n" + head)
            for _ in range(VALUE_BYTES_MAX // len(PIECE)):
                writer.send(PIECE)
            writer.expect_reply(b"\r\n", b"+OK\r\n")
        report("SET", peak_mb=(peak_bytes(overlay.proxy) - before) / 2**20, longest_wait_ms=1000 * max(waits))
        with OthersMeasured(overlay.proxy, stack) as waits, report.timed("GET"):
            reader.send(b"*2\r\n$3\r\nGET\r\n$1\r\nv\r\n")
            assert reader.read(len(head)) == head
            is_same = all(reader.read(len(PIECE)) == PIECE for _ in range(VALUE_BYTES_MAX // len(PIECE)))
            assert is_same and reader.read(2) == b"\r\n"
        report("GET", peak_mb=(peak_bytes(overlay.proxy) - before) / 2**20, longest_wait_ms=1000 * max(waits))


def peak_bytes(server: Running) -> int:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) << 10


class OthersMeasured:
    """Reads a state's key all the time; the seconds of each read."""

    def __init__(self, server: Running, stack: ExitStack) -> None:
        self._peer, self._ended, self._waits = Peer(server.port), Event(), [0.0]
        stack.callback(self._peer.socket.close)
        self._thread = Thread(target=self._run)

    def __enter__(self) -> list[float]:
        self._thread.start()
        return self._waits

    def __exit__(self, *ignored: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.001):
            began_s = perf_counter()
            assert self._peer.ask("GET", "job:speed:1") == b"10"
            self._waits.append(perf_counter() - began_s)
