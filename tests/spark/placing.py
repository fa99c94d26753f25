"""Shared by tests of state servers on executors: the states, three kinds of readers, and the processes."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from compat.waiting import READ_PAUSE_S, WAIT_S_MAX, eventually
from resp_server.net import children
from resp_server.programs.executor_supervisor import start_of
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from spark_hooks.sessions import is_stopped
from tests.spark.micro_batches import Batches, start

READERS = {"string": ("GET",), "hash": ("HGETALL",), "list": ("LRANGE", "0", "-1")}
HOPS_MAX = 5
KEYS = 300


def states() -> list[sparkis.StateDescriptor]:
    """Return a state of each shape."""
    return [
        sparkis.StateDescriptor("sum", key="k", value="sum"),
        sparkis.StateDescriptor("facts", key="k", value=["sum", "n"]),
    ]


def sums(rows: DataFrame) -> DataFrame:
    """Return the query behind them."""
    return rows.groupBy("k").agg(F.sum("v").alias("sum"), F.count("*").alias("n"))


def batch(number: int) -> Iterator[dict[str, Any]]:
    """Return the rows of a micro-batch, which change every key."""
    return ({"k": f"k{i}", "v": i * 10 + number} for i in range(KEYS))


def values_by_key(url: str) -> dict[str, Any]:
    """Return all keys and values."""
    with redis.Redis.from_url(url, decode_responses=True) as client, client.pipeline(transaction=False) as asked:
        keys = list(client.scan_iter(count=1000))
        for key in keys:
            asked.type(key)
        kinds = asked.execute()
        for key, kind in zip(keys, kinds, strict=True):
            command, *rest = READERS[kind]
            asked.execute_command(command, key, *rest)
        return dict(zip(keys, asked.execute(), strict=True))


def values_or_error(url: str) -> dict[str, Any] | str:
    """Return all keys and values, or the error of a read."""
    try:
        return values_by_key(url)
    except redis.RedisError as error:
        return str(error)


class ByHand:
    """A minimal cluster client: it writes requests and follows MOVED."""

    def __init__(self, first: tuple[str, int]) -> None:
        self.moved = 0
        self._first = first
        self._connections: dict[tuple[str, int], tuple[socket.socket, hiredis.Reader]] = {}

    def ask(self, *words: str) -> Any:
        """Send a request to the first server, and on to wherever MOVED says."""
        there = self._first
        for _ in range(HOPS_MAX):
            reply = self._ask(there, words)
            if not isinstance(reply, hiredis.ReplyError) or not (
                moved := re.fullmatch(r"MOVED \d+ (.*):(\d+)", str(reply))
            ):
                return reply
            self.moved += 1
            there = moved[1], int(moved[2])
        raise AssertionError(f"{words} was sent on and on")

    def _ask(self, there: tuple[str, int], words: tuple[str, ...]) -> Any:
        if there not in self._connections:
            self._connections[there] = socket.create_connection(there, WAIT_S_MAX), hiredis.Reader(encoding="utf-8")
        connection, reader = self._connections[there]
        connection.sendall(f"*{len(words)}\r\n".encode() + b"".join(_bulk(word) for word in words))
        while (reply := reader.gets()) is False:
            received = connection.recv(65_536)
            assert received, f"{there} closed the connection"
            reader.feed(received)
        return reply

    def close(self) -> None:
        """Leave all servers."""
        for connection, _ in self._connections.values():
            connection.close()


def _bulk(word: str) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode())


class Watcher:
    """Reads a key through a proxy repeatedly; errors are allowed, wrong values are not."""

    def __init__(self, url: str, key: str, allowed: set[str]) -> None:
        self.answers = 0
        self.errors: list[str] = []
        self.wrong: list[Any] = []
        self._client = redis.Redis.from_url(url, decode_responses=True, retry=None)
        self._key = key
        self._allowed = allowed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(READ_PAUSE_S):
            try:
                found = self._client.get(self._key)
            except redis.RedisError as error:
                self.errors.append(str(error))
                continue
            self.answers += 1
            if found not in self._allowed:
                self.wrong.append(found)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._over.set()
        self._thread.join()
        self._client.close()


@contextmanager
def watched(url: str, keys: dict[str, set[str]]) -> Iterator[list[Watcher]]:
    """Read keys continuously while the block runs."""
    watchers = [Watcher(url, key, allowed) for key, allowed in keys.items()]
    for each in watchers:
        each.start()
    try:
        yield watchers
    finally:
        for each in watchers:
            each.stop()


def addresses(endpoint: ExecutorsEndpoint) -> list[tuple[str, int]]:
    """Return the addresses of the registry's servers, in order."""
    found = (str(each["address"]).rpartition(":") for each in endpoint.members())
    return sorted((host, int(port)) for host, _, port in found)


