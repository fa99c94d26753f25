"""State updates per second, from Spark's rows until they are readable, beside the same job with redis-server.

Two streaming queries of one session read folders with the same files. A round moves a batch's files into one folder, in
one rename, and waits until all of its rows are readable. Ours: `sparkis.queryable`. The peer: a foreachBatch function
whose partitions write with redis-py and hiredis, by one of several methods; each is tried once, and the fastest one
runs the rounds. Spark makes the keys' text on both sides. A third query writes nothing: its time is Spark's own, the
lower bound of any method.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from benchmarks import processes
from benchmarks import spark as local_spark
from benchmarks.options import Options
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import BenchmarkError, start_redis, temporary_folder
from compat.waiting import eventually
from spark_hooks.serving.detached_endpoint import DetachedEndpoint

JOB, STATE = "updates", "last"
FIELDS = ("a", "b", "c", "d")
KEYS = 1_000_000
ROWS, MANY_ROWS = 100_000, 1_000_000
FILES = 2  # as many as cores, so that Spark reads them in parallel
BUDGET, BUDGET_BESIDE_ARROW = 2.0, 1.0
CHECKED_ROWS = 500
TIMEOUT_S = 300.0

Write = Callable[["redis.Redis", Sequence[Any]], None]


@dataclass(frozen=True)
class WriteMethod:
    """A method of the peer to write rows of (key, value ...). rows: the batch size. has_arrow: from Arrow batches."""

    name: str
    rows: int
    write: Write
    has_arrow: bool = False
    is_one_hash: bool = False

    @property
    def label(self) -> str:
        """The method's name in a row."""
        return f"{self.name} of {self.rows:,} in {'mapInArrow' if self.has_arrow else 'foreachPartition'}"


def _call(client: redis.Redis) -> Callable[..., Any]:
    """Return redis-py's fastest function to send a command; it does not convert arguments."""
    call: Callable[..., Any] = client.execute_command
    return call


def _set(client: redis.Redis, rows: Sequence[Any]) -> None:
    pipeline = client.pipeline(transaction=False)
    for key, value in rows:
        pipeline.set(key, value)
    pipeline.execute()


def _mset(client: redis.Redis, rows: Sequence[Any]) -> None:
    _call(client)("MSET", *chain.from_iterable(rows))


def _hset_one_hash(client: redis.Redis, rows: Sequence[Any]) -> None:
    _call(client)("HSET", STATE, *chain.from_iterable(rows))


def _hset(client: redis.Redis, rows: Sequence[Any]) -> None:
    pipeline = client.pipeline(transaction=False)
    call = _call(pipeline)
    for key, a, b, c, d in rows:
        call("HSET", key, "a", a, "b", b, "c", c, "d", d)
    pipeline.execute()


VALUE_METHODS = (
    WriteMethod("SET pipelined", 1_000, _set),
    WriteMethod("SET pipelined", 10_000, _set),
    WriteMethod("MSET", 1_000, _mset),
    WriteMethod("MSET", 10_000, _mset),
    WriteMethod("HSET into one hash", 1_000, _hset_one_hash, is_one_hash=True),
)
MAP_METHODS = (WriteMethod("HSET pipelined", 1_000, _hset), WriteMethod("HSET pipelined", 10_000, _hset))
ARROW_METHODS = (WriteMethod("MSET", 10_000, _mset, has_arrow=True), WriteMethod("MSET", 1_000, _mset, has_arrow=True))


class Round(NamedTuple):
    """One batch: seconds until it was fully readable, the servers' processor time, and seconds until the commit."""

    took_s: float
    cpu_s: float
    commit_s: float = 0.0


@dataclass(frozen=True)
class Case:
    """A job: its transformation of the rows, and the names of its value columns."""

    name: str
    columns: tuple[str, ...]
    methods: tuple[WriteMethod, ...]
    is_aggregation: bool = False

    def of(self, stream: DataFrame) -> DataFrame:
        """Return the job's rows."""
        if not self.is_aggregation:
            return stream
        return stream.groupBy("key").agg(*(F.max(column).alias(column) for column in self.columns))


VALUES = Case("value state", FIELDS[:1], VALUE_METHODS)
MAPS = Case(f"map state of {len(FIELDS)} fields", FIELDS, MAP_METHODS)
MAXIMA = Case("running max", FIELDS[:1], VALUE_METHODS, is_aggregation=True)


