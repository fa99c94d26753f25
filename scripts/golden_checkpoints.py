"""Make the golden checkpoints of one version of Spark: `python scripts/golden_checkpoints.py FOLDER [JOB ...]`.

Run it with the Python of `scripts/spark_venv.sh`, which has that version of PySpark; sparkis is not imported. Each job
is a small stateful query. Its input is the same in every version, so the rows of its state are, too.

    FOLDER/<version>/checkpoints.tar.xz   <job>/..: the checkpoint, without Hadoop's `.crc` files and sources
    FOLDER/<version>/rows.json.xz         {job: {"states": {state: {batch: rows}}, "changes": {state: rows}}}, as
                                          Spark's own state reader shows them. A job is missing where this version has
                                          no such reader (3.5), or its reader fails; the tests then take a newer
                                          version's rows.

One archive is a fifth as large as one for each job. A second argument and those after it choose jobs by name; the
others stay as they are.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

CHECKPOINTS, ROWS = "checkpoints.tar.xz", "rows.json.xz"
PRESET = 9 | lzma.PRESET_EXTREME
VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
BATCHES = 5
# The batches as of which whole states are read.
READ_BATCHES = (1, BATCHES - 1)
SCHEMA = "ts timestamp, word string, side string, number long, price double"
WORDS = ("ant", "bee", "cat", "", "a longer word with ümlauts", "dog", "eel")

STORE = "spark.sql.streaming.stateStore."
ROCKSDB = {f"{STORE}providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"}
CHANGELOG = {**ROCKSDB, f"{STORE}rocksdb.changelogCheckpointing.enabled": "true"}
SWITCHED = (CHANGELOG, CHANGELOG, ROCKSDB, ROCKSDB, CHANGELOG)
FORMAT_2 = {**CHANGELOG, f"{STORE}checkpointFormatVersion": "2"}
SNAPSHOTS = {f"{STORE}minDeltasForSnapshot": "2"}
CHECKSUMS = {f"{STORE}rowChecksum.enabled": "true"}
AVRO = {f"{STORE}encodingFormat": "avro"}
JOIN = "spark.sql.streaming.join.stateFormatVersion"
CODEC = f"{STORE}compression.codec"
# The shortest batch of Real-Time Mode, and the length of one here: a batch is over when its time is, not its input.
REAL_TIME = {**FORMAT_2, "spark.sql.streaming.realTimeMode.minBatchDuration": "1s"}
BATCH = "2 seconds"
JVM_PROCESSOR = "RealTimeProcessor"
BATCH_TIMEOUT_S = 60.0

Query = Callable[[DataFrame], DataFrame]


def rows_of(batch: int) -> Iterator[dict[str, Any]]:
    """Yield the input of a batch: the same in every run."""
    for index in range(12):
        turn = batch * 12 + index
        minute = batch * 10 + index // 2
        yield {
            "ts": f"2024-03-01 {10 + minute // 60:02}:{minute % 60:02}:{turn * 7 % 60:02}",
            "word": None if turn % 17 == 16 else WORDS[turn * turn % 11 % len(WORDS)],
            "side": "left" if turn % 3 else "right",
            "number": turn * 37 % 23 - 5,
            "price": (turn % 13) / 4 - 1.5,
        }


def aggregation(rows: DataFrame) -> DataFrame:
    return rows.groupBy("word").agg(F.count("*").alias("n"), F.sum("price"), F.avg("number"), F.max("word"))


def types(rows: DataFrame) -> DataFrame:
    """Keys and values of many types."""
    number = F.col("number")
    keyed = rows.select(
        (number % 2 == 0).alias("even"),
        F.expr("cast(number as tinyint)").alias("b"),
        F.expr("cast(number as smallint)").alias("s"),
        F.expr("cast(number as int)").alias("i"),
        F.expr("cast(number as decimal(10, 2))").alias("small"),
        F.expr("cast(number as decimal(30, 3)) * 1000000000000 + 0.125").alias("large"),
        F.expr("cast(price as float)").alias("f"),
        F.expr("date_add(date'2024-01-01', cast(number as int))").alias("d"),
        F.expr("cast(word as binary)").alias("bytes"),
        F.expr("cast(ts as timestamp_ntz)").alias("ntz"),
        F.expr("make_dt_interval(0, 0, 0, number)").alias("dt"),
        F.expr("make_ym_interval(0, cast(number as int))").alias("ym"),
        F.expr("named_struct('w', word, 'p', array(price, null, 1.5D))").alias("nested"),
        F.expr("array(word, 'x', null)").alias("words"),
        F.expr("array(cast(number as tinyint), 1Y, 2Y)").alias("tiny"),
        F.expr("map(coalesce(word, 'none'), array(named_struct('n', number)))").alias("m"),
        "ts",
    )
    return keyed.groupBy("even", "b", "d", "small", "large", "bytes", "nested").agg(
        *(F.first(name, ignorenulls=True).alias(name) for name in ("s", "i", "f", "ts", "ntz", "words", "tiny", "m")),
        F.max("large"),
        F.max("dt"),
        F.max("ym"),
        F.min("even"),
    )


# Texts that are not UTF-8, and one that is: Latin-1, an end that is missing, a surrogate, a zero of two bytes.
NOT_UTF8 = ("E9", "FF41", "C3", "F09F98", "EDA080", "C080", "E282AC", "E28241")


def not_utf8(rows: DataFrame) -> DataFrame:
    """Texts that are not UTF-8, in keys and values, nested and not. Spark does not check them."""
    at = F.expr(f"cast(pmod(number, {len(NOT_UTF8)}) as int)")
    content = F.array(*(F.unhex(F.lit(each)) for each in NOT_UTF8))[at]
    text = F.concat(content, at.cast("string").cast("binary")).cast("string")
    keyed = rows.withColumn("text", text).withColumn(
        "place", F.struct(text.alias("city"), F.array(text).alias("parts"))
    )
    return keyed.groupBy("text", "place").agg(
        F.max("text"),
        F.first("place").alias("place"),
        F.first(F.create_map(text, text)).alias("m"),
        F.count("*"),
    )


def whole_stream(rows: DataFrame) -> DataFrame:
    return rows.groupBy().agg(F.count("*"), F.max("word"))


def windowed(rows: DataFrame) -> DataFrame:
    return (
        rows.withWatermark("ts", "5 minutes")
        .groupBy(F.window("ts", "10 minutes"), "side")
        .agg(F.count("*").alias("n"), F.sum("number"))
    )


def sessions(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("ts", "5 minutes").groupBy(F.session_window("ts", "2 minutes"), "word").count()


def deduplicated(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["word", "number"])


def deduplicated_within(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("ts", "5 minutes").dropDuplicatesWithinWatermark(["word"])


def joined(rows: DataFrame) -> DataFrame:
    marked = rows.withWatermark("ts", "15 minutes").na.fill("none", ["word"])
    left = marked.where("side = 'left'").select(F.col("word").alias("w"), F.col("ts").alias("lt"), "number")
    right = marked.where("side = 'right'").select("word", F.col("ts").alias("rt"), "price")
    within = F.expr("w = word and rt between lt - interval 20 minutes and lt + interval 20 minutes")
    return left.join(right, within, "leftOuter")


def _sums(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    if state.hasTimedOut:
        state.remove()
        return
    count, total = state.get if state.exists else (0, 0.0)
    count = int(count)  # Spark 3.5 gives a float
    for frame in frames:
        count, total = count + len(frame), total + float(frame["price"].sum())
    state.update((count, total))
    state.setTimeoutTimestamp(1_709_290_800_000 + 600_000 * (count % 3))
    yield pd.DataFrame({"word": [key[0]], "count": [count]})


def grouped(rows: DataFrame) -> DataFrame:
    keyed = rows.na.fill("none", ["word"]).withWatermark("ts", "1 minute").groupBy("word")
    return keyed.applyInPandasWithState(
        _sums, "word string, count long", "count long, total double", "update", GroupStateTimeout.EventTimeTimeout
    )


def transformed(rows: DataFrame, ttl_ms: int = 0) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

    class Machine(StatefulProcessor):
        """Writes a value, a list and a map for each word; every third row deletes or clears something."""

        def init(self, handle: StatefulProcessorHandle) -> None:
            self.handle = handle
            ttl = ttl_ms or None
            self.last = handle.getValueState("last", "number long, price double", ttl)
            self.recent = handle.getListState("recent", "number long, side string", ttl)
            self.by_side = handle.getMapState("bySide", "side string", "total double", ttl)

        def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timers: Any) -> Iterator[pd.DataFrame]:
            for frame in rows:
                for row in frame.itertuples():
                    number = int(row.number)
                    self.last.update((number, float(row.price)))
                    self.recent.appendValue((number, str(row.side)))
                    old = self.by_side.getValue((row.side,)) if self.by_side.containsKey((row.side,)) else (0.0,)
                    self.by_side.updateValue((row.side,), (float(old[0]) + float(row.price),))
                    if number == 7:
                        self.last.clear()
                    if number == 3:
                        self.recent.put([(1, "one"), (2, "two")])
                    if number == 11:
                        self.by_side.removeKey((row.side,))
                        self.recent.clear()
            if key[0] == "bee" and not timers.getCurrentWatermarkInMs() > 4_000_000_000_000:
                self.handle.registerTimer(4_000_000_000_000)
            yield pd.DataFrame({"word": [key[0]]})

        def close(self) -> None:
            pass

    Machine.__module__ = "__main__"
    keyed = rows.na.fill("none", ["word"]).withWatermark("ts", "1 minute").groupBy("word")
    mode = "ProcessingTime" if ttl_ms else "EventTime"
    return keyed.transformWithStateInPandas(Machine(), "word string", "Update", mode)


def jvm_processed(rows: DataFrame) -> DataFrame:
    """transformWithState of the JVM: Real-Time Mode has none of Python's."""
    spark = rows.sparkSession
    jvm: Any = spark._jvm
    processor: Any = getattr(jvm, JVM_PROCESSOR)
    return DataFrame(processor.of(rows._jdf), spark)


