"""The broadcast pattern: a stream of readings is joined with a small table of limits; clients can read both.

    python examples/thresholds.py
    python examples/thresholds.py --sensors 20 --readings 5000

The table is one hash, which each call of `publish_table` replaces. Three reducing states describe the readings above
their limits: their count per sensor and hour, the highest reading of each sensor, and the total count. The query
stores no state in Spark. sparkis folds each micro-batch into the stored values exactly once, also over restarts.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import redis
from local import add_file, spark, temporary_folder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis

HOURS = 4
HIGHEST = 100


def breaches(session: SparkSession, readings: Path, limits: DataFrame) -> DataFrame:
    """Return the readings that are above their sensor's limit."""
    stream = session.readStream.schema("sensor string, hour string, value double").json(str(readings))
    return stream.join(F.broadcast(limits), "sensor").where("value > limit")


def run(session: SparkSession, folder: Path, limits: DataFrame) -> None:
    """Publish the table, and run the query on all readings in the folder."""
    sparkis.publish_table(limits, "limits", field="sensor", value="limit", job="rules")
    query = (
        sparkis.queryable(
            breaches(session, folder / "readings", limits),
            sparkis.StateDescriptor("breaches", key="sensor", field="hour", reduce="count"),
            sparkis.StateDescriptor("worst", key="sensor", value="value", reduce="max"),
            sparkis.StateDescriptor("total", key_format="alarms:total", reduce="count"),
            mode="append",
        )
        .queryName("alarms")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def print_state(client: redis.Redis, port: int, sensors: int) -> None:
    """Print the limits and the counts."""
    limits = client.hgetall("rules:limits")
    print(f"redis-cli -p {port} HGETALL rules:limits")
    for number in range(1, sensors + 1):
        sensor = f"s{number}"
        by_hour = client.hgetall(f"alarms:breaches:{sensor}")
        hours = " ".join(f"{hour}:{by_hour[hour]}" for hour in sorted(by_hour)) or "none"
        worst = client.get(f"alarms:worst:{sensor}") or "-"
        print(f"{sensor}  limit {limits[sensor]:>3}  breaches by hour {hours}  worst {worst}")
    print(f"all breaches: {client.get('alarms:total') or 0}", flush=True)


def main() -> None:
    """Count the readings above the limits; then lower the limits and count new readings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sensors", type=int, default=3, metavar="N", help="number of sensors (default %(default)d)")
    parser.add_argument(
        "--readings",
        type=int,
        default=400,
        metavar="N",
        help="number of readings in each of two rounds (default %(default)d)",
    )
    options = parser.parse_args()

    with (
        temporary_folder() as folder,
        spark("thresholds") as session,
        sparkis.serve(session, log=folder / "log") as endpoint,
    ):
        client = redis.Redis.from_url(endpoint.url, decode_responses=True)
        (folder / "readings").mkdir()
        for number, limit in enumerate((95, 90)):
            _write_readings(folder / "readings" / f"{number}.json", options.sensors, options.readings)
            limits = session.createDataFrame(
                [(f"s{each + 1}", limit) for each in range(options.sensors)], "sensor string, limit int"
            )
            run(session, folder, limits)
            print_state(client, endpoint.port, options.sensors)


def _write_readings(file: Path, sensors: int, count: int) -> None:
    """Write random readings; they are the same in every run."""
    generator = random.Random(file.name)
    rows = (
        f'{{"sensor": "s{generator.randint(1, sensors)}", "hour": "1{generator.randrange(HOURS)}", '
        f'"value": {generator.uniform(0, HIGHEST):.1f}}}\n'
        for _ in range(count)
    )
    add_file(file, "".join(rows))


if __name__ == "__main__":
    main()
