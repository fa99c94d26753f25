"""An epoch of five million changes, applied while others read the epoch before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resp_server.protocol.replies import encode
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.large.conftest import publish_values, reading

pytestmark = pytest.mark.large

CHANGES = 5_000_000
KEPT = 100_000
STATES = (StateDescriptor("v", key="k", value="v"),)


def key(number: int) -> bytes:
    return b"job:v:%08d" % number


def put(number: int, value: bytes) -> Change:
    return Change("v", Op.PUT, key(number), None, value)


def test_epoch_of_five_million_changes_is_applied(
    tmp_path: Path, report: Any, serve_measured: Callable[..., Any]
) -> None:
    log = tmp_path / "log"
    (tmp_path / "keys").write_bytes(b"\n".join(key(number) for number in range(KEPT)))
    with LogWriter(log, "job", STATES) as writer:
        writer.publish(put(number, b"before") for number in range(KEPT))
        with serve_measured(log) as server:
            server.until("DBSIZE", reply=b":%d\r\n" % KEPT)
            with reading(server.port, tmp_path / "keys") as latencies:
                latencies()
                with report.timed("written to the log", CHANGES):
                    publish_values(writer, CHANGES, "after ")
                report("reads while it was written", **latencies())
                with report.timed("from the commit until it can be read", CHANGES):
                    server.until("DBSIZE", reply=b":%d\r\n" % CHANGES)
                report("reads while it was applied", **latencies(), **server.turns())
                assert server.ask("GET", key(CHANGES - 1)) == encode(b"after %08d" % (CHANGES - 1), 2)
                assert server.ask("GET", key(1)) == encode(b"after 00000001", 2)
                for _ in range(20):
                    server.turns()
                report("reads afterwards", **latencies())
            report("memory", server=server.memory(), applier=server.applier_memory())
