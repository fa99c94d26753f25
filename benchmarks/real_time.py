"""Values before their commit: from Spark's writer to a client's read, and what they cost the server.

    frame    processor time of a frame of rows in the server, from the bytes to the commit of LMDB's transaction
    reads    GET of values that are not committed yet, beside GET of committed ones, from one server
    delay    a query in Real-Time Mode, whose source is in memory, with the writer of `freshness="record"` and a server,
             and with a plain ForeachWriter that sends a SET for each row to redis-server. The time at which Spark's
             writer gets each row is written down (`java/RealTime.java`). A client reads all keys by one MGET each
             millisecond; a row counts as read at the first reply that has its value or a newer one of its key.

At the higher rate each record becomes `ROWS_PER_RECORD` rows, because the source in memory hands out records one by
one. All processes run on one machine, so they share a clock.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import hiredis
import numpy as np
import numpy.typing as npt
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks import load
from benchmarks import spark as local_spark
from benchmarks.delay import percentile_row
from benchmarks.options import Options
from benchmarks.proxy import end_process
from benchmarks.results import Row, compared_row, single_row
from benchmarks.servers import BenchmarkError, start_redis, start_sparkis, temporary_folder
from compat.waiting import eventually
from resp_server.net.client import Client, pack_request
from spark_hooks.real_time.jvm_writer import JAR, JvmWriter
from spark_hooks.real_time.servers import Servers
from state_backend.fresh.values import FreshValues, folder_of
from state_backend.fresh.writer import FreshWriter
from state_backend.lmdb.store import LmdbStore
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

JOB, PREFIX = "rt", "rt:last:"
STATES = [StateDescriptor("last", key="k", value="t")]
SCHEMA = (
    '{"type":"struct","fields":[{"name":"k","type":"string","nullable":true,"metadata":{}},'
    '{"name":"t","type":"long","nullable":true,"metadata":{}}]}'
)
KEYS = 100
# The sizes of frames: at 1,000 rows a second and at 50,000, and one in between with a budget.
FRAME_ROWS = (2, 250, 1_000)
BUDGET_ROWS, BUDGET_FRAME_MS = 250, 1.0
FRAMES = 200
GET_KEYS, GETS, CLIENTS, PIPELINE = 10_000, 300_000, 50, 16
# Users of the server that is read.
FRESH, COMMITTED = "fresh", "committed"
RATES = (1_000, 50_000)
ROWS_PER_RECORD = 50
# So long a batch lasts, and so much of it is measured, after the first rows.
BATCH_S, WARM_UP_S, MEASURED_S = 90, 8.0, 15.0
BUDGETS_MS = {1_000: (15.0, 60.0), 50_000: (None, 250.0)}
# At the higher rate a delay may be this much longer than that of the peer, if that is more than the budget.
BUDGET_RATIO = 1.2
TIMEOUT_S = 120.0
SOURCE = Path(__file__).with_name("java") / "RealTime.java"
BUILD = Path(__file__).parents[1] / "build"
SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    "spark.sql.shuffle.partitions": "1",
    # Spark's list has no explode, which the higher rate needs.
    "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
}

Times = npt.NDArray[np.int64]


def run(options: Options) -> Iterator[Row]:
    """Yield what a frame costs, then reads, then the delay."""
    with temporary_folder() as folder:
        yield from _frames(folder / "frames", options)
        yield from _reads(folder / "reads", options)
        jar = _jar()
        with local_spark.session(spark__jars=f"{jar},{JAR}", spark__sql__shuffle__partitions="1") as spark:
            for name, text in SETTINGS.items():
                spark.conf.set(name, text)
            _warm_up(spark, folder / "warm-up", options)
            for rate in RATES:
                yield from _delays(spark, folder / str(rate), rate, options)


def _row(key: int, value: int) -> bytes:
    """Return a row as Spark's UnsafeRow, behind its size."""
    name = b"%012d" % key
    return struct.pack("<IQQq16s", 40, 0, 24 << 32 | len(name), value, name)


