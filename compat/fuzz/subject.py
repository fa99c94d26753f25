"""What is fuzzed: a server, up to two connections, and epochs that come while they talk; no sockets, no other process.

An input is a byte of options, a byte that says how the rest is cut into chunks, and the rest: what clients send.

    1  a password is asked for          2  the server is a cluster's node with half of the slots
    4  the server is still loading      8  the chunks come over two connections, one for each at a time
    16 an epoch changes keys after each chunk (with two connections: after one for each)
    32 clients may not do everything: their user has patterns of keys, and commands that it may not run

Whatever is sent has to be answered with whole replies, a protocol error or nothing, by a server that comes to rest, has
no internal error, and keeps nothing of a client that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from compat.conformance.wire import NotAReplyError, replies_in
from compat.fuzz.loop import Loop, RestlessError
from compat.fuzz.places import OF_PLACES, TWO, Place
from resp_server.connection import Connection, Rest

# A new server takes longer than most inputs; what inputs do to it (users, settings) lasts until then.
INPUTS_PER_SERVER = 8
HEADER_BYTES = 2
# Time for whatever is ready, and for what is told by the clock.
STEP_S = 0.03
# Nothing waits for longer: not for another server either.
WAIT_S_MAX = 150.0
# What a parser may hold beside the bytes that were sent: CPython's objects of the arguments.
HELD_BYTES_PER_BYTE_MAX = 64
# After so much nothing more is sent until a client has taken it.
MUCH_BYTES = 4096
LOGGERS = (logging.getLogger("resp_server"), logging.getLogger("sparkis"))


class FoundError(Exception):
    """Something that must not happen, did."""


class Wire:
    """A transport that keeps what is sent. Its client, if it is given, takes a turn of the loop to take much."""

    def __init__(self, client: asyncio.Protocol | None = None) -> None:
        self.sent: list[bytes] = []
        self.is_closed = self.is_cut = False
        self._client = client
        self._untaken_bytes = 0

    def write(self, data: bytes) -> None:
        self.sent.append(data)
        if self._client is not None:
            was_full, self._untaken_bytes = self._untaken_bytes > MUCH_BYTES, self._untaken_bytes + len(data)
            if self._untaken_bytes > MUCH_BYTES and not was_full:
                self._client.pause_writing()
                asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._untaken_bytes = 0
        if self._client is not None and not self.is_closed:
            self._client.resume_writing()

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 5) if name in ("peername", "sockname") else None

    def get_write_buffer_size(self) -> int:
        return self._untaken_bytes

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Watch(logging.Handler):
    """Keeps what a server logs as an error: its own bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Subject:
    """Runs inputs on one event loop, so many against each server: a new one takes longer than most inputs do."""

    def __init__(self, inputs_per_server: int = 1) -> None:
        self._inputs_per_server = inputs_per_server
        self._places: dict[int, Place] = {}
        self._loop = Loop()
        self._loop.set_exception_handler(self._on_exception)
        self._raised: list[BaseException] = []
        self._watch = Watch()
        for logger in LOGGERS:
            logger.addHandler(self._watch)
            logger.propagate = False

    def close(self) -> None:
        """Let go of the servers, the loop and the log."""
        for place in self._places.values():
            place.close()
        for logger in LOGGERS:
            logger.removeHandler(self._watch)
            logger.propagate = True
        self._loop.close()

    def history(self, data: bytes) -> list[bytes]:
        """Return the inputs that the server of one that was run has seen, with it."""
        return self._places[_place_of(data)].inputs

    def run(self, data: bytes) -> bytes:
        """Run an input and return what clients were sent; FoundError for what must not happen."""
        self._raised.clear()
        self._watch.records.clear()
        try:
            sent = self._loop.run_until_complete(self._talk(data))
        except RestlessError as error:
            raise FoundError(str(error)) from None
        if self._raised:
            raise FoundError("an exception in the event loop") from self._raised[0]
        for record in self._watch.records:
            cause = record.exc_info[1] if record.exc_info else None
            raise FoundError(f"logged as an error: {record.getMessage()}") from cause
        return sent

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._raised.append(context.get("exception") or RuntimeError(context["message"]))

    async def _talk(self, data: bytes) -> bytes:
        options, chunk_bytes = (*data[:HEADER_BYTES], 0, 0)[:HEADER_BYTES]
        place = self._place(data)
        connections = [place.connection() for _ in range(2 if options & TWO else 1)]
        wires = [Wire(each) for each in connections]
        for connection, wire in zip(connections, wires, strict=True):
            connection.connection_made(wire)  # type: ignore[arg-type]
        try:
            for turn, chunk in enumerate(chunks_of(data[HEADER_BYTES:], chunk_bytes)):
                at = turn % len(wires)
                if not wires[at].is_closed:
                    connections[at].data_received(chunk)
                if at == len(wires) - 1:
                    await self._rest(connections, wires)
                    place.change(turn)
                    _check_held(connections, len(data))
            await self._rest(connections, wires)
            for connection, wire in zip(connections, wires, strict=True):
                if not wire.is_closed and not connection.eof_received():
                    wire.close()
            await self._rest(connections, wires)
        finally:
            for connection in connections:
                connection.connection_lost(None)
        if place.server._connections or place.server.instance.sessions:
            raise FoundError("the server keeps clients that are gone")
        for wire in wires:
            _check_replies(wire)
        return b"".join(part for wire in wires for part in wire.sent)

    async def _rest(self, connections: Sequence[Connection], wires: Sequence[Wire]) -> None:
        """Give connections their turns until they need none; who has to wait for its rate, or a pause, is left so."""
        ends_s = self._loop.time() + WAIT_S_MAX
        await asyncio.sleep(STEP_S)
        while any(map(_is_waiting, connections, wires)):
            if self._loop.time() > ends_s:
                raise FoundError(f"a request is not answered within {WAIT_S_MAX:.0f} s")
            await asyncio.sleep(STEP_S)

    def _place(self, data: bytes) -> Place:
        """Return a server, a new one after so many inputs: what some did to it others see."""
        options = _place_of(data)
        place = self._places.get(options)
        if place is None or len(place.inputs) >= self._inputs_per_server:
            if place is not None:
                place.close()
            place = self._places[options] = Place(options, self._loop)
        place.inputs.append(data)
        return place


