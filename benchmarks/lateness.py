"""How late an epoch is at servers that are not the driver's: from the end of its commit to a client's read, or push.

A writer without Spark commits an epoch of one key every 0.2 to 1 s, at random; clients of each way of serving read that
key every millisecond. Each row is one way by which a server learns of the epoch (a watched folder, polls alone,
announcements of a log in an object store whose requests take 20 ms), or by which a client does.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import hiredis

from benchmarks.delay import percentile_row
from benchmarks.options import Options
from benchmarks.proxy import end_process
from benchmarks.results import Row
from benchmarks.servers import BenchmarkError, temporary_folder
from compat.conformance.servers import free_port
from compat.object_store import faulty_proxy, s3_server
from compat.waiting import eventually
from resp_server.net import children
from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.client import pack_request
from resp_server.registry.announcer import Announcer
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

EPOCHS, WARM_UP_EPOCHS = 120, 10
PAUSE_S = (0.2, 1.0)
# A writer begins this long before its job's first epoch, as a query does, whose first tasks take as long.
BEGUN_S = 1.0
BUDGET_P50_MS, BUDGET_P99_MS = 50.0, 200.0
REQUEST_MS = 20
KEY = b"late:s:a"
STATE = StateDescriptor("s", key="k", value="v")
TOKEN = secrets.token_hex(16)
# A server of a log that the machine does not report files of, as of a shared folder.
UNWATCHED = (
    "from resp_server.serving.log_watch import LogWatch; LogWatch.watch = lambda *_: None; "
    "import sys; from spark_hooks.cli import main; sys.exit(main(sys.argv[1:]))"
)
TIMEOUT_S = 60.0
READ_EVERY_S = 0.001

# Waits until a client has seen the epoch with a number.
Wait = Callable[[int], None]


def run(options: Options) -> Iterator[Row]:
    """Yield the median and the 99th percentile of each way."""
    epochs = max(5, int(EPOCHS * options.scale))
    note = f"{epochs} epochs, one each {PAUSE_S[0]:g} to {PAUSE_S[1]:g} s"
    with temporary_folder() as folder, ExitStack() as stack:
        s3_port = stack.enter_context(s3_server.running("late"))
        for number, (name, serve) in enumerate(WAYS.items()):
            options.report(f"lateness: {name}")
            with _Way(folder / str(number), s3_port) as way:
                late_ms = _measured(way, serve, epochs)
            budgets = (None, None) if "polled" in name else (BUDGET_P50_MS, BUDGET_P99_MS)
            yield percentile_row(f"{name}, p50", "lateness", late_ms, 0.5, budget=budgets[0], note=note)
            yield percentile_row(f"{name}, p99", "lateness", late_ms, 0.99, budget=budgets[1], note=note)
        jobs = max(5, epochs // 6)
        options.report("lateness: new jobs")
        with _Way(folder / "new", s3_port) as way:
            late_ms = _first_epochs(way, jobs)
        name, note = "a local log, the first epoch of a new job", f"{jobs} jobs, which began {BEGUN_S:g} s before"
        yield percentile_row(f"{name}, p50", "lateness", late_ms, 0.5, budget=BUDGET_P50_MS, note=note)
        yield percentile_row(f"{name}, p99", "lateness", late_ms, 0.99, budget=BUDGET_P99_MS, note=note)


class _Way(ExitStack):
    """One measurement: its log, the programs that serve it, and the addresses to which its writer announces epochs.

    log: a local folder, or with `use_bucket` a bucket; then the servers' requests take REQUEST_MS, the writer's do not.
    """

    def __init__(self, folder: Path, s3_port: int) -> None:
        super().__init__()
        self._folder = folder
        self._s3_port = s3_port
        self._environment = children.environment() | {TOKEN_VARIABLE: TOKEN}
        self.log = str(folder / "log")
        self.announced_to: list[str] = []
        self.has_registry = False
        (folder / "log").mkdir(parents=True)

    def use_bucket(self) -> None:
        """Have the log in a bucket. To be called first."""
        proxy = self.enter_context(faulty_proxy.running(self._s3_port))
        proxy.delay_s = REQUEST_MS / 1000
        os.environ.update(s3_server.environment(self._s3_port))
        self._environment |= s3_server.environment(proxy.port)
        self.log = f"s3://late/{self._folder.name}"

    def publish_first(self) -> LogWriter:
        """Return the log's writer, after its first epoch."""
        writer = self.enter_context(LogWriter(self.log, "late", [STATE]))
        writer.publish([Change("s", Op.PUT, KEY, None, b"0")])
        return writer

    def start(self, program: str, *options: str, is_watched: bool = True) -> int:
        """Start `sparkis PROGRAM`; return its port."""
        port = free_port()
        command = [sys.executable, "-m", "sparkis"] if is_watched else [sys.executable, "-c", UNWATCHED]
        command += [program, "--port", str(port), "--loglevel", "error", *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=self._environment)
        self.callback(end_process, process)
        return port

    def serve(self, *options: str, is_watched: bool = True) -> int:
        """Start `sparkis serve`."""
        store = str(self._folder / "store")
        return self.start("serve", "--log", self.log, "--store", store, *options, is_watched=is_watched)

    def announced(self) -> tuple[str, str]:
        """Return the option for a server to which epochs are announced."""
        self.announced_to.append(f"127.0.0.1:{free_port()}")
        return "--announcements", self.announced_to[-1]

    def cluster(self, servers: int) -> int:
        """Start a registry, state servers and a proxy; return the proxy's port."""
        registry = f"127.0.0.1:{self.start('registry', '--log', self.log)}"
        self.has_registry = True
        for each in range(servers):
            store = str(self._folder / f"store{each}")
            self.start("state-server", "--log", self.log, "--registry", registry, "--store", store)
        return self.start("proxy", "--registry", registry)