def server_pids(endpoint: ExecutorsEndpoint) -> list[int]:
    """Return the process ids of the servers."""
    pids = []
    for host, port in addresses(endpoint):
        with redis.Redis(host, port, password=endpoint.password) as client:
            pids.append(int(client.info("server")["process_id"]))
    return pids


def parent_of(pid: int) -> int:
    """Return a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def executor_of(supervisor: int) -> int:
    """Return the JVM that a supervisor watches."""
    words = Path(f"/proc/{supervisor}/cmdline").read_bytes().split(b"\0")
    return int(words[words.index(b"--watch") + 1].partition(b":")[0])


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(each) for each in os.listdir("/proc") if each.isdigit() and _has_parent(int(each), pid)]


def _has_parent(pid: int, parent: int) -> bool:
    try:
        return parent_of(pid) == parent
    except OSError:
        return False


def is_running(pid: int) -> bool:
    """Return whether there is such a process."""
    return start_of(pid) is not None


def all_processes(endpoint: ExecutorsEndpoint) -> list[int]:
    """Return all processes of the serving side."""
    servers = server_pids(endpoint)
    appliers = [child for server in servers for child in children_of(server)]
    return [*endpoint.pids, *servers, *(parent_of(server) for server in servers), *appliers]


def executor_ids(spark: SparkSession) -> list[str]:
    """Return Spark's executors."""
    context: Any = spark.sparkContext._jsc
    found = context.sc().getExecutorIds()
    return [found.apply(number) for number in range(found.size())]


EXECUTORS = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executorEnv.PYTHONPATH": children.environment()["PYTHONPATH"],
}
EXPECTED = {f"job:sum:k{i}": str(2 * i * 10 + 1) for i in range(KEYS)} | {
    f"job:facts:k{i}": {"sum": str(2 * i * 10 + 1), "n": "2"} for i in range(KEYS)
}


@dataclass
class Placed:
    """A job on the cluster, and what serves it."""

    endpoint: ExecutorsEndpoint
    rows: Batches
    query: StreamingQuery
    log: Path
    batches: int = 0

    def add(self) -> None:
        """Let a micro-batch change every key, and be readable."""
        self.rows.add(*batch(self.batches))
        self.batches += 1
        self.query.processAllAvailable()

    def add_until_servers(self, count: int) -> None:
        """Run micro-batches until their tasks have started so many servers, and wait for these."""

        def servers_after_batch() -> int:
            self.add()
            return len(addresses(self.endpoint))

        eventually(servers_after_batch, lambda found: found == count, f"{count} servers")
        self.wait_for_servers(count)

    def sum(self, key: int) -> str:
        """Return what the state `sum` of a key has to be."""
        return str(sum(key * 10 + number for number in range(self.batches)))

    @property
    def expected(self) -> dict[str, Any]:
        """All that has to be readable."""
        sums = {f"job:sum:k{i}": self.sum(i) for i in range(KEYS)}
        facts = {f"job:facts:k{i}": {"sum": self.sum(i), "n": str(self.batches)} for i in range(KEYS)}
        return sums | facts

    def wait_for_servers(self, count: int) -> None:
        """Wait until so many servers answer all slots."""
        eventually(lambda: len(addresses(self.endpoint)), lambda found: found == count)
        eventually(lambda: values_or_error(self.endpoint.url), lambda found: found == self.expected)


@contextmanager
def placed_job(spark: SparkSession, folder: Path, **options: Any) -> Iterator[Placed]:
    """Run a job, which has a micro-batch, and serve it from executors, to the end of a block."""
    endpoint = sparkis.serve(spark, log=folder / "log", **options)
    assert isinstance(endpoint, ExecutorsEndpoint)
    rows = Batches(spark, folder / "input", "k string, v long")
    rows.add(*batch(0))
    writer = sparkis.queryable(sums(rows.df), *states(), wait_for_visibility=WAIT_S_MAX)
    query = start(writer, "job", folder / "checkpoint")
    yield Placed(endpoint, rows, query, folder / "log", batches=1)
    if not is_stopped(spark):
        query.stop()
    endpoint.stop()


@contextmanager
def placed(spark: SparkSession, folder: Path, executors: int, **options: Any) -> Iterator[ExecutorsEndpoint]:
    """Do the same with two micro-batches, when so many executors serve."""
    with placed_job(spark, folder, **options) as job:
        eventually(lambda: len(addresses(job.endpoint)), lambda count: count == executors)
        job.add()
        eventually(lambda: values_or_error(job.endpoint.url), lambda found: found == EXPECTED)
        yield job.endpoint
