"""The time of a GET in the serving process, split by step, on one connection.

A real `Server` and `Connection` get buffers of requests as from the event loop, and send replies over a real socket.
Three steps are timed: the compiled core (parsing, look-ups and encoding together), the move to the newest epoch, and
writing. The remaining time is the connection's own. The total is measured without these clocks, alternating with the
timed calls, and once more without the compiled core.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.results import Row, single_row
from benchmarks.servers import JOB, BenchmarkError, key, load_log, states, temporary_folder, value
from resp_server.backends.stores.stores_backend import pipeline_of_stores
from resp_server.client.connection import Connection
from resp_server.client.round import Round
from resp_server.client.turn_scheduler import TurnScheduler
from resp_server.client.write_queue import WriteQueue
from resp_server.pipeline.immediate import ImmediatePipeline
from resp_server.protocol.request_parser import Request
from resp_server.serving.server import Server
from resp_server.settings.server import ServerConfig
from state_backend.apply.applier import Applier
from state_backend.lmdb.store import LmdbStore
from state_backend.log.change_log import ChangeLog
from state_backend.store.keyspace import Job, Keyspace, KeyspaceView

PIPELINES = (1, 16, 100)
REQUESTS = {1: 40_000, 16: 200_000, 100: 400_000}
# Requests in a turn with or without clocks. Turns are short and their median counts, so that other work on the machine
# affects only some of them.
TURN_REQUESTS = 4_000
ANSWER, RENEW, WRITE, REST, WHOLE = "core", "newest epoch", "write", "connection", "whole"
IN_PYTHON = "whole without the core"


class SocketTransport(asyncio.Transport):
    """A connection's transport: a TCP socket whose other end is read between buffers."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._near = socket.create_connection(listener.getsockname())
            self._far = listener.accept()[0]
        self._near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sent_bytes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a socket's details, as asyncio does."""
        details: dict[str, Callable[[], Any]] = {
            "socket": lambda: self._near,
            "peername": self._near.getpeername,
            "sockname": self._near.getsockname,
        }
        return details[name]() if name in details else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, as there is no buffer."""

    def get_write_buffer_size(self) -> int:
        """Return 0, as there is no buffer."""
        return 0

    def pause_reading(self) -> None:
        """Do nothing, as buffers are passed one by one."""

    def resume_reading(self) -> None:
        """Do nothing, as buffers are passed one by one."""

    def is_closing(self) -> bool:
        """Return False: it is open."""
        return False

    def write(self, data: Any) -> None:
        """Send."""
        self._near.sendall(data)
        self._sent_bytes += len(data)

    def received(self) -> bytes:
        """Return the bytes sent since the last call."""
        parts = []
        while self._sent_bytes:
            parts.append(self._far.recv(self._sent_bytes))
            self._sent_bytes -= len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """Close both ends."""
        self._near.close()
        self._far.close()


class NoDeferral(TurnScheduler):
    """Defers nothing, as buffers arrive one after another, without an event loop."""

    @property
    def must_defer(self) -> bool:
        """Return False: all buffers are one round to the event loop, which does not run between them."""
        return False

    def refresh(self, now_ns: int) -> None:
        """Begin a round with each buffer."""
        self._on_round()


class ImmediateWrites(WriteQueue):
    """Sends replies at once instead of at the end of a round."""

    def add(self, send: Callable[[bytes], None], reply: bytes) -> None:
        """Send."""
        send(reply)


class ImmediateRound(Round):
    """Answers input at once instead of at the end of a round."""

    def add(self, client: Connection) -> None:
        """Answer."""
        self._clients[client] = None
        self.answer()


class Core:
    """The compiled core, behind a method that can be timed."""

    def __init__(self, reads: Any) -> None:
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reads, name)

    def answer(self, session: Any, data: bytes) -> tuple[bytes, list[Request], bytes]:
        """Answer as the core does."""
        answered: tuple[bytes, list[Request], bytes] = self._reads.answer(session, data)
        return answered


TIMED_CALLS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    (ANSWER, Core, ("answer",)),
    (RENEW, KeyspaceView, ("renew",)),
    (WRITE, SocketTransport, ("write",)),
)


@contextmanager
def clocked(spent_ns: Counter[str]) -> Iterator[None]:
    """Within the block, add each timed call's duration to its step; nested calls count for the outer one."""
    is_within = False

    def timed(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal is_within
            if is_within:
                return function(*arguments, **named)
            is_within = True
            started_ns = perf_counter_ns()
            try:
                return function(*arguments, **named)
            finally:
                spent_ns[step] += perf_counter_ns() - started_ns
                is_within = False

        return call

    originals = [(owner, name, getattr(owner, name)) for _, owner, names in TIMED_CALLS for name in names]
    steps = {(owner, name): step for step, owner, names in TIMED_CALLS for name in names}
    for owner, name, function in originals:
        setattr(owner, name, timed(steps[owner, name], function))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def run(options: Options) -> Iterator[Row]:
    """Yield the times of the steps by pipeline depth, and their sum."""
    with temporary_folder() as folder:
        store = _store(folder, options.keys)
        try:
            for pipeline in PIPELINES:
                options.report(f"split: pipeline {pipeline}")
                requests = max(pipeline, int(REQUESTS[pipeline] * options.scale))
                rounds = asyncio.run(_rounds(store, options, pipeline, requests))
                for step in (ANSWER, RENEW, REST, WRITE, WHOLE, IN_PYTHON):
                    found = [each[step] for each in rounds]
                    note = f"{options.keys:,} keys" if step == WHOLE else ""
                    yield single_row(f"pipeline {pipeline}: {step}", "split", found, unit="us/request", note=note)
        finally:
            store.close()


def _store(folder: Path, keys: int) -> LmdbStore:
    """Build a store from a log, and open it as a server does."""
    load_log(folder / "log", keys, has_maps_and_lists=False).close()
    opened: list[dict[str, Any]] = []
    (folder / "store" / JOB).mkdir(parents=True)
    applier = Applier(ChangeLog(folder / "log"), JOB, folder / "store", opened.append)
    applier.step()
    applier.close()
    event = next(event for event in opened if event["event"] == "open")
    return LmdbStore(event["path"], event["generation"], is_reader=True)


async def _rounds(store: LmdbStore, options: Options, pipeline: int, requests: int) -> list[dict[str, float]]:
    """Return microseconds per request and step, of each round."""
    keyspace = Keyspace()
    keyspace.put(Job(JOB, store.generation, states(), store, is_stale=False))
    server = Server(keyspace, ServerConfig(), pipeline_of_stores)
    server.turn_scheduler, server.write_queue = NoDeferral(server.context.renew), ImmediateWrites()
    transport = SocketTransport()
    connection = Connection(server)
    connection.connection_made(transport)
    random = np.random.default_rng(5)
    numbers = random.integers(0, options.keys, requests // pipeline * pipeline).reshape(-1, pipeline)
    buffers = [b"".join(map(_request, row)) for row in numbers.tolist()]
    _check(connection, transport, buffers[0], numbers[0].tolist())
    client_input: Any = connection.input
    client_input._compiled = Core(server.pipeline.compiled)
    assert isinstance(server.pipeline, ImmediatePipeline)
    round_in_python = ImmediateRound(server.context, server.pipeline, server.turn_scheduler, server.write_queue)
    rounds = []
    some_buffers = max(1, min(len(buffers), TURN_REQUESTS // pipeline))
    for _ in range(options.rounds):
        turns = [
            await _turn(connection, round_in_python, transport, buffers[start : start + some_buffers], pipeline)
            for start in range(0, len(buffers) - some_buffers + 1, some_buffers)
        ]
        steps = {step: median(turn[step] for turn in turns) for step in (ANSWER, RENEW, WRITE)}
        missing = [step for step, spent in steps.items() if not spent]
        if missing:
            raise BenchmarkError(
                f"nothing was spent on {', '.join(missing)}: TIMED_CALLS has calls that are no longer made"
            )
        whole = median(turn[WHOLE] for turn in turns)
        in_python = median(turn[IN_PYTHON] for turn in turns)
        rest = max(0.0, whole - sum(steps.values()))
        rounds.append({**steps, REST: rest, WHOLE: whole, IN_PYTHON: in_python})
    connection.connection_lost(None)  # or the turns that it has deferred would answer into the closed socket
    transport.close()
    server.context.close()
    return rounds


async def _turn(
    connection: Connection, round_in_python: Round, transport: SocketTransport, buffers: list[bytes], pipeline: int
) -> dict[str, float]:
    """Send some buffers without the clocks, then with them; return microseconds per request and step."""
    requests = len(buffers) * pipeline
    spent_ns: Counter[str] = Counter()
    spent_ns[WHOLE] = await _send(connection, transport, buffers)
    with clocked(spent_ns):
        await _send(connection, transport, buffers)
    server, client_input = connection._server, connection.input
    core, client_input._compiled, server.add_to_round = client_input._compiled, None, round_in_python.add
    spent_ns[IN_PYTHON] = await _send(connection, transport, buffers)
    client_input._compiled, server.add_to_round = core, None
    return {step: spent_ns[step] / requests / 1000 for step in (ANSWER, RENEW, WRITE, WHOLE, IN_PYTHON)}


def _request(number: int) -> bytes:
    name = key(number).encode()
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)


def _check(connection: Connection, transport: SocketTransport, buffer: bytes, numbers: list[int]) -> None:
    connection.data_received(buffer)
    values = [value(number, 0).encode() for number in numbers]
    if transport.received() != b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in values):
        raise BenchmarkError("the server's functions made a wrong reply: the benchmark is invalid")


async def _send(connection: Connection, transport: SocketTransport, buffers: list[bytes]) -> int:
    """Pass all buffers to the connection, one by one; return the nanoseconds that it took."""
    spent_ns = 0
    for buffer in buffers:
        started_ns = perf_counter_ns()
        connection.data_received(buffer)
        while not connection.is_idle:  # a turn that the system has interrupted for long defers its rest
            await asyncio.sleep(0)
        spent_ns += perf_counter_ns() - started_ns
        transport.received()
    return spent_ns
