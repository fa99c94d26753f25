"""The cost of an attachment: the delay from a micro-batch to a client's read, and the slowdown of the query.

The query is a running maximum: each micro-batch changes as many keys as it has rows, a fifth of all keys. There are two
runs for each number of changes and each way to read them, both with and without the attachment in turns:

    steady      a micro-batch at a fixed interval: its duration, and the delay from the end of its last task (from
                Spark's event log) until a client that polls without a pause gets the new value of a key
    rate        micro-batches without a pause, as fast as the cores allow; with the reader alone, whose log has no
                server, and with a server and its applier; not for the comparison of snapshots, which makes pauses

The ways to read are those of `WAYS`; the slow ones are measured at 20,000 changes, and with --full at all numbers.

    whole       from the start of an attachment until the whole state of a million keys is in the log, by files and by
                Spark; the query waits for its next micro-batch meanwhile. With --full of ten million keys, too

All processes share the machine: the query, the attachment's child process or its Spark jobs and Python workers, the
applier and the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis
from benchmarks import spark as local_spark
from benchmarks.delay import EVENT_LOG, percentile_row, task_ends
from benchmarks.options import Options
from benchmarks.results import Row, compared_row
from benchmarks.servers import BenchmarkError, temporary_folder
from compat.waiting import eventually
from resp_server.net import children
from spark_hooks.attach.start import Reader
from sparkis import Attachment

STATE = "last"
KEYS_PER_CHANGE = 5
WARM_UP_BATCHES = 12
TIMEOUT_S = 120.0
BUDGET_ALONE = 0.95
# How often the ways that are compared with the default one are measured: they take long.
COMPARED_ROUNDS_MAX = 2
WHOLE_KEYS = 1_000_000
WHOLE_KEYS_FULL = 10_000_000
WHOLE_READERS: tuple[Reader, ...] = ("files", "spark")
WHOLE_TIMEOUT_S = 1_800.0
PAUSE_MS = 3_600_000
PREFIX = "spark.sql.streaming.stateStore."
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
# Ten million keys do not fit into the memory of the default provider.
ROCKSDB_WITH_CHANGE_LOG = {f"{PREFIX}providerClass": ROCKSDB, f"{PREFIX}rocksdb.changelogCheckpointing.enabled": "true"}
WITHOUT = "without the attachment"
STEPS = ("task end", "Spark's commit", "epoch", "read")

Times = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Way:
    """A way to read changes. name: that in rows; settings: those of the query.

    slower: how much longer the interval of a steady query is; there are so much fewer batches.
    """

    name: str
    reader: Reader
    is_compared: bool = True
    has_rates: bool = True
    slower: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)


FILES = Way("by files", "files", is_compared=False)
WAYS = (
    FILES,
    Way("by Spark", "spark"),
    Way(
        "by files, RocksDB without change log",
        "files",
        has_rates=False,
        slower=4,
        settings={f"{PREFIX}providerClass": ROCKSDB, f"{PREFIX}rocksdb.changelogCheckpointing.enabled": "false"},
    ),
)


@dataclass(frozen=True)
class Case:
    """A number of changes per micro-batch.

    batches      micro-batches in a steady round, with and without the attachment; interval_ms: the time between two
    turn_s       the duration of a round of the rate, with and without the attachment
    rounds_max   the maximum number of rounds, as some take long
    is_compared  whether the slow ways are measured, too
    budget_ms    the median delay from Spark's commit to a read, on an idle machine, without Spark; None: no budget
    """

    changes: int
    batches: int
    interval_ms: int
    turn_s: float
    rounds_max: int
    is_compared: bool = False
    budget_ms: float | None = None

    @property
    def job(self) -> str:
        """The name of the query and of the job."""
        return f"attached{self.changes}"


CASES = (
    Case(1_000, batches=10, interval_ms=500, turn_s=1.5, rounds_max=3),
    Case(20_000, batches=6, interval_ms=1_000, turn_s=2.5, rounds_max=5, is_compared=True, budget_ms=100.0),
    Case(200_000, batches=2, interval_ms=4_000, turn_s=12.0, rounds_max=4, budget_ms=1_000.0),
)


def run(options: Options) -> Iterator[Row]:
    """Yield the query's rate with and without the attachment, then the delay and its steps."""
    found: list[tuple[Case, Way, str, Times]] = []
    cases = [
        (case, way) for case in CASES for way in WAYS if not way.is_compared or case.is_compared or options.is_full
    ]
    with temporary_folder() as folder:
        events = folder / "events"
        events.mkdir()
        with local_spark.session(**EVENT_LOG, spark__eventLog__dir=events.as_uri()) as spark:
            for number, (case, way) in enumerate(cases):
                scene = Scene(spark, folder / f"{number}", case, way, options)
                try:
                    found.append((case, way, *scene.steady()))
                    yield scene.duration()
                    if way.has_rates:
                        yield from scene.rates()
                finally:
                    scene.close()
            for keys in (WHOLE_KEYS, WHOLE_KEYS_FULL) if options.is_full else (WHOLE_KEYS,):
                yield _whole(spark, folder / f"whole{keys}", keys, options)
        for case, way, query_id, times in found:
            yield from _delay_rows(case, way, {"task end": task_ends(events, query_id), **times})


