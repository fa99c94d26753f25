"""`sparkis demo --real-time`: the flights of each carrier, readable before their commit.

One query in Real-Time Mode adds up the flights of each day. They come from a source in the driver's memory, because
this mode reads no files. The screen shows a carrier's newest row beside its committed one.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from resp_server.net.client import Client, ErrorReplyError, is_loading
from resp_server.settings.groups import Driver
from spark_hooks.command_process import EndSignal
from spark_hooks.demo import Screen, days_of, flights_table, session, split_by_day
from spark_hooks.queryable import queryable
from spark_hooks.real_time.checks import FORMAT_SETTING, PROVIDER, PROVIDER_SETTING
from spark_hooks.serving.serve import serve
from state_backend.model.errors import SparkisError

# All tasks of the query run at the same time: one reads, one aggregates.
MASTER = "local[4]"
SETTINGS = {PROVIDER_SETTING: PROVIDER, FORMAT_SETTING: "2", "spark.sql.shuffle.partitions": "1"}
BATCH = "10 seconds"
CARRIER = "UA"
POLL_INTERVAL_S = 0.2


class FlightSource:
    """A stream of flights in the driver's memory, a day at a time.

    Args:
        days: The number of each carrier's flights, by day.
        days_per_s: The pace; 0: all days at once.
    """

    def __init__(self, spark: SparkSession, days: Sequence[Counter[str]], days_per_s: float) -> None:
        jvm: Any = spark._jvm
        source = jvm.org.apache.spark.sql.execution.streaming.sources.LowLatencyMemoryStream
        encoder = jvm.org.apache.spark.sql.Encoders.STRING()
        self._stream = source.singlePartition(spark._jsparkSession, encoder)
        self._to_seq = jvm.PythonUtils.toSeq
        self._days, self._days_per_s = days, days_per_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkis-demo-feeder", daemon=True)
        rows = DataFrame(self._stream.toDF(), spark).select(
            F.from_json("value", "carrier string, flights bigint").alias("row")
        )
        self.df = rows.select("row.*")

    def start(self) -> None:
        """Start adding flights, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop adding flights."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        started_s = time.monotonic()
        for number, day in enumerate(self._days, 1):
            rows = [json.dumps({"carrier": carrier, "flights": flights}) for carrier, flights in day.items()]
            self._stream.addData(self._to_seq(rows))
            due_s = started_s + number / self._days_per_s if self._days_per_s else 0.0
            if self._is_stopped.wait(max(0.0, due_s - time.monotonic())):
                return


def flights_by_day(flights: pa.Table) -> list[Counter[str]]:
    """Return the number of each carrier's flights, by day."""
    days = [pa.scalar(day, pa.date32()) for day in days_of(flights)]
    return [Counter(day.column("carrier").to_pylist()) for day in split_by_day(flights, days)]


def count_flights(options: argparse.Namespace, folder: Path, ended: EndSignal, screen: Screen) -> None:
    """Serve the flights of each carrier before their commit, until a signal; with `--once`, until all are readable."""
    screen.say("starting Spark ...")
    spark = session(MASTER, SETTINGS)
    ended.install()
    endpoint = serve(spark, log=options.log or folder / "log", port=options.port, placement=Driver(linger=0))
    screen.say("starting the query ...")
    days = flights_by_day(flights_table())
    source = FlightSource(spark, days, options.speed)
    counts = source.df.groupBy("carrier").agg(F.sum("flights").alias("flights"))
    writer = queryable(counts, "flights", key="carrier", value="flights", freshness="record").queryName("carriers")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    trigger: Any = {"realTime": BATCH}  # of Spark 4.3
    query = writer.trigger(**trigger).start()
    try:
        key = f"carriers:flights:{CARRIER}"
        screen.say(f"state  {endpoint.url}  for any Redis client; redis-cli -p {endpoint.port} GET {key}")
        source.start()
        with Client("127.0.0.1", endpoint.port) as newest, Client("127.0.0.1", endpoint.port) as committed:
            committed.call("STATE", "FRESHNESS", "COMMITTED")
            flights = sum(day[CARRIER] for day in days) if options.once else None
            while not ended.wait(POLL_INTERVAL_S):
                if (failed := query.exception()) is not None:
                    raise SparkisError(f"the query {query.name} failed: {failed}")
                fresh, confirmed = (_count(client, key) for client in (newest, committed))
                screen.show_line(f"{key}  {fresh:,} flights, {confirmed:,} of them committed")
                if fresh == flights:
                    screen.end_progress()
                    screen.say(f"all {flights:,} flights of {CARRIER} are readable")
                    break
    finally:
        spark.sparkContext.setLogLevel("OFF")  # interrupted tasks log errors
        source.stop()
        query.stop()
        endpoint.stop()
        spark.stop()


def _count(client: Client, key: str) -> int:
    """Return a carrier's flights; 0 while the server opens the job."""
    try:
        return int(client.call("GET", key) or 0)
    except ErrorReplyError as error:
        if is_loading(error):
            return 0
        raise