def run(options: Options) -> Iterator[Row]:
    """Yield a row for each job and batch size."""
    small, many = (max(FILES, int(rows * options.scale)) for rows in (ROWS, MANY_ROWS))
    selected = [(VALUES, (small, many)), (MAPS, (small, many) if options.is_full else (small,)), (MAXIMA, (small,))]
    with local_spark.session() as spark:
        for case, sizes in selected:
            with temporary_folder() as folder:
                comparison = Comparison(spark, folder, case)
                try:
                    for rows in sizes:
                        yield from comparison.rows(rows, options)
                finally:
                    comparison.close()


class Comparison:
    """Both jobs of a case, with the servers that they write to."""

    def __init__(self, spark: SparkSession, folder: Path, case: Case) -> None:
        self._spark = spark
        self._folder = folder
        self._case = case
        self._turn = 0
        self._random = np.random.default_rng(1)
        self._checks = Random(1)
        self._method = case.methods[0]
        self._peer_done_s = self._nowhere_done_s = 0.0
        self._process, self._port, _ = start_redis(folder)
        endpoint = sparkis.serve(spark, log=folder / "log", placement=sparkis.Driver(store=folder / "store"))
        assert isinstance(endpoint, DetachedEndpoint)  # in local mode
        self._endpoint = endpoint
        self._ours = redis.Redis(port=self._endpoint.port, decode_responses=True)
        self._peer = redis.Redis(port=self._port, decode_responses=True)
        self._batches = folder / "batches"
        value = self._case.columns[0] if len(self._case.columns) == 1 else self._case.columns
        ours = sparkis.queryable(self._stream("ours"), STATE, key="key", value=value, mode="update")
        peer = self._stream("peer").writeStream.outputMode("update").foreachBatch(self._write_to_peer)
        nowhere = self._stream("nowhere").writeStream.outputMode("update").foreachBatch(self._write_nowhere)
        self._our_query = ours.queryName(JOB).option("checkpointLocation", str(folder / "c1")).start()
        self._peer_query = peer.queryName("peer").option("checkpointLocation", str(folder / "c2")).start()
        self._no_query = nowhere.queryName("nowhere").option("checkpointLocation", str(folder / "c3")).start()

    def _stream(self, name: str) -> DataFrame:
        folder = self._folder / name
        folder.mkdir()
        schema = ", ".join(f"{column} long" for column in ("key", *self._case.columns))
        return self._case.of(self._spark.readStream.schema(schema).parquet(f"{folder}/*"))

    def rows(self, rows: int, options: Options) -> Iterator[Row]:
        """Try the peer's methods, then run the rounds against the fastest one."""
        name = f"{self._case.name}, {rows:,} rows a batch"
        self._round_of_ours(self._files(rows))  # warms up Spark, and creates all keys
        self._round_of_peer(self._files(rows))
        self._round_of_nowhere(self._files(rows))
        yield from self._compare(name, rows, self._fastest(self._case.methods, name, rows, options), options, BUDGET)
        if rows >= MANY_ROWS * options.scale and self._case is VALUES:
            fastest = self._fastest(ARROW_METHODS, name, rows, options)
            yield from self._compare(f"{name}, peer fed by Arrow", rows, fastest, options, BUDGET_BESIDE_ARROW)

    def _fastest(self, methods: Sequence[WriteMethod], name: str, rows: int, options: Options) -> WriteMethod:
        found = {}
        for method in methods:
            options.report(f"{name}: trying {method.label}")
            self._method = method
            found[method] = self._round_of_peer(self._files(rows)).took_s
            self._round_of_ours(self._files(rows))  # so that the JVM is equally warm for both
        return min(found, key=found.__getitem__)

    def _compare(
        self, name: str, rows: int, method: WriteMethod, options: Options, budget: float | None
    ) -> Iterator[Row]:
        self._method = method
        ours, peer, nowhere = [], [], []
        for number in range(options.rounds):
            options.report(f"{name}: round {number + 1} of {options.rounds}")
            files = self._files(rows)
            ours.append(self._round_of_ours(files))
            peer.append(self._round_of_peer(files))
            nowhere.append(self._round_of_nowhere(files))
        took_s, commit_s = median(each.took_s for each in ours), median(each.commit_s for each in ours)
        yield compared_row(
            name,
            "updates",
            [(rows / mine.took_s, rows / theirs.took_s) for mine, theirs in zip(ours, peer, strict=True)],
            unit="rows/s",
            better="more",
            budget=budget,
            peer_name=method.label,
            ours_cpu_us=median(each.cpu_s for each in ours) / rows * 1e6,
            peer_cpu_us=median(each.cpu_s for each in peer) / rows * 1e6,
            note=f"{took_s:.2f} s, {commit_s:.2f} s of it until the commit",
        )
        least_s, peer_s = median(nowhere), median(each.took_s for each in peer)
        note = f"beyond it: sparkis {took_s - least_s:.2f} s, peer {peer_s - least_s:.2f} s"
        yield single_row(f"{name}: Spark's own, written nowhere", "updates", nowhere, unit="s", note=note)

    def _files(self, rows: int) -> Files:
        """Write a batch's files into a folder that no query reads: each key once, with new values."""
        self._turn += 1
        folder = self._batches / f"{self._turn:06d}"
        folder.mkdir(parents=True)
        keys = self._random.permutation(max(KEYS, rows))[:rows]
        for part, some in enumerate(np.array_split(keys, FILES)):
            columns = {name: _value(some, self._turn, i) for i, name in enumerate(self._case.columns)}
            pq.write_table(pa.table({"key": some, **columns}), folder / f"part-{part}.parquet")
        return Files(folder, self._turn, keys)

    def _round_of_ours(self, files: Files) -> Round:
        """Publish a batch, and wait until it is fully readable."""
        server = self._endpoint.pid
        pids = [*processes.serving(server), *filter(processes.is_applier, processes.below(server))]
        cpu_s = sum(map(processes.cpu_s, pids))
        last = int(files.keys[-1])
        expected = self._expected(last, files.turn)
        arrived_s = time.time()
        started_s = self._add_files(files, "ours")
        # An epoch becomes readable as a whole.
        eventually(
            lambda: self._found(last) == expected or self._fail(self._our_query),
            awaited="reading",
            timeout_s=TIMEOUT_S,
            interval_s=0.002,
            error=BenchmarkError,
        )
        took_s = time.monotonic() - started_s
        cpu_s = sum(map(processes.cpu_s, pids)) - cpu_s
        self._check(files, self._found, "sparkis")
        self._remove_files(files, "ours", self._our_query)
        return Round(took_s, cpu_s, self._last_commit_s() - arrived_s)

    def _round_of_peer(self, files: Files) -> Round:
        cpu_s = processes.cpu_s(self._process.pid)
        self._peer_done_s = 0.0
        started_s = self._add_files(files, "peer")
        eventually(
            lambda: self._peer_done_s > 0 or self._fail(self._peer_query),
            awaited="writing",
            timeout_s=TIMEOUT_S,
            interval_s=0.002,
            error=BenchmarkError,
        )
        took_s = self._peer_done_s - started_s
        cpu_s = processes.cpu_s(self._process.pid) - cpu_s
        self._check(files, self._found_at_peer, "redis-server")
        self._remove_files(files, "peer", self._peer_query)
        return Round(took_s, cpu_s)

    def _round_of_nowhere(self, files: Files) -> float:
        """Publish a batch for the query that writes nothing; return its duration in seconds."""
        self._nowhere_done_s = 0.0
        started_s = self._add_files(files, "nowhere")
        eventually(
            lambda: self._nowhere_done_s > 0 or self._fail(self._no_query),
            awaited="reading files",
            timeout_s=TIMEOUT_S,
            interval_s=0.002,
            error=BenchmarkError,
        )
        took_s = self._nowhere_done_s - started_s
        self._remove_files(files, "nowhere", self._no_query)
        return took_s

    def _write_nowhere(self, batch: DataFrame, batch_id: int) -> None:
        batch.write.format("noop").mode("append").save()
        self._nowhere_done_s = time.monotonic()

    def _last_commit_s(self) -> float:
        """Return the time of the last commit: that of the epoch's file."""
        epochs = (self._folder / "log").glob(f"{JOB}/*/epochs/[0-9]*.json")
        return max(path.stat().st_ctime for path in epochs)

    def _add_files(self, files: Files, name: str) -> float:
        """Move a batch's files into a query's folder, all at once; return the time."""
        hidden = self._folder / f".{name}-{files.turn}"
        shutil.copytree(files.folder, hidden, copy_function=os.link)
        started_s = time.monotonic()
        hidden.rename(self._folder / name / files.folder.name)
        return started_s

    def _remove_files(self, files: Files, name: str, query: StreamingQuery) -> None:
        """Remove a batch's files, and wait until Spark has finished it, so that it does not disturb the next round.

        Waiting queries list their folders all the time, on the same cores; old files would make this slower.
        """
        query.processAllAvailable()
        shutil.rmtree(self._folder / name / files.folder.name)

    @staticmethod
    def _fail(query: StreamingQuery) -> bool:
        """Return False; BenchmarkError if a query has failed."""
        failure = query.exception()
        if failure is not None:
            raise BenchmarkError(f"the query failed: {failure}")
        return False

    def _write_to_peer(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch; runs in this process, its partitions in Spark's Python workers."""
        method, port = self._method, self._port
        prefix = f"{JOB}:{STATE}:"
        texts = batch.select(
            F.concat(F.lit(prefix), F.col("key").cast("string")).alias("key"),
            *(F.col(column).cast("string").alias(column) for column in self._case.columns),
        )
        if method.has_arrow:
            texts.mapInArrow(_arrow_writer(method, port), "written long").collect()
        else:
            texts.foreachPartition(_row_writer(method, port))
        self._peer_done_s = time.monotonic()

    def _check(self, files: Files, find: Callable[[int], Any], server: str) -> None:
        """Read some of a batch's rows; BenchmarkError if one differs from the written row."""
        for key in self._checks.choices(files.keys.tolist(), k=CHECKED_ROWS):
            found, expected = find(key), self._expected(key, files.turn)
            if found != expected:
                raise BenchmarkError(f"{server} replied {found!r} for key {key} instead of {expected!r}")

    def _expected(self, key: int, turn: int) -> Any:
        values = [str(_value(np.array([key]), turn, i)[0]) for i in range(len(self._case.columns))]
        return values[0] if len(values) == 1 else dict(zip(self._case.columns, values, strict=True))

    def _found(self, key: int) -> Any:
        name = f"{JOB}:{STATE}:{key}"
        try:
            return self._ours.get(name) if len(self._case.columns) == 1 else self._ours.hgetall(name)
        except redis.ResponseError:  # the job is just being opened
            return None

    def _found_at_peer(self, key: int) -> Any:
        name = f"{JOB}:{STATE}:{key}"
        if self._method.is_one_hash:
            return self._peer.hget(STATE, name)
        return self._peer.get(name) if len(self._case.columns) == 1 else self._peer.hgetall(name)

    def close(self) -> None:
        """Stop the jobs and their servers."""
        for query in (self._our_query, self._peer_query, self._no_query):
            query.stop()
        self._endpoint.stop()
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Files:
    """The files of a batch that is not published yet."""

    folder: Path
    turn: int
    keys: npt.NDArray[np.int64]


def _value(keys: npt.NDArray[np.int64], turn: int, column: int) -> npt.NDArray[np.int64]:
    """Return values that encode key, turn and column, and that grow with each turn."""
    return turn * 100_000_000 + keys * 10 + column


def _row_writer(method: WriteMethod, port: int) -> Callable[[Iterable[Any]], None]:
    count, write = method.rows, method.write

    def write_partition(rows: Iterable[Any]) -> None:
        client, remaining = redis.Redis(port=port), iter(rows)
        while some := list(islice(remaining, count)):
            write(client, some)
        client.close()

    return write_partition


def _arrow_writer(method: WriteMethod, port: int) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    count, write = method.rows, method.write

    def write_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = redis.Redis(port=port)
        for batch in batches:
            for start in range(0, batch.num_rows, count):
                columns = [column.to_pylist() for column in batch.slice(start, count).columns]
                write(client, list(zip(*columns, strict=True)))
            yield pa.RecordBatch.from_pydict({"written": pa.array([batch.num_rows], pa.int64())})
        client.close()

    return write_partition
