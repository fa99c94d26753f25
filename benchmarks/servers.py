"""The two servers of a benchmark, with the same data and the same changes: ours from a log, and a redis-server.

bench:value:<number>   a value with its key and its last change, so that a wrong reply is noticed
bench:map:<number>     a map of 10 fields
bench:list:<number>    a list of 100 elements
bench:rank:<0>         a sorted set, in some benchmarks
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import processes
from compat.conformance.servers import free_port
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import Client
from state_backend.codec import packed_list, packed_map
from state_backend.codec.row_encoding import hash_positions_of
from state_backend.log.epochs import EpochContent
from state_backend.log.log_writer import LogWriter
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op, runs_of, schema

# The password of the listener for our own processes.
TOKEN = secrets.token_hex(16)

KeyNumbers = npt.NDArray[np.int64]

JOB, STATE, MAP_STATE, LIST_STATE, RANK_STATE = "bench", "value", "map", "list", "rank"
MAPS, FIELDS = 10_000, 10
LISTS, ELEMENTS = 1_000, 100
START_TIMEOUT_S = 60.0
# Loading 10 million keys takes about a minute, on an overloaded machine longer (guess).
LOAD_TIMEOUT_S = 900.0
# An epoch of 100,000 random changes in a store of 10 million keys writes 400 MB.
SETTLE_TIMEOUT_S = 600.0
CHANGED_SHARE = 0.01
LOAD_KEYS = 500_000
RUN_KEYS = 65_536
MSET_KEYS = 1_000
CHECKED_KEYS = 200


class BenchmarkError(Exception):
    """An invalid measurement: a wrong reply, a wrong count, a server that did not get ready."""


def key(number: int, state: str = STATE) -> str:
    """Return a key, as redis-benchmark generates it from `bench:value:__rand_int__`."""
    return f"{JOB}:{state}:{number:012d}"


def value(number: int, turn: int) -> str:
    """Return a key's value in a turn."""
    return f"{number}:{turn:010d}"


def fields(number: int) -> dict[str, str]:
    """Return the fields of a map."""
    return {f"field{each}": value(number, each) for each in range(FIELDS)}


def elements(number: int) -> list[str]:
    """Return the elements of a list."""
    return [value(number, each) for each in range(ELEMENTS)]


def member(number: int) -> str:
    """Return a member, as redis-benchmark generates it from `member:__rand_int__`."""
    return f"member:{number:012d}"


def score(number: int) -> int:
    """Return a member's score. Neighbours by name are not neighbours by score; ten members share a score."""
    return number * 7919 % 1_000_003 // 10


def states() -> list[StateDescriptor]:
    """Return the states of the data above."""
    return [
        StateDescriptor(STATE, key="key", value="value"),
        StateDescriptor(MAP_STATE, key="key", value=tuple(fields(0))),
        StateDescriptor(LIST_STATE, key="key", value="value", kind="list", duplicates="any"),
        StateDescriptor(RANK_STATE, key="key", member="member", score="score"),
    ]


def runs_of_values(numbers: KeyNumbers, turn: int) -> Iterator[pa.RecordBatch]:
    """Make sorted runs that put these keys. Whole columns are computed at once, so that the load costs little."""
    for start in range(0, len(numbers), RUN_KEYS):
        some = pa.array(numbers[start : start + RUN_KEYS])
        digits = some.cast(pa.string())
        keys = pc.binary_join_element_wise(f"{JOB}:{STATE}", pc.utf8_lpad(digits, 12, "0"), ":").cast(pa.binary())
        values = pc.binary_join_element_wise(digits, f"{turn:010d}", ":").cast(pa.binary())
        n = len(some)
        run = pa.RecordBatch.from_arrays(
            [
                pa.array(hash_positions_of(keys)),
                pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int16)), pa.array([STATE], pa.string())),
                pa.array(np.full(n, int(Op.PUT), np.uint8)),
                keys,
                pa.nulls(n, pa.binary()),
                values,
                pa.nulls(n, pa.int64()),
            ],
            schema=schema(),
        )
        yield run.take(pc.sort_indices(run.column("position")))


