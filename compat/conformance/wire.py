"""A minimal client for tests: requests as bytes, replies as bytes, and parsed replies.

A client library hides details that are compared here: a map or a flat array, an error's exact text, the end of a reply.
So this module implements the protocol itself, as simply as possible.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from time import sleep
from typing import Any, NamedTuple

from compat.waiting import WAIT_S_MAX

Words = Sequence[bytes]

LAST_COMMAND = b"the-end"
LAST_REPLY = b"-ERR unknown command 'the-end', with args beginning with: \r\n"


class NotAReplyError(Exception):
    """Bytes that are no reply, or only the beginning of one."""


class Reply(NamedTuple):
    """A reply, as sent and parsed. type: its first byte.

    value: bytes for `+ - $ =`, an integer for `:`, None for nil, replies for `* ~ >`, pairs of replies for `%`.
    """

    raw: bytes
    type: str
    value: Any

    @property
    def is_error(self) -> bool:
        """Return whether this is an error."""
        return self.type == "-"

    @property
    def plain(self) -> Any:
        """The value without type bytes, and maps as flat lists, as in RESP2."""
        if self.type == "%":
            return [part.plain for pair in self.value for part in pair]
        return [each.plain for each in self.value] if isinstance(self.value, list) else self.value


def request(*words: bytes | str | int) -> bytes:
    """Return a request as an array of bulk strings."""
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def requests(many: Iterable[Words]) -> bytes:
    """Return a pipeline."""
    return b"".join(request(*words) for words in many)


def replies_in(data: bytes) -> list[Reply]:
    """Read all replies in a stream; NotAReplyError if it is not a sequence of complete replies."""
    found = []
    at = 0
    while at < len(data):
        reply, at = reply_at(data, at)
        found.append(reply)
    return found


def reply_at(data: bytes, at: int) -> tuple[Reply, int]:
    """Read the reply at an offset; return it and the offset behind it."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise NotAReplyError(data[at : at + 80])
    type_byte, line, after = chr(data[at]), data[at + 1 : end], end + 2
    if type_byte in "+-,(#":
        value: Any = line
    elif type_byte == ":":
        value = int(line)
    elif type_byte == "_" or line == b"-1":
        value = None
    elif type_byte in "$=":
        value, after = _text(data, after, int(line))
    elif type_byte in "*~>":
        value, after = _items(data, after, int(line))
    elif type_byte == "%":
        flat, after = _items(data, after, 2 * int(line))
        value = list(zip(flat[::2], flat[1::2], strict=True))
    else:
        raise NotAReplyError(data[at : at + 80])
    return Reply(data[at:after], type_byte, value), after


def _text(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if data[at + size : at + size + 2] != b"\r\n":
        raise NotAReplyError(data[at : at + 80])
    return data[at : at + size], at + size + 2


def _items(data: bytes, at: int, count: int) -> tuple[list[Reply], int]:
    items = []
    for _ in range(count):
        item, at = reply_at(data, at)
        items.append(item)
    return items, at


class Connection:
    """One client's connection to a server, by default on this machine."""

    def __init__(self, port: int, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self._socket = socket.create_connection((host, port), WAIT_S_MAX)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        self._buffered = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send raw bytes; it is no error if the server has closed, as it may do so at any byte."""
        try:
            self._socket.sendall(data)
        except ConnectionError:
            pass

    def end(self) -> None:
        """Close the sending direction."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def reset(self) -> None:
        """Close with a TCP reset, as after a client was killed that had unread replies."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def read_to_end(self, ending: bytes = b"") -> bytes:
        """Return everything up to the server's closing, or up to an ending; TimeoutError if neither comes."""
        data, self._buffered = bytearray(self._buffered), b""
        while not (ending and data.endswith(ending)) and (received := self._receive()):
            data += received
        return bytes(data)

    def read(self) -> Reply:
        """Return the next reply; EOFError if the server closes instead."""
        while True:
            try:
                reply, end = reply_at(self._buffered, 0)
            except NotAReplyError:
                received = self._receive()
                if not received:
                    raise EOFError(self._buffered) from None
                self._buffered += received
            else:
                self._buffered = self._buffered[end:]
                return reply

    def read_bytes(self, count: int) -> bytes:
        """Return the next bytes; EOFError if the server closes before."""
        data = bytearray(self._buffered)
        while len(data) < count and (received := self._receive()):
            data += received
        if len(data) < count:
            raise EOFError(data)
        self._buffered = bytes(data[count:])
        return bytes(data[:count])

    def call(self, *words: bytes | str | int) -> Reply:
        """Send one request and return its reply."""
        self.send(request(*words))
        return self.read()

    def call_each(self, *lines: str) -> list[Any]:
        """Send requests in one write, whose words have spaces between them; return the replies as plain values."""
        self.send(requests(line.encode().split(b" ") for line in lines))
        return [self.read().plain for _ in lines]

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 20)
        except ConnectionError:  # closed with input unread, as servers do after a protocol error
            return b""


def scanned(connection: Connection, *options: bytes | str | int) -> list[bytes]:
    """Return all keys of a SCAN. options: those of each of its commands."""
    found, cursor = [], b"0"
    while True:
        cursor, keys = connection.call("SCAN", cursor, *options).plain
        found += keys
        if cursor == b"0":
            return found


def replies_to(port: int, pipeline: Sequence[Words], host: str = "127.0.0.1") -> list[Reply]:
    """Send a pipeline on a new connection and return the replies; fewer than requests if the server closes.

    The end is found by the error reply to an unknown command, which needs no password. Closing the connection instead
    would not work: a server may drop unsent replies when its client closes.
    """
    with Connection(port, host) as connection:
        connection.send(requests([*pipeline, (LAST_COMMAND,)]))
        data = connection.read_to_end(LAST_REPLY)
    return replies_in(data.removesuffix(LAST_REPLY))


def exchange(port: int, data: bytes, cuts: Iterable[int] = (), pause_s: float = 0.0) -> bytes:
    """Send bytes on a new connection and close the sending direction; return all bytes until the server closes.

    cuts: the offsets at which the bytes are split into parts, which are sent `pause_s` apart. Requests after the byte
    at which a server closed get no reply, so two servers that close at different bytes send different replies. For
    small replies only: Redis drops unsent replies when a client closes.
    """
    with Connection(port) as connection:
        at = 0
        for cut in cuts:
            connection.send(data[at:cut])
            sleep(pause_s)
            at = cut
        connection.send(data[at:])
        connection.end()
        return connection.read_to_end()
