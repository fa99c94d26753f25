"""A proxy in front of an S3 server, which records each request and injects network failures.

    cut     the connection ends before the request is forwarded
    lose    the request is forwarded and executed, and its response is lost
    500     the response is an internal error; the request is not executed
    503     the response is "too busy"; the request is not executed
    late    the request is executed, but the response is a 500

All requests can take some time, as if the store were far away. Requests with a given path can be held until a number of
them wait, which tests that they are sent at once. One connection carries one request.
"""

from __future__ import annotations

import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["cut", "lose", "500", "503", "late"]

CHUNK_BYTES = 1 << 16


class Request(NamedTuple):
    """A received request: its method, and its path with the query."""

    method: str
    path: str


@dataclass
class Fault:
    """A fault of the next `times` requests with a method and a path that contains `part`."""

    kind: Kind
    method: str
    part: str
    times: int


class FaultyProxy:
    """The proxy's control for a test: received requests, and faults to inject."""

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.port = 0
        # A header in lower case that is removed from all requests, as if the store did not support it.
        self.drop_header = b""
        # The time of a request, from its receipt to its response, unless the server itself takes longer.
        self.delay_s = 0.0
        # Requests with this text in their path wait at this barrier.
        self.held: tuple[str, threading.Barrier] | None = None
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._faults: list[Fault] = []

    def fail(self, kind: Kind, method: str, part: str = "", times: int = 1) -> Fault:
        """Inject a fault; its `times` counts down."""
        fault = Fault(kind, method, part, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()
        self.delay_s, self.held = 0.0, None

    def taken(self) -> list[Request]:
        """Return the requests since the last call."""
        with self._lock:
            taken, self._requests = self._requests, []
        return taken

    def record(self, request: Request) -> Kind | None:
        """Record a request; return its fault."""
        with self._lock:
            self._requests.append(request)
            for fault in self._faults:
                if fault.times and fault.method == request.method and fault.part in request.path:
                    fault.times -= 1
                    return fault.kind
        return None


class _Connection(socketserver.StreamRequestHandler):
    server: _Listener

    def handle(self) -> None:
        line = self.rfile.readline()
        if not line:
            return
        began_s = time.monotonic()
        method, path, _ = line.decode("latin-1").split(" ", 2)
        head, length = [line], 0
        while (header := self.rfile.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            if name.lower() not in (b"connection", self.server.proxy.drop_header):
                head.append(header)
        body = self.rfile.read(length)
        if len(body) < length:  # the client has disconnected
            return
        kind = self.server.proxy.record(Request(method, path))
        self._wait(path)
        if kind in ("500", "503"):
            self._refuse(kind)
        elif kind == "cut":
            self._cut()
        else:
            response = self._forward(method, b"".join(head) + b"Connection: close\r\n\r\n" + body)
            time.sleep(max(0.0, began_s + self.server.proxy.delay_s - time.monotonic()))
            if kind == "lose":
                self._cut()
            elif kind == "late":
                self._refuse("500")
            else:
                self.wfile.write(response)

    def _wait(self, path: str) -> None:
        proxy = self.server.proxy
        time.sleep(proxy.delay_s / 2)  # a request takes as long to arrive as its response
        if proxy.held is not None and proxy.held[0] in path:
            proxy.held[1].wait()

    def _forward(self, method: str, request: bytes) -> bytes:
        """Forward a request; return the response. The server closes the connection ten milliseconds after its end."""
        with socket.create_connection(("127.0.0.1", self.server.proxy.server_port)) as server:
            server.sendall(request)
            response, length = bytearray(), None
            while (length is None or len(response) < length) and (chunk := server.recv(CHUNK_BYTES)):
                response += chunk
                if length is None:  # a large response is not searched again for each chunk
                    length = _length(response, method)
        return bytes(response)

    def _refuse(self, status: str) -> None:
        text = {"500": b"500 Internal Server Error", "503": b"503 Slow Down"}[status]
        self.wfile.write(b"HTTP/1.1 " + text + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def _cut(self) -> None:
        # Reset the connection rather than close it, as after a network failure.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def _length(response: bytearray, method: str) -> int | None:
    """Return the length of a response; None before the end of its head, and if it ends with the connection."""
    end = response.find(b"\r\n\r\n")
    if end < 0:
        return None
    if method == "HEAD":
        return end + 4
    stated = re.search(rb"^content-length: *(\d+)\r?$", response[: end + 2], re.MULTILINE | re.IGNORECASE)
    return end + 4 + int(stated[1]) if stated else None


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Connection)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a closed client connection."""


@contextmanager
def running(server_port: int) -> Iterator[FaultyProxy]:
    """Run a proxy in front of a server."""
    proxy = FaultyProxy(server_port)
    with _Listener(proxy) as listener:
        proxy.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown()
            thread.join()