def publish(writer: LogWriter, runs: Iterable[pa.RecordBatch]) -> int:
    """Commit runs as the next epoch and return its number."""
    number = writer.last.epoch + 1 if writer.last else 0
    file, inline = writer.change_files(number).write(runs)
    writer.commit(
        number,
        EpochContent(files=[file] if file else [], inline=[inline] if inline else [], rows=0, digest=0),
        clock_ms=now_ms(),
    )
    return number


def load_log(log: str | Path, keys: int, *, has_maps_and_lists: bool = True, members: int = 0) -> LogWriter:
    """Write a log with `keys` values, in epochs of bounded size. members: the size of the sorted set; 0: none."""
    writer = LogWriter(log, JOB, states())
    for start in range(0, keys, LOAD_KEYS):
        publish(writer, runs_of_values(np.arange(start, min(keys, start + LOAD_KEYS), dtype=np.int64), 0))
    if has_maps_and_lists:
        changes = [*map(_map_change, range(MAPS)), *map(_list_change, range(LISTS))]
        publish(writer, runs_of(changes, [STATE, MAP_STATE, LIST_STATE]))
    if members:
        publish(writer, runs_of(_rank_changes(members), [RANK_STATE]))
    return writer


def _rank_changes(members: int) -> Iterator[Change]:
    name = key(0, RANK_STATE).encode()
    return (Change(RANK_STATE, Op.PUT, name, member(each).encode(), b"%d" % score(each)) for each in range(members))


def _map_change(number: int) -> Change:
    packed = packed_map.pack((name.encode(), text.encode()) for name, text in fields(number).items())
    return Change(MAP_STATE, Op.PUT, key(number, MAP_STATE).encode(), value=packed)


def _list_change(number: int) -> Change:
    packed = packed_list.pack(element.encode() for element in elements(number))
    return Change(LIST_STATE, Op.PUT, key(number, LIST_STATE).encode(), value=packed)