class Scene:
    """A query, its attachment, and a server."""

    def __init__(self, spark: SparkSession, folder: Path, case: Case, way: Way, options: Options) -> None:
        self._spark = spark
        self._folder = folder
        self._case = case
        self._way = way
        self._options = options
        self._pairs: list[tuple[float, float]] = []
        folder.mkdir()
        self._log, self._store = folder / "log", folder / "store"
        self._log.mkdir()
        self._endpoint = sparkis.serve(spark, log=self._log, placement=sparkis.Driver(store=self._store))

    def close(self) -> None:
        """Stop the server; the queries have ended already."""
        self._endpoint.stop()

    def _start(self, interval_ms: int) -> StreamingQuery:
        """Start or continue the query, with micro-batches at this interval; 0: without a pause."""
        changes = self._case.changes
        rows: DataFrame = (
            self._spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", changes)
            .option("numPartitions", local_spark.CORES)
            .load()
        )
        number = F.col("value")
        # The marker is key 0, which every micro-batch changes.
        key = F.when(number % changes == 0, 0).otherwise(number % (changes * KEYS_PER_CHANGE))
        greatest = rows.groupBy(key.alias("key")).agg(F.max("value"))
        return _started(self._spark, greatest, self._case.job, self._folder, interval_ms, self._way.settings)

    def _attach(self, query: StreamingQuery, log: Path | None = None) -> Attachment:
        attachment = sparkis.attach(query, log=log or self._log, state=STATE, reader=self._way.reader)
        if not attachment.wait(timeout_s=TIMEOUT_S):
            raise BenchmarkError(f"the attachment did not reach the query's last batch within {TIMEOUT_S:g} s")
        return attachment

    def _commits(self) -> dict[int, float]:
        """Return the commit time of each batch that Spark still has, in milliseconds since 1970."""
        found = {}
        for path in (self._folder / "checkpoint" / "commits").glob("[0-9]*"):
            with suppress(FileNotFoundError):  # it was purged meanwhile
                found[int(path.name)] = path.stat().st_mtime_ns / 1e6
        return found

    def _last_batch(self, query: StreamingQuery) -> int:
        """Return the last committed batch; BenchmarkError if the query has failed."""
        failure = query.exception()
        if failure is not None:
            raise BenchmarkError(f"the query failed: {failure}")
        return max(self._commits(), default=-1)

    def steady(self) -> tuple[str, Times]:
        """Run the query at its interval; return its id, and for each step the times at which batches reached it."""
        query = self._start(self._interval_ms)
        watched: list[int] = []
        try:
            eventually(
                lambda: self._last_batch(query) >= WARM_UP_BATCHES // self._way.slower,
                awaited="the first batches",
                timeout_s=TIMEOUT_S,
                error=BenchmarkError,
            )
            self._attach(query).stop()  # creates the store that the watcher opens
            with self._watching() as watcher:
                for number in range(self._rounds):
                    self._report(f"round {number + 1}, a micro-batch each {self._interval_ms} ms")
                    detached, _ = self._durations(query)
                    with self._attach(query) as attachment:
                        attached, batches = self._durations(query)
                        attachment.wait(batches[-1], TIMEOUT_S)
                    self._pairs.append((attached, detached))
                    watched += batches
                seen, _ = watcher.communicate(timeout=30)  # it ends with its input
        finally:
            query.stop()
        read = {batch: at_ms for step, batch, at_ms in map(json.loads, seen.splitlines()) if step == "read"}
        epochs = {
            int(path.stem): path.stat().st_ctime_ns / 1e6
            for path in self._log.glob(f"{self._case.job}/*/epochs/[0-9]*.json")
        }
        commits = self._commits()
        return query.id, {
            "Spark's commit": {batch: commits[batch] for batch in watched},
            "epoch": epochs,
            "read": _first_reads(read, watched),
        }

    @contextmanager
    def _watching(self) -> Iterator[subprocess.Popen[bytes]]:
        """Poll the marker without a pause, in a separate process."""
        case = self._case
        words = [str(self._endpoint.port), str(self._store / case.job), f"{case.job}:{STATE}:0", str(case.changes)]
        watcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.watcher", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=children.environment(),
        )
        try:
            yield watcher
        finally:
            if watcher.poll() is None:
                watcher.kill()
                watcher.wait()

    def _durations(self, query: StreamingQuery) -> tuple[float, list[int]]:
        """Run some batches; return the median of their durations, in milliseconds, and their numbers."""
        first = self._last_batch(query) + 2
        count = int(self._case.batches * self._options.scale) // self._way.slower
        batches = range(first, first + max(1, count))
        found: dict[int, float] = {}

        def have_run() -> bool:
            self._last_batch(query)
            for each in query.recentProgress:
                if each.numInputRows:  # without rows, the trigger had nothing to do
                    found[each.batchId] = float(each.durationMs["triggerExecution"])
            return found.keys() >= set(batches)

        eventually(have_run, awaited="running the batches", timeout_s=TIMEOUT_S, error=BenchmarkError)
        return median(found[batch] for batch in batches), list(batches)

    def duration(self) -> Row:
        """Return the duration of a batch of the steady query, with and without the attachment."""
        case = self._case
        return compared_row(
            f"a batch of the job, {case.changes:,} changes, {self._way.name}",
            "attach",
            self._pairs,
            unit="ms",
            better="less",
            peer_name=WITHOUT,
            note=f"one each {self._interval_ms / 1e3:g} s",
        )

    @property
    def _interval_ms(self) -> int:
        return self._case.interval_ms * self._way.slower

    @property
    def _rounds(self) -> int:
        rounds_max = COMPARED_ROUNDS_MAX if self._way.is_compared else self._case.rounds_max
        return min(self._options.rounds, rounds_max)

    def _report(self, text: str) -> None:
        self._options.report(f"attach, {self._case.changes:,} changes, {self._way.name}: {text}")

    def rates(self) -> Iterator[Row]:
        """Yield the query's rows per second with and without the attachment: the reader alone, and with a server."""
        logs = {"with a server": self._log}
        if self._way.reader == "files":
            logs = {"the reader alone": self._folder / "alone"} | logs
        query = self._start(0)
        try:
            began = self._last_batch(query)
            eventually(
                lambda: self._last_batch(query) >= began + WARM_UP_BATCHES,
                awaited="running without a pause",
                timeout_s=TIMEOUT_S,
                error=BenchmarkError,
            )
            for beside, log in logs.items():
                yield self._rate(query, beside, log)
        finally:
            query.stop()

    def _rate(self, query: StreamingQuery, beside: str, log: Path) -> Row:
        pairs = []
        for number in range(self._rounds):
            self._report(f"round {number + 1}, without a pause, {beside}")
            detached = self._rows_per_s(query)
            with self._attach(query, log) as attachment:
                attached = self._rows_per_s(query)
                if not attachment.wait(timeout_s=TIMEOUT_S):
                    raise BenchmarkError("the attachment does not keep up with the query")
            pairs.append((attached, detached))
        has_budget = beside == "the reader alone" and self._case.budget_ms is not None
        return compared_row(
            f"the job's own rate, {self._case.changes:,} changes a batch, {self._way.name}, {beside}",
            "attach",
            pairs,
            unit="rows/s",
            better="more",
            budget=BUDGET_ALONE if has_budget else None,
            peer_name=WITHOUT,
        )

    def _rows_per_s(self, query: StreamingQuery) -> float:
        """Return the query's rows per second in one turn, from one commit to another."""
        first = self._last_batch(query)
        ends_s = time.monotonic() + self._case.turn_s * min(1.0, self._options.scale)
        eventually(
            lambda: time.monotonic() > ends_s and self._last_batch(query) > first,
            awaited="a turn",
            timeout_s=TIMEOUT_S,
            error=BenchmarkError,
        )
        commits = self._commits()
        last = max(commits)
        return (last - first) * self._case.changes / ((commits[last] - commits[first]) / 1e3)