@dataclass(frozen=True)
class Job:
    """A query, its settings, and the first version of Spark that can run it."""

    name: str
    query: Query
    settings: dict[str, str] = field(default_factory=dict)
    mode: str = "update"
    since: tuple[int, int] = (3, 5)
    # The settings change the batch's files after the batch; the query waits for it.
    has_snapshots: bool = False
    # Further settings of each batch: the query is started again for it. Empty: one start for all batches.
    of_batches: tuple[dict[str, str], ...] = ()
    # The first batch with a real-time trigger; those before it have Spark's default one. None: no batch has one.
    real_time_from: int | None = None


LONG_MS = 10_000_000_000_000  # rows that expire in 300 years
JOBS = (
    Job("hdfs-aggregation", aggregation),
    Job("hdfs-types", types),
    Job("hdfs-whole-stream", whole_stream),
    Job("hdfs-window", windowed, mode="append"),
    Job("hdfs-sessions", sessions, mode="append"),
    Job("hdfs-dedupe", deduplicated),
    Job("hdfs-dedupe-within", deduplicated_within),
    Job("hdfs-join", joined, mode="append"),
    Job("hdfs-grouped", grouped),
    Job("hdfs-snapshots", aggregation, SNAPSHOTS, has_snapshots=True),
    Job("hdfs-zstd", aggregation, {CODEC: "zstd"}),
    Job("hdfs-snappy", aggregation, {CODEC: "snappy"}),
    Job("hdfs-not-utf8", not_utf8, since=(4, 3)),
    Job("hdfs-checksums", aggregation, CHECKSUMS, since=(4, 3)),
    Job("rocksdb-aggregation", aggregation, CHANGELOG),
    Job("rocksdb-types", types, CHANGELOG),
    Job("rocksdb-window", windowed, CHANGELOG, mode="append"),
    Job("rocksdb-sessions", sessions, CHANGELOG, mode="append"),
    Job("rocksdb-dedupe-within", deduplicated_within, CHANGELOG),
    Job("rocksdb-join", joined, CHANGELOG, mode="append"),
    Job("rocksdb-grouped", grouped, CHANGELOG),
    Job("rocksdb-zstd", aggregation, {**CHANGELOG, CODEC: "zstd"}),
    Job("rocksdb-snapshots", aggregation, {**CHANGELOG, **SNAPSHOTS}, has_snapshots=True),
    Job("rocksdb-no-changelog", aggregation, ROCKSDB),
    Job("rocksdb-switched", aggregation, ROCKSDB, since=(4, 3), of_batches=SWITCHED),
    Job("rocksdb-checksums", aggregation, {**CHANGELOG, **CHECKSUMS}, since=(4, 3)),
    Job("format2-aggregation", aggregation, FORMAT_2, since=(4, 0)),
    Job("format2-snapshots", aggregation, {**FORMAT_2, **SNAPSHOTS}, since=(4, 0), has_snapshots=True),
    Job("format2-join", joined, FORMAT_2, mode="append", since=(4, 0)),
    Job("join3", joined, {**CHANGELOG, JOIN: "3"}, mode="append", since=(4, 1)),
    Job("join4", joined, {**CHANGELOG, JOIN: "4"}, mode="append", since=(4, 3)),  # fails in 4.2.1
    Job("transform", transformed, CHANGELOG, since=(4, 0)),
    Job("transform-ttl", partial(transformed, ttl_ms=LONG_MS), CHANGELOG, since=(4, 0)),
    Job("transform-no-changelog", transformed, ROCKSDB, since=(4, 0)),
    Job("transform-snapshots", transformed, {**CHANGELOG, **SNAPSHOTS}, since=(4, 0), has_snapshots=True),
    Job("transform-format2", transformed, FORMAT_2, since=(4, 0)),
    Job("transform-avro", transformed, {**CHANGELOG, **AVRO}, since=(4, 3)),  # sparkis refuses it by name
    Job("transform-checksums", transformed, {**CHANGELOG, **CHECKSUMS}, since=(4, 3)),
    Job("real-time-aggregation", aggregation, REAL_TIME, since=(4, 3), real_time_from=0),
    Job("real-time-window", windowed, REAL_TIME, since=(4, 3), real_time_from=0),
    Job("real-time-dedupe", deduplicated, REAL_TIME, since=(4, 3), real_time_from=0),
    Job("real-time-switched", aggregation, REAL_TIME, since=(4, 3), real_time_from=2),
    Job("real-time-transform", jvm_processed, REAL_TIME, since=(4, 3), real_time_from=0),
)


