"""Values of 64 MiB under keys of 64 KiB, the whole way; and other clients while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resp_server.protocol.replies import encode
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import KEY_BYTES_MAX, VALUE_BYTES_MAX, Change, Op
from tests.large.conftest import reading

pytestmark = pytest.mark.large

STATES = (StateDescriptor("v", key="k", value="v"), StateDescriptor("m", key="k", field="f", value="v"))
KEY = b"job:v:".ljust(KEY_BYTES_MAX, b"k")
MAP = b"job:m:".ljust(KEY_BYTES_MAX, b"k")
FIELD = b"f" * KEY_BYTES_MAX
SHORT = [b"job:v:%d" % number for number in range(1000)]


def test_value_of_64_mib_is_written_and_read(tmp_path: Path, report: Any, serve_measured: Callable[..., Any]) -> None:
    log = tmp_path / "log"
    value = os.urandom(VALUE_BYTES_MAX - 7) + b"the end"
    (tmp_path / "keys").write_bytes(b"\n".join(SHORT))
    with LogWriter(log, "job", STATES) as writer, report.timed("written and read"):
        writer.publish(
            [
                Change("v", Op.PUT, KEY, None, value),
                Change("m", Op.PUT, MAP, FIELD, value),
                *(Change("v", Op.PUT, key, None, b"short") for key in SHORT),
            ]
        )
        with serve_measured(log) as server:
            server.until("EXISTS", KEY, reply=b":1\r\n")
            report("memory after the epoch", server=server.memory(), applier=server.applier_memory())
            with reading(server.port, tmp_path / "keys") as latencies:
                _read(server, value)
                report("other reads meanwhile", **latencies())
                _read(server, value)
                report("and once more", **latencies())
            report("memory", server=server.memory(), applier=server.applier_memory())


def _read(server: Any, value: bytes) -> None:
    assert server.ask("GET", KEY, show="GET of 64 MiB") == encode(value, 2)
    assert server.ask("HGET", MAP, FIELD, show="HGET of 64 MiB") == encode(value, 2)
    assert server.ask("HGETALL", MAP, show="HGETALL of 64 MiB") == encode({FIELD: value}, 2)
    assert server.ask("STRLEN", KEY, show="STRLEN") == b":%d\r\n" % len(value)
    assert server.ask("HSTRLEN", MAP, FIELD, show="HSTRLEN") == b":%d\r\n" % len(value)
    assert server.ask("GETRANGE", KEY, -7, -1, show="GETRANGE of 7 bytes") == encode(b"the end", 2)
    assert server.ask("GETRANGE", KEY, 1, -2, show="GETRANGE of nearly all") == encode(value[1:-1], 2)
    assert server.ask("MGET", KEY, KEY, show="MGET of twice") == encode([value, value], 2)
    server.ask("SCAN", 0, "COUNT", 1000, show="SCAN")