def _measured(way: _Way, serve: Callable[[_Way], tuple[LogWriter, Wait]], epochs: int) -> list[float]:
    """Return how late each epoch was, in ms."""
    random, late_ms = Random(1), []
    writer, wait = serve(way)
    announcer = Announcer(way.log, way.announced_to, token=TOKEN, to_registry=way.has_registry)
    way.callback(announcer.close)
    for number in range(1, WARM_UP_EPOCHS + epochs + 1):
        time.sleep(random.uniform(*PAUSE_S))
        epoch = writer.publish([Change("s", Op.PUT, KEY, None, b"%d" % number)])
        committed_s = time.perf_counter()
        announcer.announce("late", writer.current.term, epoch)
        wait(number)
        late_ms.append((time.perf_counter() - committed_s) * 1000)
    return late_ms[WARM_UP_EPOCHS:]


def _first_epochs(way: _Way, jobs: int) -> list[float]:
    """Return how late the first epoch of each of some new jobs was, in ms."""
    late_ms = []
    way.publish_first()
    client = _Client(way.serve())
    for number in range(jobs):
        writer = way.enter_context(LogWriter(way.log, f"new{number}", [STATE]))
        time.sleep(BEGUN_S)
        key = b"new%d:s:a" % number
        writer.publish([Change("s", Op.PUT, key, None, b"0")])
        committed_s = time.perf_counter()
        client.read_until(key, b"0")
        late_ms.append((time.perf_counter() - committed_s) * 1000)
    return late_ms