def main(folder: str, chosen: list[str]) -> None:
    """Run the jobs, and write their checkpoints and rows."""
    target = Path(folder) / pyspark.__version__
    files, rows = _read_made(target)
    with tempfile.TemporaryDirectory() as scratch:
        spark = session(scratch)
        inputs = write_inputs(Path(scratch))
        for job in JOBS:
            if job.since > VERSION or (chosen and job.name not in chosen):
                continue
            checkpoint = Path(scratch, "checkpoints", job.name)
            try:
                run_job(spark, job, inputs, checkpoint)
                # RocksDB's background threads may still write; a copy is complete when the query has ended.
                files[job.name] = files_of(checkpoint)
                with set_in(spark, job.settings):  # the reader finds files of checkpoint format 2 by it
                    rows[job.name] = read_all(spark, checkpoint)
            except Exception:
                print(f"{job.name}: FAILED\n{traceback.format_exc()[-3000:]}", flush=True)
                continue
            print(f"{job.name}: {len(rows[job.name].get('states', {}))} states", flush=True)
        spark.stop()
    write_made(target, files, rows)


def _read_made(target: Path) -> tuple[dict[str, dict[str, bytes]], dict[str, Any]]:
    """Return the files and the rows of the jobs that an earlier run has made."""
    files: dict[str, dict[str, bytes]] = {}
    if not (target / CHECKPOINTS).exists():
        return files, {}
    with tarfile.open(target / CHECKPOINTS) as archive:
        for member in archive:
            job, _, name = member.name.partition("/")
            content = archive.extractfile(member)
            assert content is not None
            files.setdefault(job, {})[name] = content.read()
    return files, json.loads(lzma.decompress((target / ROWS).read_bytes())) if (target / ROWS).exists() else {}


