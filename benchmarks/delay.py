"""The delay from the end of a micro-batch's last task to a client's read, and its steps.

Spark's event log has the end of each task. The time of the epoch's file, and an endpoint that records announcements,
give the steps in the driver. A separate process (`watcher`) polls the store and the server. All processes run on one
machine, so they share a clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import sparkis
from benchmarks import spark as local_spark
from benchmarks.options import Options
from benchmarks.results import Row, single_row
from benchmarks.servers import BenchmarkError, temporary_folder
from compat.waiting import eventually
from resp_server.net import children
from spark_hooks.serving import endpoints

JOB, STATE = "delay", "last"
ROWS = 1_000
BATCHES = 120
# The first batches are slower, as the JVM compiles frequent code only after a while.
WARM_UP_BATCHES = 30
INTERVAL_MS = 250
TIMEOUT_S = 300.0
BUDGET_P50_MS, BUDGET_P99_MS = 50.0, 200.0
STEPS = ("task end", "committed", "noticed", "applied", "read")
EVENT_LOG = {
    "spark__eventLog__enabled": "true",
    "spark__eventLog__compress": "false",
    "spark__eventLog__rolling__enabled": "false",
}


@dataclass
class Recorder(endpoints.Endpoint):
    """Records the time at which the sink announces an epoch to servers."""

    at_ms: dict[int, float] = field(default_factory=dict)

    def announce(self, job: str, epoch: int, term: int) -> None:
        """Record the time of the first announcement."""
        self.at_ms.setdefault(epoch, time.time_ns() / 1e6)

    def wait(self, job: str, epoch: int, timeout_s: float) -> bool:
        """Never wait, as this endpoint applies nothing."""
        return True


def run(options: Options) -> Iterator[Row]:
    """Yield the delay and its steps."""
    batches = WARM_UP_BATCHES + max(2, int(BATCHES * options.scale))
    with temporary_folder() as folder:
        events = folder / "events"
        events.mkdir()
        with local_spark.session(**EVENT_LOG, spark__eventLog__dir=events.as_uri()) as spark:
            times = _times(spark, folder, batches, options)
        times["task end"] = task_ends(events)
    complete = [batch for batch in range(WARM_UP_BATCHES, batches) if all(batch in times[step] for step in STEPS)]
    if len(complete) < (batches - WARM_UP_BATCHES) * 0.9:  # a reader that polls every millisecond misses few at most
        raise BenchmarkError(f"only {len(complete)} of {batches - WARM_UP_BATCHES} batches were seen at every step")
    yield from _rows(times, complete)


def _times(spark: SparkSession, folder: Path, batches: int, options: Options) -> dict[str, Mapping[int, float]]:
    """Run the query; return for each step the times at which batches reached it."""
    log, store = folder / "log", folder / "store"
    log.mkdir()
    recorder = Recorder()
    endpoints.add(str(log), recorder)
    endpoint = sparkis.serve(spark, log=log, placement=sparkis.Driver(store=store))
    words = [str(endpoint.port), str(store / JOB), f"{JOB}:{STATE}:0", str(ROWS)]
    watcher = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.watcher", *words],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env=children.environment(),
    )
    try:
        stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2)
        rows = stream.load().selectExpr(f"value % {ROWS} AS key", "value")
        writer = sparkis.queryable(rows, STATE, key="key", value="value", mode="update")
        query = (
            writer.queryName(JOB)
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(processingTime=f"{INTERVAL_MS} milliseconds")
            .start()
        )

        def has_run() -> bool:
            failure = query.exception()
            if failure is not None:
                raise BenchmarkError(f"the query failed: {failure}")
            options.report(f"delay: batch {len(recorder.at_ms)} of {batches}")
            return len(recorder.at_ms) >= batches + 1

        eventually(has_run, awaited="running the batches", timeout_s=TIMEOUT_S + batches, error=BenchmarkError)
        query.stop()
        seen, _ = watcher.communicate(timeout=30)  # it ends with its input
    finally:
        if watcher.poll() is None:
            watcher.kill()
            watcher.wait()
        endpoints.remove(str(log), recorder)
        endpoint.stop()
    times: dict[str, dict[int, float]] = {"applied": {}, "read": {}}
    for text in seen.splitlines():
        step, batch, at_ms = json.loads(text)
        times[step][batch] = at_ms
    committed = {int(path.stem): path.stat().st_ctime_ns / 1e6 for path in log.glob(f"{JOB}/*/epochs/[0-9]*.json")}
    return {"committed": committed, "noticed": recorder.at_ms, **times}


def task_ends(events: Path, query_id: str | None = None) -> dict[int, float]:
    """Return when the last task of each batch ended, from Spark's event log; query_id: only of this query."""
    batch_of_stage: dict[int, int] = {}
    ends: dict[int, float] = {}
    for path in events.iterdir():
        for text in path.read_text().splitlines():
            event: dict[str, Any] = json.loads(text)
            if event["Event"] == "SparkListenerJobStart":
                properties = event.get("Properties", {})
                batch = properties.get("streaming.sql.batchId")
                if batch is not None and query_id in (None, properties.get("sql.streaming.queryId")):
                    batch_of_stage.update(dict.fromkeys(event["Stage IDs"], int(batch)))
            elif event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in batch_of_stage:
                batch = batch_of_stage[event["Stage ID"]]
                ends[batch] = max(ends.get(batch, 0.0), float(event["Task Info"]["Finish Time"]))
    return ends


def percentile_row(
    name: str, part: str, found: Sequence[float], share: float, *, budget: float | None = None, note: str = ""
) -> Row:
    """Make a row of a percentile of many times; for the median, with the lowest and the highest."""
    percentile = sorted(found)[max(0, ceil(share * len(found)) - 1)]  # `share` of the values are not larger
    values = [min(found), percentile, max(found)] if share == 0.5 else [percentile]
    return replace(single_row(name, part, values, unit="ms", budget=budget, note=note), rounds=1)


def _rows(times: Mapping[str, Mapping[int, float]], batches: Sequence[int]) -> Iterator[Row]:
    note = f"{len(batches)} batches of {ROWS:,} rows"
    complete = [times["read"][batch] - times["task end"][batch] for batch in batches]
    yield percentile_row("task end to read, p50", "delay", complete, 0.5, budget=BUDGET_P50_MS, note=note)
    yield percentile_row("task end to read, p99", "delay", complete, 0.99, budget=BUDGET_P99_MS, note=note)
    for before, after in pairwise(STEPS):
        step = [times[after][batch] - times[before][batch] for batch in batches]
        yield percentile_row(f"{before} to {after}, p50", "delay", step, 0.5)
        yield percentile_row(f"{before} to {after}, p99", "delay", step, 0.99)
