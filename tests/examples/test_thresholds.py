"""The example of thresholds counts what its readings say, over a restart of its query and a new table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
TIMEOUT_S = 300

pytestmark = pytest.mark.spark


def test_thresholds_counts_the_breaches_of_both_tables_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environment = os.environ | {"PYTHONPATH": str(HERE), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, str(HERE / "examples" / "thresholds.py"), "--sensors", "2", "--readings", "300"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    monkeypatch.syspath_prepend(str(HERE / "examples"))
    import thresholds

    totals: Counter[tuple[str, str]] = Counter()
    worst: dict[str, float] = {}
    shown = re.split(r"redis-cli .*\n", done.stdout)[1:]
    assert len(shown) == 2
    for number, (limit, text) in enumerate(zip((95, 90), shown, strict=True)):
        file = tmp_path / f"{number}.json"
        thresholds._write_readings(file, 2, 300)
        for row in map(json.loads, file.read_text().splitlines()):
            if row["value"] > limit:
                totals[row["sensor"], row["hour"]] += 1
                worst[row["sensor"]] = max(worst.get(row["sensor"], 0), row["value"])
        for sensor in ("s1", "s2"):
            (line,) = re.findall(rf"^{sensor} .*", text, re.MULTILINE)
            hours = " ".join(f"{hour}:{n}" for (each, hour), n in sorted(totals.items()) if each == sensor)
            assert line == f"{sensor}  limit  {limit}  breaches by hour {hours}  worst {worst[sensor]:g}"
        assert text.rstrip().endswith(f"all breaches: {totals.total()}")
    assert totals.total() > 10