def write_made(target: Path, files: dict[str, dict[str, bytes]], rows: dict[str, Any]) -> None:
    """Write all jobs, in a fixed order."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target / CHECKPOINTS, "w:xz", preset=PRESET) as archive:
        for job in sorted(files):
            for name, content in sorted(files[job].items()):
                info = tarfile.TarInfo(f"{job}/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    text = json.dumps({job: rows[job] for job in sorted(rows) if rows[job]}, ensure_ascii=False)
    if text != "{}":
        (target / ROWS).write_bytes(lzma.compress(text.encode(), preset=PRESET))


def session(scratch: str) -> SparkSession:
    """Start Spark."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # A JVM that lives for minutes gains little from the optimising compiler.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Real-Time Mode runs the tasks of all stages at the same time.
    builder = SparkSession.builder.master("local[4]").config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    builder = builder.config("spark.sql.codegen.wholeStage", "false").config(f"{STORE}maintenanceInterval", "100ms")
    builder = builder.config("spark.driver.extraJavaOptions", "-Duser.timezone=UTC")
    if VERSION >= (4, 3):
        builder = builder.config("spark.jars", compiled_processor(scratch))
    builder = builder.config("spark.sql.warehouse.dir", f"{scratch}/warehouse")
    # Without it, a batch without rows would follow, with another number of commits in each version.
    builder = builder.config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def compiled_processor(scratch: str) -> str:
    """Compile the processor of the JVM with the Scala compiler in Spark's jars; return the path of a jar."""
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java")
    jars, target = f"{Path(pyspark.__file__).parent}/jars/*", f"{scratch}/{JVM_PROCESSOR}.jar"
    source = Path(__file__).with_name(f"{JVM_PROCESSOR}.scala")
    compiler = [java, "-cp", jars, "scala.tools.nsc.Main", "-usejavacp", "-d", target, str(source)]
    subprocess.run(compiler, check=True)
    return target


