"""A map of a million fields: written in one epoch and bit by bit, read, expired, replaced, deleted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from resp_server.protocol.replies import encode
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

pytestmark = pytest.mark.large

FIELDS = 1_000_000
EPOCHS = 1_000
STATES = (StateDescriptor("m", key="k", field="f", value="v"), StateDescriptor("v", key="k", value="v"))
KEY = b"job:m:1"


def name(number: int) -> bytes:
    return b"field:%07d" % number


def put(number: int, value: bytes, expire_at_ms: int | None = None, key: bytes = KEY) -> Change:
    return Change("m", Op.PUT, key, name(number), value, expire_at_ms)


def test_map_of_a_million_fields(tmp_path: Path, report: Any, serve_measured: Callable[..., Any]) -> None:
    log = tmp_path / "log"
    fields = {name(number): b"value %d" % number for number in range(FIELDS)}
    with LogWriter(log, "job", STATES) as writer:
        started_ms = now_ms()
        with report.timed("one epoch written", FIELDS):
            writer.publish(Change("m", Op.PUT, KEY, field, value) for field, value in fields.items())
        with serve_measured(log) as server:
            server.until("HLEN", KEY, reply=b":%d\r\n" % FIELDS)
            took_ms = now_ms() - started_ms
            _read(server, fields)
            with report.timed("epochs of one field", EPOCHS):
                for number in range(EPOCHS):
                    writer.publish([put(number, b"again")])
                    fields[name(number)] = b"again"
                server.until("HGET", KEY, name(EPOCHS - 1), reply=encode(b"again", 2))
            report("memory", server=server.memory(), applier=server.applier_memory())
            _expire(server, writer, now_ms() + 4 * took_ms)
            _replace(server, writer)


def _read(server: Any, fields: dict[bytes, bytes]) -> None:
    some = [name(number) for number in range(0, FIELDS, 101)]
    assert server.ask("HGET", KEY, some[7], show="HGET") == encode(fields[some[7]], 2)
    assert server.ask("HMGET", KEY, *some, show=f"HMGET of {len(some)}") == encode([fields[each] for each in some], 2)
    assert server.ask("HLEN", KEY, show="HLEN") == b":%d\r\n" % FIELDS
    assert server.ask("EXISTS", KEY, show="EXISTS") == b":1\r\n"
    assert server.ask("TYPE", KEY, show="TYPE") == b"+hash\r\n"
    for command, expected in (("HKEYS", fields.keys()), ("HVALS", fields.values())):
        lines = server.ask(command, KEY, show=command).split(b"\r\n")
        assert lines[0] == b"*%d" % FIELDS
        assert set(lines[2::2]) == set(expected)
    lines = server.ask("HGETALL", KEY, show="HGETALL").split(b"\r\n")
    assert lines[0] == b"*%d" % (2 * FIELDS)
    assert dict(zip(lines[2::4], lines[4::4], strict=False)) == fields
    found: set[bytes] = set()
    cursor = b"0"
    for steps in count(1):
        lines = server.ask("HSCAN", KEY, cursor, "COUNT", 4096, show="" if steps > 1 else "HSCAN COUNT 4096").split(
            b"\r\n"
        )
        found.update(lines[5::4])
        cursor = lines[2]
        if cursor == b"0":
            break
    found.discard(b"")
    assert found == fields.keys()


def _expire(server: Any, writer: LogWriter, due_ms: int) -> None:
    """A million fields that expire at once are gone at once, and are removed while the applier goes on."""
    key = b"job:m:2"
    writer.publish([*(put(number, b"", due_ms, key) for number in range(FIELDS)), put(FIELDS, b"stays", None, key)])
    server.until("HLEN", key, reply=b":%d\r\n" % (FIELDS + 1))
    server.ask("HLEN", key, show="HLEN of fields that will expire")
    assert now_ms() < due_ms
    while now_ms() <= due_ms:
        server.turns()
    assert server.ask("HLEN", key, show="HLEN when they have") == b":1\r\n"
    assert server.ask("HGETALL", key, show="HGETALL when they have") == encode([name(FIELDS), b"stays"], 2)
    assert server.ask("TYPE", key, show="TYPE when they have") == b"+hash\r\n"
    server.ask("HSCAN", key, 0, "COUNT", 4096, show="HSCAN when they have")
    writer.publish([Change("v", Op.PUT, b"job:v:1", None, b"1")])
    server.wait_for("epoch during the removal", "GET", b"job:v:1", reply=encode(b"1", 2))
    assert server.ask("HLEN", key) == b":1\r\n"


def _replace(server: Any, writer: LogWriter) -> None:
    """Deleted and made anew in one epoch, then emptied as a state that is replaced, then deleted."""
    writer.publish([Change("m", Op.CLEAR, KEY), *(put(number, b"new") for number in range(10))])
    server.wait_for("epoch that replaces a million fields by ten", "HLEN", KEY, reply=b":10\r\n")
    writer.publish([Change("v", Op.PUT, b"job:v:1", None, b"2")])
    server.wait_for("epoch after it", "GET", b"job:v:1", reply=encode(b"2", 2))
    writer.publish((put(number, b"", None, b"job:m:3") for number in range(FIELDS)), replaces=["m"])
    server.wait_for("epoch that replaces the state by another million", "HLEN", b"job:m:3", reply=b":%d\r\n" % FIELDS)
    assert server.ask("EXISTS", KEY, b"job:m:2") == b":0\r\n"
    writer.publish([Change("m", Op.DELETE, b"job:m:3")])
    server.wait_for("epoch that deletes a million fields", "EXISTS", b"job:m:3", reply=b":0\r\n")
