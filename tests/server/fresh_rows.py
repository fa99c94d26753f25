"""A query in Real-Time Mode as a server sees it: its writer's rows, and the epochs of its attachment."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from compat.conformance.servers import sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.codec import packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.unsafe_rows import unsafe_row

TYPES = {"string": pa.string(), "long": pa.int64(), "double": pa.float64()}
COLUMNS = {"sensor": "string", "n": "long", "temp": "double", "note": "string"}
SCHEMA = json.dumps(
    {
        "type": "struct",
        "fields": [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in COLUMNS.items()],
    }
)
STATES = [
    StateDescriptor("max", key="sensor", value="temp"),
    StateDescriptor("all", key="sensor", value=("n", "temp")),
    StateDescriptor("note", key="sensor", value="note"),
]
Row = tuple[Any, ...]


def frame(*rows: Row) -> bytes:
    """Return rows as the query's writer sends them; a row of three columns has no note."""
    kind = pa.struct([(name, TYPES[kind]) for name, kind in COLUMNS.items()])
    encoded = [unsafe_row((*row, None)[:4], kind) for row in rows]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def committed(sensor: str, n: int, temp: float) -> list[Change]:
    """Return the changes of a row that an attachment writes at the end of its batch."""
    number, text = b"%d" % n, b"%g" % temp
    value = packed_map.pack([(b"n", number), (b"temp", text)])
    return [
        Change("max", Op.PUT, f"job:max:{sensor}".encode(), value=text),
        Change("all", Op.PUT, f"job:all:{sensor}".encode(), value=value),
    ]


class Query:
    """A query's writer and its attachment: rows to a server, epochs into the log."""

    def __init__(self, connection: Connection, log: LogWriter) -> None:
        self._log = log
        self.connection = connection
        self.run = "first run"

    def fresh(self, *words: Any) -> Any:
        """Send a STATE FRESH; return its reply, as text for an error."""
        reply = self.connection.call("STATE", "FRESH", *words)
        return reply.value.decode() if reply.is_error else reply.plain

    def open(self, batch: int, partition: int = 0, schema: str = SCHEMA) -> Any:
        return self.fresh("OPEN", "job", self.run, batch, partition, schema)

    def rows(self, batch: int, *rows: Row, partition: int = 0) -> Any:
        return self.fresh("ROWS", "job", self.run, batch, partition, frame(*rows))

    def commit(self, *rows: Row) -> int:
        """Commit an epoch, and wait until the server has it."""
        epoch = self._log.publish([change for row in rows for change in committed(*row)])
        eventually(lambda: self.facts("job")["applied"], lambda applied: applied == epoch, "the epoch")
        return epoch

    def facts(self, job: str) -> Mapping[str, Any]:
        """Return a job's facts of STATE LAG."""
        for row in self.connection.call("STATE", "LAG").plain:
            found = dict(zip(map(bytes.decode, row[::2]), row[1::2], strict=True))
            if found["job"] == job.encode():
                return found
        return {}


class World:
    """A server with a query, and a client."""

    def __init__(self, folder: Path, stack: ExitStack, *options: str, is_pure: bool) -> None:
        log = stack.enter_context(LogWriter(folder / "log", "job", STATES))
        log.publish([change for row in (("a", 1, 1.5), ("b", 2, 2.5)) for change in committed(*row)])
        self.server = stack.enter_context(sparkis_server(folder / "store", folder / "log", *options, is_pure=is_pure))
        self.query = Query(stack.enter_context(self.server.connect()), log)
        self.client = stack.enter_context(self.server.connect())
        eventually(lambda: self.query.facts("job").get("stale") == 0, awaited="a heartbeat")

    def call(self, *words: bytes | str | int) -> Any:
        return self.client.call(*words).plain