class _Client:
    """A client of a server that has the first epoch."""

    def __init__(self, port: int) -> None:
        self._replies = hiredis.Reader()
        self._pushes: deque[object] = deque()

        def has_epoch() -> bool:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
                self._replies = hiredis.Reader()
                return self.call("GET", KEY) == b"0"
            except OSError:
                return False

        eventually(has_epoch, awaited="the first epoch", timeout_s=TIMEOUT_S, interval_s=0.1, error=BenchmarkError)

    def call(self, *words: str | bytes) -> object:
        """Send a request; return the reply. Pushes before it are kept for `next`."""
        self._socket.sendall(pack_request(*words))
        while isinstance(reply := self._received(), hiredis.PushNotification):
            self._pushes.append(reply)
        return reply

    def read_until(self, key: bytes, value: bytes) -> None:
        """Read a key, without a pause worth the name, until it has a value."""
        ends_s = time.monotonic() + TIMEOUT_S
        while self.call("GET", key) != value:
            if time.monotonic() > ends_s:
                raise BenchmarkError(f"{key!r} does not become {value!r}")
            time.sleep(READ_EVERY_S)

    def next(self) -> object:
        """Return the next message or push."""
        return self._pushes.popleft() if self._pushes else self._received()

    def _received(self) -> object:
        while (reply := self._replies.gets()) is False:
            received = self._socket.recv(1 << 16)
            if not received:
                raise BenchmarkError("the server closed the connection")
            self._replies.feed(received)
        return reply


def _reading(port: int) -> Wait:
    """Read the key until it has the number."""
    client = _Client(port)
    return lambda number: client.read_until(KEY, b"%d" % number)


def _notified(port: int) -> Wait:
    """Wait for the keyspace notification of each epoch."""
    client = _Client(port)
    client.call("SUBSCRIBE", b"__keyspace@0__:" + KEY)

    def wait(number: int) -> None:
        message = client.next()
        if not isinstance(message, list) or message[2] != b"set":
            raise BenchmarkError(f"{message!r} is no notification")

    return wait


def _caching(port: int) -> Wait:
    """Cache the key as clients with tracking do: wait for its invalidation, and read it again."""
    client = _Client(port)
    client.call("HELLO", "3")
    client.call("CLIENT", "TRACKING", "ON")
    client.call("GET", KEY)

    def wait(number: int) -> None:
        client.next()
        while client.call("GET", KEY) != b"%d" % number:  # servers that join a cluster invalidate keys, too
            client.next()

    return wait


def _in_folder(
    client: Callable[[int], Wait], *options: str, is_watched: bool = True
) -> Callable[[_Way], tuple[LogWriter, Wait]]:
    def serve(way: _Way) -> tuple[LogWriter, Wait]:
        return way.publish_first(), client(way.serve(*options, is_watched=is_watched))

    return serve


def _in_bucket(*, is_announced: bool) -> Callable[[_Way], tuple[LogWriter, Wait]]:
    def serve(way: _Way) -> tuple[LogWriter, Wait]:
        way.use_bucket()
        return way.publish_first(), _reading(way.serve(*(way.announced() if is_announced else ())))

    return serve


def _cluster(client: Callable[[int], Wait], *, is_in_bucket: bool = False) -> Callable[[_Way], tuple[LogWriter, Wait]]:
    def serve(way: _Way) -> tuple[LogWriter, Wait]:
        if is_in_bucket:
            way.use_bucket()
        return way.publish_first(), client(way.cluster(3))

    return serve


WAYS = {
    "a local log": _in_folder(_reading),
    "a local log, keyspace notification": _in_folder(_notified, "--notify-keyspace-events", "KEA"),
    "a local log, invalidation of a cached key": _in_folder(_caching),
    "a local log, three servers behind a proxy": _cluster(_reading),
    "a local log, three servers behind a proxy, invalidation": _cluster(_caching),
    "a shared folder, polled": _in_folder(_reading, is_watched=False),
    f"a bucket of {REQUEST_MS} ms, announced": _in_bucket(is_announced=True),
    f"a bucket of {REQUEST_MS} ms, polled": _in_bucket(is_announced=False),
    f"a bucket of {REQUEST_MS} ms, three servers behind a proxy": _cluster(_reading, is_in_bucket=True),
}
