"""The README's quick start and its second example run as they stand there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import redis
from pyspark.sql import SparkSession

from tests.spark.micro_batches import Batches

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_readmes_examples_serve_state(spark: SparkSession, batches: Callable[..., Batches], tmp_path: Path) -> None:
    quick_start, several_states = BLOCK.findall(README.read_text())
    assert len(quick_start.strip().splitlines()) <= 10
    temps = batches("sensor string, temp double")
    names = {"spark": spark, "temps": temps.df, "path": str(tmp_path)}
    exec(compile(quick_start, "README.md", "exec"), names)
    temps.add({"sensor": "sensor_1", "temp": 21.5})
    names["query"].processAllAvailable()
    routes = batches(
        "carrier string, flights int, cancelled int, meanDelay double, isCarrier boolean, origin string, dest string,"
        "date date, tailnum string, last string, isPlane boolean"
    )
    names |= {"sparkis": __import__("sparkis"), "routes": routes.df}
    exec(compile(several_states, "README.md", "exec"), names)
    routes.add(
        {"carrier": "UA", "flights": 7, "cancelled": 1, "meanDelay": 2.5, "isCarrier": True, "isPlane": True}
        | {"origin": "JFK", "dest": "LAX", "date": "2013-07-04", "tailnum": "N1", "last": "UA1"}
    )
    names["query"].processAllAvailable()
    with redis.Redis.from_url(names["endpoint"].url, decode_responses=True) as client:
        assert client.get("sensors:maxTemperature:sensor_1") == "21.5"
        assert client.hgetall("flights:golden:UA") == {"flights": "7", "cancelled": "1", "meanDelay": "2.5"}
        assert client.hgetall("flights:byDay:JFK-LAX") == {"2013-07-04": "2.5"}
        assert client.get("plane/N1") == "UA1"
    for query in spark.streams.active:
        query.stop()
    names["endpoint"].stop()
    spark.conf.unset("spark.sparkis.log")
