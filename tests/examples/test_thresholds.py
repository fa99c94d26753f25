"""The example of thresholds counts what its readings say, over a restart of its query and a new table."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.examples.example import ROOT, run

pytestmark = pytest.mark.spark

READINGS = 300
SENSORS = ("s1", "s2")


@pytest.mark.slow
def test_breaches_of_both_tables_are_counted_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = run("thresholds", "--sensors", str(len(SENSORS)), "--readings", str(READINGS))
    shown = iter(line for line in lines if not line.startswith("redis-cli "))
    assert len(lines) == 2 * (1 + len(SENSORS) + 1)

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import thresholds

    totals: Counter[tuple[str, str]] = Counter()
    worst: dict[str, float] = {}
    for number, limit in enumerate((95, 90)):
        file = tmp_path / f"{number}.json"
        thresholds._write_readings(file, len(SENSORS), READINGS)
        for row in map(json.loads, file.read_text().splitlines()):
            if row["value"] > limit:
                totals[row["sensor"], row["hour"]] += 1
                worst[row["sensor"]] = max(worst.get(row["sensor"], 0), row["value"])
        for sensor in SENSORS:
            hours = " ".join(f"{hour}:{n}" for (each, hour), n in sorted(totals.items()) if each == sensor)
            assert next(shown) == f"{sensor}  limit  {limit}  breaches by hour {hours}  worst {worst[sensor]:g}"
        assert next(shown) == f"all breaches: {totals.total()}"
    assert totals.total() > 10