class ServerUnderTest(ABC):
    """A server with `keys` values, of which one in a hundred changes every second while it is not paused."""

    name: str
    port: int
    tls_port: int = 0
    process: subprocess.Popen[bytes]

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self._turn = 1
        self._turns = np.zeros(keys, np.int64)
        self._is_changing = threading.Event()
        self._ends = threading.Event()
        self._change_lock = threading.Lock()
        self._failure: Exception | None = None

    @abstractmethod
    def put(self, numbers: KeyNumbers, turn: int) -> None:
        """Set these keys to their values in a turn."""

    def change(self, numbers: KeyNumbers) -> None:
        """Change these keys, and record their turn."""
        with self._change_lock:
            self.put(numbers, self._turn)
            self._turns[numbers] = self._turn
            self._turn += 1

    def start_changes(self) -> None:
        """Change one key in a hundred, once a second, in a thread of this process, until `stop`; paused at first."""
        threading.Thread(target=self._change_loop, daemon=True).start()

    def _change_loop(self) -> None:
        random = np.random.default_rng(1)
        count = max(1, int(self.keys * CHANGED_SHARE))
        while not self._ends.is_set():
            self._is_changing.wait()
            started_s = time.monotonic()
            try:
                if not self._ends.is_set():
                    self.change(np.unique(random.integers(0, self.keys, count)))
            except Exception as error:
                self._failure = error
                return
            self._ends.wait(max(0.0, 1.0 - (time.monotonic() - started_s)))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run the changes within the block; after it, all changes are readable."""
        self._is_changing.set()
        try:
            yield
        finally:
            self._is_changing.clear()
        with self._change_lock:  # waits for a running change
            self.settle()
        if self._failure is not None:
            raise BenchmarkError(f"{self.name} could not be changed: {self._failure}")

    @abstractmethod
    def settle(self) -> None:
        """Wait until all written data can be read."""

    def pids(self) -> list[int]:
        """Return the processes that serve clients."""
        return [self.process.pid]

    def cpu_s(self) -> float:
        """Return the processor time of those processes."""
        return sum(map(processes.cpu_s, self.pids()))

    def calls(self, command: str) -> int:
        """Return how many calls of a command the server has counted."""
        with Client("127.0.0.1", self.port) as client:
            lines = str(client.call("INFO", "commandstats")).splitlines()
        stats = dict(line.split(":", 1) for line in lines if line.startswith("cmdstat_"))
        found = stats.get(f"cmdstat_{command}", "calls=0")
        return int(found.partition("calls=")[2].partition(",")[0])

    def check_sample(self, random: Random) -> None:
        """Read some keys; BenchmarkError if a value is not the last one written. For a settled server."""
        with Client("127.0.0.1", self.port, timeout_s=30) as client:
            for number in random.choices(range(self.keys), k=CHECKED_KEYS):
                self._check(client.call("GET", key(number)), value(number, int(self._turns[number])), key(number))
            number = random.randrange(MAPS)
            name = key(number, MAP_STATE)
            if client.call("EXISTS", name):
                self._check(client.call("HGETALL", name), [w for pair in fields(number).items() for w in pair], name)
            number = random.randrange(LISTS)
            name = key(number, LIST_STATE)
            if client.call("EXISTS", name):
                self._check(client.call("LRANGE", name, "0", "-1"), elements(number), name)

    def _check(self, found: object, expected: object, name: str) -> None:
        if found != expected:
            raise BenchmarkError(
                f"{self.name} replied {found!r} for {name} instead of {expected!r}: the benchmark is invalid"
            )

    def stop(self) -> None:
        """End the server."""
        self._ends.set()
        self._is_changing.set()
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ServerProcess(NamedTuple):
    """A server process: its port, and for ours the port for announcements of epochs."""

    process: subprocess.Popen[bytes]
    port: int
    control_port: int = 0


def start_sparkis(
    log: Path, store: Path, *, workers: int = 1, options: Iterable[str] = (), is_pure: bool = False
) -> ServerProcess:
    """Start a server of a log. It listens once its jobs are readable, or after some seconds.

    is_pure: without the compiled core.
    """
    command = [sys.executable, "-m", "resp_server.programs.serve", "--child", "--log", str(log), "--port", "0"]
    command += ["--store", str(store), "--loglevel", "error", *options]
    command += ["--workers", str(workers)] if workers > 1 else []
    environment = children.environment() | {TOKEN_VARIABLE: TOKEN}
    if is_pure:
        environment["SPARKIS_PURE"] = "1"
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchmarkError("the sparkis server did not start; the line above has the reason")
    ports = json.loads(line)
    return ServerProcess(process, ports["port"], ports["control_port"])


def supports_workers() -> bool:
    """Return whether the server has an option for several serving processes."""
    command = [sys.executable, "-m", "resp_server.programs.serve", "--help"]
    return "--workers" in subprocess.run(command, capture_output=True, text=True, env=children.environment()).stdout


class Sparkis(ServerUnderTest):
    """Our server, following a log that this process writes."""

    name = "sparkis"

    def __init__(
        self,
        keys: int,
        folder: Path,
        *,
        workers: int = 1,
        has_maps_and_lists: bool = True,
        members: int = 0,
        options: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
        is_pure: bool = False,
    ) -> None:
        super().__init__(keys)
        self.log, self.store = folder / "log", folder / "store"
        self.writer = load_log(self.log, keys, has_maps_and_lists=has_maps_and_lists, members=members)
        self.process, self.port, control_port = start_sparkis(
            self.log, self.store, workers=workers, options=options, is_pure=is_pure
        )
        self._control = Client("127.0.0.1", control_port, password=TOKEN, timeout_s=30, tls=tls)
        eventually(
            self._is_loaded, awaited="the server has loaded its data", timeout_s=LOAD_TIMEOUT_S, error=BenchmarkError
        )

    def _is_loaded(self) -> bool:
        return self._applied() == self._committed()

    def _committed(self) -> int:
        assert self.writer.last is not None
        return self.writer.last.epoch

    def _applied(self) -> int:
        """Return the visible epoch; -1 while there is none."""
        with Client("127.0.0.1", self.port) as client:
            lines = str(client.call("INFO", "sparkis")).splitlines()
        found = next((line for line in lines if line.startswith(f"job_{JOB}:")), "")
        return int(found.partition("epoch=")[2].partition(",")[0]) if found else -1

    def put(self, numbers: KeyNumbers, turn: int) -> None:
        epoch = publish(self.writer, runs_of_values(numbers, turn))
        self._control.call("NOTICE", JOB, str(epoch))  # as the sink does

    def settle(self) -> None:
        eventually(self._is_loaded, awaited="applying the last epoch", timeout_s=SETTLE_TIMEOUT_S, error=BenchmarkError)

    def stop(self) -> None:
        """End the server."""
        self._control.close()
        super().stop()

    def pids(self) -> list[int]:
        """Return the server and its workers, without the applier process."""
        return processes.serving(self.process.pid)

    def applier_pid(self) -> int:
        """Return the applier process."""
        return next(filter(processes.is_applier, processes.below(self.process.pid)))


def start_redis(folder: Path, *options: str, program: str = "redis-server") -> ServerProcess:
    """Start a redis-server, or a relative of it, without persistence unless options say otherwise."""
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([*command, "--daemonize", "no", *options], stdout=subprocess.DEVNULL)

    def is_listening() -> bool:
        if process.poll() is not None:
            raise BenchmarkError(f"{program} did not start")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(
        is_listening,
        awaited=f"the start of {program}",
        timeout_s=START_TIMEOUT_S,
        interval_s=0.01,
        error=BenchmarkError,
    )
    return ServerProcess(process, port)


class RedisServer(ServerUnderTest):
    """The system's redis-server, without persistence."""

    name = "redis-server"

    @classmethod
    def program(cls) -> str:
        """Return the program to start: a name in the PATH, or a path."""
        return cls.name

    def __init__(
        self,
        keys: int,
        folder: Path,
        *,
        has_maps_and_lists: bool = True,
        members: int = 0,
        options: Iterable[str] = (),
    ) -> None:
        super().__init__(keys)
        self.process, self.port, _ = start_redis(folder, *options, program=self.program())
        for start in range(0, keys, LOAD_KEYS):
            self.put(np.arange(start, min(keys, start + LOAD_KEYS), dtype=np.int64), 0)
        with Client("127.0.0.1", self.port) as client:
            for start in range(0, members, MSET_KEYS):
                some = range(start, min(members, start + MSET_KEYS))
                pairs = (word for each in some for word in (str(score(each)), member(each)))
                client.call("ZADD", key(0, RANK_STATE), *pairs)
            if not has_maps_and_lists:
                return
            for number in range(MAPS):
                client.call("HSET", key(number, MAP_STATE), *(w for pair in fields(number).items() for w in pair))
            for number in range(LISTS):
                client.call("RPUSH", key(number, LIST_STATE), *elements(number))

    def put(self, numbers: KeyNumbers, turn: int) -> None:
        with Client("127.0.0.1", self.port, timeout_s=30) as client:
            plain = numbers.tolist()
            for start in range(0, len(plain), MSET_KEYS):
                words = [word for each in plain[start : start + MSET_KEYS] for word in (key(each), value(each, turn))]
                client.call("MSET", *words)

    def settle(self) -> None:
        """Do nothing, as written data can be read at once."""

    def used_memory(self) -> int:
        """Return redis-server's used_memory: its data and their overhead."""
        with Client("127.0.0.1", self.port) as client:
            lines = str(client.call("INFO", "memory")).splitlines()
        return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