def _frames(folder: Path, options: Options) -> Iterator[Row]:
    """Yield the processor time of frames of each size."""
    store = LmdbStore(folder / "store", "g")
    values = FreshValues(folder_of(folder / "store", "server"), "g", 256 << 20)
    writer = FreshWriter(values, JOB, STATES)
    writer.open_batch("run", 1, 0, SCHEMA.encode(), -1)
    committed = store.snapshot(0)
    for rows in FRAME_ROWS:
        frames = [b"".join(_row((at * rows + n) % KEYS, at * rows + n) for n in range(rows)) for at in range(16)]
        measured = []
        for _ in range(options.rounds + 1):
            began_s = time.process_time()
            for number in range(FRAMES):
                writer.put("run", 1, 0, frames[number % len(frames)], committed, 0)
            measured.append((time.process_time() - began_s) / FRAMES * 1000)
        yield single_row(
            f"a frame of {rows:,} row{'s' * (rows > 1)} at the server",
            "real_time",
            measured[1:],
            unit="ms",
            budget=BUDGET_FRAME_MS if rows == BUDGET_ROWS else None,
            note="processor time" + _speed(),
        )
    committed.close()
    values.close()
    store.close()


def _speed() -> str:
    """Return what the machine's state is: other programs run on it, and its host may give it less."""
    total, began_s = 0, time.process_time()
    for number in range(5_000_000):
        total += number
    took_s = time.process_time() - began_s
    return f"; load {os.getloadavg()[0]:.1f}, 5 million additions took {took_s:.2f} s"


@contextmanager
def _served(folder: Path, keys: int, *options: str) -> Iterator[tuple[int, LogWriter]]:
    """Run a server of a job with some keys at epoch 0; yield its port."""
    with LogWriter(folder / "log", JOB, STATES) as log:
        log.publish([Change("last", Op.PUT, _name(key), value=b"0") for key in range(keys)])
        process = start_sparkis(folder / "log", folder / "store", options=options)
        try:
            with Client("127.0.0.1", process.port, timeout_s=TIMEOUT_S) as client:
                client.call("HELLO", "3")
                eventually(lambda: client.call("GET", _name(0)) == "0", timeout_s=TIMEOUT_S, error=BenchmarkError)
                eventually(
                    lambda: not client.call("STATE", "LAG")[0]["stale"], timeout_s=TIMEOUT_S, error=BenchmarkError
                )
            yield process.port, log
        finally:
            end_process(process.process)


def _name(key: int) -> bytes:
    return b"%b%012d" % (PREFIX.encode(), key)


def _reads(folder: Path, options: Options) -> Iterator[Row]:
    """Yield the rate of GET of values that are not committed, beside that of committed ones."""
    requests = int(GETS * options.scale)
    with _served(folder, GET_KEYS, "--committed-only", COMMITTED) as (port, _):
        with Client("127.0.0.1", port, timeout_s=TIMEOUT_S) as client:
            for user in (FRESH, COMMITTED):
                client.call("ACL", "SETUSER", user, "on", ">x", "~*", "+@all")
            client.call("STATE", "FRESH", "OPEN", JOB, "run", "1", "0", SCHEMA)
            for start in range(0, GET_KEYS, 1_000):
                rows = b"".join(_row(key, 1) for key in range(start, start + 1_000))
                client.call("STATE", "FRESH", "ROWS", JOB, "run", "1", "0", rows)
        rounds = []
        for number in range(options.rounds):
            found = {}
            for user in (FRESH, COMMITTED) if number % 2 else (COMMITTED, FRESH):
                found[user] = load.rate(
                    port,
                    ("GET", f"{PREFIX}{load.NUMBER}"),
                    clients=CLIENTS,
                    pipeline=PIPELINE,
                    requests=requests,
                    key_range=GET_KEYS,
                    user=(user, "x"),
                )
            rounds.append((found[FRESH], found[COMMITTED]))
    yield compared_row(
        f"GET of values before their commit, pipeline {PIPELINE}",
        "real_time",
        rounds,
        unit="requests/s",
        better="more",
        peer_name="the same keys, committed values",
        note=f"{GET_KEYS:,} keys{_speed()}",
    )


