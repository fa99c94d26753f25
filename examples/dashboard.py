"""A dashboard that reads five sensors in one request, and prints them once a second.

    python examples/dashboard.py                           starts a job with five sensors, and the dashboard
    python examples/dashboard.py --url redis://HOST:7379   starts only the dashboard, for a job that runs elsewhere
    sh examples/dashboard.sh 7379                          the same dashboard with redis-cli alone

One MGET reads all five values, so they are of one micro-batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import redis
from local import spark, temporary_folder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import sparkis

SENSORS = [f"sensor_{number}" for number in range(1, 6)]
READINGS_PER_S = 50
FIRST_READING_TIMEOUT_S = 60.0


def readings(session: SparkSession) -> DataFrame:
    """Return a stream of generated readings: each sensor's temperature goes up and down with its own period."""
    number = F.col("value") % len(SENSORS)
    swing = F.sin(F.col("value") / (100 + 40 * number)) * (3 + number)
    return (
        session.readStream.format("rate")
        .option("rowsPerSecond", READINGS_PER_S)
        .load()
        .select(
            F.concat(F.lit("sensor_"), (number + 1).cast("string")).alias("sensor"),
            F.round(20 + swing, 1).alias("temperature"),
            F.col("value").alias("number"),
        )
    )


def start_job(session: SparkSession, checkpoint: Path) -> StreamingQuery:
    """Start the job, whose state is the last reading of each sensor."""
    return (
        sparkis.queryable(
            readings(session), "temperature", key="sensor", value="temperature", order_by="number", mode="append"
        )
        .queryName("sensors")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="500 milliseconds")
        .start()
    )


def print_sensors(client: redis.Redis, rounds: int) -> None:
    """Print the sensors once a second, on a terminal always on the same line. rounds: number of prints; 0: no end."""
    keys = [f"sensors:temperature:{sensor}" for sensor in SENSORS]
    is_terminal = sys.stdout.isatty()
    printed = 0
    while not rounds or printed < rounds:
        if printed:
            time.sleep(1)
        line = "   ".join(map(_cell, SENSORS, client.mget(keys)))
        print(f"\r{line}" if is_terminal else line, end="" if is_terminal else "\n", flush=True)
        printed += 1
    if is_terminal:
        print()


def _cell(sensor: str, value: str | None) -> str:
    return f"{sensor} {'-' if value is None else value:>5}"


def _wait_for_readings(client: redis.Redis) -> None:
    """Wait until every sensor has a reading."""
    deadline = time.monotonic() + FIRST_READING_TIMEOUT_S
    keys = [f"sensors:temperature:{sensor}" for sensor in SENSORS]
    found: list[str | None] = [None]
    while None in found:
        if time.monotonic() > deadline:
            raise SystemExit(f"dashboard: not all sensors have a reading after {FIRST_READING_TIMEOUT_S:.0f} s")
        time.sleep(0.1)
        with suppress(redis.BusyLoadingError):  # the server is opening the job
            found = client.mget(keys)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job and the dashboard, or only the dashboard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the server of a job that runs elsewhere (default: start the job here)")
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="without --url: the port to serve the job's state on (default: any free port)",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="seconds to run; 0: until Ctrl-C (default 10)"
    )
    options = parser.parse_args(arguments)
    try:
        if options.url:
            print_sensors(redis.Redis.from_url(options.url, decode_responses=True), options.rounds)
            return
        with (
            temporary_folder() as folder,
            spark("sensors") as session,
            sparkis.serve(session, log=folder / "log", port=options.port) as endpoint,
        ):
            start_job(session, folder / "checkpoint")
            client = redis.Redis.from_url(endpoint.url, decode_responses=True)
            _wait_for_readings(client)
            print(f"in another terminal: sh examples/dashboard.sh {endpoint.port}", file=sys.stderr)
            print_sensors(client, options.rounds)
    except redis.ConnectionError as error:
        raise SystemExit(f"dashboard: {error}; is the job running, and is this its port?") from None
    except KeyboardInterrupt:
        print(file=sys.stderr)


if __name__ == "__main__":
    main()
