"""The broadcast pattern: readings are joined with a small table of thresholds, and both sides can be read.

    python examples/thresholds.py
    python examples/thresholds.py --sensors 20 --readings 5000

The thresholds are one hash, replaced as a whole with every call of `publish_table`. What breaks a limit is counted by
reducing states: per sensor and hour, the worst of each sensor, and all. The query keeps no state of its own: the
counts are in sparkis, and go on over restarts, each micro-batch counted once.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import redis
from local import folder, spark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis

HOURS = 4
HIGHEST = 100


def breaches(session: SparkSession, readings: Path, limits: DataFrame) -> DataFrame:
    """Return the readings that are above their sensor's limit."""
    stream = session.readStream.schema("sensor string, hour string, value double").json(str(readings))
    return stream.join(F.broadcast(limits), "sensor").where("value > limit")


def run(session: SparkSession, place: Path, limits: DataFrame) -> None:
    """Publish the table, and run the query on all readings that have been written."""
    sparkis.publish_table(limits, "limits", field="sensor", value="limit", job="rules")
    query = (
        sparkis.queryable(
            breaches(session, place / "readings", limits),
            sparkis.StateDescriptor("breaches", key="sensor", field="hour", reduce="count"),
            sparkis.StateDescriptor("worst", key="sensor", value="value", reduce="max"),
            sparkis.StateDescriptor("total", key_format="alarms:total", reduce="count"),
            mode="append",
        )
        .queryName("alarms")
        .option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def show(client: redis.Redis, port: int, sensors: int) -> None:
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
    parser.add_argument("--sensors", type=int, default=3, metavar="N", help="sensors (default %(default)d)")
    parser.add_argument("--readings", type=int, default=400, metavar="N", help="readings a round (default %(default)d)")
    options = parser.parse_args()

    with folder() as place, spark("thresholds") as session, sparkis.serve(session, log=place / "log") as endpoint:
        client = redis.Redis.from_url(endpoint.url, decode_responses=True)
        (place / "readings").mkdir()
        for number, limit in enumerate((95, 90)):
            _write_readings(place / "readings" / f"{number}.json", options.sensors, options.readings)
            limits = session.createDataFrame(
                [(f"s{each + 1}", limit) for each in range(options.sensors)], "sensor string, limit int"
            )
            run(session, place, limits)
            show(client, endpoint.port, options.sensors)


def _write_readings(file: Path, sensors: int, count: int) -> None:
    """Write random readings; they are the same in every run."""
    chance = random.Random(file.name)
    rows = (
        f'{{"sensor": "s{chance.randint(1, sensors)}", "hour": "1{chance.randrange(HOURS)}", '
        f'"value": {chance.uniform(0, HIGHEST):.1f}}}\n'
        for _ in range(count)
    )
    unfinished = file.with_name(f".{file.name}")
    unfinished.write_text("".join(rows))
    unfinished.rename(file)


if __name__ == "__main__":
    main()
