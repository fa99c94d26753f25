"""The README's quick start and its second example run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis
from pyspark.sql import SparkSession

from compat.waiting import eventually

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_readmes_examples_serve_state(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The JVM's folder is that of the tests, so the folder of the example is named in full.
    readme = README.read_text().replace('"quickstart/', f'"{tmp_path}/')
    quick_start, several_states = BLOCK.findall(readme)
    assert len(quick_start.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(compile(quick_start, "README.md", "exec"), names)
    [told] = capsys.readouterr().out.splitlines()
    address, command, key = told.split()[-3:]
    with redis.Redis.from_url(address, decode_responses=True) as client:
        assert 0 <= float(eventually(lambda: read(client, command, key))) <= 30
        exec(compile(several_states, "README.md", "exec"), names)
        assert int(eventually(lambda: read(client, "GET", "all:count:sensor_1"))) > 0
        assert list(read(client, "HGETALL", "all:latest:sensor_1")) == ["temp", "timestamp"]
        assert 0 < len(read(client, "LRANGE", "recent/sensor_1", "0", "-1")) <= 10
        assert 0 < client.ttl("recent/sensor_1") <= 3600
    for query in spark.streams.active:
        query.stop()
    names["endpoint"].stop()  # type: ignore[attr-defined]
    spark.conf.unset("spark.sparkis.log")


def read(client: redis.Redis, *words: str) -> object:
    """Return a reply; None while the job is being opened."""
    try:
        return client.execute_command(*words)
    except redis.BusyLoadingError:
        return None