@contextmanager
def both(
    keys: int,
    *,
    workers: int = 1,
    has_maps_and_lists: bool = True,
    members: int = 0,
    ours: Iterable[str] = (),
    peers: Iterable[str] = (),
    tls: ssl.SSLContext | None = None,
    is_pure: bool = False,
    peer: type[RedisServer] = RedisServer,
) -> Iterator[tuple[Sparkis, RedisServer]]:
    """Run both servers with the same data; they are stopped and their files removed after the block.

    ours, peers: options. tls: the context for announcing epochs to our server, if its options name a certificate.
    is_pure: ours without the compiled core.
    """
    with temporary_folder() as folder:
        started: list[ServerUnderTest] = []
        try:
            sparkis = Sparkis(
                keys,
                folder,
                workers=workers,
                has_maps_and_lists=has_maps_and_lists,
                members=members,
                options=ours,
                tls=tls,
                is_pure=is_pure,
            )
            started.append(sparkis)
            redis = peer(keys, folder, has_maps_and_lists=has_maps_and_lists, members=members, options=peers)
            started.append(redis)
            for server in started:
                server.start_changes()
            yield sparkis, redis
        finally:
            for server in started:
                server.stop()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder for logs and stores below TMPDIR; it is removed after the block."""
    with tempfile.TemporaryDirectory(prefix="sparkis-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(os.path.realpath(folder))
