"""A stateful processor with declared state: alerts for sensors that stay too hot, readable while the job runs.

    python examples/temperature_alert.py
    python examples/temperature_alert.py --limit 60 --minutes 20

The processor, for Spark's transformWithState, stores three variables for each sensor: the last temperature (a value),
the time since which the sensor is too hot (a struct), and the sensor's alerts (a list). A timer clears them when the
sensor has been silent for half an hour. `sparkis.queryable_processor` declares the variables. Once the query has
started, any Redis client can read them. The readings are invented: three sensors over some hours. The boiler gets too
hot, and the cellar's sensor stops sending.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import redis
from local import ROCKSDB, add_file, spark, temporary_folder
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.query import StreamingQuery

import sparkis

SENSORS = ("attic", "boiler", "cellar")
BEGIN = datetime(2026, 1, 1, 8, tzinfo=UTC)
MINUTES, MINUTES_PER_FILE = 100, 20
SILENCE = timedelta(minutes=30)


class TemperatureAlert(StatefulProcessor):
    """Raises an alert when a sensor is above the limit for some minutes; another only after it has cooled down."""

    def __init__(self, limit: float, minutes: int) -> None:
        self.limit = limit
        self.patience = timedelta(minutes=minutes)

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Create the state variables; Spark calls this in each task."""
        self.handle = handle
        self.last = handle.getValueState("lastTemp", "temperature double")
        self.hot = handle.getValueState("hot", "since timestamp, highest double, alerted boolean")
        self.alerts = handle.getListState("alerts", "time timestamp, temperature double")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Process a sensor's readings of a micro-batch; return the alerts."""
        for time, temperature in sorted((row.time.astimezone(UTC), row.temperature) for row in rows):
            self.last.update((temperature,))
            if temperature <= self.limit:
                self.hot.clear()
                continue
            since, highest, alerted = self.hot.get() or (time, temperature, False)
            if not alerted and time - since.astimezone(UTC) >= self.patience:
                alerted = True
                self.alerts.appendValue((time, temperature))
                yield Row(sensor=key[0], time=time, temperature=temperature)
            self.hot.update((since, max(highest, temperature), alerted))
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(int((time + SILENCE).timestamp() * 1000))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Delete the state of a silent sensor."""
        self.last.clear()
        self.hot.clear()
        self.alerts.clear()
        return iter(())


def alerts(readings: DataFrame, processor: StatefulProcessor) -> DataFrame:
    """Return the alerts of a stream of readings."""
    return (
        readings.withWatermark("time", "1 minute")
        .groupBy("sensor")
        .transformWithState(
            # Declares the readable variables and their names in keys. The rest of the job is the same without sparkis.
            sparkis.queryable_processor(
                processor, states={"lastTemperature": "lastTemp", "hot": "hot", "alerts": "alerts"}
            ),
            "sensor string, time timestamp, temperature double",
            outputMode="append",
            timeMode="eventTime",
        )
    )


def start_job(session: SparkSession, readings: Path, checkpoint: Path, processor: StatefulProcessor) -> StreamingQuery:
    """Start the job, which reads files of readings and prints alerts."""
    schema = "sensor string, time timestamp, temperature double"
    stream = session.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(readings))
    return (
        alerts(stream, processor)
        .writeStream.outputMode("append")
        .foreachBatch(_print_alerts)
        .queryName("temperatures")
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def _print_alerts(batch: DataFrame, batch_id: int) -> None:
    for row in batch.selectExpr("*", "date_format(time, 'HH:mm') AS at").collect():
        print(f"ALERT  {row['at']} {row.sensor} is at {row.temperature} °C", flush=True)


def main() -> None:
    """Write the files of readings one by one, and read the state after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--limit",
        type=float,
        default=50.0,
        metavar="C",
        help="a sensor above this temperature is too hot (default %(default)g)",
    )
    parser.add_argument(
        "--minutes",
        type=int,
        default=10,
        metavar="N",
        help="minutes above the limit before an alert (default %(default)d)",
    )
    options = parser.parse_args()
    processor = TemperatureAlert(options.limit, options.minutes)

    with (
        temporary_folder() as folder,
        spark("temperature alert", ROCKSDB) as session,
        sparkis.serve(session, log=folder / "log") as endpoint,
    ):
        readings = folder / "readings"
        readings.mkdir()
        query = start_job(session, readings, folder / "checkpoint", processor)
        client = redis.Redis.from_url(endpoint.url, decode_responses=True)
        print(f"the state is at {endpoint.url}; for example:")
        print(f"  redis-cli -p {endpoint.port} GET temperatures:lastTemperature:boiler")
        print(f"  redis-cli -p {endpoint.port} HGETALL temperatures:hot:boiler")
        print(f"  redis-cli -p {endpoint.port} LRANGE temperatures:alerts:boiler 0 -1")
        for minute in range(0, MINUTES, MINUTES_PER_FILE):
            _add_readings(readings, minute)
            query.processAllAvailable()
            # Only for this output: wait until the state of the last micro-batch is readable.
            sparkis.attach(query).wait()
            print(f"{BEGIN + timedelta(minutes=minute + MINUTES_PER_FILE):%H:%M}  {_state(client)}", flush=True)


def _add_readings(readings: Path, minute: int) -> None:
    """Add a file with the readings of some minutes."""
    rows = [
        {"sensor": sensor, "time": (BEGIN + timedelta(minutes=each)).isoformat(), "temperature": temperature}
        for each in range(minute, minute + MINUTES_PER_FILE)
        for sensor in SENSORS
        if (temperature := _temperature(sensor, each)) is not None
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    add_file(readings / f"{minute:03d}.json", text, modified_s=minute)


def _temperature(sensor: str, minute: int) -> float | None:
    """Return a sensor's reading after some minutes; None for a dead sensor."""
    if sensor == "boiler":
        return 20.0 + 2 * minute if minute < 40 else max(20.0, 100.0 - 2 * (minute - 40))
    if sensor == "cellar":
        return 12.0 if minute < 50 else None
    return 18.0 + minute / 8


def _state(client: redis.Redis) -> str:
    """Return each sensor's state as text, read by a Redis client."""
    cells = []
    for sensor in SENSORS:
        temperature = client.get(f"temperatures:lastTemperature:{sensor}")
        since = client.hget(f"temperatures:hot:{sensor}", "since")
        count = client.llen(f"temperatures:alerts:{sensor}")
        cell = f"{sensor} -" if temperature is None else f"{sensor} {temperature} °C"
        cell += f", too hot since {since[11:16]}" if since else ""
        cells.append(cell + (f", {count} alert" if count else ""))
    return "   ".join(cells)


if __name__ == "__main__":
    main()
