"""What is fuzzed: a server, up to two connections, and epochs that come while they talk; no sockets, no other process.

An input is a byte of options, a byte that says how the rest is cut into chunks, and the rest: what clients send.

    1  a password is asked for          2  the server is a cluster's node with half of the slots
    4  the server is still loading      8  the chunks come over two connections in turn
    16 an epoch changes keys after each chunk

Whatever is sent has to be answered with whole replies, a protocol error or nothing, by a server that comes to rest, has
no internal error, and keeps nothing of a client that is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

from compat.conformance.wire import NotAReplyError, replies_in
from resp_server.cluster.topology import Topology
from resp_server.commands import command_table
from resp_server.config import ServerConfig
from resp_server.connection import Connection
from resp_server.server import Server
from state_backend import packed_map
from state_backend.descriptor import StateDescriptor
from state_backend.keyspace import Job, Keyspace
from state_backend.memory_store import MemoryStore
from state_backend.records import Change, Op, runs_of
from state_backend.store import EpochChanges

# A new server takes longer than most inputs; what inputs do to it (users, settings) lasts until then.
INPUTS_PER_SERVER = 64
HEADER_BYTES = 2
PASSWORD, NODE, LOADING, TWO, EPOCHS = 1, 2, 4, 8, 16
NOW_MS = 1_700_000_000_000
# A short input is answered in a few turns; long replies take one each.
TURNS_MAX = 20_000
# What a parser may hold beside the bytes that were sent: CPython's objects of the arguments.
HELD_BYTES_PER_BYTE_MAX = 64
HERE = "10.0.0.1:7379"

STATES = [
    StateDescriptor("v", key="k", value="v"),
    StateDescriptor("m", key="k", value="v", field="f"),
    StateDescriptor("l", key="k", value="v", kind="list"),
    StateDescriptor("s", key="k", member="m"),
    StateDescriptor("z", key="k", member="m", score="s"),
]
TOPOLOGY = Topology.of_json(
    {
        "version": 1,
        "nodes": [
            {"host": "10.0.0.1", "port": 7379, "slots": "0-8191"},
            {"host": "10.0.0.2", "port": 7379, "slots": "8192-16383"},
        ],
    }
)

# Nothing in it belongs to a server, and it takes a hundred times as long as the rest of one.
_table = cache(command_table)


class FoundError(Exception):
    """Something that must not happen, did."""


class Wire:
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_closed = self.is_cut = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 5) if name in ("peername", "sockname") else None

    def get_write_buffer_size(self) -> int:
        return 0

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
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._raised: list[BaseException] = []
        self._watch = Watch()
        logger = logging.getLogger("resp_server")
        logger.addHandler(self._watch)
        logger.propagate = False

    def close(self) -> None:
        """Let go of the servers, the loop and the log."""
        for place in self._places.values():
            place.close()
        logger = logging.getLogger("resp_server")
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
        sent = self._loop.run_until_complete(self._talk(data))
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
        server = place.server
        wires = [Wire() for _ in range(2 if options & TWO else 1)]
        connections = [Connection(server) for _ in wires]
        for connection, wire in zip(connections, wires, strict=True):
            connection.connection_made(wire)  # type: ignore[arg-type]
        try:
            for turn, chunk in enumerate(chunks_of(data[HEADER_BYTES:], chunk_bytes)):
                at = turn % len(wires)
                if not wires[at].is_closed:
                    connections[at].data_received(chunk)
                await _rest(connections, wires)
                if options & EPOCHS:
                    _apply(place.store, turn)
                _check_held(connections[at], len(data))
        finally:
            for connection in connections:
                connection.connection_lost(None)
        if server._connections or server.instance.sessions:
            raise FoundError("the server keeps clients that are gone")
        for wire in wires:
            _check_replies(wire)
        return b"".join(part for wire in wires for part in wire.sent)

    def _place(self, data: bytes) -> Place:
        """Return a server, a new one after so many inputs: what some did to it others see."""
        options = _place_of(data)
        place = self._places.get(options)
        if place is None or len(place.inputs) >= self._inputs_per_server:
            if place is not None:
                place.close()
            place = self._places[options] = Place(options)
        place.inputs.append(data)
        return place


def _place_of(data: bytes) -> int:
    return data[0] & (PASSWORD | NODE | LOADING | EPOCHS) if data else 0


class Place:
    """A server, and the state that it shows."""

    def __init__(self, options: int) -> None:
        self.inputs: list[bytes] = []
        # Without epochs nobody changes it.
        self.store = _filled() if options & EPOCHS else _shared()
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", STATES, self.store))
        config = ServerConfig(password="secret" if options & PASSWORD else None)
        with patch("resp_server.server.command_table", _table):
            self.server = Server(keyspace, config, lambda: NOW_MS)
        if options & NODE:
            self.server.show_topology(TOPOLOGY, HERE)
        self.server.instance.is_loading = bool(options & LOADING)

    def close(self) -> None:
        """Let go of it."""
        self.server.instance.close()
        for timer in (self.server._telling, self.server._sweep):
            if timer is not None:
                timer.cancel()


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


async def _rest(connections: list[Connection], wires: list[Wire]) -> None:
    """Give connections their turns until they need none: what waits for a time to come is left waiting."""
    for _ in range(TURNS_MAX):
        turns = [
            connection._next_turn
            for connection, wire in zip(connections, wires, strict=True)
            if connection._next_turn is not None and not wire.is_closed
        ]
        if all(isinstance(turn, asyncio.TimerHandle) for turn in turns):
            return
        await asyncio.sleep(0)
    raise FoundError(f"a connection does not come to rest within {TURNS_MAX} turns")


def _check_held(connection: Connection, sent_bytes: int) -> None:
    held = connection._parser.buffered_bytes
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


def _filled() -> MemoryStore:
    store = MemoryStore("g")
    changes = [Change("v", Op.PUT, b"j:v:%d" % number, value=b"%d" % number) for number in range(8)]
    changes += [Change("v", Op.PUT, b"j:v:soon", value=b"x", expire_at_ms=NOW_MS + 2500)]
    changes += [Change("v", Op.PUT, b"j:v:big", value=b"x" * 20_000)]
    small = packed_map.pack([(b"a", b"1"), (b"b", b"2")])
    changes += [Change("m", Op.PUT, b"j:m:s", value=small), Change("m", Op.PUT, b"j:m:t", b"a", b"1", NOW_MS + 1000)]
    changes += [Change("m", Op.PUT, b"j:m:l", b"f%d" % number, b"x") for number in range(150)]
    changes += [Change("l", Op.APPEND, b"j:l:s", value=each) for each in (b"a", b"b", b"a")]
    changes += [Change("l", Op.APPEND, b"j:l:l", value=b"%d" % number) for number in range(300)]
    changes += [Change("s", Op.PUT, b"j:s:l", b"m%d" % number, b"") for number in range(150)]
    changes += [Change("z", Op.PUT, b"j:z:l", b"m%d" % number, b"%d" % (number // 2)) for number in range(150)]
    _put(store, changes)
    return store


_shared = cache(_filled)


def _apply(store: MemoryStore, turn: int) -> None:
    """Change some keys, as a micro-batch does."""
    changes = [Change("v", Op.PUT, b"j:v:%d" % (turn % 8), value=b"at %d" % turn)]
    changes += [Change("m", Op.PUT, b"j:m:l", b"f%d" % turn, b"y"), Change("l", Op.APPEND, b"j:l:s", value=b"c")]
    _put(store, changes)


def _put(store: MemoryStore, changes: list[Change]) -> None:
    runs = list(runs_of(changes, [state.name for state in STATES]))
    store.apply(EpochChanges(store.applied.epoch + 1, 1, NOW_MS, runs), STATES)