def _jar() -> Path:
    """Return the jar of RealTime.java, which is compiled if its source is newer."""
    jar, classes = BUILD / "bench-real-time.jar", BUILD / "bench-real-time"
    if not jar.exists() or jar.stat().st_mtime < SOURCE.stat().st_mtime:
        bin_ = Path(os.environ["JAVA_HOME"]) / "bin"
        jars = Path(pyspark.__file__).parent / "jars"
        compile_: list[str | Path] = [
            bin_ / "javac",
            "-nowarn",
            "--release",
            "17",
            "-cp",
            f"{jars}/*",
            "-d",
            classes,
            SOURCE,
        ]
        subprocess.run(list(map(str, compile_)), check=True)
        subprocess.run([bin_ / "jar", "cf", jar, "-C", classes, "."], check=True)
    return jar


def _delays(spark: SparkSession, folder: Path, rate: int, options: Options) -> Iterator[Row]:
    """Yield the delays of both writers at a rate."""
    jvm: Any = spark._jvm
    with ExitStack() as stack:
        port, _ = stack.enter_context(_served(folder / "sparkis", KEYS))
        redis = start_redis(folder)
        stack.callback(end_process, redis.process)
        ours = JvmWriter(spark, JOB, SCHEMA, Servers([f"redis://127.0.0.1:{port}"]))._writer
        found = {}
        for name, writer, at in (
            ("sparkis", ours, port),
            ("redis", jvm.benchmarks.RealTime.RedisWriter(redis.port, PREFIX), redis.port),
        ):
            options.report(f"real_time: {name} at {rate:,} rows/s")
            found[name] = _measured(spark, folder / name, writer, at, rate, options)
    budgets = BUDGETS_MS[rate]
    peer_p99 = _percentile(found["redis"][0], 0.99)
    rows = len(found["sparkis"][0])
    per_s = rows / (MEASURED_S * options.scale)
    for share, budget in zip((0.5, 0.99), budgets, strict=True):
        name = f"at {rate:,} rows/s, p{share * 100:.0f}"
        if budget is not None and rate == max(RATES):
            budget = max(budget, BUDGET_RATIO * peer_p99)
        note = f"{rows:,} rows, {per_s:,.0f}/s reached{_speed()}"
        for which, part in (("writer to GET", 0), ("record to writer (Spark)", 1), ("record to GET", 2)):
            times = found["sparkis"][part]
            is_judged = part == 0
            yield percentile_row(
                f"{which} {name}", "real_time", times, share, budget=budget if is_judged else None, note=note
            )
        note = f"{len(found['redis'][0]):,} rows; a ForeachWriter that sends SET to redis-server"
        yield percentile_row(f"writer to GET {name}, redis writer", "real_time", found["redis"][0], share, note=note)
        yield percentile_row(f"record to GET {name}, redis writer", "real_time", found["redis"][2], share, note=note)


def _warm_up(spark: SparkSession, folder: Path, options: Options) -> None:
    """Have the JVM compile what all queries run: the first one reads its records seconds late."""
    folder.mkdir()
    redis = start_redis(folder)
    try:
        jvm: Any = spark._jvm
        writer = jvm.benchmarks.RealTime.RedisWriter(redis.port, PREFIX)
        _measured(spark, folder, writer, redis.port, RATES[0], options)
    finally:
        end_process(redis.process)


def _percentile(times: Sequence[float], share: float) -> float:
    return float(np.quantile(times, share))


