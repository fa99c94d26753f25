"""The servers that inputs are sent to, and the state that they show."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

from compat.fuzz.loop import Loop
from resp_server.access.rates import Limit
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

PASSWORD, NODE, LOADING, TWO, EPOCHS, USER = 1, 2, 4, 8, 16, 32
# What belongs to a server; two connections to one make it no other.
OF_PLACES = PASSWORD | NODE | LOADING | EPOCHS | USER
NOW_MS = 1_700_000_000_000
HERE = "10.0.0.1:7379"
# What a user may do who may not do everything: something of each kind that there is.
RULES = (b"resetkeys", b"~j:v:*", b"%R~j:m:?", b"%W~j:l:*", b"-hgetall", b"-zrange", b"(+mget +lrange ~j:[lv]:*)")
# Counted, and reached by an input of hundreds of requests alone.
LIMIT = Limit("default", 1000)

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


class Place:
    """A server, and the state that it shows. Its time is the loop's."""

    def __init__(self, options: int, loop: Loop) -> None:
        self.inputs: list[bytes] = []
        self._options = options
        self._loop, self._began_s = loop, loop.time()
        # Without epochs nobody changes it.
        self.store = _filled() if options & EPOCHS else _shared()
        password, limits = "secret" if options & PASSWORD else None, (LIMIT,) if options & USER else ()
        self.server = self._server(ServerConfig(password=password, limits=limits))
        if options & NODE:
            self.server.show_topology(TOPOLOGY, HERE)
        self.server.look_after()

    def _server(self, config: ServerConfig) -> Server:
        keyspace = Keyspace()
        keyspace.put(Job("j", "g", STATES, self.store))
        with patch("resp_server.server.command_table", _table):
            server = Server(keyspace, config, self._now_ms)
        server.instance.is_loading = bool(self._options & LOADING)
        if self._options & USER:
            server.users.set(b"default", RULES)
        return server

    def _now_ms(self) -> int:
        return NOW_MS + int((self._loop.time() - self._began_s) * 1000)

    def connection(self) -> Connection:
        """Return what a new client talks to."""
        return Connection(self.server)

    def change(self, turn: int) -> None:
        """Change some keys, as a micro-batch does, if epochs are to come."""
        if self._options & EPOCHS:
            changes = [Change("v", Op.PUT, b"j:v:%d" % (turn % 8), value=b"at %d" % turn)]
            changes += [
                Change("m", Op.PUT, b"j:m:l", b"f%d" % turn, b"y"),
                Change("l", Op.APPEND, b"j:l:s", value=b"c"),
            ]
            _put(self.store, changes)

    def close(self) -> None:
        """Let go of it."""
        _close(self.server)


def _close(server: Server) -> None:
    server._invalid.stop()
    server.instance.close()
    for timer in (server._telling, server._sweep):
        if timer is not None:
            timer.cancel()


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


def _put(store: MemoryStore, changes: list[Change]) -> None:
    runs = list(runs_of(changes, [state.name for state in STATES]))
    store.apply(EpochChanges(store.applied.epoch + 1, 1, NOW_MS, runs), STATES)