def write_inputs(scratch: Path, batches: range = range(BATCHES)) -> Path:
    """Write the input of some batches, a file for each, and return the folder."""
    inputs = scratch / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        path = inputs / f"{batch}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(batch)))
        os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))
    return inputs


def run_job(spark: SparkSession, job: Job, inputs: Path, checkpoint: Path) -> None:
    """Run a job until it has read its input."""
    if job.real_time_from is not None:
        _run_in_real_time(spark, job, checkpoint)
    elif not job.of_batches:
        _run_once(spark, job, inputs, checkpoint)
    for batch, settings in enumerate(job.of_batches):
        some = write_inputs(checkpoint.parent / f"inputs-of-{job.name}", range(batch + 1))
        _run_once(spark, replace(job, settings=settings), some, checkpoint)


def _run_once(spark: SparkSession, job: Job, inputs: Path, checkpoint: Path) -> None:
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1").json(str(inputs)).coalesce(1)
    with set_in(spark, job.settings):
        writer = job.query(rows).writeStream.outputMode(job.mode)
        writer = writer.foreachBatch(_consume_slowly) if job.has_snapshots else writer.format("noop")
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination(300)
        query.stop()


@contextmanager
def set_in(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    """Set settings to the end of a block."""
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


def _run_in_real_time(spark: SparkSession, job: Job, checkpoint: Path) -> None:
    """Run a job with the input of one batch after the other, in memory: files have no Real-Time Mode."""
    jvm: Any = spark._jvm
    source = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
    stream = source.singlePartition(spark._jsparkSession, jvm.org.apache.spark.sql.Encoders.STRING())
    texts = DataFrame(stream.toDF(), spark)
    rows = texts.select(F.from_json("value", SCHEMA).alias("row")).select("row.*")
    first = job.real_time_from or 0
    with set_in(spark, job.settings):
        for trigger, batches in (("processingTime", range(first)), ("realTime", range(first, BATCHES))):
            if not batches:
                continue
            writer = job.query(rows).writeStream.outputMode(job.mode).format("console").trigger(**{trigger: BATCH})
            query = writer.option("checkpointLocation", str(checkpoint)).start()
            for batch in batches:
                stream.addData(jvm.PythonUtils.toSeq([json.dumps(row) for row in rows_of(batch)]))
                _await_commit(query, Path(checkpoint, "commits", str(batch)))
            query.stop()


def _await_commit(query: StreamingQuery, commit: Path) -> None:
    deadline = time.monotonic() + BATCH_TIMEOUT_S
    while not commit.exists():
        if query.exception() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{commit} does not come: {query.exception()}")
        time.sleep(0.01)


def _consume_slowly(frame: DataFrame, batch: int) -> None:
    frame.collect()
    time.sleep(0.5)  # maintenance writes snapshots between the batches


def read_all(spark: SparkSession, checkpoint: Path) -> dict[str, Any]:
    """Return the rows of each state of the operator, and each batch's changes, as Spark's reader shows them."""
    if VERSION < (4, 0):
        return {}
    operators = spark.read.format("state-metadata").load(str(checkpoint)).collect()
    found: dict[str, Any] = {"states": {}, "changes": {}}
    for name, options in _states(operators):
        whole = spark.read.format("statestore").options(**options)
        feed = spark.read.format("statestore").options(**options, readChangeFeed="true", changeStartBatchId="0")
        try:
            states = {batch: _rows(whole.option("batchId", batch).load(str(checkpoint))) for batch in READ_BATCHES}
            found["states"][name] = states
            found["changes"][name] = _rows(feed.load(str(checkpoint)))
        except Exception as error:
            print(f"  {checkpoint.name} {name}: {str(error)[-1500:]}", flush=True)
    return found


def _rows(read: DataFrame) -> list[Any]:
    """Return rows as JSON: objects as lists of pairs, because names of aggregates repeat; fractions as texts."""
    texts = read.drop("partition_id").select(F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("text"))
    return [json.loads(row.text, object_pairs_hook=list, parse_float=str) for row in texts.collect()]


def _states(operators: list[Any]) -> Iterator[tuple[str, dict[str, str]]]:
    stores = {row.stateStoreName for row in operators}
    properties = json.loads(operators[0].operatorProperties or "{}") if VERSION >= (4, 0) else {}
    if "stateVariables" in properties:
        for variable in properties["stateVariables"]:
            kind = variable["stateVariableType"]
            if kind in ("ValueState", "ListState", "MapState"):
                yield variable["stateName"], {"stateVarName": variable["stateName"]}
    elif operators[0].operatorName == "symmetricHashJoin":
        for side in ("left", "right"):
            store = f"{side}-keyWithIndexToValue"
            yield side, {"storeName": store} if store in stores else {"joinSide": side}
    else:
        yield "default", {}


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint that a reader needs."""
    paths = {path.relative_to(checkpoint): path for path in checkpoint.rglob("*") if path.is_file()}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in paths.items()
        if not name.name.startswith(".") and name.parts[0] != "sources"
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