def _place_of(data: bytes) -> int:
    return data[0] & OF_PLACES if data else 0


def _is_waiting(connection: Connection, wire: Wire) -> bool:
    if wire.is_closed:
        return False
    pending = connection._pending
    return (pending is not None and not isinstance(pending, Rest)) or not connection._is_writable


def chunks_of(data: bytes, chunk_bytes: int) -> Iterator[bytes]:
    """Cut data: 0 leaves it whole, up to 15 says how long each chunk is; more, a mixture of lengths."""
    if not chunk_bytes:
        yield data
        return
    at, mixed = 0, chunk_bytes
    while at < len(data):
        if chunk_bytes > 15:
            mixed = (mixed * 73 + 41) % 251
        size = 1 + mixed % (16 if chunk_bytes < 128 else 128) if chunk_bytes > 15 else chunk_bytes
        yield data[at : at + size]
        at += size


def _check_held(connections: Sequence[Connection], sent_bytes: int) -> None:
    held = sum(each._parser.buffered_bytes for each in connections)
    if held > sent_bytes * HELD_BYTES_PER_BYTE_MAX:
        raise FoundError(f"{held} bytes are held of {sent_bytes} that were sent")


def _check_replies(wire: Wire) -> None:
    if wire.is_cut:
        return  # within a reply, perhaps
    data = b"".join(wire.sent)
    try:
        replies_in(data)
    except (NotAReplyError, ValueError, IndexError) as error:
        raise FoundError(f"not made of whole replies: {data[-300:]!r}") from error
