"""A RESP server that keeps what the JVM writer sends to it, and can be told to refuse, to die and to come back."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from state_backend.checkpoint.spark_types import arrow_type
from state_backend.checkpoint.unsafe_rows import decode_rows


class Sent(NamedTuple):
    """A request of the writer, without `STATE FRESH`."""

    verb: str
    job: str
    run: str
    batch: int
    partition: int
    content: list[bytes]


class RowServer:
    """Accepts connections at a port of its own.

    error: The reply to each request that is no AUTH; empty: OK. refused: How many requests got an error.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.logins: list[bytes] = []
        self.error, self.refused = "", 0
        self.port = 0
        self._connections: set[socket.socket] = set()
        self.begin()

    def begin(self) -> None:
        """Listen, at the port of before if there was one."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    @property
    def address(self) -> str:
        """The address for the writer."""
        return f"127.0.0.1:{self.port}"

    def end(self) -> None:
        """Close the port and all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def rows(self, *, batch: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of a batch, or of all, in the order in which they came."""
        schema = next((each.content[0] for each in self.sent if each.verb == "OPEN"), None)
        found: list[dict[str, Any]] = []
        for each in self.sent:
            if each.verb == "ROWS" and batch in (None, each.batch) and schema is not None:
                found += rows_of(each.content[0], schema)
        return found

    def closed(self, batch: int) -> dict[int, tuple[int, int]]:
        """Return the numbers of sent and dropped rows of a batch, by partition."""
        closing = [each for each in self.sent if each.verb == "CLOSE" and each.batch == batch]
        return {each.partition: (int(each.content[0]), int(each.content[1])) for each in closing}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as lines:
            while line := lines.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(lines.readline()[1:])
                    words.append(lines.read(size + 2)[:-2])
                if words[0] == b"AUTH":
                    self.logins.append(words[1])
                    connection.sendall(b"+OK\r\n")
                    continue
                _, _, verb, job, run, batch, partition, *content = words
                if not self.error:
                    name = verb.decode()
                    self.sent.append(Sent(name, job.decode(), run.decode(), int(batch), int(partition), content))
                connection.sendall(f"-{self.error}\r\n".encode() if self.error else b"+OK\r\n")
                self.refused += bool(self.error)


def rows_of(content: bytes, schema: bytes) -> list[dict[str, Any]]:
    """Return the rows of a request."""
    at, starts, sizes = 0, [], []
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        starts.append(at + 4)
        sizes.append(size)
        at += 4 + size
    kind = arrow_type(json.loads(schema), "rows")
    assert pa.types.is_struct(kind)
    decoded = decode_rows(content, np.array(starts, np.int64), np.array(sizes, np.int64), kind, "rows")
    return list(decoded.to_pylist())