def _started(
    spark: SparkSession, rows: DataFrame, job: str, folder: Path, interval_ms: int, settings: Mapping[str, str]
) -> StreamingQuery:
    """Start or continue a query with these settings of its own."""
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        return (
            rows.writeStream.outputMode("update")
            .format("noop")
            .queryName(job)
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(processingTime=f"{interval_ms} milliseconds")
            .start()
        )
    finally:
        for name in settings:
            spark.conf.unset(name)


def _whole(spark: SparkSession, folder: Path, keys: int, options: Options) -> Row:
    """Return the time until the whole state of a query is in the log, by files beside by Spark."""
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", keys).load()
    counts = rows.groupBy("value").agg(F.count("*"))
    query = _started(spark, counts, f"whole{keys}", folder, PAUSE_MS, ROCKSDB_WITH_CHANGE_LOG)
    pairs = []
    try:
        eventually(
            lambda: query.lastProgress is not None,
            awaited="running the first batch",
            timeout_s=WHOLE_TIMEOUT_S,
            error=BenchmarkError,
        )
        for number in range(min(options.rounds, COMPARED_ROUNDS_MAX)):
            seconds: dict[Reader, float] = {}
            for reader in WHOLE_READERS:
                options.report(f"attach, whole state of {keys:,} keys: round {number + 1}, reader {reader}")
                began_s = time.monotonic()
                with sparkis.attach(query, log=folder / f"{reader}{number}", reader=reader) as attachment:
                    if not attachment.wait(timeout_s=WHOLE_TIMEOUT_S):
                        raise BenchmarkError(f"the whole state was not read within {WHOLE_TIMEOUT_S:g} s")
                    seconds[reader] = time.monotonic() - began_s
            pairs.append((seconds["files"], seconds["spark"]))
    finally:
        query.stop()
    return compared_row(
        f"whole state of {keys:,} keys, RocksDB, until it is in the log",
        "attach",
        pairs,
        unit="s",
        better="less",
        peer_name="by Spark",
    )