def _measured(
    spark: SparkSession, folder: Path, writer: Any, port: int, rate: int, options: Options
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Run a query; return for each row, in ms, the delays to read, to Spark's writer, and both together."""
    jvm: Any = spark._jvm
    times = folder / "times"
    times.mkdir(parents=True)
    stream = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream.singlePartition(
        spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING()
    )
    expanded = ROWS_PER_RECORD if rate == max(RATES) else 1
    started = _rows(DataFrame(stream.toDF(), spark), expanded).writeStream.outputMode("update")
    classic: Any = started.option("checkpointLocation", str(folder / "checkpoint"))
    classic.trigger(realTime=f"{BATCH_S} seconds")
    classic._jwrite.foreach(jvm.benchmarks.RealTime.Timed(writer, str(times)))
    query = classic.start()
    source = jvm.benchmarks.RealTime.Source(stream, rate // expanded)
    reader = _Reader(port)
    try:
        source.start()
        eventually(lambda: reader.has_rows or query.exception(), timeout_s=TIMEOUT_S, error=BenchmarkError)
        if failure := query.exception():
            raise BenchmarkError(f"the query failed: {failure}")
        time.sleep(WARM_UP_S * options.scale)
        began_us = time.time_ns() // 1000
        time.sleep(MEASURED_S * options.scale)
        ended_us = time.time_ns() // 1000
        time.sleep(1)  # the last of these rows
    finally:
        source.end()
        query.stop()
        reader.end()
    return reader.delays(_times_in(times), began_us, ended_us)


def _rows(texts: DataFrame, expanded: int) -> DataFrame:
    record = texts.select(F.split("value", " ").alias("v")).select(
        F.col("v")[0].cast("long").alias("n"), F.col("v")[1].cast("long").alias("at")
    )
    if expanded > 1:
        each = F.explode(F.sequence(F.lit(0), F.lit(expanded - 1)))
        record = record.select((F.col("n") * expanded).alias("n"), "at", each.alias("j"))
        record = record.select((F.col("n") + F.col("j")).alias("n"), "at")
    key = F.format_string("%012d", F.col("n") % KEYS)
    return record.groupBy(key.alias("k")).agg(F.max("at").alias("t"))


def _times_in(folder: Path) -> Times:
    """Return (key, when the record was made, when Spark's writer got the row), in microseconds."""
    found = [np.fromfile(path, ">i8") for path in folder.iterdir()]
    return np.concatenate([each[: len(each) // 3 * 3].reshape(-1, 3) for each in found]).astype(np.int64)


class _Reader(threading.Thread):
    """A client that reads all keys again and again, and notes when their values change."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.has_rows = False
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._replies = hiredis.Reader()
        self._request = pack_request("MGET", *map(_name, range(KEYS)))
        self._seen: list[list[tuple[int, int]]] = [[] for _ in range(KEYS)]  # (value, when), by key
        self._is_ending = False
        self.start()

    def run(self) -> None:
        before: list[Any] = [None] * KEYS
        while not self._is_ending:
            self._socket.sendall(self._request)
            while (values := self._replies.gets()) is False:
                self._replies.feed(self._socket.recv(1 << 16))
            now_us = time.time_ns() // 1000
            if values != before:
                for key, value in enumerate(values):
                    if value != before[key] and value is not None:
                        self._seen[key].append((int(value), now_us))
                before, self.has_rows = values, True
            time.sleep(0.001)

    def end(self) -> None:
        """Stop reading."""
        self._is_ending = True
        self.join()
        self._socket.close()

    def delays(
        self, rows: Times, began_us: int, ended_us: int
    ) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return the delays of the rows that Spark's writer got in some time; BenchmarkError without any."""
        found = []
        rows = rows[(rows[:, 2] >= began_us) & (rows[:, 2] < ended_us)]
        for key, seen in enumerate(self._seen):
            of_key = rows[rows[:, 0] == key]
            values, times = np.array(seen, np.int64).reshape(-1, 2).T
            at = np.searchsorted(values, of_key[:, 1])
            is_seen = at < len(values)
            # A row with the same value as the one before, of the same microsecond, is read before it is written.
            is_seen[is_seen] = times[at[is_seen]] >= of_key[is_seen, 2]
            of_key, read_us = of_key[is_seen], times[at[is_seen]]
            made_us, written_us = of_key[:, 1], of_key[:, 2]
            found.append(np.stack((read_us - written_us, written_us - made_us, read_us - made_us)))
        delays = np.concatenate(found, axis=1) / 1000
        if not delays.shape[1]:
            raise BenchmarkError("no row was read")
        return tuple(delays.tolist())