def _first_reads(read: Mapping[int, float], batches: Sequence[int]) -> dict[int, float]:
    """Return the time at which each batch, or a later one, was first read; a reader may skip batches."""
    found: dict[int, float] = {}
    for batch in sorted(batches, reverse=True):
        later = [at_ms for number, at_ms in read.items() if number >= batch]
        if later:
            found[batch] = min(later)
    return found


def _delay_rows(case: Case, way: Way, times: Times) -> Iterator[Row]:
    batches = sorted(set.intersection(*(set(times[step]) for step in STEPS)))
    expected = len(times["Spark's commit"])
    if len(batches) < expected * 0.9:
        raise BenchmarkError(
            f"{case.changes:,} changes: only {len(batches)} of {expected} batches were seen at every step"
        )
    of = f"{case.changes:,} changes a batch, {way.name}"
    note = f"{len(batches)} batches, one each {case.interval_ms * way.slower / 1e3:g} s"
    for start, budget in (("Spark's commit", case.budget_ms if way is FILES else None), ("task end", None)):
        delays = [times["read"][batch] - times[start][batch] for batch in batches]
        yield percentile_row(f"{start} to read, {of}, p50", "attach", delays, 0.5, budget=budget, note=note)
        yield percentile_row(f"{start} to read, {of}, p99", "attach", delays, 0.99, note=note)
    for before, after in pairwise(STEPS):
        step = [times[after][batch] - times[before][batch] for batch in batches]
        yield percentile_row(f"{before} to {after}, {of}, p50", "attach", step, 0.5)
